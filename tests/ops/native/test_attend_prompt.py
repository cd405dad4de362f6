"""Attention of prompts in tiles, against the float64 oracle, on every instruction set."""

from __future__ import annotations

import ctypes
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import hybrid_kv.ops.native.prompt as engine_prompt
from hybrid_kv.errors import ConfigError, ShapeError
from hybrid_kv.masses import causal_masses
from hybrid_kv.ops import Ops, reference
from hybrid_kv.ops.native.bindings import AMX, FLOATS, PAIRS
from hybrid_kv.ops.native.library import Pool
from hybrid_kv.ops.native.prompt import attend_prompt
from hybrid_kv.types import KEY_BLOCK, BlockMask
from tests.ops.native.scan_data import pool_of, strided
from tests.oracle import causal, softmax_attention, spread
from tests.tolerances import TOLERANCES, Tolerance


def arithmetics(engine: ctypes.CDLL, dtype: torch.dtype) -> list[int]:
    """How tiles of a dtype are multiplied on this CPU."""
    all_of_them = (FLOATS, PAIRS, AMX) if dtype == torch.bfloat16 else (FLOATS,)
    return list(filter(engine.hkv_has_arithmetic, all_of_them))


CLOSE: Tolerance = {"rtol": 1e-5, "atol": 1e-5}


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
    attend = partial(attend_prompt, q, k, v, scale=0.3, pool=pool, engine=engine, **options)
    parts = [attend(arithmetic=one) for one in arithmetics(engine, dtype)]
    window, everything = options.pop("window", None), not options.pop("causal", True)
    seen = None if everything else causal(new, stored, window)
    k, v = spread(k, query_heads), spread(v, query_heads)
    out, lse = softmax_attention(q, k, v, scale=0.3, visible=seen, **options)
    for part in parts:
        assert part.out.dtype == dtype
        torch.testing.assert_close(part.out.double(), out, **(tolerance or CLOSE))
        torch.testing.assert_close(part.lse.double(), lse, **CLOSE)


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


@pytest.mark.parametrize("dim", [1, 20, 33, 64, 128])
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize(
    ("new", "stored", "window"), [(67, 67, None), (40, 411, 70), (1, 301, None)]
)
def test_bfloat16(
    engine: ctypes.CDLL,
    dim: int,
    softcap: float | None,
    new: int,
    stored: int,
    window: int | None,
) -> None:
    check(
        engine,
        (6, 2, new, stored, dim),
        torch.bfloat16,
        TOLERANCES[torch.bfloat16],
        softcap=softcap,
        window=window,
    )


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


@pytest.mark.parametrize("arithmetic", [PAIRS, AMX])
def test_pairs_are_of_bfloat16_where_the_cpu_has_them(engine: ctypes.CDLL, arithmetic: int) -> None:
    q = torch.randn(1, 2, 5, 8)
    has = arithmetic in arithmetics(engine, torch.bfloat16)
    reason = "pairs are of bfloat16" if has else "does not multiply pairs of bfloat16 so"
    for k in (q, q.bfloat16()):
        with pytest.raises(ConfigError, match=reason):
            attend_prompt(q, k, k, scale=1.0, arithmetic=arithmetic, engine=engine)
    with pytest.raises(ConfigError, match="arithmetic must be that of floats"):
        attend_prompt(q, q, q, scale=1.0, arithmetic=AMX + 1, engine=engine)


def test_pairs_keep_what_is_not_a_number_visible(engine: ctypes.CDLL) -> None:
    for arithmetic in arithmetics(engine, torch.bfloat16):
        for strange in (torch.nan, torch.inf):
            q, k, v = (torch.randn(1, 2, 100, 16).bfloat16() for _ in range(3))
            v[0, 1, 60] = strange
            masses = torch.empty(1, 2, 100)
            part = attend_prompt(
                q, k, v, scale=0.3, masses=masses, arithmetic=arithmetic, engine=engine
            )
            assert not part.out[0, 1, 60:].isfinite().any()
            assert part.out[0, 0].isfinite().all()
            assert masses.isfinite().all()
            k[0, 1, 60] = torch.nan
            part = attend_prompt(
                q, k, v, scale=0.3, masses=masses, arithmetic=arithmetic, engine=engine
            )
            assert part.lse[0, 1, 60:].isnan().all()
            assert part.lse[0, 1, :60].isfinite().all()
            assert masses[0, 1].isnan().any()


