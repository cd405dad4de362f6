"""Keys and values in fewer channels: CSKV, MatryoshkaKV, the keys of ShadowKV, and ThinK."""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from pydantic import Field
from torch import Tensor

from hybrid_kv.config import Count, Ratio, Tokens
from hybrid_kv.entries import Entries
from hybrid_kv.methods.codec import Codec, CodecParams, Kept, Seen, TurnedCodec, TurnedEntries
from hybrid_kv.plugins import METHODS
from hybrid_kv.types import Needs

_ROWS = 2
"""Times as many tokens as directions, or fewer directions say nothing of later tokens."""


@dataclass(frozen=True, eq=False, kw_only=True)
class LowRankEntries(TurnedEntries):
    """k, v: [capacity, R / Hkv], each head holding a part of its token's R coefficients. State:
    `k_basis`, `v_basis` [R, Hkv * D], `k_mean`, `v_mean` [Hkv * D], float32.
    """

    def decoded(self) -> tuple[Tensor, Tensor]:
        k, v = self._expanded("k"), self._expanded("v")
        return k, v.to(self.v.dtype)

    def _expanded(self, name: str) -> Tensor:
        coefficients = torch.cat(self.split(name), -1).float()  # all heads hold the same tokens
        rows = coefficients @ self.state[f"{name}_basis"] + self.state[f"{name}_mean"]
        by_head = rows.unflatten(-1, (self.num_heads, -1)).movedim(1, 0)
        whole = rows.new_zeros(len(self.positions), by_head.shape[-1])
        for into, head in zip(self.split(whole), by_head, strict=True):
            into.copy_(head)
        return whole


class LowRankParams(CodecParams):
    """rank_ratio: coefficients of a token, as a share of its channels in all heads."""

    sink_tokens: Tokens = 16
    rank_ratio: Ratio = 0.5


class LowRank(TurnedCodec):
    """Keeps coefficients along directions that are learned when the prompt is complete.

    Where fewer than twice as many tokens as directions leave the window then, all directions stay.
    The first sink_tokens are kept whole: their keys are unlike all others, and every query attends
    them.

    Lost: what lies outside of the directions that stay.
    """

    lossless = ("rank_ratio", 1.0)

    def ranks(self, channels: int) -> tuple[int, int]:
        """Directions of keys and values of all heads together."""
        rank = round(self.params.rank_ratio * channels)
        return rank, rank

    @abstractmethod
    def basis(self, rows: Tensor, rank: int) -> tuple[Tensor, Tensor]:
        """Orthonormal directions [R, Hkv * D] and their origin [Hkv * D], of rows [Hkv, n, D]."""

    def code(self, k: Tensor, v: Tensor, at: Tensor, kept: Kept, seen: Seen) -> Entries:
        heads, count, dim = k.shape
        if kept is None:
            state: dict[str, Any] = {}
            for name, rows, wanted in zip("kv", (k, v), self.ranks(heads * dim), strict=True):
                rank = heads * max(1, math.ceil(wanted / heads))
                if rank >= heads * dim or count < _ROWS * rank:
                    directions = torch.eye(heads * dim, device=k.device)
                    mean = directions.new_zeros(heads * dim)
                else:
                    directions, mean = self.basis(rows.float(), rank)
                state |= {f"{name}_basis": directions, f"{name}_mean": mean}
        else:
            state = dict(kept.state)
        parts = []
        for name, rows in (("k", k), ("v", v)):
            flat = rows.float().transpose(0, 1).flatten(1) - state[f"{name}_mean"]
            coefficients = (flat @ state[f"{name}_basis"].T).to(v.dtype)
            parts.append(coefficients.unflatten(-1, (heads, -1)).transpose(0, 1))
        return LowRankEntries.of(parts[0], parts[1], at, state=state)


