"""TOVA: whatever the newest query attends least is dropped."""

from __future__ import annotations

from torch import Tensor

from hybrid_kv.attended import Attended
from hybrid_kv.config import Tokens
from hybrid_kv.methods.evicting import EvictingParams
from hybrid_kv.methods.following import Following, Moment
from hybrid_kv.methods.scores import group_sums, newest_of
from hybrid_kv.plugins import METHODS
from hybrid_kv.types import Evidence, Needs


@METHODS.register("tova", paper="Oren et al. 2024, arXiv:2401.06104")
class TOVA(Following):
    """Keeps what the newest query attends most, the same tokens in all heads; DROPS the rest.

    score[n] = sum over the heads of the softmax weights that the newest query alone gave entry n.

    Deviations: a page leaves at a time, judged by the query before it, so that up to a page more is
    held and the newest tokens stay till then; the prompt is cut at its end; with page_size 1 this
    is the paper's own loop.
    """

    class Params(EvictingParams):
        """window_tokens: kept whatever they score; the paper has none."""

        window_tokens: Tokens = 0

    @property
    def needs(self) -> Needs:
        return super().needs | Needs(last_queries=1)

    def prompt_scores(self, seen: Evidence, num_kv_heads: int, layer_idx: int) -> Tensor:
        return group_sums(seen.mass(1), num_kv_heads)

    def watched(self, attended: Attended) -> Attended:
        return newest_of(attended)

    def moved(self, old: Tensor, mass: Tensor, moment: Moment) -> Tensor:
        return mass

    def ranked(self, scores: Tensor) -> Tensor:
        return scores.sum(0).expand(len(scores), -1)
