"""The engine's attention of prompts: many queries, in tiles that stay in cache, where these pay."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import byref, c_int64
from functools import cache, partial
from time import perf_counter

import torch
from torch import Tensor

from hybrid_kv.errors import ConfigError, ShapeError
from hybrid_kv.ops.native import library
from hybrid_kv.ops.native.attend import ROW_QUERIES, Visible, attend_rows, merge
from hybrid_kv.ops.native.bindings import AMX, FLOATS, PAIRS, PromptStruct
from hybrid_kv.ops.native.library import Pool, find_engine
from hybrid_kv.ops.native.rows import DTYPES, described
from hybrid_kv.types import KEY_BLOCK, BlockMask, PartialAttention


def attend_causal(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    softcap: float | None = None,
    window: int | None = None,
    pool: Pool | None = None,
) -> PartialAttention:
    """See `reference.attend_causal`. Out of many queries is in their dtype."""
    batch, num_heads, new, dim = q.shape
    heads, stored = k.shape[1:3]
    if not (new and heads) or window is not None or num_heads * new > ROW_QUERIES * heads:
        return attend_prompt(q, k, v, scale=scale, softcap=softcap, window=window, pool=pool)
    grouped, old = q.reshape(batch, heads, num_heads // heads * new, dim), stored - new
    attend = partial(attend_rows, grouped, scale=scale, softcap=softcap, pool=pool)
    visible = Visible(torch.arange(new).expand(batch, -1), [new - 1] * batch, new)
    part = attend(k[:, :, old:], v[:, :, old:], visible=visible)
    if old:  # what is older hides from none: to ask each entry would take a third longer
        past = attend(k[:, :, :old], v[:, :, :old])
        part = merge([part, past], torch.float32, pool=pool)
    shape = *q.shape[:3], v.shape[3]
    return PartialAttention(part.out.reshape(shape), part.lse.reshape(q.shape[:3]))


def attend_with_masses(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    softcap: float | None = None,
    pool: Pool | None = None,
) -> tuple[PartialAttention, Tensor]:
    """See `AttentionOps.attend_with_masses`; out in the dtype of q."""
    masses = torch.empty(*q.shape[:2], k.shape[2])
    part = attend_prompt(q, k, v, scale=scale, softcap=softcap, masses=masses, pool=pool)
    return part, masses


def attend_blocks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: BlockMask,
    *,
    scale: float,
    softcap: float | None = None,
    pool: Pool | None = None,
) -> PartialAttention:
    """See `reference.attend_blocks`. Out is in the dtype of q."""
    return attend_prompt(q, k, v, scale=scale, softcap=softcap, mask=mask, pool=pool)


def attend_at(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    *,
    scale: float,
    softcap: float | None = None,
    pool: Pool | None = None,
) -> PartialAttention:
    """See `reference.attend_at`. Out is in the dtype of q."""
    return attend_prompt(q, k, v, scale=scale, softcap=softcap, positions=positions, pool=pool)


def block_masses(
    q: Tensor,
    k: Tensor,
    positions: Tensor,
    *,
    scale: float,
    softcap: float | None = None,
    pool: Pool | None = None,
) -> Tensor:
    """See `reference.block_masses`."""
    masses = torch.empty(*q.shape[:3], k.shape[2] // KEY_BLOCK)
    attend = partial(attend_prompt, scale=scale, softcap=softcap, positions=positions, pool=pool)
    attend(q, k, k, block_masses=masses)
    return masses


def attend_prompt(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    scale: float,
    softcap: float | None = None,
    window: int | None = None,
    causal: bool = True,
    masses: Tensor | None = None,
    mask: BlockMask | None = None,
    positions: Tensor | None = None,
    block_masses: Tensor | None = None,
    arithmetic: int | None = None,
    pool: Pool | None = None,
    engine: ctypes.CDLL | None = None,
) -> PartialAttention:
    """Exact attention of many queries, in tiles that stay in cache.

    Args:
        queries: [B, Hq, T, D] of a dtype of DTYPES; query head h reads KV head h // (Hq / Hkv).
        keys: [B, Hkv, N, D], values: [B, Hkv, N, Dv], of one dtype, rows contiguous.
        window: a query sees this many newest entries up to its own.
        causal: whether the T tokens are the newest entries, and see none after their own; else
            every query sees every entry.
        masses: [B, Hq, N] float32 contiguous, which gets the softmax weights that each entry got
            from all tokens; None where nobody asks.
        mask: the key blocks that are read, of causal attention without window and masses; None for
            all of them.
        positions: [T] int64 ascending rows of the keys, which the tokens see up to their own, of
            causal attention without window, masses and mask; None where they are the newest.
        block_masses: [B, Hq, T, N // KEY_BLOCK] float32 contiguous, which gets the softmax weights
            that each key block got from each token; None where nobody asks. Then nothing else is
            computed: out is empty.
        arithmetic: FLOATS, or of bfloat16 PAIRS or AMX, which round weights; None: the fastest.

    Returns:
        out [B, Hq, T, Dv] in the dtype of the queries, lse [B, Hq, T] float32.

    Raises:
        ShapeError, ConfigError: an argument does not fit.
        BackendUnavailable: there is no engine.
    """
    engine, (batch, heads, count, dim) = find_engine(engine), keys.shape
    fits = queries.dim() == 4 and (queries.shape[0], queries.shape[3]) == (batch, dim)
    if not fits or (queries.shape[1] % heads if heads else queries.shape[1]):
        raise ShapeError(
            f"queries must be [{batch}, a multiple of {heads}, T, {dim}] as the keys, got shape "
            f"{list(queries.shape)}"
        )
    if queries.dtype not in DTYPES:
        raise ConfigError(f"queries must be float32, float16 or bfloat16, got {queries.dtype}")
    if window is not None and (window < 1 or not causal):
        raise ConfigError(f"window must be at least 1, and of causal attention, got {window}")
    if queries.stride(-1) != 1:
        queries = queries.contiguous()
    num_heads, tokens = queries.shape[1:3]
    blocks = count // KEY_BLOCK
    _checked("masses", masses, (batch, num_heads, count), torch.float32)
    _checked("block_masses", block_masses, (batch, num_heads, tokens, blocks), torch.float32)
    if positions is not None:
        positions = _checked("positions", positions.contiguous(), (tokens,), torch.int64)
    listed = None if mask is None else _listed(mask, (batch, heads, tokens, count))
    if arithmetic is None:
        narrow = queries.dtype == keys.dtype == torch.bfloat16
        arithmetic = fastest_arithmetic(engine, dim) if narrow else FLOATS
    asked = PromptStruct(
        *(queries.data_ptr(), (c_int64 * 3)(*queries.stride()[:3]), tokens),
        *(num_heads // max(1, heads) or 1, window or 0, DTYPES[queries.dtype], causal),
        None if listed is None else listed.data_ptr(),
        0 if mask is None else mask.tokens,
        None if positions is None else positions.data_ptr(),
        arithmetic,
    )
    width = 0 if block_masses is not None else values.shape[3]
    out = queries.new_empty((batch, num_heads, tokens, width))
    lse = queries.new_empty((batch, num_heads, tokens), dtype=torch.float32)
    status = engine.hkv_attend_prompt(
        *(None if pool is None else pool.handle, batch, heads, byref(described(keys, values))),
        *(byref(asked), scale, softcap or 0.0, out.data_ptr() if width else None, lse.data_ptr()),
        *(None if wanted is None else wanted.data_ptr() for wanted in (masses, block_masses)),
    )
    if status:
        library.check(engine, status)
    return PartialAttention(out, lse)


@cache
def fastest_arithmetic(engine: ctypes.CDLL, dim: int) -> int:
    """The arithmetic in which tiles of bfloat16 are fastest here; measured once, in 3 ms."""
    there = list(filter(engine.hkv_has_arithmetic, (FLOATS, PAIRS, AMX)))
    if len(there) == 1:
        return FLOATS
    q, k = (torch.ones(1, 1, n, dim, dtype=torch.bfloat16) for n in (256, 1024))
    attend = partial(attend_prompt, q, k, k, scale=0.1, causal=False, engine=engine)
    seconds = [least_seconds(partial(attend, arithmetic=one)) for one in there]
    return int(library.trials.agree(("arithmetic", dim), there[seconds.index(min(seconds))]))


def least_seconds(call: Callable[[], object], clock: Callable[[], float] = perf_counter) -> float:
    """Of two rounds of a trial; one before them, which sets things up, does not count."""

    def taken() -> float:
        begin = clock()
        call()
        return clock() - begin

    call()
    return max(min(taken(), taken()), 1e-9)


def _checked(
    name: str, given: Tensor | None, shape: tuple[int, ...], dtype: torch.dtype
) -> Tensor | None:
    """The array, where it fits what the engine reads or fills; ShapeError where it does not."""
    if given is not None and (
        (given.shape, given.dtype) != (shape, dtype) or not given.is_contiguous()
    ):
        raise ShapeError(
            f"{name} must be {list(shape)} {dtype} in one piece, got {list(given.shape)} "
            f"{given.dtype}"
        )
    return given


def _listed(mask: BlockMask, sizes: tuple[int, int, int, int]) -> Tensor | None:
    """The bytes of a mask for sizes B, Hkv, T and N."""
    batch, heads, tokens, count = sizes
    if mask.tokens < 1:
        raise ConfigError(f"a block must have at least 1 token, got {mask.tokens}")
    shape = (batch, heads, -(-tokens // mask.tokens), count // KEY_BLOCK)
    return _checked("listed", mask.listed.contiguous(), shape, torch.bool)


# Trial of the tiles against torch's kernel, which has matrix instructions where the CPU has some --

_QUERIES, _KEYS = 256, 1024  # one block of either kernel, so that one thread computes it
_CLEARLY = 1.15
"""Times as fast torch's must be to be taken: on less, noise would decide, anew in each process."""


@cache
def tiles_serve(dtype: torch.dtype, dim: int) -> bool:
    """Whether the engine's tiles attend heads of `dim` channels; measured once, in 5 to 25 ms."""
    times: float = library.trials.agree(("tiles", dtype, dim), measure(dtype, dim))
    return times < _CLEARLY


def measure(dtype: torch.dtype, dim: int, clock: Callable[[], float] = perf_counter) -> float:
    """Time of the engine's tiles over that of torch's kernel."""
    from hybrid_kv.ops import fused

    q, k = (torch.ones(1, 1, n, dim, dtype=dtype) for n in (_QUERIES, _KEYS))
    ours = least_seconds(lambda: attend_prompt(q, k, k, scale=0.1, causal=False).out, clock)
    torchs = least_seconds(lambda: fused.attend(q, k, k, scale=0.1).out, clock)
    return ours / torchs
