"""Torch's CUDA attention as we call it; a GPU repeats the comparison with torch's own kernels."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from hybrid_kv.ops import fused, get_ops, reference
from tests.tolerances import TOLERANCES


def kernel(q: Tensor, k: Tensor, v: Tensor, *_: Any, is_causal: bool, scale: float) -> Any:
    """As torch's: heads alike, causal from the upper left, log-sum-exp of padded length."""
    assert q.shape[1] == k.shape[1]
    assert all(t.stride(-1) == 1 for t in (q, k, v))
    bias = None
    if is_causal:
        bias = torch.full((q.shape[2], k.shape[2]), -torch.inf).triu(1)
    out, lse = reference.attend(q, k, v, scale=scale, bias=bias)
    padded = lse.new_full((*lse.shape[:2], -(-lse.shape[2] // 32) * 32), torch.inf)
    padded[:, :, : lse.shape[2]] = lse
    return out.to(q.dtype), padded, None, None


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=str)
def dtype(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.dtype:
    """Each dtype goes to the kernel that is meant for it."""
    wanted, other = (
        ("_efficient", "_flash") if request.param is torch.float32 else ("_flash", "_efficient")
    )
    monkeypatch.setattr(fused, wanted, kernel)
    monkeypatch.setattr(fused, other, None)
    return request.param


@pytest.mark.parametrize("new", [1, 37])
@pytest.mark.parametrize("strided", [False, True])
def test_attention_is_that_of_the_definition(dtype: torch.dtype, new: int, strided: bool) -> None:
    q, k, v = (torch.randn(2, 3, n, 72).to(dtype) for n in (new, 50, 50))
    if strided:
        q = q.transpose(2, 3).contiguous().transpose(2, 3)
    part = fused.attend_on_cuda(q, k, v, scale=0.2)
    expected = reference.attend(q, k, v, scale=0.2)
    torch.testing.assert_close(part.out.float(), expected.out, **TOLERANCES[dtype])
    torch.testing.assert_close(part.lse, expected.lse)
    assert part.out.dtype == dtype


@pytest.mark.parametrize("group", [1, 3])
def test_causal_attention_gives_each_query_head_its_kv_head(dtype: torch.dtype, group: int) -> None:
    q, k, v = (torch.randn(1, heads, 37, 72).to(dtype) for heads in (2 * group, 2, 2))
    part = fused.attend_causal_on_cuda(q, k, v, scale=0.2)
    expected = reference.attend_causal(q, k, v, scale=0.2)
    torch.testing.assert_close(part.out.float(), expected.out, **TOLERANCES[dtype])
    torch.testing.assert_close(part.lse, expected.lse)


@pytest.mark.parametrize(
    ("dim", "dtype_", "biased", "fits"),
    [
        (72, torch.bfloat16, False, True),
        (72, torch.float32, False, True),
        (6, torch.float32, False, False),
        (36, torch.float16, False, False),
        (256, torch.float16, False, True),
        (264, torch.float16, False, False),
        (72, torch.float32, True, False),
    ],
)
def test_what_no_kernel_reads_is_left_to_the_definition(
    dim: int, dtype_: torch.dtype, biased: bool, fits: bool
) -> None:
    q = torch.empty(1, 2, 3, dim, dtype=dtype_)
    assert fused.expresses_on_cuda(q, torch.zeros(3, 4) if biased else None) is fits


@pytest.mark.parametrize("dtype_", [torch.float32, torch.bfloat16], ids=str)
def test_torch_knows_the_calls(dtype_: torch.dtype) -> None:
    """Their arguments, on tensors without values: a version that changes them is found here."""
    q, k = (torch.empty(1, 4, n, 72, dtype=dtype_, device="meta") for n in (37, 50))
    part = fused.attend_on_cuda(q, k, k, scale=0.2)
    assert part.out.shape == q.shape
    assert part.lse.shape == q.shape[:3]


@pytest.mark.gpu(real=True)
@pytest.mark.parametrize("dtype_", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("new", [1, 37, 300])
def test_on_a_gpu_auto_serves_prefill_by_torch(dtype_: torch.dtype, new: int) -> None:
    q, k, v = (torch.randn(1, heads, 300, 72, device="cuda").to(dtype_) for heads in (6, 2, 2))
    ops = get_ops("auto")
    for queries, keys, values in ((q, k, v), (q[:, :, :new], k[:, :, :new], v[:, :, :new])):
        part = ops.attend_causal(queries, keys, values, scale=0.2)
        assert ops.served["attend_causal"] == "torch_cuda"
        expected = reference.attend_causal(queries, keys, values, scale=0.2)
        torch.testing.assert_close(part.out.float(), expected.out, **TOLERANCES[dtype_])
        torch.testing.assert_close(part.lse, expected.lse, rtol=1e-3, atol=1e-3)
    part = ops.attend(q[:, :2, :new], k, v, scale=0.2)
    assert ops.served["attend"] == "torch_cuda"
    expected = reference.attend(q[:, :2, :new], k, v, scale=0.2)
    torch.testing.assert_close(part.out.float(), expected.out, **TOLERANCES[dtype_])
