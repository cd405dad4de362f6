"""The adapter of FlashInfer against the definition, with FlashInfer's interface made of torch."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from hybrid_kv.errors import BackendUnavailable
from hybrid_kv.ops import devices, flashinfer, operations, reference
from hybrid_kv.ops.dispatch import Ops
from hybrid_kv.types import PagedKV
from tests.ops import fake_flashinfer
from tests.ops.paged_data import Shape, lists, newest_positions, pool, queries
from tests.tolerances import TOLERANCES

SHAPE = Shape(heads=3, slots=9, dim=64, group=3)
FILL = 5
HALF = [torch.float16, torch.bfloat16]


@pytest.fixture
def wrapper(monkeypatch: pytest.MonkeyPatch) -> Iterator[type]:
    made = fake_flashinfer.BatchDecodeWithPagedKVCacheWrapper
    made.made = made.plans = 0
    monkeypatch.setitem(sys.modules, "flashinfer", fake_flashinfer)
    flashinfer._decoder.cache_clear()
    yield made
    flashinfer._decoder.cache_clear()


def check(
    shape: Shape,
    dtype: torch.dtype,
    count: int,
    softcap: float | None = None,
    pages: PagedKV | None = None,
    fill: int = FILL,
) -> None:
    pages = pages or pool(shape, dtype, tail_fill=fill)
    q, slots = queries(shape, dtype), lists(shape, count)
    part = flashinfer.attend_pages(q, pages, slots, fill, scale=0.2, softcap=softcap)
    exact = reference.attend_pages(
        q.double(),
        PagedKV(pages.k.double(), pages.v.double(), pages.positions),
        slots,
        newest_positions(shape, pages),
        scale=0.2,
        softcap=softcap,
    )
    assert part.out.dtype == dtype
    torch.testing.assert_close(part.out.float(), exact.out, **TOLERANCES[dtype])
    torch.testing.assert_close(part.lse, exact.lse, **TOLERANCES[torch.float32])


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("group", [1, 3, 8])
def test_each_head_attends_its_own_pages(
    wrapper: type, dtype: torch.dtype, softcap: float | None, group: int
) -> None:
    for count in (1, 2, 9):
        check(replace(SHAPE, group=group), dtype, count, softcap)


def test_one_plan_serves_all_layers_of_a_step_and_each_reads_its_own_pages(wrapper: type) -> None:
    layers = [pool(SHAPE, torch.float16, tail_fill=FILL) for _ in range(4)]
    for layer in layers:
        check(SHAPE, torch.float16, 4, pages=layer)
    assert (wrapper.made, wrapper.plans) == (1, 1)
    for layer in layers:  # the next token
        layer.positions[-1, FILL] = layer.positions[-1, FILL - 1] + 1
        check(SHAPE, torch.float16, 4, pages=layer, fill=FILL + 1)
    assert (wrapper.made, wrapper.plans) == (1, 2)


def test_whatever_a_schedule_depends_on_makes_a_new_plan(wrapper: type) -> None:
    for plans, case in enumerate(
        [
            (SHAPE, torch.float16, 3, None),
            (SHAPE, torch.bfloat16, 3, None),
            (SHAPE, torch.bfloat16, 3, 2.0),
            (SHAPE, torch.bfloat16, 4, 2.0),
            (replace(SHAPE, group=2), torch.bfloat16, 4, 2.0),
            (replace(SHAPE, dim=128), torch.bfloat16, 4, 2.0),
            (replace(SHAPE, page_size=11), torch.bfloat16, 4, 2.0),
        ],
        start=1,
    ):
        check(*case)
        assert wrapper.plans == plans


def test_longer_lists_get_a_larger_buffer_now_and_then(wrapper: type) -> None:
    for count in range(1, 10):
        check(SHAPE, torch.float16, count)
    assert wrapper.made == 5  # for 1, 2, 3, 5 and 9 pages


@pytest.mark.parametrize(
    ("shape", "dtype", "expressed"),
    [
        (SHAPE, torch.float16, True),
        (replace(SHAPE, new=2), torch.float16, False),
        (replace(SHAPE, dim=72), torch.float16, False),
        (replace(SHAPE, group=5), torch.float16, False),
    ],
)
def test_what_there_is_no_kernel_for_is_left_to_others(
    shape: Shape, dtype: torch.dtype, expressed: bool
) -> None:
    pages, slots = pool(shape, dtype), lists(shape, 3)
    assert flashinfer.expresses(queries(shape, dtype), pages, slots) is expressed
    assert not flashinfer.expresses(queries(shape, torch.float32), pages, slots)
    assert not flashinfer.expresses(queries(shape, dtype), pages, slots[..., :0])


def test_a_request_by_name_reaches_it(wrapper: type, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operations, "backends_on", lambda *_: frozenset({"flashinfer"}))
    ops, pages = Ops("flashinfer"), pool(SHAPE, torch.float16, tail_fill=FILL)
    q, slots = queries(SHAPE, torch.float16), lists(SHAPE, 4)
    seen = newest_positions(SHAPE, pages)
    part = ops.attend_pages(q, pages, slots, seen, scale=0.2, tail_fill=FILL)
    assert ops.served["attend_pages"] == "flashinfer"
    exact = reference.attend_pages(q, pages, slots, seen, scale=0.2)
    torch.testing.assert_close(part.lse, exact.lse, **TOLERANCES[torch.float32])
    assert ops.reads_pages(q[None, :, :1])


FAILURES = [
    RuntimeError("ninja: build stopped\nline after line"),
    ImportError("cannot import name 'BatchDecodeWithPagedKVCacheWrapper'"),
    AssertionError(),
]


@pytest.mark.parametrize("error", FAILURES, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("step", ["__init__", "plan", "run"])
def test_a_flashinfer_that_is_broken_says_so_each_time_and_can_be_mended(
    wrapper: type, monkeypatch: pytest.MonkeyPatch, step: str, error: Exception
) -> None:
    """A wrapper that could not be made left a buffer behind, and the next call met None."""

    def fail(*_: object, **__: object) -> None:
        raise error

    first = str(error).split("\n")[0] or "no message"
    said = f"'flashinfer' failed in its paged decode: {type(error).__name__}: {first}; mend its"
    with monkeypatch.context() as patch:
        patch.setattr(wrapper, step, fail)
        for _ in range(2):
            with pytest.raises(BackendUnavailable, match=re.escape(said)) as caught:
                check(SHAPE, torch.float16, 4)
            assert caught.value.__cause__ is error
            assert "use backend='auto'" in str(caught.value)
    check(SHAPE, torch.float16, 4)


def test_a_plan_that_failed_is_made_again(wrapper: type, monkeypatch: pytest.MonkeyPatch) -> None:
    check(SHAPE, torch.float16, 4)
    plans, plan = wrapper.plans, wrapper.plan

    def half(self: object, *words: object, **options: object) -> None:
        plan(self, *words, **options)
        raise RuntimeError("after half of it")

    with monkeypatch.context() as patch:
        patch.setattr(wrapper, "plan", half)
        with pytest.raises(BackendUnavailable):
            check(SHAPE, torch.float16, 3)
    check(SHAPE, torch.float16, 4)
    assert wrapper.plans == plans + 2


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory."), MemoryError()])
def test_memory_that_runs_out_in_flashinfer_is_not_taken_for_a_broken_one(
    wrapper: type, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(wrapper, "run", fail)
    with pytest.raises(type(error)) as caught:
        check(SHAPE, torch.float16, 4)
    assert caught.value is error


@pytest.mark.gpu(real=True)
@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_flashinfer_itself_agrees(dtype: torch.dtype, softcap: float | None) -> None:
    if (state := devices.flashinfer_state()).device_type is None:
        pytest.skip(state.detail)
    shape = replace(SHAPE, group=4, dim=128)
    for fill in (FILL, FILL + 1):
        pages = pool(shape, dtype, "cuda", tail_fill=fill)
        q, slots = queries(shape, dtype, "cuda"), lists(shape, 4, "cuda")
        part = flashinfer.attend_pages(q, pages, slots, fill, scale=0.2, softcap=softcap)
        seen = newest_positions(shape, pages)
        exact = reference.attend_pages(q, pages, slots, seen, scale=0.2, softcap=softcap)
        torch.testing.assert_close(part.out.float(), exact.out, **TOLERANCES[dtype])
        torch.testing.assert_close(part.lse, exact.lse, **TOLERANCES[torch.float32])
