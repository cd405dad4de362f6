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

from hybrid_kv.eval.needle import TASKS, draw_filler, facts
from hybrid_kv.eval.needle import facts as vocab
from needle.recipe import Stage

_NEAR_TOKENS = 64
"""Keys this close to the query keep their plain weight: a real context has one copy of them."""
_MOST_RECORD_COPIES = 32.0
_TEXT_WEIGHT = 0.1
"""Loss weight of a filler token; a token of an answer has 1 before balancing."""
_LARGEST_BALANCE = 8.0
_HIDDEN = -1e9
"""Added to the logit of a key behind the query."""


@dataclass(frozen=True, slots=True)
class Item:
    """A record, a question with its answer, or a phrase.

    Attributes:
        ids: its tokens.
        weights: the loss weight of each of them as a target.
        record: its number among the records; -1 for a question.
        sources: the records that a question rests on.
    """

    ids: tuple[int, ...]
    weights: tuple[float, ...]
    record: int = -1
    sources: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Sequence:
    """One training sequence of L tokens.

    ids [L] int64; weights [L] float32, as targets; owner [L] int64, 0 for text and 1 + i for item
    i; related [items + 1, items + 1] bool, whether the first item rests on the second or is it;
    may_jump [L] bool, whether positions may jump before a token.
    """

    ids: NDArray[np.int64]
    weights: NDArray[np.float32]
    owner: NDArray[np.int64]
    related: NDArray[np.bool_]
    may_jump: NDArray[np.bool_]


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
        number = len(timed)
        timed.append((first, Item(phrase, (0.0,) * length, record=number)))
        timed.append((second, Item(phrase, (0.0, *(1.0,) * (length - 1)), sources=(number,))))
        num_tokens -= 2 * length
    return [item for _, item in sorted(timed, key=lambda entry: entry[0])]


def _ask(question: facts.Question, sources: tuple[int, ...]) -> Item:
    """A question with its answer; the loss falls on the answer."""
    asked, answer = question.ids, question.answer
    return Item((*asked, *answer), (0.0,) * len(asked) + (1.0,) * len(answer), sources=sources)


def _task_items(
    rng: np.random.Generator, task: str, num_tokens: int, alphabet: NDArray[np.int64]
) -> list[Item]:
    """Records and questions in an order in which every question follows its records."""
    known = TASKS[task]
    # An average record takes about as many tokens as the question it needs.
    room = (len(alphabet) // 2) ** 2
    count = int(num_tokens / rng.uniform(13.0, 18.0))
    drawn = known.build(rng, min(room, max(known.min_records, count)), alphabet)
    used = sum(map(len, drawn.records))
    times = np.sort(rng.random(len(drawn.records))).tolist()
    timed: list[tuple[float, Item]] = []
    order = rng.permutation(len(drawn.questions)).tolist()
    for turn, index in enumerate(order):
        sources = drawn.sources[index]
        item = _ask(drawn.questions[index], sources)
        if used + len(item.ids) > num_tokens and turn:
            break
        used += len(item.ids)
        timed.append((rng.uniform(max(times[source] for source in sources), 1.0), item))
    for number, record in enumerate(drawn.records):
        timed.append((times[number], Item(record, (0.0,) * len(record), record=number)))
    return [item for _, item in sorted(timed, key=lambda entry: entry[0])]


def _answer_scale(items: list[Item], total: float) -> float:
    """The factor that brings the weights of all answers towards `total` in sum; 0 asks for none."""
    present = sum(sum(item.weights) for item in items)
    return min(_LARGEST_BALANCE, total / present) if total and present else 1.0


def _related(items: list[Item]) -> NDArray[np.bool_]:
    """Which items rest on which, themselves included; row and column 0 are text."""
    related = np.eye(len(items) + 1, dtype=bool)
    related[0, 0] = False
    place = {item.record: index for index, item in enumerate(items, 1) if item.record >= 0}
    for index, item in enumerate(items, 1):
        related[index, [place[source] for source in item.sources]] = True
    return related


def _sequence(rng: np.random.Generator, stage: Stage, text: NDArray[np.int64]) -> Sequence:
    """One sequence; `text`, filler of at least its length, fills what the items leave free."""
    length = stage.seq_tokens
    tasks = list(stage.mix)
    task = tasks[rng.choice(len(tasks), p=np.array(list(stage.mix.values())))]
    budget = int(rng.uniform(*stage.record_share) * (length - 1))
    if task == "phrases":
        items = _phrases(rng, budget, length)
    else:
        num_bytes = round(_log_uniform(rng, *stage.alphabet))
        alphabet = rng.choice(facts.FULL_ALPHABET, num_bytes, replace=False)
        items = _task_items(rng, task, budget, alphabet)
    scale = _answer_scale(items, stage.answer_total)
    sizes = [len(item.ids) for item in items]
    text = text[: max(0, length - 1 - sum(sizes))]
    gaps = np.sort(rng.integers(len(text) + 1, size=len(items)))
    at = np.repeat(gaps, sizes) + 1
    starts = np.zeros(sum(sizes), dtype=bool)
    starts[np.cumsum([0, *sizes[:-1]])] = True
    text = np.concatenate([[vocab.BOS], text])
    ids = np.insert(text, at, [token for item in items for token in item.ids])
    plain = np.full(len(text), _TEXT_WEIGHT, dtype=np.float32)
    weights = np.insert(plain, at, [scale * weight for item in items for weight in item.weights])
    owners = np.repeat(np.arange(1, len(items) + 1), sizes)
    owner = np.insert(np.zeros(len(text), dtype=np.int64), at, owners)
    may_jump = np.insert(np.ones(len(text), dtype=bool), at, starts)
    return Sequence(
        ids[:length], weights[:length], owner[:length], _related(items), may_jump[:length]
    )


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


def _bias(sequence: Sequence, copies: float) -> Tensor:
    """Causal mask plus the logarithm of each key's virtual weight, [L, L].

    Text weighs as `copies` copies of itself, and so does, up to a limit, every item that the
    query's own item does not rest on: a dozen records then stand for hundreds, among which the
    right one has to be told from those that share a byte with it.
    """
    owner = sequence.owner
    weights = np.where(owner == 0, log(copies), log(min(copies, _MOST_RECORD_COPIES)))
    weights[0] = 0.0
    index = np.arange(len(owner))
    distance = index[:, None] - index
    plain = (distance <= _NEAR_TOKENS) | sequence.related[owner][:, owner]
    bias = np.where(plain, 0.0, weights)
    bias[distance < 0] = _HIDDEN
    return torch.from_numpy(bias.astype(np.float32))


def make_batch(rng: np.random.Generator, stage: Stage) -> Batch:
    """One batch of `stage`."""
    text = draw_filler(stage.batch * stage.seq_tokens, rng).reshape(stage.batch, -1)
    rows = [_sequence(rng, stage, line) for line in text]
    positions = [_positions(rng, row.may_jump, stage.max_position) for row in rows]
    bias = [_bias(row, _log_uniform(rng, 1.0, stage.max_copies)) for row in rows]
    return Batch(
        ids=torch.from_numpy(np.stack([row.ids for row in rows])),
        positions=torch.from_numpy(np.stack(positions)),
        target_weights=torch.from_numpy(np.stack([row.weights for row in rows])),
        bias=torch.stack(bias),
    )
