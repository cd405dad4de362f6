"""What a way of finding the best keys of one head has to offer, and our own index kinds as one."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from benchmarks.cold_search.heads import Prompt
from benchmarks.cold_search.quality import K
from hybrid_kv.config import IndexConfig
from hybrid_kv.errors import HybridKVError
from hybrid_kv.index._auto_choice import decoding_pace
from hybrid_kv.index._sketch_head import HeadSketch, restored_tier
from hybrid_kv.ops.host_memory import host_array
from hybrid_kv.ops.native.library import default_pool
from hybrid_kv.plugins import Index

Setting = Mapping[str, Any]
DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
BYTES = {"f32": 4, "f16": 2, "bf16": 2, "int8": 1}
CODE_BYTES = {"graph": 1, "auto": 1}
"""Bytes of a channel in the rows that a kind searches, where it keeps codes beside the keys."""


class AbsentError(Exception):
    """A row cannot be run here; the message says why."""


@dataclass
class Work:
    """Work of some searches: keys read (once per call), and dot products; None if not told."""

    rows: int | None = 0
    dots: int | None = 0


class Copies(ABC):
    """Copies of an engine's head in memory of their own, visited in turn."""

    @abstractmethod
    def use(self, setting: Setting) -> None:
        """Changes settings of the search."""

    @abstractmethod
    def visit(self, groups: Sequence[np.ndarray], grouped: bool) -> None:
        """Searches with one group of queries [G, D] per copy."""


class Engine(ABC):
    """One way to find the best K keys of one head.

    exact: every key is scored.
    """

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

    @abstractmethod
    def work(self) -> Work:
        """What was done since this was asked last."""

    def notes(self) -> list[dict[str, Any]]:
        """What the engine tells about its build, such as why a graph was not used."""
        return []

    @abstractmethod
    def copies(self, count: int) -> Copies:
        """The same head `count` times."""

    def answer(self, group: np.ndarray, grouped: bool) -> np.ndarray:
        """The best ids [G, K] of one group's queries, in one call or one by one."""
        if grouped:
            return self.find(group)
        return np.concatenate([self.find(group[g : g + 1]) for g in range(len(group))])


