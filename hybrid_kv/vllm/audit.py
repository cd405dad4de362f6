"""The audit inside vLLM: what attention to decoded tokens did not see, by exact attention.

Every so many steps one layer looks at one sequence, layers and sequences in turn, so that looking
costs one exact attention of one layer.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from hybrid_kv.types import PartialAttention


@dataclass
class AuditTurns:
    """Turns of looking, among layers that see the same steps.

    every: steps from one look to the next. layers: how many there are.
    """

    every: int
    layers: int = 0

    def join(self) -> int:
        """The number of one more layer."""
        self.layers += 1
        return self.layers - 1

    def looked_at(self, layer: int, step: int, sequences: int) -> int | None:
        """The one of a step's sequences that a layer looks at; None for none.

        Args:
            step: counted from 1.
        """
        look, rest = divmod(step, self.every)
        if rest or look % self.layers != layer:
            return None
        return look // self.layers % sequences


_turns: dict[int, AuditTurns] = {}  # by the id of an engine's configuration


def engine_turns(engine: object, every: int) -> AuditTurns:
    """Turns of all layers of one engine, as a process may have several.

    Args:
        engine: what its layers have in common, as its configuration; it is not kept alive.
    """
    turns = _turns.get(id(engine))
    if turns is None:
        turns = _turns[id(engine)] = AuditTurns(every)
        weakref.finalize(engine, _turns.pop, id(engine), None)
    return turns


class ExactLook(NamedTuple):
    """Findings of a look, means over query heads: the share of the softmax that was not read, and
    the relative L2 distance of the output from exact attention's.
    """

    missed_mass: float
    output_error: float

    @classmethod
    def of(cls, seen: Tensor, exact: PartialAttention, out: Tensor, exact_out: Tensor) -> ExactLook:
        """Compare one token's attention with the exact one.

        Args:
            seen: [Hkv, G] log of the sum of weights that were read.
            exact: of all entries.
            out, exact_out: [Hq, D] of the layer.
        """
        missed = (1 - (seen - exact.lse).exp()).clamp_min(0)
        away = (out.float() - exact_out).norm(dim=-1)
        error = away / exact_out.norm(dim=-1).clamp_min(torch.finfo(torch.float32).tiny)
        return cls(float(missed.mean()), float(error.mean()))


def log_sum(queries: Tensor, keys: Tensor, there: Tensor, scale: float, softcap: float) -> Tensor:
    """Log of the sum of softmax weights [Hkv, G] of keys that a search found.

    Args:
        queries: [Hkv, G, D]. keys: [Hkv, G, K, D]. there: [Hkv, G, K] whether there is one.
        softcap: 0 for none.
    """
    logits = scale * torch.einsum("hgd,hgkd->hgk", queries.float(), keys.float())
    if softcap:
        logits = softcap * (logits / softcap).tanh()
    return logits.masked_fill(~there, -torch.inf).logsumexp(-1)
