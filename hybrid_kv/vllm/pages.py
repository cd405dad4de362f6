"""Decoding on a GPU: the blocks of vLLM's cache that a new token attends, by their digests (Quest).

    new keys ─► the smallest and the largest key of each block and head, by physical block
    decode   ─► for each KV head sinks, window and the blocks of the highest bounds
             ─► vLLM's own kernel, to which each KV head of a sequence is a sequence of one head

Digests belong to physical blocks and begin anew with a block's first slot. So block reuse, shared
prefixes, preemption and aborts need nothing. Nothing here waits for the device but the audit.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple, Self, TypeAlias

import torch
from torch import Tensor

from hybrid_kv.errors import BackendUnavailable, DeviceMemoryError, IntegrityError
from hybrid_kv.ops.dispatch import Ops
from hybrid_kv.ops.reference import attend
from hybrid_kv.types import PagedKV, PartialAttention
from hybrid_kv.vllm.audit import AuditTurns, ExactLook
from hybrid_kv.vllm.counters import StepCounts
from hybrid_kv.vllm.page_step import PageDecodes


class HeadBlocks(NamedTuple):
    """A layer's cache in blocks of one head: block b of head h is `by_block * b + by_head * h`.

    cache: [blocks, 1, block, 2 D], in place; blocks of heads that lie among each other overlap.
    """

    cache: Tensor
    by_block: int
    by_head: int

    @classmethod
    def of(cls, kv_cache: Tensor) -> Self:
        """Of vLLM's [blocks, Hkv, block, 2 D], whatever the order of its axes in memory.

        Raises:
            BackendUnavailable: no number says where a block of a head is.
        """
        blocks, heads, tokens, content = kv_cache.shape
        steps = [
            step for step, size in zip(kv_cache.stride()[:2], (blocks, heads), strict=True)
            if size > 1  # others may be anything
        ]  # fmt: skip
        unit = min(steps, default=tokens * content)
        by_block, by_head = (
            step // unit if size > 1 else 0
            for step, size in zip(kv_cache.stride()[:2], (blocks, heads), strict=True)
        )
        if any(step % unit for step in steps):
            raise BackendUnavailable(
                "hybrid_kv inside vLLM needs blocks and heads of the cache in steps of which one "
                f"is a multiple of the other, got {kv_cache.stride()}; leave out hybrid_kv's "
                "settings"
            )
        count = (blocks - 1) * by_block + (heads - 1) * by_head + 1
        strides = unit, unit, *kv_cache.stride()[2:]
        return cls(kv_cache.as_strided((count, 1, tokens, content), strides), by_block, by_head)

    def numbers(self, blocks: Tensor) -> Tensor:
        """[..., Hkv, n] int32 of physical blocks [..., Hkv, n] int64 of each head."""
        head = torch.arange(blocks.shape[-2], device=blocks.device)[:, None]
        return (self.by_block * blocks + self.by_head * head).int()


class BlockDigests:
    """Smallest and largest key of each physical block and KV head.

    Args:
        kv_cache: vLLM's [blocks, Hkv, block, 2 D] of a layer.

    Raises:
        DeviceMemoryError: there is no room for them.
    """

    def __init__(self, kv_cache: Tensor) -> None:
        blocks, heads, self._tokens, content = kv_cache.shape
        shape = heads, blocks + 1, content // 2  # keys of padding go to the last
        try:
            self.key_min = kv_cache.new_full(shape, torch.inf)
            self.key_max = kv_cache.new_full(shape, -torch.inf)
            keys = kv_cache[..., : content // 2]  # what lies there counts until it is written over
            self.key_min[:, :blocks] = keys.amin(2).transpose(0, 1)
            self.key_max[:, :blocks] = keys.amax(2).transpose(0, 1)
        except torch.OutOfMemoryError:
            each = 2 * math.prod(shape) * kv_cache.itemsize / 2**20
            raise DeviceMemoryError(
                f"digests of keys must fit beside the KV cache, {each:.0f} MiB a layer, got no "
                "room for them; lower gpu_memory_utilization, or leave out hybrid_kv's settings"
            ) from None

    def write(self, key: Tensor, slots: Tensor) -> None:
        """Take note of keys [T, Hkv, D] in slots [T] int64; a negative slot is padding."""
        there, last = slots >= 0, self.key_min.shape[1] - 1
        blocks = torch.where(there, slots // self._tokens, last)
        begun = torch.where(there & (slots % self._tokens == 0), blocks, last)
        rows = blocks[None, :, None].expand(key.shape[1], -1, key.shape[2])
        new = key.transpose(0, 1).to(self.key_min.dtype)
        self.key_min.index_fill_(1, begun, torch.inf).scatter_reduce_(1, rows, new, "amin")
        self.key_max.index_fill_(1, begun, -torch.inf).scatter_reduce_(1, rows, new, "amax")


HeadKernel: TypeAlias = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""vLLM's kernel over sequences of one KV head: queries [n, G, D], cache [blocks, 1, block, 2 D],
tables [n, width] int32 and lengths [n] int32 to outputs [n, G, D]. Row `s * Hkv + h` is head h of
sequence s."""


