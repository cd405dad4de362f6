"""A prompt and some tokens after it, by one system in a process of its own."""

from __future__ import annotations

import resource
from collections import Counter
from functools import partial
from itertools import pairwise
from statistics import median
from typing import Any

import torch
from torch import Tensor

import hybrid_kv as hkv
from benchmarks.gpu_check.dense import run_dense
from benchmarks.gpu_check.device_memory import Footprint, cap_device
from benchmarks.gpu_check.record import Recorder
from benchmarks.gpu_check.sizes import Sizes
from hybrid_kv.models.shapes import random_config

OURS: dict[str, dict[str, Any]] = {
    "hybrid": {},
    "retrieval_attention": {"method": "retrieval_attention", "index_build": "wait"},
    "flat": {"method": "flat", "cold": {"index": {"kind": "flat", "precision": "int8"}}},
    "quest": {"method": "quest"},
    "full": {"method": "full"},
}
"""Our methods, each with its defaults but for what is written here."""

_WARM_STEPS = 3
"""Steps after the first token that still set something up; the median leaves them out."""


def measure(record: Recorder, sizes: Sizes, settings: dict[str, Any]) -> None:
    device, system = torch.device(settings["device"]), settings["system"]
    tokens = sizes.contexts[settings["context"]]
    record.measure(
        system, partial(run, device, sizes, system, tokens, settings["cap_bytes"]), tokens=tokens
    )


def run(
    device: torch.device, sizes: Sizes, system: str, tokens: int, cap_bytes: int | None
) -> dict[str, Any]:
    limit = cap_device(device, cap_bytes)
    footprint = Footprint(device)
    ids = prompt(sizes, tokens)
    if system in OURS:
        values = run_ours(system, sizes, ids, footprint, device)
    else:
        values = run_dense(system, sizes, ids.to(device), footprint, device)
    return {
        **values,
        **step_times(values["token_times_s"]),
        **footprint.peaks(),
        "limit_bytes": limit,
        "host_peak_bytes": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
    }


def prompt(sizes: Sizes, tokens: int) -> Tensor:
    """[1, tokens] random ids."""
    vocabulary = random_config(sizes.model.removeprefix("random:"), sizes.layers).vocab_size
    return torch.randint(2, vocabulary, (1, tokens), generator=torch.Generator().manual_seed(0))


def run_ours(
    system: str, sizes: Sizes, ids: Tensor, footprint: Footprint, device: torch.device
) -> dict[str, Any]:
    options = {"device": device, "dtype": sizes.dtype, "layers": sizes.layers, "seed": 0}
    config = hkv.HybridConfig(**OURS[system])
    with hkv.load(sizes.model, config=config, **options) as llm:
        llm.generate(ids[:, : sizes.warmup_tokens], max_new_tokens=_WARM_STEPS, do_sample=False)
        footprint.restart()
        got = llm.generate(ids, max_new_tokens=sizes.new_tokens, do_sample=False)
    steps = max(1, len(got.token_ids) - 1)
    phases = {name: 1e3 * seconds / steps for name, seconds in got.phases_s.items()}
    return {
        "config": config.flat(),
        "token_ids": got.token_ids,
        "token_times_s": got.token_times_s,
        "ttft_s": got.ttft_s,
        "prefill_s": got.prefill_s,
        "index_build_s": got.index_build_s,
        "phases_ms": phases,
        "attended_ratio": got.work.attended / got.work.visible if got.work.visible else None,
        "device_kv_bytes": got.device_kv_bytes,
        "host_kv_bytes": got.host_kv_bytes,
        "host_index_bytes": got.host_index_bytes,
        "backends": got.backends,
        "indexes": indexes(got.index),
    }


def indexes(described: list[dict[str, Any]]) -> dict[str, int]:
    """Heads by what serves them at the end, and how far its build is."""
    states = (f"{head['serves']}, build {head['build']}" for head in described)
    return dict(Counter(states))


def step_times(times: list[float]) -> dict[str, Any]:
    """tpot_ms: the mean gap, as users wait; tpot_median_ms: without the first steps."""
    gaps = [1e3 * (b - a) for a, b in pairwise(times)]
    late = gaps[_WARM_STEPS:] or gaps
    return {
        "tpot_ms": sum(gaps) / len(gaps) if gaps else None,
        "tpot_median_ms": median(late) if late else None,
        "new_tokens": len(times),
    }
