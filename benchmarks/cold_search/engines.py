"""The rows of the benchmark: ways to find the best keys of one head, ours and other libraries'.

A row is a kind with parameters. Kinds of the package are read through its registry, so that a row
of ours is data (`own("graph", max_degree=64)`); a kind, a parameter or a library that is not there
makes the row absent, with the reason.
"""

from __future__ import annotations

import pickle
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from typing import Any, Literal, get_args, get_origin

import numpy as np
import torch

from hybrid_kv.config import IndexConfig
from hybrid_kv.errors import HybridKVError
from hybrid_kv.plugins import INDEXES

Setting = Mapping[str, Any]
Rotation = Callable[[Sequence[np.ndarray]], None]
Prompt = Callable[[torch.Tensor], torch.Tensor]
"""Queries [G, M, D] of the prompt at the M rows asked for."""
DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
BYTES = {"f32": 4, "float32": 4, "f16": 2, "float16": 2, "bf16": 2, "bfloat16": 2, "int8": 1}
SEARCHED = {"ivf": {"nprobe"}, "hnsw": {"ef_search"}}
"""Parameters that a kind of ours reads when it searches; all others need another build."""
CODE_BYTES = {"graph": 1}
"""Bytes of a channel in the rows that a kind searches, where it keeps codes beside the keys."""
K = 100


class AbsentError(Exception):
    """A row cannot be run here; the message says why."""


class Engine(ABC):
    """One way to find the best K keys of one head.

    grouped: one call takes the queries of a whole group. exact: every key is scored.
    """

    grouped = False
    exact = False

    @abstractmethod
    def build(self, keys: torch.Tensor, prompt: Prompt) -> None:
        """Makes the engine ready for keys [N, D] float32; timed."""

    @abstractmethod
    def find(self, queries: np.ndarray) -> np.ndarray:
        """The best ids [M, K] for queries [M, D], -1 where there are fewer."""

    @property
    @abstractmethod
    def held_bytes(self) -> int:
        """Bytes of keys and index together."""

    @property
    @abstractmethod
    def row_bytes(self) -> int:
        """Bytes of one key row that a search reads."""

    def use(self, setting: Setting) -> None:  # noqa: B027 (neutral on purpose)
        """Changes settings of the search."""

    def reset_count(self) -> None:  # noqa: B027 (neutral on purpose)
        """Starts counting anew."""

    def count(self) -> int | None:
        """Dot products since `reset_count`; None where the library tells none."""
        return None

    def notes(self) -> list[dict[str, Any]]:
        """What the engine tells about its build, such as why a graph was not used."""
        return []

    @abstractmethod
    def copy(self) -> Engine:
        """The same in memory of its own."""

    def rotation(self, copies: int) -> Rotation:
        """A function that visits `copies` copies in turn with one group of queries each."""
        engines = [self.copy() for _ in range(copies)]

        def visit(groups: Sequence[np.ndarray]) -> None:
            for engine, group in zip(engines, groups, strict=True):
                engine.answer(group)

        return visit

    def answer(self, group: np.ndarray) -> np.ndarray:
        """The best ids [G, K] of one group's queries, in one call or one by one."""
        if self.grouped:
            return self.find(group)
        return np.concatenate([self.find(group[g : g + 1]) for g in range(len(group))])


