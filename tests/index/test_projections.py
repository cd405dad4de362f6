"""What kinds that rank by few numbers a key have learned of their first keys."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.index.oracle import DIM, make_default

FEW = 4
"""Channels in which keys differ: the first ones of keys that come first, of others the last."""


@pytest.mark.parametrize(
    ("kind", "params"),
    [
        ("pca", {"component_ratio": FEW / DIM}),
        ("label_channels", {"channel_ratio": FEW / DIM}),
        ("skewed_channels", {"column_ratio": FEW / DIM}),
        ("pq", {"num_parts": 2, "num_bits": 4}),
    ],
)
def test_it_is_learned_again_when_there_are_four_times_as_many(
    kind: str, params: dict[str, Any]
) -> None:
    keys = 0.01 * torch.randn(2, 400, DIM)
    keys[:, :100, :FEW] *= 100
    keys[:, 100:, -FEW:] *= 100
    index, queries = make_default(kind, **params), keys[:, -9:]
    index.build(keys[:, :100], None)
    for count, is_learned in ((399, False), (400, True)):
        index.add(keys[:, :count])
        fresh = make_default(kind, **params)
        fresh.build(keys[:, :count], None)
        found = (one.search(queries, 5).ids for one in (index, fresh))
        assert torch.equal(*found) == is_learned
