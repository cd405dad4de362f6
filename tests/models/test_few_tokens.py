"""Linear layers of decode steps, in the engine where a trial finds it faster."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

import hybrid_kv as hkv
from hybrid_kv.models import few_tokens
from hybrid_kv.models.cache_state import passing
from hybrid_kv.models.few_tokens import FewTokens, Products, ProductTrial, measure, trial
from hybrid_kv.ops.native.linear import MAX_TOKENS
from tests.contracts.edges.calls import anatomy
from tests.models.engine_products import engine_wins, note_products, trials_end
from tests.models.folder import tokenizer
from tests.ops.native.engines import needs_engine
from tests.tolerances import TOLERANCES

NARROW = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
TIERED = {"page_size": 4, "sink_tokens": 4, "window_tokens": 8, "cold": {"top_k": "all"}}
pytestmark = needs_engine


@pytest.fixture(autouse=True)
def forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small matrices take part, and no trial of another test is known."""
    monkeypatch.setattr(few_tokens, "_LEAST_BYTES", 0)
    monkeypatch.setattr(few_tokens, "_trials", {})


@pytest.fixture
def fast_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(few_tokens, "measure", trials_end(5.0, 10.0))


@pytest.fixture
def fast_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(few_tokens, "measure", trials_end(10.0, 5.0))


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Shapes of the inputs that the engine multiplied."""
    return note_products(monkeypatch)


def tiny(dtype: torch.dtype) -> PreTrainedModel:
    """Two layers with biases, of sizes that fill no vector, none of which is computed whole:
    somebody listens to a part.
    """
    config = LlamaConfig(
        **{"vocab_size": 12, "hidden_size": 72, "intermediate_size": 100},
        **{"num_hidden_layers": 2, "num_attention_heads": 6, "num_key_value_heads": 2},
        **{"head_dim": 24, "max_position_embeddings": 256, "attention_bias": True},
        **{"pad_token_id": 0, "bos_token_id": None, "eos_token_id": None},
        tie_word_embeddings=False,
    )
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = LlamaForCausalLM(config).to(dtype).eval()
    for layer in model.model.layers:
        layer.mlp.register_forward_hook(lambda *_: None)
    return model


def prompt(rows: int = 1, tokens: int = 37) -> Tensor:
    return torch.arange(rows * tokens).reshape(rows, tokens) % 9 + 3


def step_logits(model: Any, rows: int = 1, new: int = 1) -> tuple[Tensor, Tensor]:
    """Of a step behind a prompt: through our cache, and the model's own."""
    ids = prompt(rows, 37 + new)
    with torch.no_grad():
        own = model(ids).logits[:, 37:]
        with hkv.attach(model, hkv.HybridConfig(**TIERED)) as runtime:
            cache = runtime.cache()
            model(ids[:, :37], **passing(cache))
            return model(ids[:, 37:], **passing(cache)).logits, own


@NARROW
@pytest.mark.parametrize(("rows", "new"), [(1, 1), (3, 1), (1, 5), (2, 4)])
@pytest.mark.usefixtures("fast_engine")
def test_a_step_through_the_engine_gives_the_same_logits(
    dtype: torch.dtype, rows: int, new: int, products: list[list[int]]
) -> None:
    model = tiny(dtype)
    before = anatomy(model)
    found, own = step_logits(model, rows, new)
    torch.testing.assert_close(found, own, **TOLERANCES[dtype])
    inner = [size for size in products if size[-1] in (72, 144, 100)]
    assert inner == products
    assert len(products) == 2 * 7 + 1, "every linear layer, and the head"
    assert all(size[:2] == [rows, new] for size in products)
    assert anatomy(model) == before


@pytest.mark.usefixtures("fast_engine")
def test_greedy_tokens_are_those_of_torch(products: list[list[int]]) -> None:
    model = tiny(torch.float16)
    want: Any = model.generate(prompt(), max_new_tokens=12, do_sample=False)
    with hkv.load(model, tokenizer=tokenizer(), config=hkv.HybridConfig(**TIERED)) as llm:
        assert llm.generate(prompt(), max_new_tokens=12).token_ids == want[0, 37:].tolist()
        assert len(products) == 11 * 15, "the prompt is torch's"
    products.clear()
    again: Any = model.generate(prompt(), max_new_tokens=12, do_sample=False)
    assert again.tolist() == want.tolist()
    assert not products, "it is detached"


