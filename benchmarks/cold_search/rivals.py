"""Other libraries as engines: Faiss, hnswlib, usearch; one thread, one query per call."""

from __future__ import annotations

import pickle
from abc import abstractmethod
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import numpy as np
import torch

from benchmarks.cold_search.engines import AbsentError, Copies, Engine, Setting, Work
from benchmarks.cold_search.heads import Prompt
from benchmarks.cold_search.quality import K


class Rival(Engine):
    """An engine that can be copied."""

    @abstractmethod
    def copy(self) -> Rival:
        """The same in memory of its own."""

    def copies(self, count: int) -> Copies:
        return RivalCopies([self.copy() for _ in range(count)])


class RivalCopies(Copies):
    """Engines that are called one after the other."""

    def __init__(self, engines: Sequence[Rival]) -> None:
        self._engines = engines

    def use(self, setting: Setting) -> None:
        for engine in self._engines:
            engine.use(setting)

    def visit(self, groups: Sequence[np.ndarray], grouped: bool) -> None:
        for engine, group in zip(self._engines, groups, strict=True):
            engine.answer(group, grouped)


class Faiss(Rival):
    """A Faiss index; the counters are Faiss's own."""

    stats: str | None = None

    def __init__(self, *, centre: bool = False) -> None:
        self._faiss = library("faiss")
        self._centre = centre

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

    def work(self) -> Work:
        if self.stats is None:
            return Work(None, None)
        stats = getattr(self._faiss.cvar, self.stats)
        dots = int(stats.ndis) + self.other_dots(stats)
        stats.reset()
        return Work(dots, dots)

    def other_dots(self, stats: Any) -> int:
        """Dot products that the counter leaves out."""
        return 0

    def copy(self) -> Rival:
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
        self.cells = max(1, min(1024, len(keys) // 39))
        super().build(keys, prompt)

    def make(self, dim: int) -> Any:
        faiss = self._faiss
        cells = faiss.IndexFlatIP(dim)
        return faiss.IndexIVFFlat(cells, dim, self.cells, faiss.METRIC_INNER_PRODUCT)

    def use(self, setting: Setting) -> None:
        self._index.nprobe = setting["nprobe"]

    def other_dots(self, stats: Any) -> int:
        return int(stats.nq) * self.cells  # every query scores every centroid

    @property
    def held_bytes(self) -> int:
        return self._index.ntotal * (self.row_bytes + 8) + self.cells * self.row_bytes


class FaissScannedCodes(Faiss):
    """4-bit product quantisation in Faiss's fast-scan layout, the best ranked again in f32.

    Half a byte for two channels: 32 B a key at 128 channels. The knob is how many candidates are
    ranked per result.
    """

    def make(self, dim: int) -> Any:
        inner = self._faiss.METRIC_INNER_PRODUCT
        self._codes = self._faiss.index_factory(dim, self.recipe(dim), inner)
        return self._faiss.IndexRefineFlat(self._codes)

    def recipe(self, dim: int) -> str:
        """For `index_factory`."""
        return f"PQ{dim // 2}x4fs"

    def use(self, setting: Setting) -> None:
        self._index.k_factor = setting["k_factor"]

    @property
    def held_bytes(self) -> int:
        return self._index.ntotal * (self.row_bytes + self._dim // 4)


class FaissIvfScannedCodes(FaissScannedCodes):
    """The same codes in cells, of residuals; the knob is how many cells are scanned.

    Ten candidates per result are ranked again.
    """

    def build(self, keys: torch.Tensor, prompt: Prompt) -> None:
        self.cells = max(1, min(1024, len(keys) // 39))
        super().build(keys, prompt)

    def recipe(self, dim: int) -> str:
        return f"IVF{self.cells},{super().recipe(dim)}"

    def use(self, setting: Setting) -> None:
        self._index.k_factor = 10
        self._faiss.downcast_index(self._index.base_index).nprobe = setting["nprobe"]

    @property
    def held_bytes(self) -> int:
        return super().held_bytes + self._index.ntotal * 8 + self.cells * self.row_bytes


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


class Hnswlib(Rival):
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

    def work(self) -> Work:
        return Work(None, None)

    def copy(self) -> Rival:
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


class Usearch(Rival):
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

    def work(self) -> Work:
        done, self._scored = self._scored, 0
        return Work(done, done)

    def copy(self) -> Rival:
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
    """An optional third party.

    Raises:
        AbsentError: it is not installed.
    """
    try:
        return import_module(name)
    except ImportError as error:
        raise AbsentError(f"{name.partition('.')[0]} is not installed ({error})") from None


def centred(keys: torch.Tensor) -> np.ndarray:
    """Keys without their mean: no ranking changes, and indexes that know nothing of it profit."""
    return (keys - keys.mean(0)).numpy()
