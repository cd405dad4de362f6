"""Every kernel against its definition, interpreted or on a GPU; few programs each, odd sizes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from hybrid_kv.ops import reference, reference_pages
from hybrid_kv.ops.dispatch import Ops
from hybrid_kv.types import HIDDEN, PagedKV, PartialAttention
from tests.ops.paged_data import SHAPES, Shape, copy_of, lists, newest_positions, pool, queries
from tests.ops.triton.where import needs_kernels
from tests.pairs import in_pairs
from tests.tolerances import TOLERANCES, Tolerance

FLOAT32 = TOLERANCES[torch.float32]
needs_kernels()
pytestmark = pytest.mark.filterwarnings("ignore:divide by zero encountered in log")
LONG = Shape(heads=1, slots=12, page_size=37, group=4)  # more tokens than a tile holds


@pytest.fixture(params=SHAPES, ids=str)
def shape(request: pytest.FixtureRequest) -> Shape:
    return request.param


def served(ops: Ops) -> set[str]:
    assert set(ops.served.values()) == {"triton"}
    return set(ops.served)


# Attention over pages -------------------------------------------------------------------------


def check_attention(
    ops: Ops,
    q: Tensor,
    pages: PagedKV,
    slots: Tensor,
    seen: Tensor,
    tolerance: Tolerance,
    softcap: float | None = None,
) -> PartialAttention:
    part = ops.attend_pages(q, pages, slots, seen, scale=0.2, softcap=softcap, tail_fill=1)
    exact = reference.attend_pages(q, pages, slots, seen, scale=0.2, softcap=softcap)
    assert served(ops) == {"attend_pages"}
    torch.testing.assert_close(part.out.float(), exact.out, **tolerance)
    torch.testing.assert_close(part.lse, exact.lse, **FLOAT32)
    return part


@pytest.mark.parametrize("softcap", [None, 3.0])
def test_pages_are_attended_as_defined(
    ops: Ops,
    device: str,
    shape: Shape,
    dtype: torch.dtype,
    tolerance: Tolerance,
    softcap: float | None,
) -> None:
    pages, q = pool(shape, dtype, device), queries(shape, dtype, device)
    seen = newest_positions(shape, pages)
    check_attention(ops, q, pages, lists(shape, 4, device), seen, tolerance, softcap)


@pytest.mark.parametrize("count", [2, 4, 5, 12])
def test_a_list_of_any_length_is_split_and_reduced(
    ops: Ops, device: str, dtype: torch.dtype, tolerance: Tolerance, count: int
) -> None:
    pages, q = pool(LONG, dtype, device), queries(LONG, dtype, device)
    slots = lists(LONG, count, device)
    check_attention(ops, q, pages, slots, newest_positions(LONG, pages), tolerance)


def test_a_program_may_walk_over_several_tiles(
    ops: Ops, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hybrid_kv.ops.triton import paged

    pages, q = pool(LONG, torch.float32, device), queries(LONG, torch.float32, device)
    seen = newest_positions(LONG, pages)
    for programs in (1, 2, 3):
        monkeypatch.setattr(paged, "PROGRAMS", programs)
        check_attention(ops, q, pages, lists(LONG, 12, device), seen, FLOAT32)


def test_float32_queries_read_pages_of_16_bits(ops: Ops, device: str) -> None:
    shape = SHAPES[0]
    for dtype in (torch.float16, torch.bfloat16):
        pages, q = pool(shape, dtype, device), queries(shape, torch.float32, device)
        seen = newest_positions(shape, pages)
        check_attention(ops, q, pages, lists(shape, 4, device), seen, TOLERANCES[dtype])


def test_every_head_may_read_the_same_pages(ops: Ops, device: str) -> None:
    shape = replace(SHAPES[1], new=3)
    pages, q = pool(shape, torch.float32, device), queries(shape, torch.float32, device)
    slots = torch.arange(shape.slots, device=device).expand(shape.heads, shape.new, -1)
    check_attention(ops, q, pages, slots, newest_positions(shape, pages), FLOAT32)


def test_one_key_is_its_own_attention(ops: Ops, device: str) -> None:
    shape = replace(SHAPES[0], slots=1)
    pages = pool(shape, torch.float32, device, tail_fill=1)
    slots = torch.zeros(shape.heads, 1, 1, dtype=torch.int64, device=device)
    q, seen = queries(shape, torch.float32, device), torch.zeros(1, dtype=torch.int64)
    part = check_attention(ops, q, pages, slots, seen.to(device), FLOAT32)
    value = pages.v[:, 0, :1].expand_as(part.out)
    torch.testing.assert_close(part.out, value, **FLOAT32)


@pytest.mark.parametrize(
    ("dtype", "lengths", "softcap", "biased", "count"),
    in_pairs(list(TOLERANCES), ([150, 0, 5], [0, 0, 1]), (None, 3.0), (False, True), (3, 70)),
    ids=str,
)
def test_ragged_rows_are_attended_as_defined(
    ops: Ops,
    device: str,
    dtype: torch.dtype,
    tolerance: Tolerance,
    lengths: list[int],
    softcap: float | None,
    biased: bool,
    count: int,
) -> None:
    starts = [2, lengths[0] + 5, lengths[0] + lengths[1] + 9]
    rows = starts[2] + lengths[2] + 1
    q, k, v = (
        torch.randn(*size).to(device, dtype) for size in ((3, count, 72), (rows, 72), (rows, 72))
    )
    bias = torch.randn(rows).masked_fill(torch.rand(rows) < 0.3, -torch.inf).to(device)
    options = {"scale": 0.2, "softcap": softcap, "bias": bias if biased else None}
    part = ops.attend_ragged(q, k, v, starts, lengths, **options)
    exact = reference.attend_ragged(q, k, v, starts, lengths, **options)
    assert served(ops) == {"attend_ragged"}
    torch.testing.assert_close(part.out.float(), exact.out, **tolerance)
    torch.testing.assert_close(part.lse, exact.lse, **FLOAT32)


@pytest.mark.parametrize("count", [0, 2, 12])
def test_a_query_that_sees_nothing_gets_the_empty_part(ops: Ops, device: str, count: int) -> None:
    shape = replace(LONG, new=2)
    pages, q = pool(shape, torch.float32, device), queries(shape, torch.float32, device)
    slots = lists(shape, max(1, count), device)[..., :count]
    seen = torch.tensor([-1, 443], device=device)
    part = ops.attend_pages(q, pages, slots, seen, scale=0.2, tail_fill=1)
    by_token = part.lse.view(shape.heads, shape.group, shape.new)
    assert (by_token[..., 0] == -torch.inf).all()
    assert (part.out.view(shape.heads, shape.group, shape.new, -1)[:, :, 0] == 0).all()
    assert (by_token[..., 1] == -torch.inf).all() == (count == 0)


def test_hidden_slots_may_hold_anything(ops: Ops, device: str) -> None:
    pages, q = pool(SHAPES[1], torch.float32, device), queries(SHAPES[1], torch.float32, device)
    clean = copy_of(pages)
    for tensor in (pages.k, pages.v):
        tensor[:, pages.positions == HIDDEN] = torch.nan
    slots, seen = lists(SHAPES[1], 4, device), newest_positions(SHAPES[1], pages)
    part = ops.attend_pages(q, pages, slots, seen, scale=0.2, tail_fill=1)
    same = ops.attend_pages(q, clean, slots, seen, scale=0.2, tail_fill=1)
    assert torch.equal(part.out, same.out)
    assert torch.equal(part.lse, same.lse)


# Merge ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [2, 3, 5])
@pytest.mark.parametrize("rows", [(2, 3), (7,)])
def test_parts_of_any_dtype_are_merged(
    ops: Ops, device: str, dtype: torch.dtype, tolerance: Tolerance, count: int, rows: tuple
) -> None:
    dtypes = [dtype, torch.float32, torch.float16, torch.bfloat16, torch.float32]
    parts = [
        PartialAttention(
            torch.randn(*rows, 72).to(kind).to(device), 9 * torch.randn(rows, device=device)
        )
        for kind in dtypes[:count]
    ]
    parts[1].lse[-1] = -torch.inf
    parts[1].out[-1] = 0
    for part in parts:
        part.lse[0] = -torch.inf
        part.out[0] = 0
    merged, exact = ops.merge(parts, dtype), reference.merge(parts, dtype)
    assert served(ops) == {"merge"}
    assert merged.out.dtype == dtype
    torch.testing.assert_close(merged.out, exact.out, **tolerance)
    torch.testing.assert_close(merged.lse, exact.lse, **FLOAT32)
    assert (merged.lse[0] == -torch.inf).all()
    assert (merged.out[0] == 0).all()


@pytest.mark.gpu
def test_a_part_in_pinned_host_memory_is_read_where_it_lies() -> None:
    from hybrid_kv.ops.triton import paged

    near = PartialAttention(torch.randn(7, 72, device="cuda"), torch.randn(7, device="cuda"))
    far = PartialAttention(torch.randn(7, 72).pin_memory(), torch.randn(7).pin_memory())
    merged = paged.merge([near, far], torch.float32)
    exact = reference.merge([near, PartialAttention(*(t.cuda() for t in far))], torch.float32)
    torch.testing.assert_close(merged, exact, **FLOAT32)


# Pages ----------------------------------------------------------------------------------------


def test_digests_are_those_of_the_filled_keys(
    ops: Ops, device: str, shape: Shape, dtype: torch.dtype
) -> None:
    pages = pool(shape, dtype, device)
    pages.k[:, pages.positions == HIDDEN] = 100.0
    exact = copy_of(pages)
    slots = torch.tensor([shape.slots - 1, 0, 3])
    ops.update_digests(pages, slots.numpy())
    assert served(ops) == {"update_digests"}
    reference_pages.update_digests(exact, slots.to(device))
    assert torch.equal(pages.key_min, exact.key_min)
    assert torch.equal(pages.key_max, exact.key_max)
    assert (pages.key_max[:, 1] == 0).all()  # not asked for


def test_appended_tokens_fill_pages_and_their_digests(
    ops: Ops, device: str, shape: Shape, dtype: torch.dtype
) -> None:
    pages = pool(shape, dtype, device, tail_fill=0)
    exact, defined = copy_of(pages), Ops("reference")
    size = shape.page_size
    start = (shape.slots - 4) * size
    pages.positions[-4:], exact.positions[-4:] = HIDDEN, HIDDEN
    for place in [*range(start, start + 3), *range(start + 2, start + 4)]:
        # The third token comes twice: it was taken back, its key must not linger in the digest.
        k, v = (torch.randn(shape.heads, 1, shape.dim).to(dtype).to(device) for _ in range(2))
        for target, writer in ((pages, ops), (exact, defined)):
            writer.append(target, k, v, torch.tensor([place]).numpy(), 1000 + place)
    assert served(ops) == {"append"}
    assert all(torch.equal(a, b) for a, b in zip(pages, exact, strict=True))


def test_appending_works_without_digests(ops: Ops, device: str) -> None:
    pages = pool(SHAPES[0], torch.float32, device)._replace(key_min=None, key_max=None)
    exact = copy_of(pages)
    k, v = (torch.randn(2, 1, 128, device=device) for _ in range(2))
    for target, writer in ((pages, ops), (exact, Ops("reference"))):
        writer.append(target, k, v, torch.tensor([100]).numpy(), 7)
    assert served(ops) == {"append"}
    assert all(map(torch.equal, pages[:3], exact[:3]))


@pytest.mark.parametrize("count", [1, 3, 12])
def test_pages_behind_the_counted_ones_are_not_attended(
    ops: Ops, device: str, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many programs as there might be pages share those that there are."""
    from hybrid_kv.ops.triton import paged

    pages, q = pool(LONG, torch.float32, device), queries(LONG, torch.float32, device)
    slots, seen = lists(LONG, 12, device), newest_positions(LONG, pages)
    counted = torch.tensor([count], device=device)
    for programs in (1, 3, 256):
        monkeypatch.setattr(paged, "PROGRAMS", programs)
        found = paged.attend_pages(q, pages, slots, seen, scale=0.3, count=counted)
        exact = reference.attend_pages(q, pages, slots[..., :count], seen, scale=0.3)
        torch.testing.assert_close(found.out, exact.out, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(found.lse, exact.lse, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("has_digests", [True, False])
def test_a_token_is_stored_and_listed_by_numbers(
    ops: Ops, device: str, dtype: torch.dtype, has_digests: bool
) -> None:
    shape = SHAPES[0]
    pages = pool(shape, dtype, device, tail_fill=0)
    if not has_digests:
        pages = pages._replace(key_min=None, key_max=None)
    exact, size = copy_of(pages), shape.page_size
    tables = [torch.full([9], 77, device=device) for _ in range(2)]
    for place, listed in ((3 * size + size - 1, 4), (2 * size, 5)):
        numbers = torch.tensor([place, 1000 + place, listed, 1, 2], device=device)
        k, v = (torch.randn(shape.heads, shape.dim).to(dtype).to(device) for _ in range(2))
        ops.append_at(pages, k, v, numbers, tables[0])
        reference_pages.append_at(exact, k, v, numbers, tables[1])
    assert served(ops) == {"append_at"}
    assert all(torch.equal(a, b) for a, b in zip(pages, exact, strict=True) if a is not None)
    assert tables[0].tolist() == tables[1].tolist() == [77, 77, 77, 3, 2, 77, 77, 77, 77]


@pytest.mark.parametrize(("count", "newest"), [(3, 1), (12, 4), (40, 2)])
def test_listed_pages_are_scored_where_they_lie(
    ops: Ops, device: str, dtype: torch.dtype, count: int, newest: int
) -> None:
    q = queries(SHAPES[0], dtype, device)
    low = torch.randn(SHAPES[0].heads, 60, SHAPES[0].dim).to(dtype).to(device)
    pages = pool(SHAPES[0], dtype, device)._replace(key_min=low, key_max=low + 1)
    table = torch.randperm(60, generator=torch.Generator().manual_seed(1))[:41].to(device)
    chosen = min(count, 8)
    numbers = torch.tensor([0, 0, count, newest, chosen], device=device)
    found = ops.choose_listed(q, pages, table, numbers, oldest=2, most=9)
    assert served(ops) == {"choose_listed"}
    exact = reference_pages.listed_page_scores(q, low, low + 1, table, numbers, 2)[:, 0]
    for head in range(len(found)):
        places = [table.tolist().index(slot) for slot in found[head, 0, :chosen].tolist()]
        assert set(places) >= {0, 1} & set(range(count))
        assert max(places) < count
        assert {*range(max(0, count - newest), count)} <= set(places)
        least = min(float(exact[head, place]) for place in places)
        others = [float(exact[head, one]) for one in range(count) if one not in places]
        assert all(one <= least + 1e-2 for one in others)


def test_pages_are_chosen_as_defined(
    ops: Ops, device: str, shape: Shape, dtype: torch.dtype
) -> None:
    num_pages = 77
    q = queries(shape, dtype, device)
    low = torch.randn(shape.heads, num_pages + 3, shape.dim).to(dtype).to(device)
    high = low + 1
    low, high = low[:, 2:-1], high[:, 2:-1]  # a part of the pool
    sizes = {"new": shape.new, "oldest": 2, "newest": 3, "count": 31}
    chosen = ops.choose_pages(q, low, high, **sizes)
    assert served(ops) == {"choose_pages"}
    exact = reference_pages.choose_pages(q, low, high, **sizes)
    assert torch.equal(chosen.sort().values, exact.sort().values)
    assert (chosen[..., -1] == num_pages - 1).all()


@pytest.mark.parametrize("page_size", [1, 16, 37])
def test_pages_are_copied_slot_by_slot(
    ops: Ops, device: str, dtype: torch.dtype, page_size: int
) -> None:
    shape = replace(SHAPES[0], page_size=page_size)
    source, target = pool(shape, dtype), pool(shape, dtype, device)
    if device == "cuda":
        source = PagedKV(*(tensor.pin_memory() for tensor in source))
    exact = copy_of(target)
    from_ = torch.tensor([[0, 3, -1], [6, 1, 5]], device=device)
    to = torch.tensor([[1, 2, 3], [4, -1, 6]], device=device)
    ops.copy_pages(source, target, from_, to)
    assert served(ops) == {"copy_pages"}
    reference_pages.copy_pages(source, exact, from_, to)
    assert torch.equal(target.k, exact.k)
    assert torch.equal(target.v, exact.v)


# Nearest keys ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keys", "count"), [(1, 1), (15, 5), (17, 17), (65, 65), (777, 9), (777, 20)]
)
def test_nearest_keys_are_those_of_brute_force(
    ops: Ops, device: str, dtype: torch.dtype, keys: int, count: int
) -> None:
    q = torch.randn(2, 5, 72).to(dtype).to(device)
    k = torch.randn(2, keys + 1, 72).to(dtype).to(device)[:, 1:]
    ids = ops.nearest_keys(q, k, count)
    assert served(ops) == {"nearest_keys"}
    assert ids.dtype == torch.int32
    every = torch.einsum("hqd,hnd->hqn", q.double(), k.double())
    found = every.gather(-1, ids.long())
    torch.testing.assert_close(found, every.topk(count).values, **FLOAT32)
    assert (ids.sort().values.diff() > 0).all()


def test_queries_are_searched_in_portions_that_fit_into_the_scratch(
    ops: Ops, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hybrid_kv.ops import triton

    q, k = torch.randn(2, 11, 128, device=device), torch.randn(2, 300, 128, device=device)
    once = ops.nearest_keys(q, k, 3)
    monkeypatch.setattr(triton, "SCRATCH_BYTES", 4 * 2 * triton.query_bytes(300, 3))
    assert triton.portion(2, 300, 3) == 4
    assert torch.equal(ops.nearest_keys(q, k, 3), once)
    assert ops.nearest_keys(q[:, :0], k, 3).shape == (2, 0, 3)
