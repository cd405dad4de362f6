"""What a method's attention misses of all that ever was in the context, dropped entries included.

The audit of a cache knows what is stored. Here the keys and values of the whole prompt are at hand,
so that every method is held against the same exact attention.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from statistics import fmean

import torch
from torch import Tensor

from hybrid_kv.eval.prefilled import PrefilledPrompt
from hybrid_kv.runtime import KVCache
from hybrid_kv.types import PartialAttention


class Probe:
    """Looks at the newest query of every step: all layers and heads, one batch row.

    missed: share of the softmax that was not attended; errors: relative L2 distance of a head's
    output from exact attention's; one number for each step and layer, means over heads.
    """

    def __init__(self, prompt: PrefilledPrompt) -> None:
        self._prompt = prompt
        self._later: dict[int, tuple[Tensor, Tensor]] = {}
        self.missed: list[float] = []
        self.errors: list[float] = []

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
        missed = 1 - (part.lse[0, :, -1].float() - lse.flatten()).exp()
        errors = (out - exact).norm(dim=-1) / exact.norm(dim=-1).clamp_min(1e-30)
        self.missed.append(float(missed.clamp(0, 1).mean()))
        self.errors.append(float(errors.mean()))

    def means(self) -> tuple[float, float] | None:
        """Missed mass and output error over all looks; None without any."""
        return (fmean(self.missed), fmean(self.errors)) if self.missed else None

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
        try:
            yield self.probe
        finally:
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
