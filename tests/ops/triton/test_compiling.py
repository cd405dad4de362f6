"""Every kernel compiles for the GPUs that are meant, none of which is needed for it."""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import pytest
import torch
from packaging.version import Version

pytest.importorskip("triton", reason="Triton is not installed: scripts/check --triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("kernels are interpreted: TRITON_INTERPRET=1", allow_module_level=True)

from hybrid_kv.index._sketch_head import plan_of
from hybrid_kv.ops.devices import Uploads
from hybrid_kv.ops.sketch_select import DeviceCodes
from hybrid_kv.ops.tail import Tail
from hybrid_kv.ops.triton import (
    blocks,
    digests,
    nearest,
    paged,
    sketch_find,
    sketch_scan,
    unread,
)
from hybrid_kv.types import KEY_BLOCK, BlockMask, PartialAttention
from tests.ops.paged_data import Shape, lists, pool, queries
from tests.ops.triton.compiling import Launch, Resources, launches_of, resources, why_no_compiler

if reason := why_no_compiler():
    pytest.skip(reason, allow_module_level=True)

SHARED_BYTES = 101_376
"""What one block may use on sm_89, which has less than sm_90."""

BOUNDS_OF = "3.9"
BOUNDS = {
    "_append_at_kernel": Resources(56, 0, 2_048),
    "_append_kernel": Resources(56, 0, 2_048),
    "_attend_blocks_kernel": Resources(255, 176, 98_304),
    "_attend_kernel": Resources(255, 64, 53_568),
    "_best_kernel": Resources(128, 24, 4_096),
    "_copy_kernel": Resources(38, 0, 0),
    "_empty_kernel": Resources(22, 0, 0),
    "_encode_kernel": Resources(156, 40, 24_576),
    "_limit_kernel": Resources(160, 0, 32),
    "_list_blocks_kernel": Resources(38, 0, 32),
    "_listed_scores_kernel": Resources(255, 104, 1_024),
    "_maxima_kernel": Resources(255, 16, 99_328),
    "_merge_kernel": Resources(34, 0, 0),
    "_prepare_kernel": Resources(22, 0, 0),
    "_quantise_kernel": Resources(56, 0, 512),
    "_ragged_kernel": Resources(255, 64, 53_568),
    "_rank_kernel": Resources(56, 0, 24_576),
    "_recent_kernel": Resources(160, 8, 24_576),
    "_reduce_kernel": Resources(202, 0, 2_048),
    "_rescore_kernel": Resources(122, 0, 1_024),
    "_scan_kernel": Resources(102, 0, 8_192),
    "_scores_kernel": Resources(168, 0, 1_024),
    "_unread_kernel": Resources(64, 0, 4_096),
    "_update_kernel": Resources(45, 0, 2_048),
}
"""The most that a kernel takes in any case, on sm_89 or sm_90, as Triton 3.9 compiles it."""

MULTIPLIES = {
    *("_attend_kernel", "_attend_blocks_kernel", "_ragged_kernel"),
    *("_maxima_kernel", "_rank_kernel", "_recent_kernel"),
}
CASES = {
    "llama": (Shape(heads=8, slots=300, dim=128, group=4), torch.bfloat16),
    "wide": (Shape(heads=4, slots=300, dim=256, group=2), torch.float16),
    "odd": (Shape(heads=3, slots=40, page_size=37, dim=72, group=5, new=2), torch.float16),
    "float32": (Shape(heads=2, slots=300, dim=128, group=1), torch.float32),
}


def attention(shape: Shape, dtype: torch.dtype) -> None:
    q, slots = queries(shape, dtype), lists(shape, shape.slots)
    positions = torch.zeros(shape.new, dtype=torch.int64)
    for softcap in (None, 30.0):
        paged.attend_pages(q, pool(shape, dtype), slots, positions, scale=0.1, softcap=softcap)
    counted = torch.tensor([3])
    paged.attend_pages(q, pool(shape, dtype), slots, positions, scale=0.1, count=counted)


def ragged_attention(shape: Shape, dtype: torch.dtype) -> None:
    rows = torch.zeros(1000, shape.dim, dtype=dtype)
    starts, lengths = [0] * shape.heads, [700] * shape.heads
    for bias in (None, torch.zeros(1000)):
        paged.attend_ragged(
            *(queries(shape, dtype), rows, rows, starts, lengths),
            scale=0.1,
            softcap=30.0,
            bias=bias,
            uploads=Uploads(),
        )


def block_attention(shape: Shape, dtype: torch.dtype) -> None:
    """A chunk of 2,000 tokens in query blocks of 384 rows, and one of a single token."""
    # Of all heads those of 256 float32 are the widest.
    sizes = {(2000, shape.dim), (1, shape.dim), (2000, 256 if dtype.itemsize == 4 else shape.dim)}
    for new, dim in sorted(sizes):
        q = torch.zeros(1, shape.heads * shape.group, new, dim, dtype=dtype)
        k = torch.zeros(1, shape.heads, 7000 + new, dim, dtype=dtype)
        tokens = 384 // shape.group
        listed = -(-new // tokens), (7000 + new) // KEY_BLOCK
        mask = BlockMask(torch.zeros(1, shape.heads, *listed, dtype=torch.bool), tokens)
        for softcap in (None, 30.0):
            blocks.attend_blocks(q, k, k, mask, scale=0.1, softcap=softcap)


def digest(shape: Shape, dtype: torch.dtype) -> None:
    own, token = pool(shape, dtype), queries(shape, dtype)[:, 0]
    digests.update_digests(own, torch.arange(5))
    digests.append_token(own, token, token, 17, 3)
    digests.append_token(own._replace(key_min=None), token, token, 17, 3)
    numbers, table = torch.tensor([17, 3, 2, 1, 2]), torch.arange(64)
    digests.append_at(own, token, token, numbers, table)
    digests.append_at(own._replace(key_min=None), token, token, numbers, table)


def score(shape: Shape, dtype: torch.dtype) -> None:
    own = pool(shape, dtype)
    assert own.key_min is not None
    assert own.key_max is not None
    bounds = own.key_min, own.key_max
    digests.group_page_scores(queries(shape, dtype), *bounds, new=shape.new)
    table, numbers = torch.arange(64), torch.tensor([17, 3, 20, 2, 9])
    digests.listed_page_scores(queries(shape, dtype), *bounds, table, numbers, 1)


def merging(shape: Shape, dtype: torch.dtype) -> None:
    q = queries(shape, dtype)
    part = PartialAttention(q, torch.zeros(q.shape[:-1]))
    paged.merge([part, PartialAttention(q.float(), part.lse)], dtype)


def copying(shape: Shape, dtype: torch.dtype) -> None:
    own, slots = pool(shape, dtype), lists(shape, 5)[:, 0]
    digests.copy_pages(own, own, slots, slots)


def search(shape: Shape, dtype: torch.dtype) -> None:
    keys = torch.zeros(shape.heads, 5000, shape.dim, dtype=dtype)
    nearest.nearest_keys(queries(shape, dtype), keys, 32)


def selection(shape: Shape, dtype: torch.dtype) -> None:
    """Of 128K keys in codes of 32 bytes, which have dims of all widths."""
    plan = plan_of(32, shape.dim)
    assert plan is not None
    heads, dims, keys = shape.heads, plan.num_dims, torch.zeros(shape.heads, 64, shape.dim)
    codes = DeviceCodes(
        plan,
        torch.zeros(heads, 2**17, plan.code_bytes, dtype=torch.uint8),
        torch.zeros(heads, 4096, shape.dim, dtype=dtype),
        *(torch.zeros(heads, dims, shape.dim), torch.zeros(heads, dims)),
        *(torch.zeros(heads, dims, shape.dim), torch.zeros(heads, shape.dim)),
        *(torch.zeros(heads, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)),
        torch.zeros(heads, dtype=torch.int64),
    )
    keys, q = keys.to(dtype), queries(shape, dtype)
    sketch_scan.encode(codes, keys, 0)
    found = sketch_find.find(codes, q, keys, new=shape.new, width=1024)
    limit = sketch_find.best_limit(found.scores, 100)
    for softcap, form in ((None, "gaussian"), (30.0, "gaussian"), (30.0, "first_order")):
        asked = q, found.scores, limit, slice(0, 1024), codes.state[0]
        _, _, discount = unread.attend_unread(
            *(Tail.of(keys, keys), *asked), scale=0.1, softcap=softcap, form=form
        )
        for given in (None, discount):
            sketch_find.attend(found, keys, limit, scale=0.1, softcap=softcap, discount=given)


def is_bounded() -> bool:
    """Whether this Triton is the one that the bounds are of."""
    return Version(version("triton")).release[:2] == Version(BOUNDS_OF).release


def test_the_bounds_are_of_this_triton() -> None:
    if not is_bounded():
        pytest.skip(f"registers and spills are bounded for Triton {BOUNDS_OF} only")


CALLS = [
    *(attention, ragged_attention, block_attention),
    *(digest, score, merging, copying, search, selection),
]
CAPABILITIES = {"llama": (89, 90), "wide": (89,), "odd": (89, 90), "float32": (89,)}
"""sm_89 has less of everything; sm_90 is met by an odd shape, and by a plain one where a kernel
multiplies, which it does there in another way.
"""


def gpus(launch: Launch, case: str, *, is_last: bool) -> tuple[int, ...]:
    """Compute capabilities that a launch is compiled for: the last variant of a kernel in a call,
    which has most options, for those of the case. The variants before it for sm_89 alone, where
    they take most: of an odd shape, of the widest numbers, and those that encode the widest heads.
    """
    if is_last:
        multiplies = launch.name in (*MULTIPLIES, "_scan_kernel")
        return CAPABILITIES[case] if multiplies or case == "odd" else (89,)
    encodes_wide = (launch.name, case) == ("_encode_kernel", "wide")
    return (89,) if case in ("odd", "float32") or encodes_wide else ()


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
def test_kernels_compile_and_take_no_more_than_they_may(
    monkeypatch: pytest.MonkeyPatch, call: Callable[..., Any], case: str
) -> None:
    shape, dtype = CASES[case]
    launches = launches_of(lambda: call(shape, dtype), monkeypatch)
    assert launches
    last = {launch.name: at for at, launch in enumerate(launches)}
    for at, launch in enumerate(launches):
        for capability in gpus(launch, case, is_last=at == last[launch.name]):
            compiled = launch.compile(capability)
            taken = resources(compiled)
            assert taken.shared_bytes <= SHARED_BYTES, (launch.name, capability)
            if is_bounded():
                bound = BOUNDS[launch.name]
                over = [
                    name
                    for name, own, most in zip(taken._fields, taken, bound, strict=True)
                    if own > most
                ]
                assert not over, (launch.name, capability, taken, bound)
            whole = launch.name == "_scan_kernel"  # codes are whole numbers in 16 bits for any keys
            multiplies = whole or (launch.name in MULTIPLIES and dtype != torch.float32)
            multiplies &= call is not selection or launch.name != "_attend_kernel"
            assert ("mma" in compiled.asm["ptx"]) == multiplies, (launch.name, capability)
