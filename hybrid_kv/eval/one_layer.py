"""One attention layer of a large model at a long context: what a decode step of a method takes.

Attention-like KV is made up and put in place, so that no prompt is computed and no weights are
needed; the layer is then asked as the model would ask it, without the model's own products. All
methods get the same queries, so that the softmax mass that one attends can be told from the other's
logarithm of the sum.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter

import torch
from torch import Tensor

from hybrid_kv.config import HybridConfig
from hybrid_kv.eval.filling import FilledKV, SyntheticContext, context_bytes
from hybrid_kv.types import LayerShape, ModelInfo, Needs, bytes_per_token

LLAMA_3_8B = LayerShape(0, 32, 8, 128)
LAYER_DTYPE = torch.bfloat16
_WARMUP_STEPS = 3


@dataclass(frozen=True, slots=True)
class LayerSteps:
    """Times of the decode steps of a layer under one method.

    step_s: of each step. attended_ratio: entries attended over all. lse: [steps, Hq] float32.
    device_kv_bytes, host_bytes: K and V on the device tier; cold KV and indexes.
    """

    config: HybridConfig
    step_s: tuple[float, ...]
    attended_ratio: float
    lse: Tensor
    device_kv_bytes: int
    host_bytes: int

    def mass(self, exact: LayerSteps) -> float:
        """Share of the softmax that was attended, from the steps of full attention."""
        return float((self.lse - exact.lse).exp().mean().clamp(max=1))


def layer_bytes(num_tokens: int, shape: LayerShape = LLAMA_3_8B) -> int:
    """Host memory that `measure_steps` takes at most: what is made up, K and V twice, and an index
    of as many bytes again.
    """
    kv = num_tokens * bytes_per_token(shape, LAYER_DTYPE)
    return context_bytes((shape,), num_tokens, LAYER_DTYPE.itemsize) + 3 * kv


def make_context(
    num_tokens: int, steps: int, *, shape: LayerShape = LLAMA_3_8B, seed: int = 0
) -> SyntheticContext:
    """KV and queries of a made-up text for one layer; its heads are turned copies of one."""
    return SyntheticContext(
        ModelInfo((shape,)),
        num_tokens,
        max_steps=steps + _WARMUP_STEPS,
        made_heads=1,
        seed=seed,
        keep=True,
    )


def measure_steps(
    context: SyntheticContext,
    config: HybridConfig,
    shape: LayerShape = LLAMA_3_8B,
    *,
    check: Callable[[], None] = lambda: None,
) -> LayerSteps:
    """Decodes as many steps as the context was made for under a method, the first ones unmeasured.

    Indexes are waited for.

    Args:
        check: called before each step; what it raises ends the measurement.
    """
    info = ModelInfo((shape,))
    cache = FilledKV(info, config.replace(index_build="wait"), context)
    try:
        with torch.inference_mode():
            return _measure(cache, context, config, shape, check)
    finally:
        cache.close()


def _measure(
    cache: FilledKV,
    context: SyntheticContext,
    config: HybridConfig,
    shape: LayerShape,
    check: Callable[[], None],
) -> LayerSteps:
    cache.means.reserve(context.num_tokens + context.max_steps)
    needs, layer_idx = cache.means.method.needs, shape.layer_idx
    evidence = (context.evidence(layer_idx, needs, LAYER_DTYPE),) if needs != Needs() else ()
    cache.load(layer_idx, *context.kv(layer_idx, LAYER_DTYPE), evidence)
    q = torch.ones(1, shape.num_q_heads, 1, shape.head_dim, dtype=LAYER_DTYPE)
    new = torch.ones(2, 1, shape.num_kv_heads, 1, shape.head_dim, dtype=LAYER_DTYPE)
    times, sums = [], []
    for _ in range(context.max_steps):
        check()
        begin = perf_counter()
        part = cache.attend(layer_idx, q, (new[0], new[1]), None, scale=shape.head_dim**-0.5)
        times.append(perf_counter() - begin)
        sums.append(part.lse[0, :, 0])
    layer, work = cache.stores[layer_idx], cache.work
    return LayerSteps(
        config=config,
        step_s=tuple(times[_WARMUP_STEPS:]),
        attended_ratio=float(work.attended / work.visible),
        lse=torch.stack(sums[_WARMUP_STEPS:]),
        device_kv_bytes=layer.rows[0].table.num_tokens * bytes_per_token(shape, LAYER_DTYPE),
        host_bytes=layer.cold.kv_bytes + layer.cold.overhead_bytes + layer.cold.index_bytes,
    )
