"""Block-sparse prefill: some queries of each block choose the key blocks that all of them read.

    queries that choose -> their exact weights -> key blocks of most weight -> attention over these
    a query that judges -> its exact output -> the error of what was read -> share of the next chunk

A query block and a KV head read the first key block, the last one before themselves, their own
tokens, and as many others as leave out no more than a share of the sampled weights. That share is
larger or smaller for the next chunk, by the error that the last one had.

Sources: MInference (Jiang et al. 2024) for blocks that are estimated from some queries, XAttention
(Xu et al. 2025) for a share of the weights in the place of a fixed count. Beside them another query
of every block measures the loss.
"""

from __future__ import annotations

from collections.abc import Iterable
from copy import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hybrid_kv.errors import ConfigError
from hybrid_kv.ops import Ops
from hybrid_kv.types import KEY_BLOCK, BlockMask, Needs, PartialAttention

CHOOSING = 4
"""Queries of a block that choose. At the same error four times as many read 1 and 5% fewer blocks
(two texts, docs/lab.md), and cost four times as much."""
_BLOCK_ROWS, _MOST_TOKENS, _LEAST_TOKENS = 384, 128, 32
"""Queries, all query heads of a KV head together, that share a packed tile; and tokens of them."""
_FIRST_SHARE, _LEAST_SHARE, _MOST_SHARE = 0.05, 0.001, 0.5
"""Of the weights, what is left out: at first, at least and at most."""
_FASTER = 2.0
"""By which the share may change from one chunk to the next."""
_GOLDEN = 0.6180339887
"""Multiples of it, without their whole part, lie evenly between 0 and 1 however many there are."""


@dataclass(frozen=True, slots=True)
class PrefillLoss:
    """The reads and the loss of block-sparse prefill, over sequences and layers.

    density: share of the key blocks before a query that were read. error: mean relative distance
    of a head's output from exact attention's, over `queries` sampled ones of each head.
    worst_error: of the KV head with the largest mean, of layer `worst_layer`.
    """

    density: float
    error: float
    worst_error: float
    worst_layer: int
    queries: int


