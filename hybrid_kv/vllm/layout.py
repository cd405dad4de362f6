"""Rows of keys and values in the bytes of vLLM's KV cache, and copies in vLLM's own layout.

    vLLM  [blocks, Hkv, block, 2 D]   inside, its kernel's own order: keys transposed or in tiles
    ours  [blocks, Hkv, 2, block, D]  rows of keys, then rows of values

vLLM copies and clears whole blocks only, so their inside is free. Its kernel computes prompts, over
a scratch that holds the context of these sequences in its own order.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor


def as_blocks(kv_cache: Tensor) -> Tensor:
    """VLLM's tensor of a layer as [blocks, Hkv, 2, block, D]."""
    num, heads, tokens, both = kv_cache.shape
    return kv_cache.view(num, heads, 2, tokens, both // 2)


def key_rows(slots: Tensor, heads: int, block_tokens: int) -> Tensor:
    """Rows of the keys [..., Hkv] int64 in these slots [...] int64; values lie a block behind."""
    block = slots // block_tokens
    first = (2 * heads - 1) * block_tokens * block + slots
    return first[..., None] + 2 * block_tokens * torch.arange(heads)


def write(blocks: Tensor, key: Tensor, value: Tensor, slots: Tensor) -> None:
    """Write key and value [T, Hkv, D] to slots [T] int64."""
    _, heads, _, tokens, dim = blocks.shape
    rows, memory = key_rows(slots, heads, tokens).flatten(), blocks.view(-1, dim)
    memory.index_copy_(0, rows, key.reshape(-1, dim))
    memory.index_copy_(0, rows + tokens, value.reshape(-1, dim))


class PackedContexts(NamedTuple):
    """Where the contexts of some sequences lie in the cache and in the scratch.

    rows: [n, Hkv] int64 of the keys of all tokens, one sequence after the other. slots: [n] int64
    in the scratch, where each sequence begins with a block of its own. table: [S, blocks] int32 of
    the scratch. num_blocks: of the scratch.
    """

    rows: Tensor
    slots: Tensor
    table: Tensor
    num_blocks: int

    @classmethod
    def of(cls, rows: list[Tensor], block_tokens: int) -> PackedContexts:
        """Of sequences whose keys lie in these rows [n, Hkv] each."""
        counts = [-(-len(own) // block_tokens) for own in rows]
        table = torch.zeros((len(rows), max(counts)), dtype=torch.int32)
        slots, first = [], 0
        for number, (own, count) in enumerate(zip(rows, counts, strict=True)):
            table[number, :count] = torch.arange(first, first + count, dtype=torch.int32)
            slots.append(torch.arange(len(own)) + first * block_tokens)
            first += count
        return cls(torch.cat(rows), torch.cat(slots), table, first)


class Scratch:
    """Memory for the contexts of a step's prompts in vLLM's layout, shared by all layers."""

    def __init__(self) -> None:
        self._cache = torch.empty(0)

    def pack(
        self, blocks: Tensor, contexts: PackedContexts, reshape_and_cache: Any, isa: str
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Copy contexts out of blocks [N, Hkv, 2, block, D].

        Args:
            reshape_and_cache: vLLM's `cpu_attn_reshape_and_cache`, which knows its layouts.

        Returns:
            The keys as rows [n, Hkv, D], and the scratch's key_cache and value_cache.
        """
        _, heads, _, tokens, dim = blocks.shape
        shape = (contexts.num_blocks, heads, 2 * tokens, dim)
        fits = self._cache.dtype == blocks.dtype and self._cache.shape[1:] == shape[1:]
        if not fits or len(self._cache) < contexts.num_blocks:
            self._cache = torch.zeros(shape, dtype=blocks.dtype)  # what is not written is no NaN
        key_cache, value_cache = self._cache.chunk(2, dim=2)
        memory, rows = blocks.view(-1, dim), contexts.rows.flatten()
        keys = memory.index_select(0, rows).view(-1, heads, dim)
        values = memory.index_select(0, rows + tokens).view(-1, heads, dim)
        reshape_and_cache(keys, values, key_cache, value_cache, contexts.slots, isa)
        return keys, key_cache, value_cache
