"""What the engine multiplies for a model's linear layers, as tests see it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from torch import Tensor

from hybrid_kv.models import few_tokens
from hybrid_kv.models.few_tokens import ProductTrial
from hybrid_kv.ops.native.linear import BoundLinear


def note_products(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Shapes of the inputs of the engine's products from now on, filled as they are made."""
    seen: list[list[int]] = []
    bind, linear = few_tokens.bind, few_tokens.linear

    def noting_linear(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        seen.append(list(x.shape))
        return linear(x, *args, **kwargs)

    def noting_bind(x: Tensor, *args: Any, **kwargs: Any) -> BoundLinear:
        bound, shape = bind(x, *args, **kwargs), list(x.shape)

        def multiply(inputs: int, outputs: int) -> int:
            seen.append(shape)
            return bound.multiply(inputs, outputs)

        return replace(bound, multiply=multiply)

    monkeypatch.setattr(few_tokens, "linear", noting_linear)
    monkeypatch.setattr(few_tokens, "bind", noting_bind)
    return seen


def trials_end(torch_gbps: float, engine_gbps: float) -> Callable[..., list[ProductTrial]]:
    """In the place of `few_tokens.measure`: all trials end like this."""
    return lambda sets, *_: [ProductTrial(torch_gbps, engine_gbps)] * len(sets)


def engine_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine is faster in each trial, of small matrices too, and no earlier trial is known."""
    monkeypatch.setattr(few_tokens, "_LEAST_BYTES", 0)
    monkeypatch.setattr(few_tokens, "_trials", {})
    monkeypatch.setattr(few_tokens, "measure", trials_end(5.0, 10.0))
