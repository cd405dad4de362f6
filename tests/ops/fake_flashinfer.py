"""FlashInfer's documented interface in torch: what the adapter may rely on, and no more.

Written from the documentation of `BatchDecodeWithPagedKVCacheWrapper` in its mode for CUDA graphs:
`plan` takes lengths and copies everything into the caller's buffers, `run` reads those buffers, and
log-sum-exps have base 2.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


class BatchDecodeWithPagedKVCacheWrapper:
    """The part of it that the adapter uses."""

    made = 0
    plans = 0

    def __init__(
        self,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        paged_kv_indptr_buffer: Tensor | None = None,
        paged_kv_indices_buffer: Tensor | None = None,
        paged_kv_last_page_len_buffer: Tensor | None = None,
    ) -> None:
        assert float_workspace_buffer.dtype == torch.uint8
        assert not float_workspace_buffer.any(), "FlashInfer wants zeros at its first use"
        assert kv_layout == "HND"
        assert use_cuda_graph
        assert paged_kv_indptr_buffer is not None
        assert paged_kv_indices_buffer is not None
        assert paged_kv_last_page_len_buffer is not None
        self._ends, self._ids = paged_kv_indptr_buffer, paged_kv_indices_buffer
        self._fills = paged_kv_last_page_len_buffer
        type(self).made += 1

    def plan(
        self,
        indptr: Tensor,
        indices: Tensor,
        last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        *,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
        logits_soft_cap: float | None,
        sm_scale: float,
    ) -> None:
        assert indptr.device.type == last_page_len.device.type == "cpu"
        assert {t.dtype for t in (indptr, indices, last_page_len)} == {torch.int32}
        assert len(last_page_len) == len(self._fills)
        assert len(indices) == int(indptr[-1]) <= len(self._ids)
        assert q_data_type == kv_data_type
        self._ends.copy_(indptr)
        self._ids[: len(indices)].copy_(indices)
        self._fills.copy_(last_page_len)
        self._shape = (num_qo_heads, num_kv_heads, head_dim, page_size)
        self._dtype, self._cap, self._scale = q_data_type, logits_soft_cap or 0.0, sm_scale
        type(self).plans += 1

    def run(
        self, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor], *, return_lse: bool
    ) -> tuple[Tensor, Tensor]:
        num_qo_heads, num_kv_heads, dim, page_size = self._shape
        k, v = paged_kv_cache
        assert return_lse
        assert q.shape[1:] == (num_qo_heads, dim)
        assert k.shape[1:] == v.shape[1:] == (num_kv_heads, page_size, dim)
        assert q.dtype == k.dtype == self._dtype
        assert num_kv_heads == 1
        outs, lses = [], []
        for request, query in enumerate(q.float()):
            pages = self._ids[self._ends[request] : self._ends[request + 1]].long()
            length = (len(pages) - 1) * page_size + int(self._fills[request])
            keys, values = (t[pages, 0].flatten(0, 1)[:length].float() for t in (k, v))
            logits = query @ keys.T * self._scale
            if self._cap:
                logits = self._cap * torch.tanh(logits / self._cap)
            outs.append(torch.softmax(logits, -1) @ values)
            lses.append(torch.logsumexp(logits, -1) / math.log(2))
        return torch.stack(outs).to(q.dtype), torch.stack(lses)
