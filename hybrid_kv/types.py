"""Values that cross package borders.

Shape letters, everywhere: B batch rows, Hq query heads, Hkv KV heads, G = Hq / Hkv group size,
T new tokens, N stored entries, P pages, S page_size, D head_dim, M = G * T queries of one KV head,
K retrieved entries. A layout is an axis list such as [B, Hkv, N, D].
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from hybrid_kv.errors import ConfigError, MethodError
from hybrid_kv.rotary import UNKNOWN, Rotary, Samples

if TYPE_CHECKING:
    from hybrid_kv.masses import EachQuery

Budget: TypeAlias = int | Literal["all"]

HIDDEN = 2**62
"""Position of an unfilled slot: later than every query, so causal visibility hides it."""


@dataclass(frozen=True, slots=True)
class LayerShape:
    """Attention shape of one layer."""

    layer_idx: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int

    @property
    def group_size(self) -> int:
        return self.num_q_heads // self.num_kv_heads


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """Facts of a model for a method when it is opened: one shape per tiered layer.

    rotary: how each tiered layer turns queries by position, in the same order; empty if not known.
    unforeseen: by tiered layer why its query cannot be predicted in the layer before, empty where
        it can; None where nobody predicts any.
    outputs: the weight [hidden, Hq * D] of each tiered layer's output projection, the model's own;
        None where it has none that can be read, empty unless asked for.
    """

    layers: tuple[LayerShape, ...]
    rotary: tuple[Rotary, ...] = ()
    unforeseen: Mapping[int, str] | None = None
    outputs: tuple[Tensor | None, ...] = field(default=(), compare=False, repr=False)

    def rotary_of(self, layer_idx: int) -> Rotary:
        """Rotation of queries of a tiered layer by their positions."""
        for shape, rotary in zip(self.layers, self.rotary, strict=False):
            if shape.layer_idx == layer_idx:
                return rotary
        return UNKNOWN

    def output_of(self, layer_idx: int) -> Tensor | None:
        """The weight of a tiered layer's output projection; None where it is not known."""
        known = zip(self.layers, self.outputs, strict=False)
        return next((weight for shape, weight in known if shape.layer_idx == layer_idx), None)


class PartialAttention(NamedTuple):
    """Attention over one set of entries, ready to be merged.

    out: [..., D], normalised within the part; 0 where the part is empty.
    lse: [...] float32, natural log of the sum of exponentials; -inf where the part is empty.
    """

    out: Tensor
    lse: Tensor


KEY_BLOCK = 64
"""Keys of a block of block-sparse attention: smaller ones cost 6 to 8% of the rate of tiles."""


class BlockMask(NamedTuple):
    """The key blocks that each block of a prompt's queries reads.

    listed: [B, Hkv, ceil(T / tokens), N // KEY_BLOCK] bool for T new tokens of N. Of it count the
    key blocks that end before the query block; the entries behind those are all read, causally.
    tokens: of a query block.
    """

    listed: Tensor
    tokens: int


class PagedKV(NamedTuple):
    """Pages of one layer as they lie in memory; kernels read and write them in place.

    k, v: [Hkv, slots, S, D]. positions: [slots, S] int64, HIDDEN where a slot is not filled.
    key_min, key_max: [Hkv, slots, D] digests of the filled keys in the dtype of k, or None.
    """

    k: Tensor
    v: Tensor
    positions: Tensor
    key_min: Tensor | None = None
    key_max: Tensor | None = None

    def store(self, k: Tensor, v: Tensor, places: slice | Tensor, positions: Tensor) -> None:
        """Stores new tokens; their pages' digests are left as they are.

        Args:
            k, v: [Hkv, n, D].
            places: `slot * S + offset` of the n; a page is filled from its first slot on.
            positions: [n].
        """
        heads, _, _, dim = self.k.shape
        self.k.view(heads, -1, dim)[:, places] = k
        self.v.view(heads, -1, dim)[:, places] = v
        self.positions.view(-1)[places] = positions


