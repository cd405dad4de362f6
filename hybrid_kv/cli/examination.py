"""Checks of this machine and the rates that it reaches, for `hybrid-kv doctor`."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from hybrid_kv.cli.display import human_bytes, human_seconds
from hybrid_kv.config import HybridConfig
from hybrid_kv.errors import BackendUnavailable, ConfigError
from hybrid_kv.models.few_tokens import try_products
from hybrid_kv.models.load import NEEDLE_PATH, resolve_device
from hybrid_kv.models.prompt_layers import MIN_TOKENS, MOST_TOKENS, trial
from hybrid_kv.models.weight_kinds import STORED
from hybrid_kv.ops.devices import backends_on
from hybrid_kv.ops.dispatch import get_ops
from hybrid_kv.ops.host_memory import free_memory
from hybrid_kv.ops.native.library import engine_state
from hybrid_kv.ops.native.linear import INSTRUCTIONS, PACKED_KINDS
from hybrid_kv.ops.operations import BACKENDS, OPS, choose_backend, why_unavailable
from hybrid_kv.ops.pinned import lock_limit_bytes, why_not_pinned
from hybrid_kv.planning.plan import ModelFacts, model_facts
from hybrid_kv.planning.rates import Rates, measure_rates
from hybrid_kv.report import probe_environment
from hybrid_kv.report.run import PACKAGES, installed_version
from hybrid_kv.report.schema import Check, DoctorReport

_MODULES = {"hybrid-kv": "hybrid_kv", "faiss-cpu": "faiss"}

_OPTIONAL = {
    "triton": "optional: part of torch for NVIDIA GPUs, else pip install 'hybrid-kv[triton]'",
    "flashinfer": "optional: pip install 'hybrid-kv[flashinfer]' on Linux; whether the "
    "machine is x86-64 or aarch64 with CUDA is up to you, pip does not look",
}

_NEEDED = {"faiss-cpu": "index kinds ivf and hnsw need it: pip install faiss-cpu"}

_BACKEND_DETAILS = {
    "reference": "plain torch on any device; defines what every other back end computes",
    "torch_cpu": "torch's fused attention, for tensors on the CPU",
    "torch_cuda": "torch's fused attention, for tensors on an NVIDIA GPU",
    "native": "the compiled engine, for entries that an index retrieved",
    "triton": "our kernels for NVIDIA GPUs: pages, their digests, merge, nearest keys",
    "flashinfer": "FlashInfer's paged decode, only when asked for by name",
}


def examine() -> DoctorReport:
    """Everything the verb shows; reads, changes nothing."""
    free = free_memory()
    return DoctorReport(
        environment=probe_environment(),
        ram_free_bytes=free.num_bytes,
        ram_limit=free.limit.strip() or None,
        devices=tuple(devices()),
        checks=(
            Check(name="python", state="ok", detail=probe_environment().versions["python"] or ""),
            *(check_package(name) for name in PACKAGES),
            *check_backends(),
            check_engine(),
            check_packed_weights(),
            check_steps(),
            check_look_ahead(),
            *check_pinned_memory(),
            check_needle(),
        ),
    )


def devices() -> Iterator[str]:
    """One line per accelerator, or one that says why there is none."""
    if not torch.cuda.is_available():
        built = torch.version.cuda
        reason = (
            f"torch is built for CUDA {built}, no GPU answers" if built else "torch is a CPU build"
        )
        yield f"cpu only ({reason})"
        return
    for idx in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(idx)
        name = torch.cuda.get_device_name(idx)
        yield f"cuda:{idx} {name}, {human_bytes(total)}, {human_bytes(free)} free"


def check_package(name: str) -> Check:
    """Whether a package is installed and can be imported."""
    found = installed_version(name)
    if found is None:
        state = "absent" if name in _OPTIONAL else "missing"
        hint = _OPTIONAL.get(name) or _NEEDED.get(name) or f"pip install {name}"
        return Check(name=name, state=state, detail=f"not installed; {hint}")
    try:
        import_module(_MODULES.get(name, name))
    except Exception as error:  # a broken wheel may raise anything
        detail = f"{found} is installed, but its import fails: {error}"
        return Check(name=name, state="absent" if name in _OPTIONAL else "missing", detail=detail)
    return Check(name=name, state="ok", detail=found)


def check_backends() -> Iterator[Check]:
    """The arithmetic back ends, and what 'auto' takes for each op on this machine."""
    yield Check(name="backend auto", state="ok", detail=_automatic())
    for name in BACKENDS[1:]:
        try:
            reason = why_unavailable(name)
        except (ConfigError, BackendUnavailable) as error:
            reason = str(error)
        state = "ok" if reason is None else "absent"
        detail = _BACKEND_DETAILS[name] + ("" if reason is None else f"; {reason}")
        yield Check(name=f"backend {name}", state=state, detail=detail)


def _automatic() -> str:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    taken: dict[str, list[str]] = {}
    for op in OPS:
        # Retrieved entries lie on the host, whatever the device is.
        place = "cpu" if op == "attend_retrieved" else device
        here = {*backends_on(place), *(["native"] if _engine_serves() else [])}
        name = choose_backend("auto", op, device_type=place, dtype=torch.bfloat16, here=here)
        taken.setdefault(name, []).append(op)
    served = "; ".join(f"{name}: {', '.join(ops)}" for name, ops in taken.items())
    return f"takes for bfloat16 on {device} {served}"


def _engine_serves() -> bool:
    try:
        return engine_state().isa is not None
    except (ConfigError, BackendUnavailable):
        return False


def check_engine() -> Check:
    """Check of the native engine: which library searches the cold tier, or why none does."""
    try:
        state = engine_state()
    except (ConfigError, BackendUnavailable) as error:
        return Check(name="native engine", state="missing", detail=str(error))
    return Check(
        name="native engine", state="absent" if state.isa is None else "ok", detail=state.detail
    )


def check_packed_weights() -> Check:
    """Kinds of packed weights that are multiplied here as they lie, and with what."""
    name, kinds = "packed weights", ", ".join(PACKED_KINDS)
    try:
        state = engine_state()
    except (ConfigError, BackendUnavailable) as error:
        return Check(name=name, state="missing", detail=str(error))
    if state.isa is None:
        detail = f"none without the engine: {state.detail}; models stored packed need --dequantize"
        return Check(name=name, state="absent", detail=detail)
    detail = (
        f"{kinds} of GGUF files, {', '.join(STORED)}, on the CPU with {INSTRUCTIONS[state.isa]}"
    )
    return Check(name=name, state="ok", detail=detail)


def check_steps() -> Check:
    """Whether a layer's decode step on the CPU is one call of the engine."""
    try:
        reason = get_ops("auto").why_op_by_op
    except (ConfigError, BackendUnavailable) as error:
        reason = str(error)
    if reason is None:
        detail = (
            "on the CPU a layer's step is one call of the engine (Generation.steps says where not)"
        )
        return Check(name="decode step", state="ok", detail=detail)
    return Check(name="decode step", state="absent", detail=f"made op by op, more slowly: {reason}")


