"""What a decode step sends to its device: staged, without waiting, once for all layers.

`meta` stands for the device: every operation that takes a tensor of the host there is seen.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hybrid_kv.ops import pinned
from hybrid_kv.ops.devices import Uploads
from hybrid_kv.runtime import KVCache
from hybrid_kv.transfer import SyncExecutor
from hybrid_kv.transfer.cuda import CudaExecutor
from tests.runtime.test_two_devices import DEVICES, MetaLane, _no_values, made

META = torch.device("meta")
__all__ = ["_no_values"]


class Crossings(TorchDispatchMode):
    """Copies from the host to the device that do not begin in staging memory, or are waited for."""

    def __init__(self, staged: set[int]) -> None:
        super().__init__()
        self._staged = staged
        self.waited: list[str] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        made = function(*args, **(kwargs or {}))
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        there = any(t.is_meta for t in [*given, *tree_leaves(made)] if isinstance(t, Tensor))
        here = [t for t in given if not t.is_meta and t.ndim]
        if there and any(t.data_ptr() not in self._staged for t in here):
            self.waited.append(str(function))
        return made


@pytest.fixture
def staged(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """Addresses of the staging memory that index arrays passed through."""
    addresses: set[int] = set()
    kept: list[Tensor] = []
    plain = pinned.pinned_empty

    def pinned_empty(*arguments: Any) -> Tensor:
        kept.append(plain(*arguments))
        addresses.add(kept[-1].data_ptr())
        return kept[-1]

    monkeypatch.setattr(pinned, "pinned_empty", pinned_empty)
    return addresses


def step(cache: KVCache, new: int, device: torch.device = META) -> None:
    for idx in range(len(DEVICES)):
        q, k = (torch.empty(1, heads, new, 24, device=device) for heads in (6, 2))
        cache.attend(idx, q, (k, k), None, scale=0.2)


@pytest.mark.parametrize("method", ["hybrid", "quest", "streaming_llm", "full"])
def test_no_step_waits_for_the_device_to_take_a_page_table(method: str, staged: set[int]) -> None:
    """A plain copy to a GPU returns when all is done that it was told before."""
    cache = made(method, MetaLane())
    step(cache, 37)
    with Crossings(staged) as seen:
        for _ in range(23):  # pages of 4: begun, left, given back
            step(cache, 1)
    assert seen.waited == []


def test_one_upload_serves_the_layers_whose_tables_are_alike(staged: set[int]) -> None:
    cache = made("streaming_llm", MetaLane())
    step(cache, 37)
    step(cache, 1)  # ends the prompt
    sent = []
    for _ in range(16):
        before = cache.ops.uploads.sent
        step(cache, 1)
        sent.append(cache.ops.uploads.sent - before)
    assert max(sent) <= 2, "a page that was given back, and a table, for three layers"
    assert sum(sent) <= 8


def test_what_was_sent_last_is_kept_by_content_and_nothing_else() -> None:
    uploads = Uploads()
    one = torch.arange(5).numpy()
    first = uploads(one, META)
    assert uploads(one.copy(), META) is first
    assert uploads(one + 1, META) is not first
    for number in range(200):
        uploads(one + number, META)
    assert uploads(one, META) is not first
    assert len(uploads._last) <= 64
    assert uploads(one, torch.device("cpu")).data_ptr() == one.ctypes.data


@pytest.mark.gpu(real=True)
def test_on_a_gpu_steps_do_not_wait() -> None:
    """Torch says which operations wait for the device."""
    device = torch.device("cuda")
    cache = made("streaming_llm", MetaLane())
    cache.means.executor = CudaExecutor(SyncExecutor())
    step(cache, 37, device)
    step(cache, 1, device)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(23):
            step(cache, 1, device)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    cache.check_integrity()
