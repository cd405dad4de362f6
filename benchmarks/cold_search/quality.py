"""The exact answer of a set of queries, and how near to it a search comes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

K = 100
"""Keys that every search returns."""
SCORES = 2**25
"""Scores held at once while the exact answer is found."""
TIE = 1e-6
"""Scores nearer than this share of |q| |k| are equal: float32 sums differ that much by their order.
Trained models have many: the same token in the same place has the same key."""


@dataclass(frozen=True)
class Quality:
    """Averages over queries.

    recall: share of K keys returned that are among the best K, ties included; recall_p5: that of
    the worst twentieth. mass: softmax mass (scale 1 / sqrt(D), over all keys) of what was returned;
    mass_over_oracle: over that of the exact best K.
    """

    recall: float
    recall_p5: float
    mass_over_oracle: float
    mass: float


class Truth:
    """The exact answer of queries [P, G, D] over keys [N, D] by dot product."""

    def __init__(self, keys: torch.Tensor, queries: torch.Tensor) -> None:
        self._keys, self._queries = keys, queries.flatten(0, 1)
        self._scale = keys.shape[1] ** -0.5
        masses, logs, worst = [], [], []
        for part in self._queries.split(max(1, SCORES // len(keys))):
            scores = part @ keys.T
            top = scores.topk(K)
            logs.append(scores.mul_(self._scale).logsumexp(1))
            worst.append(top.values[:, -1])
            masses.append((top.values * self._scale - logs[-1][:, None]).exp().sum(1))
        norms = self._queries.norm(dim=1) * keys.norm(dim=1).max()
        self._threshold = torch.cat(worst) - TIE * norms
        self._masses, self._log_sums = torch.cat(masses), torch.cat(logs)
        self.oracle_mass = float(self._masses.mean())

    def recalls(self, found: np.ndarray) -> np.ndarray:
        """Recall of every query, [P * G], for ids [P * G, K], -1 where nothing was found."""
        return self._recalls(*self._scores(found))

    def judge(self, found: np.ndarray) -> Quality:
        """The quality of ids [P * G, K]; -1 for none, and a key that comes twice counts once."""
        scores, valid = self._scores(found)
        weights = (scores * self._scale - self._log_sums[:, None]).exp().masked_fill_(~valid, 0)
        mass = weights.sum(1)
        recalls = self._recalls(scores, valid)
        return Quality(
            recall=float(recalls.mean()),
            recall_p5=float(np.quantile(recalls, 0.05)),
            mass_over_oracle=float((mass / self._masses).mean()),
            mass=float(mass.mean()),
        )

    def _scores(self, found: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        """Scores [P * G, K] of distinct ids, and which of them are ids."""
        ids = torch.from_numpy(found).sort(1).values
        valid = ids >= 0
        valid[:, 1:] &= ids[:, 1:] != ids[:, :-1]
        rows = self._keys[ids.clamp_min(0)]
        return torch.einsum("mkd,md->mk", rows, self._queries), valid

    def _recalls(self, scores: torch.Tensor, valid: torch.Tensor) -> np.ndarray:
        good = (scores >= self._threshold[:, None]) & valid
        return (good.sum(1) / K).numpy()


def by_quarter(
    recalls: np.ndarray, steps: torch.Tensor, num_steps: int, group: int
) -> list[float | None]:
    """Mean recall in each quarter of the `num_steps` positions; None for one without queries.

    Args:
        recalls: [P * group], as the positions `steps` [P] are ordered.
    """
    quarter = (4 * steps.numpy() // num_steps).repeat(group)
    means = (recalls[quarter == part] for part in range(4))
    return [float(part.mean()) if len(part) else None for part in means]
