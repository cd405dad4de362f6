"""Codecs of keys as they were before RoPE, where channels and heads are more alike by token."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hybrid_kv.entries import Entries
from hybrid_kv.methods.codec import Kept, LearnedCodec, Seen
from hybrid_kv.rotary import UNKNOWN, Rotary
from hybrid_kv.types import ModelInfo, Needs


@dataclass(frozen=True, eq=False, kw_only=True)
class TurnedEntries(Entries):
    """Codes of keys that were turned back to position 0; `read` turns them to their positions.

    rotary: UNKNOWN where the model's could not be asked; then keys are coded as they are.
    """

    rotary: Rotary = UNKNOWN

    def decoded(self) -> tuple[Tensor, Tensor]:
        """Keys before RoPE, float32, and values, [capacity, D]."""
        raise NotImplementedError

    def read(self) -> tuple[Tensor, Tensor]:
        k, v = self.decoded()
        return self.rotary.turn(k, self.positions).to(v.dtype), v


class TurnedCodec(LearnedCodec):
    """Hands keys to `code` as they were before RoPE, in float32.

    `code` returns TurnedEntries, or plain ones of the keys as they came where nothing is lost.
    """

    @property
    def needs(self) -> Needs:
        return super().needs | Needs(rotary=True)

    def open(self, info: ModelInfo) -> None:
        self._rotary = {shape.layer_idx: info.rotary_of(shape.layer_idx) for shape in info.layers}

    def absorb_some(self, layer_idx: int, kept: Kept, left: Entries, seen: Seen) -> Entries:
        name, value = self.lossless
        if getattr(self.params, name) == value:
            return kept.extended(left) if kept else left.copied()
        rotary = self._rotary[layer_idx]
        k, v = (torch.stack(left.split(column)) for column in ("k", "v"))
        at = left.split("positions")[0]
        new = self.code(rotary.turn(k.float(), -at), v, at, kept, seen)
        if isinstance(new, TurnedEntries):
            new = replace(new, rotary=rotary)
        return kept.extended(new).with_tables(**new.tables) if kept else new
