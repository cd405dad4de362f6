"""Objects shared by all layers of a cache: its context, index builds, and what looks for NaN."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from math import isfinite
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hybrid_kv.errors import NonFiniteError, ShapeError
from hybrid_kv.ops import Ops
from hybrid_kv.plugins import Method
from hybrid_kv.runtime.step import name_of_new
from hybrid_kv.store import LayerStore, SelectFor, all_finite
from hybrid_kv.transfer import Executor, Transfer
from hybrid_kv.types import Foresight, LayerShape, Needs, Work
from hybrid_kv.watch.phases import INDEX_BUILD, Phases, WorkClock

if TYPE_CHECKING:
    from hybrid_kv.runtime.device_plan import StepNumbers
    from hybrid_kv.runtime.look_ahead import LookAhead
    from hybrid_kv.runtime.select import Selectors
    from hybrid_kv.store.pinned_allocator import PinnedAllocator


@dataclass(slots=True)
class CacheContext:
    """The policy of a cache, what computes and moves for it, and where it counts.

    finite: looks at what is stored. shapes: of the tiered layers.
    watched: evidence that somebody wants kept, beside what the method needs.
    reserved_tokens: that are expected in a row, so that memory is taken once.
    prefill_error: that block-sparse prefill aims at; None for exact prefill.
    audits: whether somebody looks at what is missed; then what methods drop is kept on the host.
    speculates: tokens that come may be taken back, so that nothing leaves the windows meanwhile.
    foresight, unforeseen: how the method wants layers to be searched before their queries are
    known, and why some cannot be; see `ModelInfo`. look_ahead: does so; None until somebody asks
    for it, by `searches_ahead`.
    pinned: page-locked memory for GPUs; None until one asks for it, by `pinned_on`.
    numbers: tell devices of steps; None until a plan needs them, by `step_numbers`.
    """

    ops: Ops
    executor: Executor
    finite: FiniteGuard
    phases: Phases
    page_size: int
    method: Method
    method_name: str
    builds: IndexBuilds
    work: Work
    shapes: Sequence[LayerShape]
    watched: Needs = Needs()
    reserved_tokens: int = 0
    prefill_error: float | None = None
    audits: bool = False
    speculates: bool = False
    foresight: Foresight | None = None
    unforeseen: Mapping[int, str] | None = None
    look_ahead: LookAhead | None = None
    pinned: PinnedAllocator | None = None
    numbers: StepNumbers | None = None
    _selectors: Selectors | None = None

    def reserve(self, num_tokens: int) -> None:
        """Announces how many tokens will come in a row."""
        self.reserved_tokens = max(self.reserved_tokens, num_tokens)

    # What few steps need is loaded when the first of them asks ------------------------------------

    def searches_ahead(self) -> LookAhead | None:
        """The searches that run ahead; None where the method wants none."""
        if self.look_ahead is None and self.foresight is not None:
            from hybrid_kv.runtime.look_ahead import LookAhead

            self.look_ahead = LookAhead(self.executor, self.foresight, self.unforeseen)
        return self.look_ahead

    def pinned_on(self, device: torch.device) -> PinnedAllocator | None:
        """Maker of the host memory of layers on a device; None for plain memory."""
        if device.type != "cuda":
            return None
        if self.pinned is None:
            from hybrid_kv.store.pinned_allocator import PinnedAllocator

            self.pinned = PinnedAllocator()
        return self.pinned

    def step_numbers(self) -> StepNumbers:
        """The numbers by which devices are told of steps."""
        if self.numbers is None:
            from hybrid_kv.runtime.device_plan import StepNumbers

            self.numbers = StepNumbers(self.shapes)
        return self.numbers

    def select_for(self, layer: LayerStore) -> SelectFor | None:
        """Makes the indexes of a layer that selects on its device; None where the host does."""
        place, device = layer.placement, layer.resident.pool.device
        if place is None or place.index is None or place.select == "host":
            return None
        if place.select == "auto" and device.type != "cuda":
            return None
        return self.selectors.of(layer)

    @property
    def selectors(self) -> Selectors:
        """Chooses for the layers of this cache; see `select_for`."""
        if self._selectors is None:
            from hybrid_kv.runtime.select import Selectors

            self._selectors = Selectors(len(self.shapes))
        return self._selectors


def new_store(shape: LayerShape, means: CacheContext, k: Tensor) -> LayerStore:
    """An empty store for rows like those of the first keys k [B, Hkv, T, D]."""
    capacity = max(means.reserved_tokens, k.shape[2])
    return LayerStore(
        *(shape, means.page_size, k.shape[0], k.dtype, k.device, capacity, means.ops),
        pinned=means.pinned_on(k.device),
    )


def stores_as_is(method: Method) -> bool:
    """Whether a method stores keys and values as the model gives them."""
    return type(method).write is Method.write


def reads_alike(method: Method) -> bool:
    """Whether a method reads the same in every step, as the class that defines `read` says."""
    owner = next(one for one in type(method).__mro__ if "read" in vars(one))
    return bool(vars(owner).get("reads_alike", False))


def append(
    store: LayerStore,
    means: CacheContext,
    method: Method,
    k: Tensor,
    v: Tensor,
    valid: Tensor | None,
) -> None:
    """Stores new tokens k, v [B, Hkv, T, D] as a layer's method writes them.

    Args:
        valid: [B, T] bool leaves padding out; None where there is none.

    Raises:
        ShapeError: the number of rows has changed.
        NonFiniteError: it is one token, in host memory, and its key is not finite. Who brings
            several watches them.
    """
    if k.shape[0] != len(store.rows):
        raise ShapeError(
            f"batch must stay at {len(store.rows)} rows, got {k.shape[0]}; use a new cache"
        )
    layer_idx = store.shape.layer_idx
    if k.shape[2] == 1:
        means.finite.watch_new(layer_idx, k, v, valid)
    if not stores_as_is(method):
        k, v = method.write(layer_idx, k, v, store.next_positions(k.shape[2], valid))
    for number, row in enumerate(store.rows):
        own_k, own_v = k[number], v[number]
        if valid is not None:
            own_k, own_v = own_k[:, valid[number]], own_v[:, valid[number]]
        row.table.append(own_k, own_v, row.length)
        row.length += own_k.shape[1]


# Index builds ------------------------------------------------------------------------------------


class IndexBuilds:
    """Runs builds by an executor. What is waited for counts as a phase, all of it in `clock`.

    A build that waits holds its prompt's queries and their best keys, 170 MB for a layer of an 8B
    model. Where host memory is short, a new one waits until enough of those before it have ended.

    Args:
        spare_bytes: host memory that is free and that nothing else will need.
    """

    def __init__(
        self, executor: Executor, phases: Phases, spare_bytes: Callable[[], int] | None = None
    ) -> None:
        self._executor, self._phases, self._spare_bytes = executor, phases, spare_bytes
        self._waiting: deque[tuple[Future[None], int]] = deque()
        self.clock = WorkClock()

    @property
    def held_bytes(self) -> int:
        """Kept for builds that have not ended."""
        self._forget_ended()
        return sum(holds for _, holds in self._waiting)

    def here(self, build: Callable[[], None]) -> None:
        """Runs a build that is waited for."""
        with self._phases.measure(INDEX_BUILD), self.clock.running(), self._executor.building():
            build()

    def beside(self, build: Callable[[], None], holds: int = 0) -> Future[None]:
        """Begins a build that need not be waited for."""
        clock, building = self.clock, self._executor.building

        def measured() -> None:
            with clock.running(), building():
                build()

        with self._phases.measure(INDEX_BUILD):
            self._make_room()
            future = self._executor.background(measured)
        if holds:
            self._waiting.append((future, holds))
        return future

    def _make_room(self) -> None:
        self._forget_ended()
        while self._waiting and self._spare_bytes is not None and self._spare_bytes() < 0:
            wait([self._waiting[0][0]])
            self._forget_ended()

    def _forget_ended(self) -> None:
        self._waiting = deque(build for build in self._waiting if not build[0].done())


# NaN and infinity are an error, found where the values lie and told without waiting for a device.
#
# What a prompt stores is looked at as it comes, and so are the logits, which a value that is not
# finite always reaches. An infinite key may get no weight, so those of single new tokens are looked
# at, too, where that needs no launch: on a GPU one is found when its page leaves the window.


def _may_hide(k: Tensor) -> bool:
    """Whether a new token's key [B, Hkv, 1, D] holds what need not show in the logits."""
    # One sum is the cheapest look; it may overflow, but is finite only where all of k is.
    return k.device.type == "cpu" and not isfinite(k.sum(dtype=torch.float32).item())


