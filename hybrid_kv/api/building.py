"""Prompts that are read layer by layer into a file, and gone on with after an interruption.

Their parts lie in a folder beside the place of the context, which a later build finds by what they
were computed from.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from time import monotonic
from typing import Any

import torch
from pydantic import Field, ValidationError
from torch import Tensor, nn

from hybrid_kv.api.arguments import check_watchers
from hybrid_kv.api.generation import PrefillProgress, PrefillWatch
from hybrid_kv.api.llm import LLM, Prompt
from hybrid_kv.api.tokens import AskedMessages, checked, is_chat
from hybrid_kv.api.turn import check_room
from hybrid_kv.errors import ConfigError, WriteError
from hybrid_kv.models.cache_state import outside_graphs, pass_on, passing, replaced
from hybrid_kv.models.hf_cache import TieredCache
from hybrid_kv.models.layer_major import decoder_stacks
from hybrid_kv.runtime import memory_errors
from hybrid_kv.saved.file_blocks import (
    BlockWriter,
    Compression,
    checked_compression,
    hash_of,
    mapped,
)
from hybrid_kv.saved.folders import check_target, publish, sync
from hybrid_kv.saved.identity import identity_hash, ids_hash, tokenizer_identity
from hybrid_kv.saved.manifest import MANIFEST, AnyLayer, Block, SavedPart
from hybrid_kv.saved.saving import Provenance, check_layers, write_layer, write_rest

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


_PROGRESS = "progress.json"


class BuildProgress(SavedPart):
    """layers: those that are done, in order. hidden: the block of what enters the next one."""

    key: str
    folder: str
    layers: list[AnyLayer]
    blocks: dict[str, Block]
    hidden: str
    prefill_s: float = Field(ge=0)


class ContextBuild:
    """A build of one context of ids [1, tokens], begun or gone on with.

    num_done: layers that were found done. hidden: [1, tokens, hidden] on the host, what enters the
    next one; None where none is done.
    """

    def __init__(
        self,
        root: Path,
        target: Path,
        key: str,
        every_s: float,
        compress: Compression | None,
    ) -> None:
        self.root, self.target, self._key, self._every_s = root, target, key, every_s
        self._compress = compress
        self._layers: list[AnyLayer] = []
        self.hidden: Tensor | None = None
        self._before_s, self._begin = 0.0, monotonic()
        self._noted = self._begin
        known = self._read_progress()
        if known is None:
            self._start_anew()
        else:
            self._go_on(known)

    @property
    def num_done(self) -> int:
        return len(self._layers)

    # Beginning ----------------------------------------------------------------------------------

    def _read_progress(self) -> BuildProgress | None:
        """Progress of an earlier start; None where there is nothing of use."""
        try:
            known = BuildProgress.model_validate_json((self.root / _PROGRESS).read_bytes())
        except (OSError, ValidationError):
            return None
        blocks = self.root / known.folder
        sizes = {p.name: p.stat().st_size for p in blocks.iterdir()} if blocks.is_dir() else {}
        whole = all(sizes.get(name) == block.num_bytes for name, block in known.blocks.items())
        if known.key != self._key or not whole or known.hidden not in known.blocks:
            return None
        if hash_of(blocks / known.hidden) != known.blocks[known.hidden].sha256:
            return None
        return known

    def _start_anew(self) -> None:
        for path in self.root.iterdir():
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        self._folder = f"blocks-{os.urandom(8).hex()}"
        (self.root / self._folder).mkdir()
        self._writer = BlockWriter(self.root / self._folder)

    def _go_on(self, known: BuildProgress) -> None:
        self._folder, self._layers = known.folder, list(known.layers)
        self._before_s = known.prefill_s
        blocks = self.root / known.folder
        for path in blocks.iterdir():
            if path.name not in known.blocks:
                path.unlink()  # of a layer that was not noted any more
        self._writer = BlockWriter(blocks)
        self._writer.blocks = dict(known.blocks)
        tensors, _ = mapped(blocks / known.hidden)
        self.hidden = tensors["hidden"].clone()

    # Going on -----------------------------------------------------------------------------------

    def layer_done(self, cache: TieredCache, layer_idx: int, hidden: Tensor) -> None:
        """Writes a layer; `hidden` [1, tokens, hidden] enters the next one."""
        self._layers.append(write_layer(self._writer, cache, layer_idx, self._compress))
        last = layer_idx == len(cache.layers) - 1
        if not last and monotonic() - self._noted >= self._every_s:
            self._note(hidden)
            self._noted = monotonic()

    def _note(self, hidden: Tensor) -> None:
        blocks = self._writer.blocks
        old = [name for name in blocks if name.startswith("hidden-")]
        name = self._writer.tensors(f"hidden-{self.num_done:04d}.safetensors", {"hidden": hidden})
        for path in old:
            del blocks[path]
        progress = BuildProgress(
            key=self._key,
            folder=self._folder,
            layers=self._layers,
            blocks=blocks,
            hidden=name,
            prefill_s=self._spent_s,
        )
        sync(self.root / self._folder)
        beside = self.root / f"{_PROGRESS}.part"
        with beside.open("w") as file:
            file.write(progress.model_dump_json())
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, self.root / _PROGRESS)
        sync(self.root)
        for path in old:
            (self.root / self._folder / path).unlink()

    @property
    def _spent_s(self) -> float:
        return self._before_s + monotonic() - self._begin

    # The end ------------------------------------------------------------------------------------

    def finish(self, cache: TieredCache, ids: Tensor, messages: Any, maker: Provenance) -> None:
        """Makes the folder a context, and puts it into its place."""
        blocks = self.root / self._folder
        for name in [name for name in self._writer.blocks if name.startswith("hidden-")]:
            del self._writer.blocks[name]
            (blocks / name).unlink()
        (self.root / MANIFEST).unlink(missing_ok=True)
        write_rest(
            *(self.root, self._writer, cache, ids, messages, maker, self._layers, self._spent_s)
        )
        (self.root / _PROGRESS).unlink(missing_ok=True)
        for path in (blocks, self.root):
            sync(path)
        publish(self.root, self.target, self._folder)
        shutil.rmtree(self.root, ignore_errors=True)  # there only where a context was replaced


@contextmanager
def building(
    path: str | Path,
    cache: TieredCache,
    ids: Tensor,
    messages: Any,
    maker: Provenance,
    *,
    every_s: float,
    compress: Compression | None = None,
) -> Iterator[ContextBuild]:
    """A build of the context that shall lie at `path`: a new one, or one that was interrupted.

    What an interrupted build of something else left there is removed.

    Args:
        every_s: seconds from one note of progress to the next, at the end of a layer.

    Raises:
        ConfigError: something else lies there, somebody else builds it, or a layer has no form in a
            file.
        WriteError: it cannot be written; what is done is kept.
    """
    target = Path(os.path.realpath(path))
    check_target(target, path)
    check_layers(cache)
    identity = identity_hash(maker.model, tokenizer_identity(maker.tokenizer), cache.kv.config)
    key = sha256(json.dumps([identity, ids_hash(ids), messages, compress]).encode()).hexdigest()
    root = target.with_name(f".{target.name}.building")
    lock = None
    try:
        root.mkdir(exist_ok=True)
        lock = os.open(root, os.O_RDONLY | os.O_NOFOLLOW)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"context '{path}' is being built by another process; wait for it, or choose "
                "another name"
            ) from None
        yield ContextBuild(root, target, key, every_s, compress)
    except OSError as error:
        if isinstance(error, WriteError):
            raise
        raise WriteError(
            f"context '{path}' cannot be built: {error.strerror or error}; free space, and start "
            "again: what is done is kept"
        ) from error
    finally:
        if lock is not None:
            os.close(lock)
