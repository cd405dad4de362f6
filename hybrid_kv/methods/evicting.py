"""Base classes of methods that keep entries up to a budget, and drop or offload the others.

Entries are scored by attention weights: ranking, pooling, budgets.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal, Self, TypeAlias

import torch
from pydantic import AfterValidator, model_validator
from torch import Tensor
from torch.nn import functional as F

from hybrid_kv.config import BudgetField, Count, Tokens
from hybrid_kv.entries import Attended, Entries
from hybrid_kv.errors import ConfigError
from hybrid_kv.methods.retrieval import (
    ColdParams,
    RetrievalAttention,
    RetrievalParams,
    split_budget,
)
from hybrid_kv.plugins import Placement
from hybrid_kv.types import Demotion, Evidence, Foresight, LayerShape, Needs, Read, Tiers

_LEAST_WEIGHT = 1e-4
"""Of an entry that nobody looked at, so that its value counts as well."""
_BLOCK_NUMBERS = 2**24

Pooling: TypeAlias = Literal["max", "mean"]


def _odd(tokens: int) -> int:
    if tokens % 2 == 0:
        raise ValueError(f"must be odd, got {tokens}; add or take 1")
    return tokens


Odd: TypeAlias = Annotated[Count, AfterValidator(_odd)]
"""A number of neighbours with as many on either side."""


def group_sums(mass: Tensor, num_kv_heads: int) -> Tensor:
    """[Hkv, N] weights of the query heads of each KV head together, of weights [Hq, N]."""
    return mass.view(num_kv_heads, -1, mass.shape[-1]).sum(1)


def pooled(scores: Tensor, tokens: int, pooling: Pooling) -> Tensor:
    """Scores [Hkv, N] by the largest, or the mean, of an odd number of neighbours."""
    beside = tokens // 2
    if pooling == "max":
        return F.max_pool1d(scores, tokens, stride=1, padding=beside)
    return F.avg_pool1d(scores, tokens, stride=1, padding=beside)


def best(scores: Tensor, count: int) -> Tensor:
    """[..., count] places of the highest of scores [..., N], best first; of equals the first."""
    return scores.sort(dim=-1, descending=True, stable=True).indices[..., :count]


def shared_out(total: int, shares: Sequence[float]) -> list[int]:
    """`total` in whole parts nearest to `shares`, which add up to it, none short by one or more.

    What rounding down leaves over goes to the largest fractions, of equals to the first.
    """
    parts = [int(share) for share in shares]
    by_fraction = sorted(range(len(parts)), key=lambda i: parts[i] - shares[i])
    for i in by_fraction[: total - sum(parts)]:
        parts[i] += 1
    return parts


def head_budgets(scores: Tensor, budget: int, safeguard: float) -> list[int]:
    """Ada-KV, arXiv:2407.11550, algorithms 2 and 3: what each KV head keeps of scores [Hkv, N].

    The `budget` entries a head that the layer has together go where the best scores of all heads
    lie; of an even share, `safeguard` is certain. Adds up to Hkv * budget; waits for the device.
    """
    heads, count = scores.shape
    owners = best(scores.flatten(), heads * budget).div(count, rounding_mode="floor")
    chosen = torch.bincount(owners, minlength=heads).tolist()
    shares = [safeguard * budget + (1 - safeguard) * count for count in chosen]
    return shared_out(heads * budget, shares)


def critical(scores: Tensor, norms: Tensor, budgets: Sequence[int], sure_ratio: float) -> Tensor:
    """CriticalKV, arXiv:2502.03805, algorithm 1: scores [Hkv, N] that weigh values as well.

    Of its budget a head fills `sure_ratio` by the scores alone, which are mean attention weights;
    the rest by (score + 1e-4) times the norms [Hkv, N] of what an entry adds to the output.
    """
    weighed = (scores + _LEAST_WEIGHT) * norms
    ranked = best(scores, max(budgets))
    for head, ids, budget in zip(weighed, ranked, budgets, strict=True):
        head[ids[: int(sure_ratio * budget)]] = torch.inf
    return weighed


def value_norms(left: Entries, output: Tensor | None) -> Tensor:
    """[Hkv, N] float32 L1 norms of the values of entries, as many for all heads.

    Args:
        output: [hidden, Hq * D], the layer's output projection: what an entry adds to the output
            through each query head of its group, on average. None for the values themselves.
    """
    norms = []
    for head, values in enumerate(left.split("v")):
        if output is None:
            norms.append(values.float().abs().sum(-1))
            continue
        group = output.shape[1] // (left.num_heads * values.shape[1])
        parts = output.unflatten(1, (left.num_heads, group, -1))[:, head].float()
        rows = max(1, _BLOCK_NUMBERS // output.shape[0])
        norms.append(
            torch.cat(
                [
                    sum((some.float() @ parts[:, g].T).abs().sum(-1) for g in range(group)) / group
                    for some in values.split(rows)
                ]
            )
        )
    return torch.stack(norms)


def layer_budgets(budget: int, num_layers: int, most: int, beta: int) -> list[int]:
    """PyramidKV, arXiv:2406.02069: what each layer keeps, a straight line down from the first.

    The last layer keeps budget // beta, or more where the first would otherwise keep more than the
    `most` there are. Adds up to num_layers * budget, which is at most num_layers * most.
    """
    first = min(2 * budget - budget // beta, most)
    step = 2 * (first - budget) / max(1, num_layers - 1)
    line = [first - step * layer for layer in range(num_layers)] if num_layers > 1 else [budget]
    return shared_out(num_layers * budget, line)


def scored(entries: Entries, scores: Tensor) -> Entries:
    """Entries, equally many for all heads, with a column `score` of [Hkv, N, ...]."""
    column = scores.new_zeros(len(entries.positions), *scores.shape[2:])
    for into, head in zip(entries.split(column), scores, strict=True):
        into.copy_(head)
    return entries.with_columns(score=column)


def along(mask: Tensor, scores: Tensor) -> Tensor:
    """A mask [N] bool as it applies to scores [Hkv, N, ...]."""
    return mask.view(-1, *[1] * (scores.dim() - 2))


def of_window(
    state: Mapping[str, Tensor], positions: Tensor, num_heads: int, parts: tuple[int, ...] = ()
) -> Tensor:
    """[Hkv, P, *parts] scores of tokens in the window, 0 for positions [P] that no step has seen.

    state: `window` [Hkv, W, *parts], the scores of the W positions before `end` []; or nothing yet.
    """
    window = state.get("window")
    if window is None or not window.shape[1]:
        return torch.zeros(num_heads, len(positions), *parts, device=positions.device)
    at = positions - state["end"] + window.shape[1]
    inside = (at >= 0) & (at < window.shape[1])
    found = window.index_select(1, at.clamp(0, window.shape[1] - 1))
    return found * along(inside, found)


def window_of(
    attended: Attended, row: int, near: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """Masses [Hkv, W] that a step gave to the last W positions of a row, and these [W].

    Args:
        near: masses of the resident entries and their positions in the place of those it gave.
    """
    mass, positions = attended.window_mass(row) if near is None else near
    heads, width = mass.shape
    last = torch.arange(attended.lengths[row] - width, attended.lengths[row], device=mass.device)
    at = positions - last[0]
    inside = (at >= 0) & (at < width)  # sinks lie before, empty slots behind
    dense = mass.new_zeros(heads, width)
    return dense.index_add_(1, at.clamp(0, width - 1), mass * inside), last


def newest_of(attended: Attended) -> Attended:
    """The same step, as its last query saw it."""
    return replace(attended, q=attended.q[:, :, -1:], lse=attended.lse[:, :, -1:])


class DemotingParams(RetrievalParams):
    """sink_tokens, window_tokens: kept in any case, multiples of page_size; demote: what is not
    kept is lost ("drop"), or goes to the cold tier, where the index finds it ("offload"); cold: how
    it is found, with demote "offload" alone.
    """

    demote: Literal["drop", "offload"] = "drop"

    @model_validator(mode="after")
    def _cold_is_used(self) -> Self:
        if self.demote == "drop" and self.cold != ColdParams():
            raise ValueError(
                "cold must be left out with demote 'drop', which keeps no cold tier, got settings "
                "for it; choose demote 'offload'"
            )
        if self.cold.select == "device":
            raise ValueError(
                "select 'device' serves methods whose cold tier nobody has copies of, got one "
                "that keeps entries of its choice; leave it out"
            )
        return self


class Demoting(RetrievalAttention):
    """Keeps the entries it chooses on the device, and drops or offloads all others.

    whole: the parameter, and its value, with which everything is kept.

    Kept: sinks, window and entries of its choice on the device; the others in host memory, with
    demote "offload".
    Lost: with demote "drop" all others; with "offload" nothing, for the index finds some of them in
    every step.
    """

    Params = DemotingParams
    whole: ClassVar[tuple[str, object]]

    @property
    def _offloads(self) -> bool:
        return bool(self.params.demote == "offload")

    @property
    def needs(self) -> Needs:
        return super().needs if self._offloads else Needs()

    @property
    def foresight(self) -> Foresight | None:
        return super().foresight if self._offloads else None

    def index_bytes_per_token(self, shape: LayerShape, num_tokens: int) -> int:
        return super().index_bytes_per_token(shape, num_tokens) if self._offloads else 0

    def kept_tokens(self, num_tokens: int) -> int:
        """Of so many that leave sinks and window, those that a head keeps at most, on average."""
        return num_tokens

    def tiers(self, shape: LayerShape, num_tokens: int) -> Tiers:
        return Tiers(self.kept_tokens(num_tokens), num_tokens if self._offloads else 0)

    def seal(self, layer_idx: int, evidence: Sequence[Evidence]) -> Placement:
        if self._offloads:
            place = super().seal(layer_idx, evidence)
            return replace(place, rest=Demotion.ABSORB, offload=True, select="host")
        sizes = self.params.sink_tokens, self.params.window_tokens
        return Placement(*sizes, rest=Demotion.ABSORB)

    def read(self, layer_idx: int, q: Tensor) -> Read:
        return super().read(layer_idx, q) if self._offloads else Read()

    @classmethod
    def full_budget(cls, params: Any) -> Any:
        if params.demote == "offload":
            return super().full_budget(params)
        return params.model_copy(update=dict([cls.whole]))

    @classmethod
    def split(cls, params: Any, tokens: int, page_size: int) -> tuple[Any, int]:
        """For `at_budget`: parameters with sinks and window, and what to keep beside them.

        With demote "offload" half of that is found in the cold tier instead.
        """
        sinks, window, rest = split_budget(tokens, page_size, least=2)
        update: dict[str, Any] = {"sink_tokens": sinks, "window_tokens": window}
        if params.demote == "drop":
            return params.model_copy(update=update), rest
        cold = params.cold.model_copy(update={"top_k": rest // 2, "max_tokens": None})
        return params.model_copy(update={**update, "cold": cold}), rest - rest // 2


class EvictingParams(DemotingParams):
    """budget_tokens: what a head keeps on the device, sinks and window included, on average over
    heads and layers ("all": everything); sink_tokens, window_tokens: kept whatever they score,
    multiples of page_size.
    """

    sink_tokens: Tokens = 0
    window_tokens: Tokens = 32
    budget_tokens: BudgetField = 1024

    @model_validator(mode="after")
    def _budget_is_more(self) -> Self:
        always = self.sink_tokens + self.window_tokens
        if self.budget_tokens != "all" and self.budget_tokens <= always:
            raise ValueError(
                f"budget_tokens must be more than the {always} of sink_tokens and window_tokens "
                f"together, got {self.budget_tokens}; raise it or lower them"
            )
        return self


class Evicting(Demoting):
    """Keeps entries of its choice up to a budget, and drops or offloads all others."""

    Params = EvictingParams
    whole = ("budget_tokens", "all")

    def room(self, left: int) -> int:
        """Of `left` entries those that a head may keep beside sinks and window, on average."""
        params = self.params
        if params.budget_tokens == "all":
            return left
        room: int = params.budget_tokens - params.sink_tokens - params.window_tokens
        return min(left, room)

    def kept_tokens(self, num_tokens: int) -> int:
        return self.room(num_tokens)

    @classmethod
    def at_budget(cls, params: Any, tokens: int, *, context_tokens: int, page_size: int) -> Any:
        """Sinks and window stay as they are, or are given up page by page where a budget is too
        small for them; with demote "offload" the rest is halved: what is kept and what is found.
        What is recent reaches half a page beyond the window on average.
        """
        newest, least = page_size // 2, 2 if params.demote == "offload" else 1
        sinks, window = params.sink_tokens, params.window_tokens
        while tokens - sinks - window - newest < least and sinks + window:
            window, sinks = max(0, window - page_size), sinks if window else 0
        rest = tokens - sinks - window - newest
        if rest < least:
            raise ConfigError(
                f"a budget must be at least {newest + least} tokens for the newest and {least} to "
                f"keep, with pages of {page_size}, got {tokens}; raise it or lower page_size"
            )
        found = rest // 2 if params.demote == "offload" else 0
        update: dict[str, Any] = {"sink_tokens": sinks, "window_tokens": window}
        update["budget_tokens"] = sinks + window + rest - found
        if found:
            cold = params.cold.model_copy(update={"top_k": found, "max_tokens": None})
            update["cold"] = cold
        return params.model_copy(update=update)
