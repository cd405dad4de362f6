"""What a step reads of a codec are its codes, not the numbers that they stand for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hybrid_kv.contest.measure import _coded
from hybrid_kv.types import LayerShape
from tests.drive_method import drive
from tests.methods.eviction import method


def saved(name: str, **settings: Any) -> tuple[int, int]:
    """Bytes saved, and those of the same entries whole: K and V of 72 channels in float32."""
    kept = drive(method(name, **settings), new=40).kept
    assert kept is not None
    store = SimpleNamespace(
        rows=[SimpleNamespace(kept=kept)],
        shape=LayerShape(0, 6, 2, 72),
        cold=SimpleNamespace(dtype=torch.float32),
    )
    cache: Any = SimpleNamespace(kv=SimpleNamespace(stores={0: store}))
    return _coded(cache), sum(kept.lengths) * 2 * 72 * 4


def test_codes_are_counted_as_they_lie() -> None:
    got, whole = saved("kivi", window_tokens=32, group_size=16)
    # 2 bits of 72 channels, 5 scales of a value, a group number; 11 groups of keys in each head.
    entry = 18 + 18 + 5 * 2 * 4 + 4
    entries, groups = whole // (2 * 72 * 4), 2 * 11
    assert whole - got == entries * entry + groups * 2 * 72 * 4
    assert got > 0.6 * whole


def test_thinned_keys_are_counted_by_their_channels() -> None:
    got, whole = saved("think", window_tokens=32, channel_ratio=0.5)
    assert whole - got == pytest.approx(0.75 * whole, rel=0.02)


def test_whole_entries_save_nothing() -> None:
    assert saved("snapkv", budget_tokens=83)[0] == 0
    assert saved("razor_attention", window_tokens=32)[0] == 0
