"""The self-check of a learned index, held-out queries against exact search; settings of graphs.

A graph that was projected from queries cannot return a key that none of them retrieved, and nothing
in the graph says so. Queries that took no part in the build do: their exact answers give recall,
softmax mass and work at several beams, and a head that does not pass is served otherwise.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from hybrid_kv import config
from hybrid_kv.index._base import SavedReport


class GraphParams(config.Params):
    """max_degree: longest list of neighbours; list_length: keys that a sampled query names;
    candidates, cap: neighbours considered per key, and the queries they are taken from; alpha:
    how much nearer one neighbour must be to stand for another; sampled_queries,
    recent_queries: prefill queries per query head to learn from, spread evenly (up to twice as
    many) and from the prompt's end; horizon_tokens: they are turned to so many positions behind
    the prompt (RoPE), and the graph is learned again, in the background, when so many further
    keys have come; 0 for neither; min_keys: fewer are scanned; beam: keys expanded per query,
    "auto" for what the self-check found; target_recall, target_mass: goals of the self-check,
    one of which has to be reached; check_positions: held out for it; check_top_k: the best keys
    that it asks for; max_scanned: largest share of the keys that a search may score.
    """

    max_degree: int = Field(default=64, ge=2, le=256)
    list_length: config.Count = 100
    candidates: config.Count = 512
    cap: int = Field(default=32, ge=2, le=255)
    alpha: float = Field(default=1.2, gt=0)
    sampled_queries: config.Tokens = 2048
    recent_queries: config.Tokens = 2048
    horizon_tokens: config.Tokens = 4096
    min_keys: config.Count = 16384
    beam: config.Count | Literal["auto"] = "auto"
    target_recall: float = Field(default=0.95, gt=0, le=1)
    target_mass: float = Field(default=0.999, gt=0)
    check_positions: config.Count = 128
    check_top_k: config.Count = 100
    max_scanned: float = Field(default=0.12, gt=0, le=1)


_SUMMED_KEYS = 8192


@dataclass(frozen=True, slots=True)
class Trial:
    """Result of one KV head at one beam, averaged over the held-out queries.

    recall: share of the exact top keys that were found; mass: softmax mass of what was found over
    that of the exact top keys; scanned: distinct keys scored for a group of query heads, over all;
    walks: how many the query heads are divided among.
    """

    beam: int
    recall: float
    mass: float
    scanned: float
    walks: int = 1


@dataclass(frozen=True, slots=True)
class HeadReport(SavedReport):
    """Decision on what serves one KV head, and why.

    serves: "graph", "flat" or "pages"; beam: of the graph, else 0; walks: how many its query heads
    are divided among; recall, mass: the promise: what held-out queries found so, as in `Trial`;
    trials: what was measured; top_mass: softmax mass of the exact top keys over all cold keys (low:
    no index helps, widen the budget); effective_dim: of the keys as queries see them (high: hard
    for a graph); lists_s, project_s: seconds for the exact answers of the sampled queries, and for
    the graph from them.
    """

    serves: str
    reason: str
    beam: Annotated[int, Field(ge=0, le=2**20)] = 0
    walks: Annotated[int, Field(ge=1, le=2**20)] = 1
    recall: float = 0.0
    mass: float = 0.0
    trials: tuple[Trial, ...] = ()
    top_mass: float = 0.0
    effective_dim: float = 0.0
    lists_s: float = field(default=0.0, compare=False)
    project_s: float = field(default=0.0, compare=False)


@dataclass(frozen=True, slots=True)
class HeldOut:
    """Held-out queries of one KV head with their exact answers.

    queries: [P, G, D] float32, the G query heads of the group at P positions; ids [P, G, K] int64
    and scores [P, G, K] float32, the exact top keys, best first; total [P, G], the log-sum-exp of
    the scores of all keys.
    """

    queries: Tensor
    ids: Tensor
    scores: Tensor
    total: Tensor
    scale: float

    @property
    def top_mass(self) -> float:
        """Mean softmax mass of the exact top keys."""
        logits = torch.logsumexp(self.scores * self.scale, -1)
        return float((logits - self.total).exp().mean())

    def judge(self, beam: int, ids: Tensor, scores: Tensor, scanned: float) -> Trial:
        """Compares what a search found: ids, scores [P, G, K], -1 and -inf where nothing."""
        found = (ids[..., :, None] == self.ids[..., None, :]).any(-1)
        recall = (found & (ids >= 0)).sum(-1) / self.ids.shape[-1]
        best = torch.logsumexp(self.scores * self.scale, -1)
        mass = (torch.logsumexp(scores * self.scale, -1) - best).exp()
        return Trial(beam, float(recall.mean()), float(mass.mean()), scanned)


def log_sums(queries: Tensor, keys: Tensor, best: Tensor, scale: float) -> Tensor:
    """[Q], log-sum-exp of the scaled scores of keys [N, D] with queries [Q, D].

    Most of it are the best ones [Q, K]; a sample tells of the others.
    """
    step = max(1, len(keys) // _SUMMED_KEYS)
    scores = queries @ keys[::step].float().T
    # Scores of one pair differ in their last bits with the shape of the product.
    least = best.amin(1, keepdim=True) - 1e-5 * best.abs().amax(1, keepdim=True)
    others = scores.masked_fill(scores >= least, -torch.inf)
    rest = torch.logsumexp(others * scale, 1) + math.log(step)
    return torch.logaddexp(torch.logsumexp(best * scale, 1), rest)
