"""What the definitions of the page ops promise, against float64 and plain loops."""

from __future__ import annotations

import pytest
import torch

from hybrid_kv.ops import get_ops, reference
from hybrid_kv.types import HIDDEN
from tests.ops.paged_data import SHAPES, Shape, copy_of, lists, newest_positions, pool, queries
from tests.oracle import softmax_attention
from tests.tolerances import TOLERANCES

FLOAT32 = TOLERANCES[torch.float32]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_pages_are_attended_by_what_each_query_sees(shape: Shape, softcap: float | None) -> None:
    pages = pool(shape, torch.float32)
    q, slots, seen = queries(shape, torch.float32), lists(shape, 4), newest_positions(shape, pages)
    part = get_ops("auto").attend_pages(
        q, pages, slots, seen, scale=0.2, softcap=softcap, tail_fill=(shape.page_size + 1) // 2
    )
    for head in range(shape.heads):
        for row in range(q.shape[1]):
            token = row % shape.new
            k, v = (t[head, slots[head, token]].flatten(0, 1) for t in (pages.k, pages.v))
            visible = pages.positions[slots[head, token]].flatten() <= seen[token]
            out, lse = softmax_attention(
                q[head, row, None], k, v, scale=0.2, softcap=softcap, visible=visible
            )
            torch.testing.assert_close(part.out[head, row].double(), out[0], **FLOAT32)
            torch.testing.assert_close(part.lse[head, row].double(), lse[0], **FLOAT32)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_newest_page_comes_last_and_pinned_pages_are_always_chosen(shape: Shape) -> None:
    q, num_pages = queries(shape, torch.float32), 13
    low = torch.randn(shape.heads, num_pages, shape.dim)
    high = low + torch.rand_like(low)
    for count in (4, 9, num_pages):
        chosen = get_ops("auto").choose_pages(
            q, low, high, new=shape.new, oldest=2, newest=2, count=count
        )
        assert chosen.shape == (shape.heads, shape.new, count)
        assert (chosen[..., -1] == num_pages - 1).all()
        bounds = torch.maximum(q[:, :, None] * low[:, None], q[:, :, None] * high[:, None]).sum(-1)
        bounds = bounds.view(shape.heads, shape.group, shape.new, -1).amax(1)
        free = bounds[..., 2:-2].topk(count - 4, -1).indices + 2
        for head in range(shape.heads):
            for token in range(shape.new):
                pinned = {0, 1, num_pages - 2, num_pages - 1}
                expected = pinned | set(free[head, token].tolist())
                assert set(chosen[head, token].tolist()) == expected


def test_digests_bound_the_filled_keys_alone() -> None:
    pages = pool(Shape(), torch.float32)
    pages.k[:, -1, 8:] = torch.nan
    pages.k[:, 2] = 100.0
    get_ops("auto").update_digests(pages, torch.arange(7).numpy())
    assert pages.key_min is not None
    assert pages.key_max is not None
    torch.testing.assert_close(pages.key_min[:, -1], pages.k[:, -1, :8].amin(1))
    torch.testing.assert_close(pages.key_max[:, -1], pages.k[:, -1, :8].amax(1))
    assert (pages.key_min[:, 2] == 100).all()


def test_tokens_are_stored_where_they_belong_and_in_their_digests() -> None:
    pages = pool(Shape(), torch.float32)
    before = copy_of(pages)
    places = torch.tensor([6 * 16 + 15, 3 * 16, 3 * 16 + 1]).numpy()
    k, v = torch.randn(2, 3, 72) + 50, torch.randn(2, 3, 72)
    get_ops("auto").append(pages, k, v, places, 500)
    flat = pages.k.flatten(1, 2), pages.v.flatten(1, 2), pages.positions.flatten()
    assert torch.equal(flat[0][:, places], k)
    assert torch.equal(flat[1][:, places], v)
    assert flat[2][places].tolist() == [500, 501, 502]
    assert pages.key_max is not None
    assert torch.equal(pages.key_max[:, 6], k[:, 0])
    assert torch.equal(pages.key_max[:, 3], k[:, 1:].amax(1))
    others = [0, 1, 2, 4, 5]
    assert all(
        torch.equal(a[:, others], b[:, others]) for a, b in zip(pages[:2], before[:2], strict=True)
    )
    assert (pages.positions[-1, 8:15] == HIDDEN).all()


def test_copied_pages_arrive_and_nothing_else_changes() -> None:
    source, target = (pool(Shape(page_size=5), torch.float32) for _ in range(2))
    before = copy_of(target)
    from_ = torch.tensor([[0, 3, -1], [6, 1, 5]])
    to = torch.tensor([[1, 2, 3], [4, -1, 6]])
    get_ops("auto").copy_pages(source, target, from_, to)
    for old, new, was in zip(source[:2], target[:2], before[:2], strict=True):
        was[0, 1], was[0, 2] = old[0, 0], old[0, 3]
        was[1, 4], was[1, 6] = old[1, 6], old[1, 5]
        assert torch.equal(new, was)


@pytest.mark.parametrize("count", [1, 7, 100])
def test_nearest_keys_are_those_of_float64(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(reference, "_SCORE_BLOCK_BYTES", 4 * 2 * 100 * 3)  # three queries at a time
    q, keys = torch.randn(2, 8, 72), torch.randn(2, 100, 72)
    ids = get_ops("auto").nearest_keys(q, keys, count)
    every = torch.einsum("hqd,hnd->hqn", q.double(), keys.double())
    assert torch.equal(ids, every.topk(count, -1).indices.int())
