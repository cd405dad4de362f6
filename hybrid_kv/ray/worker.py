"""The cells of an evaluation that one node measures."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from hybrid_kv.api import load
from hybrid_kv.config import HybridConfig
from hybrid_kv.contest.arguments import EvalArguments
from hybrid_kv.contest.evaluation import Evaluation
from hybrid_kv.contest.folder import Key
from hybrid_kv.plugin import load_plugin
from hybrid_kv.ray.cluster import NodeFacts
from hybrid_kv.report import Environment, probe_environment
from hybrid_kv.report.evaluation import Cell, EvalRow
from hybrid_kv.report.run import environment_on
from hybrid_kv.saved.identity import model_identity


@dataclass(frozen=True, slots=True)
class LoadedEvaluation:
    """An evaluation as a node has it; weights: their hash."""

    wanted: list[Key]
    refused: list[EvalRow]
    environment: Environment
    weights: str


class EvalWorker:
    """An actor of Ray: loads the model once, and measures the cells that it is given.

    Args:
        arguments: of the evaluation.
        folder: that relative paths begin at, where the node has it.
        plugins: modules that register methods, indexes or tasks.
    """

    def __init__(self, arguments: Mapping[str, Any], folder: str, plugins: Sequence[str]) -> None:
        self._arguments, self._plugins = arguments, plugins
        with suppress(OSError):  # a path that is not here is named when it is read
            os.chdir(folder)

    def facts(self) -> NodeFacts:
        """Versions of packages, and what the folder of results has in common."""
        return {**probe_environment().versions, **self._asked.on_machine()}

    def load(self) -> LoadedEvaluation:
        """Loads the model."""
        asked = self._asked
        llm = load(
            asked.model,
            config=HybridConfig(method="full"),
            device=asked.device,
            dtype=asked.dtype,
            weights=asked.weights,
            dequantize=asked.dequantize,
            exact_products=asked.exact_products,
        )
        self._evaluation = own = Evaluation(llm, asked)
        return LoadedEvaluation(
            own.wanted(),
            list(own.refused()),
            environment_on(llm.model.device),
            model_identity(llm.model).weights,
        )

    def measure(self, keys: Sequence[Key]) -> Iterator[Cell]:
        """Cells of these keys, each as soon as it is measured."""
        yield from self._evaluation.measure(keys)

    @cached_property
    def _asked(self) -> EvalArguments:
        """Checked here and not as the actor is made: a node of another version is told so first."""
        for module in self._plugins:
            load_plugin(module)
        return EvalArguments.of(self._arguments)
