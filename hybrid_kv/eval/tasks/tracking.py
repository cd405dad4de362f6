"""Variable tracking: names that are set to each other, and to a number at the beginning."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from hybrid_kv.config import Count
from hybrid_kv.config import Params as BaseParams
from hybrid_kv.eval.needle import Sample as NeedleSample
from hybrid_kv.eval.tasks.base import TASKS, Room, Task, TextQuestion, TextSample
from hybrid_kv.eval.tasks.haystack import hide, noise
from hybrid_kv.eval.tasks.needles import needle_sample
from hybrid_kv.eval.tasks.words import draw_numbers


@TASKS.register("variable_tracking", paper="Hsieh et al. 2024 (RULER), arXiv:2404.06654")
class VariableTracking(Task):
    """Which names stand for a number, by a chain of assignments."""

    class Params(BaseParams):
        """hops: assignments after the first one; records: in a context of the needle language;
        questions: asked about one of these.
        """

        hops: Count = 4
        records: Count = 64
        questions: Count = 4

    def needle(self, context_tokens: int, seed: int) -> NeedleSample:
        return needle_sample("variable_tracking", context_tokens, self.params, seed)

    def english(self, room: Room, rng: np.random.Generator, depth: float) -> TextSample:
        count = self.params.hops + 1
        letters = np.array(list("ABCDEFGHJKLMNPQRSTUVWXYZ"))
        names: list[str] = []
        while len(names) < count:
            name = "".join(rng.choice(letters, 3, replace=False))
            names += [] if name in names else [name]
        (value,) = draw_numbers(rng, 1)
        sentences = [f"Let {names[0]} be {value}."]
        sentences += [f"Let {new} be {old}." for old, new in pairwise(names)]
        intro = "The following text sets variables. Follow them, you will be asked."
        question = f"Which {count} variables have the value {value}?"
        room = room.less(intro, question)
        depths = sorted(rng.random(count).tolist())
        text, _ = hide(room, noise(), sentences, depths)
        asked = TextQuestion(
            question,
            f"The variables with the value {value} are",
            tuple(names),
            max_new_tokens=8 * count,
        )
        return TextSample(intro, text, (asked,))
