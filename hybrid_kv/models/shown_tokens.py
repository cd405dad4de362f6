"""Padding: which tokens the attention masks of a model have shown, and which new ones they show."""

from __future__ import annotations

import torch
from torch import Tensor

from hybrid_kv.errors import ConfigError


def with_copy(mask: Tensor, here: Tensor) -> Tensor:
    """Hangs its values on the host on a mask that goes to the attention function."""
    mask.hybrid_kv_here = here  # type: ignore[attr-defined]
    return mask


def seen_on_host(mask: Tensor) -> Tensor | None:
    """A mask's values on the host; None where it has to be looked at, for which a device waits."""
    return getattr(mask, "hybrid_kv_here", None)


class ShownTokens:
    """The tokens of a cache that attention masks have shown: the others are padding.

    here: the mask [B, tokens seen] of the forward that runs, as bool on the host; None for none.
    """

    def __init__(self) -> None:
        self._shown: Tensor | None = None  # [B, tokens] bool on the host; None if all are shown
        self.here: Tensor | None = None
        self._mask: Tensor | None = None  # that was looked at last, and whether it hides nothing
        self._is_plain = True

    def accept(self, mask: Tensor | None, seen: int, new_tokens: int, *, is_tiered: bool) -> None:
        """Takes note of what a forward shows: its mask [B, tokens seen], or None for everything.

        Args:
            seen: tokens in the cache.
            is_tiered: whether tokens that are hidden are not stored.

        Raises:
            ConfigError: the mask has another length, or hides or shows other tokens than it did
                when they were cached: padding is not stored, what is stored cannot be hidden.
        """
        before = self._shown
        if mask is not None and mask.shape[1] != seen + new_tokens:
            raise ConfigError(
                f"attention_mask must cover the {seen} tokens in the cache and the {new_tokens} "
                f"new ones, got {mask.shape[1]}; extend the mask of the call before by ones"
            )
        # The one look of a forward at its mask: a device that computed it is waited for.
        here = self.here = None if mask is None else mask.bool().cpu()
        shown = None if here is None or bool(here.all()) else here
        if is_tiered and seen and (shown is not None or before is not None):
            _check_change(before, shown, seen)
        self._shown = shown

    def newest(self, mask: Tensor | None, new_tokens: int) -> Tensor | None:
        """Which of the newest tokens are real, [B, T] bool; None if all are."""
        if mask is None:
            return None
        newest = mask[:, -new_tokens:].bool()
        if mask is not self._mask:  # one look per forward, not per layer
            here = seen_on_host(mask)
            flags = newest if here is None else here[:, -new_tokens:]
            self._mask, self._is_plain = mask, bool(flags.all())
        return None if self._is_plain else newest

    def end_forward(self) -> None:
        """Lets go of the masks of a forward."""
        self.here, self._mask, self._is_plain = None, None, True

    def cut(self, seen: int) -> None:
        """Forgets all but the first tokens of each row."""
        if self._shown is not None:
            self._shown = self._shown[:, :seen]

    def take_rows(self, rows: Tensor) -> None:
        """Row r goes on from row rows[r]."""
        if self._shown is not None:
            self._shown = self._shown[rows.cpu()]

    def repeat(self, repeats: int) -> None:
        """Each row becomes so many."""
        if self._shown is not None:
            self._shown = self._shown.repeat_interleave(repeats, dim=0)

    def forked(self) -> ShownTokens:
        """The shown tokens of a fork of the cache."""
        new = ShownTokens()
        new._shown = self._shown  # replaced, never written to
        return new


def _check_change(before: Tensor | None, now: Tensor | None, seen: int) -> None:
    """Raises ConfigError where the first `seen` tokens differ; None stands for all shown."""
    then = torch.ones_like(now) if before is None and now is not None else before
    now = torch.ones_like(then) if now is None and then is not None else now
    if then is None or now is None:
        return
    changed = (then[:, :seen] != now[:, :seen]).nonzero().tolist()
    if changed:
        row, token = changed[0]
        verb, was = ("hides", "shown") if then[row, token] else ("shows", "hidden")
        raise ConfigError(
            f"attention_mask {verb} token {token} of row {row}, which was {was} when it was "
            f"cached, and {len(changed) - 1} more; pass the mask of the call before, extended "
            "by ones (where none is passed, generate() hides every pad token of input_ids)"
        )
