"""The self-check of a learned index: held-out prefill queries against exact search.

A graph that was projected from queries cannot return a key that none of them retrieved, and nothing
in the graph says so. Queries that took no part in the build do: their exact answers give recall,
softmax mass and work at several beams, and a head that does not pass is served otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any

import torch
from pydantic import Field, TypeAdapter
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Trial:
    """How one KV head is served at one beam, averaged over the held-out queries.

    recall: share of the exact top keys that were found; mass: softmax mass of what was found over
    that of the exact top keys; scanned: distinct keys scored for a group of query heads, over all.
    """

    beam: int
    recall: float
    mass: float
    scanned: float


@dataclass(frozen=True, slots=True)
class HeadReport:
    """What serves one KV head, and why.

    serves: "graph" or "flat"; beam: of the graph, 0 for flat; trials: what was measured; top_mass:
    softmax mass of the exact top keys over all cold keys (low: no index helps, widen the budget);
    effective_dim: of the keys as queries see them (high: hard for a graph); lists_s, project_s:
    seconds for the exact answers of the sampled queries, and for the graph from them.
    """

    serves: str
    reason: str
    beam: Annotated[int, Field(ge=0, le=2**20)] = 0
    trials: tuple[Trial, ...] = ()
    top_mass: float = 0.0
    effective_dim: float = 0.0
    lists_s: float = field(default=0.0, compare=False)
    project_s: float = field(default=0.0, compare=False)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> HeadReport:
        """From what `to_dict` gave.

        Raises:
            ValueError: a value is missing or of another type.
        """
        return _REPORT.validate_python(data)


_REPORT = TypeAdapter(HeadReport)


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


def hold_out(samples: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Splits samples [G, M, D] at evenly spread positions into (build, check).

    Args:
        count: positions to hold out; at most an eighth of M is.
    """
    total = samples.shape[1]
    count = min(count, total // 8)
    held = torch.zeros(total, dtype=torch.bool)
    if count:
        held[(torch.arange(count) * total // count + total // (2 * count))] = True
    return samples[:, ~held], samples[:, held]


def choose(
    trials: Sequence[Trial], target_recall: float, target_mass: float, max_scanned: float
) -> tuple[Trial | None, str]:
    """The least work that is good enough, or None with the reason.

    A head passes by recall, or by mass where the last keys of the top weigh nothing.
    """
    for trial in sorted(trials, key=lambda trial: trial.scanned):
        if trial.scanned > max_scanned:
            break
        if trial.recall >= target_recall or trial.mass >= target_mass:
            return trial, f"recall {trial.recall:.3f}, {trial.scanned:.1%} scanned"
    best = max(trials, key=lambda trial: trial.recall, default=None)
    if best is None:
        return None, "no held-out queries"
    missed = "is more work than" if best.recall >= target_recall else "misses the target"
    return None, (
        f"recall {best.recall:.3f} at {best.scanned:.1%} scanned {missed} "
        f"{target_recall:g} within {max_scanned:.0%}"
    )


def run_trials(
    held: HeldOut,
    search: Callable[[Tensor, int], tuple[Tensor, Tensor, float]],
    beams: Sequence[int],
    enough: float,
) -> list[Trial]:
    """Trials at growing beams until the recall is `enough`.

    Args:
        search: (queries [P, G, D], beam) -> ids, scores [P, G, K] and the mean share of distinct
            keys scored per position.
    """
    trials: list[Trial] = []
    for beam in beams:
        trials.append(held.judge(beam, *search(held.queries, beam)))
        if trials[-1].recall >= enough:
            break
    return trials


def effective_dim(keys: Tensor, metric: Tensor, most: int = 4096) -> float:
    """Dimensions that keys [N, D] spread over in the metric [D, D] of the queries.

    exp of the entropy of the normalised spectrum; rises with the share of keys a search must see.
    """
    rows = keys[:: max(1, keys.shape[0] // most)].float()
    rows = rows - rows.mean(0)
    eigenvalues, vectors = torch.linalg.eigh(metric)
    root = vectors * eigenvalues.clamp_min(0).sqrt()
    spread = torch.linalg.svdvals(rows @ root).square()
    share = spread / spread.sum().clamp_min(torch.finfo(spread.dtype).tiny)
    entropy = -(share * share.clamp_min(1e-30).log()).sum()
    return float(entropy.exp())
