"""Methods that select by something short: each paper's formula written out, head by head."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from hybrid_kv.config import HybridConfig
from hybrid_kv.errors import ConfigError, MethodError
from hybrid_kv.index.clusters import ClustersIndex
from hybrid_kv.index.projections import QueryChannelsIndex
from hybrid_kv.plugins import Placement
from hybrid_kv.runtime import KVCache
from hybrid_kv.types import LayerShape, ModelInfo, Read, TokenBudget
from tests.kit import held
from tests.oracle import softmax_attention
from tests.runtime.keeping import KeepsHeaviest
from tests.tolerances import TOLERANCES

SHAPE, SCALE, PROMPT, GROUP = LayerShape(0, 6, 2, 72), 0.11, 333, 3
SINKS, WINDOW, TOP_K = 16, 32, 21

SETTINGS: dict[str, dict[str, Any]] = {
    "sparq": {"num_channels": 9},
    "sparq-shared": {"num_channels": 9, "shared": True},
    "double_sparsity": {"channel_ratio": 0.1, "sampled_queries": PROMPT},
    "loki": {"component_ratio": 0.2},
    "infinigen_proxy": {"column_ratio": 0.2, "sampled_queries": PROMPT},
    "pqcache": {"num_parts": 5, "num_bits": 4, "iterations": 200},
    "ctkvr": {"num_centroids": 10, "list_tokens": 17, "num_probes": 3},
    "retroinfer": {"cluster_tokens": 7, "segment_tokens": 100, "update_tokens": 24},
    "rekv": {"page_size": 7},
}


class Played:
    """A cache of one layer whose keys lean on some channels, and all that was stored in it."""

    def __init__(self, name: str, rows: int = 1, **cold: Any) -> None:
        index = {"kind": KINDS[name], **SETTINGS[name]}
        config = HybridConfig(
            method=name.partition("-")[0],
            page_size=16,
            sink_tokens=SINKS,
            window_tokens=WINDOW,
            cold={"top_k": TOP_K, "index": index, **cold},
        )
        self.kv = KVCache(ModelInfo((SHAPE,)), config)
        self.lean = torch.rand(2, 1, 72) * 2
        self.q, self.k, self.v = (torch.empty(rows, heads, 0, 72) for heads in (6, 2, 2))
        self.step(PROMPT)
        self.step()
        self.num_first = self.num_cold
        self.learned: dict[int, Any] = {}

    @property
    def num_cold(self) -> int:
        return len(held(self.kv).cold)

    @property
    def index(self) -> Any:
        return held(self.kv).extents[0].index.serving.innermost

    def step(self, new: int = 1) -> tuple[Tensor, Tensor]:
        """Queries and outputs [B, Hq, 1, D]."""
        q, k, v = (torch.randn(len(self.k), heads, new, 72) for heads in (6, 2, 2))
        k, v = k * self.lean + 0.3, v + torch.linspace(-1, 1, 72)
        self.q, self.k, self.v = (
            torch.cat([old, more], 2) for old, more in ((self.q, q), (self.k, k), (self.v, v))
        )
        return q, self.kv.attend(0, q, (k, v), None, scale=SCALE).out

    def expected(self, q: Tensor, choose: Callable[..., Any]) -> Tensor:
        """[B, Hq, D]: softmax over sinks, window and what is chosen of the `count` cold entries,
        beside an estimated weight and value of the others.
        """
        count, length = self.count, self.k.shape[2]
        out = torch.empty(len(q), 6, 72)
        for row in range(len(q)):
            for head in range(6):
                kv, asked = head // GROUP, q[row, head, 0].double()
                keys, values = (
                    t[row, kv, SINKS : SINKS + count].double() for t in (self.k, self.v)
                )
                ids, rest = choose(self, row, head, asked, keys, values)
                near = torch.ones(length, dtype=torch.bool)
                near[SINKS : SINKS + count] = False
                near[SINKS + ids] = True
                k, v = self.k[row, kv][near].double(), self.v[row, kv][near].double()
                weights = (SCALE * k @ asked).exp()
                total, sums = weights.sum(), weights @ v
                if rest is not None:
                    total, sums = total + rest[0], sums + rest[1]
                out[row, head] = (sums / total).float()
        return out

    def once(self, kv: int, make: Callable[[], Any]) -> Any:
        """What is learned of the prompt, by KV head: as long as it lasts."""
        if kv not in self.learned:
            self.learned[kv] = make()
        return self.learned[kv]

    def check(self, choose: Callable[..., Any]) -> None:
        self.count = self.num_cold  # those that this step may find
        self.groups = getattr(self.index, "_groups", None)  # a page may leave behind it
        q, out = self.step()
        expected = self.expected(q, choose)
        torch.testing.assert_close(out[:, :, 0], expected, **TOLERANCES[torch.float32])


def best(scores: Tensor) -> Tensor:
    return scores.topk(min(TOP_K, len(scores))).indices


def sparq(played: Played, row: int, head: int, q: Tensor, k: Tensor, v: Tensor) -> Any:
    """S = softmax(q_r K_r^T / (tau sqrt(D))), alpha = its share of the top k, and
    alpha attention(top k) + (1 - alpha) mean(V).
    """
    return of_group(q, q[None], 1.0, k, v)


def sparq_shared(played: Played, row: int, head: int, q: Tensor, k: Tensor, v: Tensor) -> Any:
    """The same, r by the sum of |q| over the group of query heads, the top k by that of S."""
    first = GROUP * (head // GROUP)
    group = played.q[row, first : first + GROUP, -1].double()
    return of_group(q, group, 72**-0.5, k, v)


def of_group(q: Tensor, group: Tensor, scale: float, k: Tensor, v: Tensor) -> Any:
    """Of a query [D] among those that choose with it [G, D], whose softmax has a scale."""
    size = group.abs().sum(0)
    largest = sorted(range(72), key=lambda c: -float(size[c]))[:9]

    def share_of(q: Tensor, scale: float) -> Tensor:
        tau = (q[largest].abs().sum() / q.abs().sum()).sqrt()
        return (scale * (k[:, largest] @ q[largest]) / tau).softmax(0)

    ids = best(torch.stack([share_of(one, scale) for one in group]).sum(0))
    share = share_of(q, SCALE)
    alpha = share[ids].sum()
    found = (SCALE * k[ids] @ q).exp().sum()
    weight = found * (1 - alpha) / alpha
    return ids, (weight, weight * v.mean(0))


def of_prompt(played: Played, row: int, kv: int) -> tuple[Tensor, Tensor]:
    """Queries [G, N, D] of the prompt, and its keys [n, D] that left first."""
    asked = played.q[row, 3 * kv : 3 * kv + 3, :PROMPT].double()
    return asked, played.k[row, kv, SINKS : SINKS + played.num_first].double()


def double_sparsity(played: Played, row: int, head: int, q: Tensor, k: Tensor, v: Tensor) -> Any:
    def make() -> list[int]:
        asked, first = of_prompt(played, row, head // GROUP)
        scores = [float(asked[..., c].abs().mean() * first[:, c].abs().mean()) for c in range(72)]
        return sorted(range(72), key=lambda c: -scores[c])[:7]

    label = played.once(head // GROUP, make)
    return best(k[:, label] @ q[label]), None


def loki(played: Played, row: int, head: int, q: Tensor, k: Tensor, v: Tensor) -> Any:
    def make() -> Tensor:
        first = of_prompt(played, row, head // GROUP)[1].numpy()
        return torch.from_numpy(np.linalg.svd(first - first.mean(0), full_matrices=False)[2][:14])

    vectors = played.once(head // GROUP, make)
    return best((k @ vectors.T) @ (vectors @ q)), None


def infinigen(played: Played, row: int, head: int, q: Tensor, k: Tensor, v: Tensor) -> Any:
    def make() -> Tensor:
        asked, first = (t.numpy() for t in of_prompt(played, row, head // GROUP))
        asked = asked.reshape(-1, 72)
        turn = np.linalg.svd(asked, full_matrices=False)[2].T
        sizes = abs(asked @ turn).mean(0) + abs(first @ turn).mean(0)
        return torch.from_numpy(turn[:, np.argsort(-sizes)[:14]].copy())

    some = played.once(head // GROUP, make)
    return best((k @ some) @ (some.T @ q)), None


def pqcache(played: Played, row: int, head: int, q: Tensor, k: Tensor, v: Tensor) -> Any:
    """By centroids that are the means of the first keys nearest to them: k-means has ended."""
    centroids = played.index._centroids.view(2, 5, 16, 15)[head // GROUP].double()
    parts = torch.nn.functional.pad(k, (0, 3)).view(-1, 5, 15)
    nearest = torch.stack([torch.cdist(parts[:, p], centroids[p]).argmin(1) for p in range(5)], 1)

    def means() -> Tensor:
        first, own = parts[: played.num_first], nearest[: played.num_first]
        return torch.stack(
            [
                torch.stack([first[own[:, part] == c, part].mean(0) for c in range(16)])
                for part in range(5)
            ]
        )

    torch.testing.assert_close(
        played.once(head // GROUP, means), centroids, rtol=0, atol=1e-5, equal_nan=False
    )
    stands = centroids[torch.arange(5), nearest]
    return best(stands.flatten(1)[:, :72] @ q), None


def ctkvr(played: Played, row: int, head: int, q: Tensor, k: Tensor, v: Tensor) -> Any:
    kv = head // GROUP
    last = played.q[row, 3 * kv : 3 * kv + 3, PROMPT - 4 : PROMPT].double()
    centroids = last.transpose(0, 1).flatten(0, 1)[-10:]
    like = torch.nn.functional.cosine_similarity(centroids, q[None])
    listed = {int(i) for c in like.topk(3).indices for i in (k @ centroids[c]).topk(17).indices}
    ids = torch.tensor(sorted(listed))
    return ids[best(k[ids] @ q)], None


def retroinfer(played: Played, row: int, head: int, q: Tensor, k: Tensor, v: Tensor) -> Any:
    group = played.groups.group[head // GROUP].tolist()
    group += [-1] * (len(k) - len(group))  # not clustered yet: scored one and all
    clusters: dict[int, list[int]] = {}
    for n, c in enumerate(group):
        clusters.setdefault(c, []).append(n)
    later = clusters.get(-1, [])
    by_score = sorted(
        (members for c, members in clusters.items() if c >= 0),
        key=lambda members: -float(k[members].mean(0) @ q),
    )
    read: list[int] = []
    for members in by_score:
        if len(read) >= TOP_K:
            break
        read += members
    pool = torch.tensor(read + later)
    ids = pool[best(k[pool] @ q)]
    found, weight, sums = set(ids.tolist()), torch.zeros(()), torch.zeros(72)
    for members in clusters.values():
        left = len(set(members) - found)
        each = left * (SCALE * k[members].mean(0) @ q).exp()
        weight, sums = weight + each, sums + each * v[members].mean(0)
    return ids, (weight, sums)


def rekv(played: Played, row: int, head: int, q: Tensor, k: Tensor, v: Tensor) -> Any:
    count = played.count
    keys = played.k[row, :, SINKS : SINKS + count].double()
    newest = played.q[row, :, -1].double()
    mean = torch.cat([newest[:3].mean(0), newest[3:].mean(0)])
    scores = []
    for start in range(0, count, 7):
        frame = torch.cat([keys[0, start : start + 7].mean(0), keys[1, start : start + 7].mean(0)])
        scores.append(torch.nn.functional.cosine_similarity(frame, mean, dim=0))
    frames = torch.stack(scores).topk(3).indices
    ids = torch.cat([torch.arange(7 * f, min(count, 7 * f + 7)) for f in frames.tolist()])
    return ids, None


CHOICES: dict[str, Callable[..., Any]] = {
    "sparq": sparq,
    "sparq-shared": sparq_shared,
    "double_sparsity": double_sparsity,
    "loki": loki,
    "infinigen_proxy": infinigen,
    "pqcache": pqcache,
    "ctkvr": ctkvr,
    "retroinfer": retroinfer,
    "rekv": rekv,
}
KINDS = {
    "sparq": "query_channels",
    "sparq-shared": "query_channels",
    "double_sparsity": "label_channels",
    "loki": "pca",
    "infinigen_proxy": "skewed_channels",
    "pqcache": "pq",
    "ctkvr": "query_lists",
    "retroinfer": "clusters",
    "rekv": "frames",
}


@pytest.mark.parametrize("name", CHOICES)
def test_attends_what_the_formula_of_the_paper_says(name: str) -> None:
    played = Played(name)
    for _ in range(37):  # pages leave the window meanwhile
        played.check(CHOICES[name])
    work = played.kv.work
    assert 0.1 < work.attended / work.visible < 0.35


@pytest.mark.parametrize(
    ("name", "index"), [("sparq", {"kind": "query_channels", "shared": True}), ("shadowkv", None)]
)
def test_tokens_that_come_together_choose_one_by_one(name: str, index: Any) -> None:
    """As if they had come alone: heads of one token share their choice, tokens do not."""
    cold = {"top_k": TOP_K} | ({"index": index} if index else {})
    sizes = {"sink_tokens": SINKS, "window_tokens": WINDOW}
    config = HybridConfig(method=name, page_size=16, cold=cold, **sizes)
    together, alone = (KVCache(ModelInfo((SHAPE,)), config) for _ in range(2))
    q, k, v = (torch.randn(2, heads, PROMPT + 3, 72) for heads in (6, 2, 2))
    first, later = slice(PROMPT), slice(PROMPT, None)
    for kv in (together, alone):
        kv.attend(0, q[:, :, first], (k[:, :, first], v[:, :, first]), None, scale=SCALE)
    out = together.attend(0, q[:, :, later], (k[:, :, later], v[:, :, later]), None, scale=SCALE)
    for token in range(3):
        own = slice(PROMPT + token, PROMPT + token + 1)
        one = alone.attend(0, q[:, :, own], (k[:, :, own], v[:, :, own]), None, scale=SCALE)
        torch.testing.assert_close(
            out.out[:, :, token], one.out[:, :, 0], **TOLERANCES[torch.float32]
        )
    assert together.work.scored == alone.work.scored
    assert together.work.search_bytes == alone.work.search_bytes


@pytest.mark.parametrize("name", ["sparq", "sparq-shared", "retroinfer"])
def test_an_estimate_is_of_what_a_cropped_row_still_holds(name: str) -> None:
    played = Played(name, rows=2)
    for _ in range(37):
        played.step()
    for layer in played.kv.layers.values():
        layer.fork([0, 0])
        layer.crop(60)
    played.q, played.k, played.v = (t[[0, 0], :, :-60] for t in (played.q, played.k, played.v))
    (extent,) = held(played.kv).extents
    assert extent.length < extent.stored
    length, keys, values = extent.length, extent.k.double(), extent.v.double()
    q, ids = torch.randn(2, 3, 72), torch.arange(0, 75, 5).expand(2, 3, -1)
    out, lse = extent.index.answers.estimate(q, ids, extent.v, scale=SCALE)
    for head, m in ((0, 1), (1, 2)):
        asked, left = q[head, m].double(), torch.ones(length, dtype=torch.bool)
        left[ids[head, m]] = False
        if name.startswith("sparq"):
            group = q[head] if name == "sparq-shared" else q[head, m, None]
            largest = group.double().abs().sum(0).topk(9).indices
            tau = (asked[largest].abs().sum() / asked.abs().sum()).sqrt()
            share = (SCALE * (keys[head][:, largest] @ asked[largest]) / tau).softmax(0)
            found = (SCALE * keys[head][~left] @ asked).exp().sum()
            weight = found * share[left].sum() / share[~left].sum()
            expected = values[head].mean(0)
        else:
            group = played.index._groups.group[head].long()
            weights, means = [], []
            for c in group[:length].unique():  # keys that were forgotten still move the centroid
                whole = extent.stored_k[head, : len(group)][group == c].double()
                count = (left & (group[:length] == c)).sum()
                weights.append(count * (SCALE * whole.mean(0) @ asked).exp())
                means.append(values[head][group[:length] == c].mean(0))
            weight = torch.stack(weights).sum()
            expected = torch.stack(weights) @ torch.stack(means) / weight
        torch.testing.assert_close(lse[head, m], weight.log().float(), **TOLERANCES[torch.float32])
        torch.testing.assert_close(out[head, m], expected.float(), **TOLERANCES[torch.float32])


@pytest.mark.parametrize("name", ["sparq", "retroinfer"])
def test_the_estimate_brings_the_output_nearer_to_full_attention(name: str) -> None:
    errors = []
    for estimate in ("index", "none"):
        torch.manual_seed(3)
        played = Played(name, estimate=estimate)
        total = 0.0
        for _ in range(5):
            q, out = played.step()
            for head in range(6):
                kv = head // GROUP
                exact = softmax_attention(
                    q[0, head], played.k[0, kv], played.v[0, kv], scale=SCALE
                )[0]
                total += float((out[0, head] - exact).norm())
        errors.append(total)
    assert errors[0] < 0.6 * errors[1]


def test_clusters_are_of_a_segment_and_alike() -> None:
    """Keys that point where others do are in one cluster with them, whatever their place."""
    towards = torch.nn.functional.normalize(torch.randn(10, 72), dim=-1)
    which = torch.randint(10, (200,))
    keys = (towards[which] * (1 + torch.rand(200, 1)))[None]
    index = ClustersIndex(ClustersIndex.Params(cluster_tokens=3, segment_tokens=100))
    index.build(keys, None)
    group = index._groups.group[0]
    assert set(group[:100].tolist()).isdisjoint(group[100:].tolist())
    for c in group.unique():
        assert len(which[group == c].unique()) == 1


def test_nothing_that_was_found_is_estimated_again() -> None:
    keys, values, q = torch.randn(2, 40, 8), torch.randn(2, 40, 8), torch.randn(2, 3, 8)
    every = torch.arange(40).expand(2, 3, -1)
    for kind in (ClustersIndex, QueryChannelsIndex):
        index = kind(kind.Params())
        index.build(keys, None)
        _, lse = index.estimate(q, every, values, scale=1.0)
        assert (lse == -torch.inf).all()


class _Copies(KeepsHeaviest):
    """Asks for an estimate beside copies of its own."""

    def seal(self, layer_idx: int, evidence: Any) -> Placement:
        make = lambda: ClustersIndex(ClustersIndex.Params())  # noqa: E731
        return replace(super().seal(layer_idx, evidence), index=make)

    def read(self, layer_idx: int, q: Tensor) -> Read:
        return Read(cold=TokenBudget(5, estimate="index"))


def test_an_estimate_beside_copies_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    config = HybridConfig(method="retroinfer", page_size=16)
    own = _Copies(_Copies.Params(offload=True))
    monkeypatch.setattr(HybridConfig, "build", lambda self: own)
    kv = KVCache(ModelInfo((SHAPE,)), config)
    q, k, v = (torch.randn(1, heads, 100, 72) for heads in (6, 2, 2))
    kv.attend(0, q, (k, v), None, scale=SCALE)
    with pytest.raises(MethodError, match="estimate 'index' must go with a placement"):
        kv.attend(0, q[:, :, :1], (k[:, :, :1], v[:, :, :1]), None, scale=SCALE)


def test_only_what_estimates_is_taken_for_an_index() -> None:
    with pytest.raises(ConfigError, match=r"index.kind: input should be 'clusters', got 'f"):
        HybridConfig(method="retroinfer", cold={"index": "flat"})


@pytest.mark.parametrize(("name", "blocks"), [("rekv", 64), ("infllm", 16)])
def test_whole_blocks_are_read_by_default(name: str, blocks: int) -> None:
    cold = HybridConfig(method=name).cold
    size = cold.index.page_size
    index = cold.index.build()
    index.build(torch.randn(2, (blocks + 2) * size, 8), None)
    ids = index.search(torch.randn(2, 3, 8), cold.top_k).ids
    for found in (ids // size).flatten(0, 1):
        _, counts = found.unique(return_counts=True)
        assert counts.tolist() == [size] * blocks


@pytest.mark.parametrize(
    ("name", "window", "top_k"),
    [
        ("shadowkv", 32, 2048),
        ("infllm", 512, 16 * 128),
        ("rekv", 512, 64 * 196),
        ("loki", 512, 100),
    ],
)
def test_defaults_are_of_the_papers_or_of_all_that_retrieve(
    name: str, window: int, top_k: int
) -> None:
    config = HybridConfig(method=name)
    assert (config.window_tokens, config.cold.top_k) == (window, top_k)
