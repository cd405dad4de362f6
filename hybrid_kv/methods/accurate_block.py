"""Accurate Block Quantization: block floating point, channels in the order of their size."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Literal

import torch
from pydantic import BeforeValidator
from torch import Tensor
from torch.nn.functional import pad

from hybrid_kv.config import Count, parse_count
from hybrid_kv.entries import Entries
from hybrid_kv.methods.codec import CodecParams, Kept, LearnedCodec, Seen
from hybrid_kv.ops.low_bits import pack, unpack
from hybrid_kv.plugins import METHODS


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