def test_what_an_earlier_call_left_has_no_effect(engine: ctypes.CDLL) -> None:
    for arithmetic in arithmetics(engine, torch.bfloat16):
        attend = partial(attend_prompt, scale=0.3, arithmetic=arithmetic, engine=engine)
        q, k = (torch.randn(1, 1, n, 20).bfloat16() for n in (9, 75))
        right = attend(q, k, k).out
        wide = torch.full((1, 1, 300, 128), torch.nan, dtype=torch.bfloat16)
        assert attend(wide, wide, wide).out.isnan().all()
        assert torch.equal(attend(q, k, k).out, right)


def test_torchs_products_and_tiles_do_not_disturb_each_other(engine: ctypes.CDLL) -> None:
    q = torch.randn(1, 2, 300, 64).bfloat16()
    right = [q @ q.mT, torch.nn.functional.scaled_dot_product_attention(q, q, q)]
    for arithmetic in arithmetics(engine, torch.bfloat16):
        part = attend_prompt(q, q, q, scale=0.3, arithmetic=arithmetic, engine=engine)
        found = [q @ q.mT, torch.nn.functional.scaled_dot_product_attention(q, q, q)]
        assert all(map(torch.equal, found, right))
        again = attend_prompt(q, q, q, scale=0.3, arithmetic=arithmetic, engine=engine)
        assert torch.equal(part.out, again.out)


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
    assert engine_prompt.measure(torch.bfloat16, 64, clock([*ours, *torchs])) == ratio


@pytest.fixture
def prompt() -> tuple[Tensor, Tensor]:
    return torch.randn(1, 4, 700, 64), torch.randn(1, 2, 700, 64)


def test_a_trial_decides_on_long_prompts(
    monkeypatch: pytest.MonkeyPatch, prompt: tuple[Tensor, Tensor]
) -> None:
    q, k = prompt
    parts = {}
    for serve, name in ((True, "native"), (False, "torch_cpu")):
        monkeypatch.setattr(engine_prompt, "tiles_serve", lambda dtype, dim, serve=serve: serve)
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
    monkeypatch.setattr(engine_prompt, "tiles_serve", lambda *_: pytest.fail("a trial was made"))
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


def test_masses_of_bfloat16(engine: ctypes.CDLL) -> None:
    q, k = torch.randn(2, 6, 300, 24).bfloat16(), torch.randn(2, 2, 411, 24).bfloat16()
    right = torch.stack([causal_masses(q[i], k[i], scale=0.3) for i in range(2)])
    for arithmetic in arithmetics(engine, torch.bfloat16):
        masses = torch.full((2, 6, 411), torch.nan)
        attend_prompt(q, k, k, scale=0.3, masses=masses, arithmetic=arithmetic, engine=engine)
        torch.testing.assert_close(
            masses, right, rtol=1e-4 if arithmetic == FLOATS else 4e-3, atol=1e-5
        )


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


# Block-sparse attention ---------------------------------------------------------------------------


