"""Tensors of an emulated device, and what an operator on them tells it.

A tensor reports "cuda:n" and keeps its values in host memory that plain code cannot reach. An
operator is a view (nothing is told), one launch, or something that the host waits for. Shapes come
from running it on the "meta" device; its values are computed when the queue gets there.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from tests.device.machine import Block, Machine

aten = torch.ops.aten

_SHAPED_BY_VALUES = (
    aten.nonzero.default,
    aten.masked_select.default,
    aten._unique2.default,
    aten.unique_consecutive.default,
    aten.unique_dim.default,
    aten.repeat_interleave.Tensor,
    aten.bincount.default,
)
"""The host waits for these, since it must know how large their result is."""

_MEMORY_ALONE = (
    aten.new_empty.default,
    aten.new_empty_strided.default,
    aten.empty_like.default,
)

_INDEXING = (aten.index.Tensor, aten.index_put_.default, aten.index_put.default)

machine: Machine | None = None
"""The machine that is emulated now."""


def running() -> Machine:
    if machine is None:
        raise RuntimeError("a tensor of an emulated device is used after the device has gone")
    return machine


class DeviceTensor(Tensor):
    """A tensor of device `cuda:index`, whose values are in `inner`, a part of `block`."""

    inner: Tensor
    block: Block
    index: int

    @staticmethod
    def __new__(cls, inner: Tensor, block: Block, index: int) -> DeviceTensor:
        if torch.is_inference_mode_enabled():
            with torch._C._InferenceMode(False):
                self = _wrapper_of(inner, index)
        else:
            self = _wrapper_of(inner, index)
        self.inner, self.block, self.index = inner, block, index
        return self

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __repr__(self, *args: object, **kwargs: object) -> str:
        return f"DeviceTensor({tuple(self.shape)}, {self.dtype}, cuda:{self.index})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        known = _known.get(id(func)) or known_of(func)  # an operator's own hash takes long
        if known.is_view:
            return _viewed(known, args, kwargs)
        if known.handle is not None:
            return known.handle(*args, **kwargs)
        if known.is_indexing and _selects_by_mask(args):
            return _waited_for(known, args, kwargs)
        return _launched(known, args, kwargs)


@cache
def device_of(index: int) -> torch.device:
    return torch.device("cuda", index)


def _wrapper_of(inner: Tensor, index: int) -> DeviceTensor:
    return torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined, no-any-return]
        DeviceTensor,
        inner.size(),
        inner.stride(),
        inner.storage_offset(),
        dtype=inner.dtype,
        device=device_of(index),
    )


class Known(NamedTuple):
    """What an operator is, which is looked up once.

    handle: what serves it, where it is neither a view nor a launch. run: what computes its values.
    """

    func: Any
    name: str
    run: Any
    handle: Callable[..., Any] | None
    is_view: bool
    is_indexing: bool
    written: tuple[tuple[int, str], ...]
    gives_back: bool
    changes_shape: bool


_known: dict[int, Known] = {}
"""By id: operators live as long as torch."""


@cache
def known_of(func: Any) -> Known:
    """What an operator is."""

    def memory_alone(*args: Any, **kwargs: Any) -> Tensor:
        return empty_on_device(_shape_of(func, args, kwargs), args[0].index)

    def decomposed(*args: Any, **kwargs: Any) -> Any:
        return func.decompose(*args, **kwargs)  # in inference mode; it may copy or only look

    def waited_for(*args: Any, **kwargs: Any) -> Any:
        return _waited_for(known, args, kwargs)

    written = tuple(
        (number, argument.name)
        for number, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )
    aliases = any(one.alias_info is not None for one in func._schema.returns)
    is_view = aliases and not written
    handle: Callable[..., Any] | None = _HANDLED.get(func)
    if handle is None and is_view and _is_composite(func):
        handle = decomposed
    if handle is None and func in _SHAPED_BY_VALUES:
        handle = waited_for
    if handle is None and func in _MEMORY_ALONE:
        handle = memory_alone
    known = Known(
        func,
        str(func),
        STAND_INS.get(func, func),
        handle,
        handle is None and (is_view or func is aten._unsafe_view.default),
        func in _INDEXING,
        written,
        bool(func._schema.returns),
        torch.Tag.inplace_view in func.tags,
    )
    _known[id(func)] = known
    return known


_HOLDING = (tuple, list, dict)


def mapped(function: Callable[[Any], Any], value: Any) -> Any:
    """As `tree_map`, over what operators take and give, in a tenth of its time."""
    if isinstance(value, (tuple, list)):
        found = [
            mapped(function, one) if isinstance(one, _HOLDING) else function(one) for one in value
        ]
        return found if isinstance(value, list) else tuple(found)
    if isinstance(value, dict):
        return {name: mapped(function, one) for name, one in value.items()}
    return function(value)


def leaves_of(*values: Any) -> list[Any]:
    """As `tree_leaves`, in a tenth of its time."""
    found: list[Any] = []
    for value in values:
        if isinstance(value, (tuple, list)):
            found += leaves_of(*value)
        elif isinstance(value, dict):
            found += leaves_of(*value.values())
        else:
            found.append(value)
    return found


def value_of(value: object) -> object:
    return value.inner if isinstance(value, DeviceTensor) else value


def on_device(inner: Tensor, index: int) -> DeviceTensor:
    """A tensor of the device around memory that is nobody else's, with its values."""
    values = inner.clone()
    block = running().own(inner, index)
    inner.copy_(values)
    return DeviceTensor(inner, block, index)


