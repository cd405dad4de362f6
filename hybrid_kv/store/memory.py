"""Memory of stores, and what is said where it does not suffice; stamps of plans that describe it.

That is said before prefill if it can be known, else when it runs out. What a plan describes marks
the plan's stamp when it changes, so that no step has to look:

    stamp = Stamp()                     # of a plan
    pool.stamps.add(stamp)              # it describes this pool
    ...
    chain.stamps.grow()                 # there is more of the same: stamp.has_grown says so
    pool.stamps.mark("pages moved")     # the pool is another one: stamp.reason says so
"""

from __future__ import annotations

import math
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from traceback import clear_frames
from typing import Literal, TypeAlias
from weakref import WeakSet

import torch
from torch import Tensor

from hybrid_kv.errors import CapacityError, DeviceMemoryError
from hybrid_kv.ops.host_memory import HUGE_PAGE_BYTES, free_memory, host_array, host_zeros


def allocate(
    size: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    fill: float | None = None,
    *,
    pinned: bool = False,
) -> Tensor:
    """A tensor that may be written inside and outside of inference mode alike.

    What is allocated in inference mode can never be written outside of it, and a cache lives longer
    than the mode it was first filled in. On the host, memory asked for empty or as zeros is not
    committed before it is written, and large arrays lie on huge pages: cold rows are read in any
    order.

    Args:
        pinned: on the host, page-locked for a GPU; all of it is committed at once.

    Raises:
        CapacityError: host memory does not suffice.
    """
    with torch.inference_mode(False):
        if device.type == "cpu":
            if pinned:
                from hybrid_kv.ops.pinned import pinned_array

                require_free(math.prod(size) * dtype.itemsize)
                array = pinned_array(size, dtype)
                return array if fill is None else array.fill_(fill)
            if fill is None:
                return host_array(size, dtype)
            if fill == 0:
                return host_zeros(size, dtype)
        if fill is None:
            return torch.empty(list(size), dtype=dtype, device=device)
        return torch.full(list(size), fill, dtype=dtype, device=device)


def enlarge(tensor: Tensor, axis: int, size: int, fill: float | None = None) -> Tensor:
    """A tensor with `size` places along an axis, the old ones first.

    Raises:
        CapacityError: host memory does not suffice for both at once; the old one is as it was.
    """
    shape = list(tensor.shape)
    shape[axis] = size
    if tensor.device.type == "cpu":
        require_free(tensor.nbytes)  # what the copy commits
    new = allocate(shape, tensor.dtype, tensor.device, fill)
    new.narrow(axis, 0, tensor.shape[axis]).copy_(tensor)
    return new


def require_free(num_bytes: int) -> None:
    """Raises CapacityError where memory that is about to be committed is not there.

    The system grants memory that it does not have, and kills the process that writes to it.
    """
    if num_bytes < HUGE_PAGE_BYTES:
        return
    free = free_memory()
    if num_bytes > free.num_bytes:
        raise CapacityError(
            f"host memory ran out: the cache grows by {num_bytes:,} bytes, {free}; "
            "shorten the context or free memory"
        )


Stage: TypeAlias = Literal["load", "prefill", "decode"]

_MARGIN = 0.95
"""Share of the free memory that may be filled; the rest is for activations and the system."""

_KEEP_LESS = "keep fewer tokens on the GPU (window_tokens, spare_tokens, or method='hybrid')"
_FEWER_BITS = "load weights in fewer bits (weights='int4')"
_ON_DEVICE: dict[Stage, str] = {
    "load": f"{_FEWER_BITS}, take a smaller model or device='cpu'",
    "prefill": (f"lower prefill_chunk_tokens, shorten the prompt, {_KEEP_LESS} or {_FEWER_BITS}"),
    "decode": f"{_KEEP_LESS}, ask for fewer new tokens or {_FEWER_BITS}",
}
_ON_HOST: dict[Stage, str] = {
    "load": f"{_FEWER_BITS}, take a smaller model or free memory",
    "prefill": "lower prefill_chunk_tokens, shorten the prompt or free memory",
    "decode": "shorten the context, ask for fewer new tokens or free memory",
}