def masked(
    sizes: tuple[int, int, int, int], tokens: int, share: float = 0.4
) -> tuple[list[Tensor], BlockMask, Tensor]:
    """q, k, v of two sequences, a mask for them, and what each query sees [2, Hq, T, N]."""
    query_heads, heads, new, stored = sizes
    q = torch.randn(2, new, query_heads, 24).transpose(1, 2)
    k, v = (torch.randn(2, heads, stored, 24) for _ in range(2))
    listed = torch.rand(2, heads, -(-new // tokens), stored // KEY_BLOCK) < share
    past = (stored - new + torch.arange(0, new, tokens)) // KEY_BLOCK
    counts = torch.arange(stored // KEY_BLOCK) < past[:, None]
    read = (listed | ~counts).repeat_interleave(KEY_BLOCK, -1)
    rest = torch.ones(*read.shape[:3], stored - read.shape[-1], dtype=torch.bool)
    seen = torch.cat([read, rest], -1).repeat_interleave(tokens, 2)[:, :, :new]
    return [q, k, v], BlockMask(listed, tokens), spread(seen, query_heads) & causal(new, stored)


@pytest.mark.parametrize(
    ("sizes", "tokens"),
    [((6, 2, 300, 500), 96), ((3, 3, 130, 130), 128), ((8, 1, 77, 1000), 5), ((4, 2, 1, 64), 1)],
)
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_blocks_of_a_mask_are_read_and_no_others(
    engine: ctypes.CDLL, sizes: tuple[int, int, int, int], tokens: int, softcap: float | None
) -> None:
    (q, k, v), mask, seen = masked(sizes, tokens)
    given: dict[str, Any] = {"scale": 0.3, "softcap": softcap}
    part = attend_prompt(q, k, v, mask=mask, engine=engine, **given)
    defined = reference.attend_blocks(q, k, v, mask, **given)
    heads = sizes[0]
    out, lse = softmax_attention(q, spread(k, heads), spread(v, heads), visible=seen, **given)
    for got in (part, defined):
        torch.testing.assert_close(got.out.double(), out, **CLOSE)
        torch.testing.assert_close(got.lse.double(), lse, **CLOSE)


def test_a_block_that_is_not_listed_is_not_even_looked_at(engine: ctypes.CDLL) -> None:
    (q, k, v), mask, _ = masked((6, 2, 300, 700), 96, share=0.0)
    k[:, :, : 400 // KEY_BLOCK * KEY_BLOCK] = torch.nan
    assert attend_prompt(q, k, v, scale=0.3, mask=mask, engine=engine).out.isfinite().all()
    whole = BlockMask(torch.ones_like(mask.listed), 96)
    assert attend_prompt(q, k, v, scale=0.3, mask=whole, engine=engine).out.isnan().all()


def test_threads_and_dtypes_of_a_mask(
    engine: ctypes.CDLL, dtype: torch.dtype, tolerance: Tolerance
) -> None:
    tensors, mask, _ = masked((6, 2, 300, 500), 96)
    q, k, v = (tensor.to(dtype) for tensor in tensors)
    defined = reference.attend_blocks(q, k, v, mask, scale=0.3)
    for arithmetic in arithmetics(engine, dtype):
        attend = partial(
            attend_prompt, q, k, v, scale=0.3, mask=mask, arithmetic=arithmetic, engine=engine
        )
        alone = attend()
        with pool_of(engine, 3) as pool:
            shared = attend(pool=pool)
        assert torch.equal(alone.out, shared.out)
        assert torch.equal(alone.lse, shared.lse)
        torch.testing.assert_close(alone.out.float(), defined.out, **tolerance)


def test_masks_that_do_not_fit_are_refused(engine: ctypes.CDLL) -> None:
    (q, k, v), mask, _ = masked((6, 2, 300, 500), 96)
    for wrong in (BlockMask(mask.listed[:, :1], 96), BlockMask(mask.listed.int(), 96)):
        with pytest.raises(ShapeError, match=r"listed must be \[2, 2, 4, 7\] torch.bool in one"):
            attend_prompt(q, k, v, scale=0.3, mask=wrong, engine=engine)
    with pytest.raises(ConfigError, match="a block must have at least 1 token, got 0"):
        attend_prompt(q, k, v, scale=0.3, mask=BlockMask(mask.listed, 0), engine=engine)
    extras: tuple[dict[str, Any], ...] = ({"window": 9}, {"causal": False})
    for extra in extras:
        with pytest.raises(ConfigError, match="blocks of keys are of causal attention, no window"):
            attend_prompt(q, k, v, scale=0.3, mask=mask, engine=engine, **extra)
    masses = torch.empty(2, 6, 500)
    with pytest.raises(ConfigError, match="masses are of attention to all rows, got blocks"):
        attend_prompt(q, k, v, scale=0.3, mask=mask, masses=masses, engine=engine)


def test_queries_of_masks_that_need_gradients_get_them() -> None:
    (q, k, v), mask, _ = masked((6, 2, 100, 300), 96)
    ops = Ops("auto")
    ops.attend_blocks(q.requires_grad_(), k, v, mask, scale=0.3).out.sum().backward()
    assert q.grad is not None
    assert ops.served["attend_blocks"] == "reference"


# Some tokens of a prompt --------------------------------------------------------------------------


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("sizes", [(6, 2, 100, 700), (3, 3, 7, 900), (8, 1, 1, 64), (2, 1, 0, 70)])
def test_tokens_at_places_of_their_own(
    engine: ctypes.CDLL, sizes: tuple[int, int, int, int], softcap: float | None
) -> None:
    heads, kv_heads, tokens, stored = sizes
    q = torch.randn(2, tokens, heads, 24).transpose(1, 2)
    k, v = (strided(torch.randn(2 * kv_heads, stored, 24)).unflatten(0, (2, -1)) for _ in range(2))
    k[:, :, stored // 2] *= 9  # the largest logit comes late
    positions = torch.randint(stored, (tokens,)).sort().values
    seen = torch.arange(stored) <= positions[:, None]
    given: dict[str, Any] = {"scale": 0.3, "softcap": softcap}
    wide = spread(k, heads), spread(v, heads)
    out, lse = softmax_attention(q, *wide, visible=seen, **given)
    part = attend_prompt(q, k, v, positions=positions, engine=engine, **given)
    for got in (part, reference.attend_at(q, k, v, positions, **given)):
        torch.testing.assert_close(got.out.double(), out, **CLOSE)
        torch.testing.assert_close(got.lse.double(), lse, **CLOSE)
    blocks = stored // KEY_BLOCK
    shares = torch.eye(stored).unsqueeze(0).unsqueeze(0).expand(2, heads, -1, -1)
    weights, _ = softmax_attention(q, wide[0], shares, visible=seen, **given)
    wanted = weights[..., : blocks * KEY_BLOCK].unflatten(-1, (blocks, KEY_BLOCK)).sum(-1)
    masses = torch.full((2, heads, tokens, blocks), torch.nan)
    only = attend_prompt(q, k, v, positions=positions, block_masses=masses, engine=engine, **given)
    assert only.out.numel() == 0
    torch.testing.assert_close(only.lse.double(), lse, **CLOSE)
    for found in (masses, reference.block_masses(q, k, positions, **given)):
        torch.testing.assert_close(found.double(), wanted, **CLOSE)


def test_block_masses_of_the_newest_tokens(engine: ctypes.CDLL) -> None:
    q, k = torch.randn(1, 4, 90, 16), torch.randn(1, 2, 400, 16)
    masses = torch.empty(1, 4, 90, 400 // KEY_BLOCK)
    attend_prompt(q, k, k, scale=0.3, block_masses=masses, engine=engine)
    wanted = reference.block_masses(q, k, torch.arange(310, 400), scale=0.3)
    torch.testing.assert_close(masses, wanted)


def test_block_masses_of_what_is_not_a_number(engine: ctypes.CDLL) -> None:
    q, k = torch.randn(1, 2, 2, 16), torch.randn(1, 2, 400, 16)
    k[0, 1, 300] = torch.nan
    masses = torch.empty(1, 2, 2, 400 // KEY_BLOCK)
    positions = torch.tensor([250, 390])
    attend_prompt(q, k, k, scale=0.3, positions=positions, block_masses=masses, engine=engine)
    assert masses[0, 1, 1].isnan().any()
    assert masses[0, 0].isfinite().all()
    assert masses[0, 1, 0].isfinite().all()


def test_wrong_places_are_refused(engine: ctypes.CDLL) -> None:
    q, k = torch.randn(1, 2, 3, 8), torch.randn(1, 2, 100, 8)
    with pytest.raises(ShapeError, match=r"positions must be \[3\] torch.int64 in .*, got \[2\]"):
        attend_prompt(q, k, k, scale=1.0, positions=torch.arange(2), engine=engine)
    for wrong in ([5, 4, 9], [-1, 2, 3], [1, 2, 100]):
        with pytest.raises(ConfigError, match="positions must be ascending rows of the keys"):
            attend_prompt(q, k, k, scale=1.0, positions=torch.tensor(wrong), engine=engine)
    with pytest.raises(ConfigError, match="positions are of causal attention to all rows"):
        attend_prompt(q, k, k, scale=1.0, positions=torch.arange(3), window=2, engine=engine)
    masses = torch.empty(1, 2, 3, 1)
    with pytest.raises(ConfigError, match="block_masses are of attention to all rows, got"):
        attend_prompt(q, k, k, scale=1.0, block_masses=masses, window=2, engine=engine)
    with pytest.raises(ShapeError, match=r"block_masses must be \[1, 2, 3, 1\]"):
        attend_prompt(q, k, k, scale=1.0, block_masses=masses[..., :0], engine=engine)
