"""When a mask is looked at: looking at one on a GPU waits for it."""

from __future__ import annotations

import pytest
import torch

from hybrid_kv.models.hf_attention import padding_mask
from hybrid_kv.ops import Ops


def mask_of(rows: int, tokens: int) -> torch.Tensor:
    mask = torch.ones(rows, tokens, dtype=torch.bool)
    mask[0, 0] = False
    return mask


@pytest.mark.parametrize(
    ("rows", "new", "window", "kept"),
    [(1, 1, None, False), (2, 1, None, True), (1, 3, None, True), (1, 1, 8, True)],
)
def test_a_step_of_one_row_asks_for_no_mask(
    rows: int, new: int, window: int | None, kept: bool
) -> None:
    mask = mask_of(rows, 37)
    found = padding_mask(rows, new, 37, attention_mask=mask, local_size=window)
    assert (found is not None) == kept
    if not kept:  # a mask without values cannot be looked at
        unseen = mask.to("meta")
        assert padding_mask(rows, new, 37, attention_mask=unseen, local_size=window) is None


@pytest.mark.parametrize("new", [1, 16, 17, 32, 64])
def test_new_tokens_of_a_step_are_attended_where_pages_lie(
    new: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """17 to 32, which a step takes by default, went to the float32 definition."""
    monkeypatch.setattr("hybrid_kv.ops.operations.backends_on", lambda *_: frozenset({"triton"}))
    queries = torch.empty(1, 8, new, 128, dtype=torch.bfloat16, device="meta")
    assert Ops("triton").reads_pages(queries)
    assert not Ops("triton").reads_pages(queries.new_empty(1, 8, 65, 128))
