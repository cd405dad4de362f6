"""Methods that keep entries, in a cache: as the driver says, after forks, crops and checkpoints."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from hybrid_kv.config import HybridConfig
from hybrid_kv.errors import MethodError
from hybrid_kv.models.rollback import Checkpoint
from hybrid_kv.runtime import KVCache
from hybrid_kv.types import LayerShape, ModelInfo
from tests.drive_method import drive, heads
from tests.kit import every, held
from tests.tolerances import TOLERANCES

SHAPE, SCALE, PROMPT, PAGE = LayerShape(0, 6, 2, 72), 0.11, 173, 8
INFO = ModelInfo((SHAPE, replace(SHAPE, layer_idx=1)))
CLOSE = TOLERANCES[torch.float32]
MASKS = [[1, 0], [0, 1]]
KEEPING: dict[str, dict[str, Any]] = {
    "kivi": {"method": "kivi", "bits": 2},
    "think": {"method": "think", "channel_ratio": 0.4},
    "cskv": {"method": "cskv", "rank_ratio": 0.25},
    "matryoshka_kv": {"method": "matryoshka_kv", "rank_ratio": 0.25},
    "shadowkv_keys": {"method": "shadowkv_keys"},
    "rotate_kv": {"method": "rotate_kv"},
    "accurate_block": {"method": "accurate_block"},
    "kvquant": {"method": "kvquant"},
    "gear": {"method": "gear"},
    "zipcache": {"method": "zipcache"},
    "saq": {"method": "saq", "fine_tokens": 37},
    "duo": {"method": "duo_attention", "heads": MASKS},
    "duo_by_prompt": {"method": "duo_attention"},
    "duo_offload": {"method": "duo_attention", "heads": MASKS, "demote": "offload"},
}
LOSSLESS = "duo_offload"  # what is not kept is in the cold tier, where all of it is found


@pytest.fixture(params=KEEPING)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def config(name: str) -> HybridConfig:
    cold = {"cold": {"top_k": "all"}} if name == LOSSLESS else {}
    sizes = {"page_size": PAGE, "sink_tokens": 16, "window_tokens": 32}
    return HybridConfig(**sizes, **KEEPING[name], **cold)


class Fed:
    """A cache of two layers, of which the first is asked, and its random tokens."""

    def __init__(self, name: str, total: int = 400, seed: int = 0) -> None:
        self.kv, self.at = KVCache(INFO, config(name)), 0
        drawn = heads(total, num_q_heads=6, num_kv_heads=2, head_dim=72, seed=seed)
        self.q, self.k, self.v = (one[None] for one in drawn)

    def feed(self, *counts: int, check: bool = True) -> Tensor:
        for count in counts:
            new = slice(self.at, self.at + count)
            q, k, v = (one[:, :, new] for one in (self.q, self.k, self.v))
            out = self.kv.attend(0, q, (k, v), None, scale=SCALE).out
            self.at += count
        if check:
            self.kv.check_integrity()
        return out


def test_a_cache_does_as_the_driver_says(name: str) -> None:
    fed = Fed(name)
    fed.feed(PROMPT)
    driven = drive(
        config(name).build(),
        prompt=PROMPT,
        new=30,
        num_layers=2,
        page_size=PAGE,
        scale=SCALE,
        given=(fed.q[0, :, : PROMPT + 30], fed.k[0, :, : PROMPT + 30], fed.v[0, :, : PROMPT + 30]),
    )
    for expected in driven.out:
        torch.testing.assert_close(fed.feed(1)[0, :, 0], expected.float(), **CLOSE)
    assert (max(driven.error) < 1e-9) == (name == LOSSLESS)
    kept = held(fed.kv).kept
    assert kept is not None
    assert driven.kept is not None
    assert kept.lengths == driven.kept.lengths


def test_forked_rows_go_on_as_if_they_were_alone(name: str) -> None:
    alone, forked = Fed(name), Fed(name)
    for fed in (alone, forked):
        fed.feed(PROMPT, *[1] * 10)
    for layer in forked.kv.layers.values():
        layer.fork([0, 0])
    other = heads(400, num_q_heads=6, num_kv_heads=2, head_dim=72, seed=1)
    forked.q, forked.k, forked.v = (
        torch.stack([one[0], two])
        for one, two in zip((forked.q, forked.k, forked.v), other, strict=True)
    )
    for _ in range(20):
        out = forked.feed(1)
        torch.testing.assert_close(out[0], alone.feed(1)[0], **CLOSE)
    again = Fed(name)
    again.feed(PROMPT, *[1] * 10)
    again.q, again.k, again.v = (one[None] for one in other)
    for _ in range(20):
        last = again.feed(1)
    torch.testing.assert_close(out[1], last[0], **CLOSE)


def test_a_checkpoint_brings_back_what_was_kept(name: str) -> None:
    fed = Fed(name)
    fed.feed(PROMPT, *[1] * 10)
    saved = Checkpoint.of(fed.kv.layers)
    # Until one is released, branch and original count references of each other.
    first = [fed.feed(1, check=False) for _ in range(20)]
    saved.restore(fed.kv.layers)
    fed.at -= 20
    for expected in first:
        torch.testing.assert_close(fed.feed(1), expected, **CLOSE)


def test_cropped_tokens_of_the_window_leave_no_trace(name: str) -> None:
    fed, fresh = Fed(name), Fed(name)
    fed.feed(PROMPT, *[1] * 10, 1, 1, 1)
    for layer in fed.kv.layers.values():
        layer.crop(3)
    fed.at -= 3
    fresh.feed(PROMPT, *[1] * 10)
    for _ in range(20):
        torch.testing.assert_close(fed.feed(1), fresh.feed(1), **CLOSE)


def test_a_codec_goes_back_as_far_as_one_wants() -> None:
    for name in (name for name in KEEPING if not name.startswith("duo")):
        fed = Fed(name)
        fed.feed(PROMPT, *[1] * 40)
        for layer in fed.kv.layers.values():
            layer.crop(100)
        fed.at -= 100
        kept = held(fed.kv).kept
        assert kept is not None
        assert max(kept.split("positions")[0].tolist()) < fed.at
        fed.feed(*[1] * 60)


def test_dropped_entries_of_streaming_heads_cannot_be_had_back() -> None:
    fed = Fed("duo")
    fed.feed(PROMPT, *[1] * 40)
    with pytest.raises(MethodError, match="dropped"):
        fed.kv.layers[0].crop(100)
    fed.feed(1)
    offloaded = Fed(LOSSLESS)
    offloaded.feed(PROMPT, *[1] * 40)
    for layer in offloaded.kv.layers.values():
        layer.crop(100)
    offloaded.at -= 100
    offloaded.feed(*[1] * 60)


def test_two_rows_of_one_batch_choose_for_themselves() -> None:
    """The state of a row is the row's: heads that one prompt shows are not those of another."""
    kv = KVCache(INFO, config("duo_by_prompt"))
    q, k, v = (torch.randn(2, count, PROMPT, 72) for count in (6, 2, 2))
    for row, head in ((0, 0), (1, 1)):
        k[row, head, 60], q[row, 3 * head] = 20.0, 1.0
    kv.attend(0, q, (k, v), None, scale=SCALE)
    q, k, v = (torch.randn(2, count, 1, 72) for count in (6, 2, 2))
    kv.attend(0, q, (k, v), None, scale=SCALE)
    kept = [row.kept for row in every(kv)]
    assert [[length > 0 for length in one.lengths] for one in kept if one is not None] == [
        [True, False],
        [False, True],
    ]
