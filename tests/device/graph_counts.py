"""What a replayed decode step is made of: kernels, waits, and the host's Python.

    python -m tests.device.graph_counts [LAYERS ...]

Counts hang on no machine. Kernels of ours are one launch each, by their definitions; Triton's
reduction over splits is one more for `attend_pages`. Views cost a device nothing and are left out.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch

import hybrid_kv as hkv
from hybrid_kv.models.cache_state import passing
from hybrid_kv.runtime import KVCache
from tests.device.emulate import emulated
from tests.device.models import llama, small, tokens

METHODS = ("full", "quest", "streaming_llm", "hybrid")
MODEL = ("mul", "add", "pow", "mean", "rsqrt", "linear", "neg", "cat", "silu", "embedding")
"""Operators of a Llama's layers; what is none of these, nor of the whole step, is ours."""
WHOLE = ("cos", "sin", "_to_copy")
READY = 3


def calls_of(work: Callable[[], Any]) -> tuple[int, int]:
    """Python calls into the package while something runs, and files that they lie in."""
    found: list[str] = []

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and "/hybrid_kv/" in frame.f_code.co_filename:
            found.append(frame.f_code.co_filename)

    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
    return len(found), len(set(found))


def row_of(method: str, layers: int) -> list[object]:
    with emulated(schedule="late", kernels="defined") as machine:
        model = llama(layers=layers).to("cuda")  # type: ignore[arg-type]
        made: list[Any] = []
        graph = torch.cuda.CUDAGraph
        torch.cuda.CUDAGraph = lambda: made.append(graph()) or made[-1]  # type: ignore
        select = {"select": "device"} if method == "hybrid" else {}
        config = small(method).replace(capture_decode=True, **select)
        with torch.inference_mode(), hkv.attach(model, config) as runtime:
            cache = runtime.cache()
            model(tokens(131).cuda(), **passing(cache))
            for number in range(READY):
                model(tokens(1, number).cuda(), **passing(cache))
            ids, before = tokens(1, 9).cuda(), machine.counts.copy()
            model(ids, **passing(cache))
            told = machine.counts.since(before)
            advance = advanced(cache.kv)
            whole = calls_of(lambda: model(ids, **passing(cache)))
            names = [one.name for one in made[-1].launches]
    theirs = {f"aten.{name}" for name in (*MODEL, *WHOLE)}
    ours = sum(not any(one.startswith(f"{name}.") for name in theirs) for one in names)
    outside = told.launches - told.replays
    return [
        *(method, layers, len(names), f"{ours / layers:g}"),
        *(outside, told.copies, told.num_waits, told.replays),
        *(f"{advance[0]} / {advance[1]}", f"{whole[0]} / {whole[1]}"),
    ]


def advanced(kv: KVCache) -> tuple[int, int]:
    """Calls of the host's half of a step, which is taken back."""
    kv.layers.begin_forward()
    found = calls_of(lambda: kv.layers.advance(0))
    kv.layers.go_back()
    return found


def main() -> None:
    warnings.simplefilter("ignore")
    print(
        "| method | layers | kernels in the graph | ours a layer | launches outside "
        "| copies | waits | replays | calls / files of the host's half | of the whole forward |"
    )
    print("|---" * 10 + "|")
    for layers in map(int, sys.argv[1:] or ["2", "32"]):
        for method in METHODS:
            print("| " + " | ".join(map(str, row_of(method, layers))) + " |", flush=True)


if __name__ == "__main__":
    main()
