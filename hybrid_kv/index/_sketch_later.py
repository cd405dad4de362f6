"""Keys that came after a sketch was learned: they are scored one and all.

Codes are made for the keys that a head had and for what its queries wanted of them. Keys that come
later may lie elsewhere, and the queries of decoding want them more than others, so that encoding
them lost a fifth of what is wanted within 4,096 tokens (docs/lab.md).
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from hybrid_kv.index._base import runs
from hybrid_kv.index._flat_scans import KeyScan, int8_scan
from hybrid_kv.ops.native.step import EngineSearch
from hybrid_kv.types import SearchResult

SCANNED_KEYS = 256
"""Fewer are ranked exactly by the search of the codes: that is less than a scan of their own."""
_KEPT_KEYS = 4096


def num_kept(horizon_tokens: int) -> int:
    """The newest keys that stay uncoded when older ones have to be encoded."""
    return horizon_tokens or _KEPT_KEYS


class LaterKeys:
    """Scans of the rows from `first` on, in 8 bits; the best are ranked exactly.

    Args:
        keys: [Hkv, N, D], N > first.
        heads: those that have a sketch, ascending.
        rerank: keys that are ranked exactly per result.
    """

    def __init__(self, keys: Tensor, heads: Iterable[int], first: int, rerank: float) -> None:
        self.first = first
        self._scans: list[tuple[slice, KeyScan]] = [(own, int8_scan(rerank)) for own in runs(heads)]
        for own, scan in self._scans:
            scan.rebuild(keys[own, first:])

    def append(self, keys: Tensor) -> None:
        """Takes the rows of keys [Hkv, N, D] beyond those it has."""
        for own, scan in self._scans:
            scan.append(keys[own, self.first :])

    def merged(
        self, queries: Tensor, coded: SearchResult, num_keys: int, count: int, most: int
    ) -> SearchResult:
        """What was found by codes and what is found here, the best `most` of both.

        Args:
            queries: [Hkv, M, D] of all heads.
            coded: of the heads that have a sketch, with `rows_read`.
            num_keys: N.
            count: results that each of the two is asked for, at least.
        """
        later = num_keys - self.first
        parts = [
            scan.find(queries[own], min(count, later), min(most, later))
            for own, scan in self._scans
        ]
        ids = torch.cat([coded.ids, torch.cat([part.ids for part in parts]) + self.first], -1)
        scores = torch.cat([coded.scores, torch.cat([part.scores for part in parts])], -1)
        # Stable: of equal scores the lower row stays first.
        scores, order = scores.sort(dim=-1, descending=True, stable=True)
        ids = ids.gather(-1, order).masked_fill_(scores == -torch.inf, -1)
        assert coded.rows_read is not None
        scored = coded.scored + sum(part.scored for part in parts)
        rows_read = coded.rows_read + len(ids) * later
        read = coded.read_bytes or 0
        read += sum(part.read_bytes or 0 for part in parts)
        ids, scores = ids[..., :most], scores[..., :most]
        return SearchResult(ids, scores, scored, rows_read, read_bytes=read)

    def plan(self, num_keys: int, count: int, most: int) -> list[EngineSearch] | None:
        """The scans as parts of a step that is one call; None where they cannot be."""
        later = num_keys - self.first
        parts = []
        for own, scan in self._scans:
            part = scan.plan(min(count, later), min(most, later))
            if part is None:
                return None
            parts.append(part.of(range(own.start, own.stop, own.step), self.first))
        return parts

    @property
    def memory_bytes(self) -> int:
        return sum(scan.memory_bytes for _, scan in self._scans)
