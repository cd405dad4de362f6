"""One real prompt: seconds and memory by layer, what a plan said of it, and later turns.

Each layer has a row when it is done, so that a prompt that is cut off leaves what it had.
"""

from __future__ import annotations

import resource
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

import hybrid_kv as hkv
from benchmarks.gpu_check.end_to_end import indexes, prompt
from benchmarks.gpu_check.record import Recorder
from benchmarks.gpu_check.sizes import Sizes
from hybrid_kv.runtime.layer import Layers

_SHORT = 8


def measure(record: Recorder, sizes: Sizes, settings: dict[str, Any]) -> None:
    device, tokens = torch.device(settings["device"]), sizes.contexts["128k"]
    options = {"device": device, "dtype": sizes.dtype, "layers": sizes.layers, "seed": 0}
    planned: dict[str, Any] = {}
    record.measure("the plan", partial(plan_of, sizes, tokens, device, planned), tokens=tokens)
    config = hkv.HybridConfig(**planned.get("settings", {}))
    with hkv.load(sizes.model, config=config, **options) as llm:
        contexts: list[hkv.Context] = []
        record.measure(
            "prompt", partial(computed, llm, record, sizes, tokens, contexts), tokens=tokens
        )
        if contexts:
            record.measure("against the plan", partial(against, planned, device))
            for name, count in (("short", _SHORT), ("long", sizes.turn_tokens)):
                about = {"tokens": count}
                record.measure(f"a {name} turn", partial(turn, contexts[0], sizes, count), **about)
            record.measure("fork", partial(forked, contexts[0], sizes))
            record.measure("save and open", partial(saved, llm, contexts[0], sizes))


def plan_of(
    sizes: Sizes, tokens: int, device: torch.device, planned: dict[str, Any]
) -> dict[str, Any]:
    """The plan of `hybrid` for this machine; what it says goes into `planned`, too."""
    made = hkv.plan(sizes.model, tokens + sizes.new_tokens, device=device, layers=sizes.layers)
    (option,) = (option for option in made.options if option.mode == "hybrid")
    planned |= {
        "settings": dict(option.settings),
        "tpot_ms": option.tpot_ms,
        "device_bytes": sum(option.device_bytes.values()),
        "host_bytes": sum(option.host_bytes.values()),
    }
    return planned


def computed(
    llm: Any, record: Recorder, sizes: Sizes, tokens: int, contexts: list[Any]
) -> dict[str, Any]:
    """The context goes into `contexts`; a row for each layer when it is sealed."""
    device = llm.model.device
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    begin = perf_counter()
    with _watched(record, device, begin):
        contexts.append(llm.context(prompt(sizes, tokens)))
    return {"prefill_s": perf_counter() - begin, **memory(device)}


@contextmanager
def _watched(record: Recorder, device: torch.device, begin: float) -> Iterator[None]:
    plain = Layers.seal

    def seal(self: Layers, layer_idx: int, *arguments: Any, **named: Any) -> None:
        phases = self[layer_idx].means.phases
        before, at = dict(phases.seconds), perf_counter()
        plain(self, layer_idx, *arguments, **named)
        took = {k: v - before[k] for k, v in phases.seconds.items() if v > before[k]}
        sealed = {"at_s": perf_counter() - begin, "seal_s": perf_counter() - at}
        values = {**sealed, **took, **memory(device)}
        record.write("a layer of the prompt", "ok", None, {"layer": layer_idx}, values)

    Layers.seal = seal  # type: ignore[method-assign]
    try:
        yield
    finally:
        Layers.seal = plain  # type: ignore[method-assign]


def memory(device: torch.device) -> dict[str, Any]:
    """Of the host at most so far, and of a GPU."""
    found: dict[str, Any] = {
        "host_peak_bytes": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    }
    if device.type == "cuda":
        found["free_bytes"] = torch.cuda.mem_get_info(device)[0]
        found["allocated_peak_bytes"] = torch.cuda.max_memory_allocated(device)
        found["reserved_peak_bytes"] = torch.cuda.max_memory_reserved(device)
    return found


def against(planned: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """What the plan said, and what was taken."""
    return {f"planned_{name}": value for name, value in planned.items()} | memory(device)


def turn(context: hkv.Context, sizes: Sizes, count: int) -> dict[str, Any]:
    """A later turn of so many tokens, which attends exactly to everything before it."""
    question = prompt(sizes, count)[0]
    got = context.ask(question, max_new_tokens=sizes.new_tokens, do_sample=False)
    return {
        "ttft_s": got.ttft_s,
        "new_tokens": len(got.token_ids),
        "index_build_s": got.index_build_s,
        "indexes": indexes(got.index),
    }


def forked(context: hkv.Context, sizes: Sizes) -> dict[str, Any]:
    begin = perf_counter()
    with context.fork() as fork:
        seconds = perf_counter() - begin
        return {"fork_s": seconds, **turn(fork, sizes, _SHORT)}


def saved(llm: Any, context: hkv.Context, sizes: Sizes) -> dict[str, Any]:
    """Written to a temporary folder, opened, and asked; the answers must be the same."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "prompt.hkv")
        begin = perf_counter()
        context.save(path)
        written = perf_counter()
        with llm.open(path) as opened:
            read = perf_counter()
            question = prompt(sizes, _SHORT)[0]
            both = [
                one.ask(question, max_new_tokens=sizes.new_tokens, do_sample=False).token_ids
                for one in (context, opened)
            ]
        size = sum(file.stat().st_size for file in _files(path))
    if both[0] != both[1]:
        raise RuntimeError(f"the opened context answers {both[1]}, the saved one {both[0]}")
    return {"save_s": written - begin, "open_s": read - written, "bytes": size}


def _files(path: Path) -> list[Path]:
    return [one for one in path.rglob("*") if one.is_file()] if path.is_dir() else [path]
