"""Exact match on real, unmodified contexts under full attention, during and after training."""

from __future__ import annotations

from transformers import LlamaForCausalLM

from benchmarks.common.dense import DenseReader
from hybrid_kv.eval.needle import TASKS, make_sample

_SEED = 1_000_003
"""Far from the seeds of any test or benchmark."""


def accuracies(
    model: LlamaForCausalLM, context_tokens: int = 2048, num_records: int = 48, samples: int = 2
) -> dict[str, float]:
    """Share of exact answers per task, rounded to three digits."""
    scores: dict[str, float] = {}
    for task in TASKS:
        # One pass code fits into a context, so that task needs more contexts.
        contexts = 4 * samples if task == "passkey" else samples
        available = {
            "key_value": min(32, num_records),
            "passkey": 1,
            "most_frequent": num_records // 8,
        }
        right = 0.0
        for index in range(contexts):
            sample = make_sample(
                task,
                context_tokens,
                num_records=num_records,
                num_questions=available.get(task, num_records // 4),
                seed=_SEED + index,
            )
            right += DenseReader(model, sample.context).accuracy(sample.questions)
        scores[task] = round(right / contexts, 3)
    return scores
