"""Linear layers that work in float32 while a prompt passes, on CPUs where that is faster."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hybrid_kv as hkv
from hybrid_kv.models import prompt_layers, serving
from hybrid_kv.models.cache_state import passing
from hybrid_kv.models.prompt_layers import (
    MIN_TOKENS,
    WideningTrial,
    measure,
    widened,
    widened_bytes,
)
from tests.contracts.edges.calls import anatomy
from tests.models.folder import model as tiny

NARROW = [torch.bfloat16, torch.float16]


@pytest.fixture
def slow_narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU whose 16-bit products are slow."""
    monkeypatch.setattr(prompt_layers, "trial", lambda *_: WideningTrial(10.0, 56.0))


@pytest.fixture
def fast_narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_layers, "trial", lambda *_: WideningTrial(500.0, 56.0))


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, torch.dtype]]:
    """Tokens and dtype of the products that widened weights made."""
    seen: list[tuple[int, torch.dtype]] = []
    plain = prompt_layers._forward

    def forward(weight: Tensor, bias: Tensor | None, x: Tensor) -> Tensor:
        seen.append((x.shape[1], weight.dtype))
        return plain(weight, bias, x)

    monkeypatch.setattr(prompt_layers, "_forward", forward)
    return seen


def prompt(tokens: int, rows: int = 1) -> Tensor:
    return torch.arange(rows * tokens).reshape(rows, tokens) % 9 + 3


def logits(model: Any, ids: Tensor, chunk: int = 37) -> Tensor:
    config = hkv.HybridConfig(method="full", prefill_chunk_tokens=chunk)
    with hkv.attach(model, config) as runtime, torch.no_grad():
        return model(ids, **passing(runtime.cache())).logits  # type: ignore[no-any-return]


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize(("tokens", "chunk"), [(150, 37), (71, 256)])
@pytest.mark.usefixtures("slow_narrow")
def test_a_prompt_in_wide_layers_gives_the_same_logits(
    dtype: torch.dtype, tokens: int, chunk: int, products: list[tuple[int, torch.dtype]]
) -> None:
    model = tiny(dtype)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    found = logits(model, prompt(tokens), chunk)
    assert {wide for _, wide in products} == {torch.float32}
    chunks = -(-tokens // chunk)
    assert len(products) == 2 * 7 * chunks
    with torch.no_grad():
        own, exact = model(prompt(tokens)).logits, tiny()(prompt(tokens)).logits
    spread = {"rtol": 0, "atol": 2 * float((own - exact).abs().max())}  # of the narrow model itself
    torch.testing.assert_close(found.float(), exact, **spread)
    torch.testing.assert_close(found, own, **spread)
    after = model.state_dict()
    assert all(torch.equal(after[name], weight) for name, weight in before.items())


@pytest.mark.usefixtures("slow_narrow")
def test_a_layer_is_widened_once_for_all_its_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks: list[int] = []
    monkeypatch.setattr(
        "hybrid_kv.models.layer_major.widened",
        lambda module, tokens: blocks.append(tokens) or widened(module, tokens),
    )
    model = tiny(torch.bfloat16)
    logits(model, prompt(150))
    assert blocks == [150] * 3  # two layers and the norm behind them, not once for each chunk


@pytest.mark.usefixtures("fast_narrow")
def test_nothing_is_widened_where_it_does_not_pay(
    products: list[tuple[int, torch.dtype]],
) -> None:
    model = tiny(torch.bfloat16)
    logits(model, prompt(150))
    assert not products
    assert widened_bytes(model, 150) == 0


@pytest.mark.usefixtures("slow_narrow")
def test_what_somebody_puts_into_torchs_class_is_called(
    products: list[tuple[int, torch.dtype]], monkeypatch: pytest.MonkeyPatch
) -> None:
    own, calls = nn.Linear.forward, list[int]()

    def noted(self: nn.Linear, x: Tensor) -> Tensor:
        calls.append(x.shape[1])
        return own(self, x)

    monkeypatch.setattr(nn.Linear, "forward", noted)
    logits(tiny(torch.bfloat16), prompt(150), 256)
    assert calls.count(150) == 2 * 7 + 1
    assert not products


@pytest.mark.usefixtures("slow_narrow")
def test_decoding_and_short_prompts_are_left_alone(
    products: list[tuple[int, torch.dtype]],
) -> None:
    with hkv.load(tiny(torch.bfloat16), config=hkv.HybridConfig(method="full")) as llm:
        llm.generate(prompt(MIN_TOKENS - 1), max_new_tokens=5)
        assert not products
        llm.generate(prompt(MIN_TOKENS), max_new_tokens=5)
        assert {tokens for tokens, _ in products} == {MIN_TOKENS, 1}
        *_, last = products  # the last layer's feed-forward, of the row that is asked for
        assert last[0] == 1


@pytest.mark.usefixtures("slow_narrow")
def test_a_failure_in_mid_layer_leaves_the_model_as_it_was() -> None:
    model = tiny(torch.bfloat16)
    before = anatomy(model)
    widths: list[bool] = []

    def fail(module: nn.Module, args: Any) -> None:
        widths.append("forward" in module.__dict__)
        raise RuntimeError("the lamp went out")

    hook = model.get_submodule("model.layers.1.mlp.up_proj").register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="lamp"):
        logits(model, prompt(150))
    hook.remove()
    assert widths == [True]
    assert anatomy(model) == before


@pytest.mark.usefixtures("slow_narrow")
def test_memory_that_lacks_while_a_layer_is_widened_leaves_it_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layer, calls = (
        nn.Sequential(*(nn.Linear(8, 8, dtype=torch.bfloat16) for _ in range(3))),
        count(),
    )
    plain = Tensor.float

    def scarce(tensor: Tensor) -> Tensor:
        if next(calls) == 3:
            raise MemoryError
        return plain(tensor)

    monkeypatch.setattr(Tensor, "float", scarce)
    with pytest.raises(MemoryError), widened(layer, 99):
        pass
    assert not any("forward" in module.__dict__ for module in layer)


