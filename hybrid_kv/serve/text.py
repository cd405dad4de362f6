"""The text of an answer while its tokens come, with stop strings that may span several of them."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from hybrid_kv.api.generation import decode_text

_LONGEST, _KEPT = 96, 32
"""Tokens that are decoded together, and what is left of them as the context of the next ones."""

_INCOMPLETE = "\ufffd"
"""What a character decodes to whose bytes are not all there."""


class AnswerText:
    """Takes tokens and gives text that can be shown: nothing that may begin a stop string.

    is_stopped: whether a stop string has come; it and what follows is never given.

    Args:
        tokenizer: None for a model without text.
        stops: strings that end the answer.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None, stops: Sequence[str]) -> None:
        self._tokenizer, self._stops = tokenizer, stops
        self._ids: list[int] = []
        self._read = 0  # characters of their text that were taken up
        self._held = ""
        self.is_stopped = False

    def add(self, token_id: int, *, last: bool = False) -> str:
        """The text that can be shown after one more token; all that is left with the last one."""
        if self._tokenizer is None or self.is_stopped:
            return ""
        self._ids.append(token_id)
        self._held += self._new_text(self._tokenizer, last)
        ends = [end for stop in self._stops if (end := self._held.find(stop)) >= 0]
        if ends:
            self.is_stopped = True
            return self._held[: min(ends)]
        shown = len(self._held) - (0 if last else self._may_begin_a_stop())
        text, self._held = self._held[:shown], self._held[shown:]
        return text

    def _new_text(self, tokenizer: PreTrainedTokenizerBase, last: bool) -> str:
        text = decode_text(tokenizer, self._ids)
        if text.endswith(_INCOMPLETE) and not last:
            return ""
        new, self._read = text[self._read :], len(text)
        if len(self._ids) > _LONGEST:
            kept = decode_text(tokenizer, self._ids[-_KEPT:])
            if text.endswith(kept):  # else a character or a space would come out twice
                self._ids, self._read = self._ids[-_KEPT:], len(kept)
        return new

    def _may_begin_a_stop(self) -> int:
        """Characters at the end of the held text that are the beginning of a stop string."""
        held = self._held
        lengths = (
            count
            for stop in self._stops
            for count in range(min(len(stop) - 1, len(held)), 0, -1)
            if held.endswith(stop[:count])
        )
        return max(lengths, default=0)