def check_host_memory(needed_bytes: int, num_tokens: int) -> None:
    """Raises CapacityError if `needed_bytes` for `num_tokens` exceed what is free now."""
    free = free_memory()
    if needed_bytes > _MARGIN * free.num_bytes:
        raise CapacityError(
            f"context of {num_tokens} tokens needs {needed_bytes:,} bytes of host memory for its "
            f"KV cache and indexes, {free}; shorten the prompt or free memory"
        )


def check_weights_memory(needed_bytes: int, name: str) -> None:
    """Raises CapacityError if a model's weights exceed what is free on the host now."""
    free = free_memory()
    if needed_bytes > _MARGIN * free.num_bytes:
        raise CapacityError(
            f"the weights of '{name}' take {needed_bytes:,} bytes of host memory, {free}; "
            f"{_ON_HOST['load']}"
        )


def spare_host_memory(coming_bytes: int) -> int:
    """Bytes of host memory that are free, less what is known to come; below 0 where it lacks."""
    return int(_MARGIN * free_memory().num_bytes) - coming_bytes


@contextmanager
def memory_errors(stage: Callable[[], Stage]) -> Iterator[None]:
    """A block in which memory that runs out is said in one sentence, with the way out.

    What the failed call held is released, though the error is kept: its frames hold activations.

    Args:
        stage: what was being done, asked for when memory has run out.

    Raises:
        DeviceMemoryError: a GPU's memory ran out.
        CapacityError: the host's did.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if (named := _named(error, stage)) is None:
            raise
        clear_frames(error.__traceback__)
        try:
            raise named from error
        finally:
            del named  # this frame hangs on it


def _named(error: Exception, stage: Callable[[], Stage]) -> CapacityError | None:
    """Error to raise instead; None for what is no lack of memory, or is said well already."""
    if isinstance(error, torch.OutOfMemoryError):
        where = stage()
        return DeviceMemoryError(
            f"GPU memory ran out at {where}: {_device_figures(str(error))}; {_ON_DEVICE[where]}"
        )
    text = " ".join(str(error).split())
    refused = re.search(r"can't allocate memory: you tried to allocate (\d+) bytes", text)
    if isinstance(error, CapacityError) or not (refused or isinstance(error, MemoryError)):
        return None
    where = stage()
    asked = f"{int(refused[1]):,} bytes were asked for" if refused else text or "no size was told"
    return CapacityError(
        f"host memory ran out at {where}: {asked}, {free_memory()}; {_ON_HOST[where]}"
    )


def _device_figures(text: str) -> str:
    """Sentence of torch that tells of sizes, else its first one."""
    size = r"([\d.]+ \w+)"
    asked = re.search(f"Tried to allocate {size}", text)
    free = re.search(f"total capacity of {size} of which {size} is free", text)
    allowed = re.search(f"{size} allowed;", text)
    parts = [
        f"{asked[1]} were asked for" if asked else "",
        f"{free[2]} of {free[1]} are free" if free else "",
        f"{allowed[1]} may be used" if allowed else "",
    ]
    first = re.split(r"\.\s", " ".join(text.split()))[0].rstrip(".")
    return ", ".join(part for part in parts if part) or first or "no size was told"


class Stamp:
    """Whether a plan still describes what it was made from.

    reason: what has changed since; "" while nothing has. Any thread may set it; nobody clears it.
    has_grown: whether there is more of the same, which a plan may follow, and clears this.
    """

    __slots__ = ("__weakref__", "has_grown", "reason")

    def __init__(self) -> None:
        self.reason, self.has_grown = "", False


class Stamps:
    """The stamps of the plans that describe one thing; may be used by several threads."""

    __slots__ = ("_lock", "_stamps")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._stamps: WeakSet[Stamp] = WeakSet()

    def add(self, stamp: Stamp) -> None:
        """Marks this stamp as well when what it describes changes."""
        with self._lock:
            self._stamps.add(stamp)

    def grow(self) -> None:
        """Tells all stamps that there is more of the same, where it lay."""
        with self._lock:
            for stamp in self._stamps:
                stamp.has_grown = True

    def mark(self, what: str) -> None:
        """Marks all stamps, and forgets them: the thing has changed.

        Args:
            what: the change, in words.
        """
        if not self._stamps:  # nearly always; who is added from now on describes what is now
            return
        with self._lock:
            stamps, self._stamps = list(self._stamps), WeakSet()
        for stamp in stamps:
            stamp.reason = stamp.reason or what
