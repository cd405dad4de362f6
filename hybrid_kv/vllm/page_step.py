"""A step's sequences on a GPU: which choose the blocks that they attend, and which are vLLM's.

    lengths on the host ─► how many blocks each chooses; one upload of numbers
    block table         ─► physical blocks of each, on the device

Made once a step, used by every layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

import torch
from torch import Tensor

from hybrid_kv.ops.devices import staged
from hybrid_kv.vllm.counters import StepCounts
from hybrid_kv.vllm.settings import VllmSettings, search_range


class BlockChoice(NamedTuple):
    """How many blocks of a sequence are attended: all of the `oldest` and the `newest`, which
    include one that may be filled in part, and `best` of the others; `blocks` in all.
    """

    blocks: int
    oldest: int
    newest: int
    best: int

    @classmethod
    def of(cls, settings: VllmSettings, length: int, block_tokens: int) -> Self | None:
        """Of a context of this length; None where all are attended."""
        found = search_range(settings, length, block_tokens)
        if found is None:
            return None
        first, count, top_k = found
        blocks, oldest = -(-length // block_tokens), first // block_tokens
        newest = max(1, blocks - oldest - count // block_tokens)  # the new token is in the last
        best = -(-top_k // block_tokens)
        return cls(blocks, oldest, newest, best) if oldest + newest + best < blocks else None

    @property
    def attended(self) -> int:
        """Blocks that a KV head attends."""
        return self.oldest + self.newest + self.best


class SequenceRow(NamedTuple):
    """A sequence of a step: its row, its query tokens begin..end - 1, its length, whether it
    computes its prompt.
    """

    row: int
    begin: int
    end: int
    length: int
    is_prompt: bool


_TOKEN, _ROW, _ATTENDED = 5, 6, 7  # columns behind the five numbers that `choose_listed` takes


@dataclass(frozen=True, slots=True)
class PageDecodes:
    """Decoding sequences whose blocks are chosen, S of them.

    rows: of the step. choices: of each. lengths: of each. numbers: [S, 8] int64 on the device.
    tables: of each its physical blocks [blocks] int64 on the device. block_tokens: of a block.
    """

    rows: list[int]
    choices: list[BlockChoice]
    lengths: list[int]
    numbers: Tensor
    tables: list[Tensor]
    block_tokens: int

    @property
    def tokens(self) -> Tensor:
        """[S] int64 of the step, on the device."""
        return self.numbers[:, _TOKEN]

    @property
    def device_rows(self) -> Tensor:
        """[S] int64 rows of the step, on the device."""
        return self.numbers[:, _ROW]

    @property
    def attended(self) -> Tensor:
        """[S] int32 tokens that a KV head attends, on the device."""
        return self.numbers[:, _ATTENDED].int()

    def attended_by(self, place: int) -> int:
        """Tokens that a KV head of one of the sequences attends."""
        choice = self.choices[place]
        return self.lengths[place] - self.block_tokens * (choice.blocks - choice.attended)

    @property
    def width(self) -> int:
        """The most blocks that a KV head attends."""
        return max(one.attended for one in self.choices)


@dataclass(frozen=True, slots=True)
class PageStep:
    """A step's sequences by how they are attended.

    decodes: None for none. whole: lengths of the other decoding ones. prompt_tokens: of all.
    longest: of the sequences that are not in `decodes`, 0 for none.
    """

    decodes: PageDecodes | None
    whole: list[int]
    prompt_tokens: int
    longest: int

    @classmethod
    def of(
        cls,
        sequences: Sequence[SequenceRow],
        block_table: Tensor,
        block_tokens: int,
        settings: VllmSettings,
    ) -> Self:
        """Sort the sequences of a step.

        Args:
            block_table: [rows, blocks] int32 on the device.
        """
        chosen, whole, prompts, longest = list[tuple[SequenceRow, BlockChoice]](), [], 0, 0
        for one in sequences:
            is_prompt = one.is_prompt or one.end - one.begin > 1
            choice = None if is_prompt else BlockChoice.of(settings, one.length, block_tokens)
            if choice is not None:
                chosen.append((one, choice))
                continue
            longest = max(longest, one.length)
            if is_prompt:
                prompts += one.end - one.begin
            else:
                whole.append(one.length)
        decodes = _decodes(chosen, block_table, block_tokens) if chosen else None
        return cls(decodes, whole, prompts, longest)

    def count(self, counts: StepCounts) -> None:
        """Count the step of one layer."""
        entries = sum(self.whole)
        counts.add(
            decodes=len(self.whole),
            context_entries=entries,
            read_entries=entries,
            prompt_tokens=self.prompt_tokens,
        )
        if self.decodes is None:
            return
        size = self.decodes.block_tokens
        for length, choice in zip(self.decodes.lengths, self.decodes.choices, strict=True):
            searched = size * (choice.blocks - choice.oldest - choice.newest)
            counts.add(
                decodes=1,
                searched_decodes=1,
                context_entries=length,
                searched_entries=searched,
                read_entries=length - searched + size * choice.best,
            )


def _decodes(
    chosen: list[tuple[SequenceRow, BlockChoice]], block_table: Tensor, block_tokens: int
) -> PageDecodes:
    numbers = []
    for one, choice in chosen:
        # The last block is attended behind all others, so that it is not among those to choose of.
        listed = 0, 0, choice.blocks - 1, choice.newest - 1, choice.attended - 1
        unfilled = choice.blocks * block_tokens - one.length
        numbers.append([*listed, one.begin, one.row, choice.attended * block_tokens - unfilled])
    return PageDecodes(
        [one.row for one, _ in chosen],
        [choice for _, choice in chosen],
        [one.length for one, _ in chosen],
        staged(torch.tensor(numbers), block_table.device),
        [block_table[one.row, : choice.blocks].long() for one, choice in chosen],
        block_tokens,
    )
