from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from hybrid_kv.errors import ConfigError
from hybrid_kv.ops import get_ops, reference, reference_pages
from hybrid_kv.ops.operations import BACKENDS, why_unavailable
from hybrid_kv.types import HIDDEN
from tests.oracle import causal, softmax_attention, spread
from tests.tolerances import TOLERANCES, Tolerance

FLOAT32 = TOLERANCES[torch.float32]


USABLE = [name for name in BACKENDS if why_unavailable(name) is None]


@pytest.fixture(params=USABLE)
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def tensors(
    queries: int, keys: int, dtype: torch.dtype = torch.float32, heads: int = 3, dim: int = 72
) -> tuple[Tensor, Tensor, Tensor]:
    sizes = (queries, keys, keys)
    q, k, v = (torch.randn(2, heads, n, dim).to(dtype) for n in sizes)
    return q, k, v


def check(part: Any, exact: tuple[Tensor, Tensor], tolerance: Tolerance = FLOAT32) -> None:
    assert part.lse.dtype == torch.float32
    torch.testing.assert_close(part.out.double(), exact[0], **tolerance)
    torch.testing.assert_close(part.lse.double(), exact[1], **tolerance)


@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (3, 37), (5, 0), (0, 37), (0, 0), (40, 3)])
def test_attention_is_that_of_float64(
    backend: str, dtype: torch.dtype, tolerance: Tolerance, queries: int, keys: int
) -> None:
    q, k, v = tensors(queries, keys, dtype)
    part = get_ops(backend).attend(q, k, v, scale=0.2)
    check(part, softmax_attention(q, k, v, scale=0.2), tolerance)


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize(("group", "new"), [(1, 1), (3, 1), (4, 5), (3, 30)])
def test_a_query_sees_its_own_position_and_those_before(
    backend: str,
    dtype: torch.dtype,
    tolerance: Tolerance,
    group: int,
    new: int,
    softcap: float | None,
) -> None:
    q, k, v = tensors(group * new, 37, dtype)
    positions = torch.stack([torch.randperm(50)[:37] for _ in range(2)])
    positions[0, :5] = HIDDEN
    newest = [30, new + 8]
    positions[1][positions[1] < 10] += 60  # the oldest queries of this row see nothing
    of_queries = torch.tensor(newest)[:, None] + torch.arange(1 - new, 1)
    visible = positions[:, None] <= of_queries.repeat(1, group)[..., None]
    part = get_ops(backend).attend_visible(
        q, k, v, positions, newest, new=new, scale=0.2, softcap=softcap
    )
    exact = softmax_attention(q, k, v, scale=0.2, softcap=softcap, visible=visible[:, None])
    assert exact[1].isinf().any()
    check(part, exact, tolerance)


def test_one_head_of_dim_one_is_served(backend: str) -> None:
    q, k, v = tensors(1, 2, heads=1, dim=1)
    check(get_ops(backend).attend(q, k, v, scale=1.0), softmax_attention(q, k, v, scale=1.0))


def test_a_bias_shifts_logits_and_hides_rows(
    backend: str, dtype: torch.dtype, tolerance: Tolerance
) -> None:
    q, k, v = tensors(5, 37, dtype)
    bias = torch.randn(2, 1, 5, 37).to(dtype).float()  # what the dtype can hold
    bias = bias.masked_fill(torch.rand(2, 1, 5, 37) < 0.3, -torch.inf)
    bias[0, :, 2] = bias[1, :, 4] = -torch.inf
    part = get_ops(backend).attend(q, k, v, scale=0.2, bias=bias)
    check(part, softmax_attention(q, k, v, scale=0.2, bias=bias), tolerance)
    assert part.out[0, :, 2].abs().max() == 0
    assert (part.lse[1, :, 4] == -torch.inf).all()


def test_a_softcap_bounds_logits_before_the_bias(
    backend: str, dtype: torch.dtype, tolerance: Tolerance
) -> None:
    q, k, v = tensors(5, 37, dtype)
    bias = torch.randn(37)
    part = get_ops(backend).attend(q, k, v, scale=1.0, softcap=3.0, bias=bias)
    check(part, softmax_attention(q, k, v, scale=1.0, softcap=3.0, bias=bias), tolerance)


