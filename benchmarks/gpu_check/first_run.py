"""What a first run on a GPU must show of the whole: a model, its cache, and what they do by step.

Each look is a job of its own with a model of its own.
"""

from __future__ import annotations

import resource
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

import hybrid_kv as hkv
from benchmarks.gpu_check.end_to_end import indexes, prompt
from benchmarks.gpu_check.record import NotHere, Recorder, need_cuda
from benchmarks.gpu_check.sizes import Sizes
from hybrid_kv.models.cache_argument import passing
from hybrid_kv.models.load import load_model
from hybrid_kv.runtime import KVCache

Look = Callable[[torch.device, Sizes], dict[str, Any]]


def measure(record: Recorder, sizes: Sizes, settings: dict[str, Any]) -> None:
    device, look = torch.device(settings["device"]), settings["look"]
    record.measure(look, partial(LOOKS[look], device, sizes))


# 3, 4: is it right -------------------------------------------------------------------------------


def agreement(device: torch.device, sizes: Sizes) -> dict[str, Any]:
    """A prompt's last logits against SDPA's, and with states on the host; greedy tokens with
    everything opened.
    """
    ids = prompt(sizes, sizes.looked_tokens).to(device)
    model = _model(device, sizes)
    with torch.inference_mode():
        ours, by_host = (
            _last_logits(model, ids, hkv.HybridConfig(prefill_states=place))
            for place in ("device", "host")
        )
        with _attention(model, "sdpa"):
            theirs = model(ids, logits_to_keep=1).logits
    opened = {"cold": {"top_k": "all"}}
    tokens = [
        _greedy(model, ids, hkv.HybridConfig(**settings), sizes.new_tokens)
        for settings in (opened, {"method": "full"})
    ]
    same = sum(a == b for a, b in zip(*tokens, strict=True))
    return {
        "logits_largest_difference": float((ours - theirs).abs().max()),
        "states_on_host_largest_difference": float((ours - by_host).abs().max()),
        "logits_deviation": float(theirs.float().std()),
        "same_first_token": bool(ours.argmax() == theirs.argmax()),
        "same_tokens": same,
        "tokens": len(tokens[0]),
    }


def integrity(device: torch.device, sizes: Sizes) -> dict[str, Any]:
    """One owner for each token, after a prompt, steps, a crop and a fork; cold pages are those of
    a dense run, bit by bit.
    """
    ids, checked = prompt(sizes, sizes.looked_tokens).to(device), list[str]()
    model = _model(device, sizes)
    whole: dict[int, list[Tensor]] = {}
    found = {"compared_rows": 0, "different_values": 0}

    def keep(kv: KVCache) -> None:
        for layer_idx, layer in kv.stores.items():
            view = layer.resident.view()
            whole[layer_idx] = [view.k[0].cpu(), view.v[0].cpu()]

    def compare(kv: KVCache) -> None:
        for layer_idx, layer in kv.stores.items():
            extent = layer.rows[0].chain.spans[0].extent
            rows = torch.randint(extent.length, (64,))
            places = extent.positions[rows].long()
            for cold, dense in zip((extent.k, extent.v), whole[layer_idx], strict=True):
                found["different_values"] += int((cold[:, rows] != dense[:, places]).sum())
                found["compared_rows"] += 64
        for name, change in {
            "prompt and steps": lambda: None,
            "crop": lambda: [kv.layers[idx].crop(2) for idx in kv.layers],
            "fork": lambda: [kv.layers[idx].fork([0, 0]) for idx in kv.layers],
        }.items():
            change()
            kv.check_integrity()
            checked.append(name)

    _greedy(model, ids, hkv.HybridConfig(method="full"), 1, keep)
    _greedy(model, ids, hkv.HybridConfig(), sizes.new_tokens, compare)
    return {"checked": checked, **found}


# 5: where the memory of a prompt goes ------------------------------------------------------------


def prefill(device: torch.device, sizes: Sizes) -> dict[str, Any]:
    """By layer, when it is sealed: device and host memory, and the seconds of its parts."""
    rows: list[dict[str, Any]] = []
    plain = KVCache.seal

    def seal(self: KVCache, layer_idx: int, *arguments: Any, **named: Any) -> None:
        before = dict(self.phases.seconds)
        begin = perf_counter()
        plain(self, layer_idx, *arguments, **named)
        took = {k: v - before[k] for k, v in self.phases.seconds.items() if v > before[k]}
        rows.append({"seal_s": perf_counter() - begin, **took, **_memory(device)})

    with _replaced(KVCache, "seal", seal), _llm(device, sizes) as llm:
        got = llm.generate(prompt(sizes, sizes.contexts["128k"]), max_new_tokens=1, do_sample=False)
    return {"ttft_s": got.ttft_s, "index_build_s": got.index_build_s, "layers": rows}


