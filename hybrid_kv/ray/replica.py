"""A replica: an engine on one node of a cluster, with the model that all replicas serve."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from transformers import (
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from hybrid_kv.api import LLM, load
from hybrid_kv.config import HybridConfig
from hybrid_kv.errors import ConfigError, OtherContextError
from hybrid_kv.plugin import load_plugin
from hybrid_kv.ray.cluster import NodeFacts
from hybrid_kv.report import probe_environment
from hybrid_kv.saved.identity import model_identity, name_of, stored_settings, tokenizer_identity
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


class Replica:
    """An actor of Ray: the engine of `hybrid-kv serve`, asked from afar."""

    def __init__(self) -> None:
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