class SearchResult(NamedTuple):
    """Keys that an index found.

    ids: [Hkv, M, K] int64 rows of the key array, best first, -1 where fewer than K were found.
    scores: [Hkv, M, K] float32 dot products (higher is nearer), -inf where ids is -1.
    scored: dot products computed, all heads and queries together.
    rows_read: keys read, each once per head however many queries share it; None if not counted.
    bias: [Hkv, M, K] float32 log weights added to the logits of what was found, such as -log p of
        an entry that a random choice takes with probability p; None where each weighs 1.
    read_bytes: bytes of keys and of the index's own arrays that were read, in the dtypes in which
        they are stored. What all queries of a KV head share (codes, digests, centroids) counts
        once, what each picks for itself (keys that it ranks) for each; `SearchReads` adds them up.
        None if not counted: then each dot product is taken to read one stored key.
    """

    ids: Tensor
    scores: Tensor
    scored: int
    rows_read: int | None = None
    bias: Tensor | None = None
    read_bytes: int | None = None


class SearchReads(NamedTuple):
    """Bytes that a search of one kind reads, of all its KV heads together.

    scanned: once for all queries of a KV head: codes, digests, centroids. ranked: for each query of
    every KV head: keys that it ranks exactly, neighbour lists; `most`: no more than that for all
    queries, as there are no more keys. scores: dot products per query that these stand for.
    walked: bytes of a key that is scored beyond those; walks: among which the queries of a KV head
    are divided, each of which reads such a key once.
    """

    scanned: float = 0.0
    ranked: float = 0.0
    most: float = math.inf
    scores: float = 0.0
    walked: float = 0.0
    walks: float = 1.0

    def of(self, queries: int, scored: int) -> int:
        """Bytes of a search for M `queries` of each KV head that computed so many dot products."""
        beyond = max(0.0, scored / queries - self.scores)
        chosen = min(queries * self.ranked, self.most)
        return round(self.scanned + chosen + self.walked * self.walks * beyond)

    @classmethod
    def joined(cls, parts: Sequence[SearchReads], queries: int) -> SearchReads:
        """Sums the reads of searches that are made together for `queries` of each KV head."""
        scanned = scores = walked = walks = 0.0
        walking = 0
        for part in parts:
            scanned += part.scanned + min(queries * part.ranked, part.most)
            scores += part.scores
            if part.walked:
                walking, walked, walks = walking + 1, walked + part.walked, walks + part.walks
        share = max(1, walking)
        return cls(scanned, scores=scores, walked=walked / share, walks=walks / share or 1.0)


class Candidates(NamedTuple):
    """Result of a search in one extent.

    ids: [Hkv, T, C] int32 rows of the keys in no order, for all query heads of the group, -1 for
    none. scores: [Hkv, M, C] float32 exact dot products, -inf for none; M = G * T.
    """

    ids: Tensor
    scores: Tensor


class Demotion(Enum):
    """Destination of the entries that a method does not keep resident."""

    KEEP = "keep"  # stay resident after all
    OFFLOAD = "offload"  # move to the cold tier
    DROP = "drop"  # lose them; only methods that say so do this
    ABSORB = "absorb"  # hand them to `Method.absorb`; what it does not return is lost


@dataclass(frozen=True, slots=True)
class Needs:
    """Evidence that the runtime must collect during prefill; paid for only when declared.

    sampled_queries: queries per query head, spread evenly over the prompt.
    last_queries: queries per query head at the prompt's end.
    nearest_keys: for each of those queries so many of the best offloaded keys, found exactly by the
        device that holds the keys; not collected where that is the host.
    horizon_tokens: the queries are handed over as if they were asked at so many positions behind
        the prompt; 0 for where they were asked.
    column_sums: the softmax weights that every prompt token got from all queries of the prompt
        together, exactly; costs about as much as the scores of the prompt once more.
    rotary, outputs: how the layers turn queries and keys by position, and their output projections,
        in the ModelInfo of `Method.open`.
    """

    sampled_queries: int = 0
    last_queries: int = 0
    nearest_keys: int = 0
    horizon_tokens: int = 0
    column_sums: bool = False
    rotary: bool = False
    outputs: bool = False

    @property
    def queries(self) -> bool:
        """Whether queries of the prompt are looked at."""
        return bool(self.sampled_queries or self.last_queries or self.column_sums)

    def __or__(self, other: Needs) -> Needs:
        """Needs of both."""
        return Needs(
            max(self.sampled_queries, other.sampled_queries),
            max(self.last_queries, other.last_queries),
            max(self.nearest_keys, other.nearest_keys),
            max(self.horizon_tokens, other.horizon_tokens),
            self.column_sums or other.column_sums,
            self.rotary or other.rotary,
            self.outputs or other.outputs,
        )


