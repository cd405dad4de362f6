"""One question answered twice by the same weights: with full attention and with a method."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
from rich.text import Text

from hybrid_kv.api import LLM, Generation
from hybrid_kv.api.generation import PrefillWatch
from hybrid_kv.api.turn import Turn, check_room
from hybrid_kv.cli.display import (
    TextCell,
    attended_ratio,
    human_bytes,
    human_seconds,
    note,
    percent,
    prefill_bar,
)
from hybrid_kv.cli.files import describe_run, environment_of
from hybrid_kv.cli.model_run import checked, ended_by_ctrl_c, opened, run
from hybrid_kv.cli.options import ModelOptions, OutputOptions
from hybrid_kv.config import HybridConfig
from hybrid_kv.eval.needle import Question, Sample, is_correct
from hybrid_kv.eval.prefilled import PrefilledPrompt, open_cache, prefill
from hybrid_kv.report import Environment
from hybrid_kv.report.run import Run
from hybrid_kv.runtime import memory_errors

_MODEL = "needle"
_ENDING_TOKENS = 40


@dataclass(frozen=True, slots=True)
class Answer:
    """Answer of one method, and its cost; ready_s: until its tiers and index stood."""

    title: str
    generation: Generation
    run: Run
    correct: bool
    ready_s: float

    def rows(self) -> list[tuple[str, TextCell]]:
        """Labels and cells of a column of the comparison."""
        got, work = self.generation, self.generation.work
        per_step = work.attended / work.steps if work.steps else 0
        share = percent(attended_ratio(work))
        return [
            ("answer", Text(got.text or "(none)", "green" if self.correct else "red")),
            ("right", "yes" if self.correct else "no"),
            ("tokens attended", f"{per_step:,.0f} per step ({share})" if per_step else "-"),
            ("of them retrieved", self._retrieved()),
            ("KV on device", human_bytes(got.device_kv_bytes)),
            ("KV on host", human_bytes(got.host_kv_bytes)),
            ("index on host", human_bytes(got.host_index_bytes)),
            ("tiers and index", human_seconds(self.ready_s)),
            ("first token", human_seconds(got.ttft_s)),
            ("each further", human_seconds(got.tpot_ms / 1e3) if got.tpot_ms else "-"),
        ]

    def _retrieved(self) -> str:
        work = self.generation.work
        if not work.retrieved:
            return "-"
        return f"{work.retrieved / work.steps:,.0f} per step, {work.most_retrieved:,} at most"


@dataclass(frozen=True, slots=True)
class Comparison:
    """Both answers, exact first, with what was asked; read_s: computing the text, once for both."""

    model: str
    environment: Environment
    context_tokens: int
    records: int
    ending: str
    question: str
    expected: str
    read_s: float
    answers: tuple[Answer, Answer]

    @property
    def interrupted(self) -> bool:
        return any(answer.run.interrupted for answer in self.answers)

    @property
    def agree(self) -> bool:
        first, second = (answer.run.token_ids for answer in self.answers)
        return first == second

    @property
    def correct(self) -> bool:
        return all(answer.correct for answer in self.answers)


def compare(
    sample: Sample, records: int, config: HybridConfig, options: ModelOptions, output: OutputOptions
) -> Comparison:
    """Asks the sample's first question with full attention, then with `config`.

    The text is computed once, exactly, as every method does; both get its keys and values.
    """
    question = sample.questions[0]
    exact = HybridConfig(
        method="full",
        page_size=config.page_size,
        prefill_chunk_tokens=config.prefill_chunk_tokens,
        prefill_states=config.prefill_states,
        compile_decode=config.compile_decode,
        capture_decode=config.capture_decode,
        backend=config.backend,
    )
    with opened(_MODEL, options, exact, output) as llm:
        tokenizer: Any = llm.tokenizer
        begin = perf_counter()
        prompt = _read(llm, sample, config, output)
        read_s = perf_counter() - begin
        first = _ask(llm, exact, prompt, question, "full attention", output)
        title = config.method if config.method != "full" else "full again"
        if first.run.interrupted:
            second = first
        else:
            second = _ask(llm, config, prompt, question, title, output)
        layers = llm.model.config.num_hidden_layers
        return Comparison(
            model=f"{_MODEL}, {layers} layers, {str(llm.model.dtype).removeprefix('torch.')}",
            environment=environment_of(llm),
            context_tokens=len(sample.context),
            records=records,
            ending=tokenizer.decode(sample.context[-_ENDING_TOKENS:].tolist()),
            question=tokenizer.decode(list(question.ids)),
            expected=tokenizer.decode(list(question.answer)),
            read_s=read_s,
            answers=(first, second),
        )


def _read(llm: LLM, sample: Sample, config: HybridConfig, output: OutputOptions) -> PrefilledPrompt:
    """The text's keys and values, with what the method's index learns from."""
    total = len(sample.context)
    note(f"reading {total:,} tokens, once for both", output)
    with _cache(llm, config) as cache:
        check_room(llm, cache, total + len(sample.questions[0].ids))
        needs = cache.kv.means.method.needs
    with (
        ended_by_ctrl_c(output) as check,
        prefill_bar(output) as report,
        PrefillWatch(llm.model, total, checked(report, check), ()),
        memory_errors(lambda: "prefill"),
    ):
        return prefill(llm.runtime, sample.context, needs)


@contextmanager
def _cache(llm: LLM, config: HybridConfig) -> Iterator[Any]:
    cache = llm.runtime.cache(config)
    try:
        yield cache
    finally:
        cache.close()


def _ask(
    llm: LLM,
    config: HybridConfig,
    prompt: PrefilledPrompt,
    question: Question,
    title: str,
    output: OutputOptions,
) -> Answer:
    note(f"asking: {title}", output)
    begin = perf_counter()
    with memory_errors(lambda: "prefill"):
        cache = open_cache(llm.runtime, config, prompt, wait=False)
    ready_s, build_s = perf_counter() - begin, cache.kv.means.builds.clock.seconds
    ids = torch.cat([prompt.ids, torch.tensor([question.ids]).to(prompt.ids)], 1)

    def answer(**options: Any) -> Generation:
        return Turn(llm, cache, ids, options).run()

    try:
        options = {"max_new_tokens": len(question.answer), "do_sample": False}
        outcome = run(answer, options, None, output)
    finally:
        cache.close()
    got = outcome.generation
    described = describe_run(llm, _MODEL, outcome, config).model_copy(
        update={"index_build_s": got.index_build_s + build_s}
    )
    return Answer(title, got, described, is_correct(question, got.token_ids), ready_s)
