"""RotateKV: a Hadamard rotation over several heads spreads outliers before keys are rounded."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from math import gcd
from typing import Annotated, Literal

import torch
from pydantic import BeforeValidator
from torch import Tensor

from hybrid_kv.config import Count, Tokens, parse_count
from hybrid_kv.entries import Entries
from hybrid_kv.methods.codec import CodecParams, Kept, Seen
from hybrid_kv.methods.turned import TurnedCodec, TurnedEntries
from hybrid_kv.ops.low_bits import decode, encode
from hybrid_kv.plugins import METHODS


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
