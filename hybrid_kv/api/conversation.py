"""Chats: turns that share one cache."""

from __future__ import annotations

from collections.abc import Mapping
from queue import SimpleQueue
from typing import Any, Literal, Unpack, overload

import torch

from hybrid_kv.api.arguments import GenerateOptions
from hybrid_kv.api.generation import Generation, TextStream
from hybrid_kv.api.tokens import ChatTemplate, common_length
from hybrid_kv.api.turn import Model, Turn
from hybrid_kv.errors import ConfigError, said
from hybrid_kv.models.rollback import ReturnPoint
from hybrid_kv.runtime import memory_errors


class Conversation:
    """Turns that share one cache; `history` holds the messages in chat format.

    With a chat template the whole conversation is rendered anew for each turn and the cache is kept
    as far as the tokens agree, so an answer is that of `generate` on the history and the new
    message; without one, texts follow each other as they are.

    Args:
        template: renders the messages; None for raw text.
        system: what a message of the system says before all others.
    """

    def __init__(
        self, llm: Model, template: ChatTemplate | None = None, system: str | None = None
    ) -> None:
        self._llm, self._cache = llm, llm.runtime.cache()
        self.template = template
        self._seen: list[int] = []
        self.history: list[dict[str, str]] = []
        if system is not None:
            self.history.append({"role": "system", "content": system})

    @overload
    def send(
        self, text: str, *, stream: Literal[False] = False, **options: Unpack[GenerateOptions]
    ) -> Generation: ...

    @overload
    def send(
        self, text: str, *, stream: Literal[True], **options: Unpack[GenerateOptions]
    ) -> TextStream: ...

    def send(
        self, text: str, *, stream: bool = False, **options: Unpack[GenerateOptions]
    ) -> Generation | TextStream:
        """The model's answer to `text`, given all turns before; options as in `generate`.

        An answer that is cut short stays in the history as far as it came. With beams the cache
        takes up neither message nor answer: the next turn computes them.

        Raises:
            ConfigError: the text is empty, the conversation outgrows the model's context, or the
                chat template refuses it.
            CapacityError, DeviceMemoryError: memory ran out; the conversation is as it was before,
                as after any error, and can go on.
            BusyError: the model generates in another thread.
        """
        if not isinstance(text, str):
            raise ConfigError(f"message must be text, got {said(text)}; decode token ids")
        if not text.strip():
            raise ConfigError("message is empty; type at least one word")
        message = {"role": "user", "content": text}
        with self._llm.runtime.generating():
            ids = self._render(message)
            self._keep_common(ids)
            turn = _RememberedTurn(self, message, ids, options)
            return turn.stream() if stream else turn.run()

    def remember(self, message: dict[str, str], ids: list[int], answer: Generation) -> None:
        """Takes a turn into the history."""
        self._seen = ids + answer.token_ids
        self.history += [message, {"role": "assistant", "content": answer.text}]

    def go_back(self, mark: ReturnPoint) -> None:
        """Puts the cache back to before a turn that ended in the middle of a step."""
        if not mark.go_back():
            self.forget_cache()

    def forget_cache(self) -> None:
        """Drops the cache but not the history: the next turn computes everything anew."""
        old, self._cache = self._cache, self._llm.runtime.cache()
        old.close()

    def _render(self, message: dict[str, str]) -> list[int]:
        if self.template is not None:
            return self.template.encode([*self.history, message])
        tokenizer, special = self._llm.require_tokenizer(), not self._seen
        new = tokenizer(message["content"], add_special_tokens=special)["input_ids"]
        return self._seen + list(new)

    def _keep_common(self, ids: list[int]) -> None:
        """Forgets cached tokens from the first one that differs; at least one stays to compute."""
        cached = self._cache.get_seq_length()
        same = common_length(self._seen[:cached], ids[:-1])
        if same < cached and not self._cache.can_crop:
            self.forget_cache()
        elif same < cached:
            self._cache.crop(same - cached)


class _RememberedTurn(Turn):
    """A turn that enters its conversation's history when it is over, streamed or not."""

    shares_prompt = True

    def __init__(
        self,
        conversation: Conversation,
        message: dict[str, str],
        ids: list[int],
        options: Mapping[str, Any],
    ) -> None:
        llm, cache, whole = conversation._llm, conversation._cache, torch.tensor([ids])
        super().__init__(llm, cache, whole, options, conversation.template)
        self._conversation, self._message, self._prompt = conversation, message, ids

    def run(self, pieces: SimpleQueue[Any] | None = None) -> Generation:
        if self.has_beams:
            return self._run_beams(pieces)
        with memory_errors(lambda: "prefill"):
            mark = ReturnPoint(self.cache)
        try:
            answer = super().run(pieces)
        except BaseException:
            self._conversation.go_back(mark)
            raise
        if answer.token_ids:
            mark.keep()
            self._conversation.remember(self._message, self._prompt, answer)
        else:  # given up while the prompt was computed
            self._conversation.go_back(mark)
        return answer

    def _run_beams(self, pieces: SimpleQueue[Any] | None) -> Generation:
        """The cache keeps its one row: a fork has one for each beam, none of which is the answer's
        to the end. What this turn adds is computed in the next one.
        """
        with memory_errors(lambda: "prefill"), self._on_fork():
            answer = super().run(pieces)
        if answer.token_ids:
            self._conversation.remember(self._message, self._prompt, answer)
        return answer
