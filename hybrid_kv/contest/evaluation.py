"""Evaluation: its cells, one context after the other, each prefilled once; rows over samples."""

from __future__ import annotations

import gc
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import groupby
from operator import or_
from statistics import fmean
from time import perf_counter
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from hybrid_kv.api import LLM
from hybrid_kv.contest.arguments import EvalArguments, EvalCase
from hybrid_kv.contest.folder import Key, ResultsFolder
from hybrid_kv.contest.measure import EvalTarget, answers, reading
from hybrid_kv.contest.prompts import Prompt, PromptBuilder, SharedPrompt
from hybrid_kv.errors import HybridKVError
from hybrid_kv.eval.tasks import Task
from hybrid_kv.planning.plan import model_facts
from hybrid_kv.report.evaluation import Asking, Cell, Counters, DepthScore, EvalRow, Interval
from hybrid_kv.types import Needs

_log = logging.getLogger(__name__)

Told = Callable[[Cell, int, int, float], None]
"""Called with the newest cell, how many are there, how many there will be, and seconds left."""


@dataclass(frozen=True, slots=True)
class _Group:
    """The cells of one context of a task: they share a prefill."""

    spec: str
    task: Task
    context_tokens: int
    sample: int
    askings: tuple[Asking, ...]
    contenders: Sequence[EvalCase]

    def key(self, asking: Asking, contender: EvalCase) -> Key:
        place = self.spec, self.context_tokens, self.sample
        return (*place, asking, contender.name, contender.budget)


class CellSource(ABC):
    """Cells of an evaluation, wherever they are measured."""

    @abstractmethod
    def wanted(self) -> list[Key]:
        """Keys of all cells, in the order of tasks, contexts and methods."""

    @abstractmethod
    def refused(self) -> Iterable[EvalRow]:
        """A row without a score for each method and budget that cannot be had."""

    @abstractmethod
    def measure(self, keys: Collection[Key]) -> Iterator[Cell]:
        """Cells of these keys, as they are measured.

        Raises:
            ConfigError: a context cannot be written, being too short for its task.
        """

    def run(self, folder: ResultsFolder, told: Told | None = None) -> None:
        """Measures what the folder lacks; cells that failed are tried again.

        Raises:
            ConfigError: as `measure`.
        """
        lacking = [key for key in self.wanted() if folder.lacks(key)]
        begin = perf_counter()
        for done, cell in enumerate(self.measure(lacking), 1):
            folder.add(cell)
            if told is not None:
                left = (perf_counter() - begin) / done * (len(lacking) - done)
                told(cell, done, len(lacking), left)


class Evaluation(CellSource):
    """An evaluation on a loaded model; each context is prefilled once.

    Raises:
        ConfigError: a task is not written in the model's language, or the model has no tokenizer.
    """

    def __init__(self, llm: LLM, asked: EvalArguments) -> None:
        self._asked = asked
        ends = _ends(llm.model.generation_config.eos_token_id)
        writer = PromptBuilder(llm.require_tokenizer(), ends=ends, text=asked.text, raw=asked.raw)
        facts = model_facts(
            asked.model,
            dtype=asked.dtype,
            weights=asked.weights,
            dequantize=asked.dequantize,
            device=str(llm.model.device),
        )
        self._place = EvalTarget(llm.runtime, facts, writer)
        self.groups = list(self._groups())

    @property
    def model(self) -> nn.Module:
        """The model that answers."""
        return self._place.runtime.model

    def wanted(self) -> list[Key]:
        return [
            group.key(asking, contender)
            for group in self.groups
            for asking in group.askings
            for contender in group.contenders
        ]

    def refused(self) -> Iterator[EvalRow]:
        refusals = {context: self._asked.refused(context) for context in self._asked.contexts}
        places = dict.fromkeys(
            (group.spec, group.context_tokens, asking)
            for group in self.groups
            for asking in group.askings
        )
        for task, context, asking in places:
            for one in refusals[context]:
                yield EvalRow(
                    task=task,
                    context_tokens=context,
                    asking=asking,
                    method=one.name,
                    budget=one.budget,
                    samples=0,
                    questions=0,
                    error=one.refused,
                    refused=True,
                )

    def measure(self, keys: Collection[Key]) -> Iterator[Cell]:
        asked = frozenset(keys)
        for group in self.groups:
            yield from self._measured(group, asked)

    def _groups(self) -> Iterator[_Group]:
        asked = self._asked
        for spec in asked.tasks_in(self._place.writer.language):
            task = asked.task(spec)
            askings: tuple[Asking, ...] = ("none",) if task.reads else asked.askings
            for context in asked.contexts:
                found = asked.contenders(context)
                for sample in range(asked.samples):
                    yield _Group(spec, task, context, sample, askings, found)

    def _measured(self, group: _Group, keys: Collection[Key]) -> Iterator[Cell]:
        lacking = [
            (asking, contender)
            for asking in group.askings
            for contender in group.contenders
            if group.key(asking, contender) in keys
        ]
        if not lacking:
            return
        writer, asked = self._place.writer, self._asked
        prompt = writer.prompt(
            group.spec, group.task, group.context_tokens, group.sample, asked.samples, asked.seed
        )
        needs = (contender.config.build().needs for _, contender in lacking)
        shared = SharedPrompt(self._place.runtime, prompt.context, reduce(or_, needs, Needs()))
        full: Tensor | None = None
        try:
            if group.task.reads:
                step = group.task.params.step
                first = group.contenders[0].config
                _, full = reading(self._place, first, shared, prompt, step, None)
            for asking, contender in lacking:
                yield self._cell(group, asking, contender, shared, prompt, full)
                gc.collect()  # caches hold each other and gigabytes
        finally:
            shared.close()

    def _cell(
        self,
        group: _Group,
        asking: Asking,
        contender: EvalCase,
        shared: SharedPrompt,
        prompt: Prompt,
        full: Tensor | None,
    ) -> Cell:
        """Measured cell, or one that says why it could not be: one method ends no other."""
        config, begin = contender.config, perf_counter()
        fields: dict[str, Any]
        try:
            if asking == "none":
                step = group.task.params.step
                fields, _ = reading(self._place, config, shared, prompt, step, full)
            else:
                fields = answers(self._place, config, shared, prompt, asking)
        except Exception as error:
            _log.info("%s failed", contender.name, exc_info=True)
            kind = "" if isinstance(error, HybridKVError) else f"{type(error).__name__}: "
            fields = {"error": f"{kind}{error}" or kind}
        return Cell(
            task=group.spec,
            context_tokens=group.context_tokens,
            sample=group.sample,
            asking=asking,
            method=contender.name,
            budget=contender.budget,
            config=config.flat(),
            seconds=round(perf_counter() - begin, 3),
            **fields,
        )


