"""Shell completion of a word that is being typed; heavy modules load only where needed."""

from __future__ import annotations

import os
from collections.abc import Iterable

import typer

VARIABLE = "_HYBRID_KV_COMPLETE"
"""Set by the shell's script when it asks."""

_RANDOM = "random:"


def asked_for() -> bool:
    """Whether a shell asks what could follow, so that nothing may be printed but that."""
    return VARIABLE in os.environ


def models(incomplete: str) -> list[str]:
    """Models that have a name; folders are completed by the shell."""
    names = ["needle", "smollm2"]
    if incomplete and _RANDOM.startswith(incomplete[: len(_RANDOM)]):
        from hybrid_kv.models.shapes import SHAPES

        names += [_RANDOM + shape for shape in SHAPES]
    else:
        names.append(_RANDOM)
    return _starting(incomplete, names)


def methods(incomplete: str) -> list[str]:
    """Names of methods."""
    from hybrid_kv.plugins import METHODS

    return _starting(incomplete, METHODS)


def tasks(incomplete: str) -> list[str]:
    """Names of tasks behind those that are there already."""
    from hybrid_kv.eval.tasks import TASKS

    before, comma, last = incomplete.rpartition(",")
    return [f"{before}{comma}{name}" for name in _starting(last, ["ruler", "all", *TASKS])]


def plugins(incomplete: str) -> list[str]:
    """Names of methods and index kinds."""
    from hybrid_kv.plugins import INDEXES, METHODS

    return _starting(incomplete, dict.fromkeys([*METHODS, *INDEXES]))


def settings(ctx: typer.Context, incomplete: str) -> list[str]:
    """Settings of the method that --method names (else of the default), as KEY=, by their dotted
    names and by last parts that are unique; of an index, its kinds.
    """
    from hybrid_kv.cli.parameters import common_parameters, parameters_of
    from hybrid_kv.config import HybridConfig
    from hybrid_kv.plugins import INDEXES, METHODS

    method = ctx.params.get("method") or HybridConfig().method
    if method not in METHODS:
        return []
    if incomplete.startswith("cold.index="):
        return _starting(incomplete, [f"cold.index={kind}" for kind in INDEXES])
    known = [*parameters_of(METHODS[method].params), *common_parameters()]
    dotted = [parameter.name for parameter in known]
    last = [name.rpartition(".")[2] for name in dotted]
    short = [name for name in last if last.count(name) == 1]
    return _starting(incomplete, [f"{name}=" for name in dict.fromkeys([*short, *dotted])])


def _starting(incomplete: str, names: Iterable[str]) -> list[str]:
    return [name for name in names if name.startswith(incomplete)]
