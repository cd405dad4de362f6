"""KVQuant: levels where the numbers lie, keys by channel before RoPE, outliers apart."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Literal

import torch
from pydantic import BeforeValidator, Field
from torch import Tensor

from hybrid_kv.config import Tokens, parse_count
from hybrid_kv.entries import Entries
from hybrid_kv.methods.codec import CodecParams, Kept, Seen
from hybrid_kv.methods.outliers import outliers, put_back
from hybrid_kv.methods.turned import TurnedCodec, TurnedEntries
from hybrid_kv.ops.kmeans import kmeans
from hybrid_kv.ops.low_bits import pack, unpack
from hybrid_kv.plugins import METHODS

_SAMPLES = 65536


@dataclass(frozen=True, eq=False, kw_only=True)
class LevelEntries(TurnedEntries):
    """k, v: packed numbers of levels; k_at, k_out, v_at, v_out: outliers; v_range: [2] of a value.
    State: `k_range` [Hkv, 2, D]; `k_levels`, `v_levels` [2 ** bits], between -1 and 1.
    """

    bits: int = 2

    def decoded(self) -> tuple[Tensor, Tensor]:
        column, state, dim = self.columns, self.state, self.state["k_range"].shape[-1]
        k, v = (
            state[f"{name}_levels"][unpack(column[name], self.bits, dim).int()] for name in "kv"
        )
        for keys, (low, high) in zip(self.split(k), state["k_range"], strict=True):
            keys.copy_(low + (keys + 1) / 2 * (high - low))
        low, high = column["v_range"].float().split(1, -1)
        v = (low + (v + 1) / 2 * (high - low)).to(column["v_out"].dtype)
        return (
            put_back(k, column["k_at"], column["k_out"]),
            put_back(v, column["v_at"], column["v_out"]),
        )


@METHODS.register("kvquant", paper="Hooper et al. 2024, arXiv:2401.18079")
class KVQuant(TurnedCodec):
    """Keeps what left the window as 2 ** bits levels that are learned, outliers apart; ROUNDS.

    Keys before RoPE are brought to [-1, 1] by the range of their channel, values by that of their
    token; the levels of each are k-means of such numbers of the prompt. ceil(outlier_ratio D)
    numbers of a token's key and value are kept whole, and the first sink_tokens altogether.

    Lost: precision: up to half the distance of two levels, but for outliers; no entry.
    Deviations: the prompt calibrates, not a text, without weights by sensitivity; each token has as
    many outliers, where the paper has a threshold by channel; 2 or 4 bits, not 3; a page of sink
    tokens, where the authors keep one token or a few.
    """

    class Params(CodecParams):
        """bits: of a number, or "all"; outlier_ratio: of a row, kept whole."""

        sink_tokens: Tokens = 16
        bits: Annotated[Literal[2, 4, "all"], BeforeValidator(parse_count)] = 4
        outlier_ratio: float = Field(default=0.01, ge=0, lt=0.5)

    lossless = ("bits", "all")

    def code(self, k: Tensor, v: Tensor, at: Tensor, kept: Kept, seen: Seen) -> Entries:
        ratio, bits = self.params.outlier_ratio, self.params.bits
        k_range = kept.state["k_range"] if kept else _range(k, ratio)
        low, high = (bound[:, None] for bound in k_range.unbind(1))
        near = 2 * (k - low) / (high - low).clamp_min(1e-20) - 1
        k_at, k_out = outliers(k.to(v.dtype), ratio, near.abs())
        middle = v.float().median(-1, keepdim=True).values
        v_at, v_out = outliers(v, ratio, (v.float() - middle).abs())
        rest = put_back(v.float(), v_at, middle.expand(v_at.shape))
        v_range = torch.stack([rest.amin(-1), rest.amax(-1)], -1).to(v.dtype)
        low, high = v_range.float().split(1, -1)
        inside = 2 * (rest - low) / (high - low).clamp_min(1e-20) - 1
        levels = {} if kept is None else dict(kept.state)
        if kept is None:
            levels = {"k_levels": _levels(near, bits), "v_levels": _levels(inside, bits)}
            levels["k_range"] = k_range
        new = LevelEntries.of(
            _nearest(near, levels["k_levels"], bits),
            _nearest(inside, levels["v_levels"], bits),
            at,
            state=levels,
            **{"k_at": k_at, "k_out": k_out, "v_at": v_at, "v_out": v_out, "v_range": v_range},
        )
        return replace(new, bits=bits)


def _range(k: Tensor, ratio: float) -> Tensor:
    """[Hkv, 2, D]: the lowest and highest number of each channel, less outliers on both sides."""
    cut = int(ratio / 2 * k.shape[1])
    ordered = k.sort(1).values
    return torch.stack([ordered[:, cut], ordered[:, -1 - cut]], 1)


def _levels(x: Tensor, bits: int) -> Tensor:
    """[2 ** bits] ascending levels for numbers between -1 and 1, from what x has of these."""
    some = x.clamp(-1, 1).flatten()[:: max(1, x.numel() // _SAMPLES)].sort().values
    levels = kmeans(some[None, :, None].cpu(), 2**bits, 20)[0].flatten().sort().values
    return torch.nn.functional.pad(levels, (0, 2**bits - len(levels)), value=1.0).to(x.device)


def _nearest(x: Tensor, levels: Tensor, bits: int) -> Tensor:
    """Packed numbers of the nearest levels."""
    between = (levels[1:] + levels[:-1]) / 2
    return pack(torch.bucketize(x.contiguous(), between).to(torch.uint8), bits)
