"""Keys and queries of one made-up attention head, shaped like those of long contexts.

Random Gaussian keys say nothing about retrieval: what makes attention hard to search is that
queries fall where no keys lie, that keys lean on a common offset with a few outlier channels, that
most meaning sits in the slow RoPE channels, and that a few keys serve many queries. This generator
has all of these: a text of topics and word types, a hidden meaning per token, keys that carry it,
and queries that look for what an earlier token meant. Its parameters are set so that the shares
that indexes scan and the attention mass of the best keys are those reported for trained models
(RetrievalAttention, Liu et al. 2024).

It is not a model: nothing was trained, no token follows from another, the targets of successive
queries are drawn independently, all query heads of the group look at one hub, and there are no
values. What is tuned on it must hold on other data.

Shapes: T positions of the text, N keys handed out, D head_dim, m latent_dim, M queries of one head.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import IntEnum
from types import MappingProxyType
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hybrid_kv.errors import ConfigError, ShapeError
from hybrid_kv.rotary import Rotary, Samples

Array: TypeAlias = NDArray[np.float32]
Ids: TypeAlias = NDArray[np.int64]

_TOPICS, _TYPES, _SUPER_TYPES = 512, 16384, 256
_TOPIC_POWER, _TYPE_POWER = 0.8, 1.1
_SEGMENT_TOKENS = 256
_TOPIC_MEMORY = 8
"""Segments whose topics may come again."""
_TOPIC_TYPE_STEP, _TOPIC_TYPE_SHIFT = 7919, 104729
_CONTEXT_LAGS = (1, 2, 4)
_ROPE_BASE = 5e5
_FAST_CHANNEL_WEIGHT = 0.15
"""Weight of the fastest RoPE channel; the slowest has 1."""
_OUTLIERS, _OUTLIER_SIZE, _OFFSET_SPREAD = 4, 10.0, 0.5
_RECENT_TOKENS = 2000.0
_RECENT_SHARE, _INDUCTION_SHARE = 0.5, 0.4
_MIX = 1.2
"""Dirichlet concentration of target, topic and own token in a query."""
_LOW_RANK_WEIGHT = 0.15
_QUERY_AGAINST_MEAN, _QUERY_ASIDE = 1.5, 6.0
_BLOCK = 4096
"""Positions per random block and per step of the arithmetic."""
_CALIBRATED_DIM = 128


@dataclass(frozen=True, slots=True)
class HeadParams:
    """Statistics of a synthetic head.

    latent_dim: dimension m of meaning, at head_dim 128; other head dimensions keep the ratio.
    topic, word, context: weights of a token's topic, its word type, and its neighbourhood.
    drift: share of a query that a random rotation of the latent space replaces.
    decay: the r-th direction of meaning has the scale r ** -decay.
    key_noise, query_noise: norm of isotropic noise over the norm of meaning.
    sharpness, sharpness_sd: scale of the queries' meaning, and its log-normal spread.
    gain_sd: log-normal spread of the keys' norms, once per token and once per word type.
    hub, query_hub: strength of the direction in which some keys please every query; 0 for none.
    query_rank: directions of meaning that queries mostly live in; 0 for all.
    """

    latent_dim: int
    topic: float
    word: float
    context: float
    drift: float
    key_noise: float
    query_noise: float
    sharpness: float
    gain_sd: float
    sharpness_sd: float = 0.5
    decay: float = 0.35
    hub: float = 0.0
    query_hub: float = 0.0
    query_rank: int = 0


PAPER = HeadParams(
    latent_dim=64,
    topic=0.5,
    word=1.0,
    context=1.5,
    drift=0.9,
    key_noise=0.15,
    query_noise=0.1,
    sharpness=1.5,
    gain_sd=0.25,
    hub=2.0,
    query_hub=1.0,
    query_rank=6,
)
"""A typical head: concentrated attention, a hub, queries of low rank."""

STRESS = HeadParams(
    latent_dim=96,
    topic=1.0,
    word=1.0,
    context=1.0,
    drift=0.6,
    key_noise=0.35,
    query_noise=0.35,
    sharpness=2.0,
    gain_sd=0.12,
)
"""Harder than most trained heads: isotropic noise, queries of full rank, no hub."""

PROFILES = MappingProxyType({"paper": PAPER, "stress": STRESS})


class _Stream(IntEnum):
    """Independent random streams; numbers are part of what a seed means."""

    EMBEDDING = 1
    PROJECTION = 2
    OFFSET = 3
    TYPE_TRAITS = 4
    HEAD_WEIGHTS = 5
    SEGMENTS = 6
    TOKENS = 7
    CONTEXT = 8
    KEY_NOISE = 9
    TARGETS = 10
    QUERY_NOISE = 11


class SyntheticHead:
    """One KV head of a text with the query heads that share it.

    The text has `sink_tokens + N + window_tokens + test_tokens` positions, and RoPE is applied at
    them. Sinks and window stay on the device in the runtime and are not handed out. Everything
    random belongs to a place (a weight, a position): equal seeds give equal numbers, the first
    query heads do not depend on how many there are, and a longer text begins with the shorter one.

    Keys are made at once; queries are made when asked for, so that a million keys fit: the object
    holds N x (D + m) floats.

    Args:
        num_keys: N.
        head_dim: D, even. Twice as many channels carry twice as many latent dimensions.
        num_q_heads: query heads of the group.
        weight_seed: the model: embeddings, projections, offsets.
        text_seed: the text: tokens, noise, what queries look for.

    targets: by query head the positions [T] that its queries look for.

    Raises:
        ConfigError: a size is out of range.

    Source: "attention-like" statistics as in RetrievalAttention (Liu et al. 2024), sections 2-3.
    """

    def __init__(
        self,
        params: HeadParams,
        num_keys: int,
        *,
        head_dim: int = 128,
        num_q_heads: int = 4,
        weight_seed: int = 0,
        text_seed: int = 0,
        sink_tokens: int = 4,
        window_tokens: int = 512,
        test_tokens: int = 2048,
    ) -> None:
        _check_sizes(num_keys, head_dim, num_q_heads)
        _check_counts(sink_tokens, window_tokens, test_tokens)
        scaled = max(2, round(params.latent_dim * head_dim / _CALIBRATED_DIM))
        self.params = replace(params, latent_dim=scaled)
        self.num_keys, self.head_dim, self.num_q_heads = num_keys, head_dim, num_q_heads
        self.num_test = test_tokens
        self._seeds = (weight_seed, text_seed)
        self._first_key = sink_tokens
        self._first_test = sink_tokens + num_keys + window_tokens
        self._num_positions = self._first_test + test_tokens
        self._make_weights()
        self._make_text()
        self._latent = self._make_latent()
        self.targets = [self._draw_targets(head) for head in range(num_q_heads)]
        self._head_weights = [self._make_head_weights(head) for head in range(num_q_heads)]
        self._keys = self._make_keys()

    @property
    def keys(self) -> Tensor:
        """[N, D] float32, after RoPE."""
        return torch.from_numpy(self._keys)

    @property
    def rotary(self) -> Rotary:
        """Rotation of queries and keys by their positions."""
        pairs = self.head_dim // 2
        return Rotary(tuple(_ROPE_BASE ** (-place / pairs) for place in range(pairs)))

    def build_samples(self, rows: Tensor, horizon_tokens: int = 0) -> Samples:
        """Queries of all heads at the positions of some keys, as an index learns from them.

        Args:
            rows: [M] rows of `keys`, in any order.
            horizon_tokens: they are turned to so many positions behind the prompt; 0 for none.
        """
        queries = torch.stack([self.build_queries(head, rows) for head in range(self.num_q_heads)])
        samples = Samples(queries[None], rows + self._first_key, self.rotary)
        return samples.ahead(self._first_test, horizon_tokens)

    def build_queries(self, head: int, rows: Tensor | None = None) -> Tensor:
        """Queries of a head at the keys' own positions.

        Args:
            rows: [M] rows of `keys`, in any order; None for all.

        Returns:
            [M, D] float32, after RoPE.
        """
        return self._queries(head, rows, self._first_key, self.num_keys)

    def test_queries(self, head: int, rows: Tensor | None = None) -> Tensor:
        """Queries of a head while decoding: at the positions that follow the whole prompt.

        Args:
            rows: [M] steps after the prompt, in any order; None for all `test_tokens`.

        Returns:
            [M, D] float32, after RoPE.
        """
        return self._queries(head, rows, self._first_test, self.num_test)

    # The model.

    def _make_weights(self) -> None:
        dim, latent, pairs = self.head_dim, self.params.latent_dim, self.head_dim // 2
        rng = self._weights(_Stream.EMBEDDING)
        self._topic_vectors = _normal(rng, _TOPICS, latent)
        super_types = _normal(rng, _SUPER_TYPES, latent)
        member_of = rng.integers(_SUPER_TYPES, size=_TYPES)
        self._type_vectors = 0.7 * super_types[member_of] + 0.7 * _normal(rng, _TYPES, latent)

        weight = np.linspace(_FAST_CHANNEL_WEIGHT, 1.0, pairs, dtype=np.float32)
        weight = np.tile(weight, 2)
        rng = self._weights(_Stream.PROJECTION)
        basis = _orthonormal(_normal(rng, dim, latent) * weight[:, None])
        spectrum = np.arange(1, latent + 1, dtype=np.float32) ** -self.params.decay
        spectrum /= np.sqrt(np.mean(spectrum**2))
        self._project = np.ascontiguousarray((basis * spectrum).T)  # [m, D]

        rng = self._weights(_Stream.OFFSET)
        offset = _OFFSET_SPREAD * weight * _normal(rng, dim)
        slow = pairs // 2 + rng.permutation(pairs - pairs // 2)[:_OUTLIERS]
        signs = rng.choice(np.array([-1, 1], np.float32), size=len(slow))
        offset[slow + pairs * rng.integers(2, size=len(slow))] += _OUTLIER_SIZE * signs
        self._key_offset = offset
        self._fixed = _orthonormal(np.column_stack([basis, offset]))  # [D, m + 1]
        hub = _normal(rng, dim)
        hub[np.arange(dim) % pairs < 5 * pairs // 8] = 0
        self._hub = self._aside(hub)

        rng = self._weights(_Stream.TYPE_TRAITS)
        self._type_gain = np.exp(self.params.gain_sd * _normal(rng, _TYPES))
        self._type_salience = rng.gamma(0.5, 1.0, size=_TYPES).astype(np.float32)

    def _make_head_weights(self, head: int) -> tuple[Array, Array]:
        """The rotation [m, m] of a query head's latent space, and its offset [D]."""
        rng = self._weights(_Stream.HEAD_WEIGHTS, head)
        rotation = _orthonormal(_normal(rng, self.params.latent_dim, self.params.latent_dim))
        root = np.sqrt(np.float32(self.head_dim))
        against = self._key_offset / np.linalg.norm(self._key_offset)
        aside = self._aside(_normal(rng, self.head_dim))
        offset = -_QUERY_AGAINST_MEAN * 0.5 * root * against + _QUERY_ASIDE * 0.25 * root * aside
        return rotation, offset

    def _aside(self, vector: Array) -> Array:
        """The unit vector along `vector` that is orthogonal to meaning and to the keys' offset."""
        vector = vector - self._fixed @ (self._fixed.T @ vector)
        return np.asarray(vector / np.linalg.norm(vector), np.float32)

    # The text.

    def _make_text(self) -> None:
        self._topics = self._draw_topics()
        self._types = np.empty(self._num_positions, np.int64)
        cumulated = _power_law(_TYPES, _TYPE_POWER)
        for span, rng in self._blocks(_Stream.TOKENS):
            own = np.searchsorted(cumulated, rng.random(_BLOCK))
            moved = rng.random(_BLOCK) < 0.5
            count = span.stop - span.start
            by_topic = _TOPIC_TYPE_STEP * own[:count] + _TOPIC_TYPE_SHIFT * self._topics[span]
            self._types[span] = np.where(moved[:count], by_topic % _TYPES, own[:count])

    def _draw_topics(self) -> Ids:
        """The topic of every position."""
        rng = self._text(_Stream.SEGMENTS)
        cumulated = _power_law(_TOPICS, _TOPIC_POWER)
        topics: list[int] = []
        lengths: list[int] = []
        covered = 0
        while covered < self._num_positions:
            length = 1 + int(rng.geometric(1 / _SEGMENT_TOKENS))
            topic = int(np.searchsorted(cumulated, rng.random()))
            again, lag = rng.random() < 0.5, int(rng.integers(1, _TOPIC_MEMORY + 1))
            if again and topics:
                topic = topics[-min(lag, len(topics))]
            topics.append(topic)
            lengths.append(length)
            covered += length
        return np.repeat(topics, lengths)[: self._num_positions].astype(np.int64)

    def _make_latent(self) -> Array:
        """[T, m], the meaning of every token, of norm sqrt(m)."""
        latent = np.empty((self._num_positions, self.params.latent_dim), np.float32)
        for span, rng in self._blocks(_Stream.CONTEXT):
            latent[span] = _normal(rng, _BLOCK, self.params.latent_dim)[: span.stop - span.start]
        _smooth(latent)
        for start in range(0, self._num_positions, _BLOCK):
            span = slice(start, start + _BLOCK)
            block = self.params.context * latent[span]
            block += self.params.topic * self._topic_vectors[self._topics[span]]
            block += self.params.word * self._type_vectors[self._types[span]]
            latent[span] = _to_norm(block)
        return latent

    def _draw_targets(self, head: int) -> Ids:
        """[T] positions that a head's queries look for, each before the query's own (0 has 0)."""
        targets = np.empty(self._num_positions, np.int64)
        before = _previous_same(self._types)
        for span, rng in self._blocks(_Stream.TARGETS, head):
            here = np.arange(span.start, span.start + _BLOCK)
            anywhere = (rng.random(_BLOCK) * here).astype(np.int64)
            recent = here - 1 - rng.exponential(_RECENT_TOKENS, _BLOCK).astype(np.int64)
            target = np.where(rng.random(_BLOCK) < _RECENT_SHARE, recent, anywhere).clip(0)
            induced = rng.random(_BLOCK) < _INDUCTION_SHARE
            count = span.stop - span.start
            target, earlier = target[:count], before[target[:count]]
            targets[span] = np.where(induced[:count] & (earlier >= 0), earlier, target)
        return targets

    # Keys and queries.

    def _make_keys(self) -> Array:
        params = self.params
        keys = np.empty((self.num_keys, self.head_dim), np.float32)
        noise_scale = np.float32(params.key_noise * np.sqrt(params.latent_dim / self.head_dim))
        last = self._first_key + self.num_keys
        for span, rng in self._blocks(_Stream.KEY_NOISE):
            noise = _normal(rng, _BLOCK, self.head_dim)
            gain, salience = _normal(rng, 2, _BLOCK)
            start, stop = max(span.start, self._first_key), min(span.stop, last)
            if start >= stop:
                continue
            inside = slice(start - span.start, stop - span.start)
            types = self._types[start:stop]
            block = self._latent[start:stop] @ self._project + noise_scale * noise[inside]
            block *= (np.exp(params.gain_sd * gain[inside]) * self._type_gain[types])[:, None]
            block += self._key_offset
            if params.hub:
                pull = params.hub * self._type_salience[types] * np.exp(0.5 * salience[inside])
                block += pull[:, None] * self._hub
            keys[start - self._first_key : stop - self._first_key] = block
        _rotate(keys, np.arange(self._first_key, last))
        return keys

    def _queries(self, head: int, rows: Tensor | None, first: int, count: int) -> Tensor:
        if not 0 <= head < self.num_q_heads:
            raise ShapeError(f"head must be below {self.num_q_heads}, got {head}")
        wanted = np.arange(count) if rows is None else rows.numpy().astype(np.int64)
        if wanted.size and not 0 <= wanted.min() <= wanted.max() < count:
            raise ShapeError(f"rows must lie in 0..{count - 1}, got {wanted.min()}..{wanted.max()}")
        positions = wanted + first
        queries = np.empty((len(positions), self.head_dim), np.float32)
        order = np.argsort(positions, kind="stable")
        blocks = positions[order] // _BLOCK
        edges = np.flatnonzero(np.diff(blocks)) + 1
        for places in np.split(order, edges) if len(order) else []:
            queries[places] = self._queries_of_block(head, positions[places])
        return torch.from_numpy(queries)

    def _queries_of_block(self, head: int, positions: Ids) -> Array:
        """[M, D] for positions of one random block."""
        params = self.params
        start = int(positions[0]) // _BLOCK * _BLOCK
        place = positions - start
        rng = self._text(_Stream.QUERY_NOISE, head, start // _BLOCK)
        noise = _normal(rng, _BLOCK, self.head_dim)[place]
        sharpness, hub_pull = _normal(rng, 2, _BLOCK)[:, place]
        mix = rng.dirichlet([_MIX] * 3, _BLOCK)[place].astype(np.float32)
        rotation, offset = self._head_weights[head]

        wanted = mix[:, :1] * self._latent[self.targets[head][positions]]
        wanted += mix[:, 1:2] * self._topic_vectors[self._topics[positions]]
        wanted += mix[:, 2:] * self._latent[positions]
        wanted = _to_norm(wanted)
        wanted = _to_norm((1 - params.drift) * wanted + params.drift * (wanted @ rotation.T))
        if params.query_rank:
            wanted[:, params.query_rank :] *= np.float32(_LOW_RANK_WEIGHT)
            wanted = _to_norm(wanted)

        noise *= np.float32(params.query_noise * np.sqrt(params.latent_dim / self.head_dim))
        queries: Array = wanted @ self._project + noise
        queries *= (params.sharpness * np.exp(params.sharpness_sd * sharpness))[:, None]
        queries += offset
        if params.hub:
            pull = params.query_hub * 0.25 * np.sqrt(self.head_dim) * np.exp(0.3 * hub_pull)
            queries += pull[:, None] * self._hub
        queries = queries.astype(np.float32, copy=False)  # scales above may be float64
        _rotate(queries, positions)
        return queries

    # Random streams: (model or text, its seed, stream, head, block of positions).

    def _weights(self, stream: _Stream, head: int = 0) -> np.random.Generator:
        return np.random.default_rng((0, self._seeds[0], stream, head, 0))

    def _text(self, stream: _Stream, head: int = 0, block: int = 0) -> np.random.Generator:
        return np.random.default_rng((1, self._seeds[1], stream, head, block))

    def _blocks(
        self, stream: _Stream, head: int = 0
    ) -> Iterator[tuple[slice, np.random.Generator]]:
        """Spans of positions, each with a generator that belongs to the place.

        Draw `_BLOCK` numbers at a time also in the last span, which may be shorter.
        """
        for start in range(0, self._num_positions, _BLOCK):
            span = slice(start, min(start + _BLOCK, self._num_positions))
            yield span, self._text(stream, head, start // _BLOCK)


def _check_sizes(num_keys: int, head_dim: int, num_q_heads: int) -> None:
    if num_keys < 1:
        raise ConfigError(f"num_keys must be at least 1, got {num_keys}")
    if head_dim < 16 or head_dim % 2:
        raise ConfigError(f"head_dim must be even and at least 16, got {head_dim}")
    if num_q_heads < 1:
        raise ConfigError(f"num_q_heads must be at least 1, got {num_q_heads}")


def _check_counts(*counts: int) -> None:
    if min(counts) < 0:
        raise ConfigError(f"sinks, window and test tokens cannot be negative, got {counts}")


def _normal(rng: np.random.Generator, *size: int) -> Array:
    return rng.standard_normal(size, dtype=np.float32)


def _orthonormal(matrix: Array) -> Array:
    """The Q factor, with the signs that make it unique (and a Gaussian's uniform)."""
    q, r = np.linalg.qr(matrix)
    return np.asarray(q * np.where(np.diag(r) < 0, -1, 1), np.float32)


def _to_norm(vectors: Array) -> Array:
    """[M, m] scaled to norm sqrt(m)."""
    norms = np.linalg.norm(vectors, axis=1, keepdims=True)
    return np.asarray(vectors * (np.sqrt(np.float32(vectors.shape[1])) / norms), np.float32)


def _power_law(count: int, power: float) -> NDArray[np.float64]:
    """Cumulated probabilities of 0..count-1, p(r) ~ (r + 1) ** -power."""
    weights = np.arange(1, count + 1, dtype=np.float64) ** -power
    cumulated: NDArray[np.float64] = np.cumsum(weights) / weights.sum()
    cumulated[-1] = 1.0
    return cumulated


def _previous_same(values: Ids) -> Ids:
    """For every place the last earlier place of the same value, or -1."""
    order = np.argsort(values, kind="stable")
    before = np.full(len(values), -1, np.int64)
    same = values[order[1:]] == values[order[:-1]]
    before[order[1:][same]] = order[:-1][same]
    return before


def _smooth(noise: Array) -> None:
    """Mixes rows [T, m] with earlier ones, in place: neighbours then mean similar things."""
    for lag in _CONTEXT_LAGS:
        for start in reversed(range(0, len(noise), _BLOCK)):  # what is added is not smoothed yet
            stop = min(start + _BLOCK, len(noise))
            first = min(max(start, lag), stop)
            noise[first:stop] += 0.5 * noise[max(0, first - lag) : max(0, stop - lag)].copy()
            noise[first:stop] /= np.sqrt(np.float32(1.25))


def _rotate(vectors: Array, positions: Ids) -> None:
    """RoPE in place; channels (j, j + D / 2) are a pair."""
    pairs = vectors.shape[1] // 2
    frequency = _ROPE_BASE ** (-np.arange(pairs) / pairs)
    for start in range(0, len(vectors), _BLOCK):
        block = vectors[start : start + _BLOCK]
        angle = positions[start : start + _BLOCK, None] * frequency
        cos, sin = np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)
        first, second = block[:, :pairs].copy(), block[:, pairs:].copy()
        block[:, :pairs] = first * cos - second * sin
        block[:, pairs:] = second * cos + first * sin
