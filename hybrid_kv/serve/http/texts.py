"""Text to tokens and back, beside an engine that uses the tokenizer in its own thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from functools import lru_cache, partial
from typing import Any, ParamSpec, TypeVar

from hybrid_kv.api import LLM
from hybrid_kv.api.arguments import token_ids
from hybrid_kv.api.template import ChatTemplate
from hybrid_kv.errors import ConfigError

P = ParamSpec("P")
T = TypeVar("T")


class Texts:
    """Encodes in a thread of its own, so that a long text holds up nobody; decodes at once.

    A tokenizer is changed while it encodes and must not be shared between threads, so there are
    copies. template: None where the model has none.
    """

    def __init__(self, llm: LLM) -> None:
        self._model = llm.model
        self._encoder, self._decoder = deepcopy(llm.require_tokenizer()), deepcopy(llm.tokenizer)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="hybrid-kv-encode")
        self._decoding = threading.Lock()
        self.template = ChatTemplate.of(self._encoder)
        self.end_ids = _end_ids(llm)
        self.chat_end_ids = self.end_ids
        if self.template is not None:
            self.chat_end_ids += tuple(
                idx for idx in self.template.end_ids() if idx not in self.end_ids
            )
        self.piece = lru_cache(maxsize=2**16)(self._piece)

    async def encode(self, prompt: str | Sequence[int]) -> tuple[int, ...]:
        """Of raw text or token ids.

        Raises:
            ConfigError: it is empty, or has ids that are none of the model's.
        """
        return await self.in_thread(self._encode, prompt)

    async def encode_chat(self, messages: Sequence[dict[str, str]]) -> tuple[int, ...]:
        """Of messages and of what begins the answer.

        Raises:
            ConfigError: there is no chat template, or it refuses them.
        """
        template = self.template
        if template is None:
            raise ConfigError(
                "messages need a chat template, and the model's tokenizer has none; send the whole "
                "prompt to /v1/completions"
            )
        return await self.in_thread(lambda: self._checked(template.encode(messages)))

    async def encode_more(self, text: str) -> list[int]:
        """Of text that follows other text: without special tokens at its beginning."""
        ids, _ = await self.encode_with_offsets(text)
        return ids

    async def encode_with_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Token ids of a text alone, and where in it each one begins and ends (characters)."""
        return await self.in_thread(self._encode_with_offsets, text)

    def close(self) -> None:
        """Ends the thread."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _encode(self, prompt: str | Sequence[int]) -> tuple[int, ...]:
        if isinstance(prompt, str):
            prompt = self._encoder(prompt)["input_ids"]
        return self._checked(prompt)

    def _checked(self, ids: Any) -> tuple[int, ...]:
        return tuple(token_ids(ids, self._model)[0].tolist())

    def _encode_with_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        encoded: Any = self._encoder(
            text, add_special_tokens=False, return_offsets_mapping=self._encoder.is_fast
        )
        return list(encoded["input_ids"]), list(encoded.get("offset_mapping", ()))

    def _piece(self, token: int) -> str:
        """The text of one token by itself."""
        with self._decoding:
            return str(self._decoder.decode([token]))  # type: ignore[union-attr]

    async def in_thread(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Calls what uses the tokenizer, in its thread."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, partial(call, *args, **kwargs))


def _end_ids(llm: LLM) -> tuple[int, ...]:
    """Tokens by which the model's own settings end an answer."""
    generation: Any = llm.model.generation_config
    ends = generation.eos_token_id
    return () if ends is None else (ends,) if isinstance(ends, int) else tuple(ends)