class SparsePrefill:
    """Block-sparse attention of one sequence's prompt in one layer, chunk by chunk.

    errors: [Hkv] of the sampled queries that judged, `queries` of them for each KV head, summed.
    read_blocks, blocks: key blocks before a query block, of all KV heads: those read, and all.

    Args:
        error: mean relative error of a head's output to aim at.
        device: of the layer.
    """

    def __init__(self, error: float, num_kv_heads: int, device: torch.device) -> None:
        self._aim = error
        self._shares = torch.full((num_kv_heads,), _FIRST_SHARE, device=device)
        self.errors = torch.zeros(num_kv_heads, device=device)
        self.read_blocks = torch.zeros((), dtype=torch.int64, device=device)
        self.queries = self.blocks = 0

    def branch(self) -> SparsePrefill:
        """One that has seen the same, and goes on alone."""
        return copy(self)  # tensors are replaced, never written to

    def attend(
        self, ops: Ops, q: Tensor, k: Tensor, v: Tensor, *, scale: float, softcap: float | None
    ) -> PartialAttention:
        """Causal attention of the last T positions over N, as `reference.attend_causal`.

        Args:
            q: [Hq, T, D]. k, v: [Hkv, N, D], oldest first.

        Returns:
            out [1, Hq, T, D], lse [1, Hq, T].
        """
        new, old = q.shape[1], k.shape[1] - q.shape[1]
        size = query_block(q.shape[0] // k.shape[0])
        if new <= 2 * CHOOSING or old + new - 1 < 2 * KEY_BLOCK:  # to choose costs more
            return ops.attend_causal(q[None], k[None], v[None], scale=scale, softcap=softcap)
        with torch.no_grad():
            sampled = SampledQueries(ops, q, k, v, size, scale=scale, softcap=softcap)
            listed = self.listed(sampled)
        mask = BlockMask(listed[None], size)
        part = ops.attend_blocks(q[None], k[None], v[None], mask, scale=scale, softcap=softcap)
        with torch.no_grad():
            self._learn(sampled, listed, part.out[0])
        return part

    def listed(self, sampled: SampledQueries) -> Tensor:
        """[Hkv, query blocks, key blocks] bool: which of them are read."""
        masses, past = sampled.masses, sampled.past
        order = masses.clone()
        order[..., 0] = torch.inf
        last = (past - 1).clamp_min(0).expand(masses.shape[:2])[..., None]
        order.scatter_(-1, last, torch.inf)
        order = order.argsort(-1, descending=True)
        ranked = masses.gather(-1, order)
        before = ranked.cumsum(-1) - ranked
        wanted = masses.sum(-1, keepdim=True) - self._shares[:, None, None]
        # A key that is not a number gives weights that are none: then all is read, and seen.
        read = ~(before >= wanted)
        read[..., :2] = True
        listed = torch.zeros_like(read).scatter_(-1, order, read)
        return listed & (torch.arange(masses.shape[-1], device=past.device) < past[:, None])

    def _learn(self, sampled: SampledQueries, listed: Tensor, out: Tensor) -> None:
        """Takes note of what was read and of the error, and sets the share of the next chunk.

        No thread waits for a device: all sums stay there.
        """
        got, exact = out[:, sampled.judging].float(), sampled.exact
        apart = (got - exact).norm(dim=-1) / exact.norm(dim=-1).clamp_min(1e-12)
        error = apart.mean(-1).unflatten(0, (listed.shape[0], -1)).mean(-1)
        self.errors = self.errors + error * sampled.count
        self.read_blocks = self.read_blocks + listed.sum()
        self.queries += sampled.count
        self.blocks += sampled.blocks * listed.shape[0]
        change = (self._aim / error).clamp(1 / _FASTER, _FASTER)
        self._shares = (self._shares * change).clamp(_LEAST_SHARE, _MOST_SHARE)


def check_sparse(needs: Needs, num_layers: int) -> None:
    """Raises ConfigError where evidence can only come from attention to the whole prompt, or a
    model has no layers of full attention.
    """
    if needs.column_sums:
        raise ConfigError(
            "prefill must be 'exact' for a method that needs the weights of all prompt tokens; "
            "sparse prefill leaves some out"
        )
    if not num_layers:
        raise ConfigError(
            "prefill must be 'exact' for a model without layers of full attention; leave it out"
        )


def query_block(group: int) -> int:
    """Tokens of a query block, for so many query heads of a KV head."""
    return min(_MOST_TOKENS, max(_LEAST_TOKENS, _BLOCK_ROWS // group))


class SampledQueries:
    """Exact attention of some queries of each block of a chunk.

    count: of the query blocks. past: [query blocks] key blocks that end before each; blocks: their
    sum. masses: [Hkv, query blocks, key blocks] softmax weights that these got from the queries
    that choose, 0 where they do not count. judging: [query blocks] the token of the query that
    judges. exact: [Hq, query blocks, Dv] its output.
    """

    def __init__(self, ops: Ops, q: Tensor, k: Tensor, v: Tensor, size: int, **logits: Any) -> None:
        new, device, old = q.shape[1], q.device, k.shape[1] - q.shape[1]
        firsts = torch.arange(0, new, size, device=device)
        lengths = (new - firsts).clamp_max(size)
        self.past = (old + firsts) // KEY_BLOCK
        self.count = len(firsts)
        self.blocks = sum((old + first) // KEY_BLOCK for first in range(0, new, size))
        parts = torch.arange(CHOOSING, device=device) * 2 + 1
        choosing = firsts[:, None] + parts * lengths[:, None] // (2 * CHOOSING)
        # Spread evenly over the places in a block, however many blocks a chunk has.
        turns = (torch.arange(len(firsts), device=device) + old // size) * _GOLDEN % 1.0
        self.judging = firsts + (turns * lengths).long()
        chosen, judged = choosing.flatten(), self.judging
        masses = ops.block_masses(q[None, :, chosen], k[None], old + chosen, **logits)[0]
        by_block = masses.unflatten(1, (-1, CHOOSING)).unflatten(0, (k.shape[0], -1))
        counts = torch.arange(masses.shape[-1], device=device) < self.past[:, None]
        self.masses = by_block.mean((1, 3)) * counts
        given = q[None, :, judged], k[None], v[None], old + judged
        self.exact = ops.attend_at(*given, **logits).out[0].float()


def prefill_loss(by_layer: Iterable[tuple[int, SparsePrefill]]) -> PrefillLoss | None:
    """The loss over sequences and layers; None where nothing was measured."""
    known = [(layer, one) for layer, one in by_layer if one.queries]
    if not known:
        return None
    queries = sum(one.queries for _, one in known)
    errors = sum(float(one.errors.mean()) for _, one in known)
    worst, layer = max((float(one.errors.max()) / one.queries, layer) for layer, one in known)
    blocks = sum(one.blocks for _, one in known)
    density = sum(int(one.read_blocks) for _, one in known) / blocks
    return PrefillLoss(density, errors / queries, worst, layer, queries)
