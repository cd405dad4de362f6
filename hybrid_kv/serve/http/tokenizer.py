"""Text to tokens and back, beside an engine that uses the tokenizer in its own thread.

A prompt over the limit is refused by its length before it is tokenized.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol, TypeVar

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hybrid_kv.api.tokens import ChatTemplate, token_ids
from hybrid_kv.config import HybridConfig
from hybrid_kv.errors import ConfigError
from hybrid_kv.serve.grammars import Grammar, GrammarReader, GrammarText
from hybrid_kv.serve.http.schemas import ApiError

T = TypeVar("T")

_THREADS = 4
"""Threads that encode: one very long text, or three, hold up nobody else's."""


class ServedModel(Protocol):
    """A model as texts, prompts and limits see it; its weights may lie elsewhere."""

    @property
    def model(self) -> PreTrainedModel: ...

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase | None: ...

    @property
    def config(self) -> HybridConfig: ...

    def require_tokenizer(self) -> PreTrainedTokenizerBase: ...


@dataclass(frozen=True, slots=True)
class Encoder:
    """A tokenizer of one thread. template: None where the model has none."""

    tokenizer: PreTrainedTokenizerBase
    template: ChatTemplate | None


class Texts:
    """Encodes in a few threads, so that a long text holds up nobody; decodes at once.

    A tokenizer is changed while it encodes and must not be shared between threads, so each thread
    has a copy. What has not begun when its asker is cancelled never does. has_template: whether
    chats can be encoded. takes_tools: whether their template has a place for tools. template_text:
    the template, "" where there is none. added_words: that are one token each.

    Args:
        most_tokens: of a prompt; None for any number.
    """

    def __init__(self, llm: ServedModel, most_tokens: int | None = None) -> None:
        self._model = llm.model
        self._pristine, self._decoder = deepcopy(llm.require_tokenizer()), deepcopy(llm.tokenizer)
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="hybrid-kv-encode")
        self._copying, self._decoding, self._reading = (threading.Lock() for _ in range(3))
        self._own = threading.local()
        self._most_tokens = most_tokens
        longest = None if most_tokens is None else bytes_per_token(self._pristine)
        self._most_bytes = longest and most_tokens and longest * most_tokens
        self.end_ids = self.chat_end_ids = _end_ids(llm)
        template = ChatTemplate.of(deepcopy(self._pristine))
        self.has_template = template is not None
        self.takes_tools = template is not None and template.takes_tools()
        self.template_text = "" if template is None else template.text
        self.added_words = frozenset(self._pristine.get_added_vocab())
        self._vocab = int(llm.model.config.get_text_config(decoder=True).vocab_size)
        self._grammars: GrammarReader | None = None
        if template is not None:
            self.chat_end_ids += tuple(idx for idx in template.end_ids() if idx not in self.end_ids)
        self.piece = lru_cache(maxsize=2**16)(self._piece)

    def check_size(self, size: int, param: str) -> None:
        """Raises ApiError where a text of so many bytes is certainly more tokens than allowed."""
        if self._most_bytes is not None and size > self._most_bytes:
            raise ApiError(
                400,
                f"a prompt must be at most {self._most_tokens:,} tokens on this server, which hold "
                f"{self._most_bytes:,} bytes of text at most, got {size:,}; shorten it",
                param,
                "context_length_exceeded",
            )

    async def encode(
        self, prompt: str | Sequence[int], param: str | None = None
    ) -> tuple[int, ...]:
        """Of raw text or token ids.

        Args:
            param: by whose name a text is refused that is certainly too long; None for never.

        Raises:
            ApiError: so it is.
            ConfigError: it is empty, or has ids that are none of the model's.
        """
        if isinstance(prompt, str) and param is not None:
            self.check_size(_size(prompt), param)
        return await self.in_thread(lambda own: self._encode(own, prompt))

    async def encode_chat(
        self,
        messages: Sequence[dict[str, Any]],
        param: str | None = None,
        tools: Sequence[dict[str, Any]] = (),
    ) -> tuple[int, ...]:
        """Of messages, tools and what begins the answer; `param` as above.

        Raises:
            ApiError: they are certainly too long.
            ConfigError: there is no chat template, or it refuses them.
        """

        def check(text: str) -> None:  # a template may leave out much of what is in the messages
            if param is not None:
                self.check_size(_size(text), param)

        def encode(own: Encoder) -> tuple[int, ...]:
            if own.template is None:
                raise ConfigError(
                    "messages need a chat template, and the model's tokenizer has none; send the "
                    "whole prompt to /v1/completions"
                )
            return self._checked(own.template.encode(messages, check, tools))

        return await self.in_thread(encode)

    async def grammar(self, asked: GrammarText) -> Grammar:
        """Reads a grammar.

        Raises:
            ConfigError: it cannot be kept to, or not with this tokenizer.
        """

        def read(own: Encoder) -> Grammar:
            with self._reading:
                if self._grammars is None:  # a second or two
                    self._grammars = GrammarReader(own.tokenizer, self._vocab, self.chat_end_ids)
            return self._grammars.read(asked)

        return await self.in_thread(read)

    def check_token(self, token: int, param: str) -> None:
        """Raises ApiError unless a token is one of the model's."""
        if not 0 <= token < self._vocab:
            message = f"{param} must have token ids 0..{self._vocab - 1}, got {token}"
            raise ApiError(400, message, param)

    async def encode_more(self, text: str) -> list[int]:
        """Of text that follows other text: without special tokens at its beginning."""
        ids, _ = await self.encode_with_offsets(text)
        return ids

    async def encode_with_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Token ids of a text alone, and where in it each one begins and ends (characters)."""
        return await self.in_thread(lambda own: _with_offsets(own.tokenizer, text))

    def close(self) -> None:
        """Ends the threads."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _encode(self, own: Encoder, prompt: str | Sequence[int]) -> tuple[int, ...]:
        if isinstance(prompt, str):
            prompt = own.tokenizer(prompt)["input_ids"]
        return self._checked(prompt)

    def _checked(self, ids: Any) -> tuple[int, ...]:
        return tuple(token_ids(ids, self._model)[0].tolist())

    def _piece(self, token: int) -> str:
        """The text of one token by itself."""
        with self._decoding:
            return str(self._decoder.decode([token]))  # type: ignore[union-attr]

    async def in_thread(self, call: Callable[[Encoder], T]) -> T:
        """Calls what uses a tokenizer, in one of the threads."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, lambda: call(self._encoder()))

    def _encoder(self) -> Encoder:
        """This thread's."""
        if not hasattr(self._own, "encoder"):
            with self._copying:
                tokenizer = deepcopy(self._pristine)
            self._own.encoder = Encoder(tokenizer, ChatTemplate.of(tokenizer))
        own: Encoder = self._own.encoder
        return own


