"""Measures of an answer in words against known ones, as the data sets' authors compute them."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable, Sequence
from difflib import SequenceMatcher

Measure = Callable[[str, tuple[str, ...]], float]
"""0 to 1, by the model's answer and the known answers."""


def f1(answer: str, known: tuple[str, ...]) -> float:
    """Overlap of words without articles and punctuation, with the nearest known answer."""
    return max((_overlap(_words(answer), _words(one)) for one in known), default=0.0)


def rouge_l(answer: str, known: tuple[str, ...]) -> float:
    """ROUGE-L: the longest common sequence of words, with the nearest known answer."""
    said = answer.lower().split()
    return max((_sequence(said, one.lower().split()) for one in known), default=0.0)


def numbers(answer: str, known: tuple[str, ...]) -> float:
    """Of the numbers in the answer, the share that is the known one."""
    found = re.findall(r"\d+", answer)
    right = {number for one in known for number in re.findall(r"\d+", one)}
    return sum(number in right for number in found) / len(found) if found else 0.0


def code(answer: str, known: tuple[str, ...]) -> float:
    """Likeness of the first line that is code."""
    lines = [line for line in answer.lstrip("\n").split("\n") if line.strip()]
    first = next((line for line in lines if not re.search("`|#|//", line)), "")
    return max((SequenceMatcher(None, first, one).ratio() for one in known), default=0.0)


def one_of(choices: Sequence[str]) -> Measure:
    """Whether the right one of some names is said; less where others are said as well."""

    def measure(answer: str, known: tuple[str, ...]) -> float:
        said = [name for name in choices if name in answer]
        # 'Number' is said in 'Number of something', which is no second choice.
        said = [name for name in said if name in known or not any(name in one for one in known)]
        return 1 / len(said) if any(name in known for name in said) else 0.0

    return measure


def letter(answer: str, known: tuple[str, ...]) -> float:
    """Whether the first capital letter that stands alone, or else the wording, is right."""
    found = re.search(r"\b[A-D]\b", answer)
    if found is not None:
        return float(found[0] in known)
    return float(any(len(one) > 1 and one.lower() in answer.lower() for one in known))


def first_line(measure: Measure) -> Measure:
    """Of an answer that may go on with the next example."""

    def first(answer: str, known: tuple[str, ...]) -> float:
        return measure(answer.lstrip("\n").split("\n")[0], known)

    return first


def _words(text: str) -> list[str]:
    plain = "".join(sign for sign in text.lower() if sign not in string.punctuation)
    return re.sub(r"\b(a|an|the)\b", " ", plain).split()


def _overlap(said: Sequence[str], known: Sequence[str]) -> float:
    return _harmonic((Counter(said) & Counter(known)).total(), len(said), len(known))


def _sequence(said: Sequence[str], known: Sequence[str]) -> float:
    row = [0] * (len(known) + 1)
    for word in said:
        before, row = row, [0]
        for place, other in enumerate(known):
            row.append(before[place] + 1 if word == other else max(row[-1], before[place + 1]))
    return _harmonic(row[-1], len(said), len(known))


def _harmonic(common: int, said: int, known: int) -> float:
    return 2 * common / (said + known) if common else 0.0
