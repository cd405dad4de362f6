"""Kernels for NVIDIA GPUs in Triton, one family a file; the files are imported when first used.

They compute what `reference` defines. With TRITON_INTERPRET=1 they run on the CPU, for tests.

The tiles of a search for nearest keys are described here, so that its memory is known beforehand,
where there is no Triton.
"""

from __future__ import annotations

BLOCK_KEYS = 16
"""Keys that one maximum stands for: the candidates of a query are `count` blocks of them."""

SCRATCH_BYTES = 256 * 2**20
"""Memory of a search, beside its queries, its keys and its result."""


def portion(heads: int, num_keys: int, count: int) -> int:
    """Queries of each KV head that are searched at a time, at least one."""
    return max(1, SCRATCH_BYTES // (heads * query_bytes(num_keys, count)))


def query_bytes(num_keys: int, count: int) -> int:
    """Scratch of one query: a float32 for each block, the blocks it lists, and for each candidate a
    score; torch's top-k takes about as much again of what it is given.
    """
    blocks = -(-num_keys // BLOCK_KEYS)
    listed = min(count, blocks)
    return 8 * blocks + 24 * listed + 16 * listed * BLOCK_KEYS + 32 * count


def result_bytes(heads: int, num_queries: int, count: int) -> int:
    """Of the ids [H, Q, K] int32."""
    return 4 * heads * num_queries * count
