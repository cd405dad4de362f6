"""Puts an emulated machine in place of the CUDA that is not there, and takes it away again."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Literal
from unittest import mock

import torch

from hybrid_kv import rotary
from hybrid_kv.methods import before_rope, by_part
from hybrid_kv.ops import devices
from tests.device import cuda, tensors
from tests.device.definitions import defining
from tests.device.guard import why_not
from tests.device.kernels import launching
from tests.device.machine import Machine, Schedule
from tests.device.modes import Functions, Operators
from tests.ops.fake_cudart import join_pinning


@contextmanager
def emulated(
    *,
    num_devices: int = 1,
    memory_bytes: int = 24 << 30,
    schedule: Schedule = "now",
    strict: bool = False,
    kernels: Literal["auto", "defined"] = "auto",
) -> Iterator[Machine]:
    """A machine with CUDA devices, until the block ends; threads begun inside see it too.

    Args:
        num_devices, memory_bytes, schedule, strict: see `Machine`.
        kernels: "auto": Triton's where they are interpreted, else none. "defined": their
            definitions in torch (definitions.py), which need no Triton.

    Raises:
        RuntimeError: one is there already, or none can be emulated (`why_not`); when the block
            ends: page-locked memory was given up while a device had yet to use it.
    """
    if reason := why_not():
        raise RuntimeError(reason)
    if tensors.machine is not None:
        raise RuntimeError("an emulated device is in place already")
    machine = Machine(num_devices, memory_bytes, schedule, strict)
    with ExitStack() as undo:
        undo.callback(_in_place.clear)
        _in_place.append(undo)
        for name, stand_in in cuda.names(machine).items():
            undo.enter_context(mock.patch.object(torch.cuda, name, stand_in))
        for owner, name, stand_in in cuda.others(machine):
            undo.enter_context(mock.patch.object(owner, name, stand_in, create=True))
        # Its arguments are checked before a mode is asked.
        undo.enter_context(mock.patch.object(torch.Tensor, "record_stream", cuda.record_stream))
        undo.enter_context(mock.patch.object(threading.Thread, "run", _run_in_modes))
        # A module moves by new parameters: the values of one on the host cannot be exchanged.
        undo.enter_context(
            mock.patch.object(torch.__future__, "get_overwrite_module_params_on_conversion", _yes)
        )
        undo.enter_context(defining() if kernels == "defined" else launching(machine))
        undo.callback(_forget)
        tensors.machine = machine
        _clear_caches()
        undo.enter_context(_modes())
        undo.callback(join_pinning)  # which asks the machine
        yield machine
        if machine.faults:
            raise RuntimeError("; ".join(machine.faults))


def remove() -> bool:
    """Takes away a device that nobody has; whether there was one."""
    for undo in list(_in_place):
        undo.close()
        return True
    return False


_SENT_ONCE = (rotary.rates_on, before_rope.hadamard, by_part.ids_on)
"""What keeps tensors on a device for good, which is not for longer than the device is there."""

_in_place: list[ExitStack] = []
"""What puts everything back, of the device that is in place."""


@contextmanager
def _modes() -> Iterator[None]:
    with Operators(), Functions():
        yield


def _yes() -> bool:
    return True


_plain_run = threading.Thread.run


def _run_in_modes(thread: threading.Thread) -> None:
    # Modes belong to a thread: one that a device's user has begun uses the device as well.
    with _modes():
        _plain_run(thread)


def _clear_caches() -> None:
    found: Any
    for found in (devices.triton_state, devices.flashinfer_state, devices.backends_on, *_SENT_ONCE):
        found.cache_clear()


def _forget() -> None:
    tensors.machine = None
    _clear_caches()
