"""What Python calls before an operator is dispatched: factories, moves to a device, attention."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._C._dynamo.eval_frame import _FrameAction as FrameAction
from torch._C._dynamo.eval_frame import _FrameExecStrategy as FrameExecStrategy
from torch._C._dynamo.eval_frame import set_code_exec_strategy
from torch._library.custom_ops import OPDEFS
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tests.device import tensors
from tests.device.tensors import (
    DeviceTensor,
    device_of,
    launch_like,
    on_device,
    running,
    value_of,
)

_COPIES = (torch.tensor, torch.as_tensor)
_EMPTY = (torch.empty, torch.empty_strided)
_FACTORIES = {
    *_COPIES,
    *_EMPTY,
    torch.zeros,
    torch.ones,
    torch.full,
    torch.arange,
    torch.rand,
    torch.randn,
    torch.randint,
    torch.randperm,
    torch.linspace,
    torch.eye,
    torch.scalar_tensor,
}
_DEVICE = Tensor.device.__get__  # type: ignore[attr-defined]
_linear = torch.nn.functional.linear
_sdpa = torch.nn.functional.scaled_dot_product_attention
_OF_TORCH = ("aten", "prim", "prims")


def _index(device: object) -> int | None:
    """The number of a CUDA device; None for any other, and for none."""
    if device is None:
        return None
    if isinstance(device, int):
        return device
    found = torch.device(device)  # type: ignore[arg-type]
    if found.type != "cuda":
        return None
    return running().device if found.index is None else found.index


class Functions(TorchFunctionMode):
    """Calls from Python: most mean on a device what they mean on the host."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (own := _ASKED.get(func)) is not None:
            return own(func, args, kwargs or {})
        return _named(func, args, kwargs) if kwargs else func(*args)


def _named(func: Any, args: Any, kwargs: Any) -> Any:
    """A call that may name a device, or page-locked memory."""
    kwargs = dict(kwargs)
    if kwargs.pop("pin_memory", False):
        return _page_locked(func(*args, **kwargs))
    there = _index(kwargs.get("device"))
    if there is None:
        return func(*args, **kwargs)
    if func in _FACTORIES:
        if func is torch.as_tensor and isinstance(args[0], DeviceTensor):
            return func(*args, **{k: v for k, v in kwargs.items() if k != "device"})
        return made(func, args, kwargs, there)
    return func(*args, **{**kwargs, "device": torch.device("cuda", there)})


def _device_of(func: Any, args: Any, kwargs: Any) -> torch.device:
    if isinstance(args[0], DeviceTensor):
        return device_of(args[0].index)  # without a way through the dispatcher
    return func(*args)  # type: ignore[no-any-return]


def _numbered(func: Any, args: Any, kwargs: Any) -> torch.device:
    if len(args) == 1 and isinstance(args[0], int):
        return torch.device("cuda", args[0])  # a number alone is one of the accelerator's
    return func(*args, **kwargs)  # type: ignore[no-any-return]


def _is_pinned(func: Any, args: Any, kwargs: Any) -> bool:
    return not isinstance(args[0], DeviceTensor) and running().is_pinned(args[0])


def _indexed(func: Any, args: Any, kwargs: Any) -> Any:
    tensor = args[0]
    if isinstance(tensor, DeviceTensor):
        index = args[1] if isinstance(args[1], tuple) else (args[1],)
        if any(isinstance(one, list) for one in index):  # which torch copies to the device
            index = tuple(
                made(torch.tensor, (one,), {}, tensor.index) if isinstance(one, list) else one
                for one in index
            )
            args = (tensor, index, *args[2:])
    return func(*args)


def _of_values(func: Any, args: Any, kwargs: Any) -> Any:
    """Of a wrapper storages lie nowhere, all at one address."""
    tensor = args[0]
    return func(tensor.inner if isinstance(tensor, DeviceTensor) else tensor)


def _listed(func: Any, args: Any, kwargs: Any) -> Any:
    tensor = args[0]
    if not isinstance(tensor, DeviceTensor):
        return func(tensor)
    running().host_waits("tolist", running().current(tensor.index).here())
    return tensor.inner.tolist()


def _as_array(func: Any, args: Any, kwargs: Any) -> Any:
    if isinstance(args[0], DeviceTensor):
        raise TypeError(f"can't convert cuda:{args[0].index} device type tensor to numpy")
    return func(*args, **kwargs)


def _attended(func: Any, args: Any, kwargs: Any) -> Any:
    q = args[0] if args else None
    if not isinstance(q, DeviceTensor):
        return func(*args, **kwargs)
    v = args[2] if len(args) > 2 else kwargs["value"]
    shape = _on_meta((*q.shape[:-1], v.shape[-1]), q.dtype)
    plain = [value_of(a) for a in args]
    named = {k: value_of(a) for k, a in kwargs.items()}
    return launch_like("sdpa", shape, q.index, lambda: func(*plain, **named), *plain)


def _mapped_linearly(func: Any, args: Any, kwargs: Any) -> Any:
    return _product(*args) if not kwargs and _is_product(args) else func(*args, **kwargs)


def _is_product(args: Any) -> bool:
    """Whether a linear map is one launch: of rows that lie together, all on one device."""
    x, weight = args[:2]
    return (
        all(type(one) is DeviceTensor for one in args if one is not None)
        and not torch.is_grad_enabled()
        and not torch.is_autocast_enabled("cuda")
        and len({one.index for one in args if one is not None}) == 1
        and len({one.dtype for one in args if one is not None}) == 1
        and x.dim() > 1
        and x.is_contiguous()
        and weight.dim() == 2
        and x.shape[-1] == weight.shape[1]
    )


