"""Records that a haystack hides, the questions about them and the right answers.

Records and questions as a person reads them (the tokenizer adds ``:`` and ``=`` by itself):

    key 3f a0: 11 5c 9e 07.    ? key 3f a0           -> 11 5c 9e 07.
    tag one 3f a0: 11 5c.      ? two tag 3f a0       -> one 3f a0: 11 5c two 3f a0: 9e 07.
    let 3f a0 = 17 22.         ? let 3f a0           -> 17 22 river.
    vote 3f a0: river.         ? vote 3f a0          -> river.

No token stands between a key and its value: the model finds a value by the two tokens before it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import ceil, sqrt
from typing import Final

import numpy as np
from numpy.typing import NDArray

_HARBOUR = """harbour boat tide sailor anchor rope mast deck wave gull pier lantern captain
net fisher salt storm island shore cargo crew voyage compass reef current sail ferry dock
barrel lighthouse"""

_GARDEN = """garden rose seed soil rain root leaf bloom hedge path spade basket bee clover
orchard apple pear plum ivy moss fern willow shade pond stone bench gate wall sparrow nest"""

_KITCHEN = """kitchen bread butter flour oven pan soup onion pepper honey cheese spoon plate
table apron recipe dough sugar lemon garlic kettle tea cup bowl knife stove steam crumb dinner
supper"""

_TOWN = """town street market bridge tower square clock baker tailor window door roof chimney
corner shop coin wagon horse station train ticket crowd mayor school teacher letter paper news
bell church"""

_MOUNTAIN = """mountain valley river snow ice peak ridge cave eagle wolf pine cedar trail cabin
fire smoke wood axe cloud wind frost meadow goat shepherd spring waterfall glacier summit
boulder echo"""

_MUSIC = """music song violin drum flute piano singer dance stage voice chord rhythm melody
choir concert string trumpet audience curtain silence applause note tempo guitar harp verse
chorus tune rehearsal ballad"""

_SCIENCE = """science planet star moon orbit comet lens mirror signal metal glass magnet energy
atom crystal engine wheel lever theory number chart record sample battery copper iron silver
carbon motion measure"""

_PLAIN = """the and with under over near before after slowly quietly often always small large
old new bright quiet warm cold brings holds finds keeps leaves follows carries crosses watches
remembers"""

TOPICS: Final[tuple[tuple[str, ...], ...]] = tuple(
    tuple(block.split())
    for block in (_HARBOUR, _GARDEN, _KITCHEN, _TOWN, _MOUNTAIN, _MUSIC, _SCIENCE, _PLAIN)
)

FILLER_WORDS: Final[tuple[str, ...]] = tuple(word for topic in TOPICS for word in topic)

PAD: Final = 0

BOS: Final = 1

EOS: Final = 2

UNK: Final = 3

STOP: Final = 4

ASK: Final = 5

KEY: Final = 6

PASS: Final = 7

CODE: Final = 8

TAG: Final = 9

LET: Final = 10

VOTE: Final = 11

ORDINALS: Final = (12, 13, 14, 15)

FIRST_BYTE: Final = 16

NUM_BYTES: Final = 256

FIRST_WORD: Final = FIRST_BYTE + NUM_BYTES

NUM_WORDS: Final = len(FILLER_WORDS)

VOCAB_SIZE: Final = FIRST_WORD + NUM_WORDS

NUM_TOPICS: Final = len(TOPICS)

WORDS_PER_TOPIC: Final = len(TOPICS[0])

NUM_PLAIN_WORDS: Final = len(TOPICS[-1])

TOKENS: Final[tuple[str, ...]] = (
    *("<pad>", "<bos>", "<eos>", "<unk>", ".", "?"),
    *("key", "pass", "code", "tag", "let", "vote", "one", "two", "three", "four"),
    *(f"{value:02x}" for value in range(NUM_BYTES)),
    *FILLER_WORDS,
)


Tokens = tuple[int, ...]
FULL_ALPHABET: Final = np.arange(FIRST_BYTE, FIRST_WORD)
VALUE_BYTES: Final = 4
LIST_VOTES: Final = 8
MAX_PARTS: Final = len(ORDINALS)


@dataclass(frozen=True, slots=True)
class Question:
    """Token ids to append after the context, and the ids the model must continue with.

    `answer` ends with the closing ``.``.
    """

    ids: Tokens
    answer: Tokens


@dataclass(frozen=True, slots=True)
class Facts:
    """Records in the order of the haystack; `sources[i]` are the records question i rests on."""

    records: tuple[Tokens, ...]
    questions: tuple[Question, ...]
    sources: tuple[Tokens, ...]


def draw_keys(
    rng: np.random.Generator, count: int, alphabet: NDArray[np.int64]
) -> NDArray[np.int64]:
    """`count` distinct two-byte keys, [count, 2].

    Half of the draws use so few bytes that most keys share each of their bytes with another key:
    a method that matches on one byte only fails there.
    """
    if rng.random() < 0.5:
        num_bytes = min(len(alphabet), ceil(1.3 * sqrt(count)) + 1)
        alphabet = rng.permutation(alphabet)[:num_bytes]
    pairs = rng.choice(len(alphabet) ** 2, count, replace=False)
    return np.stack([alphabet[pairs // len(alphabet)], alphabet[pairs % len(alphabet)]], axis=1)


def split_into_parts(rng: np.random.Generator, count: int) -> list[int]:
    """Sizes of 2 to 4 that add up to `count`, which is at least 2."""
    sizes: list[int] = []
    while count:
        size = int(rng.integers(2, MAX_PARTS + 1))
        if count - size in (0, 2, 3) or count - size > MAX_PARTS:
            sizes.append(size)
            count -= size
        elif count <= MAX_PARTS:
            sizes.append(count)
            count = 0
    return sizes


def key_records(
    rng: np.random.Generator, count: int, alphabet: NDArray[np.int64]
) -> tuple[list[Tokens], list[Tokens]]:
    """Keys and values of `count` plain records, both as tuples of byte ids."""
    keys = draw_keys(rng, count, alphabet)
    values = rng.choice(alphabet, (count, VALUE_BYTES))
    return [tuple(key) for key in keys.tolist()], [tuple(value) for value in values.tolist()]


def key_value(rng: np.random.Generator, count: int, alphabet: NDArray[np.int64]) -> Facts:
    """One record per key; a question asks for one value."""
    keys, values = key_records(rng, count, alphabet)
    pairs = list(zip(keys, values, strict=True))
    return Facts(
        tuple((KEY, *key, *value, STOP) for key, value in pairs),
        tuple(Question((ASK, KEY, *k), (*v, STOP)) for k, v in pairs),
        tuple((index,) for index in range(count)),
    )


def passkey(rng: np.random.Generator, count: int, alphabet: NDArray[np.int64]) -> Facts:
    """One record is the pass code, the others are plain records; the question asks for it."""
    keys, values = key_records(rng, count, alphabet)
    where = int(rng.integers(count))
    keys[where] = (PASS, CODE)
    records = [(KEY, *k, *v, STOP) for k, v in zip(keys, values, strict=True)]
    question = Question((ASK, KEY, *keys[where]), (*values[where], STOP))
    return Facts(tuple(records), (question,), ((where,),))


def multi_query(rng: np.random.Generator, count: int, alphabet: NDArray[np.int64]) -> Facts:
    """Plain records; a question asks for two to four of them at once, each of them once."""
    keys, values = key_records(rng, count, alphabet)
    questions, sources = [], []
    order = rng.permutation(count).tolist()
    for size in split_into_parts(rng, count):
        asked, order = order[:size], order[size:]
        ids, answer = [ASK], []
        for ordinal, index in zip(ORDINALS, asked, strict=False):
            ids += [ordinal, *keys[index]]
            answer += [ordinal, *keys[index], *values[index]]
        questions.append(Question((*ids, STOP), (*answer, STOP)))
        sources.append(tuple(asked))
    records = ((KEY, *k, *v, STOP) for k, v in zip(keys, values, strict=True))
    return Facts(tuple(records), tuple(questions), tuple(sources))


def multi_value(rng: np.random.Generator, count: int, alphabet: NDArray[np.int64]) -> Facts:
    """Two to four numbered records share each key; a question asks for all values of one key."""
    sizes = split_into_parts(rng, count)
    slots = _scattered_slots(rng, sizes)
    records: list[Tokens] = [()] * count
    questions = []
    for key, where in zip(draw_keys(rng, len(sizes), alphabet).tolist(), slots, strict=True):
        # Different first bytes, so that a wrong choice among them is always a wrong answer.
        firsts = rng.choice(alphabet, len(where), replace=False).tolist()
        seconds = rng.choice(alphabet, len(where)).tolist()
        answer: list[int] = []
        for ordinal, index, *value in zip(ORDINALS, where, firsts, seconds, strict=False):
            records[index] = (TAG, ordinal, *key, *value, STOP)
            answer += [ordinal, *key, *value]
        number = ORDINALS[len(where) - 1]
        questions.append(Question((ASK, number, TAG, *key), (*answer, STOP)))
    return Facts(tuple(records), tuple(questions), slots)


def variable_tracking(rng: np.random.Generator, count: int, alphabet: NDArray[np.int64]) -> Facts:
    """Chains of two to four assignments that end in a word; a question gives the first name.

    The answer names every variable on the way and the word.
    """
    sizes = split_into_parts(rng, count)
    slots = tuple(tuple(rng.permutation(where).tolist()) for where in _scattered_slots(rng, sizes))
    names = _draw_names(rng, count, alphabet).tolist()
    records: list[Tokens] = [()] * count
    questions = []
    for where in slots:
        chain, names = names[: len(where)], names[len(where) :]
        values = [*chain[1:], [int(FIRST_WORD + rng.integers(NUM_WORDS))]]
        for index, name, value in zip(where, chain, values, strict=True):
            records[index] = (LET, *name, *value, STOP)
        answer = tuple(token for value in values for token in value)
        questions.append(Question((ASK, LET, *chain[0]), (*answer, STOP)))
    return Facts(tuple(records), tuple(questions), slots)


def most_frequent(rng: np.random.Generator, count: int, alphabet: NDArray[np.int64]) -> Facts:
    """Named lists of about eight votes each; a question asks for the word a list holds most.

    The winner has five votes of eight; the others go to words of their own.
    """
    num_lists = max(1, count // LIST_VOTES)
    sizes = [len(part) for part in np.array_split(np.arange(count), num_lists)]
    slots = _scattered_slots(rng, sizes)
    records: list[Tokens] = [()] * count
    questions = []
    for name, where in zip(_draw_names(rng, num_lists, alphabet).tolist(), slots, strict=True):
        num_wins = max(2, ceil(len(where) * 5 / 8))
        losers = len(where) - num_wins
        words = FIRST_WORD + rng.choice(NUM_WORDS, 1 + losers, replace=False)
        votes = [*words.tolist(), *[int(words[0])] * (num_wins - 1)]
        for index, vote in zip(where, rng.permutation(votes).tolist(), strict=True):
            records[index] = (VOTE, *name, vote, STOP)
        questions.append(Question((ASK, VOTE, *name), (votes[0], STOP)))
    return Facts(tuple(records), tuple(questions), slots)


def _draw_names(
    rng: np.random.Generator, count: int, alphabet: NDArray[np.int64]
) -> NDArray[np.int64]:
    """`count` distinct names, [count, 2], whose first and second bytes are different sets.

    A chain of variables is read as one row of bytes. Were the sets the same, the second byte of
    one name and the first of the next could spell a third name, and only counting would help.
    Names are not made to share bytes as keys are: these tasks are hard enough without.
    """
    half = len(alphabet) // 2
    shuffled = rng.permutation(alphabet)
    firsts, seconds = shuffled[:half], shuffled[half:]
    pairs = rng.choice(len(firsts) * len(seconds), count, replace=False)
    return np.stack([firsts[pairs // len(seconds)], seconds[pairs % len(seconds)]], axis=1)


def _scattered_slots(rng: np.random.Generator, sizes: Iterable[int]) -> tuple[Tokens, ...]:
    """Disjoint ascending record positions, one group per size."""
    ends = np.cumsum(list(sizes))
    groups = np.split(rng.permutation(int(ends[-1])), ends[:-1])
    return tuple(tuple(np.sort(group).tolist()) for group in groups)
