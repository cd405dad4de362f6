"""Forwards of models: how a cache is passed, and forwards that are replaced or kept out of graphs.

transformers passes a KV cache as `cache`, before 5.24 as `past_key_values`.

A graph that somebody else makes of the model with torch.compile is cut around what stores and
attends: it records tensors, and a cache of ours is no tensor. `compile_decode` makes a graph of its
own, which a custom operator leads out of; while one of its steps is traced or runs,
`CacheState.in_own_graph` says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from inspect import signature
from typing import Any, Final, ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from transformers import Cache, GenerationMixin

CACHE_NAMES: Final = ("cache", "past_key_values")

CACHE_ARGUMENT: Final = next(
    name
    for name in CACHE_NAMES
    if name in signature(GenerationMixin.prepare_inputs_for_generation).parameters
)
"""The one of `CACHE_NAMES` that the installed transformers gives to its models."""


def passing(cache: Cache | None) -> dict[str, Any]:
    """Keyword arguments that pass `cache` to a model or to its `generate`."""
    return {CACHE_ARGUMENT: cache}


def passed(kwargs: Mapping[str, Any]) -> Any:
    """Cache among the keyword arguments of a forward, under either name."""
    return next((kwargs[name] for name in CACHE_NAMES if kwargs.get(name) is not None), None)


def renamed(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Keyword arguments of a forward, the cache under the name that the model takes.

    Models of transformers before 5.24 drop `cache` without a word.
    """
    return {CACHE_ARGUMENT if name in CACHE_NAMES else name: kwargs[name] for name in kwargs}


_P = ParamSpec("_P")
_R = TypeVar("_R")

REASON = (
    "a forward with a cache of hybrid_kv cannot be part of another graph; call torch.compile "
    "without fullgraph=True, or leave it out and attach with compile_decode=True"
)


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


def outside_graphs(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """`function`, which no graph has inside: it is called as it is, with all that it calls."""
    apart: Callable[_P, _R] = torch.compiler.disable(function, reason=REASON)
    return apart
