"""Codes of keys, from the keys where they lie: one kernel, launched for each width of code."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from hybrid_kv.ops.devices import on
from hybrid_kv.ops.sketch_select import DeviceCodes
from hybrid_kv.ops.triton._common import MIN_DOT, padded

_TILE_KEYS = 64
_BLOCK_CHANNELS = 32


def encode(to: DeviceCodes, keys: Tensor, first: int) -> None:
    """See `sketch_select.encode`."""
    heads, num_keys, dim = keys.shape
    if not keys.numel():
        return
    with on(keys):
        begin = byte = 0
        for num_dims, bits in to.plan.groups:
            lines = num_dims * bits // 32
            _encode_kernel[(triton.cdiv(num_keys, _TILE_KEYS), heads)](
                keys,
                to.key_map,
                to.start,
                to.codes,
                num_keys,
                first,
                to.codes.shape[1],
                keys.stride(0),
                keys.stride(1),
                DIM=dim,
                CHANNELS=_BLOCK_CHANNELS,
                CODE_DIMS=to.plan.num_dims,
                CODE_BYTES=to.plan.code_bytes,
                FIRST_DIM=begin,
                FIRST_BYTE=byte,
                BITS=bits,
                BYTES=4 * lines,
                BLOCK_BYTES=padded(4 * lines, MIN_DOT),
                TILE=_TILE_KEYS,
                num_warps=4,
            )
            begin, byte = begin + num_dims, byte + 4 * lines


@triton.jit(do_not_specialize=["num_keys", "first"])
def _encode_kernel(
    keys,
    key_map,
    start,
    codes,
    num_keys,
    first,
    capacity,
    stride_head,
    stride_key,
    DIM: tl.constexpr,
    CHANNELS: tl.constexpr,
    CODE_DIMS: tl.constexpr,
    CODE_BYTES: tl.constexpr,
    FIRST_DIM: tl.constexpr,
    FIRST_BYTE: tl.constexpr,
    BITS: tl.constexpr,
    BYTES: tl.constexpr,
    BLOCK_BYTES: tl.constexpr,
    TILE: tl.constexpr,
):
    head = tl.program_id(1).to(tl.int64)
    rows = tl.program_id(0) * TILE + tl.arange(0, TILE)
    there = rows < num_keys
    byte = tl.arange(0, BLOCK_BYTES)
    in_group = byte < BYTES
    packed = tl.zeros((TILE, BLOCK_BYTES), tl.int32)
    for part in tl.static_range(8 // BITS):
        # A line of 4 bytes holds 8 / BITS quads of dims, one above the other.
        dims = FIRST_DIM + (byte // 4) * (32 // BITS) + 4 * part + byte % 4
        at = head * CODE_DIMS + dims
        values = tl.zeros((TILE, BLOCK_BYTES), tl.float32)
        for begin in range(0, DIM, CHANNELS):
            channels = begin + tl.arange(0, CHANNELS)
            in_dim = channels < DIM
            from_ = head * stride_head + rows.to(tl.int64)[:, None] * stride_key + channels[None, :]
            some = tl.load(keys + from_, mask=there[:, None] & in_dim[None, :], other=0.0)
            weights = tl.load(
                key_map + at[None, :] * DIM + channels[:, None],
                mask=in_dim[:, None] & in_group[None, :],
                other=0.0,
            )
            values += tl.dot(some.to(tl.float32), weights, input_precision="ieee")
        values += tl.load(start + at, mask=in_group, other=0.0)[None, :]
        # Halves go to the even neighbour, as torch rounds: codes shall not hang on who made them.
        low = tl.floor(values)
        above = values - low
        odd = (low.to(tl.int32) & 1) == 1
        up = (above > 0.5) | ((above == 0.5) & odd)
        code = low.to(tl.int32) + up.to(tl.int32)
        code = tl.minimum(tl.maximum(code, 0), (1 << BITS) - 1)
        packed |= code << (BITS * part)
    to = (head * capacity + first + rows)[:, None] * CODE_BYTES + FIRST_BYTE + byte[None, :]
    tl.store(codes + to, packed.to(tl.uint8), mask=there[:, None] & in_group[None, :])
