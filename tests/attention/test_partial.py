from __future__ import annotations

import pytest
import torch

from hybrid_kv.errors import ShapeError
from hybrid_kv.ops import get_ops
from hybrid_kv.ops.operations import BACKENDS, why_unavailable
from hybrid_kv.runtime.decode import attend_ragged
from hybrid_kv.runtime.step import (
    attend,
    attend_causal,
    group_queries,
)
from tests.oracle import causal, softmax_attention, spread
from tests.tolerances import TOLERANCES

FLOAT32 = TOLERANCES[torch.float32]
OPS = get_ops("auto")


def test_grouped_queries_read_their_own_kv_head() -> None:
    q, k, v = torch.randn(2, 6, 5, 72), torch.randn(2, 2, 37, 72), torch.randn(2, 2, 37, 72)
    part = attend(OPS, group_queries(q, 2), k, v, scale=0.2)
    out, lse = softmax_attention(q, spread(k, 6), spread(v, 6), scale=0.2)
    torch.testing.assert_close(part.out.reshape(q.shape).double(), out, **FLOAT32)
    torch.testing.assert_close(part.lse.reshape(q.shape[:3]).double(), lse, **FLOAT32)


def test_heads_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ShapeError, match="multiple of the 4 KV heads, got 6"):
        group_queries(torch.randn(1, 6, 1, 8), 4)


def test_no_entries_give_an_empty_part() -> None:
    part = attend(
        OPS, torch.randn(1, 2, 3, 8), torch.randn(1, 2, 0, 8), torch.randn(1, 2, 0, 8), scale=1.0
    )
    assert part.out.abs().max() == 0
    assert (part.lse == -torch.inf).all()


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize(
    ("new", "stored"), [(1, 1), (1, 37), (5, 5), (5, 37), (36, 37), (0, 37), (0, 0)]
)
def test_new_tokens_see_all_before_them(new: int, stored: int, softcap: float | None) -> None:
    q, k, v = (
        torch.randn(2, 6, new, 72),
        torch.randn(2, 2, stored, 72),
        torch.randn(2, 2, stored, 72),
    )
    part = attend_causal(OPS, q, k, v, scale=0.2, softcap=softcap)
    out, lse = softmax_attention(
        q, spread(k, 6), spread(v, 6), scale=0.2, visible=causal(new, stored), softcap=softcap
    )
    torch.testing.assert_close(part.out.double(), out, **FLOAT32)
    torch.testing.assert_close(part.lse.double(), lse, **FLOAT32)


def test_fewer_entries_than_new_tokens_are_refused() -> None:
    q, k = torch.randn(1, 2, 5, 8), torch.randn(1, 2, 4, 8)
    with pytest.raises(ShapeError, match="5 new positions at least, got 4"):
        attend_causal(OPS, q, k, k, scale=1.0)


@pytest.mark.parametrize("backend", [b for b in BACKENDS if why_unavailable(b) is None])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("biased", [False, True])
def test_retrieved_entries_that_are_padding_have_no_weight(
    backend: str, softcap: float | None, biased: bool
) -> None:
    q, k, v = torch.randn(3, 5, 72), torch.randn(3, 37, 72), torch.randn(3, 37, 72)
    ids = torch.rand(3, 5, 37).argsort(-1)[..., :7]
    ids[torch.rand(3, 5, 7) < 0.4] = -1
    ids[1, 2] = -1
    bias = torch.randn(3, 5, 7).masked_fill(torch.rand(3, 5, 7) < 0.3, -torch.inf)
    part = get_ops(backend).attend_retrieved(
        *(q, k, v, ids),
        scale=0.2,
        softcap=softcap,
        bias=bias if biased else None,
    )
    added = torch.full((3, 5, 38), -torch.inf)
    added.scatter_(-1, ids % 38, bias if biased else torch.zeros_like(bias))
    out, lse = softmax_attention(
        q[:, :, None],
        k[:, None].expand(3, 5, 37, 72),
        v[:, None].expand(3, 5, 37, 72),
        scale=0.2,
        bias=added[:, :, None, :37],
        softcap=softcap,
    )
    torch.testing.assert_close(part.out.double(), out[:, :, 0], **FLOAT32)
    torch.testing.assert_close(part.lse.double(), lse[:, :, 0], **FLOAT32)
    assert part.lse[1, 2] == -torch.inf


@pytest.mark.parametrize("backend", [b for b in BACKENDS if why_unavailable(b) is None])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("lengths", [[37, 0, 5], [0, 0, 0], [9, 9, 9]])
@pytest.mark.parametrize("queries", [3, 70])
def test_every_head_attends_its_own_rows(
    backend: str, softcap: float | None, biased: bool, lengths: list[int], queries: int
) -> None:
    starts = [1, lengths[0] + 4, lengths[0] + lengths[1] + 4]
    rows = starts[2] + lengths[2] + 2
    q, k, v = torch.randn(3, queries, 72), torch.randn(rows, 72), torch.randn(rows, 72)
    bias = torch.randn(rows).masked_fill(torch.rand(rows) < 0.3, -torch.inf) if biased else None
    part = attend_ragged(
        get_ops(backend), q, k, v, starts, lengths, scale=0.2, softcap=softcap, bias=bias
    )
    for h, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        own = slice(start, start + length)
        added = None if bias is None else bias[own]
        out, lse = softmax_attention(q[h], k[own], v[own], scale=0.2, softcap=softcap, bias=added)
        torch.testing.assert_close(part.out[h].double(), out, **FLOAT32)
        torch.testing.assert_close(part.lse[h].double(), lse, **FLOAT32)


@pytest.mark.parametrize("backend", [b for b in BACKENDS if why_unavailable(b) is None])
@pytest.mark.parametrize("size", [(0, 5, 7), (3, 0, 7), (3, 5, 0)])
def test_retrieving_nothing_gives_an_empty_part(size: tuple[int, int, int], backend: str) -> None:
    """Torch's kernel divides by the number of heads: without one it ends the process."""
    k = torch.randn(size[0], 9, 8)
    ids = torch.zeros(size, dtype=torch.int64)
    queries = torch.randn(*size[:2], 8)
    part = get_ops(backend).attend_retrieved(queries, k, k, ids, scale=1.0)
    assert part.out.shape == (*size[:2], 8)
    assert (part.lse == -torch.inf).all()


def test_retrieved_entries_are_attended_on_the_device_where_they_lie() -> None:
    """No tensor of another device takes part; the meta device stands for a GPU."""
    q, k, v = (torch.empty(2, rows, 72, device="meta") for rows in (3, 37, 37))
    ids = torch.empty(2, 3, 5, dtype=torch.int64, device="meta")
    part = OPS.attend_retrieved(q, k, v, ids, scale=0.2)
    assert part.out.device.type == part.lse.device.type == "meta"
    assert part.out.shape == q.shape
