"""Triton's interpreter with less bookkeeping: what kernels compute is as without."""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any


def look_up_builtins_once() -> None:
    """At each launch and each call of a function of a kernel the interpreter puts its own functions
    in the place of the language's, and goes through all members of five modules and classes to find
    them: a third of the time of a test. Here it remembers which they are.
    """
    from triton.language.core import is_builtin
    from triton.runtime import interpreter

    @cache
    def builtins_of(owner: Any) -> list[tuple[str, Any]]:
        return [(name, one) for name, one in inspect.getmembers(owner) if is_builtin(one)]

    def patch_builtin(owner: Any, *rest: Any) -> None:
        for name, one in builtins_of(owner):
            if getattr(owner, name) is one:  # else it is replaced already, by a call further out
                interpreter._patch_attr(owner, name, one, *rest)

    interpreter._patch_builtin = patch_builtin
