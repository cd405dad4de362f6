"""From a task's texts to tokens of a model, what counts as a right answer, and one prefill for all
methods: each is handed the keys and values that full attention computed.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any, Protocol
from zlib import crc32

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from hybrid_kv.api.tokens import ChatTemplate, common_length
from hybrid_kv.config import HybridConfig
from hybrid_kv.errors import ConfigError
from hybrid_kv.eval.needle import Question, filler
from hybrid_kv.eval.needle.facts import TOKENS
from hybrid_kv.eval.tasks import Language, Room, Task, TextQuestion
from hybrid_kv.models.attach import Attachment
from hybrid_kv.models.cache_layers import HybridLayer, copied_state
from hybrid_kv.models.cache_state import passing
from hybrid_kv.models.hf_cache import TieredCache
from hybrid_kv.models.rollback import ReturnPoint
from hybrid_kv.runtime import KVCache, LayerCache
from hybrid_kv.runtime.layer_prompt import PromptMark
from hybrid_kv.types import Evidence, LayerShape, Needs


class Scorer(Protocol):
    """Scores an answer while it grows."""

    def score(self, answer: list[int]) -> float:
        """0 to 1."""
        ...

    def is_over(self, answer: list[int]) -> bool:
        """Whether more tokens would change nothing."""
        ...


@dataclass(frozen=True, slots=True)
class Exact:
    """Right is one sequence of tokens."""

    expected: tuple[int, ...]

    def score(self, answer: list[int]) -> float:
        return float(tuple(answer[: len(self.expected)]) == self.expected)

    def is_over(self, answer: list[int]) -> bool:
        count = len(answer)
        wrong = tuple(answer) != self.expected[:count]
        return count >= len(self.expected) or (wrong and count > 1)  # one step is always timed


@dataclass(frozen=True, slots=True)
class Contains:
    """Right is a text that holds what is known; it ends with a token of `ends`."""

    question: TextQuestion
    tokenizer: PreTrainedTokenizerBase
    ends: frozenset[int]

    def score(self, answer: list[int]) -> float:
        return self.question.score(str(self.tokenizer.decode(answer, skip_special_tokens=True)))

    def is_over(self, answer: list[int]) -> bool:
        if len(answer) >= self.question.max_new_tokens or answer[-1] in self.ends:
            return True
        text = str(self.tokenizer.decode(answer, skip_special_tokens=True))
        return len(answer) > 1 and self.question.is_settled(text)


@dataclass(frozen=True, slots=True)
class AskedQuestion:
    """A question: its tokens after the context, up to where the answer begins."""

    ids: tuple[int, ...]
    judge: Scorer
    depth: float | None = None


@dataclass(frozen=True, slots=True)
class Prompt:
    """A context, with questions about it or with the text that follows it."""

    context: list[int]
    asked: tuple[AskedQuestion, ...] = ()
    text: tuple[int, ...] = ()


class PromptBuilder:
    """Writes a task's prompts for one model.

    Args:
        ends: tokens that end an answer.
        text: a file to read on in.
        raw: leaves out the chat template.

    Raises:
        ConfigError: there is no tokenizer or no chat template, or the file cannot be read.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        ends: frozenset[int] = frozenset(),
        text: str | None = None,
        raw: bool = False,
    ) -> None:
        self._tokenizer, self._text = tokenizer, text
        self.language: Language = _language(tokenizer)
        self._template = None if raw else ChatTemplate.of(tokenizer)
        self._raw = raw
        self._ends = ends | frozenset(self._template.end_ids() if self._template else ())
        self._reads: list[int] | None = None

    def prompt(
        self, spec: str, task: Task, context_tokens: int, sample: int, samples: int, seed: int
    ) -> Prompt:
        """One of a task's samples; the same arguments give the same tokens.

        Raises:
            ConfigError: the context or the text is too short for the task.
        """
        own = crc32(f"{spec} {context_tokens} {sample}".encode())
        if task.reads:
            return self._reading(task.params.then, context_tokens, sample, samples, own + seed)
        if self.language == "needle":
            return _needle_prompt(task, context_tokens, (own + seed) % 2**32)
        rng = np.random.default_rng([seed, own])
        return self._asking(task, context_tokens, rng, (sample + 0.5) / samples)

    def describe(self, ids: list[int]) -> str:
        """An answer as a text."""
        return str(self._tokenizer.decode(ids, skip_special_tokens=True))

    # Questions in English.

    def _asking(
        self, task: Task, context_tokens: int, rng: np.random.Generator, depth: float
    ) -> Prompt:
        if self._template is None and not self._raw:
            raise ConfigError(
                "questions in English need a chat template, and the model's tokenizer has none; "
                "give --raw to ask without one"
            )
        around = len(self._encode("", TextQuestion("", "", ("",))))
        sample = task.english(Room(context_tokens - around - 8, self._count), rng, depth)
        before = f"{sample.intro}\n\n{sample.context}\n\n"
        whole = [self._encode(before, question) for question in sample.questions]
        others = [self._encode(before, TextQuestion(word, "", ("",))) for word in ("a", "Z")]
        shared = min(common_length(ids, others[0]) for ids in (*whole, others[1]))
        asked = tuple(
            AskedQuestion(
                tuple(ids[shared:]), Contains(question, self._tokenizer, self._ends), question.depth
            )
            for ids, question in zip(whole, sample.questions, strict=True)
        )
        return Prompt(whole[0][:shared], asked)

    def _encode(self, before: str, question: TextQuestion) -> list[int]:
        content = f"{before}{question.text}"
        if self._template is None:
            return list(self._tokenizer(f"{content}\n{question.lead}")["input_ids"])
        messages = [{"role": "user", "content": content}]
        if question.lead:
            messages.append({"role": "assistant", "content": question.lead})
        return self._template.encode(messages)

    def _count(self, text: str) -> int:
        return len(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    # Reading.

    def _reading(
        self, then: int, context_tokens: int, sample: int, samples: int, seed: int
    ) -> Prompt:
        need = context_tokens + then + 1
        if self.language == "needle" and self._text is None:
            ids = filler(need, seed % 2**32).tolist()
            return Prompt(ids[:context_tokens], text=tuple(ids[context_tokens:]))
        ids = self._all_text()
        if len(ids) < need:
            raise ConfigError(
                f"text '{self._text or 'of Python'}' must have {need} tokens for a context of "
                f"{context_tokens} and {then} to read on, got {len(ids)}; give a longer one or "
                "shorten the context"
            )
        start = sample * (len(ids) - need) // max(1, samples - 1) if samples > 1 else 0
        return Prompt(
            ids[start : start + context_tokens],
            text=tuple(ids[start + context_tokens :][: then + 1]),
        )

    def _all_text(self) -> list[int]:
        if self._reads is None:
            text = python_prose() if self._text is None else read_text(self._text)
            self._reads = list(self._tokenizer(text)["input_ids"])
        return self._reads


def read_text(path: str) -> str:
    """A text file.

    Raises:
        ConfigError: it cannot be read.
    """
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"text '{path}' cannot be read: {reason}; check the path") from None


