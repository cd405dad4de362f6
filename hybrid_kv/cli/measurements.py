"""What `doctor` measures, and what it means for a context of some length."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

from hybrid_kv.cli.display import human_bytes, human_seconds
from hybrid_kv.models.few_tokens import try_products
from hybrid_kv.models.load import resolve_device
from hybrid_kv.models.widening import MIN_TOKENS, trial
from hybrid_kv.planning.facts import model_facts
from hybrid_kv.planning.plan import ModelFacts
from hybrid_kv.planning.rates import Rates, measure_rates
from hybrid_kv.report.schema import Check

_NODES = Path("/sys/devices/system/node")
_TOP_K = 100


def measure(model: str, context_tokens: int) -> tuple[Rates, tuple[Check, ...]]:
    """Bandwidths of this machine, with a line on each for that model and context.

    Takes about a second; reads the model's configuration alone.
    """
    facts = model_facts(model)
    rates = measure_rates(resolve_device(None))
    return rates, tuple(_lines(facts, context_tokens, rates))


def _lines(facts: ModelFacts, tokens: int, rates: Rates) -> Iterator[Check]:
    kv = tokens * facts.kv_bytes_per_token
    codes = sum(tokens * layer.num_kv_heads * (layer.head_dim + 1) for layer in facts.layers)
    found = sum(
        min(tokens, _TOP_K * layer.group_size) * facts.kv_bytes(layer) for layer in facts.layers
    )
    name = f"{tokens:,} tokens of {facts.name}"
    yield _line(
        "host bandwidth",
        f"{rates.dram:.1f} GB/s in order; for {name} a scan in 8 bits ({human_bytes(codes)}) takes "
        f"{_time(codes, rates.dram)} a token, reading all keys and values ({human_bytes(kv)}) "
        f"{_time(kv, rates.dram)}",
    )
    yield _line(
        "host gather",
        f"{rates.gather:.1f} GB/s in rows of 256 bytes anywhere; attending {_TOP_K} entries per "
        f"query head ({human_bytes(found)} at most) takes {_time(found, rates.gather)} a token",
    )
    yield _weights(facts, rates)
    yield from _widening()
    yield from _few_tokens(facts)
    if rates.h2d is not None and rates.d2h is not None:
        yield _line(
            "bus to the GPU",
            f"{rates.h2d:.1f} GB/s in, {rates.d2h:.1f} GB/s out; streaming all keys and values "
            f"in would take {_time(kv, rates.h2d)} a token, a prompt's leave in "
            f"{_time(kv, rates.d2h)}",
        )
        yield _line(
            "GPU bandwidth",
            f"{rates.device:.0f} GB/s; the weights ({human_bytes(facts.read_bytes)}) take "
            f"{_time(facts.read_bytes, rates.device)} a token, all keys and values on the GPU "
            f"would take {_time(kv, rates.device)}",
        )
    nodes = len(list(_NODES.glob("node[0-9]*"))) or 1
    yield _line(
        "NUMA",
        "one node: memory is equally near to all cores"
        if nodes == 1
        else f"{nodes} nodes: cold entries lie where the thread that stored them runs, and half of "
        "the cores read them from afar; run under `numactl --interleave=all`, or on one node",
    )
    threads = torch.get_num_threads()
    yield _line("threads", f"{threads} of torch's; HYBRID_KV_THREADS sets the search's own")


def _weights(facts: ModelFacts, rates: Rates) -> Check:
    layouts = ", ".join(f"{human_bytes(size)} {name}" for name, size in facts.weights.items())
    return _line(
        "weights",
        f"{facts.name} has {layouts}; a token reads {human_bytes(facts.read_bytes)} of them, in "
        f"{_time(facts.read_bytes, rates.dram)} from the host's memory",
    )


def _widening() -> Iterator[Check]:
    for dtype in (torch.bfloat16, torch.float16):
        found, name = trial(dtype), str(dtype).removeprefix("torch.")
        yield _line(
            f"{name} prompts",
            f"{found.own_gflops:.0f} GFLOP/s on the CPU, {found.widened_gflops:.0f} where weights "
            f"are widened to float32 first: prompts of {MIN_TOKENS} tokens and more "
            f"{'are computed so, layer by layer' if found.pays else 'use them as they are'}",
        )


def _few_tokens(facts: ModelFacts) -> Iterator[Check]:
    outputs, inputs = facts.intermediate_size, facts.hidden_size
    for dtype in (torch.bfloat16, torch.float16):
        found = try_products(dtype, outputs, inputs)
        if found is None:
            continue
        name = str(dtype).removeprefix("torch.")
        yield _line(
            f"{name} steps",
            f"for one token on the CPU torch reads weights of {outputs} x {inputs} at "
            f"{found.torch_gbps:.1f} GB/s, the engine at {found.engine_gbps:.1f}: decode steps "
            f"multiply in {'the engine' if found.pays else 'torch'}",
        )


def _line(name: str, detail: str) -> Check:
    return Check(name=name, state="ok", detail=detail)


def _time(count: float, gbps: float) -> str:
    return human_seconds(count / gbps / 1e9)
