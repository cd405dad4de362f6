"""`sketch`: short codes of the keys in the metric of the queries, scanned; the best ranked exactly.

The recipe is this project's. Related: quantisation for queries that are not spread as the keys are
(Guo et al. 2020, ScaNN), and RaBitQ's random rotations (Gao and Long 2024).

Codes are made for the keys that a head had and for what its queries wanted of them. Keys that come
later may lie elsewhere, and the queries of decoding want them more than others, so that encoding
them lost a fifth of what is wanted within 4,096 tokens (docs/lab.md). So they are scored one and
all.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeAlias

import torch
from numpy.typing import NDArray
from pydantic import BeforeValidator, Field
from torch import Tensor

from hybrid_kv import config
from hybrid_kv.index._base import SavedIndex, joined, runs
from hybrid_kv.index._sketch_head import HeadSketch, TierSearcher
from hybrid_kv.index._sketch_learn import SketchLearner, SketchReport
from hybrid_kv.index.flat import KeyScan, StandIn, int8_scan, planned
from hybrid_kv.ops.native.rows import scanned_bytes
from hybrid_kv.ops.native.step import EngineSearch
from hybrid_kv.ops.sketch_codes import SketchTier, pack_tiers
from hybrid_kv.plugins import INDEXES, Index
from hybrid_kv.types import Needs, SearchReads, SearchResult

_RERANK = 1.5
"""Of heads that are scanned: keys that a search ranks exactly per key that it is asked for."""


def _as_text(value: object) -> object:
    """16 -> "16": YAML reads a number of bytes as a number."""
    return str(value) if isinstance(value, int) else value


Codes: TypeAlias = Annotated[
    Literal["auto", "16", "24", "32", "48", "64", "tiers"], BeforeValidator(_as_text)
]
"""Bytes of a key's code at head_dim 128."""


