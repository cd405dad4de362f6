"""Keeps what Triton's interpreter makes anew for each operation: the names it has replaced in
Triton's language, types of blocks and the shapes of tensors. What a kernel computes is the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any


def hasten() -> None:
    """Once a process. A version of Triton that is built otherwise stays as it is."""
    import triton.language.core as core
    from triton.runtime import interpreter

    if not hasattr(interpreter, "_LangPatchScope"):
        return
    made = core.tensor(None, core.block_type(core.int32, [2]))
    if set(vars(made)) != {"handle", "type", "dtype", "numel", "shape"}:
        return
    interpreter._patch_lang = _replacing_once(interpreter)
    interpreter._get_np_dtype = _kept_by_name(interpreter._get_np_dtype)
    core.tensor.__init__ = _tensor_init(core)
    core.block_type.__init__ = _block_type_init(core.block_type.__init__)


def _replacing_once(interpreter: Any) -> Callable[[Any], Any]:
    """All that runs in this process is interpreted, so that no name has to be put back; a device
    function had all names replaced again by each call of it.
    """
    inner, done = interpreter._patch_lang, set[tuple[int, ...]]()
    langs = interpreter.tl, interpreter.tl.core

    def patch(fn: Any) -> Any:
        seen = tuple(id(one) for one in fn.__globals__.values() if any(one is its for its in langs))
        if seen not in done:
            inner(fn)
            done.add(seen)
        return interpreter._LangPatchScope()

    return patch


def _kept_by_name(inner: Callable[[Any], Any]) -> Callable[[Any], Any]:
    known: dict[str, Any] = {}

    def dtype_of(one: Any) -> Any:
        if one.name not in known:
            known[one.name] = inner(one)
        return known[one.name]

    return dtype_of


def _tensor_init(core: Any) -> Callable[..., None]:
    shapes: dict[tuple[int, ...], tuple[Any, Any]] = {}

    def init(self: Any, handle: Any, type: Any) -> None:
        shape = type.shape if type.is_block() else ()
        known = shapes.get(shape)
        if known is None:
            sizes = core.tuple([core.constexpr(one) for one in shape])
            known = core.constexpr(math.prod(shape)), sizes
            shapes[shape] = known
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.numel, self.shape = known

    return init


def _block_type_init(inner: Callable[..., None]) -> Callable[..., None]:
    known: dict[tuple[Any, ...], dict[str, Any]] = {}

    def init(self: Any, element_ty: Any, shape: Any) -> None:
        key = str(element_ty), *(getattr(one, "value", one) for one in shape)
        found = known.get(key)
        if found is None or found["element_ty"] != element_ty:
            inner(self, element_ty, shape)
            known[key] = dict(self.__dict__)
        else:
            self.__dict__.update(found)

    return init