@dataclass(frozen=True, slots=True)
class Tiers:
    """Tiers of a layer beside sinks and window, by number of entries; the others are dropped.

    device_tokens: at most so many, on average over its KV heads, each as large as K and V (codes
    are smaller). host_tokens: in the cold tier.
    """

    device_tokens: int = 0
    host_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Evidence:
    """Evidence that the runtime collects while a layer's prompt is computed, for one batch row.

    num_tokens: prompt tokens of the row.
    sampled_queries, last_queries: [Hq, M, D] after RoPE, or None where not declared.
    sampled_positions: [M] int64 of the former; None where they cannot be turned, as of queries that
        were made up. Those of the latter are the last of the prompt.
    column_sums: [Hq, N] float32, or None where not declared.
    scale, softcap: what turns a score into a logit.
    keys: [Hkv, N, D] of the whole prompt of the row; there only while `Method.absorb` runs.
    """

    num_tokens: int
    sampled_queries: Tensor | None = None
    last_queries: Tensor | None = None
    sampled_positions: Tensor | None = None
    column_sums: Tensor | None = None
    scale: float = 1.0
    softcap: float | None = None
    keys: Tensor | None = None

    def mass(self, last: int | None = None, each: EachQuery | None = None) -> Tensor:
        """[Hq, N] float32: the softmax weights that every token got from the last queries together.

        Each query weighs the tokens up to its own; the sum over a row is the number of queries.
        Only while `Method.absorb` runs at the prompt's end.

        Args:
            last: so many of `last_queries`, at most as many as there are; None for all.
            each: what is summed in the place of each query's weights.

        Raises:
            MethodError: there are no queries or no keys to weigh.
        """
        if self.last_queries is None or self.keys is None:
            missing = "last_queries" if self.last_queries is None else "keys"
            raise MethodError(
                f"mass needs queries and keys, got evidence without {missing}; declare "
                "Needs(last_queries=...) and ask inside absorb, at the prompt's end"
            )
        from hybrid_kv.masses import causal_masses

        count = self.last_queries.shape[1] if last is None else last
        first = max(0, self.last_queries.shape[1] - count)
        return causal_masses(
            self.last_queries[:, first:],
            self.keys,
            scale=self.scale,
            softcap=self.softcap,
            each=each,
        )

    def total_mass(self, each: EachQuery | None = None) -> Tensor:
        """[Hq, N] float32: the softmax weights that every token got from all queries of the prompt.

        `column_sums` where they were declared; else an estimate from the sampled queries, M of
        which stand for N / M of the prompt's each. Only while `Method.absorb` runs.

        Args:
            each: what is summed in the place of each sampled query's weights.

        Raises:
            MethodError: there is nothing to sum or to estimate from.
        """
        if self.column_sums is not None and each is None:
            return self.column_sums
        q, positions, keys = self.sampled_queries, self.sampled_positions, self.keys
        if q is None or positions is None or keys is None:
            raise MethodError(
                "total_mass needs column sums, or sampled queries with their positions and the "
                "keys, got none; declare Needs(column_sums=True) or Needs(sampled_queries=...) and "
                "ask inside absorb, at the prompt's end"
            )
        from hybrid_kv.masses import causal_masses

        sums = causal_masses(
            q, keys, scale=self.scale, softcap=self.softcap, positions=positions, each=each
        )
        return sums * (self.num_tokens / len(positions))

    def narrowed(self, needs: Needs) -> Evidence:
        """Evidence for these needs alone, out of evidence for at least them."""
        last, sampled, positions = self.last_queries, self.sampled_queries, self.sampled_positions
        if last is not None:
            count = min(needs.last_queries, last.shape[1])
            last = last[:, last.shape[1] - count :] if count else None
        if sampled is not None:
            stride, wanted = 1, needs.sampled_queries
            while wanted and -(-sampled.shape[1] // stride) >= 2 * wanted:
                stride *= 2  # as its collector would have halved them
            sampled = sampled[:, ::stride] if wanted else None
            positions = positions if positions is None else positions[::stride]
        return replace(
            self,
            last_queries=last,
            sampled_queries=sampled,
            sampled_positions=positions,
            column_sums=self.column_sums if needs.column_sums else None,
        )

    @property
    def queries(self) -> Tensor | None:
        """All queries [Hq, M, D] that were kept, in the order of the prompt but for overlaps."""
        kept = [q for q in (self.sampled_queries, self.last_queries) if q is not None]
        return torch.cat(kept, 1) if kept else None

    def samples(self, num_kv_heads: int, rotary: Rotary) -> Samples | None:
        """The same queries with what is known of their positions; None where none were kept."""
        if (queries := self.queries) is None:
            return None
        return Samples(queries.unflatten(0, (num_kv_heads, -1)), self._positions, rotary)

    @property
    def _positions(self) -> Tensor | None:
        known = []
        if self.sampled_queries is not None:
            if self.sampled_positions is None:
                return None
            known.append(self.sampled_positions)
        if self.last_queries is not None:
            count = self.last_queries.shape[1]
            known.append(torch.arange(self.num_tokens - count, self.num_tokens))
        return torch.cat(known)


@dataclass(frozen=True, slots=True)
class TokenBudget:
    """Number of cold entries that a query attends.

    top_k: entries of each query head; the mean of a layer's heads where they share.
    max_tokens: a head attends up to so many of the entries that the search ranked; None for top_k,
        or for 4 * top_k where heads share.
    min_share: attends only entries whose softmax share of all that the head attends, resident
        entries included, is at least this. Where that would keep all that were ranked, the search
        is repeated wider, for up to max_tokens.
    shared: the heads of a layer share their budgets at every step: of what all of them found, the
        entries of the largest shares are attended (Ada-KV, arXiv:2407.11550, at each step).
    estimate: what was not found is attended as an estimate: of the "index", see `Index.estimate`,
        or of all entries by their moments, as one "gaussian" or to "first_order", see `Tail`; None
        leaves it out.
    form: of an estimate by moments; None where there is none.
    most: entries that a query head attends at most. width: that its search is made wide enough for.
    weighs: whether what was found is cut by its weight.

    Raises:
        ConfigError: a number is out of range.
    """

    top_k: int
    max_tokens: int | None = None
    min_share: float | None = None
    shared: bool = False
    estimate: Literal["index", "gaussian", "first_order"] | None = None
    form: Literal["gaussian", "first_order"] | None = field(init=False, repr=False, compare=False)
    most: int = field(init=False, repr=False, compare=False)
    width: int = field(init=False, repr=False, compare=False)
    weighs: bool = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.top_k < 1:
            raise ConfigError(f"top_k must be at least 1, got {self.top_k}; use 1 or more")
        most = 4 * self.top_k if self.shared else self.top_k
        if self.max_tokens is not None:
            most = self.max_tokens
        if most < self.top_k:
            raise ConfigError(
                f"max_tokens must be at least top_k {self.top_k}, got {self.max_tokens}; "
                "raise it or lower top_k"
            )
        if self.min_share is not None and not 0 <= self.min_share < 1:
            raise ConfigError(
                f"min_share must be at least 0 and below 1, got {self.min_share}; leave it out for "
                "no limit"
            )
        width = min(2 * self.top_k, most) if self.shared else self.top_k
        for name, value in (
            ("form", None if self.estimate == "index" else self.estimate),
            ("most", most),
            ("width", width),
            ("weighs", self.shared or self.min_share is not None),
        ):
            object.__setattr__(self, name, value)  # once: every step asks


@dataclass(frozen=True, slots=True)
class Foresight:
    """Look-ahead of a layer: its search before its queries are known, by a prediction of them.

    mode: "always"; or "auto": where a search then runs beside the model, and a trial has shown for
        the layer that little is lost.
    factor: times the entries of a budget, so many are found at most; the true query ranks them.
    """

    mode: Literal["auto", "always"]
    factor: int


@dataclass(frozen=True, slots=True)
class Read:
    """Entries of a layer that a step attends; the runtime gathers them and attends them.

    pages: resident pages beside sinks and window, which are always read; "all" for all that the
        device owns.
    cold: what each query head attends of the cold tier: "all" for all of it, None for nothing.

    Raises:
        ConfigError: a budget is of another kind, or below 0.
    """

    pages: Budget = "all"
    cold: TokenBudget | Literal["all"] | None = None

    def __post_init__(self) -> None:
        if self.pages != "all" and (not isinstance(self.pages, int) or self.pages < 0):
            raise ConfigError(
                f"pages must be a number of resident pages or 'all', got {self.pages!r}; give a "
                "TokenBudget to cold only"
            )
        if self.cold not in ("all", None) and not isinstance(self.cold, TokenBudget):
            raise ConfigError(
                f"cold must be a TokenBudget, 'all' or None, got {self.cold!r}; say "
                f"TokenBudget({self.cold!r}) for so many entries"
            )

    def widened(self, factor: int) -> Read:
        """With so many times the cold entries, where they are counted."""
        if not isinstance(self.cold, TokenBudget):
            return self
        cold = self.cold
        most = None if cold.max_tokens is None else factor * cold.max_tokens
        return replace(self, cold=replace(cold, top_k=factor * cold.top_k, max_tokens=most))


@dataclass(slots=True)
class Work:
    """Counters of what decoding touched, summed over steps, layers and query heads.

    attended: entries attended; visible: entries full attention would attend; scored: dot products
    spent on choosing; retrieved: entries attended from the cold tier; steps: query tokens x layers
    x heads. most_retrieved: by a single query head in one step and layer, not a sum.

    Bytes that were read, in the dtypes in which things are stored, by purpose. What the query heads
    of a KV head share counts once, what each picks for itself for each. resident_bytes: keys and
    values on the device, and codes of what a method keeps; select_bytes: page digests and codes
    there, keys that are ranked by them; search_bytes: what indexes scan, and the keys that are
    ranked exactly; cold_bytes: values of found entries, and keys that no search has ranked;
    estimate_bytes: moments, or what an index sums up of unread entries.

    transfer_bytes, which is no part of these: queries that went from a device to the host, and
    results that came back.
    """

    attended: int = 0
    visible: int = 0
    scored: int = 0
    retrieved: int = 0
    steps: int = 0
    most_retrieved: int = 0
    resident_bytes: int = 0
    select_bytes: int = 0
    search_bytes: int = 0
    cold_bytes: int = 0
    estimate_bytes: int = 0
    transfer_bytes: int = 0

    @property
    def read_bytes(self) -> int:
        """All bytes that were read; over `steps`, those of a query head in one layer and step."""
        of_pages = self.resident_bytes + self.select_bytes
        return of_pages + self.search_bytes + self.cold_bytes + self.estimate_bytes

    def add(self, other: Work) -> None:
        """Counts what `other` counted as well."""
        most = max(self.most_retrieved, other.most_retrieved)
        for name in self.__slots__:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.most_retrieved = most


def bytes_per_token(shape: LayerShape, dtype: torch.dtype) -> int:
    """Bytes of one token's K and V in one layer."""
    return 2 * shape.num_kv_heads * shape.head_dim * dtype.itemsize