@INDEXES.register("sketch", paper="this project; ScaNN (Guo et al. 2020)")
class SketchIndex(SavedIndex):
    """Scans codes of a few bytes a key that prefill queries shaped; the best are ranked exactly.

    One sketch per KV head, for all its query heads together. Every head proves itself on queries
    that took no part in its making (`reports`): where it misses the goal, or where scanning 8-bit
    copies is less work, that is done.

    Later keys are scored one and all, until the index is learned again: codes that were made for
    other keys do not serve them. Where `2 * horizon_tokens` have come and nothing was learned (it
    takes long, or failed), the older ones are encoded after all, and `horizon_tokens` stay as they
    are. An index with `horizon_tokens` 0 is never learned again, and keeps the newest 4,096.
    """

    ranks = True

    file_kind = "sketch"

    class Params(config.Params):
        """sampled_queries, recent_queries: prefill queries per query head to learn from, spread
        evenly (up to twice as many) and from the prompt's end; horizon_tokens: they are turned to
        so many positions behind the prompt (RoPE), and codes are learned again, in the background,
        when so many further keys have come, 0 for neither; min_keys: fewer are scanned;
        target_recall, target_mass: goals of the self-check, both of which have to be reached;
        check_queries: held out for it, of all query heads together; check_top_k: the best keys that
        it asks for; gain: how much more work a scan must be for a head to get a sketch, 0 for any;
        codes: bytes of a key at head_dim 128 (others in proportion), or 16 to 64 in "tiers",
        "auto" for the least work; num_rerank: candidates that a query ranks exactly, for
        check_top_k results, "auto" for what the self-check found for each head.
        """

        sampled_queries: config.Tokens = 1024
        recent_queries: config.Tokens = 1024
        horizon_tokens: config.Tokens = 4096
        min_keys: config.Count = 4096
        target_recall: float = Field(default=0.96, gt=0, le=1)
        target_mass: float = Field(default=0.997, gt=0, le=1)
        check_queries: config.Count = 192
        check_top_k: config.Count = 100
        gain: float = Field(default=1.0, ge=0)
        codes: Codes = "auto"
        num_rerank: config.Count | Literal["auto"] = "auto"

    @property
    def goals(self) -> Params:
        """Goals that a sketch of these keys has to reach, wherever it is learned."""
        return self.params  # type: ignore[no-any-return]

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self._learner = SketchLearner(params, self._cancellation)
        self.reports: tuple[SketchReport, ...] = ()
        self._coded: CodedKeys | None = None  # of the heads that have a sketch
        self._scans: list[tuple[slice, KeyScan]] = []  # of consecutive heads without one
        self._learned_keys = 0

    @classmethod
    def needs(cls, params: Any) -> Needs:
        return Needs(
            params.sampled_queries, params.recent_queries, horizon_tokens=params.horizon_tokens
        )

    @classmethod
    def bytes_per_key(cls, params: Any, num_keys: int, head_dim: int) -> int:
        return scanned_bytes(head_dim)  # where a head is; codes are less

    @property
    def relearn_keys(self) -> int:
        horizon = int(self.params.horizon_tokens)
        if self._coded is not None or not self.reports or not horizon:
            return horizon
        return max(horizon, self._learned_keys)  # scanned: once more when there are twice as many

    @property
    def memory_bytes(self) -> int:
        scans = sum(scan.memory_bytes for _, scan in self._scans)
        return scans + (0 if self._coded is None else self._coded.memory_bytes)

    def describe(self) -> list[dict[str, Any]]:
        """Report of what serves each head (`SketchReport`); of a sketch also how many keys have
        codes by now, `coded_keys`, and how many later ones a search scores in 8 bits and exactly.
        """
        told = [report.to_dict() for report in self.reports]
        if self._coded is not None:
            keys = self._coded.describe()
            for head in self._coded.sketches:
                told[head] |= keys
        return told

    def stand_in(self, keys: Tensor, samples: Tensor | None) -> Index | None:
        return None if self._learner.why_flat(keys, samples) else StandIn()

    def _rebuild(self, samples: Tensor | None, nearest: Tensor | None) -> None:
        self.reports, sketches = self._learner.learn(self._keys, samples)
        self._learned_keys = len(self)
        self._serve(sketches)

    @classmethod
    def serving(
        cls,
        params: Any,
        keys: Tensor,
        reports: Sequence[SketchReport],
        sketches: Mapping[int, HeadSketch],
    ) -> SketchIndex:
        """An index of what was learned, or of a part of it; heads without a sketch are scanned."""
        index = cls(params)
        index._known, index.reports = keys, tuple(reports)
        index._learned_keys = keys.shape[1]
        index._serve(dict(sketches))
        return index

    @property
    def sketched(self) -> Mapping[int, tuple[HeadSketch, SketchReport]]:
        """By KV head that is served by a sketch: the sketch, and what it promises."""
        sketches = {} if self._coded is None else self._coded.sketches
        return {head: (sketch, self.reports[head]) for head, sketch in sketches.items()}

    def _serve(self, sketches: dict[int, HeadSketch]) -> None:
        """Searches run on these sketches from now on; heads without one are scanned."""
        self._scans, self._coded = [], None
        for is_sketched, run in groupby(range(len(self._keys)), sketches.__contains__):
            if not is_sketched:
                heads, scan = list(run), int8_scan(_RERANK)
                scan.rebuild(self._keys[heads[0] : heads[-1] + 1])
                self._scans.append((slice(heads[0], heads[-1] + 1), scan))
        if sketches:
            kept = num_kept(self.params.horizon_tokens)
            self._coded = CodedKeys(self._keys, sketches, kept, _RERANK)

    def _append(self, known: int) -> None:
        keys = self._keys
        for heads, scan in self._scans:
            scan.append(keys[heads])
        if self._coded is not None:
            self._coded.append(keys)

    def _find(self, queries: Tensor, count: int, most: int) -> SearchResult:
        if self._coded is None and len(self._scans) == 1:
            return self._scans[0][1].find(queries, count, most)
        parts = [(heads, scan.find(queries[heads], count, most)) for heads, scan in self._scans]
        rows = sum(part.ids.shape[0] for _, part in parts) * len(self)
        if self._coded is None:
            return joined(queries, parts, rows)
        found = self._coded.search(queries, count, most, self._num_rerank(self._coded, count))
        if not parts:
            return found
        assert found.rows_read is not None
        return joined(
            queries, [(list(self._coded.sketches), found), *parts], rows + found.rows_read
        )

    def _plan(self, count: int, most: int) -> list[EngineSearch] | None:
        if self._coded is None and len(self._scans) == 1:
            return planned(self._scans[0][1], count, most)
        parts: list[EngineSearch] = []
        for heads, scan in self._scans:
            part = scan.plan(count, most)
            if part is None:
                return None
            parts.append(part.of(range(heads.start, heads.stop)))
        if self._coded is not None:
            coded = self._coded.plan(count, most, self._num_rerank(self._coded, count))
            if coded is None:
                return None
            parts += coded
        return parts

    def _num_rerank(self, coded: CodedKeys, count: int) -> list[int]:
        """Candidates by sketch: as many as were checked, more where more is to be found."""
        fixed, checked = self.params.num_rerank, self.params.check_top_k
        ranked = [one.num_rerank if fixed == "auto" else fixed for one in coded.sketches.values()]
        return [min(max(least, -(-least * count // checked)), len(self)) for least in ranked]

    def shortened(self, keys: Tensor) -> SketchIndex:
        """See `SavedIndex`."""
        new = self.over(keys)
        new._coded = None if self._coded is None else self._coded.first(keys.shape[1])
        return new

    def to_file(self) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
        """See `SavedIndex`: codes, maps and reports."""
        from hybrid_kv.index import _sketch_file

        saved = len(self) if self._coded is None else self._coded.encoded
        sketches = {head: sketch for head, (sketch, _) in self.sketched.items()}
        return _sketch_file.written(self.params, self.reports, sketches, self._keys[:, :saved])

    @classmethod
    def from_file(
        cls, path: Path, meta: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]], keys: Tensor
    ) -> SketchIndex:
        """See `SavedIndex`."""
        from hybrid_kv.index import _sketch_file

        params, reports, sketches = _sketch_file.read(path, cls.Params, meta, arrays, keys)
        return cls.serving(params, keys, reports, sketches)


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
