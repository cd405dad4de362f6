"""Whether a row fits into the host's memory, said before anything is filled."""

from __future__ import annotations

from hybrid_kv.config import HybridConfig
from hybrid_kv.eval.filling import context_bytes
from hybrid_kv.eval.profiling.arguments import ProfileArguments
from hybrid_kv.ops.host_memory import FreeMemory
from hybrid_kv.planning.plan import ModelFacts
from hybrid_kv.planning.prefill_bytes import prefill_peak_bytes

USABLE = 0.95
"""Share of the free memory that may be filled; the rest is for activations and the system."""


def host_bytes(
    asked: ProfileArguments,
    facts: ModelFacts,
    config: HybridConfig,
    num_tokens: int,
    *,
    on_device: bool,
) -> dict[str, int]:
    """Bytes of host memory by purpose at the moment when most is needed.

    Args:
        on_device: whether weights and prefill lie in another memory.
    """
    total, method = num_tokens + asked.steps, config.build()
    index = sum(total * method.index_bytes_per_token(layer, total) for layer in facts.layers)
    # One layer is both where it was filled and where it goes to.
    kv = total * (facts.kv_bytes_per_token + facts.largest_layer_bytes)
    needed = {"weights": 0 if on_device else facts.weight_bytes, "KV": kv, "index": index}
    if asked.fill == "synthetic":
        needed["the made-up context"] = context_bytes(facts.layers, num_tokens, facts.dtype_bytes)
    elif not on_device:
        needed["prefill"] = prefill_peak_bytes(facts, num_tokens, min(4096, num_tokens))
    return {purpose: count for purpose, count in needed.items() if count}


def lack_of_room(
    num_tokens: int, method: str, needed: dict[str, int], free: FreeMemory
) -> str | None:
    """The arithmetic in a sentence where it does not fit; None where it does."""
    if sum(needed.values()) <= USABLE * free.num_bytes:
        return None
    parts = " + ".join(f"{count / 2**30:.1f} {name}" for name, count in needed.items())
    return (
        f"context of {num_tokens:,} tokens with method {method} needs "
        f"{sum(needed.values()) / 2**30:.1f} GiB of host memory ({parts}), "
        f"{free.num_bytes / 2**30:.1f} GiB are free{free.limit}; "
        "profile a shorter context or fewer layers"
    )
