"""Several questions to one cache: chats, and long contexts that are read once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Literal, Unpack, overload

import torch
from torch import Tensor

from hybrid_kv.api.arguments import GenerateOptions, token_ids
from hybrid_kv.api.generation import Generation
from hybrid_kv.api.stream import TextStream
from hybrid_kv.api.template import ChatTemplate, Message, checked
from hybrid_kv.api.turn import Model, Turn, check_room
from hybrid_kv.errors import ConfigError, said
from hybrid_kv.models.hf_cache import TieredCache
from hybrid_kv.models.rollback import ReturnPoint, rolled_back
from hybrid_kv.runtime import memory_errors
from hybrid_kv.saved import open_context, save_context


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

        An answer that is cut short stays in the history as far as it came.

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


class _ForgottenTurn(Turn):
    """A turn that leaves no trace in its cache."""

    def run(self, pieces: SimpleQueue[Any] | None = None) -> Generation:
        with (
            self._llm.runtime.generating(),
            memory_errors(lambda: "prefill"),
            rolled_back(self.cache),
        ):
            return super().run(pieces)


class AskedMessages:
    """Messages of which the last is to end with a question that is not known yet.

    The question follows the text in the same message: a message of its own would be a second one of
    the user in a row, which many templates refuse and few models know.
    """

    def __init__(self, template: ChatTemplate, messages: list[Message]) -> None:
        if messages[-1]["role"] != "user":
            raise ConfigError(
                "the last message of a context must be the user's, because questions follow in it, "
                f"got one of {messages[-1]['role']}; put the text there"
            )
        self.template, self.messages = template, messages

    def before_question(self) -> list[int]:
        """The tokens that come out the same whatever is asked."""
        # What follows the text may change how its last word is taken apart, so neither this ending
        # nor that one is kept.
        asked, ended = self.with_question("a"), self.template.encode(self.messages)
        return asked[: common_length(asked, ended)]

    def with_question(self, question: str) -> list[int]:
        """All tokens up to where the answer begins."""
        last = self.messages[-1]
        content = f"{last['content']}\n\n{question}"
        return self.template.encode([*self.messages[:-1], {**last, "content": content}])


def common_length(first: Sequence[int], second: Sequence[int]) -> int:
    """How many tokens two sequences begin with alike."""
    pairs = zip(first, second, strict=False)
    shorter = min(len(first), len(second))
    return next((idx for idx, (one, other) in enumerate(pairs) if one != other), shorter)


@contextmanager
def _new_cache(llm: Model) -> Iterator[TieredCache]:
    """A cache to be filled in the block, while no other thread generates; closed if that fails."""
    cache = llm.runtime.cache()
    try:
        with llm.runtime.generating(), memory_errors(lambda: "prefill"):
            yield cache
    except BaseException:
        cache.close()
        raise


class Context:
    """A long text, prefilled once; every `ask` continues from its end and leaves no trace.

    ids: [1, tokens].

    Args:
        cache: holds these tokens and no others.
        messages: what a chat template makes `ids` and a question of; None for raw text.
    """

    def __init__(
        self, llm: Model, cache: TieredCache, ids: Tensor, messages: AskedMessages | None = None
    ) -> None:
        self._llm, self._cache, self.ids = llm, cache, ids
        self._messages = messages

    @classmethod
    def prefilled(cls, llm: Model, ids: Tensor, messages: AskedMessages | None = None) -> Context:
        """A context of ids [1, tokens] that the model reads now."""
        with _new_cache(llm) as cache:
            check_room(llm, cache, ids.shape[1])
            cache.kv.reserve(ids.shape[1])
            with torch.inference_mode():
                llm.model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        return cls(llm, cache, ids, messages)

    @classmethod
    def opened(cls, llm: Model, path: str | Path) -> Context:
        """What `save` wrote; see `LLM.open`."""
        with _new_cache(llm) as cache:
            opened = open_context(path, cache, llm.model, llm.tokenizer, llm.runtime.device)
            messages = None
            if opened.messages is not None:
                messages = AskedMessages(llm.require_chat_template(), checked(opened.messages))
        return cls(llm, cache, opened.ids.to(llm.runtime.device), messages)

    def save(self, path: str | Path) -> None:
        """Writes the context to a folder, by custom `NAME.hkv`, from which `LLM.open` opens it.

        Whatever happens, the folder holds the whole context, or what it held before. An index that
        is being built is waited for; it is saved too, and not built again.

        Args:
            path: a new folder, or one with a saved context, which is replaced.

        Raises:
            ConfigError: the folder holds something else, or the model or index has state that
                no file holds.
            WriteError: it cannot be written; what was there before still is.
            BusyError: the model generates in another thread.
        """
        messages = None if self._messages is None else self._messages.messages
        with self._llm.runtime.generating():
            save_context(path, self._cache, self.ids, messages, self._llm)

    @overload
    def ask(
        self,
        question: str | Sequence[int] | Tensor,
        *,
        stream: Literal[False] = False,
        **options: Unpack[GenerateOptions],
    ) -> Generation: ...

    @overload
    def ask(
        self,
        question: str | Sequence[int] | Tensor,
        *,
        stream: Literal[True],
        **options: Unpack[GenerateOptions],
    ) -> TextStream: ...

    def ask(
        self,
        question: str | Sequence[int] | Tensor,
        *,
        stream: bool = False,
        **options: Unpack[GenerateOptions],
    ) -> Generation | TextStream:
        """The continuation of context and question; `stream` and options as in `generate`.

        A context of messages is answered as `generate` answers it with two line breaks and the
        question at the end of the last message.

        Args:
            question: text, token ids, or a tensor [tokens] or [1, tokens]; of messages, text only.

        Raises:
            ConfigError: the question is empty or does not fit into the model's context.
            CapacityError, DeviceMemoryError: memory ran out; the context is as it was before.
        """
        template = None if self._messages is None else self._messages.template
        whole = self._raw(question) if self._messages is None else self._rendered(question)
        turn = _ForgottenTurn(self._llm, self._cache, whole, options, template)
        return turn.stream() if stream else turn.run()

    def _raw(self, question: str | Sequence[int] | Tensor) -> Tensor:
        """Context and question [1, tokens], one behind the other."""
        if isinstance(question, str):
            encoded = self._llm.require_tokenizer()(question, add_special_tokens=False)
            question = encoded["input_ids"]
        ids = token_ids(question, self._llm.model, "question")
        return torch.cat([self.ids, ids.to(self.ids)], 1)

    def _rendered(self, question: str | Sequence[int] | Tensor) -> Tensor:
        """Context and question [1, tokens] as the chat template puts them together."""
        assert self._messages is not None
        if not isinstance(question, str):
            raise ConfigError(
                f"a question about messages must be text, got {said(question)}; make the context "
                "of token ids to ask with token ids"
            )
        if not question.strip():
            raise ConfigError("question is empty; type at least one word")
        known, ids = self.ids[0].tolist(), self._messages.with_question(question)
        if (same := common_length(known, ids)) < len(known):
            raise ConfigError(
                f"the context must come out as it was computed, {len(known)} tokens, got {same} "
                "and then others from its chat template, which may write the date; make a new "
                "context"
            )
        return torch.tensor([ids]).to(self.ids)
