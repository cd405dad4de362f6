"""Watching a prompt being computed: progress for the user, and a way to end it early."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

from torch import nn
from transformers import PreTrainedModel

PrefillProgress = Callable[[int, int], None]
"""Called with (done, total) in tokens x layers."""


class PrefillCancelled(Exception):  # noqa: N818 (an event, not a failure)
    """The prompt was given up between two chunks; the cache is unusable."""


class PrefillWatch:
    """Counts what the attention layers have seen, by hooks that leave with the prompt's last token.

    Without a report or a cancel event nothing is registered and nothing is paid.

    Args:
        done_layers: how many have seen it already.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        new_tokens: int,
        report: PrefillProgress | None,
        cancels: Sequence[threading.Event],
        done_layers: int = 0,
    ) -> None:
        layers = [getattr(module, "self_attn", None) for module in model.modules()]
        self._layers = [layer for layer in layers if isinstance(layer, nn.Module)]
        self._report, self._cancels = report, cancels
        self._done, self._total = new_tokens * done_layers, new_tokens * len(self._layers)
        self._thread = threading.get_ident()  # others may run the model as well
        self._hooks: list[Any] = []

    def __enter__(self) -> PrefillWatch:
        if self._report is not None or self._cancels:
            self._hooks = [layer.register_forward_hook(self._seen) for layer in self._layers]
        return self

    def _seen(self, module: nn.Module, args: Any, output: Any) -> None:
        if threading.get_ident() != self._thread:
            return
        if any(event.is_set() for event in self._cancels):
            raise PrefillCancelled
        self._done = min(self._total, self._done + output[0].shape[1])
        if self._report is not None:
            self._report(self._done, self._total)
        if self._done == self._total:
            self._remove()

    def _remove(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._remove()
