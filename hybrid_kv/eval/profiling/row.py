"""One method at one context length: filled, warmed up, timed, traced, audited."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hybrid_kv.config import AuditParams, HybridConfig
from hybrid_kv.eval.filling import SyntheticContext, filled_cache
from hybrid_kv.eval.profiling.arguments import TRACED_STEPS, ProfileArguments
from hybrid_kv.eval.profiling.steps import Steps, StepWatch, generate
from hybrid_kv.models.attach import Attachment, attach
from hybrid_kv.models.hf_cache import TieredCache
from hybrid_kv.planning.planner import ModelFacts
from hybrid_kv.planning.rates import Rates
from hybrid_kv.planning.traffic import bytes_per_step, limit_ms
from hybrid_kv.transfer import SyncExecutor
from hybrid_kv.types import Work, bytes_per_token
from hybrid_kv.watch.audit import Audit
from hybrid_kv.watch.auditor import Auditor
from hybrid_kv.watch.peak import PeakMemory
from hybrid_kv.watch.phases import INDEX_BUILD, Phases, cost_of_measuring
from hybrid_kv.watch.recorder import Recorder, Span, device_clock

Status = Literal["ok", "failed", "interrupted", "skipped"]
Progress = Callable[[str, int, int], None]
"""Called with what is being done, how much of it is done, and how much there is."""


class Overtime(Exception):  # noqa: N818 (an event, not a failure)
    """A row takes longer than it may; the message says what would have taken so long.

    expected_s: how long filling would have taken, None where it has not begun.
    """

    def __init__(self, message: str, expected_s: float | None = None) -> None:
        super().__init__(message)
        self.expected_s = expected_s


@dataclass(slots=True)
class Row:
    """What was measured; None or empty where nothing was.

    status: "ok", or why there is no result, with `reason` in a sentence (which an "ok" row has
    where it was measured shorter than asked). fill_s: putting made-up KV in place; ttft_s,
    prefill_s: of a prompt that was computed, prefill_s without the index builds that were waited
    for. steps: the timed pass. measuring_s: what measuring one piece of work costs. peak_bytes: of
    the process during the row. audit: of a pass of its own. spans: of a pass of its own.
    """

    method: str
    context_tokens: int
    config: HybridConfig
    predicted_ms: dict[str, float] = field(default_factory=dict)
    status: Status = "ok"
    reason: str | None = None
    fill_s: float | None = None
    ttft_s: float | None = None
    prefill_s: float | None = None
    index_build_s: float | None = None
    steps: Steps | None = None
    measuring_s: float = 0.0
    work: Work | None = None
    audit: Audit | None = None
    device_peak: int | None = None
    device_kv_bytes: int | None = None
    host_kv_bytes: int | None = None
    host_index_bytes: int | None = None
    peak_bytes: int | None = None
    bytes_per_step: dict[str, int] = field(default_factory=dict)
    limit_ms: float | None = None
    backends: dict[str, str] = field(default_factory=dict)
    index: list[dict[str, Any]] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)

    @property
    def tpot_ms(self) -> float | None:
        """Mean of the measured steps."""
        taken = [] if self.steps is None else self.steps.step_s
        return 1e3 * sum(taken) / len(taken) if taken else None

    @property
    def recorder_ratio(self) -> float | None:
        """Share of a step that measuring it took."""
        taken = [] if self.steps is None else self.steps.step_s
        if self.steps is None or not taken:
            return None
        return self.measuring_s * self.steps.entered / sum(taken)


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What the rows of a profile share."""

    asked: ProfileArguments
    model: PreTrainedModel
    facts: ModelFacts
    rates: Rates
    report: Progress
    traces: bool = False


