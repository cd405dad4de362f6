"""RazorAttention: one entry of mean key and value stands for what a head has dropped."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from hybrid_kv.config import HybridConfig
from hybrid_kv.plugins import Method
from hybrid_kv.runtime import KVCache
from hybrid_kv.types import LayerShape, ModelInfo
from tests.drive_method import drive
from tests.tolerances import TOLERANCES

PROMPT, NEW, SINKS, WINDOW, PAGE = 173, 60, 16, 32, 16
CLOSE = TOLERANCES[torch.float32]


def config(**settings: Any) -> HybridConfig:
    given = {"sink_tokens": SINKS, "window_tokens": WINDOW, "heads": [[1, 0]], **settings}
    return HybridConfig(method="razor_attention", page_size=PAGE, **given)


def method(**settings: Any) -> Method:
    built: Method = config(**settings).build()
    return built


@pytest.mark.parametrize("prompt", [5, 37, PROMPT])
def test_dropped_entries_weigh_as_their_number_at_their_mean(prompt: int) -> None:
    driven = drive(method(), prompt=prompt, new=NEW)
    first = max(min(SINKS, prompt), prompt - WINDOW)
    for step, out in enumerate(driven.out):
        at = prompt + step
        for h in range(6):
            keys, values = (x[h // 3].double().numpy() for x in (driven.k, driven.v))
            q = driven.q[h, at].double().numpy() * 72**-0.5
            sinks = min(SINKS, prompt)
            there = [*range(sinks), *range(first, at + 1)]
            gone = list(range(sinks, first))
            if h // 3 == 0:
                there, gone = list(range(at + 1)), []
            numerator = sum(np.exp(q @ keys[n]) * values[n] for n in there)
            denominator = sum(np.exp(q @ keys[n]) for n in there)
            if gone:
                mean_k, mean_v = keys[gone].mean(0), values[gone].mean(0)
                numerator += len(gone) * np.exp(q @ mean_k) * mean_v
                denominator += len(gone) * np.exp(q @ mean_k)
            np.testing.assert_allclose(out[h].numpy(), numerator / denominator, **CLOSE)
        if at + 1 - first >= WINDOW + PAGE:
            first += PAGE


def test_a_head_holds_one_entry_for_all_that_it_dropped() -> None:
    driven = drive(method(), prompt=PROMPT, new=NEW)
    assert driven.kept is not None
    gone = driven.kept.lengths[0]
    assert driven.kept.lengths[1] == 1
    assert driven.kept.bias is not None
    bias = driven.kept.split(driven.kept.bias)
    assert float(bias[1][0]) == pytest.approx(math.log(gone))
    assert not bias[0].any()
    assert driven.kept.split("positions")[1].tolist() == [SINKS]


def test_means_of_16_bits_stay_means_over_many_pages() -> None:
    q, k, v = (torch.randn(heads, 600, 72).bfloat16() + 1 for heads in (6, 2, 2))
    driven = drive(method(), prompt=PROMPT, new=600 - PROMPT, given=(q, k, v))
    assert driven.kept is not None
    gone = driven.kept.lengths[0]
    mean = k[1, SINKS : SINKS + gone].double().mean(0)
    found = driven.kept.split("k")[1][0].double()
    torch.testing.assert_close(found, mean, **TOLERANCES[torch.bfloat16])


def test_growing_means_move_whole_heads_seldom() -> None:
    """A page that leaves costs a page: the head that keeps everything is not copied for it."""
    moves = []
    for name in ("razor_attention", "duo_attention"):
        same = {"page_size": PAGE, "sink_tokens": SINKS, "window_tokens": WINDOW}
        tested = HybridConfig(method=name, heads=[[1, 0]], **same).build()
        steps = drive(tested, prompt=PROMPT, new=12 * PAGE).steps
        moves.append(len({kept.k.data_ptr() for kept in steps if kept is not None}))
    assert moves[0] <= moves[1] < 12


def test_with_a_cold_tier_nothing_is_dropped_and_no_mean_is_attended() -> None:
    driven = drive(method(demote="offload"), prompt=PROMPT, new=NEW)
    assert driven.kept is not None
    assert driven.kept.lengths[1] == 0
    assert not driven.lost.any()
    assert max(driven.error) < CLOSE["atol"]


def test_a_cache_does_as_the_driver_says_after_a_crop() -> None:
    driven = drive(method(), prompt=PROMPT, new=NEW)
    kv = KVCache(ModelInfo((LayerShape(0, 6, 2, 72),)), config())

    def feed(start: int, stop: int) -> torch.Tensor:
        q, k, v = (one[None, :, start:stop] for one in (driven.q, driven.k, driven.v))
        return kv.attend(0, q, (k, v), None, scale=72**-0.5).out[0]

    feed(0, PROMPT)
    for at in range(PROMPT, PROMPT + 20):
        feed(at, at + 1)
    kv.layers[0].crop(3)
    for at in range(PROMPT + 17, PROMPT + NEW):
        found = feed(at, at + 1)[:, 0]
        torch.testing.assert_close(found, driven.out[at - PROMPT].float(), **CLOSE)
    kv.check_integrity()


def test_fifteen_of_a_hundred_heads_retrieve_by_default() -> None:
    kept = []
    for layer in range(20):
        given = method(heads="prompt")
        one = drive(given, prompt=PROMPT, new=1, layer_idx=layer, num_layers=20, seed=layer).kept
        assert one is not None
        kept.append(int(one.state["retrieves"].sum()))
    assert sum(kept) == round(0.15 * 40)