class _Packed(nn.Linear):
    """Stands for a quantised layer: a class of its own."""


def _foreign() -> Iterator[tuple[str, nn.Module]]:
    def linear(**settings: Any) -> nn.Linear:
        return nn.Linear(8, 8, **{"dtype": torch.bfloat16, **settings})

    yield "packed", _Packed(8, 8, dtype=torch.bfloat16)
    yield "wide", linear(dtype=torch.float32)
    yield "elsewhere", linear(device="meta")
    hooked = linear()
    hooked._hf_hook = object()  # type: ignore[assignment]
    yield "hooked", hooked
    wrapped = linear()
    wrapped.forward = wrapped.forward  # type: ignore[method-assign]
    yield "wrapped", wrapped


@pytest.mark.parametrize(("name", "module"), list(_foreign()))
@pytest.mark.usefixtures("slow_narrow")
def test_layers_that_others_work_on_are_left_alone(name: str, module: nn.Module) -> None:
    before = module.__dict__.get("forward")
    assert widened_bytes(module, 99) == 0
    with widened(module, 99):
        assert module.__dict__.get("forward") is before
    assert module.__dict__.get("forward") is before


@pytest.mark.usefixtures("slow_narrow")
def test_one_wide_layer_is_counted_before_a_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny(torch.bfloat16)
    layer = model.get_submodule("model.layers.0")
    weights = sum(m.weight.numel() for m in layer.modules() if isinstance(m, nn.Linear))
    assert widened_bytes(layer, 99) == 4 * weights
    asked: list[int] = []
    monkeypatch.setattr(serving, "check_host_memory", lambda needed, tokens: asked.append(needed))
    logits(model, prompt(MIN_TOKENS))
    logits(model, prompt(MIN_TOKENS - 1))
    kv = 2 * 2 * 2 * 24 * 2  # K and V, layers, heads, channels, bytes
    assert asked == [MIN_TOKENS * kv + 4 * weights, (MIN_TOKENS - 1) * kv]


# The trial


class Clock:
    """A clock that goes on by the seconds of one product after the other, as they are timed."""

    def __init__(self, *seconds: float) -> None:
        self._now, self._left = 0.0, list(seconds)
        self._timing = False

    def __call__(self) -> float:
        if self._timing:
            self._now += self._left.pop(0)
        self._timing = not self._timing
        return self._now

    @property
    def is_done(self) -> bool:
        """Whether all was timed that was expected."""
        return not self._left


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize(
    ("own", "wide", "pays"),
    [(1.2e-3, 1e-3, True), (1.09e-3, 1e-3, False), (1e-3, 1.2e-3, False)],
)
def test_a_trial_compares_both_ways_in_turn(
    dtype: torch.dtype, own: float, wide: float, pays: bool
) -> None:
    # The first round, which sets things up, would say the contrary.
    clock = Clock(wide, own, own, 2 * wide, 2 * own, wide)
    found = measure(dtype, 128, clock)
    assert found.pays is pays
    assert found.own_gflops / found.widened_gflops == pytest.approx(wide / own)
    assert clock.is_done


@pytest.mark.parametrize(("own", "wide", "pays"), [(9e-2, 2e-2, True), (2e-2, 9e-2, False)])
def test_what_is_clear_is_not_tried_again(own: float, wide: float, pays: bool) -> None:
    clock = Clock(own, wide)
    assert measure(torch.bfloat16, 128, clock).pays is pays
    assert clock.is_done


@pytest.mark.parametrize(
    ("tokens", "tried"),
    [(64, 64), (127, 64), (128, 128), (1023, 512), (1024, 1024), (99_999, 1024)],
)
def test_a_trial_is_made_with_about_the_tokens_that_come(
    tokens: int, tried: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(prompt_layers, "_trials", {})
    monkeypatch.setattr(
        prompt_layers, "measure", lambda _, n, clock: asked.append(n) or WideningTrial(1.0, 9.0)
    )
    layer = nn.Sequential(*(nn.Linear(8, 8, dtype=torch.bfloat16) for _ in range(3)))
    with widened(layer, tokens):
        assert all("forward" in module.__dict__ for module in layer)
    assert asked == [tried]


def test_widening_may_pay_for_long_prompts_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_layers, "_trials", {})
    monkeypatch.setattr(
        prompt_layers,
        "measure",
        lambda _, n, clock: WideningTrial(80.0, 60.0 if n < 256 else 140.0),
    )
    layer = nn.Linear(8, 8, dtype=torch.bfloat16)
    assert [widened_bytes(layer, n) for n in (64, 255, 256, 5000)] == [0, 0, 256, 256]


def test_a_process_tries_once_for_a_dtype_a_size_and_a_number_of_threads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[tuple[torch.dtype, int]] = []
    monkeypatch.setattr(prompt_layers, "_trials", {})
    monkeypatch.setattr(
        prompt_layers,
        "measure",
        lambda dtype, n, _: calls.append((dtype, n)) or WideningTrial(1.0, 1.0),
    )
    threads = [1]
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads[0])
    for tokens in (70, 100, 128, 100):
        prompt_layers.trial(torch.bfloat16, tokens)
    threads[0] = 2
    prompt_layers.trial(torch.bfloat16, 100)
    prompt_layers.trial(torch.float16, 100)
    bf16, f16 = torch.bfloat16, torch.float16
    assert calls == [(bf16, 64), (bf16, 128), (bf16, 64), (f16, 64)]