class RowMeasurement:
    """Measures one row into `row`, which holds what there is so far at any moment.

    Args:
        context: the made-up KV; None where a prompt is computed.
    """

    def __init__(self, around: Surroundings, row: Row, context: SyntheticContext | None) -> None:
        self._around, self.row, self._context = around, row, context
        self._asked, self._model = around.asked, around.model
        self._begin = perf_counter()

    def run(self) -> None:
        """Fills a cache and measures it.

        Raises:
            Overtime: filling would take longer than the row may.
            Exception: whatever fails.
        """
        row, device = self.row, self._model.device
        peak = PeakMemory()
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        with ExitStack() as stack, torch.inference_mode():
            stack.callback(self._take_peaks, peak)
            runtime = stack.enter_context(attach(self._model, row.config))
            cache = self._fill(runtime)
            stack.callback(cache.close)
            ids = self._timed(cache)
            self._describe(cache)
            if self._around.traces:
                ids = self._traced(cache, ids)
            if self._asked.audit_every:
                self._audited(cache, ids)

    # Filling.

    def _fill(self, runtime: Attachment) -> TieredCache:
        if self._context is None:
            return runtime.cache()
        begin = perf_counter()
        cache = filled_cache(runtime, self._context, self._layer_filled)
        self.row.fill_s = perf_counter() - begin
        self.row.index_build_s = cache.kv.builds.clock.seconds
        return cache

    def _layer_filled(self, done: int, total: int, build_s: float) -> None:
        self._report("filling", done, total)
        # The first layer makes what further ones share; each builds an index of its own.
        self._keep_to_limit("filling", done, total, build_s)

    def _keep_to_limit(
        self, what: str, done: int, total: int, repeated_s: float | None = None
    ) -> None:
        """Raises Overtime where the rest takes too long.

        Args:
            repeated_s: of what was spent, that which the rest takes again at its own length; None
                for all of it.
        """
        limit, spent = self._asked.row_limit_s, perf_counter() - self._begin
        repeated = spent if repeated_s is None else repeated_s
        expected = spent + repeated * (total - done) / max(1, done)
        if limit is not None and expected > limit and done < total:
            raise Overtime(
                f"{what} would take about {expected:,.0f} s ({done} of {total} took {spent:,.0f} s)"
                f", the row limit is {limit:g} s; raise --row-limit",
                expected,
            )

    @contextmanager
    def _prefill_watched(self, num_tokens: int) -> Any:
        """Progress and time limit while a prompt is computed, chunk by chunk."""
        layers = [m for m in self._model.modules() if isinstance(_attention_of(m), nn.Module)]
        total, done = num_tokens * len(layers), 0

        def seen(module: nn.Module, args: Any, output: Any) -> None:
            nonlocal done
            done = min(total, done + output[0].shape[1])
            self._report("prefill", done, total)
            self._keep_to_limit("prefill", done, total)
            if done == total:
                remove()

        hooks = [_attention_of(layer).register_forward_hook(seen) for layer in layers]

        def remove() -> None:
            for hook in hooks:
                hook.remove()

        try:
            yield
        finally:
            remove()

    # Decoding.

    def _timed(self, cache: TieredCache) -> Tensor:
        """Warm-up and the measured steps; all ids."""
        asked, row = self._asked, self.row
        row.measuring_s = self._cost_of_measuring()
        watch = StepWatch(self._model, cache, asked.warmup_tokens, self._recorder())
        cache.kv.reserve(row.context_tokens + asked.steps)
        row.steps, row.work = watch.steps, watch.work
        count, begin = 1 + asked.warmup_tokens + asked.new_tokens, perf_counter()
        waited = cache.kv.phases.seconds[INDEX_BUILD]
        ids = self._prompt()
        self._report("warm-up and measuring", 0, asked.new_tokens)
        with ExitStack() as stack:
            if self._context is None:
                stack.enter_context(self._prefill_watched(row.context_tokens))
            ids = generate(watch, ids, count, self._is_over)
        if self._context is None:
            row.ttft_s = watch.steps.times_s[0] - begin
            row.index_build_s = cache.kv.builds.clock.seconds
            row.prefill_s = row.ttft_s - (watch.steps.first[INDEX_BUILD] - waited)
        if (measured := len(watch.steps.step_s)) < asked.new_tokens:
            row.reason = (
                f"{measured} of {asked.new_tokens} steps were measured, the row limit is "
                f"{asked.row_limit_s:g} s"
            )
        return ids

    def _recorder(self) -> Recorder | None:
        """What the timed pass is observed by: a device's clock, or nobody where there is none."""
        clock = device_clock(self._model.device, perf_counter)
        return None if clock is None else Recorder(keep_spans=False, clock=clock)

    def _cost_of_measuring(self) -> float:
        """Seconds for one piece of work, observed as in the timed pass."""
        phases, recorder = Phases(), self._recorder()
        phases.observe(recorder)
        return cost_of_measuring(phases, 20_000 if recorder is None else 1000)

    def _prompt(self) -> Tensor:
        """[1, N] random ids; one more behind a made-up context, which is the one computed."""
        count = self.row.context_tokens + (self._context is not None)
        table: Any = self._model.get_input_embeddings()
        draw = torch.Generator().manual_seed(self._asked.seed)
        ids = torch.randint(table.weight.shape[0], (1, count), generator=draw)
        return ids.to(self._model.device)

    def _is_over(self) -> bool:
        limit = self._asked.row_limit_s
        return limit is not None and perf_counter() - self._begin > limit

    def _traced(self, cache: TieredCache, ids: Tensor) -> Tensor:
        """A few steps more, whose spans are kept."""
        self._report("tracing", 0, TRACED_STEPS)
        clock = device_clock(self._model.device, perf_counter)
        recorder = Recorder(keep_spans=True, clock=clock)
        watch = StepWatch(self._model, cache, 0, recorder)
        ids = generate(watch, ids, 1 + TRACED_STEPS, lambda: False)
        begin = watch.steps.times_s[0]  # what comes before the first token is no whole step
        self.row.spans = [span for span in recorder.spans if span.begin_s >= begin]
        return ids

    def _audited(self, cache: TieredCache, ids: Tensor) -> None:
        """As many steps again, some of whose heads are attended exactly as well."""
        asked = self._asked
        self._report("audit", 0, asked.new_tokens)
        cache.kv.auditor = auditor = Auditor(
            asked.audit_every,
            AuditParams(min_recall=0, max_missed_mass=None, max_output_error=None),
            cache.kv.info.layers,
            SyncExecutor(),
        )
        self.row.audit = auditor.audit
        watch = StepWatch(self._model, cache, 0)
        generate(watch, ids, asked.new_tokens, self._is_over, fewest=asked.audit_every)
        auditor.settle()

    # What there is to tell.

    def _report(self, what: str, done: int, total: int) -> None:
        self._around.report(what, done, total)

    def _describe(self, cache: TieredCache) -> None:
        """Tiers and traffic as the timed pass has left them."""
        row, kv = self.row, cache.kv
        layers = kv.stores
        row.device_kv_bytes = sum(
            bytes_per_token(layer.shape, layer.cold.dtype) * layer.resident.num_tokens(0)
            for layer in layers.values()
        )
        row.host_kv_bytes = sum(
            layer.cold.kv_bytes + layer.cold.overhead_bytes for layer in layers.values()
        )
        row.host_index_bytes = sum(layer.cold.index_bytes for layer in layers.values())
        row.backends = dict(kv.ops.served)
        row.index = [
            {"layer": layer_idx, **head}
            for layer_idx, layer in sorted(layers.items())
            for head in layer.cold.describe_indexes()
        ]
        if row.steps is not None and row.work is not None:
            row.bytes_per_step = bytes_per_step(
                self._around.facts,
                kv,
                row.work,
                selects=row.steps.phases_s().get("select", 0) > 0,
                on_device=self._model.device.type != "cpu",
            )
            row.limit_ms = limit_ms(row.bytes_per_step, kv, self._around.rates)

    def _take_peaks(self, peak: PeakMemory) -> None:
        self.row.peak_bytes = peak.bytes()
        if self._model.device.type == "cuda":
            self.row.device_peak = torch.cuda.max_memory_allocated(self._model.device)


def _attention_of(module: nn.Module) -> Any:
    return getattr(module, "self_attn", None)
