"""Long contexts that are read once and then asked, continued, forked and saved."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from queue import SimpleQueue
from threading import Event
from typing import Any, Literal, Self, Unpack, overload

import torch
from torch import Tensor

from hybrid_kv.api.arguments import GenerateOptions, check_watchers, whole_number
from hybrid_kv.api.generation import (
    Generation,
    PrefillCancelled,
    PrefillProgress,
    PrefillWatch,
    TextStream,
)
from hybrid_kv.api.tokens import (
    AskedMessages,
    ChatTemplate,
    Message,
    checked,
    common_length,
    is_chat,
    token_ids,
)
from hybrid_kv.api.turn import Model, Turn, check_room
from hybrid_kv.errors import ConfigError, MethodError, said
from hybrid_kv.models.cache_state import passing
from hybrid_kv.models.hf_cache import TieredCache
from hybrid_kv.models.rollback import ReturnPoint, rolled_back
from hybrid_kv.runtime import memory_errors
from hybrid_kv.saved import open_context, save_context
from hybrid_kv.saved.file_blocks import Compression, checked_compression


class _ForgottenTurn(Turn):
    """A turn that leaves no trace in its cache."""

    def run(self, pieces: SimpleQueue[Any] | None = None) -> Generation:
        with self._llm.runtime.generating(), memory_errors(lambda: "prefill"):
            if self.takes_fork:  # rows that are rearranged do not come back by cropping
                with self._on_fork():
                    return super().run(pieces)
            with rolled_back(self.cache):
                return super().run(pieces)


class _KeptTurn(Turn):
    """A turn whose question and answer become part of its context, streamed or not."""

    def __init__(
        self,
        context: Context,
        question: str | Sequence[int] | Tensor,
        whole: Tensor,
        options: Mapping[str, Any],
        template: ChatTemplate | None,
    ) -> None:
        super().__init__(context._llm, context._cache, whole, options, template)
        self._context, self._question = context, question

    def run(self, pieces: SimpleQueue[Any] | None = None) -> Generation:
        context = self._context
        with self._llm.runtime.generating():
            if self.takes_fork:
                with self._on_fork():
                    answer = super().run(pieces)
                if answer.token_ids:
                    context._advance(*context._with_answer(self._question, self._ids, answer))
                return answer
            with memory_errors(lambda: "prefill"):
                mark = ReturnPoint(self.cache)
            try:
                answer = super().run(pieces)
                is_kept = bool(answer.token_ids) and self._keep(answer)
            except BaseException:
                context._put_back(mark)
                raise
            if is_kept:
                mark.keep()
                return answer
            context._put_back(mark)
            if answer.token_ids:  # else it was given up while the question was computed
                context._advance(*context._with_answer(self._question, self._ids, answer))
            return answer

    def _keep(self, answer: Generation) -> bool:
        """False where the cached tokens are not those that the context shall have."""
        context = self._context
        ids, messages = context._with_answer(self._question, self._ids, answer)
        cached = [*self._ids[0].tolist(), *answer.token_ids][: self.cache.get_seq_length()]
        if common_length(cached, ids[0].tolist()) < len(cached):
            return False
        with memory_errors(lambda: "prefill"):
            context._compute(ids)
        context.ids, context._messages = ids, messages
        return True


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
    """A long text, prefilled once: asked as often as wanted, continued, forked, cut and saved.

    Where a call fails, the context is as it was before. It ends with `close`, with its `with`
    block, or when nobody has it any more.

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
            cache.kv.means.reserve(ids.shape[1])
            shared = nullcontext(0) if llm.prefixes is None else llm.prefixes.context(cache, ids)
            with shared as reused:
                _read(llm, cache, ids[:, reused:])
        return cls(llm, cache, ids, messages)

    @classmethod
    def opened(cls, llm: Model, path: str | Path, *, verify: bool | None = None) -> Context:
        """Opens a context that `save` wrote; see `LLM.open`."""
        with _new_cache(llm) as cache:
            made_with = llm.model, llm.tokenizer, llm.runtime.device
            opened = open_context(path, cache, *made_with, verify=verify)
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

    def __exit__(self, *error: object) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._is_closed:
            raise ConfigError(
                "a context must be open, got one that was closed; make a new one, or fork it before"
            )

    def save(self, path: str | Path, *, compress: Compression | None = None) -> None:
        """Writes the context to a folder, by custom `NAME.hkv`, from which `LLM.open` opens it.

        Whatever happens, the folder holds the whole context, or what it held before. An index that
        is being built is waited for; it is saved too, and not built again.

        Args:
            path: a new folder, or one with a saved context, which is replaced.
            compress: "int8" writes keys and values in 8 bits, each token and head with a scale:
                about half of what 16 bits take. What is opened has lost what the manifest says
                (`k_error`, `v_error`), and lies in memory rather than in the file.

        Raises:
            ConfigError: the folder holds something else, the model or index has state that no file
                holds, or the context is closed.
            WriteError: it cannot be written; what was there before still is.
            BusyError: the model generates in another thread.
        """
        self._check_open()
        messages = None if self._messages is None else self._messages.messages
        rounding = checked_compression(compress)
        with self._llm.runtime.generating():
            save_context(path, self._cache, self.ids, messages, self._llm, compress=rounding)

    def append(
        self,
        more: str | Sequence[int] | Tensor | Sequence[Message],
        *,
        on_prefill: PrefillProgress | None = None,
        cancel: Event | None = None,
    ) -> int:
        """Continues the text, which the model reads now: exactly, whatever the method.

        Args:
            more: text or token ids that follow the context's; of messages, text that follows in the
                user's last message, or begins one behind an answer, or further messages.
            on_prefill, cancel: as in `generate`.

        Returns:
            How many tokens the context has grown by; 0 where it was cancelled and is as before.

        Raises:
            ConfigError: it is empty, or of another kind than the context, or does not fit into the
                model's context, or the context is closed.
            CapacityError, DeviceMemoryError: memory ran out.
            BusyError: the model generates in another thread.
        """
        self._check_open()
        check_watchers(on_prefill, cancel)
        ids, messages = self._with_more(more)
        before, new = self.ids.shape[1], ids.shape[1] - self._cache.get_seq_length()
        cancels = [] if cancel is None else [cancel]
        with self._llm.runtime.generating():
            watch = PrefillWatch(self._llm.model, new, on_prefill, cancels)
            try:
                with watch:
                    self._advance(ids, messages)
            except PrefillCancelled:
                return 0
        return self.ids.shape[1] - before

    def truncate(self, tokens: int) -> None:
        """Forgets all but the first tokens.

        Args:
            tokens: how many stay, at least 1; as many as there are, or more, forget nothing.

        Raises:
            ConfigError: the context is one of messages, or closed, or what came before its newest
                tokens is gone: in sliding windows and linear attention, or dropped by the method.
            BusyError: the model generates in another thread.
        """
        self._check_open()
        keep, before = whole_number("tokens", tokens), self.ids.shape[1]
        if self._messages is not None:
            raise ConfigError(
                "a context of messages cannot be cut between two tokens; fork it before you append "
                "or keep, and go on from the fork"
            )
        if keep >= before:
            return
        with self._llm.runtime.generating():
            self._crop(keep)
            self.ids = self.ids[:, :keep]

    @overload
    def ask(
        self,
        question: str | Sequence[int] | Tensor,
        *,
        keep: bool = False,
        stream: Literal[False] = False,
        **options: Unpack[GenerateOptions],
    ) -> Generation: ...

    @overload
    def ask(
        self,
        question: str | Sequence[int] | Tensor,
        *,
        keep: bool = False,
        stream: Literal[True],
        **options: Unpack[GenerateOptions],
    ) -> TextStream: ...

    def ask(
        self,
        question: str | Sequence[int] | Tensor,
        *,
        keep: bool = False,
        stream: bool = False,
        **options: Unpack[GenerateOptions],
    ) -> Generation | TextStream:
        """The continuation of context and question; `stream` and options as in `generate`.

        A context of messages is answered as `generate` answers it with two line breaks and the
        question at the end of the last message, or in a message of its own behind an answer.

        Args:
            question: text, token ids, or a tensor [tokens] or [1, tokens]; of messages, text only.
            keep: question and answer become part of the context, an answer that is cut short as far
                as it came; else the context stays what it is.

        Raises:
            ConfigError: the question is empty or does not fit into the model's context, or the
                context is closed.
            CapacityError, DeviceMemoryError: memory ran out; the context is as it was before.
        """
        self._check_open()
        template = None if self._messages is None else self._messages.template
        whole = self._raw(question) if self._messages is None else self._rendered(question)
        turn: Turn
        if keep:
            turn = _KeptTurn(self, question, whole, options, template)
        else:
            turn = _ForgottenTurn(self._llm, self._cache, whole, options, template)
        return turn.stream() if stream else turn.run()

    def _raw(self, more: str | Sequence[int] | Tensor, what: str = "question") -> Tensor:
        """Context and what follows [1, tokens], one behind the other."""
        if isinstance(more, str):
            encoded = self._llm.require_tokenizer()(more, add_special_tokens=False)
            more = encoded["input_ids"]
        ids = token_ids(more, self._llm.model, what)
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

    # Growing, and going back --------------------------------------------------------------------

    def _with_more(
        self, more: str | Sequence[int] | Tensor | Sequence[Message]
    ) -> tuple[Tensor, AskedMessages | None]:
        """Token ids [1, tokens] and messages of the context with more of its text."""
        if self._messages is None:
            if is_chat(more):
                raise ConfigError(
                    "a context of raw text grows by text or token ids, got messages; make the "
                    "context of messages"
                )
            return self._raw(more, "text"), None  # type: ignore[arg-type]
        if isinstance(more, str):
            if not more:
                raise ConfigError("text is empty; pass at least one word")
            messages = self._messages.with_text(more)
        elif is_chat(more):
            messages = self._messages.with_messages(checked(more))
        else:
            raise ConfigError(
                f"a context of messages grows by text or messages, got {said(more)}; make the "
                "context of token ids to append token ids"
            )
        return self._before_question(messages), messages

    def _with_answer(
        self, question: str | Sequence[int] | Tensor, asked: Tensor, answer: Generation
    ) -> tuple[Tensor, AskedMessages | None]:
        """The same with a question, asked [1, tokens] with all before it, and its answer."""
        if self._messages is None:
            return torch.cat([asked, torch.tensor([answer.token_ids]).to(asked)], 1), None
        assert isinstance(question, str)
        messages = self._messages.with_answer(question, answer.text)
        return self._before_question(messages), messages

    def _before_question(self, messages: AskedMessages) -> Tensor:
        return torch.tensor([messages.before_question()]).to(self.ids)

    def _advance(self, ids: Tensor, messages: AskedMessages | None) -> None:
        """The context becomes ids [1, tokens]."""
        check_room(self._llm, self._cache, ids.shape[1])
        with memory_errors(lambda: "prefill"):
            mark = ReturnPoint(self._cache)
            try:
                self._compute(ids)
            except BaseException:
                self._put_back(mark)
                raise
        mark.keep()
        self.ids, self._messages = ids, messages

    def _compute(self, ids: Tensor) -> None:
        """Lets the cache, which holds the first of ids [1, tokens] or those of the context, hold
        all of them.
        """
        cached = self._cache.get_seq_length()
        if cached == self.ids.shape[1]:
            same = common_length(self.ids[0].tolist(), ids[0].tolist())
            if same < cached:
                self._crop(same)
        _read(self._llm, self._cache, ids[:, self._cache.get_seq_length() :])

    def _crop(self, tokens: int) -> None:
        if not self._cache.can_crop:
            raise ConfigError(
                f"a context must still have what came before token {tokens} to be cut there, got "
                "one whose method, sliding windows or linear attention have lost it; make a new "
                "context, or fork it earlier"
            )
        try:
            self._cache.crop(tokens - self._cache.get_seq_length())
        except MethodError as error:
            raise ConfigError(f"the context cannot be cut to {tokens} tokens: {error}") from error

    def _put_back(self, mark: ReturnPoint) -> None:
        """To where it was before a call that failed; closes it where that fails, too."""
        if not mark.go_back():
            self.close()


def _read(llm: Model, cache: TieredCache, ids: Tensor) -> None:
    """Lets the model read ids [1, tokens] behind what a cache holds, exactly, however few.

    The cache's prompt ends with the first of them, so that no more than its window stays resident.
    """
    if not ids.numel():
        return
    cache.kv.more_prompt = True
    try:
        with torch.no_grad():  # inference mode would leave tensors that nobody can write later
            llm.model(ids, **passing(cache), use_cache=True, logits_to_keep=1)
            for layer_idx in cache.kv.layers:
                cache.kv.layers.seal_if_open(layer_idx)
    finally:
        cache.kv.more_prompt = False
