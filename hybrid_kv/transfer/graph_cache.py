"""Captured graphs of device work: one launch in place of many.

What is recorded may neither wait for the device nor hang on what it finds; all that changes from
call to call is read from the tensors that are handed over, which are copied to where the recording
reads them, and from others that stay in place.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeVar
from warnings import warn

import torch
from torch import Tensor

from hybrid_kv.errors import DeviceSelectWarning
from hybrid_kv.ops.pinned import CaptureBusyError, captures
from hybrid_kv.transfer import Work
from hybrid_kv.types import PartialAttention

T = TypeVar("T")


class CapturedGraph(NamedTuple):
    """play: computes `part` anew from what `given` holds."""

    play: Callable[[], None]
    given: Tensor
    part: PartialAttention


class WorkRecorder(Protocol):
    """Makes recordings of what one device is told."""

    def record(self, work: Work, given: Tensor) -> CapturedGraph:
        """Raises RuntimeError where the work cannot be recorded."""
        ...


class CudaRecorder:
    """CUDA graphs that share the memory of what lies between; they are played one after another.

    So each one's result is read before the next is played.
    """

    @classmethod
    def of(cls, device: torch.device) -> CudaRecorder | None:
        """The recorder of a CUDA device; None for the host."""
        return cls(device) if device.type == "cuda" else None

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, work: Work, given: Tensor) -> CapturedGraph:
        """See `WorkRecorder.record`."""
        own = given.clone()
        replay, part = self.capture(lambda: work(own))
        return CapturedGraph(replay, own, part)

    def capture(self, work: Callable[[], T]) -> tuple[Callable[[], None], T]:
        """Captures what some work tells the device, and runs none of it.

        Returns:
            What replays it, on the current stream, and what the work returned, whose tensors hold
            values after each replay.

        Raises:
            RuntimeError: it cannot be captured; CaptureBusyError: not now.
        """
        graph = torch.cuda.CUDAGraph()
        with self.on_stream(), captures():
            # Other threads may launch kernels meanwhile: what they tell the device is their own.
            graph.capture_begin(self._pool, capture_error_mode="thread_local")
            try:
                result = work()
            finally:
                graph.capture_end()
        return graph.replay, result

    @contextmanager
    def on_stream(self) -> Iterator[None]:
        """A block on the stream of captures: after what was told before it, before what follows."""
        with torch.cuda.device(self._device):
            current = torch.cuda.current_stream()
            self._stream.wait_stream(current)
            try:
                with torch.cuda.stream(self._stream):
                    yield
            finally:
                current.wait_stream(self._stream)


@dataclass(slots=True)
class _Known:
    """Latest request of an owner: its signature, and the capture of it.

    is_refused: it could not be recorded.
    """

    signature: Hashable
    recording: CapturedGraph | None = None
    is_refused: bool = False


class GraphCache:
    """The recordings of one device; an owner's is made when it is told the same a second time.

    Args:
        recorder: makes them; None where nothing is recorded.
    """

    def __init__(self, recorder: WorkRecorder | None) -> None:
        self._recorder, self._has_warned = recorder, False
        self._known: weakref.WeakKeyDictionary[object, _Known] = weakref.WeakKeyDictionary()

    def run(
        self, owner: object, signature: Hashable, work: Work, given: Tensor
    ) -> PartialAttention:
        """See `Executor.repeat`.

        Warns:
            DeviceSelectWarning: recording failed, said once; this work is told anew each time, and
                what comes after it is tried again.
        """
        if self._recorder is None:
            return work(given)
        known = self._known.get(owner)
        if known is None or known.signature != signature:
            self._known[owner] = _Known(signature)  # the first time kernels are compiled
            return work(given)
        if known.is_refused:
            return work(given)
        if known.recording is None:
            try:
                known.recording = self._recorder.record(work, given)
            except CaptureBusyError:  # the next step may record it
                return work(given)
            except RuntimeError as error:
                known.is_refused = True
                self._warn_once(str(error).strip().split("\n")[0])
                return work(given)
        recording = known.recording
        recording.given.copy_(given)
        recording.play()
        return recording.part

    def _warn_once(self, reason: str) -> None:
        if self._has_warned:
            return
        self._has_warned = True
        warn(
            f"the work of a step cannot be recorded as a CUDA graph ({reason}); it is launched "
            "kernel by kernel instead, more slowly",
            DeviceSelectWarning,
            stacklevel=3,
        )
