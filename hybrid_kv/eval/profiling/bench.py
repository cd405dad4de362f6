"""All rows of a profile, one after the other; none of them ends the others."""

from __future__ import annotations

import gc
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from transformers import PreTrainedModel

from hybrid_kv.config import HybridConfig
from hybrid_kv.errors import CapacityError, ConfigError, HybridKVError
from hybrid_kv.eval.filling import SyntheticContext, context_bytes
from hybrid_kv.eval.profiling.arguments import ProfileArguments
from hybrid_kv.eval.profiling.row import (
    Overtime,
    Progress,
    RowMeasurement,
    SweepEnvironment,
)
from hybrid_kv.models.load import load_config, load_model, resolve_device
from hybrid_kv.models.support import inspect_model
from hybrid_kv.ops.host_memory import FreeMemory, free_memory
from hybrid_kv.planning.plan import Machine, ModelFacts, model_facts
from hybrid_kv.planning.planner import make_plan
from hybrid_kv.planning.rates import BuildForecast, Rates, measure_rates
from hybrid_kv.planning.traffic import index_of, prefill_peak_bytes
from hybrid_kv.report.profile import ProfileRow
from hybrid_kv.types import ModelInfo
from hybrid_kv.watch.recorder import TraceSpan

RowTold = Callable[[ProfileRow, str, int, int], None]
"""Called with a row, what is being done for it, how much of that is done, and how much there is."""

Kept = Callable[[ProfileRow, Sequence[TraceSpan]], None]
"""Called with a row and the spans of a few steps."""


@dataclass(slots=True)
class Bench:
    """A loaded model on a measured machine, and what is known before anything is filled.

    shape_layers: of the shape that the model was cut from; None where it is whole.
    """

    asked: ProfileArguments
    model: PreTrainedModel
    facts: ModelFacts
    rates: Rates
    shape_layers: int | None
    configs: dict[str, HybridConfig]
    forecast: BuildForecast = field(default_factory=BuildForecast)

    @property
    def num_layers(self) -> int:
        return int(self.model.config.get_text_config(decoder=True).num_hidden_layers)

    @property
    def info(self) -> ModelInfo:
        return inspect_model(self.model)

    def note_build(self, row: ProfileRow) -> None:
        """Learns from a row how long its index takes."""
        # Where none of the heads was long enough for a graph, its time says nothing of graphs.
        serving = {head["serves"] for head in row.index if "serves" in head}
        if row.index_build_s is not None and serving != {"flat"}:
            self.forecast.note(row.method, row.context_tokens, row.index_build_s)


def open_bench(asked: ProfileArguments, rates: Rates | None = None) -> Bench:
    """Checks that the contexts fit, loads the model and measures the machine, in this order.

    Args:
        rates: of this machine, where they were measured before.

    Raises:
        ConfigError: a context is longer than the model was made for.
        CapacityError: a context fits into the host's memory with none of the methods.
        ModelNotFoundError, UnsupportedModelError: as `load_model`.
    """
    device = resolve_device(asked.device)
    facts = model_facts(
        asked.model,
        dtype=asked.dtype,
        layers=asked.layers,
        weights=asked.weights,
        dequantize=asked.dequantize,
        device=str(device),
    )
    configs = asked.configs()
    longest, limit = asked.contexts[-1] + asked.steps, facts.max_context_tokens
    if limit is not None and longest > limit:
        raise ConfigError(
            f"contexts must be at most {limit - asked.steps} tokens for this model, which takes "
            f"{limit} with the {asked.steps} decode steps, got {asked.contexts[-1]}"
        )
    free = free_memory()
    for num_tokens in asked.contexts:
        lacks = [
            _lack(asked, facts, config, num_tokens, free, device) for config in configs.values()
        ]
        if all(lacks):
            raise CapacityError(str(lacks[0]))
    whole = None
    if asked.layers is not None:
        config = load_config(asked.model).get_text_config(decoder=True)
        whole = None if config.num_hidden_layers == asked.layers else config.num_hidden_layers
    model = load_model(
        asked.model,
        device=device,
        dtype=asked.dtype,
        layers=asked.layers,
        weights=asked.weights,
        dequantize=asked.dequantize,
        exact_products=asked.exact_products,
        seed=asked.seed,
    )
    return Bench(asked, model, facts, rates or measure_rates(device), whole, configs)


