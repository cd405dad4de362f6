"""The keys of a layer whose heads have sketches: coded ones, and later ones that have no code.

Codes are made for the keys that a head had and for what its queries wanted of them. Keys that come
later may lie elsewhere, and the queries of decoding want them more than others, so that encoding
them lost a fifth of what is wanted within 4,096 tokens (docs/lab.md). So they are scored one and
all.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hybrid_kv.index._base import runs
from hybrid_kv.index._sketch_head import HeadSketch, TierSearcher
from hybrid_kv.index.flat import KeyScan, int8_scan
from hybrid_kv.ops.native.step import EngineSearch
from hybrid_kv.ops.sketch_codes import SketchTier, pack_tiers
from hybrid_kv.types import SearchReads, SearchResult

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
        """Joins what was found by codes with what is found here: the best `most` of both.

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


class _Codes(NamedTuple):
    """Codes that a search reads: how many, and bytes, with those of what queries are turned by."""

    keys: int
    nbytes: int

    @classmethod
    def of(cls, tiers: Iterable[Sequence[SketchTier]]) -> _Codes:
        own = [tier for some in tiers for tier in some]
        codes = sum(tier.count * tier.map.plan.code_bytes for tier in own)
        maps = sum(tier.map.query_map.nbytes for tier in own)
        return cls(sum(tier.count for tier in own), codes + maps)


class CodedKeys:
    """Searches the keys of heads by their sketches, and the keys behind these one and all.

    sketches: by KV head, ascending; at least one. encoded: the first keys, which have codes.

    Args:
        keys: [Hkv, N, D] of all heads.
        kept: later keys that stay uncoded when there are twice as many and older ones get codes.
        rerank: of later keys that are scanned, keys that are ranked exactly per result.
    """

    def __init__(
        self, keys: Tensor, sketches: Mapping[int, HeadSketch], kept: int, rerank: float
    ) -> None:
        self.sketches, self._keys = dict(sorted(sketches.items())), keys
        self._kept, self._rerank = kept, rerank
        self.encoded = min(sketch.count for sketch in sketches.values())
        # All codes of the layer on huge pages: a cold search of tiers is up to a quarter quicker.
        pack_tiers(tier for sketch in sketches.values() for tier in sketch.tiers)
        self._later: LaterKeys | None = None  # where they are many
        self._searcher: TierSearcher | None = None
        self._follow()

    @property
    def memory_bytes(self) -> int:
        later = 0 if self._later is None else self._later.memory_bytes
        return later + sum(sketch.memory_bytes for sketch in self.sketches.values())

    def describe(self) -> dict[str, int]:
        """Numbers of keys with a code, and of later ones that are scored in 8 bits and exactly."""
        later = self._keys.shape[1] - self.encoded
        in_8_bits = 0 if self._later is None else later
        return {
            "coded_keys": self.encoded,
            "later_in_8_bits": in_8_bits,
            "later_exact": later - in_8_bits,
        }

    def first(self, count: int) -> CodedKeys:
        """The same of the first `count` keys, to be saved; codes say nothing of each other."""
        new = copy(self)
        if self.encoded > count:
            new.sketches = {head: sketch.first(count) for head, sketch in self.sketches.items()}
            new.encoded = count
        return new

    def append(self, keys: Tensor) -> None:
        """Takes the later rows of keys [Hkv, N, D]."""
        self._keys = keys
        if keys.shape[1] - self.encoded > 2 * self._kept:
            self.encoded, self._later, self._searcher = keys.shape[1] - self._kept, None, None
            for head, sketch in self.sketches.items():
                sketch.append(keys[head, : self.encoded])
        self._follow()

    def _follow(self) -> None:
        """Tells the engine where everything lies, after keys have moved or codes have grown."""
        if self._later is not None:
            self._later.append(self._keys)
        elif self._keys.shape[1] - self.encoded >= SCANNED_KEYS:
            self._later = LaterKeys(self._keys, self.sketches, self.encoded, self._rerank)
        keys = [self._keys[head] for head in self.sketches]
        if self._searcher is not None:  # most often: a page of keys has come
            return self._searcher.follow(keys)
        tiers = [sketch.tiers for sketch in self.sketches.values()]
        self._searcher, self._codes = TierSearcher(keys, tiers), _Codes.of(tiers)

    def search(
        self, queries: Tensor, count: int, most: int, num_rerank: Sequence[int]
    ) -> SearchResult:
        """The best keys of these heads, with `rows_read`.

        Args:
            queries: [Hkv, M, D] of all heads.
            num_rerank: candidates that each of these heads ranks exactly.
        """
        assert self._searcher is not None
        effort = self._effort(most, num_rerank)
        asked = queries if len(queries) == len(self.sketches) else queries[list(self.sketches)]
        found = self._searcher.search(asked, count, **effort)
        read = self._reads(**effort).of(queries.shape[1], found.scored)
        found = found._replace(read_bytes=read)
        if self._later is None:
            return found
        return self._later.merged(queries, found, self._keys.shape[1], count, most)

    def plan(self, count: int, most: int, num_rerank: Sequence[int]) -> list[EngineSearch] | None:
        """The same searches, for the engine; None where it cannot make them."""
        assert self._searcher is not None
        effort = self._effort(most, num_rerank)
        coded = self._searcher.plan(count, **effort)
        if coded is None:
            return None
        coded = replace(coded.of(list(self.sketches)), reads=self._reads(**effort))
        if self._later is None:
            return [coded]
        later = self._later.plan(self._keys.shape[1], count, most)
        return None if later is None else [coded, *later]  # codes' key is first among equals

    def _effort(self, most: int, num_rerank: Sequence[int]) -> dict[str, Any]:
        """Arguments of a search of the codes; later keys are ranked by it where they are few."""
        exact = self._keys.shape[1] - self.encoded if self._later is None else 0
        return {"most": most, "num_rerank": num_rerank, "num_exact": exact}

    def _reads(self, num_rerank: Sequence[int], num_exact: int, most: int) -> SearchReads:
        """Of a search of the codes: codes, what turns queries into them, keys ranked exactly."""
        codes, heads, ranked = self._codes, len(self.sketches), sum(num_rerank)
        row = self._keys.shape[2] * self._keys.itemsize
        later = heads * num_exact
        scores = later + ranked + codes.keys
        every = heads * self.encoded * row
        return SearchReads(codes.nbytes + later * row, ranked * row, every, scores)
