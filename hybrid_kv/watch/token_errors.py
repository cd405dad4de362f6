"""Error bars of tokens: how far a decode step may be from full attention, from what it read anyway.

    step of a layer ──> half [heads] ──┐ mean over heads and layers
    logits of the model ──> entropy ───┴─> KL from full attention, and its bar
                        └─> margin ──────> risk that full attention's best token is another

`half` is |out - out'| / |out|, where out' is the step's output if of the n cold entries that a
query found only the floor(n / 2) best were read: the same scores, resident entries unchanged, and
the unread estimated as the step does it, with fewer read and their lowest logit as the limit. A
step that is one call of the engine computes it on the way (`hkv_step.half`); `half_of` does it for
all others.

It is 0 where a query found nothing and where everything is read. Where one entry was found, none is
the better half.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import exp, log
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from hybrid_kv.ops.tail import AttendedSums, Tail, capped
from hybrid_kv.plugins import Placement
from hybrid_kv.store import Retrieved, Row
from hybrid_kv.store.extent import ExtentView
from hybrid_kv.store.search import by_span, estimate_unread
from hybrid_kv.types import PartialAttention, Read, TokenBudget
from hybrid_kv.watch.audit import WatchedStep


class Calibration(NamedTuple):
    """Constants that turn signals of a token into its error, learned where full attention is known.

    kl: expected KL from full attention, as a multiple of half^2.5 times entropy^0.75. kl_bar: the
    multiple that 90% of tokens stay below. flip: weights of a logistic of 1, log(margin) and
    log(half).
    """

    kl: float
    kl_bar: float
    flip: tuple[float, float, float]


CALIBRATION = Calibration(kl=4.72, kl_bar=13.8, flip=(-0.44, -1.17, 1.43))
"""SmolLM2-135M under `hybrid` at 1, 2, 5% and 128 keys on 24 texts of eight kinds, 9,216 tokens; by
`benchmarks/error_bar/fit.py`. docs/results.md says what it is worth."""

_LEAST = 1e-6
"""Of margin and half, whose logarithms count."""


@dataclass(frozen=True, slots=True)
class TokenError:
    """Estimated distance of the distribution of one token from full attention's.

    Of this step alone, given the tokens before it. All are 0 where the step read everything, as the
    prompt's last one does, which gives the first token.

    kl: expected KL divergence from full attention's distribution, nats. kl_bar: 90% of tokens stay
    below it where it was calibrated. flip: risk, 0 to 1, that full attention's most probable token
    is another one.
    half: mean over heads and tiered layers; see the module. entropy: of the distribution, nats.
    margin: between its two largest logits.
    """

    kl: float
    kl_bar: float
    flip: float
    half: float
    entropy: float
    margin: float

    @classmethod
    def of(
        cls, half: float, entropy: float, margin: float, by: Calibration = CALIBRATION
    ) -> TokenError:
        """The error that a calibration reads from the signals of a token."""
        if half == 0.0:
            return cls(0.0, 0.0, 0.0, half, entropy, margin)
        size, (base, by_margin, by_half) = half**2.5 * max(entropy, 0.0) ** 0.75, by.flip
        odds = base + by_margin * log(max(margin, _LEAST)) + by_half * log(max(half, _LEAST))
        return cls(by.kl * size, by.kl_bar * size, 1 / (1 + exp(-odds)), half, entropy, margin)


def spreads_of(logits: Tensor) -> Tensor:
    """Entropy in nats, and margin of the two largest, of logits [..., V]; [..., 2] float32 where
    they lie.
    """
    logs = logits.float().log_softmax(-1)
    best = logs.topk(2).values
    entropy = torch.special.entr(logs.exp()).sum(-1)
    return torch.stack([entropy, best[..., 0] - best[..., 1]], -1)


# Which steps can tell ----------------------------------------------------------------------------


def why_unknown(place: Placement, read: Read, *, as_is: bool) -> str | None:
    """Says what of a layer's steps `half` would not see; None where it sees all of their error.

    Args:
        as_is: whether keys and values are stored as the model gives them.
    """
    if not as_is:
        return "stores keys and values in another form than the model's"
    if place.drops:
        return "drops entries, which no later step can weigh"
    if read.pages != "all":
        return "leaves out resident pages by their bounds"
    if not place.offloads or read.cold == "all":
        return None
    if read.cold is None:
        return "never reads the entries that left the window"
    if place.index is not None and not place.index().ranks:
        return "finds whole blocks, samples or rough candidates, not the best keys one by one"
    return None


# A step's half -----------------------------------------------------------------------------------


class HalvedStep(WatchedStep, Protocol):
    """A decode step of one layer, as `half_of` reads it. new: its tokens."""

    @property
    def new(self) -> int: ...
    @property
    def found(self) -> Mapping[int, tuple[TokenBudget, Retrieved]] | None: ...


def half_of(step: HalvedStep, part: PartialAttention, row: int = 0) -> Tensor:
    """`half` of the last token of a step, by query head: [Hkv, G] float32 on the host.

    Args:
        part: what the step gave, out [B, Hq, T, D] and lse [B, Hq, T].
    """
    # Query g * T + t is that of token t.
    return _half_of(step, part, row, slice(step.new - 1, None, step.new))


def halves_of(step: HalvedStep, part: PartialAttention, row: int = 0) -> Tensor:
    """`half` of every token of a step, by query head: [Hkv, G, T] float32 on the host."""
    halves: Tensor = _half_of(step, part, row, slice(None)).unflatten(1, (-1, step.new))
    return halves


def _half_of(step: HalvedStep, part: PartialAttention, row: int, some: slice) -> Tensor:
    stored, size = step.layer.rows[row], step.grouped.shape[1:3]
    if step.found is None or row not in step.found:  # nothing is cold, or all of it was attended
        return torch.zeros(size)[:, some]
    budget, found = step.found[row]
    if found.half is not None:
        return found.half
    ids = [one.ids[:, some] for one in found.parts]
    q = step.grouped[row][:, some].cpu().float()
    out = part.out[row].reshape(*size, -1)[:, some].cpu().float()
    lse = part.lse[row].reshape(size)[:, some].cpu().float()
    return _Halving(step, stored, budget, q, ids).half(out, lse)


class _Halving:
    """The entries that a query found, and the better half of them.

    Args:
        q: [Hkv, M, D] float32. ids: by extent [Hkv, M, K] of its entries, -1 for none.
    """

    def __init__(
        self,
        step: HalvedStep,
        row: Row,
        budget: TokenBudget,
        q: Tensor,
        ids: Sequence[Tensor],
    ) -> None:
        self._scale, self._softcap = step.scale, step.softcap
        self._row, self._budget, self._q, self._ids = row, budget, q, ids
        self._logits = [self._logits_of(*each) for each in zip(row.chain.spans, ids, strict=True)]
        every = torch.cat(self._logits, -1)
        places = every.argsort(dim=-1, descending=True, stable=True).argsort(-1)
        best = places < (every > -torch.inf).sum(-1, keepdim=True) // 2
        self._best = best.split([one.shape[-1] for one in ids], -1)

    def half(self, out: Tensor, lse: Tensor) -> Tensor:
        """[Hkv, M] of the step's output [Hkv, M, D], with log-sum-exp [Hkv, M].

        Only what the worse half and the estimate change is computed, in shares of all that the step
        weighed, so that the rounding of `out` counts little.
        """
        lost, weight = torch.zeros_like(out), torch.zeros_like(lse)
        better = [ids.where(best, -1) for ids, best in zip(self._ids, self._best, strict=True)]
        parts = zip(self._row.chain.spans, self._ids, better, self._logits, strict=True)
        for number, (span, all_ids, best_ids, logits) in enumerate(parts):
            shares = (logits - lse[..., None]).exp().masked_fill(best_ids >= 0, 0.0)
            lost += _summed(span, all_ids, shares)
            weight += shares.sum(-1)
            for sign, ids, chosen in ((1, all_ids, self._ids), (-1, best_ids, better)):
                if self._budget.estimate is None:
                    continue
                unread = self._unread(number, span, ids, self._lowest(chosen))
                share = sign * (unread.lse - lse).exp()
                lost += share[..., None] * unread.out.where(share[..., None] != 0, 0.0)
                weight += share
        moved = (lost - weight[..., None] * out) / (1 - weight)[..., None]
        sizes = moved.norm(dim=-1), out.norm(dim=-1)
        return torch.where(sizes[0] == 0, 0.0, sizes[0] / sizes[1])

    def _logits_of(self, span: ExtentView, ids: Tensor) -> Tensor:
        """[Hkv, M, K] float32, -inf for none."""
        keys = span.extent.k[_heads(ids), ids.clamp_min(0)].float()
        scores = torch.einsum("hmkd,hmd->hmk", keys, self._q).masked_fill(ids < 0, -torch.inf)
        return capped(self._scale * scores, self._softcap)

    def _lowest(self, ids: Sequence[Tensor]) -> Tensor:
        """[Hkv, M] logit of all that is read of these, +inf for nothing."""
        pairs = zip(self._logits, ids, strict=True)
        return torch.cat([logits.where(own >= 0, torch.inf) for logits, own in pairs], -1).amin(-1)

    def _unread(
        self, number: int, span: ExtentView, ids: Tensor, limit: Tensor
    ) -> PartialAttention:
        """As the step estimates those of an extent that are not among `ids`."""
        how = {"scale": self._scale, "softcap": self._softcap}
        if self._budget.form is None:
            return estimate_unread(span, self._q, ids, **how)  # type: ignore[arg-type]
        hidden = by_span(self._row.chain, self._row.copied)[number]
        known, count = _known(span, hidden)
        there = (ids >= 0).float()
        keys = torch.einsum("hmd,hmd->hm", _summed(span, ids, there, keys=True), self._q)
        sums = AttendedSums((ids >= 0).sum(-1), keys)
        part = known.attend(self._q, count, sums, limit, form=self._budget.form, **how)  # type: ignore[arg-type]
        return part.without(_summed(span, ids, there))


def _known(span: ExtentView, hidden: Tensor | None) -> tuple[Tail, Tensor]:
    """The moments that the step has used, on the host, and the entries they stand for, [Hkv, 1]."""
    whole = torch.full((span.extent.k.shape[0], 1), span.length)
    if hidden is None or not bool(hidden.any()) or span.known_without is None:
        assert span.known is not None
        return span.known.to(torch.device("cpu")), whole
    return span.known_without[1], whole - hidden.sum(-1, keepdim=True)


def _summed(span: ExtentView, ids: Tensor, weights: Tensor, *, keys: bool = False) -> Tensor:
    """[Hkv, M, D]: values, or keys, of entries [Hkv, M, K] by weight, none for -1."""
    rows = (span.extent.k if keys else span.extent.v)[_heads(ids), ids.clamp_min(0)].float()
    return torch.einsum("hmk,hmkd->hmd", weights.masked_fill(ids < 0, 0.0), rows)


def _heads(ids: Tensor) -> Tensor:
    return torch.arange(len(ids))[:, None, None]


class HalfWatcher:
    """Collects `half` over the layers of a forward, as a `StepWatcher` of a cache of one row.

    Args:
        every_token: of the forward, not of its last one alone.
    """

    def __init__(self, *, every_token: bool = False) -> None:
        self._every_token = every_token
        self._halves: list[Tensor] = []

    def wants(self, layer_idx: int, q: Tensor) -> bool:
        """All steps of all layers."""
        return True

    def add(self, step: HalvedStep, part: PartialAttention) -> None:
        """Takes the step of a layer."""
        if self._every_token:
            self._halves.append(halves_of(step, part).flatten(0, 1))
        else:
            self._halves.append(half_of(step, part).reshape(-1, 1))

    def take(self) -> list[float]:
        """Mean over heads and layers since the last call, by token; empty where none was cold."""
        halves, self._halves = self._halves, []
        return torch.cat(halves).mean(0).tolist() if halves else []
