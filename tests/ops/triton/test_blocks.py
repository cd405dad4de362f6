"""Block-sparse attention of prompts: the kernel against the definition, odd sizes."""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hybrid_kv.ops import reference
from hybrid_kv.ops.dispatch import Ops
from hybrid_kv.types import KEY_BLOCK, BlockMask, PartialAttention
from tests.ops.triton.where import needs_kernels
from tests.pairs import in_pairs
from tests.tolerances import TOLERANCES, Tolerance

FLOAT32 = TOLERANCES[torch.float32]
needs_kernels()
# Rows of a tile that stand for no query.
pytestmark = pytest.mark.filterwarnings("ignore:divide by zero encountered in log")


Given: TypeAlias = tuple[Tensor, Tensor, Tensor]


class Sizes(NamedTuple):
    """Sizes of a prompt's chunk; `tokens` of a query block."""

    new: int
    old: int
    tokens: int
    heads: int = 2
    group: int = 3
    batch: int = 2
    dim: int = 72
    value_dim: int = 72

    @property
    def blocks(self) -> tuple[int, int]:
        """Query blocks and key blocks."""
        return -(-self.new // self.tokens), (self.new + self.old) // KEY_BLOCK


def tensors(sizes: Sizes, device: str, dtype: torch.dtype = torch.float32) -> Given:
    """q, k, v with strides of their own, and not a number around them in memory."""
    batch, heads, new, stored = sizes.batch, sizes.heads, sizes.new, sizes.old + sizes.new
    around = torch.full((), torch.nan, dtype=dtype, device=device)
    q = around.repeat(batch, new + 2, heads * sizes.group, sizes.dim + 8)
    k = around.repeat(batch, heads, stored + 9, sizes.dim)
    v = around.repeat(batch, stored + 70, heads, sizes.value_dim + 3)
    given = (
        q[:, 1 : 1 + new, :, : sizes.dim].transpose(1, 2),
        k[:, :, 5 : 5 + stored],
        v[:, :stored, :, : sizes.value_dim].transpose(1, 2),
    )
    for tensor in given:
        tensor.copy_(torch.randn(tensor.shape))
    return given


def mask_of(sizes: Sizes, device: str, share: float = 0.5) -> BlockMask:
    """Some of the key blocks, as a view; those count as well that no query block may ask for."""
    blocks, width = sizes.blocks
    listed = torch.rand(width, sizes.heads, sizes.batch, blocks, device=device) < share
    return BlockMask(listed.permute(2, 1, 3, 0), sizes.tokens)


def attended(
    ops: Ops, given: Given, mask: BlockMask, tolerance: Tolerance = FLOAT32, **options: Any
) -> PartialAttention:
    """What both say, held together."""
    part = ops.attend_blocks(*given, mask, scale=0.2, **options)
    assert ops.served == {"attend_blocks": "triton"}
    exact = reference.attend_blocks(*given, mask, scale=0.2, **options)
    assert part.out.dtype == given[0].dtype
    torch.testing.assert_close(part.out.float(), exact.out, **tolerance)
    torch.testing.assert_close(part.lse, exact.lse, **FLOAT32)
    return part


def past_of(sizes: Sizes, block: int) -> int:
    """Key blocks that end before a query block."""
    return (sizes.old + block * sizes.tokens) // KEY_BLOCK


@pytest.mark.parametrize(
    ("dtype", "chunk", "group", "softcap", "share"),
    in_pairs(
        list(TOLERANCES),
        # rows that fill no tile, blocks of which the last one is short
        (
            Sizes(75, 133, 32, heads=1),
            Sizes(130, 0, 128, batch=1),
            Sizes(150, 64, 47, heads=1, batch=1),
            Sizes(3, 701, 1, batch=1),
            Sizes(1, 200, 96),
        ),
        (1, 3, 4),
        (None, 3.0),
        (0.0, 0.5, 1.0),
    ),
    ids=str,
)
def test_blocks_are_attended_as_defined(
    ops: Ops,
    device: str,
    dtype: torch.dtype,
    tolerance: Tolerance,
    chunk: Sizes,
    group: int,
    softcap: float | None,
    share: float,
) -> None:
    sizes = chunk._replace(group=group)
    given, mask = tensors(sizes, device, dtype), mask_of(sizes, device, share)
    part = attended(ops, given, mask, tolerance, softcap=softcap)
    if share == 1.0:
        causal = reference.attend_causal(*given, scale=0.2, softcap=softcap)
        torch.testing.assert_close(part.out.float(), causal.out, **tolerance)
        torch.testing.assert_close(part.lse, causal.lse, **FLOAT32)


@pytest.mark.parametrize(("dim", "value_dim"), [(16, 16), (64, 128), (80, 96), (256, 40)])
def test_heads_of_any_size(
    ops: Ops, device: str, dtype: torch.dtype, tolerance: Tolerance, dim: int, value_dim: int
) -> None:
    sizes = Sizes(40, 157, 32, heads=1, batch=1, dim=dim, value_dim=value_dim)
    q, k, v = tensors(sizes, device, dtype)
    attended(ops, (q * dim**-0.5, k, v), mask_of(sizes, device), tolerance)


def test_keys_that_do_not_lie_in_rows(ops: Ops, device: str) -> None:
    sizes = Sizes(40, 157, 32, batch=1)
    q, k, v = (t.mT.contiguous().mT for t in tensors(sizes, device))
    attended(ops, (q, k, v), mask_of(sizes, device))


def test_float32_queries_read_keys_of_16_bits(ops: Ops, device: str) -> None:
    sizes = Sizes(40, 157, 32, heads=1, batch=1)
    q, k, v = tensors(sizes, device)
    for dtype in (torch.float16, torch.bfloat16):
        attended(ops, (q, k.to(dtype), v.to(dtype)), mask_of(sizes, device), TOLERANCES[dtype])


def test_a_list_may_be_longer_than_what_is_looked_at_together(ops: Ops, device: str) -> None:
    sizes = Sizes(3, 64 * 1100 + 7, 2, heads=1, group=1, batch=1, dim=16, value_dim=16)
    mask = mask_of(sizes, device, 0.01)
    assert mask.listed[..., 1024:].any()
    attended(ops, tensors(sizes, device), mask)


def test_a_block_that_is_not_listed_is_not_read(
    ops: Ops, device: str, dtype: torch.dtype, tolerance: Tolerance
) -> None:
    """Its keys and values are no numbers, which would show."""
    sizes = Sizes(75, 333, 32, batch=1)
    q, k, v = tensors(sizes, device, dtype)
    mask = mask_of(sizes, device)
    mask.listed[:] = mask.listed[:, :, :1]  # the same for all query blocks
    clean = attended(ops, (q, k, v), mask, tolerance)
    past = past_of(sizes, 0)
    for head in range(sizes.heads):
        unread = ~mask.listed[0, head, 0, :past].repeat_interleave(KEY_BLOCK)
        assert unread.any()
        for tensor in (k, v):
            tensor[0, head, : len(unread)][unread] = torch.nan
    part = ops.attend_blocks(q, k, v, mask, scale=0.2)
    assert torch.equal(part.out, clean.out)
    assert torch.equal(part.lse, clean.lse)


@pytest.mark.parametrize("softcap", [None, 3.0])
def test_what_is_not_a_number_shows(ops: Ops, device: str, softcap: float | None) -> None:
    """In the heads and query blocks that read it, from its own token on."""
    sizes = Sizes(75, 333, 32, batch=1)
    q, k, v = tensors(sizes, device)
    mask = mask_of(sizes, device, 0.0)
    mask.listed[0, 0, 1, 2] = True
    k[0, 0, 2 * KEY_BLOCK + 17, 5] = torch.nan
    k[0, 1, sizes.old + 40] = torch.nan
    part = ops.attend_blocks(q, k, v, mask, scale=0.2, softcap=softcap)
    expected = torch.zeros(2, sizes.group, sizes.new, dtype=torch.bool, device=device)
    expected[0, :, 32:64] = True
    expected[1, :, 40:64] = True  # for the last query block that is a key block before it
    assert torch.equal(part.lse[0].isnan(), expected.flatten(0, 1))
    assert torch.equal(part.out[0].isnan().any(-1), expected.flatten(0, 1))
    assert torch.equal(part.out[0].isnan().all(-1), expected.flatten(0, 1))


@pytest.mark.parametrize(
    "sizes", [Sizes(0, 100, 32), Sizes(5, 100, 32, batch=0), Sizes(5, 100, 32, heads=0)], ids=str
)
def test_of_nothing_there_is_nothing(ops: Ops, device: str, sizes: Sizes) -> None:
    part = ops.attend_blocks(*tensors(sizes, device), mask_of(sizes, device), scale=0.2)
    assert ops.served == {"attend_blocks": "triton"}
    assert part.out.shape == (sizes.batch, sizes.heads * sizes.group, sizes.new, sizes.value_dim)
    assert part.lse.shape == part.out.shape[:3]


def test_queries_that_need_gradients_get_them(ops: Ops, device: str) -> None:
    sizes = Sizes(5, 100, 32)
    q, k, v = tensors(sizes, device)
    ops.attend_blocks(
        q.requires_grad_(), k, v, mask_of(sizes, device), scale=0.2
    ).out.sum().backward()
    assert q.grad is not None
    assert ops.served == {"attend_blocks": "reference"}


class Launched:
    """A kernel that does nothing."""

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *args, **options: None


class Waits(TorchDispatchMode):
    """Notes the operations that bring a value to the host."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func.overloadpacket).removeprefix("aten.")
        if name in ("_local_scalar_dense", "nonzero", "masked_select", "_to_copy"):
            self.found.append(name)
        return func(*args, **(kwargs or {}))


def test_the_host_waits_for_nothing(ops: Ops, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from hybrid_kv.ops.triton import blocks

    sizes = Sizes(75, 333, 32)
    given, mask = tensors(sizes, device), mask_of(sizes, device)
    for kernel in ("_list_blocks_kernel", "_attend_blocks_kernel"):  # the interpreter is of torch
        monkeypatch.setattr(blocks, kernel, Launched())
    with Waits() as seen:
        ops.attend_blocks(*given, mask, scale=0.2)
    assert seen.found == []
