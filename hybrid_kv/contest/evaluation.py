"""Evaluation: all its cells, one context after the other, each prefilled once."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import or_
from time import perf_counter
from typing import Any

from torch import Tensor, nn

from hybrid_kv.api import LLM
from hybrid_kv.contest.arguments import EvalArguments
from hybrid_kv.contest.cases import EvalCase
from hybrid_kv.contest.folder import Key, ResultsFolder
from hybrid_kv.contest.measure import EvalTarget, answers, reading
from hybrid_kv.contest.prompts import Prompt, PromptBuilder
from hybrid_kv.contest.shared import SharedPrompt
from hybrid_kv.errors import HybridKVError
from hybrid_kv.eval.tasks import Task
from hybrid_kv.planning.model_facts import model_facts
from hybrid_kv.report.evaluation import Asking, Cell, EvalRow
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


class Evaluation:
    """An evaluation on a loaded model.

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
        """Keys of all cells, in the order of tasks, contexts and methods."""
        return [
            group.key(asking, contender)
            for group in self.groups
            for asking in group.askings
            for contender in group.contenders
        ]

    def refused(self) -> Iterator[EvalRow]:
        """A row without a score for each method and budget that cannot be had."""
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

    def run(self, folder: ResultsFolder, told: Told | None = None) -> None:
        """Measures what the folder lacks; cells that failed are tried again.

        Raises:
            ConfigError: a context cannot be written, being too short for its task.
        """
        lacking = [key for key in self.wanted() if _lacks(folder, key)]
        done, begin = 0, perf_counter()
        for group in self.groups:
            for cell in self._measured(group, folder):
                folder.add(cell)
                done += 1
                if told is not None:
                    left = (perf_counter() - begin) / done * (len(lacking) - done)
                    told(cell, done, len(lacking), left)

    def _groups(self) -> Iterator[_Group]:
        asked = self._asked
        for spec in asked.tasks_in(self._place.writer.language):
            task = asked.task(spec)
            askings: tuple[Asking, ...] = ("none",) if task.reads else asked.askings
            for context in asked.contexts:
                found = asked.contenders(context)
                for sample in range(asked.samples):
                    yield _Group(spec, task, context, sample, askings, found)

    def _measured(self, group: _Group, folder: ResultsFolder) -> Iterator[Cell]:
        lacking = [
            (asking, contender)
            for asking in group.askings
            for contender in group.contenders
            if _lacks(folder, group.key(asking, contender))
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


def _lacks(folder: ResultsFolder, key: Key) -> bool:
    cell = folder.cells.get(key)
    return cell is None or cell.error is not None


def _ends(known: int | Sequence[int] | None) -> frozenset[int]:
    if known is None:
        return frozenset()
    return frozenset([known] if isinstance(known, int) else known)