def _memory(device: torch.device) -> dict[str, Any]:
    found: dict[str, Any] = {"host_rss_bytes": _peak_rss()}
    if device.type == "cuda":
        found["free_bytes"] = torch.cuda.mem_get_info(device)[0]
        found["allocated_peak_bytes"] = torch.cuda.max_memory_allocated(device)
        found["reserved_peak_bytes"] = torch.cuda.max_memory_reserved(device)
    return found


# 6, 7, 8: what a step does -----------------------------------------------------------------------


def waits(device: torch.device, sizes: Sizes) -> dict[str, Any]:
    """Steps in which torch tells of every operation that waits for the device, by place."""
    need_cuda(device)
    ids = prompt(sizes, sizes.contexts["32k"])
    with _llm(device, sizes) as llm:
        llm.generate(ids[:, : sizes.warmup_tokens], max_new_tokens=3, do_sample=False)
        places: Counter[str] = Counter()

        def note(message: Any, category: Any, file: str, line: int, *_: Any) -> None:
            places[f"{file.rpartition('site-packages/')[2]}:{line}"] += 1

        begin = partial(torch.cuda.set_sync_debug_mode, "warn")
        with _on_first_token(llm, begin), warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.showwarning = note
            llm.generate(ids, max_new_tokens=sizes.looked_steps, do_sample=False)
        torch.cuda.set_sync_debug_mode("default")
    return {"steps": sizes.looked_steps, "waits": dict(places.most_common(40))}


def launches(device: torch.device, sizes: Sizes) -> dict[str, Any]:
    """Three steps under torch's profiler: launches, and how long the device works and rests."""
    ids = prompt(sizes, sizes.contexts["32k"])
    kinds = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        kinds.append(torch.profiler.ProfilerActivity.CUDA)
    with _llm(device, sizes) as llm, torch.profiler.profile(activities=kinds) as profiler:
        profiler.stop()
        with _on_first_token(llm, profiler.start):
            got = llm.generate(ids, max_new_tokens=4, do_sample=False)
    steps, layers = 3, llm.model.config.get_text_config().num_hidden_layers
    events = profiler.key_averages()
    launched = sum(e.count for e in events if "LaunchKernel" in e.key)
    busy_us = sum(e.self_device_time_total for e in events)
    wall_us = 1e6 * (got.token_times_s[-1] - got.token_times_s[0])
    return {
        "launches_per_layer": launched / steps / layers,
        "device_busy_ms": busy_us / steps / 1e3,
        "step_ms": wall_us / steps / 1e3,
        "phases_ms": {k: 1e3 * s / steps for k, s in got.phases_s.items()},
    }


def steps(device: torch.device, sizes: Sizes) -> dict[str, Any]:
    """Times between tokens by their place in a page, while graphs are built and afterwards."""
    ids = prompt(sizes, sizes.contexts["128k"])
    found: dict[str, Any] = {}
    for name, settings in {"building": {}, "built": {"index_build": "wait"}}.items():
        with _llm(device, sizes, **settings) as llm:
            got = llm.generate(ids, max_new_tokens=sizes.looked_steps, do_sample=False)
        gaps = [1e3 * (b - a) for a, b in pairwise(got.token_times_s)][1:]
        by_place = {place: gaps[place::16] for place in range(min(16, len(gaps)))}
        ordered = sorted(gaps)
        found[name] = {
            "median_ms": median(gaps),
            "p90_ms": ordered[int(0.9 * len(ordered))],
            "max_ms": ordered[-1],
            "by_place_ms": {place: median(some) for place, some in by_place.items()},
            "phases_ms": {k: 1e3 * s / len(gaps) for k, s in got.phases_s.items()},
        }
    return found


# 9, 10: what builds and growth cost --------------------------------------------------------------


def graphs(device: torch.device, sizes: Sizes) -> dict[str, Any]:
    """Who serves each head, why, and how long until all graphs are there."""
    begin = perf_counter()
    with _llm(device, sizes, index_build="wait") as llm:
        got = llm.generate(prompt(sizes, sizes.contexts["128k"]), max_new_tokens=4, do_sample=False)
    reasons = Counter(str(head.get("reason")) for head in got.index)
    return {
        "seconds_in_all": perf_counter() - begin,
        "index_build_s": got.index_build_s,
        "heads": indexes(got.index),
        "reasons": dict(reasons.most_common(8)),
        "host_peak_bytes": _peak_rss(),
    }


