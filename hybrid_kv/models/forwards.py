"""Replaces the forwards of modules for a while."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn


def pass_on(hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """The forward of a layer that is left out."""
    return hidden


@contextmanager
def replaced(forwards: Iterable[tuple[nn.Module, Callable[..., Any]]]) -> Iterator[None]:
    """A block in which each of some modules runs another forward, as an attribute of the instance.

    Then the forward is again what it was, an attribute of the instance or the class's own, unless
    somebody else has put one there meanwhile.
    """
    before: list[tuple[nn.Module, Callable[..., Any], Callable[..., Any] | None]] = []
    try:
        for module, forward in forwards:
            before.append((module, forward, module.__dict__.get("forward")))
            module.__dict__["forward"] = forward
        yield
    finally:
        for module, forward, previous in reversed(before):
            if module.__dict__.get("forward") is not forward:
                continue
            if previous is None:
                del module.__dict__["forward"]
            else:
                module.__dict__["forward"] = previous