class PageLayer:
    """Decode attention of one layer over chosen blocks.

    Args:
        scale, softcap: what turns a dot product into a logit; softcap 0 for none. For the audit.
        ops: what scores digests.
        counts: where steps are counted.
        turns: of the audit; None for none.
    """

    def __init__(
        self,
        scale: float,
        softcap: float,
        ops: Ops,
        counts: StepCounts,
        turns: AuditTurns | None = None,
    ) -> None:
        self._scale, self._softcap = scale, softcap or None
        self._ops, self.counts = ops, counts
        self._turns, self._number, self._step = turns, 0 if turns is None else turns.join(), 0
        self._address = 0
        self.digests: BlockDigests
        """There from the first write on."""

    def write(self, kv_cache: Tensor, key: Tensor, slots: Tensor) -> None:
        """Take note of keys [>= T, Hkv, D] that are new in slots [T] of vLLM's cache."""
        self._follow(kv_cache)
        self.digests.write(key[: len(slots)], slots.long())

    def forward(
        self,
        kv_cache: Tensor,
        query: Tensor,
        output: Tensor,
        decodes: PageDecodes,
        kernel: HeadKernel,
        sinks: Tensor | None = None,
    ) -> None:
        """Attend the decoding sequences of a step, whose keys are written.

        Args:
            query, output: [T, Hq, D].
            sinks: [Hq] logits of the kernel that have no value, for the audit; None for none.

        Raises:
            IntegrityError: the step was described for blocks of another size.
        """
        self._follow(kv_cache)
        heads, blocks = kv_cache.shape[1], HeadBlocks.of(kv_cache)
        if kv_cache.shape[2] != decodes.block_tokens:
            raise IntegrityError(
                f"a step's blocks must have the tokens of the cache's, {kv_cache.shape[2]}, got "
                f"{decodes.block_tokens}; please report this"
            )
        own = query[decodes.tokens].unflatten(1, (heads, -1))
        chosen = [self.choose(kv_cache, q, decodes, place) for place, q in enumerate(own)]
        width = decodes.width
        tables = torch.stack(
            [
                torch.nn.functional.pad(blocks.numbers(one), (0, width - one.shape[1]))
                for one in chosen
            ]
        )
        lengths = decodes.attended.repeat_interleave(heads)
        out = kernel(own.flatten(0, 1), blocks.cache, tables.flatten(0, 1), lengths)
        output[decodes.tokens] = out.view(len(own), -1, out.shape[-1]).to(output.dtype)
        if self._turns is not None:
            self._audit(kv_cache, own, output, decodes, chosen, sinks, self._turns)

    def choose(self, kv_cache: Tensor, q: Tensor, decodes: PageDecodes, place: int) -> Tensor:
        """Physical blocks [Hkv, n] int64 that a sequence attends, the newest last.

        Args:
            q: [Hkv, G, D] of its new token.
            place: of the sequence among those that decode.
        """
        choice, table = decodes.choices[place], decodes.tables[place]
        k, v = kv_cache.transpose(0, 1).chunk(2, -1)
        digests = self.digests
        pages = PagedKV(k, v, table[:0], digests.key_min, digests.key_max)
        best = self._ops.choose_listed(
            *(q, pages, table[:-1], decodes.numbers[place, :5]),
            oldest=choice.oldest,
            most=choice.attended - 1,
        )
        return torch.cat([best[:, 0], table[-1:].expand(len(q), 1)], 1)

    def _audit(
        self,
        kv_cache: Tensor,
        queries: Tensor,
        output: Tensor,
        decodes: PageDecodes,
        chosen: list[Tensor],
        sinks: Tensor | None,
        turns: AuditTurns,
    ) -> None:
        """Compare a sequence of the step with exact attention where it is this layer's turn."""
        self._step += 1
        place = turns.looked_at(self._number, self._step, len(chosen))
        if place is None:
            return
        q, table = queries[place], decodes.tables[place]
        every = table.expand(len(q), -1)
        exact = self._attended(kv_cache, q, every, decodes.lengths[place])
        seen = self._attended(kv_cache, q, chosen[place], decodes.attended_by(place)).lse
        exact_out, lse = exact.out.flatten(0, 1), exact.lse.flatten()
        if sinks is not None:
            exact_out = exact_out * (lse - sinks.float()).sigmoid()[:, None]
        out = output[decodes.tokens[place]]
        look = ExactLook.of(seen, exact, out, exact_out.to(out.dtype).float())
        # One request that computes not-a-number would leave the sums of all others so.
        if math.isfinite(look.missed_mass + look.output_error):
            self.counts.add(
                audit_looks=1,
                audit_missed_mass=look.missed_mass,
                audit_output_error=look.output_error,
            )

    def _attended(
        self, kv_cache: Tensor, q: Tensor, blocks: Tensor, length: int
    ) -> PartialAttention:
        """Attention of q [Hkv, G, D] to the first tokens of blocks [Hkv, n], a head at a time."""
        parts = []
        for head, own in enumerate(blocks):
            k, v = kv_cache[own, head].flatten(0, 1)[:length].chunk(2, -1)
            rows = q[None, head : head + 1], k[None, None], v[None, None]
            parts.append(attend(*rows, scale=self._scale, softcap=self._softcap))
        outs, lses = zip(*parts, strict=True)
        return PartialAttention(torch.cat(outs, 1)[0], torch.cat(lses, 1)[0])

    def _follow(self, kv_cache: Tensor) -> None:
        """Forget what was known of other memory: vLLM gives a layer its cache after a trial run."""
        if kv_cache.data_ptr() != self._address:
            self.digests, self._address = BlockDigests(kv_cache), kv_cache.data_ptr()