def growth(device: torch.device, sizes: Sizes) -> dict[str, Any]:
    """An answer that outgrows the room of the cold tier: its longest steps, and where they are."""
    with _llm(device, sizes) as llm:
        got = llm.generate(
            prompt(sizes, sizes.contexts["128k"]),
            max_new_tokens=sizes.grown_tokens,
            do_sample=False,
        )
    gaps = [1e3 * (b - a) for a, b in pairwise(got.token_times_s)]
    longest = sorted(range(len(gaps)), key=gaps.__getitem__, reverse=True)[:5]
    return {
        "median_ms": median(gaps),
        "longest_ms": {place: gaps[place] for place in longest},
        "host_peak_bytes": _peak_rss(),
    }


def later_turn(device: torch.device, sizes: Sizes) -> dict[str, Any]:
    """A second turn that attends exactly to everything cold: its first token."""
    ids = prompt(sizes, sizes.contexts["128k"])
    with _llm(device, sizes) as llm:
        context = llm.context(ids)
        short, long = (ids[0, :count] for count in (8, sizes.turn_tokens))
        answers = [context.ask(q, max_new_tokens=2, do_sample=False) for q in (short, long)]
    return {"short_ttft_s": answers[0].ttft_s, "long_ttft_s": answers[1].ttft_s}


def planned(device: torch.device, sizes: Sizes) -> dict[str, Any]:
    """The plan's own hot tokens, run: what it predicted, and what was taken."""
    tokens = sizes.contexts["128k"]
    made = hkv.plan(sizes.model, tokens + sizes.new_tokens, device=device, layers=sizes.layers)
    (option,) = (option for option in made.options if option.mode == "hybrid")
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    with _llm(device, sizes, **option.settings) as llm:
        got = llm.generate(prompt(sizes, tokens), max_new_tokens=sizes.new_tokens, do_sample=False)
    return {
        **{"settings": dict(option.settings), "predicted_tpot_ms": option.tpot_ms},
        "predicted_device_bytes": sum(option.device_bytes.values()),
        "predicted_host_bytes": sum(option.host_bytes.values()),
        **_memory(device),
        "ttft_s": got.ttft_s,
    }


LOOKS: dict[str, Look] = {
    "agreement": agreement,
    "integrity": integrity,
    "prefill by layer": prefill,
    "waits of a step": waits,
    "launches of a step": launches,
    "times of steps": steps,
    "graphs": graphs,
    "a later turn": later_turn,
    "the plan": planned,
    "a long answer": growth,
}


# Means -------------------------------------------------------------------------------------------


def _llm(device: torch.device, sizes: Sizes, **settings: Any) -> Any:
    options = {"device": device, "dtype": sizes.dtype, "layers": sizes.layers, "seed": 0}
    return hkv.load(sizes.model, config=hkv.HybridConfig(**settings), **options)


def _model(device: torch.device, sizes: Sizes) -> Any:
    return load_model(sizes.model, device=device, dtype=sizes.dtype, layers=sizes.layers, seed=0)


@contextmanager
def _attention(model: Any, name: str) -> Iterator[None]:
    before = model.config._attn_implementation
    model.set_attn_implementation(name)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def _last_logits(model: Any, ids: Tensor, config: hkv.HybridConfig) -> Tensor:
    with hkv.attach(model, config) as runtime:
        logits: Tensor = model(ids, **passing(runtime.cache()), logits_to_keep=1).logits
    return logits


def _greedy(
    model: Any,
    ids: Tensor,
    config: hkv.HybridConfig,
    new: int,
    look: Callable[[KVCache], None] | None = None,
) -> list[int]:
    """New tokens; `look` sees the cache behind them."""
    with hkv.attach(model, config) as runtime:
        cache = runtime.cache()
        out = model.generate(
            ids, **passing(cache), max_new_tokens=new, min_new_tokens=new, do_sample=False
        )
        if look is not None:
            look(cache.kv)
    tokens: list[int] = out[0, ids.shape[1] :].tolist()
    return tokens


@contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


@contextmanager
def _on_first_token(llm: Any, begin: Callable[[], Any]) -> Iterator[None]:
    """Calls `begin` once, when the first forward of a single new token comes."""
    called: list[bool] = []

    def before(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        ids = kwargs.get("input_ids", args[0] if args else None)
        if not called and isinstance(ids, Tensor) and ids.shape[1] == 1:
            called.append(True)
            begin()

    hook = llm.model.register_forward_pre_hook(before, with_kwargs=True)
    try:
        yield
    finally:
        hook.remove()
    if not called:
        raise NotHere("no step of a single token came")


def _peak_rss() -> int:
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
