"""Reading on in a text: how far a method's predictions are from full attention's.

The protocol of Quest's PG19 figure (arXiv:2406.10774, section 4.2): the model is given the
beginning of a text, and what it predicts for the tokens after it is judged.
"""

from __future__ import annotations

from typing import ClassVar

from hybrid_kv.config import Count
from hybrid_kv.config import Params as BaseParams
from hybrid_kv.eval.tasks.base import TASKS, Language, Task


@TASKS.register("perplexity", paper="Tang et al. 2024, arXiv:2406.10774, section 4.2")
class Perplexity(Task):
    """Nats, KL divergence and top-1 agreement while reading on in a text."""

    reads: ClassVar[bool] = True

    class Params(BaseParams):
        """then: tokens that are read after the context; step: so many at once."""

        then: Count = 256
        step: Count = 16

    def speaks(self, language: Language) -> bool:
        return True
