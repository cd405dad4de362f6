"""What an index that learns from a prompt's queries takes while there is a prompt to learn from."""

from __future__ import annotations

from dataclasses import dataclass

from hybrid_kv.ops.nearest import SCRATCH_BYTES, result_bytes
from hybrid_kv.types import LayerShape, Needs


@dataclass(frozen=True, slots=True)
class Learning:
    """Bytes of one layer and row, at most.

    collecting: on the device, while a layer's prompt is computed and the layer before it leaves.
    sealing: on the device beside that, when the layer ends. kept: on the host until its index is
    built.
    """

    collecting: int = 0
    sealing: int = 0
    kept: int = 0


def learning_bytes(layer: LayerShape, needs: Needs, num_tokens: int, itemsize: int) -> Learning:
    """What `needs` make of a prompt of `num_tokens`, for queries of `itemsize` bytes a channel."""
    sampled = min(2 * needs.sampled_queries, num_tokens)  # a stride doubles when so many are held
    positions = sampled + min(needs.last_queries, num_tokens)
    if not positions:
        return Learning()
    per_position = itemsize * layer.num_q_heads * layer.head_dim
    queries = positions * per_position
    found = scratch = 0
    if needs.nearest_keys:
        count = min(needs.nearest_keys, num_tokens)
        found = result_bytes(layer.num_q_heads, positions, count)
        scratch = SCRATCH_BYTES
    # The collector joins pieces by copying; queries and result of the layer before are leaving.
    collecting = 3 * queries + queries + found
    # Queries are turned to where decoding will ask them, through temporaries in float32.
    turning = 5 * queries
    return Learning(collecting, queries + found + max(scratch, turning), queries + found)
