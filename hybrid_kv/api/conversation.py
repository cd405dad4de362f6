"""Several questions to one cache: chats, and long contexts that are read once."""

from __future__ import annotations

from queue import SimpleQueue
from typing import Any, Literal, overload

import torch
from torch import Tensor

from hybrid_kv.api.generation import Generation
from hybrid_kv.api.stream import TextStream
from hybrid_kv.api.turn import Model, Turn, check_room
from hybrid_kv.errors import ConfigError
from hybrid_kv.models.rollback import Mark, rolled_back
from hybrid_kv.runtime import memory_errors


class Conversation:
    """Turns that share one cache; `history` holds the messages in chat format.

    With a chat template the whole conversation is rendered anew for each turn and the cache is kept
    as far as the tokens agree; without one, texts follow each other as they are.
    """

    def __init__(self, llm: Model) -> None:
        self._llm, self._cache = llm, llm.runtime.cache()
        self._seen: list[int] = []
        self.history: list[dict[str, str]] = []

    @overload
    def send(self, text: str, *, stream: Literal[False] = False, **options: Any) -> Generation: ...

    @overload
    def send(self, text: str, *, stream: Literal[True], **options: Any) -> TextStream: ...

    def send(self, text: str, *, stream: bool = False, **options: Any) -> Generation | TextStream:
        """The model's answer to `text`, given all turns before; options as in `generate`.

        An answer that is cut short stays in the history as far as it came.

        Raises:
            ConfigError: the text is empty, or the conversation outgrows the model's context.
            CapacityError, DeviceMemoryError: memory ran out; the conversation is as it was before,
                as after any error, and can go on.
            BusyError: the model generates in another thread.
        """
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

    def go_back(self, mark: Mark) -> None:
        """Puts the cache back to before a turn that ended in the middle of a step."""
        if not mark.go_back():
            self.forget_cache()

    def forget_cache(self) -> None:
        """Drops the cache but not the history: the next turn computes everything anew."""
        old, self._cache = self._cache, self._llm.runtime.cache()
        old.close()

    def _render(self, message: dict[str, str]) -> list[int]:
        tokenizer = self._llm.require_tokenizer()
        if tokenizer.chat_template is None:
            special = not self._seen
            new = tokenizer(message["content"], add_special_tokens=special)["input_ids"]
            return self._seen + list(new)
        rendered: Any = tokenizer.apply_chat_template(
            [*self.history, message], add_generation_prompt=True, return_dict=True
        )
        return list(rendered["input_ids"])

    def _keep_common(self, ids: list[int]) -> None:
        """Forgets cached tokens from the first one that differs; at least one stays to compute."""
        cached = self._cache.get_seq_length()
        same = 0
        for old, new in zip(self._seen[:cached], ids[:-1], strict=False):
            if old != new:
                break
            same += 1
        if same < cached and not self._cache.can_crop:
            self.forget_cache()
        elif same < cached:
            self._cache.crop(same - cached)


class _RememberedTurn(Turn):
    """A turn that enters its conversation's history when it is over, streamed or not."""

    def __init__(
        self,
        conversation: Conversation,
        message: dict[str, str],
        ids: list[int],
        options: dict[str, Any],
    ) -> None:
        super().__init__(conversation._llm, conversation._cache, torch.tensor([ids]), options)
        self._conversation, self._message, self._prompt = conversation, message, ids

    def run(self, pieces: SimpleQueue[Any] | None = None) -> Generation:
        with memory_errors(lambda: "prefill"):
            mark = Mark(self.cache)
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


class _ForgottenTurn(Turn):
    """A turn that leaves no trace in its cache."""

    def run(self, pieces: SimpleQueue[Any] | None = None) -> Generation:
        with (
            self._llm.runtime.generating(),
            memory_errors(lambda: "prefill"),
            rolled_back(self.cache),
        ):
            return super().run(pieces)


class Context:
    """A long text, prefilled once; every `ask` continues from its end and leaves no trace.

    ids: [1, tokens].
    """

    def __init__(self, llm: Model, ids: Tensor) -> None:
        self._llm, self._cache, self.ids = llm, llm.runtime.cache(), ids
        check_room(llm, self._cache, ids.shape[1])
        self._cache.kv.reserve(ids.shape[1])
        cache, alone = self._cache, llm.runtime.generating()
        try:
            with alone, torch.inference_mode(), memory_errors(lambda: "prefill"):
                llm.model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        except BaseException:
            self._cache.close()
            raise

    @overload
    def ask(
        self, question: str | Tensor, *, stream: Literal[False] = False, **options: Any
    ) -> Generation: ...

    @overload
    def ask(
        self, question: str | Tensor, *, stream: Literal[True], **options: Any
    ) -> TextStream: ...

    def ask(
        self, question: str | Tensor, *, stream: bool = False, **options: Any
    ) -> Generation | TextStream:
        """The continuation of context and question; `stream` and options as in `generate`.

        Args:
            question: text, or token ids [1, tokens].

        Raises:
            ConfigError: the question is empty or does not fit into the model's context.
            CapacityError, DeviceMemoryError: memory ran out; the context is as it was before.
        """
        ids = self._question_ids(question)
        whole = torch.cat([self.ids, ids.to(self.ids)], 1)
        turn = _ForgottenTurn(self._llm, self._cache, whole, options)
        return turn.stream() if stream else turn.run()

    def _question_ids(self, question: str | Tensor) -> Tensor:
        if isinstance(question, str):
            encoded = self._llm.require_tokenizer()(question, add_special_tokens=False)
            question = torch.tensor(encoded["input_ids"], dtype=torch.long)
        if question.numel() == 0:
            raise ConfigError("question is empty; pass at least one token")
        return question.reshape(1, -1)
