"""A small language with records hidden in filler text, and the tasks of the shipped model.

`make_sample` builds a haystack of any length with questions, `is_correct` judges an answer,
`filler` gives plain text. The tokenizer lives in `scripts.needle.tokenizer`, so that
this package needs numpy only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import Final

import numpy as np
from numpy.typing import NDArray

from hybrid_kv.errors import ConfigError, unknown_name
from hybrid_kv.eval.needle import facts
from hybrid_kv.eval.needle import facts as vocab
from hybrid_kv.eval.needle.facts import Facts, Question

__all__ = ["TASKS", "NeedleTask", "Question", "Sample", "filler", "is_correct", "make_sample"]


_TABLE_SEED: Final = 20240917
_SUCCESSOR_CUMULATIVE: Final = np.array([0.5, 0.75, 0.9, 1.0])
_TOPIC_SHARE: Final = 0.30
_STOP_SHARE: Final = 0.06
_BYTE_SHARE: Final = 0.02
_PASSAGE_TOKENS: Final = (100, 200)
"""A passage keeps one topic; its length is uniform in this range (150 on average)."""


@cache
def successors() -> NDArray[np.int64]:
    """The language itself: four successors of each filler word, likeliest first, [240, 4]."""
    rng = np.random.default_rng(_TABLE_SEED)
    first_plain = vocab.NUM_WORDS - vocab.NUM_PLAIN_WORDS
    rows = np.empty((vocab.NUM_WORDS, 4), dtype=np.int64)
    for word in range(vocab.NUM_WORDS):
        topic_start = word // vocab.WORDS_PER_TOPIC * vocab.WORDS_PER_TOPIC
        plain = first_plain + rng.choice(vocab.NUM_PLAIN_WORDS, 2, replace=False)
        near = topic_start + rng.integers(vocab.WORDS_PER_TOPIC)
        content = rng.choice(first_plain, 3, replace=False)
        # A content word is followed mostly by a plain one and the other way round, which is
        # enough to make the text look like sentences.
        row = (*plain, near, content[0]) if word < first_plain else (*content, plain[0])
        rows[word] = rng.permutation(row) if word < first_plain else row
    return rows


def draw_filler(num_tokens: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """Filler text of exactly `num_tokens` token ids, [num_tokens], without a bos.

    All passages advance together, one numpy step per token of a passage, so a million tokens
    take a fraction of a second.
    """
    shortest, longest = _PASSAGE_TOKENS
    num_passages = num_tokens // shortest + 2
    words = np.empty((longest, num_passages), dtype=np.int64)
    topic_start = rng.integers(vocab.NUM_TOPICS, size=num_passages) * vocab.WORDS_PER_TOPIC
    table = successors()
    word = topic_start + rng.integers(vocab.WORDS_PER_TOPIC, size=num_passages)
    for step in range(longest):
        words[step] = word
        which = np.searchsorted(_SUCCESSOR_CUMULATIVE, rng.random(num_passages), side="right")
        jump = topic_start + rng.integers(vocab.WORDS_PER_TOPIC, size=num_passages)
        word = np.where(rng.random(num_passages) < _TOPIC_SHARE, jump, table[word, which])
    lengths = rng.integers(shortest, longest + 1, size=num_passages)
    kept = words.T[np.arange(longest) < lengths[:, None]]
    # The first passage starts somewhere in its middle, so that topic borders fall anywhere.
    start = int(rng.integers(shortest))
    text = kept[start : start + num_tokens] + vocab.FIRST_WORD
    kind = rng.random(num_tokens)
    text[kind < _STOP_SHARE] = vocab.STOP
    stray = kind > 1.0 - _BYTE_SHARE
    text[stray] = vocab.FIRST_BYTE + rng.integers(vocab.NUM_BYTES, size=int(stray.sum()))
    return text


def filler(num_tokens: int, seed: int) -> NDArray[np.int64]:
    """Plain text of exactly `num_tokens` token ids that begins with bos, [num_tokens] int64.

    It holds no record: use it where only the distribution of the next token matters, such as
    the divergence of a method from full attention.

    Raises:
        ConfigError: `num_tokens` is below 1.
    """
    if num_tokens < 1:
        raise ConfigError(
            f"num_tokens must be at least 1 (the bos token), got {num_tokens}; ask for more tokens"
        )
    text = draw_filler(num_tokens - 1, np.random.default_rng(seed))
    return np.concatenate([np.array([vocab.BOS], dtype=np.int64), text])


BuildFacts = Callable[[np.random.Generator, int, NDArray[np.int64]], Facts]


@dataclass(frozen=True, slots=True)
class NeedleTask:
    """One kind of haystack: how to draw its facts, and the fewest records that make sense."""

    name: str
    summary: str
    build: BuildFacts
    min_records: int
    max_records: int


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """One haystack, [context_tokens] int64 ids beginning with bos, and questions about it.

    Append the ids of one question to the context and let the model continue; every question
    refers to the same context, so a context is prefilled once and asked many times. `evidence[i]`
    are the places in the context, ascending, where the records that question i rests on begin.
    """

    task: str
    context: NDArray[np.int64]
    questions: tuple[Question, ...]
    evidence: tuple[tuple[int, ...], ...]


def _task(build: BuildFacts, min_records: int, max_records: int) -> NeedleTask:
    summary = (build.__doc__ or "").split("\n")[0].rstrip(".")
    return NeedleTask(build.__name__, summary, build, min_records, max_records)


MAX_KEYS: Final = 1 << 15
"""Half of all two-byte keys; beyond it, hard negatives are everywhere and drawing is slow."""

TASKS: Final[Mapping[str, NeedleTask]] = MappingProxyType(
    {
        task.name: task
        for task in (
            _task(facts.key_value, 1, MAX_KEYS),
            _task(facts.passkey, 1, MAX_KEYS),
            _task(facts.multi_value, 2, 2 * MAX_KEYS),
            _task(facts.multi_query, 2, MAX_KEYS),
            _task(facts.variable_tracking, 2, MAX_KEYS // 4),
            _task(facts.most_frequent, 2, facts.LIST_VOTES * MAX_KEYS),
        )
    }
)


def make_sample(
    task: str,
    context_tokens: int,
    *,
    num_records: int = 64,
    num_questions: int = 1,
    seed: int,
) -> Sample:
    """A haystack of exactly `context_tokens` tokens with `num_records` records in it.

    The same arguments give the same sample on every machine. Records stand after full stops
    where the text has enough of them, in random order. No question is asked twice.

    Args:
        task: a name of `TASKS`.
        context_tokens: length of the context, bos included, questions not included.
        num_records: records hidden in the text; a record takes 5 to 8 tokens.
        num_questions: questions drawn from the possible ones, without repetition.
        seed: of the records, the filler and the choice of questions.

    Raises:
        ConfigError: the task is unknown, the records do not fit, or there are too few facts
            for the questions.
    """
    known = TASKS.get(task)
    if known is None:
        raise unknown_name("needle task", task, TASKS)
    if not known.min_records <= num_records <= known.max_records:
        raise ConfigError(
            f"num_records must be {known.min_records}..{known.max_records} for task '{task}', "
            f"got {num_records}; choose a number in that range"
        )
    rng = np.random.default_rng([seed, context_tokens, num_records])
    drawn = known.build(rng, num_records, facts.FULL_ALPHABET)
    needed = 1 + sum(map(len, drawn.records))
    if context_tokens < needed:
        raise ConfigError(
            f"context_tokens must be at least {needed} for {num_records} records of task "
            f"'{task}', got {context_tokens}; lengthen the context or lower num_records"
        )
    if not 1 <= num_questions <= len(drawn.questions):
        raise ConfigError(
            f"num_questions must be 1..{len(drawn.questions)} for {num_records} records of task "
            f"'{task}', got {num_questions}; ask fewer questions or raise num_records"
        )
    context, starts = scatter(rng, drawn.records, draw_filler(context_tokens - needed, rng))
    chosen = rng.choice(len(drawn.questions), num_questions, replace=False).tolist()
    return Sample(
        task,
        context,
        tuple(drawn.questions[index] for index in chosen),
        tuple(tuple(sorted(starts[i] for i in drawn.sources[index])) for index in chosen),
    )


def scatter(
    rng: np.random.Generator, records: Sequence[tuple[int, ...]], text: NDArray[np.int64]
) -> tuple[NDArray[np.int64], list[int]]:
    """bos, then `text` with the records inserted in their order at random places; their places."""
    sentence_ends = np.flatnonzero(text == vocab.STOP) + 1
    if len(sentence_ends) >= 2 * len(records):
        gaps = np.sort(rng.choice(sentence_ends, len(records), replace=False))
    else:
        gaps = np.sort(rng.integers(len(text) + 1, size=len(records)))
    flat = np.array([token for record in records for token in record], dtype=np.int64)
    sizes = np.array([len(record) for record in records])
    starts = gaps + 1 + np.cumsum(sizes) - sizes
    context = np.insert(np.concatenate([[vocab.BOS], text]), np.repeat(gaps + 1, sizes), flat)
    return context, starts.tolist()


def is_correct(question: Question, generated_ids: Sequence[int]) -> bool:
    """Whether the first generated ids are the answer, up to and with its closing ``.``.

    Ids after the closing ``.`` are ignored.
    """
    got = tuple(int(token) for token in generated_ids[: len(question.answer)])
    return got == question.answer
