"""Launches, extents and memory of a decode step on an emulated device after many later turns.

    python -m tests.device.turn_counts [TURNS ...]

A Llama of one layer, `hybrid` at a small budget, a prompt of 400 tokens and turns of 300. Launches
include those of the graph that is replayed. Counts hang on no machine; a kernel of selection is one
launch, by its definition (definitions.py).
"""

from __future__ import annotations

import sys
import warnings
from typing import Any, NamedTuple

import torch
from torch import Tensor

import hybrid_kv as hkv
from hybrid_kv.models.cache_state import passing
from tests.device.emulate import emulated
from tests.device.machine import Counts
from tests.device.models import llama, small, tokens
from tests.kit import every

PROMPT, TURN, TURNS = 400, 300, (0, 8, 30)
SETTLED = 3
"""Steps behind a turn until one tells nothing but itself: what the turn left has arrived."""


class TurnCounts(NamedTuple):
    """A quiet step behind some later turns.

    launches: with those of its graph. extents: of the row. device_bytes: that are allocated.
    """

    step: Counts
    launches: int
    extents: int
    device_bytes: int


def turns_of(select: str, turns: int) -> TurnCounts:
    config = small("hybrid").replace(select=select)
    if select == "host":
        config = config.replace(look_ahead="never")
    with emulated(schedule="late", kernels="defined") as machine:
        made: list[Any] = []
        graph = torch.cuda.CUDAGraph
        torch.cuda.CUDAGraph = lambda: made.append(graph()) or made[-1]  # type: ignore
        model = llama(layers=1).to("cuda")  # type: ignore[arg-type]
        model.config.max_position_embeddings = 2**15
        with torch.inference_mode(), hkv.attach(model, config) as runtime:
            cache = runtime.cache()

            def forward(ids: Tensor) -> Counts:
                before = machine.counts.copy()
                logits = model(ids, **passing(cache), use_cache=True, logits_to_keep=1).logits
                told = machine.counts.since(before)
                logits.tolist()
                return told

            forward(tokens(PROMPT).cuda())
            for number in range(turns):
                forward(tokens(TURN, 2 + number).cuda())
            for number in range(SETTLED):
                step = forward(tokens(1, 100 + number).cuda())
            (row,) = every(cache)
            cache.check_integrity()
            launches = step.launches
            if step.replays:
                launches += len(made[-1].launches) - step.replays
            return TurnCounts(step, launches, len(row.extents), machine.allocated[0])


def main() -> None:
    warnings.simplefilter("ignore")
    print("| select | later turns | extents | launches | copies | waits | MB of the device |")
    print("|---" * 7 + "|")
    for select in ("device", "host"):
        for turns in map(int, sys.argv[1:] or TURNS):
            found = turns_of(select, turns)
            told = found.launches, found.step.copies, found.step.num_waits
            cells = select, turns, found.extents, *told, f"{found.device_bytes / 2**20:.1f}"
            print("| " + " | ".join(map(str, cells)) + " |", flush=True)


if __name__ == "__main__":
    main()