def empty_on_device(like: Tensor, index: int) -> DeviceTensor:
    """Memory for a tensor such as `like`, each element in a place of its own."""
    if 0 in like.stride() and any(
        size > 1 and not step for size, step in zip(like.size(), like.stride(), strict=True)
    ):
        like = torch.empty_like(like, device="meta")
    inner, block = running().allocate(like, index)
    return DeviceTensor(inner, block, index)


def launch_like(name: str, results: Any, index: int, compute: Any, *operands: object) -> Any:
    """One launch that fills new tensors such as `results`, on "meta", with what `compute` gives."""
    if isinstance(results, Tensor):
        one = empty_on_device(results, index)
        to = one.inner
        running().launch(name, index, lambda: to.copy_(compute()), *operands, to)
        return one
    shapes, spec = tree_flatten(results)
    made = [empty_on_device(t, index) if isinstance(t, Tensor) else t for t in shapes]
    targets = [m.inner if isinstance(m, DeviceTensor) else None for m in made]

    def run() -> None:
        for target, value in zip(targets, tree_leaves(compute()), strict=True):
            if target is not None:
                target.copy_(value)

    running().launch(name, index, run, *operands, *(t for t in targets if t is not None))
    return tree_unflatten(made, spec)


def index_of(func: Any, args: Any, kwargs: Any) -> int:
    """The device on which an operator runs.

    Raises:
        RuntimeError: its tensors lie on several.
    """
    found: set[int] = set()
    for one in leaves_of(args, kwargs):
        if isinstance(one, DeviceTensor):
            found.add(one.index)
        elif isinstance(one, Tensor) and one.dim() and one.device.type == "cpu":
            if func in _INDEXING:
                running().host_waits("an index in host memory")
                continue
            raise RuntimeError(
                "Expected all tensors to be on the same device, but found at least two devices, "
                f"cuda:{max(found, default=0)} and cpu! ({func})"
            )
    if len(found) > 1:
        raise RuntimeError(
            f"Expected all tensors to be on the same device, but found cuda:0 and cuda:1! ({func})"
        )
    return found.pop()


def _selects_by_mask(args: Any) -> bool:
    return any(isinstance(t, Tensor) and t.dtype in (torch.bool, torch.uint8) for t in args[1])


def _is_composite(func: Any) -> bool:
    return bool(
        torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")
    )


def _viewed(known: Known, args: Any, kwargs: Any) -> Any:
    func, base = known.func, args[0] if args else None
    if type(base) is DeviceTensor and not kwargs:  # most of them
        out = func(base.inner, *args[1:])
        if type(out) is Tensor:
            one = DeviceTensor(out, base.block, base.index)
            if func is not aten._unsafe_view.default:
                torch._functionalize_unsafe_set(one, base)  # type: ignore[attr-defined]
            return one
    else:
        base = next(t for t in leaves_of(args, kwargs) if isinstance(t, DeviceTensor))
        out = func(*mapped(value_of, args), **mapped(value_of, kwargs))
    wrapped = mapped(
        lambda t: DeviceTensor(t, base.block, base.index) if isinstance(t, Tensor) else t, out
    )
    if func is not aten._unsafe_view.default:
        for one in leaves_of(wrapped):  # as `return_and_correct_aliasing`, in a tenth of its time
            torch._functionalize_unsafe_set(one, base)  # type: ignore[attr-defined]
    return wrapped


