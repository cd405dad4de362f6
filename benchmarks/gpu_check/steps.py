"""Decode steps at 32K and 128K, one process and one model: keys and values are put in place.

No prompt is computed, and each step asks with a made-up query of the same text: times and work are
those of real steps, the tokens mean nothing.
"""

from __future__ import annotations

import gc
import math
import warnings
from collections import Counter
from collections.abc import Callable
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any

import torch

import hybrid_kv as hkv
from benchmarks.gpu_check.busy import profiled
from benchmarks.gpu_check.record import Recorder
from benchmarks.gpu_check.sizes import Sizes
from hybrid_kv.eval.filling import SyntheticContext, filled_cache
from hybrid_kv.models.cache_state import passing
from hybrid_kv.models.hf_cache import TieredCache
from hybrid_kv.models.load import load_model

CASES: dict[str, dict[str, Any]] = {
    "select on the device": {"select": "device"},
    "select on the host": {"select": "host", "look_ahead": "never"},
    "select on the host, look-ahead": {"select": "host", "look_ahead": "always"},
}
"""What each case sets of `hybrid`, most important first."""

LONG = "a long answer"
"""The first case, with more steps than the host tier has room for at first."""

_PLACES = 16


def measure(record: Recorder, sizes: Sizes, settings: dict[str, Any]) -> None:
    options = {"device": torch.device(settings["device"]), "dtype": sizes.dtype, "seed": 0}
    model: Any = load_model(sizes.model, layers=sizes.layers, **options)
    wanted = settings.get("cases", list(CASES))
    for name in settings.get("contexts", ["128k", "32k"]):
        tokens = sizes.contexts[name]
        made = _Made(model, tokens, sizes.grown_tokens if LONG in wanted else _all_steps(sizes))
        for case in wanted:
            work = partial(stepped, model, made, sizes, case)
            record.measure(case, work, tokens=tokens)


class _Made:
    """A synthetic context, made when the first case asks for it and kept for the others."""

    def __init__(self, model: Any, tokens: int, max_steps: int) -> None:
        self._model, self.tokens, self._max_steps = model, tokens, max_steps
        self._context: SyntheticContext | None = None

    def cache(self, runtime: Any) -> TieredCache:
        if self._context is None:
            steps = self._max_steps
            self._context = SyntheticContext(
                runtime.info, self.tokens, max_steps=steps, seed=0, keep=True
            )
        return filled_cache(runtime, self._context)


def _all_steps(sizes: Sizes) -> int:
    return sizes.warm_steps + sizes.measured_steps + 2 * sizes.watched_steps


def stepped(model: Any, made: _Made, sizes: Sizes, case: str) -> dict[str, Any]:
    """Times of steps, then what some of them tell the device, then where some of them wait."""
    config = hkv.HybridConfig(**CASES.get(case, CASES["select on the device"]))
    count = sizes.measured_steps
    if case == LONG:
        count = sizes.grown_tokens - _all_steps(sizes) + count
    gc.collect()  # caches of earlier cases, which are in cycles
    begin = perf_counter()
    with torch.inference_mode(), hkv.attach(model, config) as runtime:
        cache = made.cache(runtime)
        filled = perf_counter()
        step = _Step(model, cache)
        for _ in range(sizes.warm_steps):
            step()
        times = [step() for _ in range(count)]
        values = {"fill_s": filled - begin, **_summary(times)}
        values |= _served(cache)
        if model.device.type == "cuda":
            layers = model.config.get_text_config().num_hidden_layers
            values |= _told(step, sizes.watched_steps, layers, values["step_ms"])
            values["waits"] = _waits(step, sizes.watched_steps)
        cache.close()
    return values


class _Step:
    """One greedy step after the other."""

    def __init__(self, model: Any, cache: TieredCache) -> None:
        self._model, self._cache = model, cache
        self._token = torch.ones(1, 1, dtype=torch.long, device=model.device)

    def __call__(self) -> tuple[float, float]:
        """Seconds until all is told, and until the token is there."""
        begin = perf_counter()
        out = self._model(self._token, **passing(self._cache), use_cache=True, logits_to_keep=1)
        self._token = out.logits[:, -1:].argmax(-1)
        told = perf_counter()
        int(self._token)
        return told - begin, perf_counter() - begin


def _summary(times: list[tuple[float, float]]) -> dict[str, Any]:
    whole = [1e3 * step for _, step in times]
    ordered = sorted(whole)
    return {
        "steps": len(times),
        "step_ms": median(whole),
        "p90_ms": ordered[math.ceil(0.9 * len(ordered)) - 1],
        "max_ms": ordered[-1],
        "host_ms": 1e3 * median(host for host, _ in times),
        "by_place_ms": {p: median(whole[p::_PLACES]) for p in range(min(_PLACES, len(whole)))},
    }


def _told(step: Callable[[], object], count: int, layers: int, step_ms: float) -> dict[str, Any]:
    """idle_ms: of a step as it was timed, without the profiler."""
    work = profiled(lambda: [step() for _ in range(count)])
    busy = work.busy_us / count / 1e3
    return {
        "busy_ms": busy,
        "idle_ms": step_ms - busy,
        "kernels_per_layer": work.num_kernels / count / layers,
        "launches_per_layer": work.num_launches / count / layers,
        "copies": work.num_copies / count,
        "graphs": work.num_graphs / count,
    }


def _waits(step: Callable[[], object], count: int) -> dict[str, float]:
    """Waits of a step by the line that torch names for them; the token's own is among them."""
    places: Counter[str] = Counter()

    def note(message: Any, category: Any, file: str, line: int, *_: Any) -> None:
        if "synchronizing" in str(message):
            places[f"{file.rpartition('site-packages/')[2]}:{line}"] += 1

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = note
        torch.cuda.set_sync_debug_mode("warn")
        try:
            for _ in range(count):
                step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return {place: n / count for place, n in places.most_common(20)}


def _served(cache: TieredCache) -> dict[str, Any]:
    """Heads by what finds their entries, layers by what came of look-ahead and of their step."""
    kv = cache.kv
    layers = kv.stores.values()
    heads = [head["serves"] for layer in layers for head in layer.cold.describe_indexes()]
    ahead = [str(layer["state"]) for layer in kv.layers.describe_look_ahead()]
    return {"indexes": dict(Counter(heads)), "look_ahead": dict(Counter(ahead))}
