"""Which back end computes an op: one pure choice, forcible and visible."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hybrid_kv.errors import BackendUnavailable, unknown_name
from hybrid_kv.ops import native, reference, torch_cpu
from hybrid_kv.types import PartialAttention

BACKENDS = ("auto", "reference", "torch_cpu", "native")
_FUSED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def choose_backend(
    requested: str, *, device_type: str, dtype: torch.dtype, plain: bool, pairs: int
) -> str:
    """The back end that attends.

    Args:
        requested: a name of BACKENDS.
        plain: no softcap and no sliding window.
        pairs: queries times keys; the fused kernel takes neither without the other.
    """
    if requested == "reference":
        return "reference"
    fits = device_type == "cpu" and dtype in _FUSED_DTYPES and plain and pairs > 0
    # What the fused kernel cannot express is computed by the definition, under any request.
    return "torch_cpu" if fits else "reference"


@dataclass(frozen=True, slots=True)
class Ops:
    """The ops of one requested back end; shapes and meaning as in `reference`."""

    backend: str = "auto"

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float,
        bias: Tensor | None = None,
        softcap: float | None = None,
    ) -> PartialAttention:
        if self._chosen(q, k, softcap is None) == "torch_cpu":
            return torch_cpu.attend(q, k, v, scale=scale, bias=bias)
        return reference.attend(q, k, v, scale=scale, bias=bias, softcap=softcap)

    def attend_causal(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float,
        softcap: float | None = None,
        window: int | None = None,
    ) -> PartialAttention:
        square = q.shape[2] == k.shape[2]
        plain = square and softcap is None and window is None
        if self._chosen(q, k, plain) == "torch_cpu":
            return torch_cpu.attend_causal(q, k, v, scale=scale)
        return reference.attend_causal(q, k, v, scale=scale, softcap=softcap, window=window)

    def attend_retrieved(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        ids: Tensor,
        *,
        scale: float,
        softcap: float | None = None,
    ) -> PartialAttention:
        """Queries q [H, M, D] over rows ids [H, M, K] of k, v [H, N, D]; a negative id is none.

        The engine reads keys and values where they lie; the others gather them first.
        """
        if self.backend in ("auto", "native") and native.serves(k, v):
            return native.attend_retrieved(q, k, v, ids, scale=scale, softcap=softcap)
        heads, rows = torch.arange(len(ids))[:, None, None], ids.clamp_min(0)
        bias = torch.zeros(ids.shape).masked_fill_(ids < 0, -torch.inf)[:, :, None]
        part = self.attend(
            q[:, :, None], k[heads, rows], v[heads, rows], scale=scale, bias=bias, softcap=softcap
        )
        return PartialAttention(part.out[:, :, 0], part.lse[:, :, 0])

    def page_scores(self, q: Tensor, key_min: Tensor, key_max: Tensor) -> Tensor:
        """[H, M, P] float32 upper bounds of the scores in each page, for queries q [H, M, D].

        key_min, key_max: [H, P, D], the digests of the pages; see `reference.page_scores`.
        """
        if self.backend in ("auto", "native") and native.serves(key_min, key_max):
            return native.page_scores(q, key_min, key_max)
        return reference.page_scores(q, key_min, key_max)

    def _chosen(self, q: Tensor, k: Tensor, plain: bool) -> str:
        pairs = q.shape[2] * k.shape[2]
        return choose_backend(
            self.backend, device_type=q.device.type, dtype=q.dtype, plain=plain, pairs=pairs
        )


def get_ops(backend: str) -> Ops:
    """The ops of a back end.

    Raises:
        ConfigError: no such back end; the message lists the known ones.
        BackendUnavailable: the native engine was asked for by name and is not there.
    """
    if backend not in BACKENDS:
        raise unknown_name("backend", backend, BACKENDS)
    if backend == "native" and (state := native.engine_state()).isa is None:
        raise BackendUnavailable(
            f"backend 'native' cannot serve here: {state.detail}; use backend='auto'"
        )
    return Ops(backend)
