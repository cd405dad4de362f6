"""Attention of prompts in tiles, against the float64 oracle, on every instruction set."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch
from torch import Tensor

from hybrid_kv.errors import ConfigError, ShapeError
from hybrid_kv.masses import causal_masses
from hybrid_kv.ops import Ops, tile_trial
from hybrid_kv.ops.native.prompt import attend_prompt
from hybrid_kv.ops.native.workers import Pool
from tests.ops.native.scan_data import pool_of, strided
from tests.oracle import causal, softmax_attention, spread
from tests.tolerances import Tolerance

FLOATS: Tolerance = {"rtol": 1e-5, "atol": 1e-5}


def check(
    engine: ctypes.CDLL,
    sizes: tuple[int, int, int, int, int],
    dtype: torch.dtype = torch.float32,
    tolerance: Tolerance | None = None,
    pool: Pool | None = None,
    **options: Any,
) -> None:
    """Sizes: query heads, KV heads, new tokens, stored ones, head size."""
    query_heads, heads, new, stored, dim = sizes
    # As models give them: the heads of a token next to each other.
    q = torch.randn(2, new, query_heads, dim).to(dtype).transpose(1, 2)
    k, v = (
        strided(torch.randn(2 * heads, stored, dim).to(dtype)).unflatten(0, (2, heads))
        for _ in range(2)
    )
    part = attend_prompt(q, k, v, scale=0.3, pool=pool, engine=engine, **options)
    assert part.out.dtype == dtype
    window, everything = options.pop("window", None), not options.pop("causal", True)
    seen = None if everything else causal(new, stored, window)
    k, v = spread(k, query_heads), spread(v, query_heads)
    out, lse = softmax_attention(q, k, v, scale=0.3, visible=seen, **options)
    torch.testing.assert_close(part.out.double(), out, **(tolerance or FLOATS))
    torch.testing.assert_close(part.lse.double(), lse, **FLOATS)


@pytest.mark.parametrize("dim", [1, 8, 20, 64, 72, 80, 128, 192, 256])
def test_every_head_size(engine: ctypes.CDLL, dim: int) -> None:
    check(engine, (4, 2, 67, 67, dim))


@pytest.mark.parametrize("window", [None, 1, 5, 70, 1000])
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize(
    "sizes", [(3, 1, 300, 300, 24), (6, 2, 40, 411, 24), (7, 1, 1, 300, 24), (2, 2, 0, 9, 24)]
)
def test_windows_softcaps_and_what_was_there_before(
    engine: ctypes.CDLL,
    sizes: tuple[int, int, int, int, int],
    window: int | None,
    softcap: float | None,
) -> None:
    check(engine, sizes, window=window, softcap=softcap)


def test_queries_that_see_everything(engine: ctypes.CDLL) -> None:
    check(engine, (4, 2, 90, 300, 36), causal=False)
    check(engine, (4, 2, 300, 3, 36), causal=False)


def test_every_dtype_keeps_its_precision(
    engine: ctypes.CDLL, dtype: torch.dtype, tolerance: Tolerance
) -> None:
    check(engine, (6, 2, 130, 270, 72), dtype, tolerance)


def test_threads_give_the_same_bits(engine: ctypes.CDLL) -> None:
    q, k, v = (torch.randn(1, heads, 400, 32) for heads in (6, 2, 2))
    alone = attend_prompt(q, k, v, scale=0.3, engine=engine)
    with pool_of(engine, 3) as pool:
        shared = attend_prompt(q, k, v, scale=0.3, pool=pool, engine=engine)
    assert torch.equal(alone.out, shared.out)
    assert torch.equal(alone.lse, shared.lse)


def test_chunks_of_a_prompt_give_what_it_gives_at_once(engine: ctypes.CDLL) -> None:
    q, k, v = (torch.randn(1, heads, 333, 32) for heads in (6, 2, 2))
    whole = attend_prompt(q, k, v, scale=0.3, engine=engine)
    for first, last in ((0, 100), (100, 101), (101, 333)):
        part = attend_prompt(
            q[:, :, first:last], k[:, :, :last], v[:, :, :last], scale=0.3, engine=engine
        )
        torch.testing.assert_close(part.out, whole.out[:, :, first:last])
        torch.testing.assert_close(part.lse, whole.lse[:, :, first:last])


def test_large_and_negative_scores(engine: ctypes.CDLL) -> None:
    q, k, v = (torch.randn(1, 1, 300, 32) for _ in range(3))
    for scale in (30.0, -2.0, 0.0):
        part = attend_prompt(q, k, v, scale=scale, engine=engine)
        out, lse = softmax_attention(q, k, v, scale=scale, visible=causal(300, 300))
        torch.testing.assert_close(part.out.double(), out, rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(part.lse.double(), lse, rtol=1e-5, atol=1e-3)


def test_what_is_not_a_number_stays_visible(engine: ctypes.CDLL) -> None:
    q, k, v = (torch.randn(1, 2, 100, 16) for _ in range(3))
    k[0, 1, 60] = torch.nan
    masses = torch.empty(1, 2, 100)
    part = attend_prompt(q, k, v, scale=0.3, masses=masses, engine=engine)
    assert masses[0, 1].isnan().any()
    assert masses[0, 0].isfinite().all()
    q[0, 0, 5] = torch.nan  # no score of this row is a number
    attend_prompt(q, k, v, scale=0.3, masses=masses, engine=engine)
    assert masses[0, 0].isnan().any()
    assert part.out[0, 1, 60:].isnan().all()
    assert part.lse[0, 1, 60:].isnan().all()
    assert part.out[0, 0].isfinite().all()
    assert part.out[0, 1, :60].isfinite().all()


def test_no_heads_and_no_rows_give_nothing(engine: ctypes.CDLL) -> None:
    for rows, query_heads, heads in ((1, 0, 0), (0, 4, 2)):
        q, k = torch.randn(rows, query_heads, 70, 8), torch.randn(rows, heads, 70, 8)
        masses = torch.empty(rows, query_heads, 70)
        for sees_later in (False, True):
            part = attend_prompt(
                q, k, k, scale=1.0, causal=not sees_later, masses=masses, engine=engine
            )
            assert part.out.shape == q.shape
            assert part.lse.shape == q.shape[:3]
        assert Ops("native").attend_causal(q, k, k, scale=1.0).out.shape == q.shape


def test_what_does_not_fit_is_refused(engine: ctypes.CDLL) -> None:
    q, k = torch.randn(1, 3, 5, 8), torch.randn(1, 2, 5, 8)
    with pytest.raises(ShapeError, match=r"queries must be \[1, a multiple of 2, T, 8\]"):
        attend_prompt(q, k, k, scale=1.0, engine=engine)
    q = torch.randn(1, 2, 6, 8)
    with pytest.raises(ConfigError, match="a key for each token"):
        attend_prompt(q, k, k, scale=1.0, engine=engine)
    with pytest.raises(ConfigError, match=r"window must be at least 1, .* got 0"):
        attend_prompt(q[:, :, :5], k, k, scale=1.0, window=0, engine=engine)
    with pytest.raises(ConfigError, match=r"got torch\.float64"):
        attend_prompt(q.double(), k, k, scale=1.0, engine=engine)


# The choice between tiles and torch's kernel ------------------------------------------------------


def clock(times: list[float]) -> Any:
    """A clock by which successive calls take these times."""
    ticks = [tick for time in times for tick in (0.0, time)]
    return lambda: ticks.pop(0)


@pytest.mark.parametrize(
    ("ours", "torchs", "ratio"), [([2, 1], [2, 3], 0.5), ([3, 3], [1, 9], 3.0)]
)
def test_a_trial_compares_the_best_rounds(
    ours: list[float], torchs: list[float], ratio: float
) -> None:
    assert tile_trial.measure(torch.bfloat16, 64, clock([*ours, *torchs])) == ratio


@pytest.fixture
def prompt() -> tuple[Tensor, Tensor]:
    return torch.randn(1, 4, 700, 64), torch.randn(1, 2, 700, 64)


def test_a_trial_decides_on_long_prompts(
    monkeypatch: pytest.MonkeyPatch, prompt: tuple[Tensor, Tensor]
) -> None:
    q, k = prompt
    parts = {}
    for serve, name in ((True, "native"), (False, "torch_cpu")):
        monkeypatch.setattr(tile_trial, "tiles_serve", lambda dtype, dim, serve=serve: serve)
        ops = Ops("auto")
        parts[name] = ops.attend_causal(q, k, k, scale=0.1)
        ops.attend(q, k.repeat_interleave(2, 1), k.repeat_interleave(2, 1), scale=0.1)
        assert ops.served == {"attend_causal": name, "attend": name}
        ops.attend_causal(q[:, :, -400:], k, k, scale=0.1)
        assert ops.served["attend_causal"] == name
    torch.testing.assert_close(*(part.out for part in parts.values()))
    torch.testing.assert_close(*(part.lse for part in parts.values()))


def test_short_prompts_and_named_back_ends_need_no_trial(
    monkeypatch: pytest.MonkeyPatch, prompt: tuple[Tensor, Tensor]
) -> None:
    monkeypatch.setattr(tile_trial, "tiles_serve", lambda *_: pytest.fail("a trial was made"))
    q, k = prompt
    for backend, served in (("native", "native"), ("torch_cpu", "torch_cpu")):
        ops = Ops(backend)
        ops.attend_causal(q, k, k, scale=0.1)
        assert ops.served["attend_causal"] == served
    ops = Ops("auto")
    ops.attend_causal(q[:, :, :99], k[:, :, :99], k[:, :, :99], scale=0.1)
    assert ops.served["attend_causal"] == "native"


def test_queries_that_need_gradients_get_them(prompt: tuple[Tensor, Tensor]) -> None:
    q, k = prompt
    ops = Ops("auto")
    for tokens in (700, 20, 2):
        asked = q[:, :, :tokens].clone().requires_grad_()
        seen = k[:, :, :tokens]
        ops.attend_causal(asked, seen, seen, scale=0.1).out.sum().backward()
        assert asked.grad is not None
        assert asked.grad.abs().sum() > 0


# What a prompt's entries got ----------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [(6, 2, 300, 300), (3, 3, 40, 411), (7, 1, 1, 300), (2, 2, 0, 9)])
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_masses_are_what_every_entry_got(
    engine: ctypes.CDLL, sizes: tuple[int, int, int, int], softcap: float | None
) -> None:
    query_heads, heads, new, stored = sizes
    q, k = torch.randn(2, query_heads, new, 24), torch.randn(2, heads, stored, 24)
    masses = torch.full((2, query_heads, stored), torch.nan)
    part = attend_prompt(q, k, k, scale=0.3, softcap=softcap, masses=masses, engine=engine)
    plain = attend_prompt(q, k, k, scale=0.3, softcap=softcap, engine=engine)
    torch.testing.assert_close(part.out, plain.out)
    torch.testing.assert_close(part.lse, plain.lse)
    for row in range(2):
        right = causal_masses(q[row], k[row], scale=0.3, softcap=softcap)
        torch.testing.assert_close(masses[row], right, rtol=1e-4, atol=1e-5)


def test_threads_give_the_same_masses(engine: ctypes.CDLL) -> None:
    q, k = torch.randn(1, 6, 700, 16), torch.randn(1, 2, 700, 16)
    found = []
    for threads in (1, 3):
        masses = torch.empty(1, 6, 700)
        with pool_of(engine, threads) as pool:
            attend_prompt(q, k, k, scale=0.3, masses=masses, pool=pool, engine=engine)
        found.append(masses)
    assert torch.equal(*found)


def test_masses_without_the_engine_are_the_same() -> None:
    q, k = torch.randn(2, 6, 70, 24), torch.randn(2, 2, 90, 24)
    parts = []
    for backend in ("native", "torch_cpu", "reference"):
        ops = Ops(backend)
        parts.append(ops.attend_with_masses(q, k, k, scale=0.3))
        assert ops.served["attend_with_masses"] == (
            "native" if backend == "native" else "reference"
        )
    for part, masses in parts[1:]:
        torch.testing.assert_close(part.out, parts[0][0].out, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(masses, parts[0][1], rtol=1e-4, atol=1e-5)


def test_masses_of_another_form_are_refused(engine: ctypes.CDLL) -> None:
    q = torch.randn(1, 2, 5, 8)
    for masses in (torch.empty(1, 2, 4), torch.empty(1, 2, 5).double(), torch.empty(1, 5, 2).mT):
        with pytest.raises(ShapeError, match=r"masses must be \[1, 2, 5\] torch.float32"):
            attend_prompt(q, q, q, scale=1.0, masses=masses, engine=engine)
