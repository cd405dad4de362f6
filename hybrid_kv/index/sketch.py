"""`sketch`: short codes of the keys in the metric of the queries, scanned; the best ranked exactly.

The recipe is this project's. Related: quantisation for queries that are not spread as the keys are
(Guo et al. 2020, ScaNN), and RaBitQ's random rotations (Gao and Long 2024).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any, Literal

from numpy.typing import NDArray
from pydantic import BeforeValidator, Field
from torch import Tensor

from hybrid_kv import config
from hybrid_kv.errors import FileFormatError
from hybrid_kv.index import _sketch_file
from hybrid_kv.index._file import (
    check_fingerprint,
    fingerprint,
    refusing_what_is_damaged,
)
from hybrid_kv.index._flat_scans import KeyScan, int8_scan
from hybrid_kv.index._parts import joined
from hybrid_kv.index._saved import SavedIndex
from hybrid_kv.index._sketch_engine import TierSearcher, why_unread
from hybrid_kv.index._sketch_forecast import SketchGoal
from hybrid_kv.index._sketch_head import HeadSketch
from hybrid_kv.index._sketch_later import SCANNED_KEYS, LaterKeys, num_kept
from hybrid_kv.index._sketch_learn import SketchReport, learn
from hybrid_kv.index._sketch_plans import layouts
from hybrid_kv.index._stand_in import StandIn
from hybrid_kv.ops.native.step import EngineSearch
from hybrid_kv.ops.sketch_codes import pack_tiers
from hybrid_kv.plugins import INDEXES, Index
from hybrid_kv.types import Needs, SearchReads, SearchResult

_RERANK = 1.5
"""Of heads that are scanned: keys that a search ranks exactly per key that it is asked for."""


def _as_text(value: object) -> object:
    """16 -> "16": YAML reads a number of bytes as a number."""
    return str(value) if isinstance(value, int) else value


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
        codes: Annotated[
            Literal["auto", "16", "24", "32", "48", "64", "tiers"], BeforeValidator(_as_text)
        ] = "auto"
        num_rerank: config.Count | Literal["auto"] = "auto"

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.reports: tuple[SketchReport, ...] = ()
        self._sketches: dict[int, HeadSketch] = {}  # by KV head
        self._searcher: TierSearcher | None = None
        self._scans: list[tuple[slice, KeyScan]] = []  # of consecutive heads without a sketch
        self._learned_keys = 0
        self._encoded = 0  # rows; later ones are scored one and all
        self._later: LaterKeys | None = None  # where they are many

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
        if self._sketches or not self.reports or not horizon:
            return horizon
        return max(horizon, self._learned_keys)  # scanned: once more when there are twice as many

    @property
    def memory_bytes(self) -> int:
        scans = sum(scan.memory_bytes for _, scan in self._scans)
        later = 0 if self._later is None else self._later.memory_bytes
        return scans + later + sum(one.memory_bytes for one in self._sketches.values())

    def describe(self) -> list[dict[str, Any]]:
        """What serves each head (`SketchReport`); of a sketch also how many keys have codes by now,
        `coded_keys`, and how many later ones a search scores in 8 bits and exactly.
        """
        told = [report.to_dict() for report in self.reports]
        later = len(self) - self._encoded
        in_8_bits = 0 if self._later is None else later
        for head in self._sketches:
            told[head] |= {
                "coded_keys": self._encoded,
                "later_in_8_bits": in_8_bits,
                "later_exact": later - in_8_bits,
            }
        return told

    def stand_in(self, keys: Tensor, samples: Tensor | None) -> Index | None:
        return None if self.why_flat(keys, samples) else StandIn()

    def _rebuild(self, samples: Tensor | None, nearest: Tensor | None) -> None:
        self.reports, sketches = self.learn(self._keys, samples)
        self._learned_keys = len(self)
        self._serve(sketches)

    def learn(
        self, keys: Tensor, samples: Tensor | None
    ) -> tuple[tuple[SketchReport, ...], dict[int, HeadSketch]]:
        """What shall serve each head of keys [Hkv, N, D], and the sketches by head; not served."""
        if (reason := self.why_flat(keys, samples)) is not None:
            return tuple(SketchReport("flat", reason) for _ in keys), {}
        assert samples is not None
        learned = [self.learn_head(*head) for head in zip(keys, samples, strict=True)]
        sketches = {n: sketch for n, (sketch, _) in enumerate(learned) if sketch is not None}
        return tuple(report for _, report in learned), sketches

    @classmethod
    def serving(
        cls,
        params: Any,
        keys: Tensor,
        reports: Sequence[SketchReport],
        sketches: Mapping[int, HeadSketch],
    ) -> SketchIndex:
        """An index of what `learn` gave, or of a part of it; heads without a sketch are scanned."""
        index = cls(params)
        index._known, index.reports = keys, tuple(reports)
        index._learned_keys = keys.shape[1]
        index._serve(dict(sketches))
        return index

    @property
    def sketched(self) -> Mapping[int, tuple[HeadSketch, SketchReport]]:
        """By KV head that is served by a sketch: the sketch, and what it promises."""
        return {head: (sketch, self.reports[head]) for head, sketch in self._sketches.items()}

    @property
    def code_bytes(self) -> int:
        """Of the longest code of a key; 0 where all heads are scanned."""
        tiers = [tier for sketch in self._sketches.values() for tier in sketch.tiers]
        return max((tier.map.plan.code_bytes for tier in tiers), default=0)

    def learn_head(self, keys: Tensor, samples: Tensor) -> tuple[HeadSketch | None, SketchReport]:
        """The sketch of a head's keys [N, D], if it reaches the goal; samples [G, M, D]."""
        self._check_cancelled()
        p = self.params
        goal = SketchGoal(p.check_top_k, p.target_recall, p.target_mass, p.check_queries, p.gain)
        choices = layouts(keys.shape[1], None if p.codes == "auto" else p.codes)
        return learn(keys, samples, choices, goal, self._check_cancelled)

    def why_flat(self, keys: Tensor, samples: Tensor | None) -> str | None:
        """Why no head can get a sketch, whatever its keys are; None if one can."""
        if keys.shape[1] < self.params.min_keys:
            return f"{keys.shape[1]} keys, a sketch takes {self.params.min_keys}"
        if samples is None or samples.shape[2] == 0:
            return "there are no prefill queries to learn from"
        return why_unread(keys)

    def _serve(self, sketches: dict[int, HeadSketch]) -> None:
        """Searches run on these sketches from now on; heads without one are scanned."""
        self._sketches, self._later = dict(sorted(sketches.items())), None
        self._encoded = min((sketch.count for sketch in sketches.values()), default=0)
        self._scans = []
        for is_sketched, run in groupby(range(len(self._keys)), sketches.__contains__):
            if not is_sketched:
                heads, scan = list(run), int8_scan(_RERANK)
                scan.rebuild(self._keys[heads[0] : heads[-1] + 1])
                self._scans.append((slice(heads[0], heads[-1] + 1), scan))
        # All codes of the layer on huge pages: a cold search of tiers is up to a quarter quicker.
        pack_tiers(tier for sketch in sketches.values() for tier in sketch.tiers)
        self._searcher = None
        self._describe()

    def _append(self, known: int) -> None:
        for heads, scan in self._scans:
            scan.append(self._keys[heads])
        kept = num_kept(self.params.horizon_tokens)
        if self._sketches and len(self) - self._encoded > 2 * kept:
            self._encoded, self._later, self._searcher = len(self) - kept, None, None
            for head, sketch in self._sketches.items():
                sketch.append(self._keys[head, : self._encoded])
        self._describe()

    def _describe(self) -> None:
        """Tells the engine where everything lies, after keys have moved or codes have grown."""
        if self._later is not None:
            self._later.append(self._keys)
        elif self._sketches and len(self) - self._encoded >= SCANNED_KEYS:
            self._later = LaterKeys(self._keys, self._sketches, self._encoded, _RERANK)
        if not self._sketches:
            return
        keys = [self._keys[head] for head in self._sketches]
        if self._searcher is not None:  # most often: a page of keys has come
            return self._searcher.follow(keys)
        tiers = [sketch.tiers for sketch in self._sketches.values()]
        self._searcher = TierSearcher(keys, tiers)

    def _find(self, queries: Tensor, count: int, most: int) -> SearchResult:
        if self._searcher is None and len(self._scans) == 1:
            return self._scans[0][1].find(queries, count, most)
        parts = [(heads, scan.find(queries[heads], count, most)) for heads, scan in self._scans]
        rows = sum(part.ids.shape[0] for _, part in parts) * len(self)
        if self._searcher is None:
            return joined(queries, parts, rows)
        effort = self._effort(count, most)
        asked = queries[list(self._sketches)] if parts else queries
        found = self._searcher.search(asked, count, **effort)
        read = self._code_reads(**effort).of(queries.shape[1], found.scored)
        found = found._replace(read_bytes=read)
        if self._later is not None:
            found = self._later.merged(queries, found, len(self), count, most)
        if not parts:
            return found
        assert found.rows_read is not None
        return joined(queries, [(list(self._sketches), found), *parts], rows + found.rows_read)

    def _plan(self, count: int, most: int) -> list[EngineSearch] | None:
        parts: list[EngineSearch | None] = []
        for heads, scan in self._scans:
            part = scan.plan(count, most)
            parts.append(None if part is None else part.of(range(heads.start, heads.stop)))
        if self._searcher is not None:
            effort = self._effort(count, most)
            coded = self._searcher.plan(count, **effort)
            if coded is not None:
                reads = self._code_reads(**effort)
                coded = replace(coded.of(list(self._sketches)), reads=reads)
            parts.append(coded)
        if self._later is not None:  # behind the codes, whose key is first among equals
            parts += self._later.plan(len(self), count, most)
        known = [part for part in parts if part is not None]
        return known if len(known) == len(parts) else None

    def _effort(self, count: int, most: int) -> dict[str, Any]:
        """How thoroughly the codes are searched for so many keys."""
        return {
            "most": most,
            "num_rerank": [self._num_rerank(sketch, count) for sketch in self._sketches.values()],
            "num_exact": len(self) - self._encoded if self._later is None else 0,
        }

    def _code_reads(self, num_rerank: Sequence[int], num_exact: int, most: int) -> SearchReads:
        """Of a search of the codes: codes, what turns queries into them, keys ranked exactly."""
        tiers = [tier for sketch in self._sketches.values() for tier in sketch.tiers]
        codes = sum(tier.count * tier.map.plan.code_bytes for tier in tiers)
        maps = sum(tier.map.query_map.nbytes for tier in tiers)
        heads, row, ranked = len(self._sketches), self._key_bytes(1), sum(num_rerank)
        later = heads * num_exact
        scores = later + ranked + sum(tier.count for tier in tiers)
        every = heads * self._encoded * row
        return SearchReads(codes + maps + later * row, ranked * row, every, scores)

    def _num_rerank(self, sketch: HeadSketch, count: int) -> int:
        """The check was for so many results; to find more, more are ranked."""
        fixed, checked = self.params.num_rerank, self.params.check_top_k
        ranked: int = sketch.num_rerank if fixed == "auto" else fixed
        scaled: int = -(-ranked * count // checked)
        return min(max(ranked, scaled), len(self))

    def shortened(self, keys: Tensor) -> SketchIndex:
        """See `SavedIndex`: codes say nothing of each other."""
        new, count = self.over(keys), keys.shape[1]
        if self._encoded > count:
            new._sketches = {head: sketch.first(count) for head, sketch in self._sketches.items()}
            new._encoded = count
        return new

    def to_file(self) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
        """See `SavedIndex`: codes, maps and reports."""
        arrays = {
            f"{head}.{name}": array.numpy()
            for head, sketch in self._sketches.items()
            for name, array in _sketch_file.arrays_of(sketch).items()
        }
        meta = {
            "params": self.params.model_dump(mode="json"),
            "reports": [report.to_dict() for report in self.reports],
            "codes": _sketch_file.CODES,
            "keys": fingerprint(self._keys, self._saved),
            "sketches": {
                str(head): _sketch_file.describe(sketch) for head, sketch in self._sketches.items()
            },
        }
        return meta, arrays

    @classmethod
    def from_file(
        cls, path: Path, meta: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]], keys: Tensor
    ) -> SketchIndex:
        """See `SavedIndex`."""
        with refusing_what_is_damaged(path):
            if meta["codes"] != _sketch_file.CODES:
                raise FileFormatError(
                    f"{path} has codes of version {meta['codes']}, this package reads "
                    f"{_sketch_file.CODES}; build the index again or use the package that wrote it"
                )
            params = cls.Params.model_validate(meta["params"])
            reports = tuple(SketchReport.from_dict(report) for report in meta["reports"])
            sketches = {
                int(head): _sketch_file.sketch_of(head, what, arrays)
                for head, what in meta["sketches"].items()
            }
            saved = int(meta["keys"]["shape"][1])
            check_fingerprint(path, meta["keys"], keys, saved)
            _sketch_file.check(sketches, len(reports), keys, saved)
        return cls.serving(params, keys, reports, sketches)

    @property
    def _saved(self) -> int:
        """Rows that a file knows of."""
        return self._encoded if self._sketches else len(self)
