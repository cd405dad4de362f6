"""`sketch`: short codes of the keys in the metric of the queries, scanned; the best ranked exactly.

The recipe is this project's. Related: quantisation for queries that are not spread as the keys are
(Guo et al. 2020, ScaNN), and RaBitQ's random rotations (Gao and Long 2024).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

from numpy.typing import NDArray
from pydantic import BeforeValidator, Field
from torch import Tensor

from hybrid_kv import config
from hybrid_kv.index._base import SavedIndex, joined
from hybrid_kv.index._sketch_coded import CodedKeys, num_kept
from hybrid_kv.index._sketch_head import HeadSketch
from hybrid_kv.index._sketch_learn import SketchLearner, SketchReport
from hybrid_kv.index.flat import KeyScan, StandIn, int8_scan, planned
from hybrid_kv.ops.native.step import EngineSearch
from hybrid_kv.plugins import INDEXES, Index
from hybrid_kv.types import Needs, SearchResult

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
        return head_dim + 8  # where a head is scanned; codes are less

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
