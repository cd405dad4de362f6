"""KIVI and GEAR: low-bit keys by channel and values by token, with a correction in GEAR."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Annotated, Any, Literal

import torch
from pydantic import BeforeValidator, Field
from torch import Tensor

from hybrid_kv.config import Count, Tokens, parse_count
from hybrid_kv.entries import Entries
from hybrid_kv.methods.codec import (
    Codec,
    CodecParams,
    Kept,
    Seen,
    decode,
    encode,
    outliers,
    put_back,
)
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


@dataclass(frozen=True, eq=False, kw_only=True)
class CorrectedEntries(CodedEntries):
    """k_left, v_left: [r] of an entry; block: row of table "low", where `k`, `v` are [r, D];
    k_at, k_out, v_at, v_out: outliers.
    """

    def read(self) -> tuple[Tensor, Tensor]:
        parts, low = [], self.tables["low"].columns
        for name, rough in zip("kv", super().read(), strict=True):
            left, right = (
                self.columns[f"{name}_left"],
                low[name][self.columns["block"].clamp_max(len(low[name]) - 1)],
            )
            rows = (rough.float() + (left.float()[:, None] @ right.float())[:, 0]).to(rough.dtype)
            places, numbers = self.columns[f"{name}_at"], self.columns[f"{name}_out"]
            parts.append(put_back(rows, places, numbers))
        return parts[0], parts[1]


@METHODS.register("gear", paper="Kang et al. 2024, arXiv:2403.05527")
class GEAR(Kivi):
    """Keeps what left the window in low bits, its error in low rank, outliers apart; ROUNDS.

    X = D + L + S: S the ceil(outlier_ratio D) numbers of a row that are farthest from its channel's
    (keys) or its own (values) mean, D the rest in 2 or 4 bits as in kivi, L the best rank-r
    approximation of what both leave, by KV head and of what leaves the window together.

    Lost: precision: what neither codes nor correction hold; no entry.
    Deviations: outliers are counted by token for keys, too; L by SVD, not by power iteration; a
    correction is of what leaves together, the prompt or a page of the answer.
    """

    class Params(Kivi.Params):
        """As kivi; rank: of the correction; outlier_ratio: of a row, kept whole."""

        rank: Tokens = 4
        outlier_ratio: float = Field(default=0.02, ge=0, lt=0.5)

    def code(self, k: Tensor, v: Tensor, at: Tensor, kept: Kept, seen: Seen) -> Entries:
        if self.params.bits == "all":
            return super().code(k, v, at, kept, seen)
        found: dict[str, Tensor] = {}
        smooth = []
        for name, rows in (("k", k), ("v", v)):
            middle = rows.float().mean(1 if name == "k" else 2, keepdim=True).expand_as(rows)
            far = (rows.float() - middle).abs()
            places, numbers = outliers(rows, self.params.outlier_ratio, far)
            found |= {f"{name}_at": places, f"{name}_out": numbers}
            smooth.append(put_back(rows, places, middle.gather(-1, places.long())))
        coded = super().code(smooth[0], smooth[1], at, kept, seen)
        rights: dict[str, Tensor] = {}
        for name, rows, rough in zip("kv", smooth, coded.read(), strict=True):
            left_over = rows.float() - torch.stack(coded.split(rough)).float()
            left_over.scatter_(-1, found[f"{name}_at"].long(), 0.0)
            found[f"{name}_left"], rights[name] = _low_rank(left_over, self.params.rank, rows.dtype)
        first = kept.tables["low"].lengths[0] if kept else 0
        table = Ragged(columns=rights, starts=(0,), lengths=(len(k),))
        table = kept.tables["low"].extended(table) if kept else table.copied()
        block = torch.arange(first, first + len(k), dtype=torch.int32, device=k.device)
        found["block"] = block[:, None].expand(-1, k.shape[1])
        new = coded.with_columns(**{name: rows.flatten(0, 1) for name, rows in found.items()})
        values: dict[str, Any] = {one.name: getattr(new, one.name) for one in fields(new)}
        return replace(CorrectedEntries(**values), tables={**coded.tables, "low": table})


def _low_rank(rows: Tensor, rank: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """[Hkv, n, r] and [Hkv, r, D], whose product is nearest to rows [Hkv, n, D]; r as it comes."""
    heads, count, dim = rows.shape
    left, right = rows.new_zeros(heads, count, rank), rows.new_zeros(heads, rank, dim)
    most = min(rank, count, dim)
    if most:
        u, sizes, vectors = torch.linalg.svd(rows, full_matrices=False)
        left[..., :most], right[:, :most] = (u * sizes[:, None])[..., :most], vectors[:, :most]
    return left.to(dtype), right.to(dtype)
