"""Attention mass that a method misses of the whole context, dropped entries included.

The audit of a cache knows what is stored. Here the keys and values of the whole prompt are at hand,
so that every method is held against the same exact attention.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from statistics import fmean
from typing import NamedTuple

import torch
from torch import Tensor

from hybrid_kv.eval.prefilled import PrefilledPrompt
from hybrid_kv.runtime import KVCache
from hybrid_kv.types import PartialAttention
from hybrid_kv.watch.audit import WatchedStep


class LookMeans(NamedTuple):
    """Means over heads.

    missed_mass: share of the softmax that no exact attention read. mass_error: what was estimated
    too much of the mass of that softmax, below 0 what is missing. output_error: relative L2
    distance of a head's output from exact attention's.
    """

    missed_mass: float
    mass_error: float
    output_error: float


class Probe:
    """Looks at the newest query of every step: all layers and heads, one batch row.

    looks: means over heads, one for each step and layer.
    """

    def __init__(self, prompt: PrefilledPrompt) -> None:
        self._prompt = prompt
        self._later: dict[int, tuple[Tensor, Tensor]] = {}
        self.looks: list[LookMeans] = []
        self._estimated: Tensor | None = None

    def wants(self, layer_idx: int, q: Tensor) -> bool:
        """Every step."""
        return True

    def add(self, step: WatchedStep, part: PartialAttention) -> None:
        """Takes what a step through the method estimated of the entries that it did not read."""
        if step.found is not None and 0 in step.found:
            self._estimated = step.found[0][1].estimated

    def look(
        self,
        layer_idx: int,
        q: Tensor,
        new: tuple[Tensor, Tensor] | None,
        part: PartialAttention,
        scale: float,
        softcap: float | None,
    ) -> None:
        """Takes the queries, the new entries and the result of one layer's attention."""
        k, v = self._stored(layer_idx, new)
        asked = q[0, :, -1].float().unflatten(0, (k.shape[0], -1))  # [Hkv, G, D]
        logits = scale * (asked @ k.float().mT)
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        lse = logits.logsumexp(-1)
        exact = (logits.softmax(-1) @ v.float()).flatten(0, 1)
        out = part.out[0, :, -1].float()
        whole = (part.lse[0, :, -1].float() - lse.flatten()).exp()
        missed = 1 - whole
        if self._estimated is not None:
            guess = self._estimated.unflatten(1, (asked.shape[1], -1))[..., -1].flatten()
            missed, self._estimated = missed + (guess - lse.flatten()).exp(), None
        errors = (out - exact).norm(dim=-1) / exact.norm(dim=-1).clamp_min(1e-30)
        self.looks.append(
            LookMeans(
                float(missed.clamp(0, 1).mean()), float((whole - 1).mean()), float(errors.mean())
            )
        )

    def means(self) -> LookMeans | None:
        """Over all looks; None without any."""
        return LookMeans(*map(fmean, zip(*self.looks, strict=True))) if self.looks else None

    def _stored(self, layer_idx: int, new: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor]:
        """Everything up to the newest token, [Hkv, N, D] each."""
        if new is not None:
            later = self._later.get(layer_idx)
            k, v = new[0][0], new[1][0]
            if later is not None:
                k, v = torch.cat([later[0], k], 1), torch.cat([later[1], v], 1)
            self._later[layer_idx] = k, v
        later = self._later[layer_idx]
        k, v = (tensor[0] for tensor in self._prompt.of_layer(layer_idx))
        return torch.cat([k, later[0]], 1), torch.cat([v, later[1]], 1)


class ProbedKV(KVCache):
    """A cache whose steps somebody may look at."""

    probe: Probe | None = None

    @contextmanager
    def probed(self, prompt: PrefilledPrompt) -> Iterator[Probe]:
        """A block whose steps are looked at, right behind the prompt."""
        self.probe = Probe(prompt)
        self.watchers.append(self.probe)
        try:
            yield self.probe
        finally:
            self.watchers.remove(self.probe)
            self.probe = None

    def attend(
        self,
        layer_idx: int,
        q: Tensor,
        new: tuple[Tensor, Tensor] | None,
        valid: Tensor | None,
        *,
        scale: float,
        softcap: float | None = None,
    ) -> PartialAttention:
        part = super().attend(layer_idx, q, new, valid, scale=scale, softcap=softcap)
        if self.probe is not None:
            self.probe.look(layer_idx, q, new, part, scale, softcap)
        return part
