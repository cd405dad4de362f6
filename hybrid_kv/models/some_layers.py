"""A forward that begins in the middle of a model, and tells of each decoder layer that is done."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

from torch import Tensor, nn

from hybrid_kv.errors import ConfigError
from hybrid_kv.models.graphs import outside_graphs
from hybrid_kv.models.layer_major import decoder_stacks


@contextmanager
def from_layer(
    model: nn.Module, first: int, hidden: Tensor | None, done: Callable[[int, Tensor], None]
) -> Iterator[None]:
    """A block whose forwards leave out the decoder layers before `first`.

    Args:
        hidden: [B, T, hidden] enters layer `first`; None where that is 0.
        done: called with the number of a layer and what it gave.

    Raises:
        ConfigError: the model has several stacks of decoder layers.
    """
    stacks = [layers for _, layers in decoder_stacks(model)]
    if len(stacks) != 1:
        raise ConfigError(
            f"a model must have one stack of decoder layers to be built from, got {len(stacks)}; "
            "make the context with llm.context"
        )
    wrapped = list(enumerate(stacks[0]))
    before = [layer.__dict__.get("forward") for _, layer in wrapped]
    try:
        for number, layer in wrapped:
            layer.forward = _wrapped(layer.forward, number, first, hidden, done)
        yield
    finally:
        for (_, layer), previous in zip(wrapped, before, strict=True):
            if previous is None:
                layer.__dict__.pop("forward", None)
            else:
                layer.forward = previous


def _wrapped(
    inner: Callable[..., Any],
    number: int,
    first: int,
    hidden: Tensor | None,
    done: Callable[[int, Tensor], None],
) -> Callable[..., Any]:
    @outside_graphs
    @wraps(inner, updated=())
    def forward(entering: Tensor, *args: Any, **kwargs: Any) -> Any:
        if number < first:
            return entering
        if number == first and hidden is not None:
            entering = hidden.to(entering)
        result = inner(entering, *args, **kwargs)
        done(number, result[0] if isinstance(result, tuple) else result)
        return result

    return forward
