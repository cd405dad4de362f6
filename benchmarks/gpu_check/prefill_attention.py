"""Causal attention of a long prompt by torch's SDPA, back end by back end: whole, and a chunk."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

from benchmarks.gpu_check.pools import normal
from benchmarks.gpu_check.record import Recorder, need_cuda
from benchmarks.gpu_check.sizes import Sizes
from benchmarks.gpu_check.timing import timed

BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}


def measure(record: Recorder, sizes: Sizes, settings: dict[str, Any]) -> None:
    device = torch.device(settings["device"])
    for name in (*BACKENDS, "torch's choice"):
        for queries in (sizes.prefill_tokens, sizes.prefill_chunk):
            record.measure(
                f"prefill attention, {name}",
                partial(attended, device, sizes, name, queries),
                tokens=sizes.prefill_tokens,
                queries=queries,
            )


def attended(device: torch.device, sizes: Sizes, name: str, queries: int) -> dict[str, Any]:
    """The last `queries` of the tokens attend to all before them, in all heads of a layer."""
    tokens = sizes.prefill_tokens
    if name in BACKENDS:
        need_cuda(device)
    q = normal((1, sizes.q_heads, queries, sizes.dim), sizes.dtype, device)
    k, v = (normal((1, sizes.kv_heads, tokens, sizes.dim), sizes.dtype, device) for _ in "kv")
    if grouped := name != "efficient":  # that one knows no groups
        options = {"enable_gqa": True}
    else:
        k, v = (tensor.repeat_interleave(sizes.group, 1) for tensor in (k, v))
        options = {}
    if queries == tokens:
        options["is_causal"] = True
    else:
        options["attn_mask"] = causal_lower_right(queries, tokens)

    call = partial(F.scaled_dot_product_attention, q, k, v, **options)
    allowed = [BACKENDS[name]] if name in BACKENDS else list(SDPBackend.__members__.values())
    with sdpa_kernel([backend for backend in allowed if backend is not SDPBackend.ERROR]):
        values = timed([call], device, rounds=2, least=1)
    pairs = queries * tokens - queries * (queries - 1) / 2
    operations = 4 * sizes.q_heads * pairs * sizes.dim
    return {**values, "tflops": operations / values["us"] / 1e6, "grouped_heads": grouped}
