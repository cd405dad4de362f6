"""Plain torch arithmetic that defines what every back end must compute on pages: storing tokens,
digests, and the choice of pages; attention is defined in `reference`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from hybrid_kv.types import HIDDEN, PagedKV


def page_digests(k: Tensor) -> tuple[Tensor, Tensor]:
    """Smallest and largest value per channel of each page: k [..., S, D] -> two of [..., D].

    Source: Quest (Tang et al. 2024), section 3.3.
    """
    return k.amin(-2), k.amax(-2)


def page_scores(q: Tensor, key_min: Tensor, key_max: Tensor) -> Tensor:
    """Upper bound of q . k over the keys of each page.

    Args:
        q: [..., M, D].
        key_min, key_max: [..., P, D].

    Returns:
        [..., M, P] float32; never below any score of the page (Quest, section 3.3).
    """
    q = q.float()
    # max(q*lo, q*hi) per channel = relu(q)*hi - relu(-q)*lo: two products instead of [M, P, D].
    high = torch.matmul(q.clamp_min(0), key_max.float().transpose(-1, -2))
    low = torch.matmul(q.clamp_max(0), key_min.float().transpose(-1, -2))
    return high + low


def choose_pages(
    q: Tensor,
    key_min: Tensor,
    key_max: Tensor,
    *,
    new: int,
    oldest: int,
    newest: int,
    count: int,
    page_scores: Callable[[Tensor, Tensor, Tensor], Tensor] = page_scores,
) -> Tensor:
    """Pages that the query heads of a KV head attend together: pinned ones and the best others.

    A page is as good as its best query head says. Source: Quest, algorithm 1, with one list for
    each KV head and token.

    Args:
        q: [Hkv, M, D], M = G * T with row g * T + t.
        key_min, key_max: [Hkv, P, D], oldest page first.
        new: T.
        oldest, newest: how many pages at the two ends are always chosen; newest is at least 1.
        count: C, at least oldest + newest, at most P.
        page_scores: what bounds the pages.

    Returns:
        [Hkv, T, C] int64 indices into P; the newest page, which may be filled in part, comes last.
    """
    scores = page_scores(q, key_min, key_max)
    shared = scores.unflatten(1, (-1, new)).amax(1)
    return best_pages(shared, oldest, newest, count)


def listed_page_scores(
    q: Tensor, key_min: Tensor, key_max: Tensor, table: Tensor, numbers: Tensor, oldest: int
) -> Tensor:
    """Scores of the pages of a table for one new token, by what the device is told of it.

    Args:
        q: [Hkv, G, D].
        key_min, key_max: [Hkv, slots, D], the digests of all pages of the pool.
        table: [C] int64 slots of the row's pages, oldest first; behind them there is anything.
        numbers: [5] int64: place and position of the token, pages in the table, how many of them
            are always chosen as the newest ones, how many are chosen in all.
        oldest: how many pages at the begin of the table are always chosen.

    Returns:
        [Hkv, 1, C] float32: inf where a page is always chosen, -inf behind the table's pages.
    """
    pages, newest = int(numbers[2]), int(numbers[3])
    scores = page_scores(q, key_min[:, table[:pages]], key_max[:, table[:pages]])
    shared = scores.amax(1, keepdim=True)
    shared[..., :oldest] = torch.inf
    shared[..., pages - newest :] = torch.inf
    return torch.nn.functional.pad(shared, (0, len(table) - pages), value=-torch.inf)


def append_at(pages: PagedKV, k: Tensor, v: Tensor, numbers: Tensor, table: Tensor) -> None:
    """Stores one token's k, v [Hkv, D] by numbers, keeps its page's digest, and lists its page.

    Args:
        numbers, table: see `listed_page_scores`; the page becomes the last one of the table.
    """
    place, position, listed = numbers[:1], numbers[1:2], int(numbers[2])
    pages.store(k[:, None], v[:, None], place, position)
    slot = place // pages.k.shape[2]
    update_digests(pages, slot)
    table[listed - 1 : listed] = slot


def best_pages(scores: Tensor, oldest: int, newest: int, count: int) -> Tensor:
    """The choice of `choose_pages` from scores [Hkv, T, P], which it overwrites."""
    last = scores.shape[-1] - 1
    scores[..., :oldest] = torch.inf
    scores[..., last + 1 - newest :] = torch.inf
    chosen = scores[..., :last].topk(count - 1, -1, sorted=False).indices
    return torch.nn.functional.pad(chosen, (0, 1), value=last)


def update_digests(pages: PagedKV, slots: Tensor) -> None:
    """Writes key_min and key_max of slots [n] from the keys that are filled there."""
    if pages.key_min is None or pages.key_max is None:
        return
    empty = (pages.positions[slots] == HIDDEN)[None, :, :, None]
    keys = pages.k[:, slots]
    # An unfilled slot takes part in neither bound: the first slot of a used page is filled.
    lows, highs = page_digests(torch.where(empty, keys[:, :, :1], keys))
    pages.key_min[:, slots], pages.key_max[:, slots] = lows, highs


def copy_pages(
    source: PagedKV, target: PagedKV, source_slots: Tensor, target_slots: Tensor
) -> None:
    """Copies K and V of pages into another pool of the same dtype; its places are free.

    Args:
        source: on the device of the target, or on the host.
        source_slots, target_slots: [Hkv, C] int64; a pair with a negative one is left out.
    """
    wanted = (source_slots >= 0) & (target_slots >= 0)
    head, column = wanted.nonzero(as_tuple=True)
    from_, to = source_slots[head, column], target_slots[head, column]
    for old, new in ((source.k, target.k), (source.v, target.v)):
        rows = old[head.to(old.device), from_.to(old.device)]
        new[head.to(new.device), to.to(new.device)] = rows.to(new.device)
