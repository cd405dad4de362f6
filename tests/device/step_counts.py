"""What decode steps tell an emulated device, by method: launches, waits, bytes over the bus.

    python -m tests.device.step_counts [METHOD ...]

Counts hang on no machine. Where Triton is installed (with TRITON_INTERPRET=1) they are those of the
kernels, else those of their torch twins, which launch more.
"""

from __future__ import annotations

import sys
import warnings
from collections import Counter
from dataclasses import dataclass

import torch

import hybrid_kv as hkv
from hybrid_kv.models.cache_argument import passing
from hybrid_kv.plugins import METHODS
from tests.device.emulate import emulated
from tests.device.machine import Counts
from tests.device.models import llama, small, tokens

PAGE = 16
LAYERS = 2


@dataclass(frozen=True)
class StepCounts:
    """Of a model of two layers: what a step tells the device, and one in which pages leave."""

    quiet: Counts
    leaving: Counts


def counted(config: hkv.HybridConfig, context: int = 300) -> StepCounts:
    """Counts of a step in the middle of a page, and of one in which a page leaves."""
    with emulated() as machine:
        model = llama().to("cuda")  # type: ignore[arg-type]
        with torch.inference_mode(), hkv.attach(model, config) as runtime:
            cache, steps = runtime.cache(), list[Counts]()
            model(tokens(context).cuda(), **passing(cache), use_cache=True, logits_to_keep=1)
            for number in range(2 * PAGE + 4):
                ids = tokens(1, 2 + number).cuda()
                before = machine.counts.copy()
                model(ids, **passing(cache), use_cache=True, logits_to_keep=1)
                steps.append(machine.counts.since(before))
    late = steps[PAGE:]  # recordings are made, and caches warm
    quiet = min(late, key=lambda one: (one.launches + one.copies, one.num_waits))
    leaving = max(late, key=lambda one: (one.launches + one.copies, one.num_waits))
    return StepCounts(quiet, leaving)


def _row(name: str, found: StepCounts) -> str:
    cells = [name]
    for one in (found.quiet, found.leaving):
        cells += [str(one.launches), str(one.copies), str(one.num_waits), str(one.replays)]
        cells += [f"{one.to_device:,}", f"{one.to_host:,}"]
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    warnings.simplefilter("ignore")
    names = ("launches", "copies", "waits", "replays", "to device", "to host")
    print(f"| {LAYERS} layers | " + " | ".join([*names, *(f"leaving: {n}" for n in names)]) + " |")
    print("|---" * (2 * len(names) + 1) + "|")
    trained = {"locret"}  # takes a file of heads
    asked = sys.argv[1:] or ["hybrid:select=host", *sorted({*METHODS} - trained)]
    waits: Counter[str] = Counter()
    for name in asked:
        method, _, select = name.partition(":select=")
        config = small(method)
        if method == "hybrid":
            config = config.replace(select=select or "device")
        found = counted(config)
        waits += found.quiet.waits
        print(_row(name, found), flush=True)
    for line, count in waits.most_common(20):
        print(f"{count} waits: {line}")


if __name__ == "__main__":
    main()
