"""What a method loses: exact answers and distance from full attention, on one shared prefill.

Questions and answers run through the method over the KV that `hybrid_kv.contest.prompts` computed
once, and each leaves no trace behind.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from hybrid_kv.config import HybridConfig
from hybrid_kv.contest.prompts import PrefilledPrompt, open_cache
from hybrid_kv.eval.needle import Question, is_correct
from hybrid_kv.models.attach import Attachment
from hybrid_kv.models.cache_state import passing
from hybrid_kv.models.hf_cache import TieredCache

_TEXT_STEP = 16
"""Tokens of plain text read at once; each still selects its own entries."""


@dataclass(frozen=True, slots=True)
class Accuracy:
    """How a method answered.

    correct of asked: exact matches. attended_tokens: entries attended per query token, averaged
    over layers and query heads. attended_ratio: their share of what full attention attends.
    """

    correct: int
    asked: int
    attended_tokens: float
    attended_ratio: float


def answer(runtime: Attachment, cache: TieredCache, question: Question) -> list[int]:
    """The model's greedy answer, as long as the right one; the cache is left as it was."""
    held = cache.get_seq_length()
    step = torch.tensor([question.ids], device=runtime.model.device)
    found: list[int] = []
    with torch.inference_mode():
        while len(found) < len(question.answer):
            output = runtime.model(step, **passing(cache), logits_to_keep=1)
            step = output.logits[:, -1:].argmax(-1)
            found.append(int(step))
    cache.crop(held - cache.get_seq_length())
    return found


def ask_all(
    runtime: Attachment,
    config: HybridConfig,
    prompt: PrefilledPrompt,
    questions: Sequence[Question],
) -> Accuracy:
    """Exact match of a method over questions to one prompt."""
    cache = open_cache(runtime, config, prompt)
    correct = sum(is_correct(q, answer(runtime, cache, q)) for q in questions)
    work = cache.work
    return Accuracy(
        correct=correct,
        asked=len(questions),
        attended_tokens=work.attended / max(1, work.steps),
        attended_ratio=work.attended / max(1, work.visible),
    )


def text_log_probs(
    runtime: Attachment, config: HybridConfig, prompt: PrefilledPrompt, text: NDArray[np.int64]
) -> Tensor:
    """Log-probabilities [tokens, vocabulary] while reading `text` after the prompt."""
    return read_text(runtime, open_cache(runtime, config, prompt), text)


def read_text(runtime: Attachment, cache: TieredCache, text: NDArray[np.int64]) -> Tensor:
    """Log-probabilities [tokens, vocabulary] while reading on from what a cache holds."""
    ids = torch.from_numpy(np.asarray(text)).reshape(1, -1).to(runtime.model.device)
    parts = []
    with torch.inference_mode():
        for chunk in ids.split(_TEXT_STEP, 1):
            logits = runtime.model(chunk, **passing(cache)).logits[0]
            parts.append(F.log_softmax(logits.float(), -1))
    return torch.cat(parts)


def mean_kl(full: Tensor, method: Tensor) -> float:
    """KL(full || method) in nats per token, from log-probabilities [tokens, vocabulary]."""
    return float((full.exp() * (full - method)).sum(-1).mean())
