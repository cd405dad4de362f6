"""`hybrid_kv.load(...).generate(...)`: a model with a tiered KV cache in three lines.

A `Conversation` is a chat whose turns share one cache.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Literal, TypeAlias, Unpack, overload

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hybrid_kv.api.arguments import GenerateOptions, LoadOptions, check_load_options, check_source
from hybrid_kv.api.context import Context
from hybrid_kv.api.generation import Generation, TextStream
from hybrid_kv.api.tokens import (
    AskedMessages,
    ChatTemplate,
    Message,
    checked,
    common_length,
    is_chat,
    token_ids,
)
from hybrid_kv.api.turn import Model, Prefixes, Turn
from hybrid_kv.config import ConfigLike, HybridConfig
from hybrid_kv.errors import ConfigError, ModelNotFoundError, said
from hybrid_kv.keywords import known_keywords_only
from hybrid_kv.models.attach import Attachment, attach
from hybrid_kv.models.load import load_model, load_tokenizer
from hybrid_kv.models.rollback import ReturnPoint
from hybrid_kv.models.support import check_model
from hybrid_kv.runtime import memory_errors
from hybrid_kv.saved import ContextRegistry
from hybrid_kv.saved.registry import DEFAULT_LIMIT

Prompt: TypeAlias = str | Sequence[int] | Tensor | Sequence[Message]


class LLM:
    """A model, its tokenizer and a configuration; made by `load`. A context manager.

    Calls are independent of each other; `conversation` keeps its cache between turns. One call is
    served at a time: a second one, from another thread, raises BusyError.

    source: where the model was loaded from, a folder or file by its whole path; None where it came
    loaded. prefixes: what is known on disk of prompts (`cache_dir` of `load`); None for nothing.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None,
        config: HybridConfig,
        *,
        no_tokenizer: str = "",
        contexts: ContextRegistry | None = None,
        source: str | None = None,
    ) -> None:
        self.model, self.tokenizer, self.config = model, tokenizer, config
        self.source = source
        self._no_tokenizer = no_tokenizer  # why there is none
        self.runtime: Attachment = attach(model, config)
        self.prefixes = None
        if contexts is not None:
            self.prefixes = Prefixes(self, self.runtime.device, contexts)

    @overload
    def generate(
        self, prompt: Prompt, *, stream: Literal[False] = False, **options: Unpack[GenerateOptions]
    ) -> Generation: ...

    @overload
    def generate(
        self, prompt: Prompt, *, stream: Literal[True], **options: Unpack[GenerateOptions]
    ) -> TextStream: ...

    def generate(
        self, prompt: Prompt, *, stream: bool = False, **options: Unpack[GenerateOptions]
    ) -> Generation | TextStream:
        """Continues a prompt.

        Args:
            prompt: raw text, token ids, a tensor [tokens] or [1, tokens], or messages like
                [{"role": "user", "content": "..."}], which the model's chat template renders.
                Special tokens in a message are text; in raw text they are tokens.
            stream: yield pieces of text as they come; the Generation is the stream's `result`.
            options: `max_new_tokens` (default 128), `stop` (strings that end the text and are cut
                off), `seed`, `on_prefill` (called with (done, total) while the prompt is computed),
                `cancel` (a threading.Event that ends the call early), `exact` (True: the tokens of
                full attention, which the method drafts; a number: at most so many at once; refused
                for methods that lose entries), `max_error` (the largest expected KL, in nats, of
                a token that the method may choose alone: others are verified as with `exact`),
                `token_errors` (True: the Generation says of each
                token how far it may be from full attention's; refused for methods whose steps
                cannot tell), and everything transformers' GenerationConfig knows (`do_sample`,
                `temperature`, `top_p`, `num_beams`, ...), by keyword or as `generation_config`. One
                answer comes back, as a Generation, from a cache made here: `num_return_sequences`
                above 1, `return_dict_in_generate`, `cache`, `streamer`, `attention_mask` and
                `output_...` are refused;
                `model.generate` inside `attach` has them all.

        Raises:
            ConfigError: an option is unknown, refused or of a wrong type, the prompt is not of the
                types above, empty, or longer than the model's context, or its messages are refused
                by the chat template, or there is none.
            CapacityError: the context does not fit into host memory; said before prefill starts
                where it can be known then.
            DeviceMemoryError: the GPU's memory ran out; the message says where and what to lower.
            BusyError: the model generates in another thread.
        """
        template = self.require_chat_template() if is_chat(prompt) else None
        turn = _OnlyTurn(self, self.runtime.cache(), self.encode(prompt), options, template)
        return turn.stream() if stream else turn.run()

    @known_keywords_only
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

    @known_keywords_only
    def context(self, prompt: Prompt) -> Context:
        """A long text that is prefilled once, now, and then asked many times.

        Args:
            prompt: as in `generate`; of messages the last is the user's, and questions follow the
                text in it.

        Raises:
            ConfigError, CapacityError: as `generate`.
        """
        if not is_chat(prompt):
            return Context.prefilled(self, self.encode(prompt))
        asked = AskedMessages(self.require_chat_template(), checked(prompt))
        return Context.prefilled(self, self.encode(asked.before_question()), asked)

    def open(self, path: str | Path, *, verify: bool | None = None) -> Context:
        """A context that `Context.save` wrote, without prefill; asks give what they gave there.

        Its index is read, not built; keys and values are read from the file as they are needed, so
        do not change the folder meanwhile (saving to it again is no change). A file that was cut is
        an error of the next call.

        Args:
            verify: compare every byte with its checksum; None does so up to 256 MiB. Otherwise keys
                and values are checked by their sizes, all else by checksums.

        Raises:
            OtherContextError: it was made with another model, tokenizer, dtype or page size, or
                with settings of the method under which other entries are stored.
            FileFormatError: it is damaged, no saved context, of another version, or leads out of
                its folder.
            ReadError: it is not there or cannot be read.
            CapacityError, DeviceMemoryError: what stays resident does not fit.
        """
        return Context.opened(self, path, verify=verify)

    def encode(self, prompt: Prompt) -> Tensor:
        """Token ids [1, tokens] on the model's device; of messages with what begins the answer."""
        if is_chat(prompt):
            prompt = self.require_chat_template().encode(checked(prompt))
        if isinstance(prompt, str):
            prompt = self.require_tokenizer()(prompt)["input_ids"]
        return token_ids(prompt, self.model).to(self.runtime.device)

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

    def __exit__(self, *error: object) -> None:
        self.close()


