"""The sequences of one step: which compute a prompt, which decode, and what each of these attends.

    block tables, lengths ─► prompts: vLLM's kernel over copies of their contexts
                          ├► searched: sinks, window, and what a search of the rest finds
                          └► whole: every entry

Made once a step, used by every layer. Rows lie in the bytes of vLLM's KV cache:

    vLLM  [blocks, Hkv, block, 2 D]   inside, its kernel's own order: keys transposed or in tiles
    ours  [blocks, Hkv, 2, block, D]  rows of keys, then rows of values

vLLM copies and clears whole blocks only, so their inside is free. Its kernel computes prompts, over
a scratch that holds the context of these sequences in its own order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self, TypeAlias

import torch
from torch import Tensor

from hybrid_kv.ops.native.paged_cache import BlockSlice, Ints, SearchRange
from hybrid_kv.vllm.settings import VllmSettings, search_range


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


RERANK = 2.0
"""Candidates that are ranked exactly per entry that is found."""

KernelPlan: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""vLLM's plan of its kernel, of query starts [S + 1] and lengths [S]."""


class StepSequence(NamedTuple):
    """A sequence of the step: its query tokens begin..end - 1, its length and blocks."""

    begin: int
    end: int
    length: int
    table: Ints


class CacheShape(NamedTuple):
    """KV heads, and tokens of a block."""

    num_kv_heads: int
    block_tokens: int

    def rows(self, table: Ints, tokens: Tensor) -> Tensor:
        """Rows of the keys [n, Hkv] of a sequence's tokens [n] int64."""
        blocks = torch.from_numpy(table).long()[tokens // self.block_tokens]
        slots = blocks * self.block_tokens + tokens % self.block_tokens
        return key_rows(slots, self.num_kv_heads, self.block_tokens)

    def pieces(self, table: Ints, begin: int, end: int) -> list[BlockSlice]:
        """Where tokens begin..end - 1 of a sequence lie."""
        size, found = self.block_tokens, []
        while begin < end:
            number, first = divmod(begin, size)
            last = min(size, first + end - begin)
            found.append(BlockSlice(int(table[number]), first, last))
            begin += last - first
        return found


@dataclass(frozen=True, slots=True)
class SearchedDecodes:
    """Decoding sequences that are searched, S of them.

    tokens: [S] int64 in the step. near: sinks and window of each. searched: of each. sequences: the
    same ones.
    """

    tokens: Tensor
    near: list[list[BlockSlice]]
    searched: list[SearchRange]
    sequences: list[StepSequence]


@dataclass(frozen=True, slots=True)
class Prompts:
    """Sequences that compute prompt tokens, S of them.

    tokens: [t] int64 in the step. starts: [S + 1] int32 and lengths [S] int32, as
    vLLM's kernel takes them, and its plan. contexts: copies of all that they attend.
    """

    tokens: Tensor
    starts: Tensor
    lengths: Tensor
    plan: Tensor
    contexts: PackedContexts
    sequences: list[StepSequence]


@dataclass(frozen=True, slots=True)
class StepBatch:
    """The sequences of one step by how they are attended; None for none."""

    shape: CacheShape
    prompts: Prompts | None
    searched: SearchedDecodes | None
    whole: list[StepSequence]

    @classmethod
    def of(
        cls,
        sequences: Sequence[StepSequence],
        is_prompt: Sequence[bool],
        shape: CacheShape,
        settings: VllmSettings,
        plan: KernelPlan,
    ) -> Self:
        """Sort the sequences of a step."""
        prompts, searched, whole = [], [], []
        for one, prompt in zip(sequences, is_prompt, strict=True):
            if prompt or one.end - one.begin > 1:
                prompts.append(one)
            elif (found := search_range(settings, one.length)) is None:
                whole.append(one)
            else:
                first, count, top_k = found
                own = SearchRange(one.table, first, count, top_k, round(RERANK * top_k))
                searched.append((one, own))
        return cls(
            shape,
            _prompts(prompts, shape, plan) if prompts else None,
            _searched(searched, shape) if searched else None,
            whole,
        )


def _prompts(sequences: list[StepSequence], shape: CacheShape, plan: KernelPlan) -> Prompts:
    sizes = torch.tensor([0, *(one.end - one.begin for one in sequences)], dtype=torch.int32)
    starts = sizes.cumsum(0, dtype=torch.int32)
    lengths = torch.tensor([one.length for one in sequences], dtype=torch.int32)
    own = [torch.arange(one.begin, one.end) for one in sequences]
    rows = [shape.rows(one.table, torch.arange(one.length)) for one in sequences]
    contexts = PackedContexts.of(rows, shape.block_tokens)
    return Prompts(torch.cat(own), starts, lengths, plan(starts, lengths), contexts, sequences)


def _searched(pairs: list[tuple[StepSequence, SearchRange]], shape: CacheShape) -> SearchedDecodes:
    near = [
        shape.pieces(one.table, 0, own.first)
        + shape.pieces(one.table, own.first + own.num_tokens, one.length)
        for one, own in pairs
    ]
    sequences = [one for one, _ in pairs]
    tokens = torch.tensor([one.begin for one in sequences])
    return SearchedDecodes(tokens, near, [own for _, own in pairs], sequences)
