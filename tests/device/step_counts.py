"""What decode steps tell an emulated device, by method: launches, waits, bytes over the bus.

    python -m tests.device.step_counts [METHOD ...]

The device is late: it has done nothing that nobody waited for, so that every wait is one. Counts
hang on no machine. A kernel of selection is one launch, by its definition (definitions.py); with
TRITON_INTERPRET=1 they are Triton's, and the search by codes is eight.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections import Counter
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

import hybrid_kv as hkv
from hybrid_kv.models.cache_state import passing
from hybrid_kv.plugins import METHODS
from tests.device.emulate import emulated
from tests.device.machine import Counts, Machine
from tests.device.models import llama, small, tokens

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
LAYERS = 2
PROMPT, STEPS, FEW_STEPS = 300, 18, 6
"""In so many steps a page leaves; in the few where whole pages have left the prompt."""
QUIET = 2
"""The step by which captures are made."""


@dataclass(frozen=True)
class StepCounts:
    """Of a model of two layers: a quiet step, and the two in which pages leave and have arrived."""

    quiet: Counts
    leaving: Counts


def decoded(
    config: hkv.HybridConfig,
    machine: Machine,
    *,
    num_steps: int = STEPS,
    first_strict: int | None = None,
) -> list[Counts]:
    """What each of some steps behind a prompt told the device.

    The host reads the logits after each of them, which is not counted.

    Args:
        first_strict: from this step on a wait inside the forward is an error with its line.
    """
    model = llama().to("cuda")  # type: ignore[arg-type]
    found = []
    with torch.inference_mode(), hkv.attach(model, config) as runtime:
        cache = runtime.cache()

        def forward(ids: Tensor) -> Tensor:
            return model(ids, **passing(cache), use_cache=True, logits_to_keep=1).logits

        forward(tokens(PROMPT).cuda()).tolist()
        for number in range(num_steps):
            ids, before = tokens(1, 2 + number).cuda(), machine.counts.copy()
            strict = first_strict is not None and number >= first_strict
            with machine.no_waits() if strict else nullcontext():
                logits = forward(ids)
            found.append(machine.counts.since(before))
            logits.tolist()
    return found


def leaving(steps: list[Counts]) -> int:
    """The number of the step at whose end pages leave; they have arrived in the next one."""
    told = [(one.to_host, one.launches + one.copies) for one in steps]
    return max(range(QUIET, len(steps) - 1), key=lambda number: told[number])


def counted(config: hkv.HybridConfig, num_steps: int = STEPS) -> StepCounts:
    kernels: Literal["auto", "defined"] = "auto" if INTERPRETED else "defined"
    with emulated(schedule="late", kernels=kernels) as machine:
        steps = decoded(config, machine, num_steps=num_steps)
    number = leaving(steps)
    return StepCounts(steps[QUIET], steps[number].plus(steps[number + 1]))


def _row(name: str, found: StepCounts) -> str:
    cells = [name]
    for one in (found.quiet, found.leaving):
        cells += [str(one.launches), str(one.copies), str(one.num_waits), str(one.replays)]
        cells += [f"{one.to_device:,}", f"{one.to_host:,}"]
    return "| " + " | ".join(cells) + " |"


def config_of(name: str) -> hkv.HybridConfig:
    """A method at small sizes; "hybrid" selects on the device, "hybrid:select=host" does not."""
    method, _, select = name.partition(":select=")
    config = small(method)
    return config.replace(select=select or "device") if method == "hybrid" else config


def main() -> None:
    warnings.simplefilter("ignore")
    names = ("launches", "copies", "waits", "replays", "to device", "to host")
    print(f"| {LAYERS} layers | " + " | ".join([*names, *(f"leaving: {n}" for n in names)]) + " |")
    print("|---" * (2 * len(names) + 1) + "|")
    trained = {"locret"}  # takes a file of heads
    waits: Counter[str] = Counter()
    for name in sys.argv[1:] or ["hybrid:select=host", *sorted({*METHODS} - trained)]:
        found = counted(config_of(name))
        waits += found.quiet.waits
        print(_row(name, found), flush=True)
    for line, count in waits.most_common(20):
        print(f"{count} waits: {line}")


if __name__ == "__main__":
    main()
