"""Muon for the matrices, Adam for embeddings and norms, and the late clip of the logits."""

from __future__ import annotations

import torch
from torch import Tensor

from needle.model import MATRICES, Weights, logit_spread
from needle.recipe import ModelSize, Optimisation

_QUINTIC = (3.4445, -4.7750, 2.0315)
"""Coefficients of the Newton-Schulz iteration (K. Jordan, "Muon", 2024)."""


def orthogonalise(matrices: Tensor) -> Tensor:
    """The nearest semi-orthogonal matrices, roughly: [N, rows, columns], all at once."""
    a, b, c = _QUINTIC
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if tall else matrices
    x = (x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)).bfloat16()
    for _ in range(5):
        gram = torch.bmm(x, x.mT)
        gram = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, gram, x, beta=a)
    return (x.mT if tall else x).float()


class Optimiser:
    """Both optimisers behind one `step`; it owns the learning-rate schedule."""

    def __init__(self, weights: Weights, settings: Optimisation, total_steps: int) -> None:
        self._weights = weights
        self._settings = settings
        self._total_steps = total_steps
        self._momentum = {name: torch.zeros_like(weights[name]) for name in MATRICES}
        others = [tensor for name, tensor in weights.items() if name not in MATRICES]
        self._adam = torch.optim.AdamW(
            others, lr=settings.adam_lr, betas=(0.9, 0.98), weight_decay=0.0
        )

    def rate(self, step: int) -> float:
        """Share of the full learning rate: short warm-up, then flat, then linear to zero."""
        warm = min(1.0, (step + 1) / self._settings.warmup_steps)
        left = (self._total_steps - step) / (self._settings.decay_share * self._total_steps)
        return warm * min(1.0, left)

    @torch.no_grad()
    def step(self, step: int) -> None:
        """Applies the gradients and clears them."""
        rate = self.rate(step)
        for group in self._adam.param_groups:
            group["lr"] = self._settings.adam_lr * rate
        self._adam.step()
        beta = self._settings.muon_momentum
        for name in MATRICES:
            weight, momentum = self._weights[name], self._momentum[name]
            if weight.grad is None:
                continue
            momentum.lerp_(weight.grad, 1 - beta)
            update = orthogonalise(weight.grad.lerp(momentum, beta))
            rows, columns = weight.shape[-2:]
            weight -= self._settings.muon_lr * rate * max(1.0, rows / columns) ** 0.5 * update
        for tensor in self._weights.values():
            tensor.grad = None


def tau_at(step: int, total_steps: int, settings: Optimisation) -> float:
    """The largest logit spread allowed at `step`: falls geometrically, then stays."""
    share = min(1.0, step / (settings.tau_share * total_steps))
    return float(settings.first_tau * (settings.last_tau / settings.first_tau) ** share)


@torch.no_grad()
def clip_queries(
    weights: Weights, ids: Tensor, positions: Tensor, tau: float, size: ModelSize
) -> Tensor:
    """Scales W_q of every head whose logits stand out by more than `tau`; returns the spreads.

    Clipping late matters: with the last tau from the first step no induction heads form, and
    without any clip the logits grow until bf16 cannot tell neighbours apart.
    """
    spreads = logit_spread(weights, ids, positions, size)
    scale = (tau / spreads.clamp_min(1e-6)).clamp_max(1.0)
    rows = scale.repeat_interleave(size.head_dim, dim=1)
    weights["wq"] *= rows[:, :, None]
    return spreads
