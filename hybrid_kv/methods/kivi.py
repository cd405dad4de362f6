"""KIVI: what left the window in 2 or 4 bits, keys by channel and values by token."""

from dataclasses import dataclass, replace
from typing import Annotated, Literal

import torch
from pydantic import BeforeValidator
from torch import Tensor

from hybrid_kv.config import Count, parse_count
from hybrid_kv.entries import Entries
from hybrid_kv.methods.codec import Codec, CodecParams, Kept, Seen
from hybrid_kv.ops.low_bits import decode, encode
from hybrid_kv.plugins import METHODS
from hybrid_kv.ragged import Ragged


@dataclass(frozen=True, eq=False, kw_only=True)
class CodedEntries(Entries):
    """k, v: codes. scales: [2, groups] of a value; group: row of table "k", [2, D] of a key."""

    bits: int = 2
    group_size: int = 1

    def read(self) -> tuple[Tensor, Tensor]:
        table = self.tables["k"].columns["scales"]
        # Rows in room for growing may be somebody else's, with numbers of his table.
        k_scales = table[self.columns["group"].clamp_max(len(table) - 1)]
        v_scales = self.columns["scales"].repeat_interleave(self.group_size, -1)
        v_scales = v_scales[..., : k_scales.shape[-1]]
        return decode(self.k, k_scales, self.bits), decode(self.v, v_scales, self.bits)


@METHODS.register("kivi", paper="Liu et al. 2024, arXiv:2402.02750, section 3")
class Kivi(Codec):
    """Keeps what left the window in 2 or 4 bits: keys by channel, values by token; ROUNDS.

    Of each group x is kept as round((x - min) / s), s = (max - min) / (2 ** bits - 1), and off by
    about s / 2 at most; no entry is lost.

    Lost: precision: every number is off by half a step of its group at most; no entry.
    Deviations: a group of keys ends where a page left the window (the paper's residual); codes are
    decoded in every step, in no kernel; groups of an answer are as large as a page.
    """

    class Params(CodecParams):
        """bits: of a number, or "all"; group_size: keys' tokens or values' channels in a group."""

        bits: Annotated[Literal[2, 4, "all"], BeforeValidator(parse_count)] = 2
        group_size: Count = 32

    lossless = ("bits", "all")

    def code(self, k: Tensor, v: Tensor, at: Tensor, kept: Kept, seen: Seen) -> Entries:
        bits, size = self.params.bits, self.params.group_size
        if bits == "all":
            return Entries.of(k, v, at)
        (k, k_scales), (v, scales) = encode(k, bits, size, axis=-2), encode(v, bits, size, axis=-1)
        rows = k_scales.transpose(0, 1).flatten(0, 1)  # [groups * Hkv, 2, D]
        table = Ragged(columns={"scales": rows}, starts=(0,), lengths=(len(rows),))
        first = kept.tables["k"].lengths[0] if kept else 0
        table = kept.tables["k"].extended(table) if kept else table.copied()
        group = torch.arange(first, table.lengths[0], dtype=torch.int32, device=k.device)
        group = group.view(-1, len(k)).T.repeat_interleave(size, 1)[:, : k.shape[1]]
        new = CodedEntries.of(k, v, at, group=group, scales=scales)
        return replace(new, bits=bits, group_size=size, tables={"k": table})
