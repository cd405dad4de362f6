"""Later attention, told to methods that keep entries and to indexes that learn on."""

from __future__ import annotations

import torch
from torch import Tensor

from hybrid_kv.attended import Attended
from hybrid_kv.runtime.absorb import Keeper
from hybrid_kv.store import LayerKV
from hybrid_kv.transfer import Executor

_NOTED_TOKENS = 64
"""Queries of a chunk of a long later turn that are kept, spread evenly, to learn from."""
_FOLLOWED_TOKENS = 128
"""Tokens of a long later turn that a method is told of at a time."""


def follow(
    keeper: Keeper,
    executor: Executor,
    store: LayerKV,
    q: Tensor,
    lse: Tensor,
    *,
    scale: float,
    softcap: float | None,
    ago: int = 0,
) -> None:
    """Tells the method what was attended; it may keep something else from now on.

    Args:
        q: [B, Hq, T, D]. lse: [B, Hq, T]. ago: so many tokens have been stored after these.
    """
    rows = store.rows
    attended = Attended(
        *(q, lse, [row.kept for row in rows], [row.length - ago for row in rows]),
        *(scale, softcap),
        lambda row: rows[row].resident_keys(),
    )
    answer = keeper.after(attended, [row.gone_tokens for row in rows])
    if answer is None:
        return
    for row, new in zip(rows, answer, strict=True):
        old, positions = row.kept, None
        if new is old:
            continue
        if row.placement is not None and row.placement.offloads and new is not None:
            if old is not None and new.same_rows(old):
                row.kept = new
                continue
            positions = executor.send(new.positions).open()
        row.keep(new, positions)


def follow_turn(
    keeper: Keeper,
    executor: Executor,
    store: LayerKV,
    q: Tensor,
    lse: Tensor,
    valid: Tensor | None,
    *,
    scale: float,
    softcap: float | None,
) -> None:
    """Follows a long later turn, some tokens at a time: their weights take memory.

    Args:
        q: [B, Hq, T, D]. lse: [B, Hq, T]. valid: [B, T] bool, False for padding; None for none.
    """
    if valid is not None:  # padding to the front, where it weighs nothing
        order = valid.int().argsort(dim=1, stable=True)[:, None]
        q, lse = q.take_along_dim(order[..., None], 2), lse.take_along_dim(order, 2)
        lse = lse.masked_fill(lse == -torch.inf, torch.inf)
    count = q.shape[2]
    for start in range(0, count, _FOLLOWED_TOKENS):
        some = slice(start, min(count, start + _FOLLOWED_TOKENS))
        part = q[:, :, some], lse[:, :, some]
        follow(keeper, executor, store, *part, scale=scale, softcap=softcap, ago=count - some.stop)


def note_queries(store: LayerKV, q: Tensor) -> None:
    """Lets indexes learn later from some queries of q [B, Hq, T, D], those of a long later turn."""
    count, heads = q.shape[2], store.shape.num_kv_heads
    step = max(1, count // _NOTED_TOKENS)
    some = range((count - 1) % step, count, step)
    for row in store.rows:
        indexes = [span.extent.index for span in row.chain.spans]
        known = [index.aging for index in indexes if index is not None]
        agings = [aging for aging in known if aging is not None]
        if not agings:
            continue
        asked = q[row.number][:, some.start :: step].unflatten(0, (heads, -1)).cpu()
        for place, token in enumerate(some):
            for aging in agings:
                aging.ask(asked[:, :, place].clone(), row.length - count + token)