class FiniteGuard:
    """Flags on their way to the host, and what they are about."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._flags: list[tuple[str, Transfer]] = []

    def watch_new(self, layer_idx: int, k: Tensor, v: Tensor, valid: Tensor | None) -> None:
        """Looks at a layer's new k, v [B, Hkv, T, D]; `valid` [B, T] is False for padding.

        Raises:
            NonFiniteError: they are not finite; on a GPU the next forward says so.
        """
        if k.shape[2] == 1 and not _may_hide(k):
            return
        if valid is not None:
            k, v = (tensor.transpose(1, 2)[valid] for tensor in (k, v))
        self.watch(name_of_new(layer_idx), all_finite(k, v))

    def watch(self, what: str, flag: Tensor) -> None:
        """Takes note of values by their flag [], True where all of them are finite.

        Raises:
            NonFiniteError: see `look`.
        """
        self._flags.append((what, self._executor.send(flag)))
        self.look()

    def look(self, *, wait: bool = False) -> None:
        """Reads the flags that have arrived, or all of them.

        Raises:
            NonFiniteError: some values are not finite.
        """
        while self._flags and (wait or self._flags[0][1].arrived):
            what, flag = self._flags.pop(0)
            if not flag.open():
                self._flags.clear()
                raise NonFiniteError.of(what)
