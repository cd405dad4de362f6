"""Keeps what Triton's interpreter makes anew for each operation: the names it has replaced in
Triton's language, types of blocks and the shapes of tensors; and leaves out what has no effect.
What a kernel computes is the same.
"""

from __future__ import annotations

import inspect
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
    interpreter._patch_attr = _replaced(interpreter.interpreter_semantic)
    semantic = type(interpreter.interpreter_semantic)
    semantic.broadcast_impl_value = _broadcast(core, semantic.broadcast_impl_value)
    if not interpreter.interpreter_builder.options.debug:  # or its assertions are computed in vain
        semantic.binary_op_sanitize_overflow_impl = lambda *_: None
    interpreter._get_np_dtype = _kept_by_name(interpreter._get_np_dtype)
    core.dtype.__eq__ = _same_at_once(core.dtype.__eq__)
    core.tensor.__init__ = _tensor_init(core)
    core.block_type.__init__ = _block_type_init(core.block_type.__init__)


def _replacing_once(interpreter: Any) -> Callable[[Any], Any]:
    """All that runs in this process is interpreted, so that no name has to be put back; a device
    function had all names replaced again by each call of it.
    """
    inner, nothing = interpreter._patch_lang, interpreter._LangPatchScope()
    done: dict[int, Any] = {}  # of modules, whose names are kept so that no other takes their id

    def patch(fn: Any) -> Any:
        names = fn.__globals__
        if id(names) not in done:
            inner(fn)
            done[id(names)] = names
        return nothing

    return patch


def _replaced(semantic: Any) -> Callable[..., None]:
    """A function of the language, called as it is instead of through two that look at names."""

    def replace(obj: Any, name: str, member: Any, _: Any, scope: Any) -> None:
        inner = inspect.unwrap(member)

        def call(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = semantic
            return inner(*args, **kwargs)

        scope.set_attr(obj, name, call)

    return replace


def _broadcast(core: Any, inner: Callable[..., Any]) -> Callable[..., Any]:
    """Two tensors in one shape, found by Python's numbers instead of constants of the language."""

    def spread(self: Any, one: Any, sizes: list[int]) -> Any:
        if one.type.is_block() and one.type.shape.values == sizes:
            return one
        made = core.block_type(one.type.scalar, sizes)
        if one.type.is_block():
            return self.make_tensor(self.builder.create_broadcast(one.handle, sizes), made)
        return self.make_tensor(self.builder.create_splat(made, one.handle), made)

    def broadcast(self: Any, lhs: Any, rhs: Any) -> Any:
        if lhs.shape is rhs.shape:  # `_tensor_init` keeps one object a shape
            return lhs, rhs
        left, right = (one.type.shape.values if one.type.is_block() else [] for one in (lhs, rhs))
        if left and right:
            fit = all(1 in pair or len({*pair}) == 1 for pair in zip(left, right, strict=False))
            if len(left) != len(right) or not fit:
                return inner(self, lhs, rhs)  # more axes, or its words for what does not fit
            sizes = [b if a == 1 else a for a, b in zip(left, right, strict=True)]
        else:
            sizes = left or right
        return spread(self, lhs, sizes), spread(self, rhs, sizes)

    return broadcast


def _same_at_once(inner: Callable[[Any, Any], bool]) -> Callable[[Any, Any], bool]:
    def is_same(self: Any, other: Any) -> bool:
        return self is other or inner(self, other)

    return is_same


def _kept_by_name(inner: Callable[[Any], Any]) -> Callable[[Any], Any]:
    known: dict[str, Any] = {}

    def dtype_of(one: Any) -> Any:
        if one.name not in known:
            known[one.name] = inner(one)
        return known[one.name]

    return dtype_of


def _tensor_init(core: Any) -> Callable[..., None]:
    shapes: dict[tuple[int, ...], tuple[Any, Any]] = {}

    def of(shape: Any) -> tuple[Any, Any]:
        sizes = tuple(shape)
        if sizes not in shapes:
            known = core.tuple([core.constexpr(one) for one in sizes])
            shapes[sizes] = core.constexpr(math.prod(sizes)), known
        return shapes[sizes]

    scalar = of(())

    def init(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        if type.is_block():
            self.numel, self.shape = of(type.shape.values)
        else:
            self.numel, self.shape = scalar

    return init


def _block_type_init(inner: Callable[..., None]) -> Callable[..., None]:
    known: dict[tuple[Any, ...], dict[str, Any]] = {}

    def init(self: Any, element_ty: Any, shape: Any) -> None:
        key = element_ty.name, *[getattr(one, "value", one) for one in shape]
        found = known.get(key)
        if found is None or found["element_ty"] != element_ty:
            inner(self, element_ty, shape)
            known[key] = dict(self.__dict__)
        else:
            self.__dict__.update(found)

    return init
