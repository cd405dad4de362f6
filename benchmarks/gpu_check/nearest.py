"""The exact nearest keys that a graph is built from: block maxima against all scores."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from benchmarks.gpu_check.pools import normal
from benchmarks.gpu_check.record import Recorder
from benchmarks.gpu_check.sizes import Sizes
from benchmarks.gpu_check.timing import timed
from hybrid_kv.ops import get_ops


def measure(record: Recorder, sizes: Sizes, settings: dict[str, Any]) -> None:
    device = torch.device(settings["device"])
    for backend, queries in (("auto", sizes.queries), ("reference", sizes.reference_queries)):
        record.measure(
            f"nearest keys, {backend}",
            partial(found, device, sizes, backend, queries),
            keys=sizes.keys,
            queries=queries,
            nearest=sizes.nearest,
        )


def found(device: torch.device, sizes: Sizes, backend: str, queries: int) -> dict[str, Any]:
    """All KV heads of a layer at once."""
    q = normal((sizes.kv_heads, queries, sizes.dim), sizes.dtype, device)
    keys = normal((sizes.kv_heads, sizes.keys, sizes.dim), sizes.dtype, device)
    ops = get_ops(backend)
    call = partial(ops.nearest_keys, q, keys, sizes.nearest)
    values = timed([call], device, rounds=2, least=1)
    operations = 2 * sizes.kv_heads * queries * sizes.keys * sizes.dim
    return {
        **values,
        "tflops": operations / values["us"] / 1e6,
        "served_by": ops.served["nearest_keys"],
    }