class _OnlyTurn(Turn):
    """A turn after which nobody needs its cache."""

    shares_prompt = True

    def run(self, pieces: SimpleQueue[Any] | None = None) -> Generation:
        try:
            return super().run(pieces)
        finally:
            self.cache.close()


def load(
    model: str | Path | PreTrainedModel,
    *,
    config: ConfigLike = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    cache_dir: str | Path | None = None,
    cache_limit: int | str = DEFAULT_LIMIT,
    **options: Unpack[LoadOptions],
) -> LLM:
    """A model ready to generate from a tiered KV cache.

    Args:
        model: a folder, a GGUF file, a hub id, 'needle', 'smollm2', 'random:SHAPE', or a loaded
            transformers model.
        config: how the cache is kept and read: a HybridConfig, a dict of its settings, or the name
            of a method; the default is the `hybrid` method.
        tokenizer: in place of the one beside the weights, which is then not read; text needs one.
        cache_dir: a folder of contexts on disk, made where there is none. `generate`, `context` and
            the first turn of a `conversation` take from it what their prompt begins with, to the
            token, and leave their prompts there. Several processes may use one folder. See
            docs/context-file.md for what each method can take.
        cache_limit: bytes of all contexts in it ('20GiB'); those used least recently go.
        options: `device`, `dtype`, `layers`, `weights`, `quantization_config`, `seed`, and of
            weights stored packed `dequantize` and `exact_products`; see `load_model`.

    Raises:
        ConfigError: an argument is unknown or of a wrong type, or a setting is.
        ModelNotFoundError: the model cannot be read.
        UnsupportedModelError: its attention cannot be served.
        CapacityError, DeviceMemoryError: the weights do not fit.
    """
    check_load_options(options)
    wanted = HybridConfig.of(config)
    wanted.check_complete()
    contexts = None if cache_dir is None else ContextRegistry(cache_dir, cache_limit)
    if not (tokenizer is None or callable(tokenizer)):
        raise ConfigError(
            f"tokenizer must be a loaded one, got {said(tokenizer)}; load it with "
            "AutoTokenizer.from_pretrained"
        )
    if isinstance(model, (str, Path)):
        check_source(model)
    else:
        check_model(model)
    if isinstance(model, PreTrainedModel):
        if options:
            raise ConfigError(
                f"options {', '.join(sorted(options))} apply when a model is loaded by name, got a "
                "loaded model; prepare it before passing it in"
            )
        return LLM(model, tokenizer, wanted, contexts=contexts)
    loaded, reason = load_model(model, **options), ""
    if tokenizer is None:
        try:
            tokenizer = load_tokenizer(model)
        except ModelNotFoundError as error:  # token ids do without; text will be refused with this
            reason = str(error)
    source = str(Path(model).resolve()) if Path(model).exists() else str(model)
    return LLM(*(loaded, tokenizer, wanted), no_tokenizer=reason, contexts=contexts, source=source)


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
