"""What a step reads of a codec are its codes, not the numbers that they stand for."""

from __future__ import annotations

from typing import Any

import pytest

from tests.drive_method import drive
from tests.methods.eviction import method


def read(name: str, **settings: Any) -> tuple[int, int]:
    """Bytes read, and those of the same entries whole: K and V of 72 channels in float32."""
    kept = drive(method(name, **settings), new=40).kept
    assert kept is not None
    return kept.read_bytes, sum(kept.lengths) * 2 * 72 * 4


def test_codes_are_counted_as_they_lie() -> None:
    got, whole = read("kivi", window_tokens=32, group_size=16)
    # 2 bits of 72 channels, 5 scales of a value, a group number; 11 groups of keys in each head.
    entry = 18 + 18 + 5 * 2 * 4 + 4
    entries, groups = whole // (2 * 72 * 4), 2 * 11
    assert got == entries * entry + groups * 2 * 72 * 4
    assert got < 0.4 * whole


def test_thinned_keys_are_counted_by_their_channels() -> None:
    got, whole = read("think", window_tokens=32, channel_ratio=0.5)
    assert got == pytest.approx(0.75 * whole, rel=0.02)


def test_whole_entries_are_read_whole_and_scores_are_not() -> None:
    for name, settings in (("snapkv", {"budget_tokens": 83}), ("h2o", {"budget_tokens": 83})):
        got, whole = read(name, window_tokens=32, **settings)
        assert got == whole