class Own(Engine):
    """An index kind of the package.

    Args:
        keys: dtype of the key array, which belongs to the caller of an index.
        params: the kind's parameters; `use` replaces those that it reads when it searches.
    """

    def __init__(self, kind: str, *, keys: str = "f32", **params: Any) -> None:
        self._kind, self._params, self._dtype = kind, params, keys
        self._samples: torch.Tensor | None = None
        self._work = Work()
        self._scans = False  # whether every key is scored, whatever the kind's name promises
        try:
            self._index = IndexConfig(kind=kind, **params).build()
        except HybridKVError as error:
            raise AbsentError(str(error)) from None
        self.exact = self._index.exact
        self._learned: dict[str, Any] = {}
        self._learn_once(self._index)

    def build(self, keys: torch.Tensor, prompt: Prompt) -> None:
        needs = type(self._index).needs(self._index.params)
        count = len(keys)
        spread = torch.linspace(0, count - 1, min(count, needs.sampled_queries)).long()
        last = torch.arange(max(0, count - needs.last_queries), count)
        rows = torch.cat([spread, last])  # as `Evidence.queries` has them
        self._samples = None
        if len(rows):
            self._samples = prompt(rows, needs.horizon_tokens)[None]
        self._keys = on_host(keys[None], DTYPES[self._dtype])
        self._build(self._keys, self._samples)
        serves = [report.get("serves") for report in self._index.describe()]
        self._scans = self.exact or self._kind == "flat" or "flat" in serves

    def use(self, setting: Setting) -> None:
        self._index.params = self._index.params.model_copy(update=dict(setting))

    def find(self, queries: np.ndarray) -> np.ndarray:
        found = self._index.search(torch.from_numpy(queries)[None], K)
        # A kind that does not count reads for every query what it scores for it.
        rows = found.rows_read
        if rows is None:
            rows = len(self._index) if self._scans else found.scored
        self._work = Work((self._work.rows or 0) + rows, (self._work.dots or 0) + found.scored)
        return found.ids[0].numpy()

    def work(self) -> Work:
        done, self._work = self._work, Work()
        return done

    def copies(self, count: int) -> OwnCopies:
        return OwnCopies(self, count)

    def repeated(self, count: int) -> Own:
        """The same over `count` copies of the keys, as KV heads of one index."""
        other = Own(self._kind, keys=self._dtype, **self._params)
        other._learned = self._learned
        samples = self._samples
        if samples is not None:
            # Searches are timed by the latest positions. The same one for all copies teaches the
            # CPU its branches: `auto` took sketches for a third faster than they are.
            samples = torch.cat([samples.roll(copy, 2) for copy in range(count)])
        other._build(on_host(self._keys.expand(count, -1, -1), self._keys.dtype), samples)
        return other

    def _build(self, keys: torch.Tensor, samples: torch.Tensor | None) -> None:
        """Builds the index, and what shall follow it, as the runtime does beside decoding."""
        self._index.build(keys, samples)
        while (after := self._index.successor()) is not None:
            self._learn_once(after)
            after.build(keys, samples)
            self._index = after

    def _learn_once(self, index: Index) -> None:
        """Lets copies of a head take over the sketch and the graph that were learned for it.

        They would learn the same, which at 16K keys took nine tenths of the run. Everything else of
        a build stays, such as the choice between the kinds.
        """
        learners = [getattr(index, "_learner", None)]
        if (chooser := getattr(index, "_chooser", None)) is not None:
            graphs = getattr(index, "_graphs", None)
            learners = [chooser.sketcher, None if graphs is None else graphs.learner]
        for learner in learners:
            if learner is not None:
                learner.learn_head = partial(self._learned_once, learner.learn_head)

    def _learned_once(self, learn: Any, *arguments: Any, **options: Any) -> Any:
        kind = learn.__qualname__
        if kind not in self._learned:
            self._learned[kind] = learn(*arguments, **options)
        found, report = self._learned[kind]
        return None if found is None else moved(found), report

    def search_heads(self, queries: torch.Tensor) -> None:
        """One call for all copies: queries [copies, M, D]."""
        self._index.search(queries, K)

    @property
    def held_bytes(self) -> int:
        return self._keys.nbytes + self._index.memory_bytes

    @property
    def row_bytes(self) -> int:
        sizes = [BYTES[v] for v in self._index.params.model_dump().values() if v in list(BYTES)]
        code = CODE_BYTES.get(self._kind, self._keys.itemsize)
        return self._keys.shape[2] * min([code, *sizes])

    @property
    def code_bytes(self) -> int:
        """Bytes of the codes that each search reads, beside the rows it counts; of sketches."""
        tiers = [tier for note in self.notes() for tier in note.get("tiers", ())]
        return sum(tier["code_bytes"] * tier["num_keys"] for tier in tiers)

    @property
    def exact_row_bytes(self) -> int:
        """Bytes of a row of the caller's keys, which rank the candidates exactly."""
        return self._keys.shape[2] * self._keys.itemsize

    def notes(self) -> list[dict[str, Any]]:
        return self._index.describe()


class OwnCopies(Copies):
    """One index over all copies, entered once per step as in decoding."""

    def __init__(self, engine: Own, count: int) -> None:
        self._engine = engine.repeated(count)

    def use(self, setting: Setting) -> None:
        self._engine.use(setting)

    def notes(self) -> list[dict[str, Any]]:
        """What the index tells of each copy."""
        return self._engine.notes()

    def visit(self, groups: Sequence[np.ndarray], grouped: bool) -> None:
        queries = torch.from_numpy(np.stack(groups))
        for part in [queries] if grouped else queries.split(1, 1):
            self._engine.search_heads(part)


def moved(arrays: Any) -> Any:
    """What was learned (a sketch, or a dataclass of tensors) in memory of its own."""
    if isinstance(arrays, HeadSketch):
        tiers = [restored_tier(t.map, t.codes, t.ids, t.count) for t in arrays.tiers]
        return HeadSketch(tiers, arrays.num_rerank, arrays.placing)

    def copy(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        return host_array(list(value.shape), value.dtype).copy_(value)

    return replace(
        arrays, **{part.name: copy(getattr(arrays, part.name)) for part in fields(arrays)}
    )


def on_host(keys: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A copy where the runtime keeps cold keys: on huge pages if the system grants them."""
    return host_array(list(keys.shape), dtype).copy_(keys)


def use_threads(threads: int) -> None:
    """Indexes that are built from now on, and torch, use so many threads."""
    os.environ["HYBRID_KV_THREADS"] = str(threads)
    default_pool.cache_clear()
    decoding_pace.cache_clear()
    torch.set_num_threads(threads)