def check_look_ahead() -> Check:
    """Whether layers are searched ahead by themselves, which needs a device to search beside."""
    if torch.cuda.is_available():
        detail = "a layer is searched while the one before computes, where a trial loses little"
        return Check(name="look-ahead", state="ok", detail=f"{detail} (Generation.look_ahead)")
    detail = "off by itself: the CPU computes and searches, and nothing would be hidden"
    return Check(name="look-ahead", state="absent", detail=detail)


def check_pinned_memory() -> Iterator[Check]:
    """Whether CUDA locks host memory, without which transfers are slower; only with a GPU."""
    if not torch.cuda.is_available():
        return
    limit = lock_limit_bytes()
    allowed = "no limit" if limit is None else f"a limit of {human_bytes(limit)}"
    reason = why_not_pinned()
    found = (
        "CUDA locks host memory" if reason is None else f"CUDA refuses: {reason}; slow transfers"
    )
    detail = f"{found}; the system sets {allowed} (ulimit -l)"
    yield Check(name="pinned memory", state="absent" if reason else "ok", detail=detail)


def check_needle() -> Check:
    """Whether the small model that ships with the package is there."""
    needed = ("config.json", "model.safetensors", "tokenizer.json")
    lacking = [name for name in needed if not (NEEDLE_PATH / name).is_file()]
    if lacking:
        detail = (
            f"lacks {', '.join(lacking)}; install the package again, or run scripts/train_needle"
        )
        return Check(name="model needle", state="missing", detail=detail)
    size = sum(path.stat().st_size for path in NEEDLE_PATH.iterdir())
    return Check(name="model needle", state="ok", detail=human_bytes(size))


_NODES = Path("/sys/devices/system/node")


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
    params: Any = HybridConfig(method="hybrid").params
    keys: int = params.cold.top_k
    found = sum(
        min(tokens, keys * layer.group_size) * facts.kv_bytes(layer) for layer in facts.layers
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
        f"{rates.gather:.1f} GB/s in rows of 256 bytes anywhere; attending {keys} entries per "
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
        name = str(dtype).removeprefix("torch.")
        for tokens in (MIN_TOKENS, MOST_TOKENS):
            found = trial(dtype, tokens)
            yield _line(
                f"{name} prompts",
                f"{found.own_gflops:.0f} GFLOP/s on the CPU, {found.widened_gflops:.0f} where "
                f"weights are widened to float32 first: prompts of {tokens} tokens "
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
