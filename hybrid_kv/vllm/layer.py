"""Attention of one layer over the blocks of vLLM's cache: prompts, decodes, and its index.

    prompt  ─► vLLM's kernel over a scratch; the index learns and encodes
    decode  ─► the engine: search by codes, then sinks, window, the found, the unread by moments

The index is learned from a long prompt, and again from a longer one. Its codes belong to slots,
which sequences share, so that all of them have one. The estimate of unread entries is made from
moments of the beginnings of sequences.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hybrid_kv.errors import NonFiniteError
from hybrid_kv.index._sketch_head import SketchMaker, plan_of
from hybrid_kv.ops.native.library import Pool
from hybrid_kv.ops.native.paged_cache import (
    BlockSlice,
    PagedAttention,
    PagedDecode,
    PagedSketch,
    PagedSteps,
    SearchRange,
)
from hybrid_kv.ops.tail import SAMPLES, Tail
from hybrid_kv.types import PartialAttention
from hybrid_kv.vllm.audit import AuditTurns, ExactLook, log_sum
from hybrid_kv.vllm.batch import Prompts, Scratch, SearchedDecodes, StepBatch, StepSequence, write
from hybrid_kv.vllm.counters import StepCounts

MOST = 32
"""Beginnings of one layer whose moments are kept: those used last."""

RowsOf: TypeAlias = Callable[[Tensor], Tensor]
"""Rows of the keys [n, Hkv] of a sequence's tokens [n] int64."""


