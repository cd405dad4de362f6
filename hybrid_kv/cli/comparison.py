"""Full attention beside a method, for the demo: one question answered twice by the same weights,
and a decode step of one made-up layer of a large model at a long context.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import Any

import torch
from rich.console import Console
from rich.text import Text
from torch import Tensor

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
    waiting,
)
from hybrid_kv.cli.files import describe_run, environment_of
from hybrid_kv.cli.model_run import checked, ended_by_ctrl_c, opened, run
from hybrid_kv.cli.options import ModelOptions, OutputOptions
from hybrid_kv.config import HybridConfig
from hybrid_kv.contest.prompts import PrefilledPrompt, open_cache, prefill
from hybrid_kv.eval.filling import FilledKV, SyntheticContext, context_bytes
from hybrid_kv.eval.needle import Question, Sample, is_correct
from hybrid_kv.ops.host_memory import free_memory
from hybrid_kv.report import Environment
from hybrid_kv.report.run import Run
from hybrid_kv.report.schema import LayerReport, LayerRun
from hybrid_kv.runtime import memory_errors
from hybrid_kv.types import LayerShape, ModelInfo, Needs, bytes_per_token

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


LLAMA_3_8B = LayerShape(0, 32, 8, 128)
LAYER_DTYPE = torch.bfloat16
_WARMUP_STEPS = 3


@dataclass(frozen=True, slots=True)
class LayerSteps:
    """Times of the decode steps of a layer under one method.

    step_s: of each step. attended_ratio: entries attended over all. lse: [steps, Hq] float32.
    device_kv_bytes, host_bytes: K and V on the device tier; cold KV and indexes.
    """

    config: HybridConfig
    step_s: tuple[float, ...]
    attended_ratio: float
    lse: Tensor
    device_kv_bytes: int
    host_bytes: int

    def mass(self, exact: LayerSteps) -> float:
        """Share of the softmax that was attended, from the steps of full attention."""
        return float((self.lse - exact.lse).exp().mean().clamp(max=1))


def layer_bytes(num_tokens: int) -> int:
    """Host memory that `measure_steps` takes at most: what is made up, K and V twice, and an index
    of as many bytes again.
    """
    kv = num_tokens * bytes_per_token(LLAMA_3_8B, LAYER_DTYPE)
    return context_bytes((LLAMA_3_8B,), num_tokens, LAYER_DTYPE.itemsize) + 3 * kv


def make_context(num_tokens: int, steps: int) -> SyntheticContext:
    """KV and queries of a made-up text for one layer; its heads are turned copies of one."""
    return SyntheticContext(
        ModelInfo((LLAMA_3_8B,)),
        num_tokens,
        max_steps=steps + _WARMUP_STEPS,
        made_heads=1,
        keep=True,
    )


def measure_steps(
    context: SyntheticContext,
    config: HybridConfig,
    *,
    check: Callable[[], None],
) -> LayerSteps:
    """Decodes as many steps as the context was made for under a method, the first ones unmeasured.

    Indexes are waited for.

    Args:
        check: called before each step; what it raises ends the measurement.
    """
    info = ModelInfo((LLAMA_3_8B,))
    cache = FilledKV(info, config.replace(index_build="wait"), context)
    try:
        with torch.inference_mode():
            return _measure(cache, context, config, LLAMA_3_8B, check)
    finally:
        cache.close()


def _measure(
    cache: FilledKV,
    context: SyntheticContext,
    config: HybridConfig,
    shape: LayerShape,
    check: Callable[[], None],
) -> LayerSteps:
    cache.means.reserve(context.num_tokens + context.max_steps)
    needs, layer_idx = cache.means.method.needs, shape.layer_idx
    evidence = (context.evidence(layer_idx, needs, LAYER_DTYPE),) if needs != Needs() else ()
    cache.load(layer_idx, *context.kv(layer_idx, LAYER_DTYPE), evidence)
    q = torch.ones(1, shape.num_q_heads, 1, shape.head_dim, dtype=LAYER_DTYPE)
    new = torch.ones(2, 1, shape.num_kv_heads, 1, shape.head_dim, dtype=LAYER_DTYPE)
    times, sums = [], []
    for _ in range(context.max_steps):
        check()
        begin = perf_counter()
        part = cache.attend(layer_idx, q, (new[0], new[1]), None, scale=shape.head_dim**-0.5)
        times.append(perf_counter() - begin)
        sums.append(part.lse[0, :, 0])
    layer, work = cache.stores[layer_idx], cache.work
    return LayerSteps(
        config=config,
        step_s=tuple(times[_WARMUP_STEPS:]),
        attended_ratio=float(work.attended / work.visible),
        lse=torch.stack(sums[_WARMUP_STEPS:]),
        device_kv_bytes=layer.rows[0].table.num_tokens * bytes_per_token(shape, LAYER_DTYPE),
        host_bytes=layer.cold.kv_bytes + layer.cold.overhead_bytes + layer.cold.index_bytes,
    )


_SHAPE = "Llama-3-8B"
_STEPS = 24
_BAR_CELLS = 40
_SCAN = {"index": {"kind": "flat", "precision": "int8"}}
"""The index that serves by default from the first token on; a sketch is learned for a minute."""


def decode_layer(
    num_tokens: int, output: OutputOptions, check: Callable[[], None]
) -> LayerReport | None:
    """Measures the layer; None, with a note, where memory is short.

    Args:
        check: called between steps; what it raises ends the measurement.
    """
    needed, free = layer_bytes(num_tokens), free_memory()
    if needed > free.num_bytes:
        note(
            f"the layer of {_SHAPE} at {num_tokens:,} tokens is left out: it needs {needed:,} "
            f"bytes, {free}; --layer-context takes a smaller number",
            output,
        )
        return None
    note(f"decoding one layer of {_SHAPE} at {num_tokens:,} made-up tokens", output)
    with waiting("making up keys and values", output):
        context = make_context(num_tokens, _STEPS)
        exact = measure_steps(context, HybridConfig(method="full"), check=check)
        tiered = measure_steps(context, HybridConfig(method="hybrid", cold=_SCAN), check=check)
    return LayerReport(
        shape=_SHAPE,
        context_tokens=num_tokens,
        kv_bytes=num_tokens * bytes_per_token(LLAMA_3_8B, LAYER_DTYPE),
        steps=_STEPS,
        runs=(_described(exact, exact), _described(tiered, exact)),
    )


def _described(steps: LayerSteps, exact: LayerSteps) -> LayerRun:
    return LayerRun(
        config=steps.config.flat(),
        method=steps.config.method,
        step_ms=1e3 * median(steps.step_s),
        attended_ratio=steps.attended_ratio,
        mass=steps.mass(exact),
        device_kv_bytes=steps.device_kv_bytes,
        host_bytes=steps.host_bytes,
    )


def print_layer(out: Console, layer: LayerReport) -> None:
    """Two bars as long as a step takes, and what that buys in a sentence."""
    full, tiered = layer.runs
    out.print(
        f"One attention layer of {layer.shape} at {layer.context_tokens:,} tokens (made-up KV, "
        f"{human_bytes(layer.kv_bytes)}), a decode step on the CPU:"
    )
    longest = max(one.step_ms for one in layer.runs)
    for one, colour in ((full, "red"), (tiered, "green")):
        cells = max(1, round(_BAR_CELLS * one.step_ms / longest))
        bar = "█" * cells + " " * (_BAR_CELLS - cells)
        name = "full attention" if one is full else one.method
        line = Text.assemble((f"{name:<15}", "bold"), (bar, colour))
        out.print(line.append(f" {human_seconds(one.step_ms / 1e3)}"))
    ratio = full.step_ms / tiered.step_ms
    gain = f"{ratio:.1f} times as fast" if ratio >= 1 else f"{1 / ratio:.1f} times as slow"
    out.print(
        Text.assemble(
            (f"{tiered.method} is {gain}", "green" if ratio >= 1 else "yellow"),
            f": it attends {percent(tiered.attended_ratio)} of the tokens with "
            f"{percent(tiered.mass)} of the attention's mass, and keeps "
            f"{human_bytes(tiered.device_kv_bytes)} on the device tier, not "
            f"{human_bytes(full.device_kv_bytes)}.",
        )
    )
