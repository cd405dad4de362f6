"""The contracts of plug-ins: what an index and a method must be, and where they are registered.

A plug-in receives values, never the object that owns them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias

from pydantic import BaseModel
from torch import Tensor

from hybrid_kv.errors import ConfigError, NoBudgetError
from hybrid_kv.registry import Plugin, Registry
from hybrid_kv.types import (
    Candidates,
    Demotion,
    Evidence,
    Foresight,
    LayerShape,
    ModelInfo,
    Needs,
    PartialAttention,
    Read,
    SearchResult,
    Tiers,
)

if TYPE_CHECKING:
    from hybrid_kv.entries import Attended, Entries

Select: TypeAlias = Literal["auto", "host", "device"]

__all__ = [
    "INDEXES",
    "METHODS",
    "BuildCancelled",
    "DeviceIndex",
    "Index",
    "Method",
    "Placement",
    "Plugin",
    "Registry",
    "Select",
]


class BuildCancelled(Exception):  # noqa: N818 (an event, not a failure)
    """A build has ended early because `Index.cancel` was called; the index is of no use."""


class Index(ABC):
    """Finds the keys of one layer and one batch row that a query scores highest.

    One index serves all KV heads of the layer, so that a step enters it once. Searches may run
    concurrently with each other, not with `build` or `add`. `build` may run in another thread than
    what follows it.

    exact: whether this instance always finds the best keys and scores every key; parameters may
        decide.
    page_tokens: keys are chosen by aligned runs of so many.
    selects: keys are found where the queries are; see `DeviceIndex`.
    joint: the queries of one search choose together, as the query heads of one token do; for
        several tokens it is searched one by one.
    ranks: whether a search finds nearly all of the best keys one by one, so that those it leaves
        lie below the lowest that it found: what `estimate` "gaussian" takes for granted. Not
        so where blocks, frames, chunks or few lists are chosen as a whole.
    """

    Params: ClassVar[type[BaseModel]]
    exact: bool = False
    page_tokens: int = 1
    selects: bool = False
    joint: bool = False
    ranks: bool = False

    def __init__(self, params: Any) -> None:
        self.params = params

    @classmethod
    def needs(cls, params: Any) -> Needs:
        """Evidence that `build` wants for an index with these parameters."""
        return Needs()

    @classmethod
    def bytes_per_key(cls, params: Any, num_keys: int, head_dim: int) -> int:
        """The most that an index over `num_keys` holds for each key of one KV head.

        For saying before a prompt is computed that it will not fit.
        """
        return 0

    @property
    def relearn_keys(self) -> int:
        """After so many further keys, what it has learned from samples has aged; 0 for never.

        Then another index is built in the background, from samples that stand where decoding is.
        """
        return 0

    @abstractmethod
    def build(self, keys: Tensor, samples: Tensor | None, nearest: Tensor | None = None) -> None:
        """Replaces the content by `keys`.

        Args:
            keys: [Hkv, N, D], N >= 0, on the host; kept by reference, never copied needlessly.
            samples: [Hkv, G, M, D] queries of the prefill at M positions, for indexes that learn
                where queries fall; None where `needs` asks for none or the KV came without.
            nearest: [Hkv, G, M, K] int32, the exact best keys of every sample, best first, where a
                device has found them; None where the index finds what it needs itself.
        """

    def plan(self, top_k: int, most: int) -> Sequence[Any] | None:
        """The search for so many results as values of `hybrid_kv.ops.native.step.EngineSearch`, for
        the engine to make within a step that is one call; valid until keys are added.

        None where only `search` can make it. What is found, and in which order, must be the same.
        """
        return None

    def stand_in(self, keys: Tensor, samples: Tensor | None) -> Index | None:
        """An empty index, quickly built over the same keys, that can serve until this one is built.

        None where `build` is quick with these arguments: then it is waited for.
        """
        return None

    def successor(self) -> Index | None:
        """An empty index that is likely to serve faster than this one, which has been built.

        It is built over the same keys and samples, and takes over, while this one serves. Asked
        for once, by the thread that adds keys. None where there is nothing better to expect.
        """
        return None

    def cancel(self) -> None:  # noqa: B027 (neutral on purpose)
        """Asks a `build` that runs in another thread to give up; its result is not wanted any more.

        It raises BuildCancelled as soon as it can, or runs to its end.
        """

    @abstractmethod
    def add(self, keys: Tensor) -> None:
        """Appends rows.

        Args:
            keys: [Hkv, N', D], the whole array: its first `len(self)` rows are those already known
                (their storage may have moved), the rest are new.
        """

    @abstractmethod
    def search(
        self, queries: Tensor, top_k: int, most: int | None = None, near: Tensor | None = None
    ) -> SearchResult:
        """The best `min(top_k, N)` keys of each query by dot product.

        Args:
            queries: [Hkv, M, D], any float dtype.
            top_k: at least 1; sets how much work is done.
            most: at least top_k, which None stands for; up to so many keys are returned if the
                search has ranked them by exact score without further work.
            near: [Hkv, M, W] int64, keys that were found for like queries, such as the step
                before's, -1 for none. Where a search may begin; most kinds have no use for it.

        Returns:
            With `read_bytes`, what the search has read: methods are compared by it.
        """

    def estimate(
        self,
        queries: Tensor,
        found: Tensor,
        values: Tensor,
        *,
        scale: float,
        softcap: float | None = None,
    ) -> PartialAttention:
        """Estimate of the attention over keys that were not found, from summaries of them.

        Asked for behind a search, where a budget says so (`TokenBudget.estimate`); merged with what
        was found by log-sum-exp, as any part is.

        Args:
            queries: [Hkv, M, D], any float dtype.
            found: [Hkv, M, K] int64 keys that are attended themselves, -1 for none.
            values: [Hkv, n, D] of the first n keys, n <= len(self): those that the asking row sees.
            scale, softcap: what turns a score into a logit.

        Returns:
            out [Hkv, M, D] and lse [Hkv, M], both float32; lse -inf where nothing is left.
        """
        raise ConfigError(
            f"estimate 'index' needs an index that estimates, got {type(self).__name__}; choose "
            "'gaussian' or 'none', or an index of kind clusters or query_channels"
        )

    def estimate_bytes(self, queries: int, found: int) -> int:
        """Bytes that `estimate` reads for M `queries` of each KV head, `found` entries of all."""
        return 0

    @property
    def innermost(self) -> Index:
        """Index that answers searches: this one, or the one part that it hands all of them on to.

        Asked for again after every `build`.
        """
        return self

    @abstractmethod
    def __len__(self) -> int:
        """Rows indexed."""

    @property
    def memory_bytes(self) -> int:
        """Bytes held beside the key array itself."""
        return 0

    def describe(self) -> list[dict[str, Any]]:
        """Report of what serves each KV head and why, JSON-ready; empty where there is nothing to
        say.
        """
        return []


class DeviceIndex(Index):
    """An index whose keys are found and ranked where the queries are, and attended there.

    Nothing is asked of the device by `candidates` and `see`: no thread waits, and no shape hangs on
    what is found. What was told to the device can be recorded and played for other queries, and for
    another length after `see`, as long as `see` returns the same and the keys stay where they are.
    """

    selects = True

    @abstractmethod
    def candidates(self, queries: Tensor, keys: Tensor, new: int, top_k: int) -> Candidates:
        """Keys that the `top_k` best of each query are among.

        Args:
            queries: [Hkv, M, D] on the model's device, M = G * T with row g * T + t.
            keys: [Hkv, >= N, D] on the host, the known keys and the room behind them.
            new: T.
        """

    @abstractmethod
    def see(self, length: int) -> Hashable:
        """Tells the device that searches see the first so many keys.

        Returns:
            What recorded searches hang on: where the index lies.
        """

    @property
    @abstractmethod
    def seen(self) -> Tensor:
        """[] int64 on the device, as `see` told it."""

    def selection_bytes(self, queries: int, top_k: int) -> int:
        """Bytes that `candidates` reads for M `queries` of each KV head: of this
        index, and of the keys that it ranks. Asked in every step.
        """
        return 0


@dataclass(frozen=True, slots=True)
class Placement:
    """Placement of one layer's entries from the end of the prompt on.

    sink_tokens, window_tokens: always resident, at the start and at the end of the context.
    spare_tokens: further resident tokens just before the window.
    select: who finds offloaded keys: the "host" by `index`, or the "device" by a sketch in its own
        memory that learns as `index` would, of kind sketch or auto; "auto" takes the device where
        it is a GPU and the codes of all layers fit.
    moments: what leaves at the prompt's end is summed up as it leaves, where it lies; see `Tail`.
    rest: what becomes of all other entries, now and whenever the window moves on.
    offload: with Demotion.ABSORB: what leaves also goes to the cold tier, as under OFFLOAD, so that
        nothing is lost. What the method keeps are then copies, and a step that attends them leaves
        the originals out.
    index: makes the index that finds offloaded keys; None where all of them are attended.
    learns: of the queries that were collected, what that index is given; None for all.
    digests: keep the page digests that a page budget in `read` needs.
    in_step: pages leave in the same steps as those of other layers, since one layer reads what
        another has found. Else layers take turns: layer n lets go of a page n % page_size tokens
        later than layer 0, where the window has 16 pages or more.
    """

    sink_tokens: int = 0
    window_tokens: int = 0
    spare_tokens: int = 0
    rest: Demotion = Demotion.KEEP
    offload: bool = False
    index: Callable[[], Index] | None = None
    learns: Needs | None = None
    digests: bool = False
    select: Select = "host"
    moments: bool = False
    in_step: bool = False

    @property
    def offloads(self) -> bool:
        """Whether what leaves goes to the cold tier."""
        return self.rest is Demotion.OFFLOAD or (self.rest is Demotion.ABSORB and self.offload)

    @property
    def drops(self) -> bool:
        """Whether what leaves may be lost."""
        return self.rest in (Demotion.DROP, Demotion.ABSORB) and not self.offloads

    def shadowed(self) -> Placement:
        """The same with what would be lost in the cold tier, for who looks at what is missed."""
        rest = Demotion.OFFLOAD if self.rest is Demotion.DROP else self.rest
        return replace(self, rest=rest, offload=True, index=None, select="host")


class Method(ABC):
    """A KV-cache policy in a few verbs; it names entries and never computes attention.

    One object serves all layers of one cache. `seal` and `read` are the heart; the other verbs have
    neutral defaults. What a method knows of a row lies in the Entries that it keeps, never in the
    object: so forks, beams, branches and checkpoints carry it.
    """

    Params: ClassVar[type[BaseModel]]

    def __init__(self, params: Any) -> None:
        self.params = params

    @classmethod
    def full_budget(cls, params: Any) -> Any:
        """These parameters, opened so far that nothing is lost; a codec's nearest to that.

        What the contract tests hold against full attention. By default the parameters as they are:
        right for a method that loses nothing anyway.
        """
        return params

    @classmethod
    def lacks(cls, params: Any) -> str | None:
        """Sentence on what must be given before these parameters can run; None for nothing.

        Asked for before a model is loaded.
        """
        return None

    @property
    def needs(self) -> Needs:
        """Evidence to collect during prefill; paid for only when asked for."""
        return Needs()

    @property
    def foresight(self) -> Foresight | None:
        """Look-ahead of layers before their queries are known; None where there is none."""
        return None

    def index_bytes_per_token(self, shape: LayerShape, num_tokens: int) -> int:
        """The most that the indexes of a layer take for each of `num_tokens`, beside K and V."""
        return 0

    def tiers(self, shape: LayerShape, num_tokens: int) -> Tiers:
        """Tiers of a layer's entries that leave sinks and window, for a prompt with so many of
        them.

        For the planner, which asks before `open`. By default all on the device.
        """
        return Tiers(device_tokens=num_tokens)

    def open(self, info: ModelInfo) -> None:  # noqa: B027 (neutral on purpose)
        """Called once before the first token: head masks, calibration, state per layer."""

    def of_layer(self, layer_idx: int) -> Method:
        """Method that answers for a layer: this one, unless it gives layers to others (by_layer).

        Asked for once, when the first token of the layer is stored, after `open`.
        """
        return self

    def write(
        self, layer_idx: int, k: Tensor, v: Tensor, positions: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Rows to store for new ones k, v [B, Hkv, T, D] at positions [B, T]."""
        return k, v

    @abstractmethod
    def seal(self, layer_idx: int, evidence: Sequence[Evidence]) -> Placement:
        """The layer's prompt is complete: decide what stays and what becomes of the rest.

        Args:
            evidence: one per batch row; empty unless `needs` asks for something.
        """

    reads_alike: ClassVar[bool] = False
    """Whether `read` answers the same for a layer in every step, whatever the queries; said by the
    class that defines `read`. Then a step on a device can begin before its queries are known.
    """

    @abstractmethod
    def read(self, layer_idx: int, q: Tensor) -> Read:
        """Amount of each tier that q [B, Hq, T, D] attends; asked in every step, so make it once.

        Where it `reads_alike` only the first step asks.
        """

    def absorb(
        self,
        layer_idx: int,
        row: int,
        kept: Entries | None,
        left: Entries,
        seen: Evidence | None,
    ) -> Entries | None:
        """Entries of a row that stay on the device when they leave the window; the rest is lost.

        Only under Demotion.ABSORB, and then the one verb through which everything leaves: once at
        the prompt's end, to the token and even where nothing leaves yet (`left` has no entries
        then), later page by page. Amortised O(1) per token: see `Entries.extended` and
        `Entries.select`. Entries are values, so that nothing has changed where this raises.

        Args:
            kept: what the last call of this row (or `after`) returned.
            left: what leaves now, equally long for all heads, oldest first. Its memory is borrowed:
                `extended`, `select` and `copied` give memory of one's own.
            seen: the row's evidence, with all keys of its prompt; None after the prompt.

        Returns:
            What is attended from now on beside sinks and window; None for nothing. Keys and values
            (as `read` gives them) have the dtype, device and width of `left`.
        """
        raise NotImplementedError(
            f"{type(self).__name__} places the rest under Demotion.ABSORB; define absorb"
        )

    def after(self, layer_idx: int, attended: Attended) -> Sequence[Entries | None] | None:
        """A step is computed: with its exact weights, what every row keeps from now on.

        Costs nothing unless overridden. None, or the same values, where nothing changes.
        """
        return None

    @classmethod
    def at_budget(cls, params: Any, tokens: int, *, context_tokens: int, page_size: int) -> Any:
        """These parameters, with which a query head attends about `tokens` entries in a step.

        Methods are compared so. Meant is the average over layers, heads and steps, with sinks,
        window and newest tokens, after a prompt of `context_tokens`. A method that attends
        everything, exactly or in fewer bits, returns `params` as they are.

        Raises:
            ConfigError: so few tokens leave nothing to attend.
            NoBudgetError: the method has no such budget.
        """
        raise NoBudgetError(
            f"{cls.__name__} does not say how a budget of tokens sets its parameters; leave it out "
            "of the comparison, or give it a classmethod at_budget"
        )


METHODS: Registry[Method] = Registry("method", provider="hybrid_kv.methods")
INDEXES: Registry[Index] = Registry("index", provider="hybrid_kv.index")
