"""A layer whose keys and values say which token they belong to, and how to read it back."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hybrid_kv.config import IndexConfig
from hybrid_kv.plugins import Index
from hybrid_kv.store import LayerStore
from hybrid_kv.types import LayerShape

SHAPE = LayerShape(layer_idx=0, num_q_heads=6, num_kv_heads=2, head_dim=3)
PAGE = 4


def layer(rows: int = 1, page_size: int = PAGE, capacity: int = 0) -> LayerStore:
    return LayerStore(SHAPE, page_size, rows, torch.float32, torch.device("cpu"), capacity)


def flat_index() -> Callable[[], Index]:
    return IndexConfig(kind="flat").build


def keys_of(tags: Tensor) -> Tensor:
    """[..., T] -> [..., Hkv, T, D]: key t of head h is (tag, sin tag, h)."""
    tag = tags.float()
    heads = [torch.stack([tag, torch.sin(tag), torch.full_like(tag, h)], -1) for h in range(2)]
    return torch.stack(heads, -3)


def append(store: LayerStore, k: Tensor, v: Tensor, valid: Tensor | None = None) -> None:
    """Stores k, v [B, Hkv, T, D], as the layer does; valid [B, T] is False for padding."""
    for number, row in enumerate(store.rows):
        own = slice(None) if valid is None else valid[number]
        row.table.append(k[number][:, own], v[number][:, own], row.length)
        row.length += k[number][:, own].shape[1]


def offload(store: LayerStore, k: Tensor, v: Tensor, *, apart: bool = False) -> None:
    """Stores k, v [Hkv, n, D] cold in the first row, `apart` in an extent of their own."""
    row, count = store.rows[0], k.shape[1]
    fork = store.cold.branch() if apart else None  # nothing is added to what another one reads
    row.chain.append(k, v, torch.arange(row.length, row.length + count), None)
    row.length += count
    if fork is not None:
        fork.release()


def owned(store: LayerStore, row: int) -> dict[int, tuple[int, str]]:
    """Position -> tag and tier of every entry of a row; fails where keys and values disagree."""
    found: dict[int, tuple[int, str]] = {}
    k, v = store.rows[row].table.view()
    positions = store.rows[row].table.positions()
    _enter(found, positions, k, v, "resident")
    for span in store.rows[row].chain.spans:
        k, v = span.extent.first(span.length)
        _enter(found, span.extent.positions[: span.length].tolist(), k, v, "cold")
    return found


def _enter(
    found: dict[int, tuple[int, str]], positions: list[int], k: Tensor, v: Tensor, tier: str
) -> None:
    tags = k[0, :, 0].round()
    assert torch.equal(k, keys_of(tags)), "a key was changed or belongs to another head"
    assert torch.equal(v, -k), "a value was parted from its key"
    assert len(positions) == len(tags)
    for position, tag in zip(positions, tags.int().tolist(), strict=True):
        assert position not in found, f"position {position} is owned twice"
        found[position] = (tag, tier)


class Feed:
    """Appends tokens with tags of their own and remembers them: the naive cache."""

    def __init__(self, store: LayerStore) -> None:
        self.store = store
        self.history: list[list[int]] = [[] for _ in range(len(store.rows))]
        self._next = 1

    def append(self, valid: Tensor | int) -> None:
        """Valid [B, T] bool, or a number of tokens for every row."""
        rows = len(self.store.rows)
        mask = torch.ones(rows, valid, dtype=torch.bool) if isinstance(valid, int) else valid
        tags = self._next + torch.arange(mask.numel()).view(mask.shape)
        self._next += mask.numel()
        k = keys_of(tags)
        append(self.store, k, -k, mask)
        for row in range(rows):
            self.history[row] += tags[row][mask[row]].tolist()


@dataclass(frozen=True)
class HeldBuild:
    """A build that has not begun."""

    work: Callable[[], None]
    future: Future[None] = field(default_factory=Future)

    def run(self) -> None:
        if not self.future.set_running_or_notify_cancel():
            return
        try:
            self.work()
        except BaseException as error:
            self.future.set_exception(error)
        else:
            self.future.set_result(None)


class LaterRunner:
    """Holds back the builds that nobody waits for until a test lets them go."""

    def __init__(self) -> None:
        self.held: list[HeldBuild] = []

    def here(self, build: Callable[[], None]) -> None:
        build()

    def beside(self, build: Callable[[], None], holds: int = 0) -> Future[None]:
        self.held.append(HeldBuild(build))
        return self.held[-1].future

    def finish(self) -> None:
        for build in self.held:
            build.run()
        self.held.clear()
