"""A replica: an engine on one node of a cluster; and the choice of the one for a request."""

from __future__ import annotations

import asyncio
import json
import os
from collections import OrderedDict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from transformers import (
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from hybrid_kv.api import LLM, load
from hybrid_kv.config import HybridConfig
from hybrid_kv.errors import BusyError, ConfigError, OtherContextError, QueueFullError
from hybrid_kv.plugin import load_plugin
from hybrid_kv.ray.cluster import NodeFacts, agree_with
from hybrid_kv.report import probe_environment
from hybrid_kv.saved.identity import (
    chain_of,
    model_identity,
    name_of,
    stored_settings,
    tokenizer_identity,
)
from hybrid_kv.saved.registry import ContextRegistry
from hybrid_kv.serve import Engine, EngineStats, Happening, Limits, Request, RequestHandle
from hybrid_kv.serve.grammars import GrammarText
from hybrid_kv.serve.http.tokenizer import Texts

_OWNERS = "replicas.json"
"""File in a folder of saved contexts that says for which replicas it is."""


@dataclass(frozen=True, slots=True)
class ReplicaSpec:
    """Model, settings and limits of all replicas.

    model: a path or name on every node. options: of `load`. contexts: a folder that all nodes
    share; None for none. folder: that relative paths begin at, where a node has it. plugins:
    modules to import.
    """

    model: str
    config: HybridConfig
    options: Mapping[str, Any]
    limits: Limits
    contexts: str | None
    folder: str
    plugins: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class LoadedReplica:
    """A loaded model without its weights; facts: hashes that tell it from others."""

    kind: type[PreTrainedModel]
    config: PretrainedConfig
    generation: GenerationConfig
    tokenizer: PreTrainedTokenizerBase
    settings: HybridConfig
    facts: NodeFacts


@dataclass(frozen=True, slots=True)
class RemoteModel:
    """A model whose weights only its replicas have; see `ServedModel`."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    config: HybridConfig

    @classmethod
    def of(cls, loaded: LoadedReplica) -> RemoteModel:
        """The model without its weights."""
        with torch.device("meta"):
            model = loaded.kind(loaded.config)
        model.generation_config = loaded.generation
        return cls(model, loaded.tokenizer, loaded.settings)

    def require_tokenizer(self) -> PreTrainedTokenizerBase:
        return self.tokenizer


class Replica:
    """An actor of Ray: the engine of `hybrid-kv serve`, asked from afar.

    Args:
        ends: of `trial_ends`.
    """

    def __init__(self, ends: Any) -> None:
        agree_with(ends)
        self._open: dict[int, RequestHandle] = {}

    def facts(self) -> NodeFacts:
        """Versions of packages that can change an answer."""
        return probe_environment().versions

    def load(self, spec: ReplicaSpec) -> LoadedReplica:
        """Loads the model and starts the engine.

        Raises:
            OtherContextError: the folder of contexts is for another model or other settings.
        """
        with suppress(OSError):  # a path that is not here is named when it is read
            os.chdir(spec.folder)
        for module in spec.plugins:
            load_plugin(module)
        llm = load(spec.model, config=spec.config, **spec.options)
        facts = _facts(llm)
        if spec.contexts is not None:
            claim(Path(spec.contexts), {**facts, **stored_settings(spec.config)})
        registry = None if spec.contexts is None else ContextRegistry(spec.contexts)
        self._engine, self._texts = Engine(llm, spec.limits, registry), Texts(llm)
        model = llm.model
        tokenizer = llm.require_tokenizer()
        return LoadedReplica(
            *(type(model), model.config, model.generation_config, tokenizer, llm.config, facts)
        )

    def answer(
        self, number: int, request: Request, grammar: GrammarText | None
    ) -> Iterator[Happening]:
        """Events of a request, as they happen.

        Args:
            number: by which `cancel` knows the request.
            grammar: of the request, which has none: a read one cannot be sent.

        Raises:
            HybridKVError: as `Engine.submit`.
        """
        read = None if grammar is None else asyncio.run(self._texts.grammar(grammar))
        handle = self._engine.submit(replace(request, grammar=read))
        self._open[number] = handle
        try:
            yield from handle.events()
        finally:
            del self._open[number]
            handle.cancel()

    def cancel(self, number: int) -> None:
        """Ends a request early; harmless when it has ended."""
        if (handle := self._open.get(number)) is not None:
            handle.cancel()

    def stats(self) -> EngineStats:
        """State of the engine."""
        return self._engine.stats()


def _facts(llm: LLM) -> NodeFacts:
    """Hashes are cut: they tell models apart, and stand in sentences."""
    tokenizer = tokenizer_identity(llm.tokenizer)
    return {
        "weights": model_identity(llm.model).weights[:16],
        "dtype": name_of(llm.model.dtype),
        "tokenizer": tokenizer and tokenizer[:16],
    }


def claim(folder: Path, owners: Mapping[str, Any]) -> None:
    """Takes a folder of contexts for replicas of a model, unless it is theirs already.

    Raises:
        OtherContextError: it is for others.
        ConfigError: it cannot be used.
    """
    path, own = folder / _OWNERS, folder / f"{_OWNERS}.{os.getpid()}"
    try:
        folder.mkdir(exist_ok=True)
        own.write_text(json.dumps(owners, indent=1) + "\n")
        with suppress(FileExistsError):
            os.link(own, path)  # a whole file or none, for one of many
        own.unlink()
        there = json.loads(path.read_text())
        now = json.loads(json.dumps(owners))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"the folder of contexts '{folder}' must be one that every node can write, got: "
            f"{getattr(error, 'strerror', None) or error}; choose another one"
        ) from None
    for name, value in now.items():
        if there.get(name) != value:
            raise OtherContextError(
                f"the folder of contexts '{folder}' is for replicas with {name} {there.get(name)}, "
                f"got {value}; choose another one, or give the same model and settings"
            )


# The choice: where a prefix lies, else where least is to do ---------------------------------------


R = TypeVar("R", bound=Hashable)

_BLOCK_TOKENS = 32
"""Of one hash; an engine continues no shorter prefix."""
_LEAST_SHARE = 2
"""A prefix decides if it is one part in so many of a prompt: else one system prompt would bring
every request to the same replica."""
_MOST_BLOCKS = 2**17
"""Hashes that are remembered of a replica: of 4 million tokens, in some 20 MiB."""


@dataclass(slots=True)
class _Load:
    """Requests that a replica has, and the hashes of prompts that it had, the latest last."""

    open: int = 0
    known: OrderedDict[bytes, None] = field(default_factory=OrderedDict)

    def shared(self, blocks: Sequence[bytes]) -> int:
        """Blocks at the beginning of a prompt that the replica has computed."""
        return next((n for n in range(len(blocks), 0, -1) if blocks[n - 1] in self.known), 0)

    def learn(self, blocks: Sequence[bytes]) -> None:
        for block in blocks:
            self.known.pop(block, None)
            self.known[block] = None
        while len(self.known) > _MOST_BLOCKS:
            self.known.popitem(last=False)


class Router(Generic[R]):
    """Distributes requests over replicas; for one thread at a time.

    Args:
        most_running: requests that a replica computes at a time; beyond, a prefix elsewhere counts
            less than a free place.
        most_open: requests that a replica has at most.
    """

    def __init__(self, most_running: int, most_open: int) -> None:
        self._most_running, self._most_open = most_running, most_open
        self._loads: dict[R, _Load] = {}

    def __iter__(self) -> Iterator[R]:
        return iter(self._loads)

    def add(self, replica: R) -> None:
        """Takes a replica in, which has computed nothing yet."""
        self._loads[replica] = _Load()

    def remove(self, replica: R) -> None:
        """Forgets a replica and what it has computed; harmless when it is not there."""
        self._loads.pop(replica, None)

    def take(self, ids: Sequence[int]) -> R:
        """The replica for a prompt; `release` must follow.

        Raises:
            BusyError: there is none.
            QueueFullError: all of them have as many requests as they may.
        """
        if not self._loads:
            raise BusyError("no replica is there to answer; ask again when a node has come back")
        open_to = {one: load for one, load in self._loads.items() if load.open < self._most_open}
        if not open_to:
            raise QueueFullError(
                f"at most {self._most_open} requests may be open on each of {len(self._loads)} "
                "replicas, got one more; try again later"
            )
        free = {one: load for one, load in open_to.items() if load.open < self._most_running}
        blocks = chain_of(torch.tensor(ids), _BLOCK_TOKENS)

        def rank(pair: tuple[R, _Load]) -> tuple[int, int]:
            shared = pair[1].shared(blocks)
            return shared if shared * _LEAST_SHARE >= len(blocks) else 0, -pair[1].open

        replica, load = max((free or open_to).items(), key=rank)
        load.open += 1
        load.learn(blocks)
        return replica

    def release(self, replica: R) -> None:
        """A request that was given to a replica has ended; harmless when the replica has left."""
        if (load := self._loads.get(replica)) is not None:
            load.open -= 1
