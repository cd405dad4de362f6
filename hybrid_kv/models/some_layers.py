"""A forward that begins in the middle of a model, and tells of each decoder layer that is done."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn

from hybrid_kv.errors import ConfigError
from hybrid_kv.models.forwards import outside_graphs, pass_on, replaced
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
    layers = list(stacks[0])

    @outside_graphs
    def enter(layer: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return args if hidden is None else (hidden.to(args[0]), *args[1:])

    def told(number: int) -> Callable[[nn.Module, Any, Any], None]:
        @outside_graphs
        def after(layer: nn.Module, args: Any, result: Any) -> None:
            done(number, result[0] if isinstance(result, tuple) else result)

        return after

    # Hooks, and not forwards of ours: a layer is done when all chunks have passed it.
    with ExitStack() as undo, replaced((layer, pass_on) for layer in layers[:first]):
        for number, layer in enumerate(layers[first:], first):
            undo.callback(layer.register_forward_hook(told(number)).remove)
        if first < len(layers):
            undo.callback(layers[first].register_forward_pre_hook(enter).remove)
        yield
