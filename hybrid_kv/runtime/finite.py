"""NaN and infinity are an error, found where the values lie and told without waiting for a device.

What a prompt stores is looked at as it comes. Of a single new token only the logits are: what is
not finite in it reaches them, or is found when its page leaves the window.
"""

from __future__ import annotations

from torch import Tensor

from hybrid_kv.errors import NonFiniteError
from hybrid_kv.transfer import Executor, Parcel


class FiniteGuard:
    """Flags on their way to the host, and what they are about."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._flags: list[tuple[str, Parcel]] = []

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
                raise NonFiniteError(
                    f"{what} must be finite, got NaN or infinity; check the model's weights, or "
                    "load it in bfloat16 or float32, whose range is wider than float16's"
                )
