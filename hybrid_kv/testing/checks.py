"""Checks of what every method and every index promises, by driving one alone."""

from __future__ import annotations

from typing import Any

import torch

from hybrid_kv.config import HybridConfig, IndexConfig
from hybrid_kv.errors import NoBudgetError
from hybrid_kv.testing.driving import ROTARY, drive, heads
from hybrid_kv.types import Demotion

_PROMPT, _NEW = 601, 40
_CLOSE = 1e-5
"""Float32 of the method against float64 of the check."""


def check_method(name: str, **settings: Any) -> None:
    """Drives a registered method through a prompt and an answer of one layer.

    A full budget loses nothing and gives full attention. A budget of tokens (`at_budget`, where the
    method has it) is the mean of what a head attends, to a page. The settings can be written and
    read.

    Args:
        settings: of the method, and page_size.

    Raises:
        AssertionError: a promise is not kept; the message has the figures.
        ConfigError: the method or a setting is unknown.
    """
    config = HybridConfig(method=name, **settings)
    assert HybridConfig(**config.flat()) == config, f"{name}: settings must be read as written"
    opened = drive(
        config.opened().build(), prompt=_PROMPT, new=_NEW, page_size=config.page_size, rotary=ROTARY
    )
    error = max(opened.error)
    assert error < _CLOSE, (
        f"{name}: a full budget must give full attention, got outputs off by {error:.2g}; see "
        "full_budget"
    )
    assert not opened.lost.any(), (
        f"{name}: a full budget must lose nothing, got {int(opened.lost.sum())} entries lost"
    )
    _check_budget(name, config)


def _check_budget(name: str, config: HybridConfig) -> None:
    """Of a method that drops: how many entries a head attends in a step, on average."""
    wanted = _PROMPT // 4
    try:
        given = config.at_budget(str(wanted), _PROMPT)
    except NoBudgetError:
        return
    assert HybridConfig(**given.flat()) == given, f"{name}: at_budget must give valid settings"
    driven = drive(
        given.build(), prompt=_PROMPT, new=_NEW, page_size=given.page_size, rotary=ROTARY
    )
    if given == config or driven.placement.rest not in (Demotion.DROP, Demotion.ABSORB):
        return  # what is read is cut by the runtime, from a budget that `read` names
    if driven.placement.offload:
        return
    kept = float((~driven.lost).sum(1).float().mean())
    most = wanted + _NEW + 2 * given.page_size
    assert kept <= most, (
        f"{name}: at_budget must give at most {wanted} tokens and those of the answer, got "
        f"{kept:.0f} of {_PROMPT + _NEW} attended"
    )


def check_index(kind: str, *, recall: float = 0.5, **settings: Any) -> None:
    """Builds a registered index over random keys, adds more and searches.

    Scores are the true products, best first, of keys that are there; `scored` counts at least what
    was returned; later keys are found; an index that says `exact` finds the best.

    Args:
        recall: share of the best ten that has to be found.

    Raises:
        AssertionError: a promise is not kept; the message has the figures.
        ConfigError: the kind or a setting is unknown.
    """
    q, keys, _ = heads(701, num_q_heads=6, num_kv_heads=2, head_dim=72)
    samples = q[:, :600:10].unflatten(0, (2, 3))
    index = IndexConfig(kind=kind, **settings).build()
    index.build(keys[:, :600], samples)
    index.add(keys)
    assert len(index) == 701, f"{kind}: must hold 701 keys after add, got {len(index)}"
    queries = q[:, 600:].unflatten(0, (2, 3)).flatten(1, 2)
    found = index.search(queries, 10)
    assert (found.ids < 701).all(), f"{kind}: ids must be below 701, got {int(found.ids.max())}"
    held = found.ids >= 0
    exact = torch.einsum("hmd,hnd->hmn", queries, keys)
    true = exact.gather(2, found.ids.clamp_min(0))
    off = float((found.scores - true)[held].abs().max()) if held.any() else 0.0
    assert off < 1e-3, f"{kind}: scores must be the true products, got some off by {off:.2g}"
    falls = found.scores.masked_fill(~held, -torch.inf).diff(dim=-1).nan_to_num(0)
    assert (falls <= 0).all(), f"{kind}: results must come best first"
    assert found.scored >= int(held.any(1).sum()), (
        f"{kind}: scored must count every key that was multiplied, got {found.scored} for "
        f"{int(held.sum())} results"
    )
    wide = index.search(queries, len(index)).ids
    assert (wide >= 600).any(), f"{kind}: keys that are added later must be found, got none of 101"
    best = exact.topk(10).indices
    share = float((best[..., None] == found.ids[:, :, None]).any(-1).float().mean())
    wanted = 1.0 if index.exact else recall
    assert share >= wanted, f"{kind}: recall must be at least {wanted}, got {share:.2f}"