def text_digest(path: str | None) -> str | None:
    """Digest that tells one text from another; None for the one that is built in."""
    return None if path is None else sha256(read_text(path).encode()).hexdigest()[:16]


def _language(tokenizer: PreTrainedTokenizerBase) -> Language:
    vocabulary: dict[str, Any] = tokenizer.get_vocab()
    return "needle" if set(TOKENS) <= set(vocabulary) else "english"


def _needle_prompt(task: Task, context_tokens: int, seed: int) -> Prompt:
    sample = task.needle(context_tokens, seed)
    asked = tuple(
        _asked(question, places, context_tokens)
        for question, places in zip(sample.questions, sample.evidence, strict=True)
    )
    return Prompt(sample.context.tolist(), asked)


def _asked(question: Question, places: tuple[int, ...], context_tokens: int) -> AskedQuestion:
    depth = places[0] / context_tokens if len(places) == 1 else None
    return AskedQuestion(question.ids, Exact(question.answer), depth)


def python_prose() -> str:
    """The paragraphs of the reference's longest topics."""
    topics: dict[str, str] = importlib.import_module("pydoc_data.topics").topics
    # Grammar and tables are no prose; the longest topics are mostly text.
    longest = sorted(topics.values(), key=len, reverse=True)
    return "\n\n".join(
        re.sub(r"\s+", " ", paragraph).strip()
        for text in longest
        for paragraph in text.split("\n\n")
        if len(paragraph) > 200 and "::=" not in paragraph
    )


# One prefill for all methods, and each question behind it -----------------------------------------


@dataclass(frozen=True, slots=True)
class PrefilledPrompt:
    """A prompt with its KV and what was seen of its queries.

    layers: one (k, v) of [1, Hkv, N, D] each; evidence: of each layer. others: by number what the
    layers hold that are transformers' own, such as a sliding window; no others have a number there.
    """

    ids: Tensor
    layers: tuple[tuple[Tensor, Tensor], ...]
    evidence: tuple[tuple[Evidence, ...], ...]
    others: Mapping[int, dict[str, Any]] = field(default_factory=dict)

    def of_layer(self, layer_idx: int) -> tuple[Tensor, Tensor]:
        """The (k, v) of a layer of the model."""
        return self.layers[layer_idx - sum(other < layer_idx for other in self.others)]


