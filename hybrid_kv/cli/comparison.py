"""One question answered twice by the same weights: with full attention and with a method."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from rich.text import Text

from hybrid_kv.api import LLM, Generation, load
from hybrid_kv.cli.display import attended_ratio, human_bytes, human_seconds, note, percent
from hybrid_kv.cli.documents import describe_run, environment_of
from hybrid_kv.cli.options import ModelOptions, OutputOptions
from hybrid_kv.cli.running import opened, run
from hybrid_kv.cli.tables import Cell
from hybrid_kv.config import HybridConfig
from hybrid_kv.eval.needle import Question, Sample, is_correct
from hybrid_kv.report import Environment
from hybrid_kv.report.run import Run

_MODEL = "needle"
_ENDING_TOKENS = 40


@dataclass(frozen=True, slots=True)
class Answer:
    """What one method answered, and what that cost."""

    title: str
    generation: Generation
    run: Run
    correct: bool

    def rows(self) -> list[tuple[str, Cell]]:
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
    """Both answers, exact first, with what was asked."""

    model: str
    environment: Environment
    context_tokens: int
    records: int
    ending: str
    question: str
    expected: str
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
    """Asks the sample's first question with full attention, then with `config`."""
    question = sample.questions[0]
    exact = HybridConfig(
        method="full",
        page_size=config.page_size,
        prefill_chunk_tokens=config.prefill_chunk_tokens,
        backend=config.backend,
    )
    with opened(_MODEL, options, exact, output) as llm:
        tokenizer: Any = llm.tokenizer
        first = _ask(llm, sample, question, "full attention", output)
        model, environment = llm.model, environment_of(llm)
    with load(model, config=config, tokenizer=tokenizer) as llm:
        title = config.method if config.method != "full" else "full again"
        second = first if first.run.interrupted else _ask(llm, sample, question, title, output)
    layers = model.config.num_hidden_layers
    return Comparison(
        model=f"{_MODEL}, {layers} layers, {str(model.dtype).removeprefix('torch.')}",
        environment=environment,
        context_tokens=len(sample.context),
        records=records,
        ending=tokenizer.decode(sample.context[-_ENDING_TOKENS:].tolist()),
        question=tokenizer.decode(list(question.ids)),
        expected=tokenizer.decode(list(question.answer)),
        answers=(first, second),
    )


def _ask(llm: LLM, sample: Sample, question: Question, title: str, output: OutputOptions) -> Answer:
    note(f"reading {len(sample.context):,} tokens: {title}", output)
    prompt = [*sample.context.tolist(), *question.ids]
    options = {"max_new_tokens": len(question.answer), "do_sample": False}
    outcome = run(partial(llm.generate, prompt), options, None, output)
    got = outcome.generation
    right = is_correct(question, got.token_ids)
    return Answer(title, got, describe_run(llm, _MODEL, outcome), right)
