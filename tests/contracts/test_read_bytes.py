"""Every index says what its searches read, and every method what its steps do: held to what is.

Of what torch computes, each operation is watched for the keys and arrays that it is given; of what
other libraries compute, the sizes of what they hold are known.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import hybrid_kv as hkv
from hybrid_kv.config import IndexConfig
from hybrid_kv.methods.retrieval import split_budget
from hybrid_kv.methods.windows import Choices, ReusingIndex, SelectingIndex
from hybrid_kv.models.cache_state import passing
from hybrid_kv.models.load import load_model
from hybrid_kv.ops.native import engine_state
from hybrid_kv.ops.tail import moments_bytes
from hybrid_kv.plugins import INDEXES, METHODS, Index
from hybrid_kv.runtime import KVCache
from hybrid_kv.types import SearchReads, Work
from tests.device.placement import device, placed
from tests.index.oracle import clustered
from tests.kit import every, tiers

HEADS, GROUP, ROWS, TOP = 3, 4, 701, 37
ITEM = 2  # keys in 16 bits, so that arrays which are not show
PARAMS: dict[str, dict[str, Any]] = {
    "graph": {"min_keys": 1, "check_positions": 4, "max_scanned": 1, "target_recall": 0.01},
    "sketch": {"min_keys": 1, "gain": 0, "target_recall": 1e-6, "target_mass": 1e-6},
    "auto": {"sizes": {"min_keys": 1, "graph_tokens": 0}},
    "lsh": {"num_bits": 4, "num_tables": 11},
    "frames": {"page_size": 19},
    "landmarks": {"outlier_chunks": 2},
    "query_lists": {"num_centroids": 13, "list_tokens": 29},
    "clusters": {"segment_tokens": 300},
}
WATCHED = (
    *("blocks", "clusters", "flat", "frames", "label_channels", "landmarks", "pca", "pq"),
    *("query_channels", "query_lists", "skewed_channels", "pages"),
)
"""Kinds that torch searches, of which each operation can be watched."""
ELSEWHERE = ("auto", "graph", "hnsw", "ivf", "lsh", "sketch")
OF_THE_HOST = pytest.mark.host("an index lies in host memory, whatever computes")
PICKS = ("index.Tensor", "gather.default", "index_select.default")


class Watch(TorchDispatchMode):
    """Adds up the bytes of some memory that operations read: of a gather, what it takes."""

    def __init__(self, watched: Iterator[Tensor]) -> None:
        super().__init__()
        self._memory = {tensor.untyped_storage().data_ptr() for tensor in watched}
        self.read_bytes = 0.0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if not func.is_view:
            name = str(func).removeprefix("aten.")
            picks, share = name in PICKS, 1.0
            if name == "index.Tensor":  # the first key stands for none where there are too few
                share = float((args[1][-1] != 0).float().mean())
            for number, arg in enumerate(args):
                for one in arg if isinstance(arg, (list, tuple)) else [arg]:
                    if isinstance(one, Tensor) and self._watches(one):
                        taken = picks and not number
                        self.read_bytes += share * _bytes(result) if taken else _bytes(one)
        return result

    def _watches(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self._memory


def _bytes(tensor: Tensor) -> int:
    """Of the distinct elements of a tensor that may be expanded."""
    count = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        count *= size if stride else 1
    return count * tensor.itemsize


def _tensors(value: Any, seen: set[int]) -> Iterator[Tensor]:
    """All that hang on a value."""
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, Tensor):
        yield value
        return
    if isinstance(value, np.ndarray):
        yield torch.from_numpy(value)
        return
    parts: Any = ()
    if isinstance(value, Mapping):
        parts = value.values()
    elif isinstance(value, (list, tuple)):
        parts = value
    elif is_dataclass(value):
        parts = [getattr(value, one.name) for one in fields(value)]
    elif type(value).__module__.startswith("hybrid_kv"):
        parts = vars(value).values() if hasattr(value, "__dict__") else ()
    for part in parts:
        yield from _tensors(part, seen)


def built(kind: str, rows: int = ROWS) -> tuple[Index, Tensor, Tensor]:
    """An index of 16-bit keys, the keys, and the queries of a group."""
    torch.manual_seed(3)
    keys, queries = clustered(rows, heads=HEADS, queries=GROUP)
    keys = keys.to(torch.bfloat16)
    samples = queries[:, :, None] + 0.3 * torch.randn(HEADS, GROUP, 64, keys.shape[2])
    index: Index = IndexConfig(kind=kind, **PARAMS.get(kind, {})).build()
    index.build(keys, samples)
    return index, keys, queries


@OF_THE_HOST
def test_all_kinds_are_held_to_something() -> None:
    assert {*WATCHED, *ELSEWHERE} == {*INDEXES}


@OF_THE_HOST
@pytest.mark.parametrize("kind", WATCHED)
def test_a_search_says_what_it_reads(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hybrid_kv.index.pages.engine", lambda: None)
    index, keys, queries = built(kind)
    index.search(queries, TOP)
    watch = Watch(_tensors((index, keys), set()))
    with watch:
        found = index.search(queries, TOP)
    assert found.read_bytes is not None
    # What leads to the keys of a cluster is not counted.
    assert 0.8 * watch.read_bytes <= found.read_bytes <= 1.05 * watch.read_bytes


@OF_THE_HOST
def test_an_estimate_says_what_it_reads() -> None:
    for kind in ("clusters", "query_channels"):
        index, keys, queries = built(kind)
        values = torch.randn(keys.shape).to(keys.dtype)
        found = index.search(queries, TOP)
        index.estimate(queries, found.ids, values, scale=0.1)  # sums up values, once
        watch = Watch(_tensors((index, keys), set()))
        with watch:
            index.estimate(queries, found.ids, values, scale=0.1)
        said = index.estimate_bytes(GROUP, int((found.ids >= 0).sum()))
        assert 0.8 * watch.read_bytes <= said <= 1.2 * watch.read_bytes, kind
    assert built("flat")[0].estimate_bytes(GROUP, TOP) == 0


@OF_THE_HOST
def test_product_quantisation_reads_its_codes_and_not_rows() -> None:
    index, keys, queries = built("pq")
    dim = keys.shape[2]
    codes, centroids = ROWS * 2, 2 * 64 * (dim // 2) * 4
    read = index.search(queries, TOP).read_bytes
    assert read == HEADS * (codes + centroids + GROUP * TOP * dim * ITEM)


@OF_THE_HOST
@pytest.mark.parametrize("precision", ["stored", "int8"])
def test_a_scan_reads_keys_or_their_copies(precision: str) -> None:
    torch.manual_seed(3)
    keys, queries = clustered(ROWS, heads=HEADS, queries=GROUP)
    keys = keys.to(torch.bfloat16)
    index = IndexConfig(kind="flat", precision=precision).build()
    index.build(keys, None)
    read = index.search(queries, TOP).read_bytes
    ranked = max(-(-TOP * 3 // 2), TOP + 32) * GROUP * HEADS * keys.shape[2] * ITEM
    assert read == (keys.nbytes if precision == "stored" else index.memory_bytes + ranked)


@OF_THE_HOST
def test_faiss_reads_float32_for_each_query_by_itself() -> None:
    for kind in ("ivf", "hnsw"):
        index, keys, queries = built(kind)
        found = index.search(queries, TOP)
        link = 4 if kind == "hnsw" else 0
        row = keys.shape[2] * 4
        assert found.read_bytes == found.scored * (row + link) + HEADS * row, kind


@OF_THE_HOST
def test_hash_tables_read_the_buckets_of_a_query() -> None:
    index, keys, queries = built("lsh")
    tables, bits, dim = 11, 4, keys.shape[2]
    found = index.search(queries, TOP)
    planes = (torch.randn(dim, tables * bits, generator=torch.Generator().manual_seed(0))).float()
    mean = keys.mean(1, keepdim=True, dtype=torch.float32)
    weights = 2 ** torch.arange(bits)

    def code(rows: Tensor) -> Tensor:
        return ((rows @ planes > 0).unflatten(-1, (tables, bits)) * weights).sum(-1)

    of_keys, of_queries = code(keys.float() - mean), code(queries)
    members = int((of_keys[:, None] == of_queries[:, :, None]).sum())
    pointers = HEADS * GROUP * tables * 2
    sampled = found.scored * dim * ITEM
    assert found.read_bytes == HEADS * planes.nbytes + 4 * (members + pointers) + sampled


@OF_THE_HOST
@pytest.mark.skipif(engine_state().isa is None, reason="there is no engine")
@pytest.mark.parametrize("kind", ["sketch", "auto", "graph", "flat-int8", "flat-stored"])
@pytest.mark.parametrize("later", [0, 5, 300])
def test_what_the_engine_searches_reads_as_much(kind: str, later: int) -> None:
    torch.manual_seed(3)
    keys, queries = clustered(ROWS + later, heads=HEADS, queries=GROUP)
    keys = keys.to(torch.bfloat16)
    samples = queries[:, :, None] + 0.3 * torch.randn(HEADS, GROUP, 64, keys.shape[2])
    name, _, precision = kind.partition("-")
    own = {"precision": precision} if precision else PARAMS[kind]
    index = IndexConfig(kind=name, **own).build()
    index.build(keys[:, :ROWS], samples)
    index.add(keys)
    found, plan = index.search(queries, TOP), index.plan(TOP, TOP)
    assert plan is not None
    planned = SearchReads.joined([one.reads for one in plan], GROUP).of(GROUP, found.scored)
    assert found.read_bytes is not None
    near = 0.35 if kind == "graph" else 0.0  # which rows walks share, only the search knows
    assert found.read_bytes == pytest.approx(planned, rel=near)
    assert found.read_bytes < index.memory_bytes + keys.nbytes + 1


@OF_THE_HOST
def test_a_graph_reads_the_rows_that_it_visits() -> None:
    if engine_state().isa is None:
        pytest.skip("there is no engine")
    index, keys, queries = built("graph")
    if {head["serves"] for head in index.describe()} != {"graph"}:
        pytest.skip("no head of this sample is served by a graph")
    found = index.search(queries, TOP)
    assert found.rows_read is not None
    assert found.read_bytes is not None
    row = -(-keys.shape[2] // 16) * 16 + 1
    ranked = HEADS * GROUP * max(-(-TOP * 3 // 2), TOP + 32) * keys.shape[2] * ITEM
    lists = found.read_bytes - found.rows_read * row - ranked
    assert 0 < lists < index.memory_bytes


@OF_THE_HOST
def test_layers_that_go_together_read_what_they_score() -> None:
    torch.manual_seed(3)
    keys, queries = clustered(ROWS, heads=HEADS, queries=GROUP)
    keys, choices = keys.to(torch.bfloat16), Choices()
    first, second = SelectingIndex(choices), ReusingIndex(choices)
    first.build(keys, None)
    second.build(keys, None)
    choices.begin(anew=True)
    assert first.search(queries, TOP).read_bytes == keys.nbytes
    choices.begin(anew=False)
    again = second.search(queries, TOP).read_bytes
    assert again == HEADS * GROUP * TOP * keys.shape[2] * ITEM


# Methods ----------------------------------------------------------------------------------------

SMALL = {"page_size": 4, "sink_tokens": 4, "window_tokens": 32}
PROMPT, STEPS, BUDGET = 301, 3, 65
PARTS = [f"{part}_bytes" for part in ("resident", "select", "search", "cold", "estimate")]
Q_HEADS, KV_HEADS, HEAD_DIM, LAYERS = 6, 2, 16, 2  # of random:tiny
ROW = 2 * HEAD_DIM * ITEM


@pytest.fixture(autouse=True)
def _trained(untrained_heads: None) -> None:
    """Methods that need trained parts have some."""


class HeldBytes(NamedTuple):
    """Of all layers: of pages and of what the method keeps, of indexes, of offloaded entries."""

    near: int
    index: int
    far: int

    @classmethod
    def by(cls, kv: KVCache) -> HeldBytes:
        far = sum(len(row.cold) for row in every(kv)) * KV_HEADS * ROW
        return cls(tiers(kv).device_kv, tiers(kv).host_index, far)


def decoded(method: str, **settings: Any) -> tuple[Work, HeldBytes]:
    """What some steps of a tiny model at a small budget have counted, and what is held then."""
    model = placed(load_model("random:tiny", device="cpu", dtype="bfloat16"))
    plugin = METHODS[method]
    known = {*plugin.params.model_fields, "page_size"}
    sizes = {name: value for name, value in SMALL.items() if name in known}
    needed = {"heads": "drawn"} if method == "locret" else {}  # see the fixture
    config = hkv.HybridConfig(method=method, index_build="wait", **{**sizes, **needed, **settings})
    at_budget = plugin.factory.at_budget
    params = at_budget(config.params, BUDGET, context_tokens=PROMPT, page_size=4)
    torch.manual_seed(0)
    with (
        hkv.attach(model, config.model_copy(update={"params": params})) as runtime,
        torch.inference_mode(),
    ):
        cache = runtime.cache()
        model(torch.randint(0, 500, (1, PROMPT)).to(device()), **passing(cache))
        cache.kv.work = Work()
        for token in range(STEPS):
            model(torch.tensor([[token]]).to(device()), **passing(cache))
        return cache.kv.work, HeldBytes.by(cache.kv)


@pytest.mark.parametrize("method", list(METHODS))
def test_a_step_reads_what_is_held_and_counts_it_alike_either_way(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    work, held = decoded(method)
    read = {part: getattr(work, part) for part in PARTS}
    assert work.read_bytes == sum(read.values()) > 0
    assert min(read.values()) >= 0
    group = Q_HEADS // KV_HEADS
    # A page may leave the window as steps go by.
    near = held.near + LAYERS * KV_HEADS * 4 * ROW
    assert read["resident_bytes"] <= STEPS * near
    assert read["search_bytes"] <= STEPS * group * (held.index + held.far)
    assert read["cold_bytes"] <= STEPS * held.far
    if not held.far:
        assert work.read_bytes == read["resident_bytes"] + read["select_bytes"]
    monkeypatch.setenv("HYBRID_KV_ONE_CALL", "0")
    again, _ = decoded(method)
    assert {part: getattr(again, part) for part in PARTS} == read


def test_what_is_attended_on_the_device_is_read_once_for_a_group() -> None:
    work, _ = decoded("full")
    assert work.resident_bytes == work.read_bytes
    lengths = [PROMPT + step + 1 for step in range(STEPS)]
    assert work.read_bytes == LAYERS * KV_HEADS * ROW * sum(lengths)
    assert work.steps == LAYERS * Q_HEADS * STEPS


def test_the_moments_of_an_estimate_are_read() -> None:
    work, _ = decoded("hybrid")
    kept = split_budget(BUDGET, 4)
    cold = PROMPT // 4 * 4 - kept.sink_tokens - kept.window_tokens
    moments = moments_bytes(1, HEAD_DIM, cold)
    assert work.estimate_bytes == STEPS * LAYERS * KV_HEADS * moments
    assert decoded("flat")[0].estimate_bytes == 0


def test_page_digests_are_read_as_wide_as_an_entry() -> None:
    work, _ = decoded("quest", dense_layers=0)
    pages = [-(-(PROMPT + step + 1) // 4) for step in range(STEPS)]
    assert work.select_bytes == LAYERS * KV_HEADS * ROW * sum(pages)


def test_codes_are_read_and_not_the_rows_that_they_stand_for() -> None:
    pq, flat = decoded("pqcache")[0], decoded("flat")[0]
    cold = PROMPT // 4 * 4 - 4 - 36  # behind the sinks, before the window's pages
    ranked = (BUDGET - (flat.attended - flat.retrieved) / flat.steps) * 3
    keys = round(ranked) * HEAD_DIM * ITEM
    parts, centroids = 2, 64 * HEAD_DIM * 4
    read = pq.search_bytes / (STEPS * LAYERS * KV_HEADS)
    assert read == pytest.approx(cold * parts + centroids + keys, rel=0.02)
    chain, snapkv = decoded("chain")[0], decoded("snapkv")[0]
    assert 0 < chain.resident_bytes < snapkv.resident_bytes