class Own(Engine):
    """An index kind of the package.

    Args:
        keys: dtype of the key array, which belongs to the caller of an index.
        grouped: one search for the group instead of one per query head.
        params: the kind's parameters; `use` replaces those in `SEARCHED` after the build.
    """

    def __init__(
        self, kind: str, *, keys: str = "f32", grouped: bool = True, **params: Any
    ) -> None:
        self._kind, self._params, self._dtype = kind, params, DTYPES[keys]
        self.grouped = grouped
        self._setting: Setting = {}
        self._scored = 0
        try:
            self._index = IndexConfig(kind=kind, **params).build()
        except HybridKVError as error:
            raise AbsentError(str(error)) from None
        self.exact = self._index.exact

    def build(self, keys: torch.Tensor, prompt: Prompt) -> None:
        needs = type(self._index).needs(self._index.params)
        count = len(keys)
        spread = torch.linspace(0, count - 1, min(count, needs.sampled_queries)).long()
        last = torch.arange(max(0, count - needs.last_queries), count)
        rows = torch.cat([spread, last])  # as `Evidence.queries` has them
        samples = prompt(rows)[None] if len(rows) else None
        self._fill(keys.to(self._dtype)[None], samples)

    def _fill(self, keys: torch.Tensor, samples: torch.Tensor | None) -> None:
        self._keys, self._samples = keys, samples
        self._index.build(keys, samples)
        if self._setting:
            self.use(self._setting)

    def use(self, setting: Setting) -> None:
        self._setting = setting
        self._index.params = self._index.params.model_copy(update=dict(setting))

    def find(self, queries: np.ndarray) -> np.ndarray:
        found = self._index.search(torch.from_numpy(queries)[None], K)
        self._scored += found.scored
        return found.ids[0].numpy()

    def reset_count(self) -> None:
        self._scored = 0

    def count(self) -> int:
        return self._scored

    def copy(self) -> Own:
        return self._over(1)

    def _over(self, heads: int) -> Own:
        """Another index over `heads` copies of the keys."""
        other = Own(self._kind, grouped=self.grouped, **self._params)
        other._setting = self._setting
        samples = None if self._samples is None else self._samples.expand(heads, -1, -1, -1)
        other._fill(self._keys.repeat(heads, 1, 1), samples)
        return other

    def rotation(self, copies: int) -> Rotation:
        if not self.grouped:
            return super().rotation(copies)
        index = self._over(copies)._index  # as in decoding: one call for all heads of a layer

        def visit(groups: Sequence[np.ndarray]) -> None:
            index.search(torch.from_numpy(np.stack(groups)), K)

        return visit

    @property
    def held_bytes(self) -> int:
        return self._keys.nbytes + self._index.memory_bytes

    @property
    def row_bytes(self) -> int:
        sizes = [BYTES[v] for v in self._index.params.model_dump().values() if v in list(BYTES)]
        code = CODE_BYTES.get(self._kind, self._dtype.itemsize)
        return self._keys.shape[2] * min([code, *sizes])

    def notes(self) -> list[dict[str, Any]]:
        return [report.to_dict() for report in getattr(self._index, "reports", ())]


class Faiss(Engine):
    """A Faiss index; the counters are Faiss's own."""

    stats: str | None = None

    def __init__(self, *, grouped: bool = False, centre: bool = False) -> None:
        self._faiss = library("faiss")
        self.grouped, self._centre = grouped, centre

    def build(self, keys: torch.Tensor, prompt: Prompt) -> None:
        rows = centred(keys) if self._centre else keys.numpy()
        self._dim = rows.shape[1]
        self._index = self.make(self._dim)
        self._index.train(rows)
        self._index.add(rows)

    @abstractmethod
    def make(self, dim: int) -> Any:
        """An empty index."""

    def find(self, queries: np.ndarray) -> np.ndarray:
        return self._index.search(queries, K)[1]

    def reset_count(self) -> None:
        if self.stats:
            getattr(self._faiss.cvar, self.stats).reset()

    def count(self) -> int | None:
        return int(getattr(self._faiss.cvar, self.stats).ndis) if self.stats else None

    def copy(self) -> Engine:
        other = type(self).__new__(type(self))
        other.__dict__ = {**self.__dict__, "_index": self._faiss.clone_index(self._index)}
        return other

    @property
    def held_bytes(self) -> int:
        return self._index.ntotal * self.row_bytes

    @property
    def row_bytes(self) -> int:
        return 4 * self._dim


class FaissFlat(Faiss):
    exact = True

    def make(self, dim: int) -> Any:
        return self._faiss.IndexFlatIP(dim)


