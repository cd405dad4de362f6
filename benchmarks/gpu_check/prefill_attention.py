"""Attention of a long prompt: causal by torch's SDPA, back end by back end, whole and a chunk; and
of the chunk over some of the key blocks.
"""

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
from hybrid_kv.ops import get_ops
from hybrid_kv.types import KEY_BLOCK, BlockMask

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
    for share in (0.1, 1.0):
        record.measure(
            f"prefill attention, {share:.0%} of the key blocks",
            partial(attended_blocks, device, sizes, share),
            tokens=sizes.prefill_tokens,
            queries=sizes.prefill_chunk,
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


def attended_blocks(device: torch.device, sizes: Sizes, share: float) -> dict[str, Any]:
    """The last tokens, a chunk of them, attend to a share of the key blocks before them."""
    ops, tokens, queries = get_ops("auto"), sizes.prefill_tokens, sizes.prefill_chunk
    q = normal((1, sizes.q_heads, queries, sizes.dim), sizes.dtype, device)
    k, v = (normal((1, sizes.kv_heads, tokens, sizes.dim), sizes.dtype, device) for _ in "kv")
    size = 384 // sizes.group
    blocks = -(-queries // size), tokens // KEY_BLOCK
    mask = BlockMask(torch.rand(1, sizes.kv_heads, *blocks, device=device) < share, size)
    call = partial(ops.attend_blocks, q, k, v, mask, scale=sizes.dim**-0.5)
    values = timed([call], device, rounds=2, least=1)
    return {**values, "served_by": ops.served["attend_blocks"]}
