"""One method at one context length: filled, warmed up, timed, traced, audited."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hybrid_kv.config import AuditParams, HybridConfig
from hybrid_kv.eval.filling import SyntheticContext, filled_cache
from hybrid_kv.eval.profiling.arguments import TRACED_STEPS, ProfileArguments
from hybrid_kv.eval.profiling.steps import Steps, StepWatch, decoder_layers, generate_watched
from hybrid_kv.models.attach import Attachment, attach
from hybrid_kv.models.hf_cache import TieredCache
from hybrid_kv.planning.plan import ModelFacts
from hybrid_kv.planning.rates import Rates
from hybrid_kv.planning.traffic import bytes_per_step, limit_ms
from hybrid_kv.report.profile import BytesPerToken, ProfileRow
from hybrid_kv.report.run import AuditReport, MemoryBytes, Percentiles, PhasesMs, WorkReport
from hybrid_kv.transfer import SyncExecutor
from hybrid_kv.types import Work, bytes_per_token
from hybrid_kv.watch.audit import Audit
from hybrid_kv.watch.auditor import Auditor
from hybrid_kv.watch.phases import INDEX_BUILD, Phases, cost_of_measuring
from hybrid_kv.watch.recorder import PeakMemory, Recorder, TraceSpan, device_clock

Progress = Callable[[str, int, int], None]
"""Called with what is being done, how much of it is done, and how much there is."""


class Overtime(Exception):  # noqa: N818 (an event, not a failure)
    """A row takes longer than it may; the message says what would have taken so long.

    expected_s: how long filling would have taken, None where it has not begun.
    """

    def __init__(self, message: str, expected_s: float | None = None) -> None:
        super().__init__(message)
        self.expected_s = expected_s


@dataclass(frozen=True, slots=True)
class SweepEnvironment:
    """Objects shared by the rows of a profile."""

    asked: ProfileArguments
    model: PreTrainedModel
    facts: ModelFacts
    rates: Rates
    report: Progress
    traces: bool = False


class RowMeasurement:
    """Measures one row into `row`; what there is so far is in it however `run` ends.

    Args:
        config: of the row's method.
        context: the made-up KV; None where a prompt is computed.

    spans: of a pass of its own, where they are wanted. steps, work: times of its steps and what
    they have touched; None before they were measured.
    """

    def __init__(
        self,
        around: SweepEnvironment,
        row: ProfileRow,
        config: HybridConfig,
        context: SyntheticContext | None,
    ) -> None:
        self._around, self.row, self._config, self._context = around, row, config, context
        self._asked, self._model = around.asked, around.model
        self.spans: list[TraceSpan] = []
        self.steps: Steps | None = None
        self.work: Work | None = None
        self._audit: Audit | None = None
        self._measuring_s = 0.0
        self._begin = perf_counter()

    def run(self) -> None:
        """Fills a cache and measures it.

        Raises:
            Overtime: filling would take longer than the row may.
            Exception: whatever fails.
        """
        device, peak = self._model.device, PeakMemory()
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        with ExitStack() as stack, torch.inference_mode():
            stack.callback(self._conclude, peak)
            runtime = stack.enter_context(attach(self._model, self._config))
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
        self.row.index_build_s = cache.kv.means.builds.clock.seconds
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
        layers = decoder_layers(self._model)
        total, done = num_tokens * len(layers), 0

        def seen(module: nn.Module, args: Any, output: Any) -> None:
            nonlocal done
            done = min(total, done + output[0].shape[1])
            self._report("prefill", done, total)
            self._keep_to_limit("prefill", done, total)
            if done == total:
                remove()

        hooks = [layer.self_attn.register_forward_hook(seen) for layer in layers]

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
        self._measuring_s = self._cost_of_measuring()
        watch = StepWatch(self._model, cache, asked.warmup_tokens, self._recorder())
        cache.kv.means.reserve(row.context_tokens + asked.steps)
        self.steps, self.work = watch.steps, watch.work
        count, begin = 1 + asked.warmup_tokens + asked.new_tokens, perf_counter()
        waited = cache.kv.phases.seconds[INDEX_BUILD]
        ids = self._prompt()
        self._report("warm-up and measuring", 0, asked.new_tokens)
        with ExitStack() as stack:
            if self._context is None:
                stack.enter_context(self._prefill_watched(row.context_tokens))
            ids = generate_watched(watch, ids, count, self._is_over)
        if self._context is None:
            row.ttft_s = watch.steps.times_s[0] - begin
            row.index_build_s = cache.kv.means.builds.clock.seconds
            row.prefill_s = row.ttft_s - (watch.steps.first[INDEX_BUILD] - waited)
        if (measured := len(watch.steps.step_s)) < asked.new_tokens:
            row.reason = (
                f"{measured} of {asked.new_tokens} steps were measured, the row limit is "
                f"{asked.row_limit_s:g} s"
            )
        return ids

    def _recorder(self) -> Recorder | None:
        """Observer of the timed pass: a device's clock, or nobody where there is none."""
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
        ids = generate_watched(watch, ids, 1 + TRACED_STEPS, lambda: False)
        begin = watch.steps.times_s[0]  # what comes before the first token is no whole step
        self.spans = [span for span in recorder.spans if span.begin_s >= begin]
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
        self._audit = auditor.audit
        watch = StepWatch(self._model, cache, 0)
        generate_watched(watch, ids, asked.new_tokens, self._is_over, fewest=asked.audit_every)
        auditor.settle()

    # What there is to tell.

    def _report(self, what: str, done: int, total: int) -> None:
        self._around.report(what, done, total)

    def _describe(self, cache: TieredCache) -> None:
        """Tiers and traffic as the timed pass has left them."""
        row, kv = self.row, cache.kv
        stores = kv.stores.values()
        row.resident_kv_bytes = sum(
            bytes_per_token(store.shape, store.cold.dtype) * store.rows[0].table.num_tokens
            for store in stores
        )
        row.memory_bytes = MemoryBytes(
            host_kv=sum(store.cold.kv_bytes + store.cold.overhead_bytes for store in stores),
            host_index=sum(store.cold.index_bytes for store in stores),
        )
        row.backends = dict(kv.ops.served)
        row.steps = tuple(kv.describe_steps())
        row.index = tuple(kv.layers.describe_indexes())
        if self.steps is not None and self.work is not None:
            read = bytes_per_step(
                self._around.facts,
                kv,
                self.work,
                on_device=self._model.device.type != "cpu",
            )
            row.bytes_per_token = BytesPerToken(**read)
            row.limit_ms = limit_ms(read, kv, self._around.rates)
            of_cache = {what: count for what, count in read.items() if what != "weights"}
            row.cache_limit_ms = limit_ms(of_cache, kv, self._around.rates)

    def _conclude(self, peak: PeakMemory) -> None:
        """Tells the row what is known at the end, which an error or the user may have caused."""
        row, device = self.row, self._model.device
        peaks = {"host_peak": peak.bytes()}
        if device.type == "cuda":
            peaks["device_peak"] = torch.cuda.max_memory_allocated(device)
        row.memory_bytes = row.memory_bytes.model_copy(update=peaks)
        if self.steps is not None:
            self._tell_times(self.steps)
        if self.work is not None:
            row.work = WorkReport.of(self.work, self._audit)
        if self._audit is not None:
            row.audit = AuditReport.of(self._audit)

    def _tell_times(self, steps: Steps) -> None:
        row, taken = self.row, steps.step_s
        if not taken:
            return
        row.step_ms = tuple(1e3 * seconds for seconds in taken)
        row.tpot_ms = sum(row.step_ms) / len(taken)
        row.itl_ms = Percentiles.of(row.step_ms)
        row.phases_ms = PhasesMs.of(steps.phases_s())
        row.device_phases_ms = PhasesMs.of(steps.device_phases_s())
        row.recorder_ratio = self._measuring_s * steps.entered / sum(taken)