def _product(x: DeviceTensor, weight: DeviceTensor, bias: DeviceTensor | None = None) -> Tensor:
    """A linear map, at once: by way of the dispatcher three views are made for its one launch."""
    plain = [one.inner for one in (x, weight, bias) if one is not None]
    name = "aten.mm.default" if bias is None else "aten.addmm.default"
    like = _on_meta((*x.shape[:-1], weight.shape[0]), x.dtype)
    return launch_like(name, like, x.index, lambda: _linear(*plain), *plain)  # type: ignore[no-any-return]


@cache
def _on_meta(size: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    with torch._C._DisableTorchDispatch():
        return torch.empty(size, dtype=dtype, device="meta")


def _moved(func: Any, args: Any, kwargs: Any) -> Any:
    tensor, rest = args[0], list(args[1:])
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):  # of vmap, which moves what it has
        return func(*args, **kwargs)
    like = next((a for a in rest if isinstance(a, Tensor)), None)
    places = (a for a in rest if isinstance(a, (str, int, torch.device)) and type(a) is not bool)
    target = kwargs.get("device", next(places, None))
    if func is Tensor.cuda:
        target = torch.device("cuda", running().device) if target is None else target
    elif like is not None:
        target = like.device
    dtype = kwargs.get("dtype", next((a for a in rest if isinstance(a, torch.dtype)), None))
    dtype = dtype or (tensor.dtype if like is None else like.dtype)
    index = _index(target)
    if isinstance(tensor, DeviceTensor) and (target is None or index is not None):
        # Here, for in inference mode torch makes the copy without asking the dispatcher.
        same = index in (None, tensor.index) and dtype == tensor.dtype
        if same and not kwargs.get("copy"):
            return tensor
        there = torch.device("cuda", tensor.index if index is None else index)
        return tensors.to_copy(tensor, dtype=dtype, device=there)
    if index is None:
        return func(*args, **kwargs)
    non_blocking = bool(kwargs.get("non_blocking")) or any(a is True for a in rest)
    source = tensor.detach() if tensor.dtype == dtype else tensor.detach().to(dtype)
    there = tensors.empty_on_device(source, index)
    tensors.to_device(there, source, non_blocking)
    return there


def made(func: Any, args: Any, kwargs: Any, index: int) -> Tensor:
    """A factory: memory alone, a copy from the host, or a launch that fills memory."""
    plain = {**kwargs, "device": "cpu"}
    plain.pop("requires_grad", None)
    values = func(*args, **plain)
    if func in _EMPTY or "empty" in str(func):
        return tensors.empty_on_device(values, index)
    if func in _COPIES:
        there = tensors.empty_on_device(values, index)
        tensors.to_device(there, values, non_blocking=False)
        return there
    name = getattr(func, "__name__", str(func))
    return launch_like(name, values, index, lambda: values, *args)  # type: ignore[no-any-return]


def _page_locked(tensor: Tensor) -> Tensor:
    """Host memory that CUDA may read by itself, for as long as its storage lives."""
    import weakref

    import numpy as np

    with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
        raw = np.empty(max(1, tensor.untyped_storage().nbytes()), np.uint8)
        address = raw.ctypes.data
        locked = torch.from_numpy(raw)[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        locked.copy_(tensor)
    told = running()
    told.pin(address, raw.nbytes, of_torch=True)
    weakref.finalize(raw, told.unpin, address).atexit = False
    return locked


_ASKED = {
    _DEVICE: _device_of,
    _linear: _mapped_linearly,
    _sdpa: _attended,
    torch.device: _numbered,
    Tensor.__getitem__: _indexed,
    Tensor.__setitem__: _indexed,
    Tensor.cuda: _moved,
    Tensor.data_ptr: _of_values,
    Tensor.is_pinned: _is_pinned,
    Tensor.numpy: _as_array,
    Tensor.pin_memory: lambda func, args, kwargs: _page_locked(args[0].clone()),
    Tensor.to: _moved,
    Tensor.tolist: _listed,
    Tensor.untyped_storage: _of_values,
}
"""What means something else on a device when nothing is given by name; a tenth of all calls."""


class Operators(TorchDispatchMode):
    """Factories inside composite operators."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # it is told below, once: by torch's way each operator takes twice as long

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace not in _OF_TORCH and (own := OPDEFS.get(func._schema.name)) is not None:
            with Operators(), Functions():  # Python's, which a device runs as it is
                return own._init_fn(*args, **kwargs)
        if DeviceTensor in types:  # at once, without a second way through the dispatcher
            with torch._C.DisableTorchFunction():  # what it asks of values means what it says
                return DeviceTensor.__torch_dispatch__(func, types, args, kwargs)
        index = _index(kwargs.get("device")) if "device" in kwargs else None
        if index is None:
            return func(*args, **kwargs)
        if func is torch.ops.aten._to_copy.default:
            there = tensors.empty_on_device(args[0].to(kwargs.get("dtype") or args[0].dtype), index)
            tensors.to_device(there, args[0].to(there.dtype), bool(kwargs.get("non_blocking")))
            return there
        kept = {k: v for k, v in kwargs.items() if k != "pin_memory"}
        return made(func, args, kept, index)


set_code_exec_strategy(
    Operators.__torch_dispatch__.__code__, FrameExecStrategy(FrameAction.SKIP, FrameAction.SKIP)
)
"""Dynamo traces neither an operator of a device nor what it calls."""

__all__ = ["Functions", "Operators", "made", "on_device"]
