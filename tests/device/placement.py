"""Where a test computes: the host, or the device that is emulated while it runs."""

from __future__ import annotations

from copy import deepcopy
from typing import TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn import Module

from tests.device import tensors
from tests.device.machine import Machine

Placed = TypeVar("Placed", bound=Module | Tensor)

_copies: WeakKeyDictionary[Machine, dict[Module, Module]] = WeakKeyDictionary()


def device() -> torch.device:
    """The emulated device where one is in place, else the host."""
    return torch.device("cpu") if tensors.machine is None else torch.device("cuda", 0)


def placed(what: Placed) -> Placed:
    """A tensor or a model of the host on `device()`; on the host it is itself.

    A model has one copy on a machine, so that whoever asks twice gets the same object.
    """
    machine = tensors.machine
    if machine is None:
        return what
    if isinstance(what, Tensor):
        return what.to(device())
    copies = _copies.setdefault(machine, {})
    if what not in copies:
        copies[what] = deepcopy(what).to(device())
    return copies[what]  # type: ignore[return-value]
