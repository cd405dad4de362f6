"""Prompts that are read layer by layer into a file, and gone on with after an interruption."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hybrid_kv.api.arguments import check_watchers
from hybrid_kv.api.generation import PrefillProgress, PrefillWatch
from hybrid_kv.api.llm import LLM, Prompt
from hybrid_kv.api.tokens import AskedMessages, checked, is_chat
from hybrid_kv.api.turn import check_room
from hybrid_kv.errors import ConfigError
from hybrid_kv.models.forwards import outside_graphs, pass_on, passing, replaced
from hybrid_kv.models.hf_cache import TieredCache
from hybrid_kv.models.layer_major import decoder_stacks
from hybrid_kv.runtime import memory_errors
from hybrid_kv.saved.file_blocks import Compression, checked_compression
from hybrid_kv.saved.unfinished import ContextBuild, building

_EVERY_S = 10.0


@dataclass(frozen=True, slots=True)
class BuiltContext:
    """found_layers: of num_layers, those that an interrupted build had done."""

    num_tokens: int
    num_layers: int
    found_layers: int


def build_context(
    llm: LLM,
    prompt: Prompt,
    path: str | Path,
    *,
    compress: Compression | None = None,
    on_prefill: PrefillProgress | None = None,
    cancel: threading.Event | None = None,
    every_s: float = _EVERY_S,
) -> BuiltContext:
    """`llm.context(prompt).save(path)`, which goes on where an interrupted one ended.

    What is done is noted beside the target, after a layer and at most so often; it is what the same
    prompt, model and settings find again.

    Args:
        prompt: as in `LLM.context`.
        compress: as in `Context.save`.
        on_prefill, cancel: as in `LLM.generate`.
        every_s: seconds from one note to the next.

    Raises:
        PrefillCancelled: `cancel` was set.
        ConfigError, CapacityError: as `LLM.context`; or somebody else builds the same.
        WriteError: it cannot be written; what is done is kept.
    """
    check_watchers(on_prefill, cancel)
    rounding = checked_compression(compress)
    asked = None
    if is_chat(prompt):
        asked = AskedMessages(llm.require_chat_template(), checked(prompt))
        prompt = asked.before_question()
    ids, messages = llm.encode(prompt), None if asked is None else asked.messages
    cache = llm.runtime.cache()
    cancels = [] if cancel is None else [cancel]
    try:
        with (
            llm.runtime.generating(),
            memory_errors(lambda: "prefill"),
            building(path, cache, ids, messages, llm, every_s=every_s, compress=rounding) as build,
        ):
            found = build.num_done
            check_room(llm, cache, ids.shape[1])
            with PrefillWatch(llm.model, ids.shape[1], on_prefill, cancels, found):
                _compute(llm, cache, ids, build)
            build.finish(cache, ids, messages, llm)
            return BuiltContext(ids.shape[1], len(cache.layers), found)
    finally:
        cache.close()


def _compute(llm: LLM, cache: TieredCache, ids: Tensor, build: ContextBuild) -> None:
    kv = cache.kv

    def done(layer_idx: int, hidden: Tensor) -> None:
        if layer_idx in kv.layers:
            kv.layers.seal_if_open(layer_idx)
        build.layer_done(cache, layer_idx, hidden)

    kv.means.reserve(ids.shape[1])
    with from_layer(llm.model, build.num_done, build.hidden, done), torch.inference_mode():
        model: Any = llm.model
        model(ids, **passing(cache), use_cache=True, logits_to_keep=1)


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
