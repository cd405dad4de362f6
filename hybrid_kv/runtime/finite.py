"""NaN and infinity are an error, found where the values lie and told without waiting for a device.

What a prompt stores is looked at as it comes, and so are the logits, which a value that is not
finite always reaches. An infinite key may get no weight, so those of single new tokens are looked
at, too, where that needs no launch: on a GPU one is found when its page leaves the window.
"""

from __future__ import annotations

from math import isfinite

import torch
from torch import Tensor

from hybrid_kv.errors import NonFiniteError
from hybrid_kv.store import all_finite
from hybrid_kv.transfer import Executor, Transfer


def not_finite(what: str) -> NonFiniteError:
    """The error that says so of some values."""
    return NonFiniteError(
        f"{what} must be finite, got NaN or infinity; check the model's weights, or load it in "
        "bfloat16 or float32, whose range is wider than float16's"
    )


def of_layer(layer_idx: int) -> str:
    """Name of the new keys and values of a layer, for the error."""
    return f"keys and values of layer {layer_idx}"


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
        self.watch(of_layer(layer_idx), all_finite(k, v))

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
                raise not_finite(what)
