"""The rows of a prompt that a model's last decoder layer computes to the end: those asked for.

Behind the attention of the last layer no token is looked at by another one. Where only the logits
of the last tokens are asked for (`logits_to_keep`), the feed-forward of that layer takes their rows
alone; the others get zeros, and reach the last norm and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from inspect import signature
from typing import Any

from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from hybrid_kv.models.forwards import replaced

_NAMES = ("mlp", "feed_forward")
"""Of the feed-forward of a decoder layer."""


def rows_asked(module: nn.Module, inputs: dict[str, Any]) -> int | None:
    """Rows of hidden states that a model's forward with some inputs needs at its end, counted from
    the last; None for all of them. Who records hidden states needs all.
    """
    asked = inputs.get("logits_to_keep")
    takes = "logits_to_keep" in signature(module.forward).parameters
    return asked if type(asked) is int and asked >= 1 and takes else None


class LastRows:
    """The feed-forward of a model's last decoder layer, while a prompt passes.

    It is left alone where somebody may see the other rows: with hooks on that layer or on what its
    output passes, a forward of others on the feed-forward, or one that does not give one tensor.

    Args:
        owner: whose list `layers` is. between: modules that the output of the last layer passes.
    """

    def __init__(
        self,
        model: nn.Module,
        owner: nn.Module,
        layers: nn.ModuleList,
        between: Sequence[nn.Module],
    ) -> None:
        self.layer = layers[-1]
        found = (getattr(self.layer, name, None) for name in _NAMES)
        self._part = next((part for part in found if isinstance(part, nn.Module)), None)
        around = [m for m in model.modules() if m is not model and _holds(m, owner)]
        self._seeing = [*around, *between]
        self._asked, self._left = 0, 0

    @contextmanager
    def only(self, asked: int | None, num_tokens: int) -> Iterator[None]:
        """A block in which the layer takes a prompt, at once or in chunks.

        Args:
            asked: the last rows that are needed; None for all.
        """
        part = self._part
        if asked is None or part is None or "forward" in part.__dict__ or self._is_seen():
            yield
            return
        self._asked, self._left = asked, num_tokens
        with replaced([(part, partial(self._forward, part.forward))]):
            yield

    def _is_seen(self) -> bool:
        if torch_module._global_forward_hooks or torch_module._global_forward_pre_hooks:
            return True
        seeing = (*self._seeing, *self.layer.modules())
        return any(
            m._forward_hooks or m._forward_pre_hooks or hasattr(m, "_hf_hook") for m in seeing
        )

    def _forward(self, inner: Callable[..., Any], x: Tensor, *args: Any, **kwargs: Any) -> Any:
        if args or kwargs or x.ndim != 3:
            return inner(x, *args, **kwargs)
        count = x.shape[1]
        self._left -= count
        wanted = min(count, max(1, self._asked - self._left))  # one says what comes out
        if wanted == count:
            return inner(x)
        some = inner(x[:, -wanted:])
        if not isinstance(some, Tensor) or some.shape[:2] != (x.shape[0], wanted):
            return inner(x)
        out = some.new_zeros(x.shape[0], count, *some.shape[2:])
        out[:, -wanted:] = some
        return out


def _holds(module: nn.Module, part: nn.Module) -> bool:
    return any(found is part for found in module.modules())
