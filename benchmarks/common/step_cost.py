"""What a step costs in Python: functions entered, and the files that they are in.

A count, so that it is the same on every machine and at every load.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch

import hybrid_kv
from hybrid_kv.config import HybridConfig
from hybrid_kv.runtime import KVCache
from hybrid_kv.types import LayerShape, ModelInfo

_ROOT = str(Path(hybrid_kv.__file__).parent)
_SHAPE = LayerShape(0, 6, 2, 72)
_CONTEXT = 1500


class StepCost(NamedTuple):
    """Python functions that a step enters.

    calls: of anybody's: the package's, generated constructors, other libraries'. files: of the
    package. functions: calls by the package's functions, "file:name".
    """

    calls: int
    files: frozenset[str]
    functions: Counter[str]

    @property
    def own_calls(self) -> int:
        """Of functions that are written down in the package."""
        return self.functions.total()


def counted(step: Callable[[], Any]) -> StepCost:
    """What one call of `step` enters."""
    calls, functions = 0, Counter[str]()

    def note(frame: FrameType, event: str, _: Any) -> None:
        nonlocal calls
        if event == "call":
            calls += 1
            if (name := frame.f_code.co_filename).startswith(_ROOT):
                functions[f"{name[len(_ROOT) + 1 :]}:{frame.f_code.co_qualname}"] += 1

    sys.setprofile(note)
    try:
        step()
    finally:
        sys.setprofile(None)
    files = frozenset(function.partition(":")[0] for function in functions)
    return StepCost(calls - 1, files, functions)  # less `step` itself


def step_cost(config: HybridConfig, context: int = _CONTEXT) -> StepCost:
    """The cheapest of some decode steps of one layer and one row after a random prompt: one in
    which no page leaves the window, as in nearly all.
    """
    return min(step_costs(config, context), key=lambda cost: cost.calls)


def step_costs(config: HybridConfig, context: int = _CONTEXT) -> list[StepCost]:
    """Decode steps of one layer and one row after a random prompt, but for the first, in which all
    is made; as many as a page has tokens.
    """
    kv = KVCache(ModelInfo((_SHAPE,)), config.replace(index_build="wait"))
    generator = torch.Generator().manual_seed(0)

    def attend(new: int) -> None:
        q, k, v = (
            torch.randn(1, heads, new, _SHAPE.head_dim, generator=generator)
            for heads in (_SHAPE.num_q_heads, _SHAPE.num_kv_heads, _SHAPE.num_kv_heads)
        )
        costs.append(counted(lambda: kv.attend(0, q, (k, v), None, scale=0.1)))

    costs: list[StepCost] = []
    with torch.inference_mode():
        for new in (context, *[1] * (1 + config.page_size)):
            attend(new)
    kv.close()
    return costs[2:]
