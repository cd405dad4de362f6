"""Keyformer: H2O's running sum, of a softmax with noise that grows flatter as an answer grows."""

from __future__ import annotations

import torch
from pydantic import Field
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from hybrid_kv.attended import Attended
from hybrid_kv.config import Count, Tokens
from hybrid_kv.entries import Entries
from hybrid_kv.methods.evicting import group_sums, window_of
from hybrid_kv.methods.h2o import Moment, RecentShare, RecentShareParams
from hybrid_kv.plugins import METHODS
from hybrid_kv.types import Evidence, Needs

_RECENT_SHARE = 0.3
"""Of a budget, as the authors set it; their paper says .2 to .3."""
_LEAST = 1e-20
"""Of a sum of weights, so that what nobody looked at stays 0."""


@METHODS.register("keyformer", paper="Adnan et al. 2024, arXiv:2403.09054, section 3")
class Keyformer(RecentShare):
    """Keeps the highest sums of a noisy softmax and a recent window, and DROPS the rest.

    score[n] = sum over queries of exp((x[n] + z[n]) / t) / sum over m of exp((x[m] + z[m]) / t): x
    the logits over what is kept, z noise of the standard Gumbel distribution, drawn once for each
    token and KV head, t from first_temperature in the prompt to last_temperature after
    answer_tokens of the answer, in a straight line.

    Deviations: scores of the prompt are estimated from sampled_queries of its queries, a page
    competes at a time, and the prompt is cut at its end, as in h2o; weights of a group of query
    heads are summed, with one noise; the length of an answer is a parameter, for nobody knows it;
    tokens that come together have one temperature; what demote "offload" finds is not in the sum.
    """

    class Params(RecentShareParams):
        """window_tokens: a fourth of the usual budget (the paper: 20 to 30%);
        sampled_queries: of the prompt, which score; first_temperature, last_temperature: of the
        softmax, in the prompt and in the end; answer_tokens: after which the end is reached;
        seed: of the noise.
        """

        window_tokens: Tokens = 256
        sampled_queries: Count = 256
        first_temperature: float = Field(default=1.0, gt=0, allow_inf_nan=False)
        last_temperature: float = Field(default=2.0, gt=0, allow_inf_nan=False)
        answer_tokens: Count = 512
        seed: int = Field(default=0, ge=0)

    @classmethod
    def recent_tokens(cls, budget: int) -> float:
        return _RECENT_SHARE * budget

    @property
    def needs(self) -> Needs:
        return super().needs | Needs(self.params.sampled_queries)

    def prompt_scores(self, seen: Evidence, num_kv_heads: int, layer_idx: int) -> Tensor:
        at = torch.arange(seen.num_tokens)

        def noisy(weights: Tensor, asked: Tensor) -> Tensor:
            z = self.noise(layer_idx, num_kv_heads, at.to(weights.device))
            raised = self._raised(weights, z[:, None, None], self.params.first_temperature)
            return raised / raised.sum(-1, keepdim=True).clamp_min(_LEAST)

        return group_sums(seen.total_mass(each=noisy), num_kv_heads)

    def absorb(
        self, layer_idx: int, row: int, kept: Entries | None, left: Entries, seen: Evidence | None
    ) -> Entries:
        new = super().absorb(layer_idx, row, kept, left, seen)
        if seen is None:
            return new
        return new.with_state(prompt=torch.full((), seen.num_tokens, device=left.k.device))

    def masses(self, layer_idx: int, attended: Attended, row: int) -> tuple[Tensor, Tensor, Tensor]:
        kept = attended.kept[row]
        near, positions = attended.window_weights(row)
        temperature = self._temperature(attended.lengths[row], kept)
        near = self._raised(near, self.noise(layer_idx, len(near), positions)[:, None], temperature)
        far = None
        total = near.sum(-1, keepdim=True)
        if kept is not None:
            # A crop leaves heads with different numbers; those of fewer get weights of 0.
            at = pad_sequence(list(kept.split("positions")), batch_first=True)
            weights = [one.T for one in attended.weights(row)]
            far = pad_sequence(weights, batch_first=True).transpose(1, 2)
            far = self._raised(far, self.noise(layer_idx, len(at), at)[:, None], temperature)
            total = total + far.sum(-1, keepdim=True)
        total = total.clamp_min(_LEAST)
        masses = near.new_zeros(0 if kept is None else len(kept.positions))
        if kept is not None and far is not None:
            for into, head in zip(kept.split(masses), (far / total).sum(1), strict=True):
                into.copy_(head[: len(into)])
        return masses, *window_of(attended, row, ((near / total).sum(1), positions))

    def moved(self, old: Tensor, mass: Tensor, moment: Moment) -> Tensor:
        return old + mass

    def _temperature(self, end: int, kept: Entries | None) -> Tensor | float:
        """After a step up to position `end` - 1."""
        first, last = self.params.first_temperature, self.params.last_temperature
        if kept is None or "prompt" not in kept.state:
            return float(first)
        share: Tensor = ((end - kept.state["prompt"]) / self.params.answer_tokens).clamp(0, 1)
        return share * float(last - first) + float(first)

    def noise(self, layer_idx: int, num_kv_heads: int, positions: Tensor) -> Tensor:
        """[Hkv, N] standard Gumbel numbers of tokens at positions [N] or [Hkv, N].

        A hash of the position, so that forks, crops and checkpoints see the same.
        """
        salt = self.params.seed * 1_000_003 + layer_idx * 10_007
        heads = torch.arange(num_kv_heads, device=positions.device)[:, None]
        mixed = _mixed(_mixed(positions + salt) ^ _mixed(heads + 1))
        uniform = ((mixed >> 10).double() + 0.5) / 2**53
        noise: Tensor = -torch.log(-torch.log(uniform))
        return noise.to(torch.float32)

    def _raised(self, weights: Tensor, noise: Tensor, temperature: Tensor | float) -> Tensor:
        """exp((x + z) / t) of softmax weights exp(x) / Z, up to a factor of each query."""
        return (weights * noise.exp()) ** (1 / temperature)


def _mixed(x: Tensor) -> Tensor:
    """[...] int64, 0 and up: every bit of x changes half of them (the finaliser of SplitMix64)."""
    for shift, factor in ((30, -4658895280553007687), (27, -7723592293110705685)):
        x = (x ^ _shifted(x, shift)) * factor
    return (x ^ _shifted(x, 31)) & (2**63 - 1)


def _shifted(x: Tensor, bits: int) -> Tensor:
    """Shifted right, with zeros for the sign."""
    shifted: Tensor = (x >> bits) & (2 ** (64 - bits) - 1)
    return shifted
