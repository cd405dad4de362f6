"""Methods that keep entries, for tests: one evicts, one encodes, one weighs, one is broken."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hybrid_kv.config import Params as BaseParams
from hybrid_kv.entries import Attended, Entries
from hybrid_kv.plugins import INDEXES, Index, Method, Placement
from hybrid_kv.types import Demotion, Evidence, Needs, Read, TokenBudget


def flat_index() -> Index:
    """An exact search over cold keys."""
    kind = INDEXES["flat"]
    return kind.factory(kind.params())


class KeepsHeaviest(Method):
    """Keeps, of every head, the entries with the most weight; ragged: head h keeps h more."""

    class Params(BaseParams):
        """budget: entries of a head; sink_tokens, window_tokens: resident; offload: the rest goes
        to the cold tier, of which `top_k` are read.
        """

        budget: int = 8
        sink_tokens: int = 16
        window_tokens: int = 24
        spare_tokens: int = 0
        offload: bool = False
        top_k: int | None = None
        min_share: float | None = None

    @classmethod
    def full_budget(cls, params: Any) -> Any:
        return params.model_copy(update={"budget": 10**6})

    @property
    def needs(self) -> Needs:
        return Needs(last_queries=8)

    def seal(self, layer_idx: int, evidence: Sequence[Evidence]) -> Placement:
        own = self.params
        return Placement(
            sink_tokens=own.sink_tokens,
            window_tokens=own.window_tokens,
            rest=Demotion.ABSORB,
            offload=own.offload,
            index=flat_index if own.top_k is not None else None,
        )

    def read(self, layer_idx: int, q: Tensor) -> Read:
        own = self.params
        if not own.offload:
            return Read()
        if own.top_k is None:
            return Read(cold="all")
        return Read(cold=TokenBudget(own.top_k, min_share=own.min_share, max_tokens=10**6))

    def absorb(
        self,
        layer_idx: int,
        row: int,
        kept: Entries | None,
        left: Entries,
        seen: Evidence | None,
    ) -> Entries:
        heads, count = left.num_heads, left.lengths[0]
        mass = torch.zeros(heads, count, device=left.k.device)
        if seen is not None and count:
            start = int(left.positions[left.starts[0]])
            by_head = seen.mass().unflatten(0, (heads, -1)).sum(1)
            mass = by_head[:, start : start + count]
        flat = torch.zeros(len(left.k), device=left.k.device)
        for into, own in zip(left.split(flat), mass, strict=True):
            into.copy_(own)
        left = left.with_columns(mass=flat)
        whole = left if kept is None else kept.extended(left)
        chosen = [
            own.topk(min(len(own), self.params.budget + h)).indices
            for h, own in enumerate(whole.split("mass"))
        ]
        return whole.select(chosen, room=16)

    def after(self, layer_idx: int, attended: Attended) -> list[Entries | None]:
        return [
            kept and kept.with_columns(mass=kept.columns["mass"] + attended.mass(row))
            for row, kept in enumerate(attended.kept)
        ]


@dataclass(frozen=True, eq=False, kw_only=True)
class Halves(Entries):
    """Entries whose keys are stored as two halves: a codec without loss."""

    def read(self) -> tuple[Tensor, Tensor]:
        return torch.cat([self.columns["front"], self.columns["back"]], 1), self.v


class KeepsHalves(KeepsHeaviest):
    """Keeps everything, encoded, as the codecs do."""

    needs = Needs()  # type: ignore[assignment]

    def absorb(
        self,
        layer_idx: int,
        row: int,
        kept: Entries | None,
        left: Entries,
        seen: Evidence | None,
    ) -> Entries:
        cut = left.k.shape[1] // 3
        coded = Halves(
            columns={
                "front": left.k[:, :cut],
                "back": left.k[:, cut:],
                "v": left.v,
                "positions": left.positions,
            },
            starts=left.starts,
            lengths=left.lengths,
        )
        return coded.copied() if kept is None else kept.extended(coded)

    after = Method.after  # type: ignore[assignment]


class Absorbs(KeepsHeaviest):
    """Keeps what a test says; `answer` gets kept and left, and how often absorb was called."""

    answer: Callable[[Entries | None, Entries, int], Any]
    calls = 0
    needs = Needs()  # type: ignore[assignment]
    after = Method.after  # type: ignore[assignment]

    def absorb(self, layer_idx: int, row: int, kept: Any, left: Entries, seen: Any) -> Any:
        self.calls += 1
        return self.answer(kept, left, self.calls)
