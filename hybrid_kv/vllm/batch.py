"""The sequences of one step: which compute a prompt, which decode, and what each of these attends.

    block tables, lengths ─► prompts: vLLM's kernel over copies of their contexts
                          ├► searched: sinks, window, and what a search of the rest finds
                          └► whole: every entry

Made once a step, used by every layer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self, TypeAlias

import torch
from torch import Tensor

from hybrid_kv.ops.native.paged import BlockSlice, Ints, SearchRange
from hybrid_kv.vllm.layout import PackedContexts, key_rows
from hybrid_kv.vllm.settings import VllmSettings, search_range

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
