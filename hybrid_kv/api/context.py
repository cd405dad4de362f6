"""Long contexts that are read once and then asked, continued, forked and saved."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType
from typing import Any, Literal, Self, Unpack, overload

import torch
from torch import Tensor

from hybrid_kv.api.arguments import GenerateOptions, token_ids
from hybrid_kv.api.generation import Generation
from hybrid_kv.api.stream import TextStream
from hybrid_kv.api.template import ChatTemplate, Message, checked, common_length
from hybrid_kv.api.turn import Model, Turn, check_room
from hybrid_kv.errors import ConfigError, said
from hybrid_kv.models.hf_cache import TieredCache
from hybrid_kv.models.rollback import rolled_back
from hybrid_kv.runtime import memory_errors
from hybrid_kv.saved import open_context, save_context


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

    It ends with `close`, with its `with` block, or when nobody has it any more.

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
        self._is_closed = False

    @classmethod
    def prefilled(cls, llm: Model, ids: Tensor, messages: AskedMessages | None = None) -> Context:
        """A context of ids [1, tokens] that the model reads now."""
        with _new_cache(llm) as cache:
            check_room(llm, cache, ids.shape[1])
            cache.kv.reserve(ids.shape[1])
            shared = nullcontext(0) if llm.prefixes is None else llm.prefixes.context(cache, ids)
            with shared as reused, torch.inference_mode():
                if (rest := ids[:, reused:]).numel():
                    llm.model(rest, past_key_values=cache, use_cache=True, logits_to_keep=1)
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

    def fork(self) -> Context:
        """A second context of the same tokens; each of the two lives and ends without the other.

        What has left the window is shared, with its index: a fork takes what the method keeps
        resident, sinks and window, and what it adds itself. Under methods that keep everything
        resident (full, quest) it takes the pages that one of the two writes to.

        Raises:
            ConfigError: the context is closed.
            CapacityError, DeviceMemoryError: memory ran out; this context is as it was.
            BusyError: the model generates in another thread.
        """
        self._check_open()
        with self._llm.runtime.generating(), memory_errors(lambda: "prefill"):
            return Context(self._llm, self._cache.fork(), self.ids, self._messages)

    def close(self) -> None:
        """Gives all memory back that no fork needs; the context cannot be asked any more."""
        self._is_closed = True
        self._cache.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._is_closed:
            raise ConfigError(
                "a context must be open, got one that was closed; make a new one, or fork it before"
            )

    def save(self, path: str | Path) -> None:
        """Writes the context to a folder, by custom `NAME.hkv`, from which `LLM.open` opens it.

        Whatever happens, the folder holds the whole context, or what it held before. An index that
        is being built is waited for; it is saved too, and not built again.

        Args:
            path: a new folder, or one with a saved context, which is replaced.

        Raises:
            ConfigError: the folder holds something else, the model or index has state that no file
                holds, or the context is closed.
            WriteError: it cannot be written; what was there before still is.
            BusyError: the model generates in another thread.
        """
        self._check_open()
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
            ConfigError: the question is empty or does not fit into the model's context, or the
                context is closed.
            CapacityError, DeviceMemoryError: memory ran out; the context is as it was before.
        """
        self._check_open()
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
