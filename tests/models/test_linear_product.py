"""A linear layer's product is looked up once, and anew when anything that it hangs on has changed.

Each case was a product that came out wrong in silence, or a crash, without its condition.
"""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrize

import hybrid_kv as hkv
from benchmarks.common.layer_cost import PARTS, PRODUCTS, WRAPPERS, LayerCounter
from benchmarks.common.step_cost import counted
from hybrid_kv.models import few_tokens
from hybrid_kv.models.cache_state import passing
from hybrid_kv.models.few_tokens import FewTokens
from tests.models.engine_products import engine_wins, note_products, trials_end
from tests.models.test_few_tokens import TIERED, prompt, tiny
from tests.ops.native.engines import needs_engine
from tests.tolerances import TOLERANCES

pytestmark = needs_engine
CLOSE = TOLERANCES[torch.bfloat16]


@pytest.fixture(autouse=True)
def fast_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    engine_wins(monkeypatch)


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    return note_products(monkeypatch)


def layer(outputs: int = 37, *, bias: bool = True) -> nn.Linear:
    made = nn.Linear(72, outputs, bias=bias, dtype=torch.bfloat16)
    return made.requires_grad_(False)


def inputs(*sizes: int) -> Tensor:
    return torch.randn(*(sizes or (1, 1)), 72).bfloat16()