def _size(text: str) -> int:
    """Bytes of it in UTF-8; half a character, which JSON can hold, counts too."""
    return len(text.encode(errors="surrogatepass"))


def _with_offsets(
    tokenizer: PreTrainedTokenizerBase, text: str
) -> tuple[list[int], list[tuple[int, int]]]:
    encoded: Any = tokenizer(
        text, add_special_tokens=False, return_offsets_mapping=tokenizer.is_fast
    )
    return list(encoded["input_ids"]), list(encoded.get("offset_mapping", ()))


def _end_ids(llm: ServedModel) -> tuple[int, ...]:
    """Tokens by which the model's own settings end an answer."""
    generation: Any = llm.model.generation_config
    ends = generation.eos_token_id
    return () if ends is None else (ends,) if isinstance(ends, int) else tuple(ends)


_COMPOSED = 4
"""Bytes that Unicode's composed forms (NFC) make one of, at most: 3, of the Kelvin sign and of
Hangul, and one to be sure."""

_KEEPING = {"ByteLevel", "Metaspace", "Digits", "Split", "Punctuation", "Sequence"}
"""Kinds of pre-tokenizers that drop nothing of a text, unless their behavior is "Removed"."""

_BYTES = {f"<0x{byte:02X}>" for byte in range(256)}


def bytes_per_token(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The most bytes of UTF-8 that one token can stand for.

    None where there is no such number, because a tokenizer drops text, or makes one token of any
    length of it: words that it does not know, white space beside special tokens.
    """
    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return None
    parts: dict[str, Any] = json.loads(backend.to_str())
    model, added = parts["model"], parts["added_tokens"]
    if model["type"] != "BPE" or any(each["lstrip"] or each["rstrip"] for each in added):
        return None
    normalizers = _flat(parts["normalizer"], "normalizers")
    steps = _flat(parts["pre_tokenizer"], "pretokenizers")
    by_bytes = any(each["type"] == "ByteLevel" for each in normalizers + steps)
    if not by_bytes and not (model["byte_fallback"] and set(model["vocab"]) >= _BYTES):
        return None  # what is in no token is dropped, or joined in one
    if not all(map(_keeps, normalizers)) or not all(map(_splits, steps)):
        return None
    # A byte is a character in the tokens of ByteLevel.
    longest = max(len(token) if by_bytes else len(token.encode()) for token in model["vocab"])
    longest = max([longest, *(len(each["content"].encode()) for each in added)])
    composed = any(each["type"] == "NFC" for each in normalizers)
    return longest * (_COMPOSED if composed else 1)


def _flat(part: dict[str, Any] | None, name: str) -> list[dict[str, Any]]:
    """The steps of a sequence of a sequence, one after the other."""
    if part is None:
        return []
    if part["type"] != "Sequence":
        return [part]
    return [step for each in part[name] for step in _flat(each, name)]


def _keeps(normalizer: dict[str, Any]) -> bool:
    """Whether nothing of a text is lost, but for composing."""
    if normalizer["type"] == "Replace":  # a space becomes a longer mark
        pattern = normalizer["pattern"].get("String", "")
        return 0 < len(pattern.encode()) <= len(normalizer["content"].encode())
    return normalizer["type"] in ("Prepend", "NFC", "ByteLevel")


def _splits(step: dict[str, Any]) -> bool:
    return step["type"] in _KEEPING and step.get("behavior") != "Removed"