def _launched(known: Known, args: Any, kwargs: Any) -> Any:
    func, run = known.func, known.run
    index = index_of(func, args, kwargs)
    plain = mapped(value_of, args)
    named = mapped(value_of, _at_home(kwargs)) if kwargs else kwargs
    if known.written:
        running().launch(known.name, index, lambda: run(*plain, **named), *plain)
        written = _written(known, args, kwargs)
        if not known.changes_shape:
            return written
        return return_and_correct_aliasing(func, args, kwargs, written)  # which takes long
    shape = _shape_of(run, args, kwargs)
    return launch_like(known.name, shape, index, lambda: run(*plain, **named), *plain)


def _written(known: Known, args: Any, kwargs: Any) -> Any:
    """The arguments that an operator writes and gives back."""
    if not known.gives_back:
        return None
    found = []
    for number, name in known.written:
        by_name = name in kwargs or number >= len(args)
        found.append(kwargs.get(name) if by_name else args[number])
    return found[0] if len(found) == 1 else tuple(found)


_shapes: dict[object, Any] = {}
_MOST_SHAPES = 20_000


def _shape_of(run: Any, args: Any, kwargs: Any) -> Any:
    """Results on "meta", the same ones for operands alike: shapes of decompositions take long."""
    key = id(run), _alike(args), _alike(kwargs), torch.get_default_dtype()
    if (found := _shapes.get(key)) is None:
        plain, named = mapped(_bare, args), mapped(_bare, _at_home(kwargs, "meta"))
        with torch._C._DisableTorchDispatch():
            found = run(*plain, **named)
        if len(_shapes) >= _MOST_SHAPES:
            _shapes.clear()
        _shapes[key] = found
    return found


def _bare(value: object) -> object:
    if not isinstance(value, Tensor):
        return value
    return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device="meta")


def _alike(value: Any) -> object:
    """Equal for operands of which results have the same shape."""
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype
    if isinstance(value, (tuple, list)):
        return tuple(_alike(one) for one in value)
    if isinstance(value, dict):
        return tuple((name, _alike(one)) for name, one in value.items())
    return type(value), value  # 1, 1.0 and True are equal, and give other dtypes


def _at_home(kwargs: Any, device: str = "cpu") -> Any:
    asked = kwargs.get("device")
    kept = {k: v for k, v in kwargs.items() if k not in ("device", "pin_memory")}
    return kept if asked is None else {**kept, "device": device}


def _waited_for(known: Known, args: Any, kwargs: Any) -> Any:
    func, index = known.func, index_of(known.func, args, kwargs)
    running().host_waits(known.name, running().current(index).here())
    out = func(*mapped(value_of, args), **mapped(value_of, kwargs))
    if known.written:
        return return_and_correct_aliasing(func, args, kwargs, _written(known, args, kwargs))
    return mapped(lambda t: on_device(t, index) if isinstance(t, Tensor) else t, out)


def _scalar(tensor: DeviceTensor) -> Any:
    running().host_waits("item", running().current(tensor.index).here())
    return aten._local_scalar_dense.default(tensor.inner)


def _equal(one: DeviceTensor, two: DeviceTensor) -> bool:
    running().host_waits("equal", running().current(one.index).here())
    return bool(aten.equal.default(one.inner, two.inner))


def to_copy(tensor: DeviceTensor, **kwargs: Any) -> Any:
    device = kwargs.get("device")
    if device is None or torch.device(device).type == "cuda":
        index = tensor.index if device is None else (torch.device(device).index or 0)
        rest = {k: v for k, v in kwargs.items() if k in ("dtype", "memory_format")}
        if index == tensor.index:
            return _launched(known_of(aten._to_copy.default), (tensor,), rest)
        made = empty_on_device(_shape_of(aten._to_copy.default, (tensor,), rest), index)
        _between_devices(made, tensor)
        return made
    running().host_waits("a copy to the host", running().current(tensor.index).here())
    running().counts.to_host += tensor.inner.nbytes
    return aten._to_copy.default(tensor.inner.clone(), **{**kwargs, "device": device})


def _copy(target: Any, source: Any, non_blocking: bool = False) -> Any:
    if not target.numel():
        return target  # as torch: nobody is told, and nobody waits
    if isinstance(target, DeviceTensor) and isinstance(source, DeviceTensor):
        if target.index == source.index:
            to, from_ = target.inner, source.inner
            running().launch("copy_", target.index, lambda: to.copy_(from_), to, from_)
        else:
            _between_devices(target, source)
        return target
    if isinstance(target, DeviceTensor):
        to_device(target, source, non_blocking)
    else:
        to_host(target, source, non_blocking)
    return target


