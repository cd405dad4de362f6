"""One layer over a paged cache as vLLM drives it: blocks are random, shared and used again."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from hybrid_kv.vllm.audit import AuditTurns
from hybrid_kv.vllm.batch import CacheShape, Prompts, Scratch, StepBatch, StepSequence
from hybrid_kv.vllm.layer import Kernel, PagedLayer
from hybrid_kv.vllm.settings import VllmSettings

HEADS, GROUP, DIM, BLOCK = 2, 3, 32, 32


@dataclass
class PagedSequence:
    """table: its blocks. k, v: [Hkv, n, D] of its tokens, as they should lie there."""

    table: list[int] = field(default_factory=list)
    k: Tensor = field(default_factory=lambda: torch.empty(HEADS, 0, DIM))
    v: Tensor = field(default_factory=lambda: torch.empty(HEADS, 0, DIM))
    blocks: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))

    @property
    def length(self) -> int:
        return self.k.shape[1]


class PagedDriver:
    """A layer, its cache with NaN in blocks that nobody has, and free blocks in a random order."""

    def __init__(
        self,
        settings: VllmSettings,
        num_blocks: int = 200,
        seed: int = 0,
        sinks: Tensor | None = None,
        turns: AuditTurns | None = None,
        softcap: float = 0.0,
    ) -> None:
        self.random = torch.Generator().manual_seed(seed)
        self.settings, self.shape = settings, CacheShape(HEADS, BLOCK)
        self.cache = torch.full((num_blocks, HEADS, 2, BLOCK, DIM), torch.nan)
        self.free = torch.randperm(num_blocks, generator=self.random).tolist()
        self.layer = PagedLayer(DIM**-0.5, softcap, Scratch(), None, sinks, turns=turns)
        self.spoiled: int | None = None  # the token of a step whose query holds NaN
        self.kernel = Kernel(self._attend, self._reshape_and_cache, "rows")

    def tokens(self, count: int, spread: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [T, Hq, D], keys and values [T, Hkv, D] of so many new tokens."""
        q, k, v = (
            torch.randn(count, heads, DIM, generator=self.random)
            for heads in (HEADS * GROUP, HEADS, HEADS)
        )
        return q * spread, k, v

    def step(self, *work: tuple[PagedSequence, int], prompts: bool | None = None) -> list[Tensor]:
        """One forward of new tokens of sequences; outputs [T, Hq, D] of each.

        prompts: whether they are prompts; None for those of more than one token.
        """
        parts, sequences, slots, first = [], [], [], 0
        for one, count in work:
            q, k, v = self.tokens(count)
            parts.append((q, k, v))
            begin = one.length
            one.k = torch.cat([one.k, k.transpose(0, 1)], 1)
            one.v = torch.cat([one.v, v.transpose(0, 1)], 1)
            while len(one.table) * BLOCK < one.length:
                one.table.append(self.free.pop())
            token = torch.arange(begin, one.length)
            slots.append(torch.tensor(one.table)[token // BLOCK] * BLOCK + token % BLOCK)
            one.blocks = np.array(one.table + [0] * 3, np.int32)  # vLLM's rows are longer
            sequences.append(StepSequence(first, first + count, one.length, one.blocks))
            first += count
        query, key, value = (torch.cat(part) for part in zip(*parts, strict=True))
        self.layer.write(self.cache, key, value, torch.cat(slots))
        if self.spoiled is not None:
            query[self.spoiled] = torch.nan
        is_prompt = [bool(prompts) if prompts is not None else count > 1 for _, count in work]
        batch = StepBatch.of(sequences, is_prompt, self.shape, self.settings, self._plan)
        output = torch.full_like(query, torch.nan)
        self.layer.forward(self.cache, query, output, batch, self.kernel)
        self.queries = list(query.split([count for _, count in work]))
        return list(output.split([count for _, count in work]))

    def give_back(self, one: PagedSequence, keep: int = 0) -> None:
        """Free the blocks of a sequence, the first `keep` left out; they lie first in line then."""
        freed = one.table[keep:]
        self.free += freed

    def _plan(self, starts: Tensor, lengths: Tensor) -> Tensor:
        return torch.empty(0)

    def _reshape_and_cache(
        self, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor, isa: str
    ) -> None:
        for rows, cache in ((k, k_cache), (v, v_cache)):
            cache[slots // BLOCK, :, slots % BLOCK] = rows

    def _attend(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, out: Tensor, prompts: Prompts
    ) -> None:
        for number, length in enumerate(prompts.lengths.tolist()):
            begin, end = prompts.starts[number : number + 2].tolist()
            table = prompts.contexts.table[number].long()
            k, v = (
                cache[table].transpose(0, 1).flatten(1, 2)[:, :length]
                for cache in (k_cache, v_cache)
            )
            out[begin:end] = attention(q[begin:end], k, v)


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Exact causal attention of the newest tokens: q [T, Hq, D] over k, v [Hkv, n, D]."""
    k, v = (one.repeat_interleave(GROUP, 0) for one in (k, v))
    logits = DIM**-0.5 * q.transpose(0, 1) @ k.mT
    token = torch.arange(k.shape[1])
    hidden = token > token[-len(q) :, None]
    return (logits.masked_fill(hidden, -torch.inf).softmax(-1) @ v).transpose(0, 1)
