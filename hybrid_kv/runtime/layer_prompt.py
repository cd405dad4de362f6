"""A layer's prompt: the evidence that is collected while it is computed, for the layer's method."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy

from torch import Tensor

from hybrid_kv.plugins import Placement
from hybrid_kv.rotary import Rotary, Samples
from hybrid_kv.runtime.evidence import EvidenceCollector
from hybrid_kv.store import Row
from hybrid_kv.types import Evidence, LayerShape, Needs


class LayerPrompt:
    """The prompt of a layer as far as it was seen, by row.

    logits: scale and softcap by which the prompt's scores became logits.
    """

    def __init__(self, shape: LayerShape) -> None:
        self.logits: tuple[float, float | None] = (shape.head_dim**-0.5, None)
        self._shape = shape
        self._collectors: Sequence[EvidenceCollector] = ()
        self._kept: tuple[Evidence, ...] | None = None

    def begin(self, needs: Needs, num_rows: int) -> None:
        """Begins to collect what is needed, for each row."""
        if needs.sampled_queries or needs.last_queries or needs.column_sums:
            self._collectors = [EvidenceCollector(needs) for _ in range(num_rows)]

    def observe(
        self,
        rows: Sequence[Row],
        q: Tensor,
        lse: Tensor,
        valid: Tensor | None,
        *,
        scale: float,
        softcap: float | None,
    ) -> None:
        """Takes the queries q [B, Hq, T, D] of the next tokens, which are stored.

        Args:
            lse: [B, Hq, T] of their attention. valid: [B, T] bool, False for padding.
        """
        self.logits = scale, softcap
        for row, collector in zip(rows, self._collectors, strict=False):
            new = slice(None) if valid is None else valid[row.number]
            own = q[row.number][:, new]
            collector.observe(own)
            if collector.wants_sums:
                keys, _ = row.table.view()
                own_lse = lse[row.number][:, new]
                collector.add_masses(own, own_lse, keys, scale=scale, softcap=softcap)

    def evidence(self) -> tuple[Evidence, ...]:
        """Evidence that was collected, one per row; empty if nobody asked for it.

        After the prompt's end only what was kept is still there.
        """
        if self._kept is not None:
            return self._kept
        return tuple(collector.evidence(*self.logits) for collector in self._collectors)

    def keep(self) -> None:
        """Keeps the evidence beyond the prompt's end."""
        self._kept = self.evidence()

    def samples(
        self, seen: Evidence, placement: Placement | None, rotary: Rotary
    ) -> Samples | None:
        """Samples of a row's evidence that an index may learn from; None for none."""
        if placement is not None and placement.learns is not None:
            seen = seen.narrowed(placement.learns)
        return seen.samples(self._shape.num_kv_heads, rotary)

    def end(self) -> None:
        """Forgets what was not kept: entries have left, and the prompt cannot be ended again."""
        self._collectors = ()

    # Rows, and going back -------------------------------------------------------------------------

    def forked(self) -> LayerPrompt:
        """The prompt of a layer of another cache, which continues from the same entries."""
        return copy(self)

    def fork(self, sources: Sequence[int]) -> None:
        """Row r is one of the prompt that row sources[r] had; all of it has been observed."""
        if self._collectors:
            self._collectors = [self._collectors[source] for source in sources]

    def mark(self) -> Sequence[EvidenceCollector]:
        """Evidence that has been collected, for `go_back`."""
        return [collector.branch() for collector in self._collectors]

    def go_back(self, mark: Sequence[EvidenceCollector]) -> None:
        """Forgets what was collected since."""
        self._collectors = list(mark)