def _ends(known: int | Sequence[int] | None) -> frozenset[int]:
    if known is None:
        return frozenset()
    return frozenset([known] if isinstance(known, int) else known)


# From cells to rows: means over samples, with bootstrap intervals ---------------------------------

_RESAMPLES = 2000
_BLOCK = 16
"""Tokens in a row that are drawn together: neighbours are alike."""
_DEPTHS = 5


def rows_of(cells: Iterable[Cell]) -> Iterator[EvalRow]:
    """One row for each task, context, way of asking, method and budget, in the cells' order."""
    place: dict[tuple[object, ...], list[Cell]] = {}
    for cell in cells:
        key = (cell.task, cell.context_tokens, cell.asking, cell.method, cell.budget)
        place.setdefault(key, []).append(cell)
    return (_row(sorted(group, key=lambda cell: cell.sample)) for group in place.values())


def interval(groups: Sequence[Sequence[float]], seed: int = 0) -> Interval | None:
    """The mean of all values and its 95% interval by resampling whole groups; None of no values.

    Values of a group are alike (questions on one context, tokens in a row), so that drawing them
    one by one would promise too much.
    """
    groups = [group for group in groups if group]
    if not groups:
        return None
    sums = np.array([sum(group) for group in groups])
    sizes = np.array([len(group) for group in groups])
    draw = np.random.default_rng(seed).integers(len(groups), size=(_RESAMPLES, len(groups)))
    means = sums[draw].sum(1) / sizes[draw].sum(1)
    low, high = np.percentile(means, [2.5, 97.5]).tolist()
    return Interval(mean=float(sums.sum() / sizes.sum()), low=low, high=high)


def _row(cells: Sequence[Cell]) -> EvalRow:
    first, done = cells[0], [cell for cell in cells if cell.error is None]
    reads = first.asking == "none"
    errors = [cell.error for cell in cells if cell.error is not None]
    beyond = [_difference(cell.nats, cell.full_nats) for cell in done]
    scores = [list(map(float, cell.agrees)) if reads else list(cell.scores) for cell in done]
    groups: Callable[[list[list[float]]], list[list[float]]] = _blocks if reads else _as_they_are
    return EvalRow(
        task=first.task,
        context_tokens=first.context_tokens,
        asking=first.asking,
        method=first.method,
        budget=first.budget,
        samples=len(done),
        questions=sum(map(len, scores)),
        score=interval(groups(scores)),
        nats=fmean(value for cell in done for value in cell.nats) if reads and done else None,
        nats_beyond=interval(_blocks(beyond)) if reads else None,
        kl=interval(_blocks([list(cell.kl) for cell in done])) if reads else None,
        counters=_mean_counters([cell.counters for cell in done]),
        depths=tuple(_depths(done)),
        config=first.config,
        error=errors[0] if errors else None,
    )


def _difference(values: Sequence[float], others: Sequence[float]) -> list[float]:
    return [value - other for value, other in zip(values, others, strict=True)]


def _as_they_are(samples: list[list[float]]) -> list[list[float]]:
    """Questions on one context are drawn together; those of a single context one by one."""
    return samples if len(samples) > 1 else [[value] for sample in samples for value in sample]


def _blocks(samples: list[list[float]]) -> list[list[float]]:
    return [s[i : i + _BLOCK] for s in samples for i in range(0, len(s), _BLOCK)]


def _mean_counters(found: Sequence[Counters]) -> Counters:
    means: dict[str, float | None] = {}
    for name in Counters.model_fields:
        values = [value for one in found if (value := getattr(one, name)) is not None]
        means[name] = fmean(values) if values else None
    return Counters(**means)


def _depths(cells: Sequence[Cell]) -> Iterator[DepthScore]:
    """Mean scores by fifths of the context; nothing where places do not matter."""
    pairs = [
        (min(_DEPTHS - 1, int(depth * _DEPTHS)), score)
        for cell in cells
        for depth, score in zip(cell.depths, cell.scores, strict=True)
        if depth is not None
    ]
    for part, group in groupby(sorted(pairs), key=lambda pair: pair[0]):
        scores: NDArray[np.float64] = np.array([score for _, score in group])
        yield DepthScore(
            low=part / _DEPTHS,
            high=(part + 1) / _DEPTHS,
            score=float(scores.mean()),
            questions=len(scores),
        )