def prefill(
    runtime: Attachment, context: NDArray[np.int64], needs: Needs = Needs()
) -> PrefilledPrompt:
    """Computes a prompt with full attention, layer by layer.

    Args:
        context: [tokens] ids.
        needs: evidence to keep for indexes that learn from queries.
    """
    ids = torch.from_numpy(np.asarray(context)).reshape(1, -1).to(runtime.model.device)
    cache = runtime.cache(HybridConfig(method="full"))
    cache.kv.means.reserve(ids.shape[1])
    cache.kv.means.watched = needs
    with torch.inference_mode():
        runtime.model(ids, **passing(cache), use_cache=True, logits_to_keep=1)
    views = {idx: layer.resident.view() for idx, layer in sorted(cache.kv.stores.items())}
    return PrefilledPrompt(
        ids,
        tuple((view.k, view.v) for view in views.values()),
        tuple(cache.kv.layers[idx].prompt.evidence() for idx in views),
    )


def open_cache(
    runtime: Attachment, config: HybridConfig, prompt: PrefilledPrompt, *, wait: bool = True
) -> TieredCache:
    """A cache under `config` that holds the prompt.

    Args:
        wait: for its indexes, to compare runs; else as `config` says.
    """
    cache = runtime.cache(config.replace(index_build="wait") if wait else config)
    with torch.inference_mode():
        for layer, (k, v), evidence in zip(
            cache.layers, prompt.layers, prompt.evidence, strict=True
        ):
            if not isinstance(layer, HybridLayer):
                raise TypeError("the needle tasks need a model of full-attention layers only")
            layer.fill(k, v, evidence)
    return cache


class _OpenLayer(LayerCache):
    """A layer whose prompt never ends: everything stays resident and is attended exactly."""

    def seal(self, evidence: tuple[Evidence, ...] | None = None) -> None:
        """Nothing: more of the prompt may come, however short."""

    def watched(self) -> PromptMark:
        """Evidence that has been collected so far, to go back to."""
        return self.prompt.mark()

    def unwatch(self, before: PromptMark) -> None:
        """Forgets what was collected since."""
        self.prompt.go_back(before)


class _OpenPrompt(KVCache):
    """A cache of such layers."""

    def _new_layer(self, shape: LayerShape) -> LayerCache:
        return _OpenLayer(shape, self.info.rotary_of(shape.layer_idx), self.means)

    @property
    def open_layers(self) -> list[_OpenLayer]:
        return [layer for layer in self.layers.values() if isinstance(layer, _OpenLayer)]


class SharedPrompt:
    """A context [tokens], computed once with full attention.

    Args:
        needs: evidence that the methods ask for, all of it together.

    Layers of transformers' own, such as those of a sliding window, are copied to every method.
    """

    def __init__(self, runtime: Attachment, context: Sequence[int], needs: Needs) -> None:
        self._model, self._count = runtime.model, len(context)
        self._ids: list[int] = []
        self._cache = runtime.cache(HybridConfig(method="full"))
        self._cache.kv = self._kv = _OpenPrompt(runtime.info, HybridConfig(method="full"))
        self._kv.means.watched = needs
        self._kv.means.reserve(self._count)
        self._feed(context)

    def context(self) -> PrefilledPrompt:
        """The prompt as it stands: no question yet."""
        stores, ids = self._kv.stores, torch.tensor([self._ids], device=self._model.device)
        views = {idx: store.resident.view() for idx, store in sorted(stores.items())}
        return PrefilledPrompt(
            ids,
            tuple((view.k, view.v) for view in views.values()),
            tuple(self._kv.layers[idx].prompt.evidence() for idx in views),
            {
                idx: copied_state(layer)
                for idx, layer in enumerate(self._cache.layers)
                if not isinstance(layer, HybridLayer)
            },
        )

    def with_question(self, ids: Sequence[int]) -> tuple[PrefilledPrompt, int]:
        """The prompt with a question behind the context, and the first token of the answer.

        Good until the next question.
        """
        before, place = (
            [layer.watched() for layer in self._kv.open_layers],
            ReturnPoint(self._cache),
        )
        try:
            logits = self._feed(ids)
            return self.context(), int(logits[0, -1].argmax())
        finally:
            place.go_back()
            del self._ids[self._count :]
            for layer, collected in zip(self._kv.open_layers, before, strict=True):
                layer.unwatch(collected)

    def close(self) -> None:
        """Gives the memory back."""
        self._cache.close()

    def _feed(self, ids: Sequence[int]) -> Tensor:
        self._ids += ids
        step = torch.tensor([list(ids)], device=self._model.device)
        with torch.inference_mode():
            logits: Tensor = self._model(
                step, **passing(self._cache), use_cache=True, logits_to_keep=1
            ).logits
        return logits
