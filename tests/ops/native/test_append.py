"""Tokens stored by the engine, bit for bit those of the definition."""

from __future__ import annotations

import pytest
import torch

from hybrid_kv.ops import reference_pages
from hybrid_kv.ops.native import engine_state
from hybrid_kv.ops.native.rows import PageWriter
from hybrid_kv.types import HIDDEN, PagedKV

pytestmark = pytest.mark.skipif(engine_state().isa is None, reason="no engine")


def empty(dtype: torch.dtype, *, digests: bool) -> PagedKV:
    """Two heads, three pages of 5 tokens, 9 channels."""
    k, v = (torch.zeros(2, 3, 5, 9, dtype=dtype) for _ in range(2))
    low, high = (torch.zeros(2, 3, 9, dtype=dtype) if digests else None for _ in range(2))
    return PagedKV(k, v, torch.full((3, 5), HIDDEN), low, high)


@pytest.mark.parametrize("digests", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_token_is_stored_as_by_the_definition(dtype: torch.dtype, digests: bool) -> None:
    ours, theirs = empty(dtype, digests=digests), empty(dtype, digests=digests)
    writer = PageWriter(ours)
    for place in range(5, 13):  # a page, and a part of the next
        k, v = torch.randn(2, 2, 4, 9).to(dtype)[:, :, 1:2]  # heads far apart
        assert writer.takes(k, v)
        writer.append(k, v, place, 40 + place)
        theirs.store(k, v, torch.tensor([place]), torch.tensor([40 + place]))
        reference_pages.update_digests(theirs, torch.tensor([place // 5]))
        for mine, right in zip(ours, theirs, strict=True):
            assert (mine is None and right is None) or torch.equal(mine, right)


def test_what_it_cannot_read_is_left_to_others() -> None:
    writer = PageWriter(empty(torch.bfloat16, digests=False))
    token = torch.zeros(2, 1, 9, dtype=torch.bfloat16)
    assert writer.takes(token, token)
    assert not writer.takes(token.float(), token)
    assert not writer.takes(token, token.float())
    assert not writer.takes(token[:1], token)
    assert not writer.takes(token, torch.zeros(2, 2, 9, dtype=torch.bfloat16))
    assert not writer.takes(token, torch.zeros(2, 1, 18, dtype=torch.bfloat16)[:, :, ::2])
