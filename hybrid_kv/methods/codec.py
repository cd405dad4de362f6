"""Base classes of methods that lose no entry and keep offloaded ones in fewer bytes."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, TypeAlias

import torch
from torch import Tensor

from hybrid_kv.config import Params as BaseParams
from hybrid_kv.config import Tokens
from hybrid_kv.entries import Entries
from hybrid_kv.plugins import Method, Placement
from hybrid_kv.types import Demotion, Evidence, Read

Kept: TypeAlias = Entries | None
Seen: TypeAlias = Evidence | None


class CodecParams(BaseParams):
    """sink_tokens, window_tokens: kept as they came, at start and end; multiples of page_size."""

    sink_tokens: Tokens = 0
    window_tokens: Tokens = 128


class Codec(Method):
    """Attends everything; what leaves the window is coded once and decoded in every step.

    lossless: the parameter, and its value, that loses nothing.

    Kept: every entry: sinks and window as they came, all others as codes.
    Lost: precision; no entry.
    """

    lossless: ClassVar[tuple[str, object]]

    @abstractmethod
    def code(self, k: Tensor, v: Tensor, at: Tensor, kept: Kept, seen: Seen) -> Entries:
        """Entries that hold codes of k, v [Hkv, n, D], at positions [n].

        Args:
            kept: the earlier ones, which these shall extend; `tables` are those of both.
            seen: at the prompt's end.
        """

    def absorb(self, layer_idx: int, row: int, kept: Kept, left: Entries, seen: Seen) -> Entries:
        k, v = (torch.stack(left.split(name)) for name in ("k", "v"))
        new = self.code(k, v, left.split("positions")[0], kept, seen)
        return kept.extended(new).with_tables(**new.tables) if kept else new

    def seal(self, layer_idx: int, evidence: Sequence[Evidence]) -> Placement:
        return Placement(self.params.sink_tokens, self.params.window_tokens, rest=Demotion.ABSORB)

    def read(self, layer_idx: int, q: Tensor) -> Read:
        return Read()

    @classmethod
    def full_budget(cls, params: Any) -> Any:
        return params.model_copy(update=dict([cls.lossless]))

    @classmethod
    def at_budget(cls, params: Any, tokens: int, *, context_tokens: int, page_size: int) -> Any:
        return params


class LearnedCodec(Codec):
    """A codec that learns from the first entries that leave the window; before, it keeps none."""

    def absorb(self, layer_idx: int, row: int, kept: Kept, left: Entries, seen: Seen) -> Entries:
        if not left.lengths[0]:
            return kept or Entries.empty(left)
        old = kept if kept and kept.lengths[0] else None
        return self.absorb_some(layer_idx, old, left, seen)

    def absorb_some(self, layer_idx: int, kept: Kept, left: Entries, seen: Seen) -> Entries:
        """As `absorb`, where something leaves; `kept` is None before."""
        return super().absorb(layer_idx, 0, kept, left, seen)