@contextmanager
def bound(module: nn.Linear, x: Tensor) -> Iterator[FewTokens]:
    """A step in which the product of `x` is bound already."""
    few = FewTokens(module)
    with torch.no_grad(), few.served(x.numel() // x.shape[-1]):
        module(x)
        yield few


def assert_right(module: nn.Module, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    own = None if bias is None else bias.double()
    exact = functional.linear(x.double(), weight.double(), own)
    found = module(x)
    assert found.dtype == x.dtype
    torch.testing.assert_close(found.double(), exact, **CLOSE)


# Calls


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("pays", [True, False])
def test_a_bound_product_is_one_call_of_ours(
    bias: bool, pays: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(few_tokens, "measure", trials_end(5.0, 10.0 if pays else 1.0))
    module, x = layer(bias=bias), inputs()
    with bound(module, x):
        cost = counted(lambda: module(x))
    assert cost.own_calls == 1, cost.functions
    assert cost.calls <= 4, "and torch's own call of a module"


def test_a_decoder_layer_of_a_step_calls_products_once_and_no_wrapper_of_the_prompt() -> None:
    model: Any = tiny(torch.bfloat16)
    with hkv.attach(model, hkv.HybridConfig(**TIERED)) as runtime, torch.inference_mode():
        cache = runtime.cache()
        for ids in (prompt(), prompt(tokens=1)):
            model(ids, **passing(cache))
        counter = LayerCounter(model.model.layers[1])
        with counter.counting():
            model(prompt(tokens=1), **passing(cache))
    assert list(counter.parts) == list(PARTS)
    assert counter.parts[PRODUCTS].calls == 7
    assert counter.parts[WRAPPERS].all_calls == 0


# What may change between two calls


def _filled(module: nn.Linear) -> None:
    module.weight.fill_(0.5)


def _other_data(module: nn.Linear) -> None:
    module.weight.data = torch.randn_like(module.weight)


def _other_rows_of_the_same_memory(module: nn.Linear) -> None:
    module.weight.data, module.bias.data = module.weight.data[:20], module.bias.data[:20]


def _transposed_in_place(module: nn.Linear) -> None:
    module.weight.data = module.weight.data.t()


def _other_parameter(module: nn.Linear) -> None:
    module.weight = nn.Parameter(torch.randn(11, 72).bfloat16(), requires_grad=False)
    module.bias = nn.Parameter(torch.randn(11).bfloat16(), requires_grad=False)


def _no_bias(module: nn.Linear) -> None:
    module.bias = None  # type: ignore[assignment]


def _other_bias(module: nn.Linear) -> None:
    module.bias.data = torch.randn_like(module.bias)


def _one_bias_for_all(module: nn.Linear) -> None:
    module.bias.data = torch.ones(1).bfloat16()


def _strided_bias(module: nn.Linear) -> None:
    module.bias.data = torch.randn(72, 2).bfloat16()[:, 0]


def _loaded(module: nn.Linear) -> None:
    state = {name: torch.randn_like(value) for name, value in module.state_dict().items()}
    module.load_state_dict(state)


def _loaded_by_assignment(module: nn.Linear) -> None:
    state = {name: torch.randn_like(value) for name, value in module.state_dict().items()}
    module.load_state_dict(state, assign=True)


def _cast_and_back(module: nn.Linear) -> None:
    module.to(torch.float32).to(torch.bfloat16)


def _weights_of_a_column_major_matrix(module: nn.Linear) -> None:
    module.weight.data = module.weight.data.t().contiguous().t()


CHANGES = [
    *(_filled, _other_data, _other_rows_of_the_same_memory, _transposed_in_place),
    *(_other_parameter, _no_bias, _other_bias, _one_bias_for_all, _strided_bias),
    *(_loaded, _loaded_by_assignment),
    *(_cast_and_back, _weights_of_a_column_major_matrix),
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__.strip("_"))
@pytest.mark.parametrize("between", [True, False], ids=["between steps", "in a step"])
def test_a_weight_that_changes_is_the_one_that_counts(
    change: Callable[[nn.Linear], None], between: bool
) -> None:
    module, x = layer(72), inputs()
    with bound(module, x) as few:
        if not between:
            change(module)
            assert_right(module, x, module.weight, module.bias)
    if between:
        change(module)
        with torch.no_grad(), few.served(1):
            assert_right(module, x, module.weight, module.bias)


def test_fewer_rows_of_the_same_memory_are_fewer_outputs() -> None:
    module, x = layer(bias=False), inputs()
    with bound(module, x):
        module.weight.data = module.weight.data[:20]
        assert module(x).shape == (1, 1, 20)


def test_a_model_in_another_dtype_is_multiplied_in_it(products: list[list[int]]) -> None:
    module, x = layer(), inputs()
    with bound(module, x):
        for dtype, served in ((torch.float16, 1), (torch.float32, 0), (torch.float64, 0)):
            module.to(dtype)
            products.clear()
            found = module(x.to(dtype))
            assert found.dtype == dtype
            exact = functional.linear(x.to(dtype), module.weight, module.bias)
            torch.testing.assert_close(found, exact, **TOLERANCES[torch.float16])
            assert len(products) == served


def test_inputs_in_another_dtype_are_an_error_as_with_torch() -> None:
    module, x = layer(), inputs()
    with bound(module, x), pytest.raises(RuntimeError, match="dtype"):
        module(x.half())


def test_a_model_on_another_device_computes_there() -> None:
    module, x = layer(), inputs()
    with bound(module, x):
        module.to("meta")
        assert module(x.to("meta")).device.type == "meta"


class _Packed(Tensor):
    """A weight without memory of its own, as quantisers make them: says bfloat16, holds int8."""

    @staticmethod
    def __new__(cls, codes: Tensor) -> _Packed:
        return Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.bfloat16)

    def __init__(self, codes: Tensor) -> None:
        self.codes = codes

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is functional.linear:
            x, weight, bias = args
            return functional.linear(x, weight.codes.to(x.dtype), bias)
        return super().__torch_function__(func, types, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].codes)
        raise NotImplementedError(func)


def test_a_quantised_weight_multiplies_by_itself() -> None:
    """The engine read the memory that it does not have: address 0, or what stood there before."""
    module, x = layer(), inputs()
    codes = torch.randint(-9, 9, (37, 72), dtype=torch.int8)
    with bound(module, x):
        module.weight = nn.Parameter(_Packed(codes), requires_grad=False)
        assert_right(module, x, codes, module.bias)


class _Doubled(nn.Linear):
    """A layer that somebody made of a linear one, in place."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def test_a_layer_of_another_class_is_that_class_s(products: list[list[int]]) -> None:
    """Ours was put over the forward of the new class."""
    module, x = layer(), inputs()
    with bound(module, x) as few:
        pass
    module.__class__ = _Doubled  # type: ignore[assignment]
    products.clear()
    with torch.no_grad(), few.served(1):
        assert_right(module, x, 2 * module.weight, 2 * module.bias)
    assert not products


class _Negated(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return -weight


@pytest.mark.parametrize("between", [True, False], ids=["between steps", "in a step"])
def test_a_parametrised_weight_is_computed(between: bool) -> None:
    module, x = layer(), inputs()
    plain = module.weight.detach().clone()
    with bound(module, x) as few:
        if not between:
            parametrize.register_parametrization(module, "weight", _Negated())
            assert_right(module, x, -plain, module.bias)
    if between:
        parametrize.register_parametrization(module, "weight", _Negated())
        with torch.no_grad(), few.served(1):
            assert_right(module, x, -plain, module.bias)


class _Adapter(nn.Module):
    """As PEFT wraps a layer: its product, and one of low rank beside it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base
        self.down, self.up = (nn.Parameter(torch.randn(*s).bfloat16()) for s in ((3, 72), (37, 3)))

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + functional.linear(functional.linear(x, self.down), self.up)


def test_an_adapter_around_a_layer_adds_to_its_product(products: list[list[int]]) -> None:
    module, x = layer(), inputs()
    with bound(module, x):
        adapter, own = _Adapter(module), module(x)
        beside = functional.linear(functional.linear(x, adapter.down), adapter.up)
        products.clear()
        assert torch.equal(adapter(x), own + beside)
        assert products == [[1, 1, 72]]
        module.weight.data += adapter.up @ adapter.down  # merged
        assert_right(module, x, module.weight, module.bias)


# Who calls


def test_hooks_are_called_as_before() -> None:
    module, x, seen = layer(), inputs(), list[str]()
    with bound(module, x):
        plain = module(x)
        module.register_forward_pre_hook(lambda *_: seen.append("before"))
        module.register_forward_hook(lambda _module, _args, out: seen.append("after") or 2 * out)
        assert torch.equal(module(x), 2 * plain)
    assert seen == ["before", "after"]


def test_a_hook_may_bring_the_weight_for_each_call() -> None:
    module, x = layer(), inputs()
    weights = [torch.randn(37, 72).bfloat16() for _ in range(3)]
    coming = iter(weights)

    def bring(module: Any, args: Any) -> None:
        module.weight.data = next(coming)

    with bound(module, x):
        module.register_forward_pre_hook(bring)
        for weight in weights:
            assert_right(module, x, weight, module.bias)


def test_a_forward_that_somebody_sets_serves_and_stays() -> None:
    """One that was set in the middle of a step was taken away at its end."""
    module, x = layer(), inputs()
    with bound(module, x) as few:
        ours = module.forward
        module.forward = lambda x: 3 * ours(x)  # type: ignore[method-assign]
        assert_right(module, x, 3 * module.weight, 3 * module.bias)
    theirs = module.__dict__["forward"]
    assert_right(module, x, 3 * module.weight, 3 * module.bias)
    with torch.no_grad(), few.served(1):
        assert module.__dict__["forward"] is theirs
        assert_right(module, x, 3 * module.weight, 3 * module.bias)


def test_gradients_flow_where_they_are_asked_for(products: list[list[int]]) -> None:
    """The engine's product has none, and nobody said so."""
    module, x = layer().requires_grad_(True), inputs()
    with bound(module, x):
        products.clear()
        with torch.enable_grad():
            assert module(x).requires_grad
        assert not products
        module(x)
        assert products


def test_autocast_in_a_step_is_torchs(products: list[list[int]]) -> None:
    module, x = layer(), inputs()
    with bound(module, x):
        products.clear()
        with torch.autocast("cpu", torch.float16):
            assert module(x).dtype == torch.float16
        assert not products


@pytest.mark.parametrize("records", [True, False], ids=["gradients", "no gradients"])
def test_another_thread_is_not_part_of_the_step(records: bool, products: list[list[int]]) -> None:
    """It records gradients whatever the step's thread does, and has other workers."""
    module, x, found = layer().requires_grad_(True), inputs(), list[Tensor]()

    def call() -> None:
        with torch.set_grad_enabled(records):
            found.append(module(x))

    with bound(module, x):
        products.clear()
        other = threading.Thread(target=call)
        other.start()
        other.join()
        assert not products
        module(x)
        assert products
    assert found[0].requires_grad == records


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_a_copy_made_in_a_step_is_a_layer_of_its_own(copied: Callable[[Any], Any]) -> None:
    module, x = layer(), inputs()
    with bound(module, x):
        other = copied(module)
        other.weight.data = torch.randn_like(other.weight)
        assert_right(other, x, other.weight, other.bias)
        assert_right(module, x, module.weight, module.bias)
    assert_right(other, x, other.weight, other.bias)


def test_a_forward_kept_beyond_its_step_is_torchs(products: list[list[int]]) -> None:
    module, x = layer().requires_grad_(True), inputs()
    with bound(module, x):
        kept = module.forward
    products.clear()
    assert kept(x).requires_grad
    with torch.no_grad():
        kept(x)
    assert not products


# What is multiplied


@pytest.mark.parametrize("size", [(1, 1), (8, 1), (2, 4), (3,), (1, 2, 3)])
def test_inputs_of_any_shape_are_bound_apart(
    size: tuple[int, ...], products: list[list[int]]
) -> None:
    module, x = layer(), inputs()
    with bound(module, x):
        for some in (inputs(*size), x, inputs(*size)):
            assert_right(module, some, module.weight, module.bias)
    assert len(products) == 4


def test_inputs_that_the_engine_does_not_take_are_torchs(products: list[list[int]]) -> None:
    module, x = layer(), inputs()
    with bound(module, x):
        products.clear()
        for some in (inputs(9), inputs(0), inputs(2, 0)):
            assert_right(module, some, module.weight, module.bias)
        assert not products
        strided = inputs(1, 3)[:, 2:]
        turned = torch.randn(72, 4).bfloat16().t()
        for some in (strided, turned, inputs(1, 72).transpose(0, 1)[:5]) * 2:
            assert_right(module, some, module.weight, module.bias)
        assert len(products) == 6


class _Told(Tensor):
    """A class that hears of each operation; its memory is that of a plain tensor."""


def test_a_class_of_its_own_is_left_its_operations(products: list[list[int]]) -> None:
    module, x = layer(), inputs()
    with bound(module, x):
        products.clear()
        assert type(module(x.as_subclass(_Told))) is _Told
        assert not products


@pytest.mark.parametrize("name", ["weight", "bias"])
def test_so_is_the_class_of_a_parameter_that_lies_where_it_did(
    name: str, products: list[list[int]]
) -> None:
    module, x = layer(), inputs()
    with bound(module, x):
        products.clear()
        told = getattr(module, name).data.as_subclass(_Told)
        setattr(module, name, nn.Parameter(told, requires_grad=False))
        assert type(module(x)) is _Told
        assert not products


def test_inputs_on_another_device_are_an_error_as_with_torch() -> None:
    module, x = layer(), inputs()
    with bound(module, x), pytest.raises(RuntimeError, match="device"):
        module(x.to("meta"))


def test_a_graph_has_the_product_and_not_its_address() -> None:
    module, x = layer(), inputs()
    torch._dynamo.reset()
    graph = torch.compile(module, backend="eager", fullgraph=True)
    with bound(module, x):
        first = graph(x)
        module.weight.data = torch.randn_like(module.weight)
        again = graph(x)
        exact = functional.linear(x, module.weight, module.bias)
    assert not torch.equal(first, again)
    torch.testing.assert_close(again, exact, **CLOSE)
    torch._dynamo.reset()


def test_a_weight_of_another_shape_is_tried_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """There was no weight of that shape to time, which was an IndexError in the step."""
    monkeypatch.undo()
    monkeypatch.setattr(few_tokens, "_LEAST_BYTES", 0)
    monkeypatch.setattr(few_tokens, "_trials", {})
    monkeypatch.setattr(few_tokens, "_REST_S", 0.0)
    module, x = layer(), inputs()
    few = FewTokens(module)
    _other_parameter(module)
    with torch.no_grad(), few.served(1):
        assert_right(module, x, module.weight, module.bias)


def test_weights_that_have_moved_are_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    module = layer()
    few = FewTokens(module)
    module.to("meta")
    monkeypatch.setattr(few_tokens, "measure", lambda *_: pytest.fail("nothing can be read there"))
    few.try_all()