class FaissHalf(Faiss):
    exact = True

    def make(self, dim: int) -> Any:
        code = self._faiss.ScalarQuantizer.QT_fp16
        return self._faiss.IndexScalarQuantizer(dim, code, self._faiss.METRIC_INNER_PRODUCT)

    @property
    def row_bytes(self) -> int:
        return 2 * self._dim


class FaissIvf(Faiss):
    """IVFFlat as Faiss makes it for inner products: spherical cells of the raw keys.

    1024 cells; fewer below 40K keys, where k-means would fit noise.
    """

    stats = "indexIVF_stats"

    def build(self, keys: torch.Tensor, prompt: Prompt) -> None:
        self.cells = min(1024, len(keys) // 39)
        super().build(keys, prompt)

    def make(self, dim: int) -> Any:
        faiss = self._faiss
        return faiss.IndexIVFFlat(
            faiss.IndexFlatIP(dim), dim, self.cells, faiss.METRIC_INNER_PRODUCT
        )

    def use(self, setting: Setting) -> None:
        self._index.nprobe = setting["nprobe"]

    def count(self) -> int:
        stats = self._faiss.cvar.indexIVF_stats
        return int(stats.ndis + stats.nq * self.cells)  # every query scores every centroid

    @property
    def held_bytes(self) -> int:
        return self._index.ntotal * (self.row_bytes + 8) + self.cells * self.row_bytes


class FaissHnsw(Faiss):
    stats = "hnsw_stats"

    def make(self, dim: int) -> Any:
        index = self._faiss.IndexHNSWFlat(dim, 32, self._faiss.METRIC_INNER_PRODUCT)
        index.hnsw.efConstruction = 100
        return index

    def use(self, setting: Setting) -> None:
        self._index.hnsw.efSearch = setting["ef"]

    @property
    def held_bytes(self) -> int:
        links = self._index.hnsw
        return super().held_bytes + 4 * links.neighbors.size() + 8 * links.offsets.size()


class Hnswlib(Engine):
    """hnswlib, M 16, efConstruction 100, centred keys; its Python interface counts nothing."""

    def __init__(self) -> None:
        self._library = library("hnswlib")

    def build(self, keys: torch.Tensor, prompt: Prompt) -> None:
        rows = centred(keys)
        self._index = self._library.Index(space="ip", dim=rows.shape[1])
        self._index.init_index(len(rows), M=16, ef_construction=100)
        self._index.set_num_threads(1)
        self._index.add_items(rows, num_threads=1)

    def use(self, setting: Setting) -> None:
        self._index.set_ef(setting["ef"])

    def find(self, queries: np.ndarray) -> np.ndarray:
        return self._index.knn_query(queries, K, num_threads=1)[0].astype(np.int64)

    def copy(self) -> Engine:
        other = type(self)()
        other._index = pickle.loads(pickle.dumps(self._index))
        other._index.set_num_threads(1)
        other._index.set_ef(self._index.ef)
        return other

    @property
    def held_bytes(self) -> int:
        return int(self._index.index_file_size())

    @property
    def row_bytes(self) -> int:
        return 4 * self._index.dim


class Usearch(Engine):
    """usearch, connectivity 16, half-precision centred keys."""

    def __init__(self) -> None:
        self._library = library("usearch.index")
        self._scored = 0

    def build(self, keys: torch.Tensor, prompt: Prompt) -> None:
        rows = centred(keys)
        self._index = self._library.Index(
            ndim=rows.shape[1], metric="ip", dtype="f16", connectivity=16, expansion_add=100
        )
        self._index.add(np.arange(len(rows)), rows, threads=1)

    def use(self, setting: Setting) -> None:
        self._index.expansion_search = setting["ef"]

    def find(self, queries: np.ndarray) -> np.ndarray:
        found = self._index.search(queries[0], K, threads=1)
        self._scored += found.computed_distances
        ids = np.full((1, K), -1, np.int64)
        ids[0, : len(found.keys)] = found.keys
        return ids

    def reset_count(self) -> None:
        self._scored = 0

    def count(self) -> int:
        return self._scored

    def copy(self) -> Engine:
        other = type(self)()
        other._index = self._index.copy()
        other._index.expansion_search = self._index.expansion_search
        return other

    @property
    def held_bytes(self) -> int:
        return int(self._index.serialized_length)

    @property
    def row_bytes(self) -> int:
        return 2 * self._index.ndim


def library(name: str) -> Any:
    try:
        return import_module(name)
    except ImportError as error:
        raise AbsentError(f"{name.partition('.')[0]} is not installed ({error})") from None


def centred(keys: torch.Tensor) -> np.ndarray:
    return (keys - keys.mean(0)).numpy()


@dataclass(frozen=True)
class Row:
    """A row: its name, what makes the engine, and the settings that are tried on one build."""

    name: str
    make: Callable[[], Engine]
    settings: Sequence[Setting] = field(default=({},))


def own(kind: str, settings: Sequence[Setting] = ({},), **options: Any) -> list[Row]:
    """Rows of ours; options as in `Own`.

    One row tries all settings where the kind reads them when it searches, else each has its own.
    """
    if any(set(setting) - SEARCHED.get(kind, set()) for setting in settings):
        return [row for setting in settings for row in own(kind, **options, **setting)]
    said = [kind, *(f"{key}={value}" for key, value in options.items() if key != "grouped")]
    said.append("group" if options.get("grouped", True) else "single")
    return [Row(" ".join(said), partial(Own, kind, **options), settings)]


def choices(kind: str) -> list[dict[str, str]]:
    """A parameter group for every word that the kind lets one choose from; [{}] if there are none.

    This is how a new precision of `flat` becomes a row without a change here.
    """
    if kind not in INDEXES:
        return [{}]
    found = []
    for name, info in INDEXES[kind].params.model_fields.items():
        words = get_args(info.annotation) if get_origin(info.annotation) is Literal else ()
        found += [{name: word} for word in words if isinstance(word, str)]
    return found or [{}]


def default_rows() -> list[Row]:
    probes = [{"nprobe": count} for count in (32, 64, 128, 256)]
    beams = [{"ef": width} for width in (100, 400, 1600)]
    return [
        Row("faiss-flat single", FaissFlat),
        Row("faiss-flat group", partial(FaissFlat, grouped=True)),
        Row("faiss-sqfp16 single", FaissHalf),
        Row("faiss-ivf1024 single", FaissIvf, probes),
        Row("faiss-hnsw32 raw single", FaissHnsw, beams),
        Row("faiss-hnsw32 centred single", partial(FaissHnsw, centre=True), beams),
        Row("hnswlib single", Hnswlib, beams),
        Row("usearch single", Usearch, beams),
        *own("flat", grouped=False),
        *(row for choice in choices("flat") for row in own("flat", **choice)),
        *(row for choice in choices("flat") for row in own("flat", keys="bf16", **choice)),
        *own("ivf", probes, nlist=1024, grouped=False),
        *own("graph", keys="f16", grouped=False),
        *own("graph", keys="f16"),
    ]


def parse_rows(text: str) -> list[Row]:
    """Rows from `KIND:key=value,key=a|b`; every combination of the values is tried.

    `keys` (f32, f16, bf16) and `grouped` (yes, no) belong to the row and not to the kind.
    """
    kind, _, rest = text.partition(":")
    options: dict[str, Any] = {}
    settings: list[dict[str, Any]] = [{}]
    for item in filter(None, rest.split(",")):
        key, _, value = item.partition("=")
        if key == "grouped":
            options[key] = value in ("yes", "true", "1")
        elif "|" in value:
            values = [number(part) for part in value.split("|")]
            settings = [{**setting, key: one} for setting in settings for one in values]
        else:
            options[key] = value if key == "keys" else number(value)
    return own(kind, settings, **options)


def number(text: str) -> Any:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return {"true": True, "false": False}.get(text, text)
