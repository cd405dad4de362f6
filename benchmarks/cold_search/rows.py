"""The rows of the benchmark: which engines, with which settings.

A row of ours is data (`own("graph", max_degree=32)`): kinds are read through the registry, and a
kind, a parameter or a library that is not there makes the row absent, with the reason.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any, get_args

from benchmarks.cold_search import rivals
from benchmarks.cold_search.engines import Engine, Own
from benchmarks.cold_search.pivot import PivotGraph
from hybrid_kv.plugins import INDEXES

SINGLE, GROUP = ("single",), ("group",)
BOTH = (*SINGLE, *GROUP)


@dataclass(frozen=True)
class Knob:
    """What trades recall for work when an engine searches: its name and its range."""

    name: str
    low: int
    high: int


KNOBS = {
    "codes": Knob("k_factor", 1, 64),
    "ivf": Knob("nprobe", 1, 1024),
    "hnsw": Knob("ef_search", 100, 1600),
    "graph": (BEAM := Knob("beam", 16, 1024)),
    "sketch": Knob("num_rerank", 100, 4096),
}
EF = Knob("ef", 100, 1600)
PROVEN = {"target_recall": 1e-6, "max_scanned": 1.0, "min_keys": 1}
"""Keeps a graph whatever its self-check says, so that its beams can be compared."""
ANY_SKETCH = {"target_recall": 1e-6, "target_mass": 1e-6, "gain": 0, "min_keys": 1}
"""The same for a sketch and its candidates."""
CODES = ("16", "24", "32", "48", "64", "tiers")


@dataclass(frozen=True)
class Row:
    """A row: what makes its engine, how it is asked, and the knob that is swept on one build.

    modes: one search per query head ("single"), one for all heads of the group ("group").
    """

    name: str
    make: Callable[[], Engine]
    modes: Sequence[str] = SINGLE
    knob: Knob | None = None


def own(kind: str, modes: Sequence[str] = BOTH, *, swept: bool = True, **options: Any) -> Row:
    """A row of an index kind of ours; options as in `Own`.

    Args:
        swept: sweep the kind's knob, if it has one, rather than let the kind choose.
    """
    knob = KNOBS.get(kind) if swept else None
    said = [kind, *(f"{key}={value}" for key, value in options.items())]
    if knob is not None and knob.name in options:
        knob = None
    if kind in ("graph", "sketch"):
        if knob is None:
            said.append("checked")
        else:
            always = PROVEN if kind == "graph" else ANY_SKETCH
            options = {knob.name: knob.low, **always, **options}
    return Row(" ".join(said), partial(Own, kind, **options), modes, knob)


def default_rows() -> list[Row]:
    hnsw = rivals.FaissHnsw
    return [
        Row("faiss-flat", rivals.FaissFlat, BOTH),
        Row("faiss-sqfp16", rivals.FaissHalf),
        Row("faiss-ivf1024", rivals.FaissIvf, knob=KNOBS["ivf"]),
        Row("faiss-pq4fs", rivals.FaissScannedCodes, BOTH, KNOBS["codes"]),
        Row("faiss-ivf1024-pq4fs", rivals.FaissIvfScannedCodes, knob=KNOBS["ivf"]),
        Row("faiss-hnsw32 raw", hnsw, knob=EF),
        Row("faiss-hnsw32 centred", partial(hnsw, centre=True), knob=EF),
        Row("hnswlib", rivals.Hnswlib, knob=EF),
        Row("usearch", rivals.Usearch, knob=EF),
        own("flat", precision="exact"),
        *(own("flat", keys=keys, precision="stored") for keys in ("f32", "bf16", "f16")),
        *(own("flat", keys="f16", precision=word) for word in reduced_precisions()),
        own("ivf", nlist=1024),
        Row("pivot-graph keys=f16", partial(PivotGraph, keys="f16", beam=16, **PROVEN), BOTH, BEAM),
        own("graph", keys="f16"),
        own("graph", GROUP, swept=False, keys="f16"),
        *(own("sketch", GROUP, keys="f16", codes=codes) for codes in CODES),
        own("sketch", GROUP, swept=False, keys="f16"),
        own("auto", GROUP, keys="f16"),
    ]


def reduced_precisions() -> list[str]:
    """Precisions of `flat` that read other rows than the stored keys; a new one becomes a row."""
    words = get_args(INDEXES["flat"].params.model_fields["precision"].annotation)
    return [word for word in words if word not in ("exact", "stored")]


def parse_rows(text: str) -> list[Row]:
    """Rows from `KIND:key=value,key=a|b`; every combination of the values is a row.

    `keys` (f32, f16, bf16) and `mode` (single, group) belong to the row and not to the kind, and
    `checked=yes` leaves the knob to the kind.
    """
    kind, _, rest = text.partition(":")
    options: dict[str, Sequence[Any]] = {}
    for item in filter(None, rest.split(",")):
        key, _, value = item.partition("=")
        options[key] = [number(part) for part in value.split("|")]
    modes = tuple(options.pop("mode", BOTH))
    swept = "checked" not in options
    options.pop("checked", None)
    return [
        own(kind, modes, swept=swept, **dict(zip(options, values, strict=True)))
        for values in product(*options.values())
    ]


def number(text: str) -> Any:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return {"true": True, "false": False}.get(text, text)


def chosen_rows(wanted: Sequence[str]) -> list[Row]:
    """Default rows whose names match a pattern, and rows written out with a colon.

    Raises:
        LookupError: a pattern fits no row.
    """
    if not wanted:
        return default_rows()
    rows: list[Row] = []
    for text in wanted:
        if ":" in text:
            rows += parse_rows(text)
            continue
        found = [row for row in default_rows() if fnmatch.fnmatch(row.name, text)]
        if not found:
            names = ", ".join(row.name for row in default_rows())
            raise LookupError(f"no row is called '{text}'; there are: {names}")
        rows += found
    return rows
