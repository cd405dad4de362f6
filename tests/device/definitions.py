"""Kernels by their definitions: one launch each, computed by torch when the stream gets there.

What a kernel computes is defined in plain torch (`ops/reference.py`, `ops/reference_pages.py`,
`ops/sketch_select.py`, `ops/tail.py`), and tests/ops/triton holds the kernels to it. With the
definitions as kernels a device selects by itself, records and replays what it is told, without
Triton and in a hundredth of the interpreter's time. They read page-locked memory when they run, and
write only what they are given, as kernels do.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import fields, is_dataclass, replace
from functools import cache
from types import ModuleType
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from hybrid_kv.ops import devices, reference, reference_pages, sketch_select, tail
from hybrid_kv.ops.tail import UnreadPart
from hybrid_kv.types import Candidates, PartialAttention
from tests.device.pinned import Borrowed
from tests.device.tensors import DeviceTensor, launch_like, running, value_of

_PACKAGE = "hybrid_kv.ops.triton"


def _mapped(change: Callable[[Any], Any], value: Any) -> Any:
    """The same with its tensors changed, in tuples, lists and dataclasses too."""
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_mapped(change, one) for one in value))
    if isinstance(value, (tuple, list)):
        return type(value)(_mapped(change, one) for one in value)
    if is_dataclass(value) and not isinstance(value, type):
        own = {one.name: getattr(value, one.name) for one in fields(value) if one.init}
        new = {name: _mapped(change, part) for name, part in own.items()}
        changed = {name: part for name, part in new.items() if part is not own[name]}
        return replace(value, **changed) if changed else value
    return change(value)


def _reached(value: Any) -> Any:
    return value.reach() if isinstance(value, Borrowed) else value


def _tensors(value: Any) -> Iterator[Tensor]:
    if is_dataclass(value):
        for one in fields(value):
            yield from _tensors(getattr(value, one.name))
        return
    for leaf in tree_leaves(value):
        if isinstance(leaf, Tensor):
            yield leaf
        elif is_dataclass(leaf):
            yield from _tensors(leaf)


def _kernel(name: str, compute: Any, shapes: Any, *given: Any) -> Any:
    """One launch of `compute(*given)`, into new tensors of some shapes [(size, dtype)].

    Raises:
        ValueError: a tensor lies where no kernel reaches it.
    """
    found = list(_tensors(given))
    indexes = {one.index for one in found if isinstance(one, DeviceTensor)}
    if len(indexes) != 1:
        raise ValueError(f"Pointer arguments of {name} lie on {len(indexes)} devices")
    for one in found:
        if not isinstance(one, DeviceTensor) and one.numel() and not running().is_pinned(one):
            raise ValueError(f"Pointer argument of {name} cannot be accessed (cpu tensor?)")
    index = indexes.pop()

    def held(value: Any) -> Any:
        is_host = isinstance(value, Tensor) and not isinstance(value, DeviceTensor)
        return running().borrow(value, index, is_copy=False) if is_host else value_of(value)

    kept = _mapped(held, given)
    like = tuple(torch.empty(size, dtype=dtype, device="meta") for size, dtype in shapes)
    numbers = (one for one in given if isinstance(one, (int, float, str)))
    seen = (*map(value_of, found), *numbers)
    return launch_like(name, like, index, lambda: compute(*_mapped(_reached, kept)), *seen)


def _part(name: str, compute: Any, size: Sequence[int], *given: Any) -> PartialAttention:
    shapes = [(size, torch.float32), (size[:-1], torch.float32)]
    return PartialAttention(*_kernel(name, compute, shapes, *given))


def _reads(rows: Tensor, of: Tensor) -> None:
    """Counts rows, of bool, that a kernel reads of a tensor in host memory."""
    if not isinstance(of, DeviceTensor):
        running().counts.read += int(rows.sum()) * of.shape[-1] * of.itemsize


# What stands for each module of kernels ----------------------------------------------------------


def _attend_pages(q, pages, slots, query_positions, *, scale, softcap=None, count=None):  # type: ignore[no-untyped-def]
    def compute(*given: Any) -> Any:
        *first, count = given
        return reference.attend_pages(*first, scale=scale, softcap=softcap, count=count)

    return _part("attend_pages", compute, q.shape, q, pages, slots, query_positions, count)


def _attend_ragged(q, k, v, starts, lengths, *, scale, softcap=None, bias=None, uploads):  # type: ignore[no-untyped-def]
    def compute(q: Tensor, k: Tensor, v: Tensor, extents: Tensor, bias: Tensor | None) -> Any:
        starts, lengths = extents.view(2, -1).tolist()
        return reference.attend_ragged(
            q, k, v, starts, lengths, scale=scale, softcap=softcap, bias=bias
        )

    extents = uploads(np.asarray([*starts, *lengths]), q.device)
    return _part("attend_ragged", compute, q.shape, q, k, v, extents, bias)


def _attend_blocks(q, k, v, mask, *, scale, softcap=None):  # type: ignore[no-untyped-def]
    def compute(q: Tensor, k: Tensor, v: Tensor, mask: Any) -> Any:
        out, lse = reference.attend_blocks(q, k, v, mask, scale=scale, softcap=softcap)
        return out.to(q.dtype), lse

    size = (*q.shape[:3], v.shape[3])
    shapes = [(size, q.dtype), (size[:-1], torch.float32)]
    return PartialAttention(*_kernel("attend_blocks", compute, shapes, q, k, v, mask))


def _merge(parts, dtype, device=None):  # type: ignore[no-untyped-def]
    size = parts[0].out.shape
    shapes = [(size, dtype), (size[:-1], torch.float32)]
    given = [PartialAttention(*part) for part in parts]
    return PartialAttention(
        *_kernel("merge", lambda one: reference.merge(one, dtype), shapes, given)
    )


def _group_page_scores(q, key_min, key_max, *, new):  # type: ignore[no-untyped-def]
    def compute(*given: Tensor) -> Any:
        return (reference_pages.page_scores(*given).unflatten(1, (-1, new)).amax(1),)

    shapes = [((len(q), new, key_min.shape[1]), torch.float32)]
    return _kernel("page_scores", compute, shapes, q, key_min, key_max)[0]


def _choose_pages(q, key_min, key_max, *, new, oldest, newest, count):  # type: ignore[no-untyped-def]
    return reference_pages.best_pages(
        _group_page_scores(q, key_min, key_max, new=new), oldest, newest, count
    )


def _update_digests(pages, slots):  # type: ignore[no-untyped-def]
    _kernel("update_digests", lambda *g: reference_pages.update_digests(*g) or (), [], pages, slots)


def _append_token(pages, k, v, place, position):  # type: ignore[no-untyped-def]
    def compute(pages: Any, k: Tensor, v: Tensor, place: int, position: int) -> Any:
        there = torch.tensor([place])
        pages.store(k[:, None], v[:, None], there, torch.tensor([position]))
        reference_pages.update_digests(pages, there // pages.k.shape[2])
        return ()

    _kernel("append", compute, [], pages, k, v, place, position)


def _append_at(*given):  # type: ignore[no-untyped-def]
    _kernel("append_at", lambda *g: reference_pages.append_at(*g) or (), [], *given)


def _listed_page_scores(q, key_min, key_max, table, numbers, oldest):  # type: ignore[no-untyped-def]
    def compute(*given: Any) -> Any:
        return (reference_pages.listed_page_scores(*given, oldest),)

    given = q, key_min, key_max, table, numbers
    return _kernel("listed_scores", compute, [((len(q), 1, len(table)), torch.float32)], *given)[0]


def _copy_pages(*given):  # type: ignore[no-untyped-def]
    _kernel("copy_pages", lambda *g: reference_pages.copy_pages(*g) or (), [], *given)


def _nearest_keys(queries, keys, count):  # type: ignore[no-untyped-def]
    shapes = [((*queries.shape[:2], count), torch.int32)]
    compute = lambda *g: (reference.nearest_keys(*g),)  # noqa: E731
    return _kernel("nearest_keys", compute, shapes, queries, keys, count)[0]


def _encode(to, keys, first):  # type: ignore[no-untyped-def]
    _kernel("encode_sketch", lambda *g: sketch_select.encode(*g) or (), [], to, keys, first)


def _find(by, q, k, *, new, width, times=1.0):  # type: ignore[no-untyped-def]
    def compute(by: Any, q: Tensor, keys: Tensor, *_: Any) -> Any:
        found = sketch_select.find(by, q, keys, new=new, width=width, times=times)
        _reads(found.ids >= 0, k)
        return tuple(found)

    shapes = [((len(q), new, width), torch.int32), ((*q.shape[:2], width), torch.float32)]
    return Candidates(*_kernel("find", compute, shapes, by, q, k, new, width, times))


def _exact_scores(q, k, ids):  # type: ignore[no-untyped-def]
    def compute(q: Tensor, keys: Tensor, ids: Tensor) -> Any:
        _reads(ids >= 0, k)
        return (sketch_select.exact_scores(q, keys, ids),)

    shapes = [((*q.shape[:2], ids.shape[-1]), torch.float32)]
    return _kernel("exact_scores", compute, shapes, q, k, ids)[0]


def _attend(found, v, limit, *, scale, softcap=None, discount=None):  # type: ignore[no-untyped-def]
    def compute(found: Candidates, values: Tensor, limit: Tensor, discount: Tensor | None) -> Any:
        attended = (found.scores >= limit[..., None]).unflatten(1, (-1, found.ids.shape[1]))
        _reads(attended.any(1) & (found.ids >= 0), v)  # a row once for its group
        return sketch_select.attend(
            found, values, limit, scale=scale, softcap=softcap, discount=discount
        )

    size = (*limit.shape, v.shape[-1])
    return _part("attend_candidates", compute, size, found, v, limit, discount)


def _best_limit(scores, top_k):  # type: ignore[no-untyped-def]
    shapes = [(scores.shape[:2], torch.float32)]
    compute = lambda *g: (sketch_select.best_limit(*g),)  # noqa: E731
    return _kernel("best_limit", compute, shapes, scores, top_k)[0]


def _attend_unread(known, q, scores, limit, own, seen, *, scale, softcap=None, form="gaussian"):  # type: ignore[no-untyped-def]
    def compute(known: Any, q: Tensor, scores: Tensor, limit: Tensor, seen: Tensor) -> Any:
        return tail.attend_unread(
            known, q, scores, limit, own, seen, scale=scale, softcap=softcap, form=form
        )

    shapes = [(q.shape, torch.float32), *[(q.shape[:2], torch.float32)] * 2]
    return UnreadPart(*_kernel("attend_unread", compute, shapes, known, q, scores, limit, seen))


_MODULES: dict[str, dict[str, Any]] = {
    "paged": {"attend_pages": _attend_pages, "attend_ragged": _attend_ragged, "merge": _merge},
    "blocks": {"attend_blocks": _attend_blocks},
    "digests": {
        "choose_pages": _choose_pages,
        "listed_page_scores": _listed_page_scores,
        "update_digests": _update_digests,
        "append_token": _append_token,
        "append_at": _append_at,
        "copy_pages": _copy_pages,
    },
    "nearest": {"nearest_keys": _nearest_keys},
    "sketch_scan": {"encode": _encode},
    "sketch_find": {
        "find": _find,
        "exact_scores": _exact_scores,
        "best_limit": _best_limit,
        "attend": _attend,
    },
    "unread": {"attend_unread": _attend_unread},
}


@contextmanager
def _imported(module: ModuleType) -> Iterator[None]:
    # Not by mock.patch.dict, which forgets every module that is first imported meanwhile: it would
    # be imported again, with other classes than those that are in use.
    before = sys.modules.get(module.__name__)
    sys.modules[module.__name__] = module
    try:
        yield
    finally:
        if before is None:
            del sys.modules[module.__name__]
        else:
            sys.modules[module.__name__] = before


@contextmanager
def defining() -> Iterator[None]:
    """The definitions serve as Triton's kernels, until the block ends."""
    import hybrid_kv.ops.triton as package

    state = devices.BackendState("cuda", "kernels by their definitions, for tests")
    with ExitStack() as undo:
        for name, functions in _MODULES.items():
            module = ModuleType(f"{_PACKAGE}.{name}")
            vars(module).update(functions)
            undo.enter_context(_imported(module))
            undo.enter_context(mock.patch.object(package, name, module, create=True))
        undo.enter_context(mock.patch.object(devices, "triton_state", cache(lambda: state)))
        yield
