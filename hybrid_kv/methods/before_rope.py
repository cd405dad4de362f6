"""KVQuant and RotateKV: keys are coded before their positions are rotated into them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from math import gcd
from typing import Annotated, Literal

import torch
from pydantic import BeforeValidator, Field
from torch import Tensor

from hybrid_kv.config import Count, Tokens, parse_count
from hybrid_kv.entries import Entries
from hybrid_kv.methods.codec import (
    CodecParams,
    Kept,
    Seen,
    TurnedCodec,
    TurnedEntries,
    decode,
    encode,
    outliers,
    pack,
    put_back,
    unpack,
)
from hybrid_kv.ops.tail import kmeans
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


@lru_cache(maxsize=8)
def hadamard(size: int, device: torch.device) -> Tensor:
    """[size, size] orthonormal and float32: Hadamard matrices of powers of two, largest first.

    Kept on the device, for to send them is to wait for it.
    """
    blocks = []
    for bit in reversed(range(size.bit_length())):
        if size >> bit & 1:
            block = torch.ones(1, 1)
            for _ in range(bit):
                block = torch.cat([torch.cat([block, block], 1), torch.cat([block, -block], 1)])
            blocks.append(block / len(block) ** 0.5)
    with torch.inference_mode(False):
        return torch.block_diag(*blocks).to(device)  # type: ignore[no-any-return]


@dataclass(frozen=True, eq=False, kw_only=True)
class RotatedEntries(TurnedEntries):
    """k, v: codes of rotated rows. k_scales, v_scales: [2, groups] of a row."""

    bits: int = 2
    group_size: int = 1
    together: int = 1

    def decoded(self) -> tuple[Tensor, Tensor]:
        k, v = self._decoded("k"), self._decoded("v")
        keys = torch.zeros_like(k)
        back = rotated(torch.stack(self.split(k)), self.together, transposed=True)
        for into, head in zip(self.split(keys), back, strict=True):
            into.copy_(head)
        return keys, (v @ hadamard(v.shape[-1], v.device).T).to(self.columns["v_scales"].dtype)

    def _decoded(self, name: str) -> Tensor:
        scales = self.columns[f"{name}_scales"].repeat_interleave(self.group_size, -1)
        dim = len(self.state["dim"])
        return decode(self.columns[name], scales[..., :dim], self.bits).float()


def rotated(rows: Tensor, together: int, *, transposed: bool = False) -> Tensor:
    """Rows [Hkv, n, D] turned with those of `together` heads that follow each other."""
    heads, _, dim = rows.shape
    matrix = hadamard(together * dim, rows.device)
    flat = rows.unflatten(0, (-1, together)).transpose(1, 2).flatten(2)
    turned = flat @ (matrix.T if transposed else matrix)
    back: Tensor = turned.unflatten(-1, (together, dim)).transpose(1, 2).reshape(heads, -1, dim)
    return back


@METHODS.register("rotate_kv", paper="Su et al. 2025, arXiv:2501.16383")
class RotateKV(TurnedCodec):
    """Keeps what left the window rotated and in 2 or 4 bits, by token; ROUNDS.

    Keys before RoPE times a Hadamard matrix over several heads, values over their own, then rounded
    by token in groups of channels; both are turned back when they are read. sink_tokens stay whole.

    Deviations: channels are not reordered before; sinks are the first tokens, not those of massive
    activations; sizes that are no power of two are cut into such.
    """

    class Params(CodecParams):
        """bits: of a number, or "all"; group_size: channels in a group; heads_together: KV heads
        that are rotated as one, where so many divide them.
        """

        bits: Annotated[Literal[2, 4, "all"], BeforeValidator(parse_count)] = 2
        group_size: Count = 64
        heads_together: Count = 4
        sink_tokens: Tokens = 16

    lossless = ("bits", "all")

    def code(self, k: Tensor, v: Tensor, at: Tensor, kept: Kept, seen: Seen) -> Entries:
        bits, size = self.params.bits, self.params.group_size
        together = gcd(len(k), self.params.heads_together)
        turned = (rotated(k, together), v.float() @ hadamard(v.shape[-1], v.device))
        (k, k_scales), (new_v, v_scales) = (
            encode(rows.to(v.dtype), bits, size, axis=-1) for rows in turned
        )
        state = {"dim": v.new_zeros(v.shape[-1], dtype=torch.uint8)}
        new = RotatedEntries.of(k, new_v, at, k_scales=k_scales, v_scales=v_scales, state=state)
        return replace(new, bits=bits, group_size=size, together=together)