@pytest.mark.parametrize("window", [None, 1, 4, 11, 50])
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize(("new", "stored"), [(37, 37), (5, 37), (1, 37), (0, 3), (0, 0), (1, 1)])
@pytest.mark.parametrize("block_rows", [1, 8, 10**6])
def test_causal_attention_sees_its_window(
    backend: str,
    monkeypatch: pytest.MonkeyPatch,
    new: int,
    stored: int,
    window: int | None,
    softcap: float | None,
    block_rows: int,
) -> None:
    # Blocks smaller and larger than the window, which decides how the band of keys is cut.
    monkeypatch.setattr(reference, "_SCORE_BLOCK_BYTES", block_rows * 4 * 6 * max(1, stored))
    q = torch.randn(1, 6, new, 24)
    k, v = torch.randn(1, 2, stored, 24), torch.randn(1, 2, stored, 24)
    part = get_ops(backend).attend_causal(q, k, v, scale=0.3, softcap=softcap, window=window)
    exact = softmax_attention(
        q,
        spread(k, 6),
        spread(v, 6),
        scale=0.3,
        softcap=softcap,
        visible=causal(new, stored, window),
    )
    check(part, exact)


def test_causal_attention_keeps_its_precision(
    backend: str, dtype: torch.dtype, tolerance: Tolerance
) -> None:
    q, k, v = (torch.randn(2, heads, 37, 72).to(dtype) for heads in (6, 2, 2))
    exact = softmax_attention(q, spread(k, 6), spread(v, 6), scale=0.1, visible=causal(37, 37))
    check(get_ops(backend).attend_causal(q, k, v, scale=0.1), exact, tolerance)


def test_a_narrow_window_scores_two_windows_of_keys_at_most(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sizes: list[int] = []
    plain = reference.attend

    def spy(q: Tensor, k: Tensor, *args: Any, **kwargs: Any) -> Any:
        sizes.append(k.shape[2])
        return plain(q, k, *args, **kwargs)

    monkeypatch.setattr(reference, "attend", spy)
    monkeypatch.setattr(reference, "_SCORE_BLOCK_BYTES", 1)
    q = torch.randn(1, 2, 400, 8)
    reference.attend_causal(q, q, q, scale=1.0, window=16)
    assert max(sizes) < 2 * 16


def test_queries_in_blocks_equal_queries_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = tensors(23, 37)
    bias = torch.randn(2, 3, 23, 37)
    once = reference.attend(q, k, v, scale=0.2, bias=bias)
    monkeypatch.setattr(reference, "_SCORE_BLOCK_BYTES", 4 * 2 * 3 * 37 * 5)
    blocks = reference.attend(q, k, v, scale=0.2, bias=bias)
    torch.testing.assert_close(blocks, once, **FLOAT32)


def test_page_scores_are_never_below_any_score(dtype: torch.dtype) -> None:
    for _ in range(20):
        keys = torch.randn(2, 5, 16, 72).to(dtype)
        q = torch.randn(2, 3, 72).to(dtype)
        low, high = reference_pages.page_digests(keys)
        bounds = reference_pages.page_scores(q, low, high)
        best = torch.einsum("hmd,hpsd->hmps", q.double(), keys.double()).amax(-1)
        slack = 1e-5 * torch.einsum("hmd,hpsd->hmps", q.abs().double(), keys.abs().double()).amax(
            -1
        )
        assert (bounds.double() >= best - slack).all()


def test_the_bound_of_a_page_of_one_key_is_its_score() -> None:
    keys, q = torch.randn(2, 5, 1, 72), torch.randn(2, 3, 72)
    bounds = reference_pages.page_scores(q, *reference_pages.page_digests(keys))
    exact = torch.einsum("hmd,hpsd->hmp", q.double(), keys.double())
    torch.testing.assert_close(bounds.double(), exact, rtol=1e-5, atol=1e-4)


def test_an_unknown_backend_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="unknown backend 'torch_gpu'; did you mean 'torch_cpu'"):
        get_ops("torch_gpu")
