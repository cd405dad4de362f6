"""Filler text: a Markov chain over English words that drifts from topic to topic.

The table of successors is drawn once from a fixed seed: it *is* the language, and the shipped
model has learned it. Texts are drawn with seeds of their own.
"""

from __future__ import annotations

from functools import cache
from typing import Final

import numpy as np
from numpy.typing import NDArray

from hybrid_kv.errors import ConfigError
from hybrid_kv.eval.needle import vocabulary as vocab

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