def _between_devices(target: DeviceTensor, source: DeviceTensor) -> None:
    """A copy by the current stream of the source; those of both devices are in step with it."""
    told, to, from_ = running(), target.inner, source.inner
    there, here = told.current(target.index), told.current(source.index)
    told.queue_waits(here, there.here())
    told.launch("peer", source.index, lambda: to.copy_(from_), to, from_)
    told.queue_waits(there, here.here())


def to_device(target: DeviceTensor, source: Tensor, non_blocking: bool) -> None:
    """A copy over the bus: read when the stream gets there, where the memory is page-locked."""
    if not source.numel():
        return
    told, to = running(), target.inner
    late = told.is_pinned(source)
    if not late:  # through memory of CUDA's own, which the host waits for
        told.forbid_in_capture("a copy from pageable memory")
    from_ = source.detach() if late else source.detach().clone()
    read = told.borrow(from_, target.index, is_copy=True)
    num_bytes = from_.nbytes
    told.copy_over_bus(
        "to_device", target.index, lambda: to.copy_(read.reach()), num_bytes, to, from_
    )
    if not late or not non_blocking:
        told.host_waits("a copy to the device", told.current(target.index).here())


def to_host(target: Tensor, source: DeviceTensor, non_blocking: bool) -> None:
    """A copy over the bus: it arrives when the stream gets there."""
    told, from_, to = running(), source.inner, target.detach()
    late = told.is_pinned(target)
    there = told.borrow(to, source.index, is_copy=True)
    told.copy_over_bus(
        "to_host", source.index, lambda: there.reach().copy_(from_), to.nbytes, to, from_
    )
    if not late or not non_blocking:
        told.host_waits("a copy to the host", told.current(source.index).here())


_HANDLED: dict[Any, Callable[..., Any]] = {
    torch.ops.prim.device.default: lambda tensor: device_of(tensor.index),
    aten._local_scalar_dense.default: _scalar,
    aten.item.default: _scalar,
    aten.is_nonzero.default: lambda tensor: bool(_scalar(tensor)),
    aten.equal.default: _equal,
    aten._to_copy.default: to_copy,
    aten.copy_.default: _copy,
}


def _efficient(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    compute_lse: bool,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> Any:
    """The memory-efficient attention of aten, which CPU builds lack."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1) if group > 1 else x for x in (k, v))
    scores = (q.float() @ k.float().mT) * (scale or q.shape[-1] ** -0.5)
    scores = scores if bias is None else scores + bias
    if is_causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(hidden, -torch.inf)
    none = torch.zeros((), dtype=torch.int64, device=q.device)
    return (scores.softmax(-1) @ v.float()).to(q.dtype), scores.logsumexp(-1), none, none


def _flash(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> Any:
    out, lse, seed, offset = _efficient(q, k, v, None, True, 0.0, is_causal, scale=scale)
    return out, lse, None, None, q.shape[2], k.shape[2], seed, offset, None


def _histogram(x: Tensor, bins: int = 100, min: float = 0, max: float = 0) -> Tensor:
    """aten.histc of integers, which CUDA has and a CPU lacks (mixtures of experts ask for it)."""
    if x.device.type == "meta":
        return x.new_empty([bins])
    return torch.histc(x.float(), bins, min, max).to(x.dtype)


def _grouped(a: Tensor, b: Tensor, offs: Tensor | None = None, *others: Any) -> Tensor:
    """aten._grouped_mm, which computes every dtype, but whose shapes are known for bfloat16 alone.

    a: [M, K]; b: [E, K, N], one matrix for each group of rows (mixtures of experts).
    """
    if a.device.type == "meta" and (a.dim(), b.dim()) == (2, 3):
        return a.new_empty([a.shape[0], b.shape[2]])
    return aten._grouped_mm.default(a, b, offs, *others)  # type: ignore[no-any-return]


def _softmax(x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    """aten._softmax, which CUDA raises to float32 on its way."""
    return aten._softmax.default(x.float() if half_to_float else x, dim, False)  # type: ignore[no-any-return]


STAND_INS = {
    aten._softmax.default: _softmax,
    aten._grouped_mm.default: _grouped,
    aten.histc.default: _histogram,
    aten._scaled_dot_product_efficient_attention.default: _efficient,
    aten._scaled_dot_product_flash_attention.default: _flash,
}
"""By operator, what computes its values where a CPU has no kernel for it."""
