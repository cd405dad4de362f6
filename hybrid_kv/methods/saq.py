"""Staircase adaptive quantisation: the older, the fewer bits."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Literal

import torch
from pydantic import BeforeValidator
from torch import Tensor

from hybrid_kv.config import Tokens, parse_count
from hybrid_kv.entries import Entries
from hybrid_kv.methods.codec import CodecParams, Kept, LearnedCodec, Seen
from hybrid_kv.methods.planes import PlaneEntries, channel_sizes
from hybrid_kv.plugins import METHODS
from hybrid_kv.ragged import Ragged


@METHODS.register("saq", paper="Li 2024, arXiv:2410.18441, section on SAQ")
class SAQ(LearnedCodec):
    """Keeps the window whole, so many tokens before it in 4 bits, all older ones in 2; ROUNDS.

    Each step down the stairs loses bits: when a token has become older than fine_tokens, the lower
    half of its 4 bits is freed. Numbers are rounded by token, with channels evened out as in
    zipcache.

    Lost: precision, more of it of older tokens; no entry.
    Deviations: the paper says neither lengths nor how numbers are rounded; rounding is that of
    zipcache.
    """

    class Params(CodecParams):
        """bits: of a number of the oldest tokens, or "all" to round nothing; fine_tokens: before
        the window, in 4 bits.
        """

        bits: Annotated[Literal[2, "all"], BeforeValidator(parse_count)] = 2
        fine_tokens: Tokens = 1024

    lossless = ("bits", "all")

    def absorb_some(self, layer_idx: int, kept: Kept, left: Entries, seen: Seen) -> Entries:
        new = super().absorb_some(layer_idx, kept, left, seen)
        return new if self.params.bits == "all" else self._stepped_down(new)

    def code(self, k: Tensor, v: Tensor, at: Tensor, kept: Kept, seen: Seen) -> Entries:
        if self.params.bits == "all":
            return Entries.of(k, v, at)
        sizes = kept.state["sizes"] if kept else channel_sizes(k, v)
        return PlaneEntries.coded(k, v, at, sizes, None, kept)

    def _stepped_down(self, kept: Entries) -> Entries:
        """Without the lower planes of what has become too old."""
        count = min(kept.lengths[0], self.params.fine_tokens)
        first = kept.lengths[0] - count
        young = torch.cat([head[first:] for head in kept.split("fine")])
        # After a crop some of these have none: they get a row that nobody reads.
        rows = young.clamp_min(0)
        lower = {name: planes[rows] for name, planes in kept.tables["fine"].columns.items()}
        table = Ragged(columns=lower, starts=(0,), lengths=(len(rows),)).copied()
        renumbered = torch.arange(len(rows), dtype=torch.int32, device=rows.device)
        renumbered = torch.where(young < 0, -1, renumbered)
        numbers = torch.full_like(kept.columns["fine"], -1)
        for into, head in zip(kept.split(numbers), renumbered.split(count), strict=True):
            into[first:] = head
        return replace(kept.with_columns(fine=numbers), tables={"fine": table})