@pytest.mark.usefixtures("fast_engine")
def test_what_somebody_puts_into_torchs_class_is_called(
    products: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before attaching, and between two steps."""
    own, calls = nn.Linear.forward, list[Any]()

    def noted(self: nn.Linear, x: Tensor) -> Tensor:
        calls.append(x.shape)
        return own(self, x)

    for is_late in (False, True):
        model = tiny(torch.bfloat16)
        if not is_late:
            monkeypatch.setattr(nn.Linear, "forward", noted)
        with torch.inference_mode(), hkv.attach(model, hkv.HybridConfig(**TIERED)) as runtime:
            cache = runtime.cache()
            model(prompt(), **passing(cache))
            if is_late:
                model(prompt()[:, :1], **passing(cache))
                assert products
                products.clear()
                monkeypatch.setattr(nn.Linear, "forward", noted)
            calls.clear()
            model(prompt()[:, :1], **passing(cache))
        assert len(calls) == 15
        assert not products
        monkeypatch.undo()
        engine_wins(monkeypatch)
        products = note_products(monkeypatch)


@pytest.mark.usefixtures("fast_torch")
def test_torch_serves_where_it_is_faster(products: list[list[int]]) -> None:
    found, own = step_logits(tiny(torch.bfloat16))
    assert not products
    torch.testing.assert_close(found, own, **TOLERANCES[torch.bfloat16])


@pytest.mark.usefixtures("fast_engine")
def test_others_calls_gradients_and_many_tokens_are_left_to_torch(
    products: list[list[int]],
) -> None:
    model: Any = tiny(torch.bfloat16).requires_grad_(False)
    with hkv.attach(model, hkv.HybridConfig(**TIERED)) as runtime:
        cache = runtime.cache()
        with torch.no_grad():
            model(prompt(), **passing(cache))
            model(prompt(tokens=1))  # a forward without our cache
            model(prompt(tokens=MAX_TOKENS + 1), **passing(cache))
        assert not products
        model(prompt(tokens=1), **passing(cache))  # gradients may be recorded
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            model(prompt(tokens=1), **passing(cache))
        assert not products
        with torch.no_grad():
            model(prompt(tokens=1), **passing(cache))
        assert products


@pytest.mark.usefixtures("fast_engine")
def test_a_failure_in_mid_step_leaves_the_model_as_it_was() -> None:
    model = tiny(torch.bfloat16)
    before, inside = anatomy(model), []

    def fail(module: nn.Module, args: Any) -> None:
        inside.append("forward" in module.__dict__)
        raise RuntimeError("the lamp went out")

    with hkv.attach(model, hkv.HybridConfig(**TIERED)) as runtime, torch.no_grad():
        cache = runtime.cache()
        model(prompt(), **passing(cache))
        hook = model.get_submodule("model.layers.1.mlp.up_proj").register_forward_pre_hook(fail)
        with pytest.raises(RuntimeError, match="lamp"):
            model(prompt(tokens=1), **passing(cache))
        hook.remove()
    assert inside == [True]
    assert anatomy(model) == before


class _Quantised(nn.Linear):
    """Stands for a packed layer: a class of its own."""


def _foreign() -> Iterator[tuple[str, nn.Linear]]:
    yield "quantised", _Quantised(8, 8, dtype=torch.bfloat16)
    yield "wide", nn.Linear(8, 8)
    yield "elsewhere", nn.Linear(8, 8, dtype=torch.bfloat16, device="meta")
    hooked = nn.Linear(8, 8, dtype=torch.bfloat16)
    hooked._hf_hook = object()  # type: ignore[assignment]
    yield "hooked", hooked
    wrapped = nn.Linear(8, 8, dtype=torch.bfloat16)
    wrapped.forward = wrapped.forward  # type: ignore[method-assign]
    yield "wrapped", wrapped


@pytest.mark.parametrize(("name", "module"), list(_foreign()))
def test_layers_that_others_work_on_stay_theirs(name: str, module: nn.Linear) -> None:
    few, before = FewTokens(module), module.__dict__.get("forward")
    with torch.no_grad(), few.served(1):
        assert module.__dict__.get("forward") is before
    assert module.__dict__.get("forward") is before


def test_small_matrices_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    module = nn.Linear(72, 100, dtype=torch.bfloat16)
    with torch.no_grad(), FewTokens(module).served(1):
        assert "forward" not in module.__dict__


def test_weights_that_were_exchanged_are_those_that_count(
    monkeypatch: pytest.MonkeyPatch, products: list[list[int]]
) -> None:
    monkeypatch.setattr(few_tokens, "measure", trials_end(5.0, 10.0))
    module = nn.Linear(72, 100, dtype=torch.bfloat16)
    few, x = FewTokens(module), torch.randn(1, 72).bfloat16()
    module.weight = nn.Parameter(torch.ones(50, 72).bfloat16())
    module.bias = None  # type: ignore[assignment]
    with torch.no_grad(), few.served(1):
        found = module(x)
    assert found.shape == (1, 50)
    torch.testing.assert_close(found, x.sum().expand(1, 50), **TOLERANCES[torch.bfloat16])
    assert products


# The trial


class Machine:
    """A clock that goes on by what a product takes, and who was timed right behind whom.

    Either way takes `behind_s` longer as long as the other's threads have not fallen asleep. The
    second and the third turn take three times as long, for something else runs.
    """

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, torch_s: float, engine_s: float, behind_s: float
    ) -> None:
        self.now, self._last, self._behind_s, self._rounds = 0.0, "", behind_s, 0
        self.rests = 0
        self.met: dict[str, set[float]] = {"torch": set(), "engine": set()}
        monkeypatch.setattr(few_tokens, "linear", self._way("engine", engine_s))
        monkeypatch.setattr(few_tokens.functional, "linear", self._way("torch", torch_s))

    def _way(self, way: str, seconds: float) -> Any:
        def multiply(x: Tensor, weight: Tensor, *_: Any, **__: Any) -> None:
            self.now += seconds * (3 if self._rounds in (2, 3) else 1)
            self.now += self._behind_s if self._last not in ("", way) else 0.0
            self._last = way
            self.met[way].add(float(weight[0, 0]))

        return multiply

    def rest(self, seconds: float) -> None:
        assert seconds >= 0.01, "OpenMP's threads spin for 9 ms"
        self._last, self._rounds, self.rests = "", self._rounds + 1, self.rests + 1

    def measure(self, weights: list[Tensor], tokens: int) -> ProductTrial:
        (found,) = measure([weights], tokens, lambda: self.now, self.rest)
        return found


@NARROW
@pytest.mark.parametrize(("torch_s", "engine_s", "pays"), [(2e-3, 1e-3, True), (1e-3, 2e-3, False)])
@pytest.mark.parametrize("matrices", [1, 2, 3])
def test_a_trial_compares_what_reads_weights_faster(
    monkeypatch: pytest.MonkeyPatch,
    dtype: torch.dtype,
    torch_s: float,
    engine_s: float,
    pays: bool,
    matrices: int,
) -> None:
    weights = [torch.ones(37, 72, dtype=dtype)] * matrices
    found = Machine(monkeypatch, torch_s, engine_s, behind_s=5e-3).measure(weights, 3)
    assert found.pays is pays
    assert found.torch_gbps / found.engine_gbps == pytest.approx(engine_s / torch_s)
    assert found.torch_gbps == pytest.approx(2e-9 * 37 * 72 / torch_s)


def test_a_gain_within_the_noise_is_none() -> None:
    assert not ProductTrial(10.0, 10.4).pays


def test_each_way_meets_each_piece_of_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else what one finds in the caches the other would have to fetch."""
    machine = Machine(monkeypatch, 1.0, 1.0, behind_s=0.0)
    machine.measure([torch.full((2, 8), float(i)).bfloat16() for i in range(4)], 1)
    assert machine.met["torch"] == machine.met["engine"] == {0.0, 1.0, 2.0, 3.0}


def test_a_shape_is_tried_once_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def noted(sets: Any, tokens: int, clock: Any) -> list[ProductTrial]:
        calls.append(tokens)
        return [ProductTrial(1, 1)] * len(sets)

    monkeypatch.setattr(few_tokens, "measure", noted)
    for tokens in (1, 1, 2, 1):
        trial(Products(torch.bfloat16, torch.Size((8, 8)), tokens), [torch.ones(8, 8).bfloat16()])
    assert calls == [1, 2]


def test_all_shapes_of_a_model_are_tried_at_its_first_product(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Most of a trial is rest, and the first token behind a prompt waited for one of each shape."""
    machine = Machine(monkeypatch, 2e-3, 1e-3, behind_s=5e-3)
    tried: list[int] = []

    def noted(sets: Any, tokens: int, clock: Any) -> list[ProductTrial]:
        tried.append(len(sets))
        return measure(sets, tokens, lambda: machine.now, machine.rest)

    monkeypatch.setattr(few_tokens, "measure", noted)
    model = tiny(torch.bfloat16)
    with torch.inference_mode(), FewTokens(model).served(1):
        model.lm_head(torch.ones(1, 72, dtype=torch.bfloat16))
    assert tried == [6]  # queries, keys and values, outputs, two of the FFN, the head
    assert machine.rests == 4


@NARROW
def test_all_trials_can_be_made_before_the_first_step(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[int] = []

    def noted(sets: Any, tokens: int, clock: Any) -> list[ProductTrial]:
        tried.append(tokens)
        return [ProductTrial(5.0, 10.0)] * len(sets)

    monkeypatch.setattr(few_tokens, "measure", noted)
    model = tiny(dtype)
    with hkv.attach(model, hkv.HybridConfig(**TIERED)) as runtime, torch.inference_mode():
        runtime.try_products()
        assert sorted(set(tried)) == list(range(1, MAX_TOKENS + 1))
        tried.clear()
        cache = runtime.cache()
        for count in (9, 1, 3):
            model(torch.ones(1, count, dtype=torch.int64), **passing(cache))
        runtime.try_products()
    assert not tried