def _lack(
    asked: ProfileArguments,
    facts: ModelFacts,
    config: HybridConfig,
    num_tokens: int,
    free: FreeMemory,
    device: torch.device,
) -> str | None:
    needed = host_bytes(asked, facts, config, num_tokens, on_device=device.type != "cpu")
    return lack_of_room(num_tokens, config.method, needed, free)


def sweep(
    bench: Bench,
    report: RowTold | None = None,
    *,
    keep: Kept | None = None,
    known: Collection[tuple[str, int]] = (),
) -> Iterator[ProfileRow]:
    """The rows, context by context, each as soon as it is measured.

    A row that fails says why, and the next one follows. After Ctrl-C the row that it has met is the
    last one, with what it had measured.

    Args:
        report: called with the row under way, what is done, how much of it, and how much there is;
            not while steps are measured.
        keep: gets the spans of a few steps more of each row.
        known: methods and contexts that need not be measured.
    """
    contexts = _Contexts(bench)
    for num_tokens in bench.asked.contexts:
        for method, config in bench.configs.items():
            if (method, num_tokens) in known:
                continue
            row = ProfileRow(
                method=method,
                context_tokens=num_tokens,
                status="ok",
                reason=bench.asked.changed(config),
                config=config.flat(),
                predicted_ms=_predicted(bench, config, num_tokens),
            )
            tell = _teller(row, report)
            try:
                _measure(bench, row, contexts, tell, keep)
            except KeyboardInterrupt:
                row.status, row.reason = "interrupted", "ended by the user"
            yield row
            if row.status == "interrupted":
                return
            gc.collect()  # caches hold each other and gigabytes


def _teller(row: ProfileRow, report: RowTold | None) -> Progress:
    def tell(what: str, done: int, total: int) -> None:
        if report is not None:
            report(row, what, done, total)

    return tell


class _Contexts:
    """The made-up KV that all rows of a context share, one context at a time."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self._made: SyntheticContext | None = None

    def of(self, num_tokens: int, report: Progress) -> SyntheticContext | None:
        """The context of that length; None where prompts are computed."""
        if self._bench.asked.fill != "synthetic":
            return None
        if self._made is None or self._made.num_tokens != num_tokens:
            self._made = None  # whose memory the next one may need
            report("making up the context", 0, 1)
            self._made = self._make(num_tokens)
        return self._made

    def _make(self, num_tokens: int) -> SyntheticContext:
        facts, info = self._bench.facts, self._bench.info
        making = context_bytes(info.layers, num_tokens, facts.dtype_bytes)
        # K and V are kept ready where there is room for them here and in a cache, with a layer that
        # is on its way, and an index.
        kept = num_tokens * (9 * facts.kv_bytes_per_token // 4 + facts.largest_layer_bytes)
        return SyntheticContext(
            info,
            num_tokens,
            max_steps=self._bench.asked.steps,
            seed=self._bench.asked.seed,
            keep=making + kept < USABLE * free_memory().num_bytes,
        )


def _measure(
    bench: Bench, row: ProfileRow, contexts: _Contexts, report: Progress, keep: Kept | None
) -> None:
    traces, config = keep is not None, bench.configs[row.method]
    around = SweepEnvironment(bench.asked, bench.model, bench.facts, bench.rates, report, traces)
    try:
        context = contexts.of(row.context_tokens, report)
        _keep_to_limits(bench, row, context)
        measurement = RowMeasurement(around, row, config, context)
        try:
            measurement.run()
        finally:
            if keep is not None:
                keep(row, measurement.spans)
    except Overtime as reason:
        row.status, row.reason = "skipped", str(reason)
        if reason.expected_s is not None:
            bench.forecast.note(row.method, row.context_tokens, reason.expected_s)
    except Exception as error:
        row.status, row.reason = "failed", _sentence(error)
    bench.note_build(row)


def _sentence(error: Exception) -> str:
    text = " ".join(str(error).split()) or "no message"
    return text if isinstance(error, HybridKVError) else f"{type(error).__name__}: {text}"


def _keep_to_limits(bench: Bench, row: ProfileRow, context: SyntheticContext | None) -> None:
    """Raises Overtime where the memory that is free now, or the time of a row, is too short."""
    asked, config = bench.asked, bench.configs[row.method]
    index = index_of(config)
    if (lack := _lack_now(bench, row, context)) is not None:
        if context is None or not context.forget_kv():
            raise Overtime(lack)
        if (lack := _lack_now(bench, row, context)) is not None:
            raise Overtime(lack)
    if asked.row_limit_s is None or index is None:
        return
    if context is not None and not bench.forecast.knows(row.method) and _is_stubborn(config):
        keys, _ = context.kv(bench.info.layers[0].layer_idx, bench.model.dtype)
        heads = sum(shape.num_kv_heads for shape in bench.info.layers)
        bench.forecast.probe(row.method, index, keys[0, :1], heads)
    expected = bench.forecast.seconds(row.method, row.context_tokens)
    if expected is not None and expected > asked.row_limit_s:
        raise Overtime(
            f"building its {index.kind} index over {row.context_tokens:,} tokens would take about "
            f"{expected:,.0f} s, judged by shorter ones; the row limit is {asked.row_limit_s:g} s; "
            "raise --row-limit"
        )


def _lack_now(bench: Bench, row: ProfileRow, context: SyntheticContext | None) -> str | None:
    """As `_lack`, with the model loaded, and the context made where it is made up."""
    config = bench.configs[row.method]
    needed = host_bytes(bench.asked, bench.facts, config, row.context_tokens, on_device=True)
    if context is not None:
        needed.pop("the made-up context", None)
    free = free_memory()
    return lack_of_room(row.context_tokens, row.method, needed, free)


def _is_stubborn(config: HybridConfig) -> bool:
    """Whether a build of the method's index cannot be ended once it has begun (Faiss)."""
    index = index_of(config)
    return index is not None and index.kind in ("ivf", "hnsw")


