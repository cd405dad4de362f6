"""Methods that keep entries in few bits: KIVI, GEAR, ZipCache, SAQ and AccurateBlock.

KIVI codes keys by channel and values by token; GEAR corrects what that loses. The others give more
bits to what is attended more.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Annotated, Any, Literal

import torch
from pydantic import BeforeValidator, Field
from torch import Tensor
from torch.nn.functional import pad

from hybrid_kv.config import Count, Tokens, parse_count
from hybrid_kv.entries import Entries
from hybrid_kv.masses import causal_masses
from hybrid_kv.methods.codec import (
    Codec,
    CodecParams,
    Kept,
    LearnedCodec,
    PlaneEntries,
    Seen,
    channel_sizes,
    decode,
    encode,
    outliers,
    pack,
    put_back,
    unpack,
)
from hybrid_kv.methods.evicting import best, group_sums
from hybrid_kv.plugins import METHODS
from hybrid_kv.ragged import Ragged
from hybrid_kv.types import Evidence, Needs


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


@METHODS.register("zipcache", paper="He et al. 2024, arXiv:2405.14256")
class ZipCache(LearnedCodec):
    """Keeps salient tokens that left the window in 4 bits, the others in 2; ROUNDS.

    Salient is a token of the highest normalised attention: the weights that probe queries gave it,
    divided by how many of them saw it. Keys are rounded by one scale for each channel of what
    leaves the window together; channels of values are divided by sqrt(max |x|), then a token's
    whole value is rounded by one scale (channel-separable tokenwise).

    Deviations: probes are spread, not random; the answer is salient, and leaves by pages, not by
    hundreds of tokens; 2 bits are the upper half of 4, so that salient keys and the others share
    the range of a channel.
    """

    class Params(CodecParams):
        """bits: of a number of a token that is not salient, or "all" to round nothing;
        salient_ratio: tokens in 4 bits, by KV head; probe_tokens, recent_probes: spread and last
        queries of the prompt that judge.
        """

        bits: Annotated[Literal[2, "all"], BeforeValidator(parse_count)] = 2
        salient_ratio: float = Field(default=0.6, ge=0, le=1)
        probe_tokens: Tokens = 64
        recent_probes: Count = 64

    lossless = ("bits", "all")

    @property
    def needs(self) -> Needs:
        return Needs(self.params.probe_tokens, self.params.recent_probes)

    def code(self, k: Tensor, v: Tensor, at: Tensor, kept: Kept, seen: Seen) -> Entries:
        if self.params.bits == "all":
            return Entries.of(k, v, at)
        salient = None
        if seen is not None:
            scores = normalised(seen, len(k))[:, int(at[0]) : int(at[0]) + k.shape[1]]
            salient = best(scores, round(self.params.salient_ratio * k.shape[1])).sort(-1).values
        sizes = kept.state["sizes"] if kept else channel_sizes(k, v)
        return PlaneEntries.coded(k, v, at, sizes, salient, kept, keys_by_channel=True)


def normalised(seen: Evidence, num_kv_heads: int) -> Tensor:
    """[Hkv, N]: the weights that probes gave each token, over how many probes saw it."""
    mass, count = seen.mass(), seen.num_tokens
    last = seen.last_queries.shape[1] if seen.last_queries is not None else 0
    asked = torch.arange(count - last, count)
    if seen.sampled_queries is not None and seen.sampled_positions is not None:
        q, more = seen.sampled_queries, seen.sampled_positions
        assert seen.keys is not None  # `mass` has used them
        rule = {"scale": seen.scale, "softcap": seen.softcap}
        mass = mass + causal_masses(q, seen.keys, positions=more, **rule)  # type: ignore[arg-type]
        asked = torch.cat([asked, more.cpu()])
    saw = torch.bincount(asked, minlength=count).flip(0).cumsum(0).flip(0)
    return group_sums(mass, num_kv_heads) / saw.clamp_min(1).to(mass.device)


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


@dataclass(frozen=True, eq=False, kw_only=True)
class BlockEntries(Entries):
    """k, v: packed mantissas. k_exp, v_exp: [blocks] int8 exponents. State: `order` [Hkv, D], where
    each channel of a key stands; `like` [0], whose dtype values have.
    """

    bits: int = 4
    block_size: int = 1

    def read(self) -> tuple[Tensor, Tensor]:
        ordered, keys = self._decoded("k"), self._decoded("k")
        for into, head, order in zip(
            self.split(keys), self.split(ordered), self.state["order"], strict=True
        ):
            into.copy_(head[:, order])
        return keys, self._decoded("v")

    def _decoded(self, name: str) -> Tensor:
        dim = self.state["order"].shape[-1]
        mantissas = unpack(self.columns[name], self.bits, dim).float() - 2 ** (self.bits - 1)
        steps = torch.exp2(self.columns[f"{name}_exp"].float())
        steps = steps.repeat_interleave(self.block_size, -1)[..., :dim]
        rows: Tensor = (mantissas * steps).to(self.state["like"].dtype)
        return rows


def to_blocks(rows: Tensor, bits: int, size: int) -> tuple[Tensor, Tensor]:
    """Packed mantissas and exponents [..., blocks] int8 of rows [..., D]: x is near m * 2 ** e.

    e is the least at which no |m| of the block is above 2 ** (bits - 1) - 1.
    """
    dim, most = rows.shape[-1], 2 ** (bits - 1) - 1
    blocks = pad(rows.float(), (0, -dim % size)).unflatten(-1, (-1, size))
    largest = blocks.abs().amax(-1)
    exponents = torch.ceil(torch.log2(largest.clamp_min(2.0**-100) / most)).clamp(-126, 127)
    mantissas = (blocks / torch.exp2(exponents)[..., None]).round().clamp(-most, most)
    codes = (mantissas + most + 1).to(torch.uint8).flatten(-2)[..., :dim]
    return pack(codes, bits), exponents.to(torch.int8)


@METHODS.register("accurate_block", paper="Trukhanov and Soloveychik 2024, arXiv:2403.20137")
class AccurateBlock(LearnedCodec):
    """Keeps what left the window in block floating point, channels of keys by their size; ROUNDS.

    A block of channels of a token shares an exponent: x is kept as m 2^e, off by 2^e / 2 at most.
    Channels of keys stand in the order of their largest value, so that outliers share blocks.

    Deviations: the order comes from the prompt's keys, not from the rows of W_k; RoPE's pairs may
    be torn, for codes are multiplied by nobody.
    """

    class Params(CodecParams):
        """bits: of a mantissa with its sign, or "all"; block_size: channels of a block."""

        bits: Annotated[Literal[2, 4, 8, "all"], BeforeValidator(parse_count)] = 4
        block_size: Count = 32

    lossless = ("bits", "all")

    def code(self, k: Tensor, v: Tensor, at: Tensor, kept: Kept, seen: Seen) -> Entries:
        bits, size = self.params.bits, self.params.block_size
        if bits == "all":
            return Entries.of(k, v, at)
        if kept is None:
            sizes = (k if seen is None or seen.keys is None else seen.keys).abs()
            by_size = sizes.amax(1).argsort(-1, descending=True)
            state = {"order": by_size.argsort(-1), "like": v.new_zeros(0)}
        else:
            state = dict(kept.state)
        places = state["order"].argsort(-1)[:, None].expand(-1, k.shape[1], -1)
        k_codes, k_exp = to_blocks(k.gather(-1, places), bits, size)
        v_codes, v_exp = to_blocks(v, bits, size)
        new = BlockEntries.of(k_codes, v_codes, at, k_exp=k_exp, v_exp=v_exp, state=state)
        return replace(new, bits=bits, block_size=size)
