"""Every architecture, way of calling `generate` and method: at full budget nothing changes.

The reference is the same call with eager attention and transformers' own DynamicCache: the tokens
must be identical and the logits behind them equal up to rounding. A method enters by being
registered, and says by `Method.full_budget` how it is opened. Samples of kinds that are not among
them, or not in this form, are those of tests/runtime/keeping.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from itertools import product
from typing import Any, NamedTuple

import pytest
import torch
from pydantic import BaseModel
from torch import Tensor
from transformers import (
    Cache,
    DynamicCache,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
)

import hybrid_kv as hkv
from hybrid_kv.models.cache_state import passing
from hybrid_kv.plugins import METHODS
from tests.contracts.architectures import (
    ARCHITECTURES,
    PAD,
    VOCAB,
    build,
    build_on_host,
    strict_torch,
)
from tests.kit import every
from tests.pairs import WHOLE, in_pairs
from tests.runtime.keeping import KeepsHalves, KeepsHeaviest

PROMPT = 27
NEW = 4  # a page leaves the window at the second that is stored, and a step follows
PAGE = 4
LONGEST = 112  # tokens of the longest context that a call reaches, rounded up

ROUNDING = 5e-4  # of logits, whose standard deviation is about 3


class Output(NamedTuple):
    """Tokens of each row after the last turn, and the logits of each step."""

    tokens: list[list[int]]
    logits: tuple[Tensor, ...]


@dataclass(frozen=True)
class Call:
    """One way of calling `generate`.

    prompts: lengths of the rows of the first turn; shorter rows are padded on the left.
    later: tokens that the user adds in each later turn, on the same cache.
    vocab: prompt tokens are drawn below it.
    seed: of them; outputs vary and do not hang on rounding, as tests below prove.
    settings: passed to `generate`.
    """

    prompts: tuple[int, ...] = (PROMPT,)
    later: tuple[int, ...] = ()
    vocab: int = VOCAB
    new_tokens: int = NEW
    seed: int = 0
    settings: Mapping[str, object] = field(default_factory=dict)


FEW = 20  # with so few tokens to choose from, some guesses from the prompt are right

CALLS = {
    "greedy": Call(),
    "sampling": Call(settings={"do_sample": True, "temperature": 0.9, "top_k": 40}),
    "beam_search": Call(settings={"num_beams": 3}),
    "several_samples": Call(settings={"do_sample": True, "num_return_sequences": 2}),
    "left_padded": Call(prompts=(PROMPT, 22, 5), seed=3),
    "chunked_prefill": Call(settings={"prefill_chunk_size": 7}),
    "prompt_lookup": Call(
        vocab=FEW,
        new_tokens=3 * NEW,
        seed=20,
        settings={"prompt_lookup_num_tokens": 3, "suppress_tokens": list(range(FEW, VOCAB))},
    ),
    "later_turns": Call(later=(5, 36), new_tokens=3),
}


def generate(
    model: PreTrainedModel, call: str, cache: Cache, check: Callable[[], object], **extra: object
) -> Output:
    """Plays all turns of `call` where the model is; `check` is called after every turn."""
    spec = CALLS[call]
    draw = torch.Generator().manual_seed(spec.seed)
    width = max(spec.prompts)
    ids = torch.randint(PAD + 1, spec.vocab, (len(spec.prompts), width), generator=draw)
    mask = torch.stack([torch.arange(width) >= width - length for length in spec.prompts]).long()
    ids = torch.where(mask.bool(), ids, PAD)
    logits: list[Tensor] = []
    torch.manual_seed(0)
    for turn in (0, *spec.later):
        more = torch.randint(PAD + 1, spec.vocab, (ids.shape[0], turn), generator=draw)
        ids = torch.cat([ids, more], dim=1)
        output = model.generate(
            input_ids=ids.to(model.device),
            attention_mask=_grown(mask, ids).to(model.device),
            **passing(cache),
            max_new_tokens=spec.new_tokens,
            return_dict_in_generate=True,
            output_logits=True,
            **{"do_sample": False, **spec.settings, **extra},
        )
        check()
        ids = output.sequences.cpu()
        logits.extend(one.cpu() for one in output.logits)
    return Output(ids.tolist(), tuple(logits))


def _grown(mask: Tensor, ids: Tensor) -> Tensor:
    return torch.nn.functional.pad(mask, (0, ids.shape[1] - mask.shape[1]), value=1)


@cache
def reference(architecture: str, call: str) -> Output:
    model = build_on_host(architecture)
    return generate(model, call, DynamicCache(config=model.config), check=lambda: None)


def _parameters(params: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name, info in params.model_fields.items():
        yield prefix + name
        if isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel):
            yield from _parameters(info.annotation, f"{prefix}{name}.")


def _parameters_of(method: str) -> set[str]:
    return set(_parameters(METHODS[method].params))


def _with(method: str, **sizes: object) -> dict[str, Any]:
    """Settings of a method: those of `sizes` that it has."""
    names = {path.split(".")[-1]: path for path in _parameters(METHODS[method].params)}
    own = {names[name]: size for name, size in sizes.items() if name in names}
    return {"method": method, "page_size": PAGE, **own}


def variants(method: str) -> dict[str, dict[str, Any]]:
    """Ways of attending everything: all of it resident, or most of it wherever else the method has
    it.
    """
    sizes: dict[str, object] = {"sink_tokens": PAGE, "window_tokens": 2 * PAGE, "dense_layers": 0}
    sizes |= {"top_k": 1, "selection_layers": [0]}  # what is to be opened is not open by itself
    tiered = {**_with(method, **sizes, spare_tokens=2 * PAGE), "prefill_chunk_tokens": 14}
    whole = -(-LONGEST // PAGE) * PAGE
    found = {"tiered": tiered, "resident": _with(method, sink_tokens=0, window_tokens=whole)}
    if "spare_tokens" in {path.split(".")[-1] for path in _parameters(METHODS[method].params)}:
        found["selected"] = {**tiered, "cold.select": "device"}
    return found


def copies(method: str) -> dict[str, dict[str, Any]]:
    """Ways of attending everything for a method that keeps entries of its own: all of them, or
    copies of some while a cold tier has everything.
    """
    # No sinks, so that the budget below holds more than sinks and window.
    common = {**_with(method, sink_tokens=0), "window_tokens": 2 * PAGE}
    common["prefill_chunk_tokens"] = 14
    few = {"budget_tokens": 3 * PAGE} if "budget_tokens" in _parameters_of(method) else {}
    return {"kept": common, "copied": {**common, **few, "demote": "offload"}}


EVICTING = [method for method in METHODS if "demote" in _parameters_of(method)]


def variants_of(method: str) -> dict[str, dict[str, Any]]:
    return (copies if method in EVICTING else variants)(method)


KINDS = ["llama", "mistral", "gemma2", "gpt_oss"]  # plain, windows, a softcap, sinks of the model


def kinds(method: str) -> list[str]:
    """Architectures for a method that keeps entries: two of the four kinds, others for the next."""
    first = EVICTING.index(method) % 2
    return KINDS[first::2]


FIRST = ("full", "streaming_llm", "quest", "flat", "retrieval_attention", "hybrid")


def architectures(method: str) -> list[str]:
    return kinds(method) if method in EVICTING else list(ARCHITECTURES)


def is_met(architecture: str, call: str, turn: int, one_in: int = 6) -> bool:
    """Whether this turn meets a pair: each one of some, and as many turns together all of them."""
    place = list(ARCHITECTURES).index(architecture) + list(CALLS).index(call) + turn
    return WHOLE or place % one_in == 0


def calls(method: str, variant: str, architecture: str) -> list[str]:
    """Those in which a variant of a method is tried there: with any two of method, variant,
    architecture and call in one test. More of FIRST, which meet all pairs of the last two together.
    """
    every = list(CALLS)
    if method in FIRST:
        turn = FIRST.index(method) + (variant == "tiered")
        one_in = 12 if variant == "resident" else 6
        return [call for call in every if is_met(architecture, call, turn, one_in)]
    if WHOLE:
        return every
    place = list(METHODS).index(method)
    if method in EVICTING:  # two calls, of which no other one of its four cells has any
        place += 2 * kinds(method).index(architecture) + 4 * (variant == "copied")
        return [every[(place + further) % len(every)] for further in range(2)]
    place += list(ARCHITECTURES).index(architecture)
    kept = variant == ("resident" if place % 5 == 0 else "tiered")
    return [every[place % len(every)]] if kept else []


class Cell(NamedTuple):
    """A test of the matrix."""

    method: str
    variant: str
    architecture: str
    call: str
    settings: dict[str, Any]


CELLS = [
    Cell(method, variant, architecture, call, settings)
    for method in METHODS
    for variant, settings in variants_of(method).items()
    for architecture in architectures(method)
    for call in calls(method, variant, architecture)
]
OF_THE_MATRIX = pytest.mark.host("nothing is computed")
OF_THE_HOST = pytest.mark.host("the reference is computed on the host")
SMALL = {"page_size": PAGE, "sink_tokens": PAGE, "window_tokens": 2 * PAGE}
SAMPLES = {
    "evicts": (KeepsHeaviest, {}),
    "evicts_to_the_host": (KeepsHeaviest, {"offload": True, "budget": 3}),
    "evicts_and_finds": (KeepsHeaviest, {"offload": True, "budget": 3, "top_k": 1000}),
    "encodes": (KeepsHalves, {}),
}


@pytest.mark.usefixtures("own_plugins")
@pytest.mark.parametrize(
    ("sample", "call", "architecture"),
    [
        (sample, call, architecture)
        for turn, sample in enumerate(SAMPLES)
        for call in CALLS
        for architecture in ARCHITECTURES
        if is_met(architecture, call, turn, one_in=len(CALLS))
    ],
)
def test_methods_that_keep_entries_equal_eager_attention(
    architecture: str, call: str, sample: str
) -> None:
    kind, further = SAMPLES[sample]
    METHODS.register("sample")(kind)
    expected = reference(architecture, call)
    model = build(architecture)
    config = hkv.HybridConfig(method="sample", **SMALL, **further)
    if not further:
        config = config.opened()
    with hkv.attach(model, config) as runtime:
        cache = runtime.cache()
        found = generate(model, call, cache, check=cache.check_integrity)
        rows = every(cache)  # none where every layer slides
        assert not rows or any(row.gone for row in rows)
    assert_equal(found, expected)


@pytest.fixture(autouse=True)
def _strict() -> Iterator[None]:
    with strict_torch():
        yield


def assert_equal(found: Output, expected: Output) -> None:
    assert found.tokens == expected.tokens
    for step, (logits, exact) in enumerate(zip(found.logits, expected.logits, strict=True)):
        torch.testing.assert_close(
            logits, exact, rtol=0, atol=ROUNDING, msg=lambda text, at=step: f"step {at}: {text}"
        )


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: "-".join(cell[:4]))
def test_tokens_and_logits_equal_those_of_eager_attention(cell: Cell) -> None:
    expected = reference(cell.architecture, cell.call)
    model = build(cell.architecture)
    config = hkv.HybridConfig.from_settings(cell.settings).opened()
    with hkv.attach(model, config) as runtime:
        cache = runtime.cache()
        found = generate(model, cell.call, cache, check=cache.check_integrity)
    assert_equal(found, expected)


@OF_THE_MATRIX
@pytest.mark.parametrize("method", list(METHODS))
def test_every_method_meets_every_call_and_every_architecture_of_its_own(method: str) -> None:
    cells = [cell for cell in CELLS if cell.method == method]
    assert {cell.call for cell in cells} == set(CALLS)
    assert {cell.architecture for cell in cells} == set(architectures(method))
    assert {cell.variant for cell in cells} == set(variants_of(method))
    if method in FIRST:
        met = {(cell.architecture, cell.call) for cell in cells}
        assert len(met) >= len(ARCHITECTURES) * len(CALLS) * 0.2


@OF_THE_MATRIX
def test_every_call_of_every_architecture_is_tested_with_methods_of_each_family() -> None:
    """Evicting methods on their four kinds; FIRST, and the others, on all."""
    for family, names in (
        (set(EVICTING), KINDS),
        (set(FIRST), ARCHITECTURES),
        (set(METHODS) - {*EVICTING, *FIRST}, ARCHITECTURES),
    ):
        cells = [cell for cell in CELLS if cell.method in family]
        met = {(cell.architecture, cell.call) for cell in cells}
        assert met == {(name, call) for name in names for call in CALLS}
        ways = {cell.variant for cell in cells} - {"selected"}  # of one method
        assert {(cell.variant, cell.call) for cell in cells} >= set(product(ways, CALLS))
        assert {(cell.variant, cell.architecture) for cell in cells} >= set(product(ways, names))


@pytest.mark.host("the engine makes a step of a CPU alone")
@pytest.mark.parametrize(
    ("method", "architecture", "call", "way"),
    in_pairs(
        ["full", "quest", "streaming_llm", "hybrid"],
        ["llama", "gemma2"],
        ["greedy", "later_turns"],
        ["one call", "op by op"],
    ),
    indirect=["way"],
)
def test_both_ways_of_making_a_step_equal_eager_attention(
    architecture: str, call: str, method: str, way: str
) -> None:
    """All that is resident: with a cold tier that is attended wholly a step is made op by op."""
    settings = variants(method)["resident"]
    model = build(architecture)
    with hkv.attach(model, hkv.HybridConfig.from_settings(settings).opened()) as runtime:
        cache = runtime.cache()
        found = generate(model, call, cache, check=cache.check_integrity)
        assert (cache.kv.ops.served["plan_step"] == "native") == (way == "one call")
    assert_equal(found, reference(architecture, call))


ADAPTIVE = [
    method
    for method in METHODS
    if "cold.min_share" in _parameters(METHODS[method].params) and method not in EVICTING
]
BY_PAGES = {"cold.index.kind": "pages", "cold.index.page_size": PAGE, "cold.estimate": "none"}


OPENING: dict[str, tuple[str, dict[str, Any]]] = {
    **{method: (method, {}) for method in ADAPTIVE},
    "by_pages": ("retrieval_attention", BY_PAGES),
}


@pytest.mark.parametrize(
    ("method", "further", "call", "architecture"),
    [
        pytest.param(*own, call, architecture, id=f"{name}-{call}-{architecture}")
        for turn, (name, own) in enumerate(OPENING.items())
        for call in CALLS
        for architecture in list(ARCHITECTURES)[:2]
        if is_met(architecture, call, turn, one_in=2)
    ],
)
def test_a_share_that_nothing_misses_attends_everything(
    architecture: str, call: str, method: str, further: dict[str, Any]
) -> None:
    """The search starts with one entry and has to widen until it has found them all."""
    settings = {
        "method": method,
        "page_size": PAGE,
        "sink_tokens": PAGE,
        "window_tokens": 2 * PAGE,
        "cold.top_k": 1,
        "cold.max_tokens": LONGEST,
        "cold.min_share": 0.0,
        **further,
    }
    model = build(architecture)
    with hkv.attach(model, hkv.HybridConfig.from_settings(settings)) as runtime:
        cache = runtime.cache()
        found = generate(model, call, cache, check=cache.check_integrity)
        assert cache.work.attended == cache.work.visible
        assert cache.work.scored > 0
    assert_equal(found, reference(architecture, call))


@pytest.mark.parametrize("architecture", [name for name in ARCHITECTURES if name != "mistral"])
@pytest.mark.parametrize("call", CALLS)
def test_the_matrix_notices_lost_tokens(architecture: str, call: str) -> None:
    model = build(architecture)
    lossy = hkv.HybridConfig(
        method="streaming_llm", page_size=PAGE, sink_tokens=PAGE, window_tokens=2 * PAGE
    )
    with hkv.attach(model, lossy) as runtime:
        cache = runtime.cache()
        found = generate(model, call, cache, check=cache.check_integrity)
    with pytest.raises(AssertionError):
        assert_equal(found, reference(architecture, call))


class _Noise(LogitsProcessor):
    """More than rounding does to scores, far less than a lost token does."""

    def __init__(self) -> None:
        self.random = torch.Generator().manual_seed(0)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores + 1e-4 * torch.randn(scores.shape, generator=self.random)


@OF_THE_HOST
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("call", CALLS)
def test_reference_tokens_do_not_hang_on_rounding(architecture: str, call: str) -> None:
    model = build(architecture)
    noisy = generate(
        model,
        call,
        DynamicCache(config=model.config),
        check=lambda: None,
        logits_processor=LogitsProcessorList([_Noise()]),
    )
    assert noisy.tokens == reference(architecture, call).tokens


@OF_THE_HOST
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("call", CALLS)
def test_reference_tokens_are_varied(architecture: str, call: str) -> None:
    new = CALLS[call].new_tokens
    for row in reference(architecture, call).tokens:
        assert len(set(row[-new:])) > 2


@OF_THE_HOST
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_some_guesses_of_prompt_lookup_are_right_and_some_wrong(architecture: str) -> None:
    model = build(architecture)
    queries: list[int] = []
    layer = model.model.layers[0]
    hook = layer.register_forward_pre_hook(lambda _, args: queries.append(args[0].shape[1]))
    try:
        generate(model, "prompt_lookup", DynamicCache(config=model.config), check=lambda: None)
    finally:
        hook.remove()
    new = CALLS["prompt_lookup"].new_tokens
    guessed = sum(queries) - PROMPT - (len(queries) - 1)
    accepted = new - len(queries)
    assert 0 < accepted < guessed
