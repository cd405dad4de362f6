"""What a graph that somebody else makes of the model with torch.compile is cut around.

A graph records tensors, and a cache of ours is no tensor: what stores and attends must run each
time. `compile_decode` makes a graph of its own, which a custom operator leads out of; while one of
its steps is traced or runs, `CacheState.in_own_graph` says so.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

_P = ParamSpec("_P")
_R = TypeVar("_R")

REASON = (
    "a forward with a cache of hybrid_kv cannot be part of another graph; call torch.compile "
    "without fullgraph=True, or leave it out and attach with compile_decode=True"
)


def outside_graphs(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """`function`, which no graph has inside: it is called as it is, with all that it calls."""
    apart: Callable[_P, _R] = torch.compiler.disable(function, reason=REASON)
    return apart