class PrefixMoments:
    """Moments of one layer, by the block where a beginning ends.

    Args:
        blocks: [N, Hkv, 2, block, D].
    """

    def __init__(self, blocks: Tensor) -> None:
        self._blocks = blocks
        self._has = np.zeros(len(blocks), bool)
        self._kept: dict[int, Tail] = {}  # the one used last at the end

    def __len__(self) -> int:
        return len(self._kept)

    def overwrite(self, slots: npt.NDArray[np.int64]) -> None:
        """Take note that keys in these slots are others than before."""
        blocks = np.unique(slots // self._blocks.shape[3])
        for block in blocks[self._has[blocks]]:
            self._drop(int(block))

    def of(self, searched: SearchRange, rows_of: RowsOf) -> Tail | None:
        """Moments for the searched part of a sequence, of most of its entries at least; None where
        it has no full block.
        """
        tokens = self._blocks.shape[3]
        table = searched.table[: (searched.first + searched.num_tokens) // tokens]
        if not len(table) or len(table) * tokens <= searched.first:
            return None
        known = np.flatnonzero(self._has[table])
        if len(known):
            block = int(table[known[-1]])
            kept = self._kept.pop(block)
            self._kept[block] = kept
            if not kept.is_outgrown(len(table) * tokens - searched.first):
                return kept
        new = self._learn(searched.first, len(table) * tokens, rows_of)
        if len(known):
            self._drop(block)
        elif len(self._kept) >= MOST:
            self._drop(next(iter(self._kept)))
        self._kept[int(table[-1])] = new
        self._has[table[-1]] = True
        return new

    def _learn(self, first: int, end: int, rows_of: RowsOf) -> Tail:
        some = torch.linspace(first, end - 1, min(SAMPLES, end - first), dtype=torch.float64).long()
        rows, dim = rows_of(some), self._blocks.shape[-1]
        memory = self._blocks.view(-1, dim)
        keys = memory.index_select(0, rows.T.flatten()).unflatten(0, (-1, len(some)))
        below = rows.T.flatten() + self._blocks.shape[3]
        values = memory.index_select(0, below).unflatten(0, (-1, len(some)))
        return replace(Tail.of(keys, values), count=end - first)

    def _drop(self, block: int) -> None:
        del self._kept[block]
        self._has[block] = False


_log = logging.getLogger("vllm.hybrid_kv")

CODE_BYTES = 48
"""Bytes of a key's code at 128 channels. More than where a context has an index of its own: that of
another text needs them."""
LEARN_TOKENS = 2048
"""A shorter prompt says too little of a head's keys."""
RELEARN = 1.25
"""The index is learned again from a context of so many times the tokens. The text does not matter,
the positions do: of the exact best keys at 6,144 tokens it found .99 when it was learned from
another text of this length, .94 from 4,096 tokens, .73 from 2,048 (SmolLM2, 2% of the keys,
three candidates each)."""
_LEARN_KEYS = 4096
"""Keys of a prompt that are learned from: a chunk of it should not wait."""
_SAMPLES = 512
"""Positions of a prompt whose queries are learned from."""


class Kernel(NamedTuple):
    """vLLM's functions for a layer: `attend` a prompt, and `reshape_and_cache` for its layout."""

    attend: Any
    reshape_and_cache: Any
    isa: str


class PagedLayer:
    """Attention of one layer over vLLM's blocks, and the index of its keys.

    Args:
        scale, softcap: what turns a dot product into a logit.
        scratch: shared by the layers of a process.
        pool: the engine's threads; None for the calling one.
        sinks: [Hq] logits that take a share and have no value (gpt-oss); None for none.
        counts: where steps are counted; None for a place of its own.
        turns: of the audit; None for none.
    """

    def __init__(
        self,
        scale: float,
        softcap: float,
        scratch: Scratch,
        pool: Pool | None,
        sinks: Tensor | None = None,
        counts: StepCounts | None = None,
        turns: AuditTurns | None = None,
    ) -> None:
        self._how: dict[str, Any] = {"scale": scale, "softcap": softcap or None, "pool": pool}
        self._scratch, self._pool, self._sinks = scratch, pool, sinks
        self.counts = StepCounts() if counts is None else counts
        self._turns, self._number, self._step = turns, 0 if turns is None else turns.join(), 0
        self._index: PagedSketch | None = None
        self._queries, self._place = torch.empty(0), 0  # the latest, and the next one's place
        self._learned = 0  # tokens of the context that the index was learned from
        self.moments = PrefixMoments(torch.empty(0, 1, 2, 1, 1))
        """For the estimate of what a step does not read."""
        self._paged: PagedAttention
        self._steps: PagedSteps
        self._address = 0

    @property
    def index(self) -> PagedSketch | None:
        """None before the first long prompt."""
        return self._index

    def write(self, blocks: Tensor, key: Tensor, value: Tensor, slots: Tensor) -> None:
        """Store key and value [T, Hkv, D] in slots [T] int64 of blocks [N, Hkv, 2, block, D]."""
        self._follow(blocks)
        write(blocks, key, value, slots)
        if self._index is not None:
            self._index.overwrite(slots.numpy())
        self.moments.overwrite(slots.numpy())

    def forward(
        self, blocks: Tensor, query: Tensor, output: Tensor, batch: StepBatch, kernel: Kernel
    ) -> None:
        """Attend the step's sequences, whose keys are written.

        Args:
            query, output: [T, Hq, D].
        """
        self._follow(blocks)
        found: dict[int, Tensor] = {}  # rows of what was read beside sinks and window, by sequence
        if batch.searched is not None:
            found = self._attend_searched(blocks, query, output, batch, batch.searched)
        for one in batch.whole:
            self.attend_whole(blocks, query, output, batch, one)
        if self._turns is not None:
            self._audit(blocks, query, output, batch, found, self._turns)
        if batch.prompts is not None:
            self._attend_prompts(blocks, query, output, batch.prompts, kernel)

    def _attend_prompts(
        self, blocks: Tensor, query: Tensor, output: Tensor, prompts: Prompts, kernel: Kernel
    ) -> None:
        keys, key_cache, value_cache = self._scratch.pack(
            blocks, prompts.contexts, kernel.reshape_and_cache, kernel.isa
        )
        self.counts.add(prompt_tokens=len(prompts.tokens))
        own, out = query[prompts.tokens], torch.empty_like(output[prompts.tokens])
        kernel.attend(own, key_cache, value_cache, out, prompts)
        output[prompts.tokens] = out
        begin = 0
        for number, one in enumerate(prompts.sequences):
            first, end = int(prompts.starts[number]), int(prompts.starts[number + 1])
            self.learn(blocks, keys[begin : begin + one.length], own[first:end])
            self._encode(one, one.length // 16 * 16)
            begin += one.length

    def learn(self, blocks: Tensor, keys: Tensor, queries: Tensor) -> None:
        """Learn the index from keys [n, Hkv, D] and the last queries [t, Hq, D] of a prompt."""
        self._follow(blocks)
        if len(keys) < LEARN_TOKENS:
            return
        self._queries = queries[:: -(-len(queries) // _SAMPLES)].clone()
        if len(keys) >= RELEARN * self._learned:
            self._learn(blocks, keys[:: -(-len(keys) // _LEARN_KEYS)], len(keys))

    def _learn(self, blocks: Tensor, keys: Tensor, length: int) -> None:
        """Learn from some keys [n, Hkv, D] of a context of this length, and the latest queries."""
        heads, dim = keys.shape[1:]
        plan = plan_of(CODE_BYTES, dim)
        queries = self._queries.unflatten(1, (heads, -1)).float()
        keys = keys.float()
        # Without an index all is attended, as where keys are not finite; a later context may do.
        if plan is None or not bool(torch.isfinite(queries.sum() + keys.sum())):
            _log.warning("contexts are attended as a whole: no index can be learned from a prompt")
            return
        maps = [
            SketchMaker(keys[:, head], queries[:, head].flatten(0, 1)).map_of(plan)
            for head in range(heads)
        ]
        self._index, self._learned = PagedSketch(blocks, maps), length
        self.counts.add(indexes=1)

    def _learn_on(self, blocks: Tensor, batch: StepBatch, decodes: SearchedDecodes) -> None:
        """Learn again where a context has grown by decoding, from it and the latest queries."""
        longest = max(decodes.sequences, key=lambda one: one.length)
        if self._index is None or longest.length < RELEARN * self._learned:
            return
        some = torch.linspace(0, longest.length - 1, _LEARN_KEYS, dtype=torch.float64).long()
        rows = batch.shape.rows(longest.table, some)
        keys = blocks.view(-1, blocks.shape[-1]).index_select(0, rows.flatten())
        self._learn(blocks, keys.view(*rows.shape, -1), longest.length)

    def _encode(self, one: StepSequence, length: int) -> bool:
        """Bring the codes of a sequence up to date; whether there are any."""
        if self._index is None:
            return False
        try:
            self._index.encode(one.table, length, self._pool)
        except NonFiniteError as error:
            _log.warning("a sequence is attended as a whole: %s", error)
            return False
        return True

    def _attend_searched(
        self,
        blocks: Tensor,
        query: Tensor,
        output: Tensor,
        batch: StepBatch,
        decodes: SearchedDecodes,
    ) -> dict[int, Tensor]:
        """Rows [Hkv, G, K] that were found, by the place of the sequence; others are whole."""
        self._remember(query[decodes.tokens])
        self._learn_on(blocks, batch, decodes)
        places, steps = [], []
        for place, (one, near, own) in enumerate(
            zip(decodes.sequences, decodes.near, decodes.searched, strict=True)
        ):
            if self._encode(one, own.first + own.num_tokens):
                tail = self.moments.of(own, partial(batch.shape.rows, one.table))
                places.append(place)
                steps.append(PagedDecode(near, own, tail))
        whole, found = set(range(len(decodes.sequences))) - set(places), dict[int, Tensor]()
        if self._index is not None and steps:
            tokens = decodes.tokens[places]
            own_queries = query[tokens].unflatten(1, (batch.shape.num_kv_heads, -1))
            part, failed = self._steps.attend(own_queries, steps, self._index, **self._how)
            output[tokens] = self._finished(part).to(output.dtype)
            whole |= {places[at] for at in failed}
            found = dict(zip(places, self._steps.found, strict=True))
        for place, step in zip(places, steps, strict=True):
            if place not in whole:
                self._count_searched(decodes.sequences[place], step)
        for place in sorted(whole):
            found.pop(place, None)
            self.attend_whole(blocks, query, output, batch, decodes.sequences[place])
        return found

    def _count_searched(self, one: StepSequence, step: PagedDecode) -> None:
        count, top_k = step.searched.num_tokens, step.searched.top_k
        self.counts.add(
            decodes=1,
            searched_decodes=1,
            estimated_decodes=step.tail is not None,
            context_entries=one.length,
            searched_entries=count,
            read_entries=one.length - count + top_k,
        )

    def _finished(self, part: PartialAttention) -> Tensor:
        """[S, Hq, D] of attention [S, Hkv, G, D], with the weights of sinks that have no value."""
        out, lse = part.out.flatten(-3, -2), part.lse.flatten(-2)
        if self._sinks is None:
            return out
        return out * (lse - self._sinks.float()).sigmoid()[..., None]

    def _remember(self, queries: Tensor) -> None:
        """Put decoding queries [S, Hq, D] in the place of the oldest ones."""
        if len(self._queries):
            places = (self._place + torch.arange(len(queries))) % len(self._queries)
            self._queries[places] = queries
            self._place += len(queries)

    def attend_whole(
        self, blocks: Tensor, query: Tensor, output: Tensor, batch: StepBatch, one: StepSequence
    ) -> None:
        """Write the attention of one sequence's new token over all its entries to its place."""
        own = query[one.begin].view(batch.shape.num_kv_heads, -1, query.shape[-1])
        pieces = batch.shape.pieces(one.table, 0, one.length)
        part = _merged(self._paged.attend(own.contiguous(), pieces, **self._how))
        output[one.begin] = self._finished(part).to(output.dtype)
        self.counts.add(decodes=1, context_entries=one.length, read_entries=one.length)

    def _audit(
        self,
        blocks: Tensor,
        query: Tensor,
        output: Tensor,
        batch: StepBatch,
        found: dict[int, Tensor],
        turns: AuditTurns,
    ) -> None:
        """Compare a sequence of the step with exact attention where it is this layer's turn."""
        near, sequences = list[list[BlockSlice]](), batch.whole
        if batch.searched is not None:
            near, sequences = batch.searched.near, [*batch.searched.sequences, *batch.whole]
        self._step += bool(sequences)
        place = turns.looked_at(self._number, self._step, len(sequences)) if sequences else None
        if place is None:
            return
        one = sequences[place]
        own = query[one.begin].view(batch.shape.num_kv_heads, -1, query.shape[-1]).contiguous()
        pieces = batch.shape.pieces(one.table, 0, one.length)
        exact = _merged(self._paged.attend(own, pieces, **self._how))
        read = near[place] if place in found else pieces
        seen = _merged(self._paged.attend(own, read, **self._how)).lse
        if place in found:
            rows = found[place]
            keys = blocks.view(-1, blocks.shape[-1])[rows.clamp_min(0)]
            scale, softcap = self._how["scale"], self._how["softcap"]
            seen = seen.logaddexp(log_sum(own, keys, rows >= 0, scale, softcap or 0.0))
        exact_out = self._finished(exact).to(output.dtype)
        look = ExactLook.of(seen, exact, output[one.begin], exact_out.float())
        # One request that computes not-a-number would leave the sums of all others so.
        if math.isfinite(look.missed_mass + look.output_error):
            self.counts.add(
                audit_looks=1,
                audit_missed_mass=look.missed_mass,
                audit_output_error=look.output_error,
            )

    def _follow(self, blocks: Tensor) -> None:
        """Forget what was known of other memory: vLLM gives a layer its cache after a trial run."""
        if blocks.data_ptr() != self._address:
            self._index, self._learned = None, 0
            self._queries = torch.empty(0)
            self.moments, self._paged = PrefixMoments(blocks), PagedAttention(blocks)
            self._steps = PagedSteps(blocks)
            self._address = blocks.data_ptr()


def _merged(parts: PartialAttention) -> PartialAttention:
    """Attention over all entries of parts, out [P, ..., D] and lse [P, ...]."""
    total = parts.lse.logsumexp(0)
    shares = (parts.lse - total).exp()[..., None]
    return PartialAttention((shares * parts.out).sum(0), total)
