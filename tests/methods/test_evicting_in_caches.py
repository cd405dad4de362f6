"""Evicting methods in a cache, below their budgets: rows, forks, checkpoints and crops agree.

What they lose is lost alike whichever way a row gets to where it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from hybrid_kv.config import HybridConfig
from hybrid_kv.errors import MethodError
from hybrid_kv.models.rollback import Checkpoint
from hybrid_kv.runtime import KVCache
from hybrid_kv.types import LayerShape, ModelInfo
from tests.kit import every, held
from tests.methods.eviction import kept_sets
from tests.tolerances import TOLERANCES

FIXED = ("h2o", "tova", "scissorhands", "keyformer", "d2o", "elastic_cache")
"""Hold a fixed number of entries, however long an answer."""
PROMPT_SCORED = (
    *("snapkv", "pyramidkv", "ada_snapkv", "ada_pyramid", "headkv", "zipvl"),
    *("fastgen", "kvmerger", "look_m", "keydiff"),
)
EVICTING = (*PROMPT_SCORED, *FIXED)
SHAPES = tuple(LayerShape(idx, 6, 2, 72) for idx in range(2))
PROMPT, PAGE = 173, 4
STEPS = 2 * PAGE + 3  # two pages leave the window meanwhile
New = tuple[Tensor, Tensor, Tensor]


def cache(name: str, **settings: Any) -> KVCache:
    given = {"window_tokens": 32, "index_build": "wait", "page_size": PAGE}
    if name != "razor_attention":
        given["budget_tokens"] = 61
    return KVCache(ModelInfo(SHAPES), HybridConfig(method=name, **given | settings))


def tokens(count: int, *, rows: int = 1, seed: int, layers: int = len(SHAPES)) -> list[New]:
    """By layer q, k, v of so many new tokens."""
    draw = torch.Generator().manual_seed(seed)
    return [
        tuple(torch.randn(rows, heads, count, 72, generator=draw) for heads in (6, 2, 2))
        for _ in range(layers)
    ]


def step(kv: KVCache, new: Sequence[New], valid: Tensor | None = None) -> Tensor:
    """Outputs of all layers, [L, B, Hq, T, D]."""
    outs = [
        kv.attend(layer_idx, q, (k, v), valid, scale=72**-0.5).out
        for layer_idx, (q, k, v) in enumerate(new)
    ]
    return torch.stack(outs)


def rows_of(new: Sequence[New], *rows: int) -> list[New]:
    return [(q[list(rows)], k[list(rows)], v[list(rows)]) for q, k, v in new]


def decode(kv: KVCache, count: int, *, seed: int = 100, rows: int = 1) -> Tensor:
    """Outputs of some steps, [steps, L, B, Hq, 1, D]; rows get the same tokens."""
    news = [tokens(1, seed=seed + i, layers=len(kv.layers)) for i in range(count)]
    spread = [[tuple(x.expand(rows, -1, -1, -1) for x in layer) for layer in new] for new in news]
    return torch.stack([step(kv, new) for new in spread])


@pytest.mark.parametrize("name", EVICTING)
def test_a_left_padded_row_keeps_what_it_keeps_alone(name: str) -> None:
    prompt = tokens(PROMPT, rows=2, seed=1)
    valid = torch.arange(PROMPT) >= torch.tensor([[0], [PROMPT - 111]])
    both = cache(name)
    step(both, prompt, valid)
    together = decode(both, STEPS, rows=2)
    for row, count in enumerate((PROMPT, 111)):
        alone = cache(name)
        own = [tuple(x[:, :, PROMPT - count :] for x in layer) for layer in rows_of(prompt, row)]
        step(alone, own)
        torch.testing.assert_close(
            together[:, :, row], decode(alone, STEPS)[:, :, 0], **TOLERANCES[torch.float32]
        )


@pytest.mark.parametrize("demote", ["drop", "offload"])
@pytest.mark.parametrize("name", EVICTING)
def test_rows_that_were_forked_go_on_as_the_row_they_came_from(name: str, demote: str) -> None:
    one, forked = (cache(name, demote=demote) for _ in range(2))
    for kv in (one, forked):
        step(kv, tokens(PROMPT, seed=2))
        decode(kv, PAGE + 3)
    for layer in forked.layers.values():
        layer.fork([0, 0])
    expected, found = (
        decode(kv, STEPS, seed=300, rows=rows) for kv, rows in ((one, 1), (forked, 2))
    )
    forked.check_integrity()
    for row in range(2):
        torch.testing.assert_close(found[:, :, row], expected[:, :, 0], **TOLERANCES[torch.float32])


@pytest.mark.parametrize("demote", ["drop", "offload"])
@pytest.mark.parametrize("name", EVICTING)
def test_a_checkpoint_brings_back_what_was_kept(name: str, demote: str) -> None:
    kv = cache(name, demote=demote)
    step(kv, tokens(PROMPT, seed=3))
    decode(kv, 5)
    saved = Checkpoint.of(kv.layers)
    first = decode(kv, STEPS, seed=300)
    saved.restore(kv.layers)
    again = decode(kv, STEPS, seed=300)
    torch.testing.assert_close(again, first, **TOLERANCES[torch.float32])


@pytest.mark.parametrize("name", EVICTING)
def test_a_guess_that_is_cut_off_changes_nothing_of_the_prompts_choice(name: str) -> None:
    """Scores of kept entries may remember a guess (h2o); what the prompt left may not change."""
    kv, plain = (cache(name, page_size=16) for _ in range(2))  # no page leaves here
    for one in (kv, plain):
        step(one, tokens(PROMPT, seed=4))
        decode(one, 3)
    step(kv, tokens(4, seed=500))
    for layer in kv.layers.values():
        layer.crop(4)
    torch.testing.assert_close(
        decode(kv, 6, seed=600), decode(plain, 6, seed=600), **TOLERANCES[torch.float32]
    )


@pytest.mark.parametrize("name", EVICTING)
def test_cutting_into_what_was_dropped_is_refused_and_changes_nothing(name: str) -> None:
    kv = cache(name)
    step(kv, tokens(PROMPT, seed=5))
    decode(kv, STEPS)
    before = [row.length for row in every(kv)]
    with pytest.raises(MethodError, match="checkpoint"):
        kv.layers[0].crop(100)
    assert [row.length for row in every(kv)] == before


MERGING = ("kvmerger", "look_m", "d2o", "elastic_cache", "razor_attention")


@pytest.mark.parametrize("name", MERGING)
def test_a_crop_to_the_end_of_what_is_merged_or_to_the_sinks_is_served(name: str) -> None:
    few = {"budget_tokens": 165}  # go, so that the newest do not
    own = {"heads": [[1, 0], [0, 1]]} if name == "razor_attention" else few
    kv, sinks = (cache(name, window_tokens=0, sink_tokens=16, **own) for _ in range(2))
    new = tokens(PROMPT, seed=13)
    step(kv, new)
    step(sinks, [(q[:, :, :16], k[:, :, :16], v[:, :, :16]) for q, k, v in new])
    decode(kv, 1)
    missing = [set(range(16, PROMPT)) - head for head in kept_sets(held(kv).kept, 2)]
    end = 1 + max(max(head, default=0) for head in missing)
    kv.layers[0].crop(PROMPT + 1 - end)
    assert held(kv).length == end
    kv.layers[0].crop(end - 16)
    kv.layers[1].crop(PROMPT + 1 - 16)
    found, expected = (decode(one, STEPS, seed=400) for one in (kv, sinks))
    torch.testing.assert_close(found, expected, **TOLERANCES[torch.float32])


@pytest.mark.parametrize("name", MERGING)
def test_a_crop_leaves_nothing_of_what_is_forgotten_in_merged_entries(name: str) -> None:
    """Regression: merged entries kept the keys and values of tokens that had been cropped."""
    kv, plain = (cache(name, window_tokens=0) for _ in range(2))
    for one in (kv, plain):
        step(one, tokens(PROMPT, seed=12))
        decode(one, 1)
    sets = kept_sets(held(kv).kept, 2)
    end = 1 + max(n for n in range(PROMPT) if not all(n in head for head in sets))
    for count in (PROMPT // 2, PROMPT + 2 - end):
        with pytest.raises(MethodError, match=rf"^row 0 must stay at least {end} tokens.*check"):
            kv.layers[0].crop(count)
    assert {row.length for row in every(kv)} == {PROMPT + 1}
    if name not in PROMPT_SCORED:
        return
    decode(kv, STEPS, seed=300)  # two pages leave, as they are
    for layer in kv.layers.values():
        layer.crop(STEPS)
    found, expected = (decode(one, STEPS, seed=400) for one in (kv, plain))
    torch.testing.assert_close(found, expected, **TOLERANCES[torch.float32])


@pytest.mark.parametrize("name", EVICTING)
def test_heads_that_a_crop_leaves_with_different_numbers_go_on(name: str) -> None:
    """Regression: keyformer took for granted that all of its heads hold as many copies."""
    kv = cache(name, demote="offload")
    step(kv, tokens(PROMPT, seed=11))
    decode(kv, 5)
    for layer in kv.layers.values():
        layer.crop(PROMPT // 2)
    if name == "keyformer":
        assert any(len(set(row.kept.lengths)) > 1 for row in every(kv))
    assert decode(kv, PAGE + 2).isfinite().all()
    kv.check_integrity()


@pytest.mark.parametrize("turn", [9, 41])
@pytest.mark.parametrize(
    "name", [name for name in EVICTING if name != "fastgen"]
)  # by its policies
def test_a_later_turn_goes_through_the_method_and_budgets_hold(name: str, turn: int) -> None:
    """A short turn is read through the method, a long one exactly (fastgen has no budget)."""
    kv = cache(name, sink_tokens=0)
    step(kv, tokens(PROMPT, seed=6))
    decode(kv, 5)
    step(kv, tokens(turn, seed=700))
    decode(kv, PAGE + 2, seed=800)
    kv.check_integrity()
    grows = name not in FIXED
    kept = sum(sum(row.kept.lengths) for row in every(kv))
    left = (5 + turn + PAGE + 2) // PAGE * PAGE if grows else 0
    assert kept == 2 * len(SHAPES) * (61 - 32 + left)


@pytest.mark.parametrize("name", ["h2o", "tova"])
@pytest.mark.parametrize("turn", [9, 41])
def test_what_a_later_turn_attends_counts_as_what_an_answer_attends(name: str, turn: int) -> None:
    """Its tokens one by one or at once leave the same sums behind, and so keep the same."""
    news, columns = tokens(turn, seed=900), []
    for at_once in (True, False):
        kv = cache(name, budget_tokens="all")
        step(kv, tokens(PROMPT, seed=7))
        decode(kv, 1)
        for part in [slice(None)] if at_once else [slice(t, t + 1) for t in range(turn)]:
            step(kv, [(q[:, :, part], k[:, :, part], v[:, :, part]) for q, k, v in news])
        kept = held(kv, layer=1).kept
        assert kept is not None
        by_position = zip(kept.split("positions")[1], kept.split("score")[1], strict=True)
        columns.append({int(at): float(score) for at, score in by_position})
    together, one_by_one = columns
    shared = sorted(together.keys() & one_by_one.keys())
    assert len(shared) >= PROMPT - 32
    assert [together[at] for at in shared] == pytest.approx(
        [one_by_one[at] for at in shared], rel=1e-4
    )


@pytest.mark.parametrize("name", ["h2o", "tova"])
def test_padding_of_a_later_turn_weighs_nothing(name: str) -> None:
    prompt, turn = tokens(PROMPT, rows=2, seed=8), tokens(65, rows=2, seed=9)
    valid = torch.arange(65) >= torch.tensor([[0], [25]])
    both, alone = cache(name), cache(name)
    step(both, prompt)
    step(alone, rows_of(prompt, 1))
    for kv, rows in ((both, 2), (alone, 1)):
        decode(kv, 1, rows=rows)
    step(both, turn, valid)
    step(alone, [tuple(x[:, :, 25:] for x in layer) for layer in rows_of(turn, 1)])
    after, expected = (
        decode(kv, PAGE + 2, rows=rows, seed=300) for kv, rows in ((both, 2), (alone, 1))
    )
    torch.testing.assert_close(after[:, :, 1], expected[:, :, 0], **TOLERANCES[torch.float32])