def _predicted(bench: Bench, config: HybridConfig, num_tokens: int) -> dict[str, float]:
    """Milliseconds by tier as `plan` says; {} for methods that it does not model."""
    device = bench.model.device
    size = None
    if device.type == "cuda":
        size = torch.cuda.get_device_properties(device).total_memory
    machine = Machine(str(device), size, free_memory().num_bytes, bench.rates)
    if config.method != "full" and index_of(config) is None:
        return {}
    plan = make_plan(bench.facts, machine, num_tokens, config)
    mode = "dense" if config.method == "full" else "hybrid"
    return dict(next(option.ms for option in plan.options if option.mode == mode))


USABLE = 0.95
"""Share of the free memory that may be filled; the rest is for activations and the system."""


def host_bytes(
    asked: ProfileArguments,
    facts: ModelFacts,
    config: HybridConfig,
    num_tokens: int,
    *,
    on_device: bool,
) -> dict[str, int]:
    """Bytes of host memory by purpose at the moment when most is needed.

    Args:
        on_device: whether weights and prefill lie in another memory.
    """
    total, method = num_tokens + asked.steps, config.build()
    index = sum(total * method.index_bytes_per_token(layer, total) for layer in facts.layers)
    # One layer is both where it was filled and where it goes to.
    kv = total * (facts.kv_bytes_per_token + facts.largest_layer_bytes)
    needed = {"weights": 0 if on_device else facts.weight_bytes, "KV": kv, "index": index}
    if asked.fill == "synthetic":
        needed["the made-up context"] = context_bytes(facts.layers, num_tokens, facts.dtype_bytes)
    elif not on_device:
        needed["prefill"] = prefill_peak_bytes(facts, num_tokens, min(4096, num_tokens))
    return {purpose: count for purpose, count in needed.items() if count}


def lack_of_room(
    num_tokens: int, method: str, needed: dict[str, int], free: FreeMemory
) -> str | None:
    """The arithmetic in a sentence where it does not fit; None where it does."""
    if sum(needed.values()) <= USABLE * free.num_bytes:
        return None
    parts = " + ".join(f"{count / 2**30:.1f} {name}" for name, count in needed.items())
    return (
        f"context of {num_tokens:,} tokens with method {method} needs "
        f"{sum(needed.values()) / 2**30:.1f} GiB of host memory ({parts}), "
        f"{free.num_bytes / 2**30:.1f} GiB are free{free.limit}; "
        "profile a shorter context or fewer layers"
    )
