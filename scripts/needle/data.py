"""Training batches: short sequences dressed up as long ones.

A sequence of 128 to 512 tokens stands for one of 160K: positions jump between its pieces, and
every filler token weighs as up to 640 copies of itself. Questions are dense: most records of a
sequence are asked for somewhere behind them.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import exp, log

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hybrid_kv.eval.needle import TASKS, facts
from hybrid_kv.eval.needle import vocabulary as vocab
from hybrid_kv.eval.needle.filler import draw_filler
from needle.recipe import Stage

FILLER, RECORD, UNASKED = 0, 1, 2
_NEAR_TOKENS = 64
"""Filler this close to the query keeps its plain weight: a real context has one copy of it."""
_UNASKED_COPIES = 32.0
_VALUE_WEIGHT, _TEXT_WEIGHT = 1.0, 0.1
_LARGEST_BALANCE = 8.0

Item = tuple[tuple[int, ...], tuple[float, ...], int]
"""Token ids, the loss weight of each of them as a target, and the kind of its keys."""


@dataclass(frozen=True, slots=True)
class Batch:
    """One step's input.

    ids, positions [B, L] int64; target_weights [B, L] float32, the loss weight of each id as a
    target; bias [B, L, L] float32, added to every attention logit.
    """

    ids: Tensor
    positions: Tensor
    target_weights: Tensor
    bias: Tensor

    def to(self, device: torch.device) -> Batch:
        """The same batch on `device`."""
        tensors = (self.ids, self.positions, self.target_weights, self.bias)
        return Batch(*(tensor.to(device, non_blocking=True) for tensor in tensors))


def _log_uniform(rng: np.random.Generator, low: float, high: float) -> float:
    return exp(rng.uniform(log(low), log(high)))


def _phrases(rng: np.random.Generator, num_tokens: int, seq_tokens: int) -> list[Item]:
    """Random phrases that occur twice each; only the second occurrence counts in the loss."""
    timed: list[tuple[float, Item]] = []
    while num_tokens > 0:
        length = int(rng.integers(6, max(8, seq_tokens // 12 + 1)))
        phrase = tuple(rng.integers(vocab.FIRST_BYTE, vocab.VOCAB_SIZE, size=length).tolist())
        first, second = np.sort(rng.random(2)).tolist()
        timed.append((first, (phrase, (0.0,) * length, RECORD)))
        timed.append((second, (phrase, (0.0, *(1.0,) * (length - 1)), RECORD)))
        num_tokens -= 2 * length
    return [item for _, item in sorted(timed, key=lambda entry: entry[0])]


def _ask(question: facts.Question, task: str, frame_weight: float) -> Item:
    """A question with its answer; the loss falls on the answer."""
    answer = question.answer
    weights = [_VALUE_WEIGHT] * len(answer)
    weights[-1] = frame_weight
    if answer[0] in vocab.ORDINALS:
        group = 3 + (facts.TAG_BYTES if task == "multi_value" else facts.VALUE_BYTES)
        for start in range(0, len(answer) - 1, group):
            weights[start : start + 3] = [frame_weight] * 3
    return (*question.ids, *answer), (0.0,) * len(question.ids) + tuple(weights), RECORD


def _task_items(
    rng: np.random.Generator,
    task: str,
    num_tokens: int,
    alphabet: NDArray[np.int64],
    frame_weight: float,
) -> list[Item]:
    """Records and questions in an order in which every question follows its records."""
    known = TASKS[task]
    # An average record takes about as many tokens as the question it needs.
    room = (len(alphabet) // 2) ** 2
    count = int(num_tokens / rng.uniform(13.0, 18.0))
    drawn = known.build(rng, min(room, max(known.min_records, count)), alphabet)
    used = sum(map(len, drawn.records))
    times = np.sort(rng.random(len(drawn.records))).tolist()
    asked: set[int] = set()
    timed: list[tuple[float, Item]] = []
    order = rng.permutation(len(drawn.questions)).tolist()
    for turn, index in enumerate(order):
        ids, weights, kind = _ask(drawn.questions[index], task, frame_weight)
        if used + len(ids) > num_tokens and turn:
            break
        used += len(ids)
        asked.update(drawn.sources[index])
        ready = max(times[source] for source in drawn.sources[index])
        timed.append((rng.uniform(ready, 1.0), (ids, weights, kind)))
    for index, record in enumerate(drawn.records):
        kind = RECORD if index in asked else UNASKED
        timed.append((times[index], (record, (0.0,) * len(record), kind)))
    return [item for _, item in sorted(timed, key=lambda entry: entry[0])]


def _balanced(items: list[Item], total: float) -> list[Item]:
    """The same items with the weights of all answers scaled towards `total` in sum."""
    present = sum(sum(weights) for _, weights, _ in items)
    if total == 0.0 or present == 0.0:
        return items
    scale = min(_LARGEST_BALANCE, total / present)
    return [(ids, tuple(scale * w for w in weights), kind) for ids, weights, kind in items]


def _sequence(
    rng: np.random.Generator, stage: Stage, text: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.float32], NDArray[np.int64], NDArray[np.bool_]]:
    """ids, target weights, kinds, and where the positions may jump, each [seq_tokens].

    `text` is filler, at least [seq_tokens]; as much of it is used as the items leave room for.
    """
    length = stage.seq_tokens
    tasks = list(stage.mix)
    task = tasks[rng.choice(len(tasks), p=np.array(list(stage.mix.values())))]
    budget = int(rng.uniform(*stage.record_share) * (length - 1))
    if task == "phrases":
        items = _phrases(rng, budget, length)
    else:
        num_bytes = round(_log_uniform(rng, *stage.alphabet))
        alphabet = rng.choice(facts.FULL_ALPHABET, num_bytes, replace=False)
        items = _task_items(rng, task, budget, alphabet, stage.frame_weight)
    items = _balanced(items, stage.answer_total)
    sizes = [len(ids) for ids, _, _ in items]
    text = text[: max(0, length - 1 - sum(sizes))]
    gaps = np.sort(rng.integers(len(text) + 1, size=len(items)))
    at = np.repeat(gaps, sizes) + 1
    starts = np.zeros(sum(sizes), dtype=bool)
    starts[np.cumsum([0, *sizes[:-1]])] = True
    text = np.concatenate([[vocab.BOS], text])
    ids = np.insert(text, at, [token for tokens, _, _ in items for token in tokens])
    plain = np.full(len(text), _TEXT_WEIGHT, dtype=np.float32)
    weights = np.insert(plain, at, [weight for _, values, _ in items for weight in values])
    kinds = np.insert(
        np.zeros(len(text), dtype=np.int64), at, np.repeat([kind for *_, kind in items], sizes)
    )
    kinds[0] = RECORD
    may_jump = np.insert(np.ones(len(text), dtype=bool), at, starts)
    return ids[:length], weights[:length], kinds[:length], may_jump[:length]


def _positions(
    rng: np.random.Generator, may_jump: NDArray[np.bool_], max_position: int
) -> NDArray[np.int64]:
    """Consecutive positions with up to eight jumps that stretch them over a random range."""
    length = len(may_jump)
    positions = np.arange(length)
    if max_position <= length:
        return positions
    stretch = (
        rng.uniform(length, max_position)
        if rng.random() < 0.5
        else _log_uniform(rng, length, max_position)
    )
    borders = np.flatnonzero(may_jump[1:]) + 1
    jumps = rng.choice(borders, min(len(borders), int(rng.integers(1, 9))), replace=False)
    shares = rng.exponential(size=len(jumps))
    steps = np.zeros(length, dtype=np.int64)
    steps[jumps] = (shares / shares.sum() * (stretch - length)).astype(np.int64)
    return positions + np.cumsum(steps)


def _bias(kinds: Tensor, copies: Tensor) -> Tensor:
    """Causal mask plus the logarithm of each key's virtual weight, [B, L, L] float32."""
    length = kinds.shape[1]
    table = torch.zeros(kinds.shape[0], 3)
    table[:, FILLER] = copies.log()
    table[:, UNASKED] = copies.clamp_max(_UNASKED_COPIES).log()
    per_key = table.gather(1, kinds)
    index = torch.arange(length)
    distance = index[:, None] - index
    bias = torch.where(distance > _NEAR_TOKENS, per_key[:, None, :], 0.0)
    return bias.masked_fill(distance < 0, -1e9)


def make_batch(rng: np.random.Generator, stage: Stage) -> Batch:
    """One batch of `stage`."""
    text = draw_filler(stage.batch * stage.seq_tokens, rng).reshape(stage.batch, -1)
    rows = [_sequence(rng, stage, line) for line in text]
    positions = [_positions(rng, row[3], stage.max_position) for row in rows]
    copies = [_log_uniform(rng, 1.0, stage.max_copies) for _ in rows]
    kinds = torch.from_numpy(np.stack([row[2] for row in rows]))
    return Batch(
        ids=torch.from_numpy(np.stack([row[0] for row in rows])),
        positions=torch.from_numpy(np.stack(positions)),
        target_weights=torch.from_numpy(np.stack([row[1] for row in rows])),
        bias=_bias(kinds, torch.tensor(copies)),
    )
