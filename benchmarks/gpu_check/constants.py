"""What a kernel, launch, graph, event and read over the bus cost; each node of a layer's graph.

Times of the device are those of the profiler's device events, nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu_check.busy import profiled
from benchmarks.gpu_check.device_select import SearchedLayer
from benchmarks.gpu_check.pools import host_pool, pool
from benchmarks.gpu_check.record import NotHere, Recorder, need_cuda
from benchmarks.gpu_check.sizes import Sizes
from benchmarks.gpu_check.timing import wall_us
from hybrid_kv.ops import get_ops
from hybrid_kv.runtime.select import CODE_BYTES
from hybrid_kv.transfer.graph_cache import CudaRecorder

_NODES = (1, 100)
_NAME_CHARS = 60


def measure(record: Recorder, sizes: Sizes, settings: dict[str, Any]) -> None:
    device = torch.device(settings["device"])
    record.measure("kernel and launch", partial(launched, device, sizes))
    for nodes in _NODES:
        record.measure("graph", partial(replayed, device, sizes, nodes), nodes=nodes)
    record.measure("event", partial(awaited, device, sizes))
    row_bytes = sizes.dim * sizes.dtype.itemsize
    record.measure("rows over the bus", partial(rows_read, device, sizes), row_bytes=row_bytes)
    for size in CODE_BYTES[:: len(CODE_BYTES) - 1]:
        about = {"keys": sizes.keys, "code_bytes": size}
        record.measure("a layer's graph", partial(layer_nodes, device, sizes, size), **about)


def launched(device: torch.device, sizes: Sizes) -> dict[str, Any]:
    """An operator that does next to nothing."""
    need_cuda(device)
    x = torch.zeros(1, device=device)
    return _timed(partial(x.add_, 1), sizes.calls)


def replayed(device: torch.device, sizes: Sizes, nodes: int) -> dict[str, Any]:
    """A graph of so many of these; a node is what the device takes from one to the next."""
    need_cuda(device)
    x, graph = torch.zeros(1, device=device), torch.cuda.CUDAGraph()
    x.add_(1)
    with torch.cuda.graph(graph):
        for _ in range(nodes):
            x.add_(1)
    found = _timed(graph.replay, sizes.calls)
    whole = wall_us(partial(_waited, graph.replay, device), rounds=sizes.rounds)
    return {**found, "replayed_and_waited_us": whole["us"]}


def awaited(device: torch.device, sizes: Sizes) -> dict[str, Any]:
    """An event is recorded, asked for, and waited for, with nothing before it in the queue."""
    need_cuda(device)
    event = torch.cuda.Event()
    found = {}
    for name, call in (
        ("record", event.record),
        ("query", event.query),
        ("wait", event.synchronize),
    ):
        found[f"{name}_us"] = 1e6 * median(_seconds(call) for _ in range(sizes.calls))
    return found


def rows_read(device: torch.device, sizes: Sizes) -> dict[str, Any]:
    """Rows of host memory, each head's own at random, that a kernel reads by itself."""
    need_cuda(device)
    ops, count = get_ops("auto"), sizes.gathered_pages * sizes.page_size
    source = host_pool(sizes, sizes.keys, 1, True)
    target = pool(sizes, count, 1, device)
    here = torch.arange(count, device=device).expand(sizes.kv_heads, -1)
    picked = [torch.randint(sizes.keys, (sizes.kv_heads, count)).to(device) for _ in range(4)]
    calls = [partial(ops.copy_pages, source, target, there, here) for there in picked]
    calls[0]()
    if (served := ops.served["copy_pages"]) != "triton":
        raise NotHere(f"rows are read by Triton's kernel, and {served} served")
    work = profiled(lambda: [call() for call in calls])
    us = work.busy_us / len(calls)
    rows = 2 * sizes.kv_heads * count
    read = rows * sizes.dim * sizes.dtype.itemsize
    return {"us": us, "rows": rows, "gbps": read / us / 1e3, "ns_per_row": 1e3 * us / rows}


def layer_nodes(device: torch.device, sizes: Sizes, size: int) -> dict[str, Any]:
    """What a layer's selection is made of: each kernel of its graph, while nothing else runs."""
    need_cuda(device)
    layer = SearchedLayer(sizes, device, size)
    layer.step(layer.ops, layer.q)
    if (served := layer.ops.served["find_by_sketch"]) != "triton":
        raise NotHere(f"what is captured must not copy from the host, and {served} served")

    def step(q: Tensor) -> Any:
        return layer.step(layer.ops, q)

    graph = CudaRecorder(device).record(step, layer.q)
    graph.play()
    torch.cuda.synchronize(device)
    work = profiled(lambda: [graph.play() for _ in range(sizes.rounds)])
    found = {
        _short(name): median(times) * len(times) / sizes.rounds
        for name, times in work.kernel_us.items()
    }
    return {
        "busy_us": work.busy_us / sizes.rounds,
        "nodes": work.num_kernels / sizes.rounds,
        "node_us": found,
    }


def _timed(call: Callable[[], object], count: int) -> dict[str, Any]:
    """launch_us: of the host. kernel_us, kernels: of the device, a call."""
    call()
    torch.cuda.synchronize()
    begin = perf_counter()
    for _ in range(count):
        call()
    launch = (perf_counter() - begin) / count
    work = profiled(lambda: [call() for _ in range(count)])
    return {
        "launch_us": 1e6 * launch,
        "kernel_us": work.busy_us / count,
        "kernels": work.num_kernels / count,
    }


def _waited(call: Callable[[], object], device: torch.device) -> None:
    call()
    torch.cuda.synchronize(device)


def _seconds(call: Callable[[], object]) -> float:
    begin = perf_counter()
    call()
    return perf_counter() - begin


def _short(name: str) -> str:
    """A kernel's name without its template's arguments."""
    return name.partition("<")[0].removeprefix("void ")[:_NAME_CHARS]
