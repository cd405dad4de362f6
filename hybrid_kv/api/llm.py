"""`hybrid_kv.load(...).generate(...)`: a model with a tiered KV cache in three lines."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType
from typing import Any, Literal, TypeAlias, overload

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hybrid_kv.api.conversation import AskedMessages, Context, Conversation
from hybrid_kv.api.generation import Generation
from hybrid_kv.api.stream import TextStream
from hybrid_kv.api.template import ChatTemplate, Message, checked, is_chat
from hybrid_kv.api.turn import Turn
from hybrid_kv.config import HybridConfig
from hybrid_kv.errors import ConfigError, ModelNotFoundError
from hybrid_kv.models.attach import Attachment, attach
from hybrid_kv.models.load import load_model, load_tokenizer

Prompt: TypeAlias = str | Sequence[int] | Tensor | Sequence[Message]


class LLM:
    """A model, its tokenizer and a configuration; made by `load`. A context manager.

    Calls are independent of each other; `conversation` keeps its cache between turns. One call is
    served at a time: a second one, from another thread, raises BusyError.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None,
        config: HybridConfig,
        *,
        no_tokenizer: str = "",
    ) -> None:
        self.model, self.tokenizer, self.config = model, tokenizer, config
        self._no_tokenizer = no_tokenizer  # why there is none
        self.runtime: Attachment = attach(model, config)

    @overload
    def generate(
        self, prompt: Prompt, *, stream: Literal[False] = False, **options: Any
    ) -> Generation: ...

    @overload
    def generate(self, prompt: Prompt, *, stream: Literal[True], **options: Any) -> TextStream: ...

    def generate(
        self, prompt: Prompt, *, stream: bool = False, **options: Any
    ) -> Generation | TextStream:
        """Continues a prompt.

        Args:
            prompt: raw text, token ids, a tensor [tokens] or [1, tokens], or messages like
                [{"role": "user", "content": "..."}], which the model's chat template renders.
                Special tokens in a message are text; in raw text they are tokens.
            stream: yield pieces of text as they come; the Generation is the stream's `result`.
            options: `max_new_tokens` (default 128), `stop` (strings that end the text and are cut
                off), `seed`, `on_prefill` (called with (done, total) while the prompt is computed),
                `cancel` (a threading.Event that ends the call early), and everything transformers'
                GenerationConfig knows (`do_sample`, `temperature`, `top_p`, `num_beams`, ...).

        Raises:
            ConfigError: the prompt is empty or longer than the model's context, or its messages
                are refused by the chat template, or there is none.
            CapacityError: the context does not fit into host memory; said before prefill starts
                where it can be known then.
            DeviceMemoryError: the GPU's memory ran out; the message says where and what to lower.
            BusyError: the model generates in another thread.
        """
        template = self.require_chat_template() if is_chat(prompt) else None
        turn = _OnlyTurn(self, self.runtime.cache(), self.encode(prompt), options, template)
        return turn.stream() if stream else turn.run()

    def conversation(self, *, system: str | None = None, raw: bool = False) -> Conversation:
        """A chat whose cache is kept between turns: each turn computes its own tokens only.

        Args:
            system: what a system message says before all turns.
            raw: leave out the model's chat template; texts then follow each other as they are.

        Raises:
            ConfigError: there is no template to put the system message into.
        """
        if system is None:
            return Conversation(self, None if raw else self.chat_template)
        if raw:
            raise ConfigError(
                "system needs the chat template, which raw=True turns off; leave out one of them"
            )
        return Conversation(self, self.require_chat_template(), system)

    def context(self, prompt: Prompt) -> Context:
        """A long text that is prefilled once, now, and then asked many times.

        Args:
            prompt: as in `generate`; of messages the last is the user's, and questions follow the
                text in it.

        Raises:
            ConfigError, CapacityError: as `generate`.
        """
        if not is_chat(prompt):
            return Context(self, self.encode(prompt))
        asked = AskedMessages(self.require_chat_template(), checked(prompt))
        return Context(self, self.encode(asked.before_question()), asked)

    def encode(self, prompt: Prompt) -> Tensor:
        """Token ids [1, tokens] on the model's device; of messages with what begins the answer."""
        if is_chat(prompt):
            prompt = self.require_chat_template().encode(checked(prompt))
        if isinstance(prompt, str):
            prompt = self.require_tokenizer()(prompt)["input_ids"]
        ids = torch.as_tensor(prompt, dtype=torch.long)
        ids = ids.reshape(1, -1) if ids.ndim < 2 else ids
        if ids.shape[0] != 1:
            raise ConfigError(f"prompt must be one sequence of token ids, got {ids.shape[0]} rows")
        if ids.numel() == 0:
            raise ConfigError("prompt is empty; pass at least one token")
        embedding: Any = self.model.get_input_embeddings()
        size: int = embedding.weight.shape[0]
        if int(ids.min()) < 0 or int(ids.max()) >= size:
            raise ConfigError(
                f"token ids must be 0..{size - 1}, got {int(ids.min())}..{int(ids.max())}"
            )
        return ids.to(self.runtime.device)

    def require_tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer.

        Raises:
            ConfigError: there is none; the message says why, where a file should have held one.
        """
        if self.tokenizer is None:
            why = f" ({self._no_tokenizer})" if self._no_tokenizer else ""
            raise ConfigError(
                f"text needs a tokenizer, and the model has none{why}; pass token ids or tokenizer="
            )
        return self.tokenizer

    @property
    def chat_template(self) -> ChatTemplate | None:
        """The tokenizer's chat template; None where there is none."""
        return ChatTemplate.of(self.tokenizer)

    def require_chat_template(self) -> ChatTemplate:
        """The tokenizer's chat template.

        Raises:
            ConfigError: there is none.
        """
        self.require_tokenizer()
        if (template := self.chat_template) is None:
            raise ConfigError(
                "messages need a chat template, and the model's tokenizer has none; pass the whole "
                "prompt as text"
            )
        return template

    def close(self) -> None:
        """Detaches the model; it is plain transformers again."""
        self.runtime.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class _OnlyTurn(Turn):
    """A turn after which nobody needs its cache."""

    def run(self, pieces: SimpleQueue[Any] | None = None) -> Generation:
        try:
            return super().run(pieces)
        finally:
            self.cache.close()


def load(
    model: str | Path | PreTrainedModel,
    *,
    config: HybridConfig | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    **options: Any,
) -> LLM:
    """A model ready to generate from a tiered KV cache.

    Args:
        model: a folder, a GGUF file, a hub id, 'needle', 'smollm2', 'random:SHAPE', or a loaded
            transformers model.
        config: how the cache is kept and read; the default is the `hybrid` method.
        tokenizer: in place of the one beside the weights, which is then not read; text needs one.
        options: `device`, `dtype`, `layers`, `quantization_config`, `seed`; see `load_model`.

    Raises:
        ModelNotFoundError: the model cannot be read.
        UnsupportedModelError: its attention cannot be served.
        CapacityError, DeviceMemoryError: the weights do not fit.
    """
    if isinstance(model, PreTrainedModel):
        if options:
            raise ConfigError(
                f"options {', '.join(sorted(options))} apply when a model is loaded by name, got a "
                "loaded model; prepare it before passing it in"
            )
        return LLM(model, tokenizer, config or HybridConfig())
    loaded, reason = load_model(model, **options), ""
    if tokenizer is None:
        try:
            tokenizer = load_tokenizer(model)
        except ModelNotFoundError as error:  # token ids do without; text will be refused with this
            reason = str(error)
    return LLM(loaded, tokenizer, config or HybridConfig(), no_tokenizer=reason)