def joint_directions(rows: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """The right singular vectors of all heads' rows behind each other, largest values first."""
    flat = rows.transpose(0, 1).flatten(1)
    vectors: Tensor = torch.linalg.eigh(flat.T @ flat).eigenvectors
    return vectors[:, -rank:].flip(-1).T.contiguous(), flat.new_zeros(flat.shape[1])


def principal_directions(rows: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """The principal components of single heads that have the largest variances of all heads'."""
    mean = rows.mean(1)
    shifted = rows - mean[:, None]
    variances, vectors = torch.linalg.eigh(shifted.transpose(1, 2) @ shifted)
    best = variances.flatten().topk(rank).indices.sort().values
    whole = torch.block_diag(*(head.T for head in vectors))  # [Hkv * D, Hkv * D], by component
    return whole[best], mean.flatten()


@METHODS.register("cskv", paper="Wang et al. 2024, arXiv:2409.10593")
class CSKV(LowRank):
    """Keeps what left the window by a fifth as many coefficients as channels; ROUNDS.

    K = (K B^T) B, B the first right singular vectors of a layer's keys before RoPE, all heads
    behind each other, and so with values. What lies outside of them is lost. The first sink_tokens
    stay whole.

    Deviations: the paper trains the two matrices for reconstruction; here they are the SVD of the
    prompt's keys and values, not of the weights.
    """

    class Params(LowRankParams):
        """rank_ratio: coefficients of a token, as a share of its channels in all heads."""

        rank_ratio: Ratio = 0.2

    def basis(self, rows: Tensor, rank: int) -> tuple[Tensor, Tensor]:
        return joint_directions(rows, rank)


@METHODS.register("matryoshka_kv", paper="Lin et al. 2024, arXiv:2410.14731")
class MatryoshkaKV(LowRank):
    """Keeps what left the window by principal components of each head; ROUNDS.

    k = mean + (k - mean) U U^T, U orthogonal by head, its first components; of all heads of a layer
    those with the largest variances stay, so that heads have ranks of their own. What the others
    hold is lost. The first sink_tokens stay whole.

    Deviations: the paper trains U and searches ranks on a calibration set; this is its untrained
    start, PCA of the prompt's keys before RoPE and values.
    """

    class Params(LowRankParams):
        """rank_ratio: coefficients of a token, as a share of its channels in all heads."""

    def basis(self, rows: Tensor, rank: int) -> tuple[Tensor, Tensor]:
        return principal_directions(rows, rank)


@METHODS.register("shadowkv_keys", paper="Sun et al. 2024, arXiv:2410.21465, section 4.1")
class ShadowKVKeys(LowRank):
    """Keeps keys that left the window by coefficients along singular vectors, values whole; ROUNDS.

    K = (K B^T) B, B the first right singular vectors of the prompt's keys before RoPE, all heads
    behind each other (the paper: 160 of 1024). ShadowKV's other half, values in host memory found
    by landmarks, is not here (see shadowkv): everything is attended on the device.

    Deviations: that other half; chunks that no landmark stands for well (the paper's outliers) are
    rounded as all others, where the authors keep their keys whole; the first sink_tokens stay whole
    whether they are such chunks or not.
    """

    class Params(LowRankParams):
        """rank_ratio: coefficients of a token's keys, as a share of its channels in all heads."""

        rank_ratio: Ratio = 160 / 1024

    def ranks(self, channels: int) -> tuple[int, int]:
        return round(self.params.rank_ratio * channels), channels

    def basis(self, rows: Tensor, rank: int) -> tuple[Tensor, Tensor]:
        return joint_directions(rows, rank)


class ThinEntries(Entries):
    """k: [capacity, C], the channels [Hkv, C] int64 in the state; the others read as 0."""

    def read(self) -> tuple[Tensor, Tensor]:
        k = torch.zeros_like(self.v)
        for head, channels in enumerate(self.state["channels"]):
            self.split(k)[head][:, channels] = self.split("k")[head]
        return k, self.v


@METHODS.register("think", paper="Xu et al. 2024, arXiv:2407.21018")
class ThinK(Codec):
    """Keeps all values, and of the keys that left the window the best channels; DROPS the others.

    By KV head the channels of the highest |Q[:, i]| |K[:, i]| stay: Q the last observed_tokens
    queries of the prompt, of the whole group of query heads, K its keys. Logits lose what the
    others add.

    Kept: every entry; of the keys that left the window some channels.
    Lost: what the other channels add to the logits.
    Deviations: the choice serves for what leaves the window later, too; what is gone reads as 0,
    queries are not thinned; without SnapKV, which the paper puts before it (see chain).
    """

    class Params(CodecParams):
        """channel_ratio: channels that stay; observed_tokens: last queries that choose them."""

        channel_ratio: float = Field(default=0.6, gt=0, le=1)
        observed_tokens: Count = 32
        window_tokens: Tokens = 32

    lossless = ("channel_ratio", 1.0)

    @property
    def needs(self) -> Needs:
        return Needs(last_queries=self.params.observed_tokens)

    def code(self, k: Tensor, v: Tensor, at: Tensor, kept: Kept, seen: Seen) -> Entries:
        state = kept.state if kept else {"channels": self._choose(k, seen)}
        thin = k.gather(-1, state["channels"][:, None].expand(-1, k.shape[1], -1))
        return ThinEntries.of(thin, v, at, state=state)

    def _choose(self, k: Tensor, seen: Seen) -> Tensor:
        """[Hkv, C] channels that stay, in order."""
        if seen is None or seen.last_queries is None or seen.keys is None:
            return torch.arange(k.shape[-1], device=k.device).expand(len(k), -1)
        q = seen.last_queries.unflatten(0, (len(k), -1)).flatten(1, 2).float()
        scores = q.square().sum(1) * seen.keys.float().square().sum(1)
        count = max(1, int(self.params.channel_ratio * k.shape[-1]))
        return torch.sort(torch.topk(scores, count).indices).values
