"""`hybrid-kv ls`: models that can be used here without a download."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hybrid_kv.cli.options import OutputOptions

if TYPE_CHECKING:
    from hybrid_kv.models.local_models import FoundModel
    from hybrid_kv.report.schema import ListedModel


def ls(
    paths: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[PATH]...", help="Folders and GGUF files to look at as well."),
    ] = None,
    *,
    output: OutputOptions,
) -> None:
    """List models that can be used without a download, and why some cannot be served.

    Those of the folders and files that are named, of the hub's cache, of the package, and shapes
    with random weights. Nothing is asked of a network.
    """
    from hybrid_kv.models.local_models import check_paths

    check_paths(paths or ())  # before torch is imported
    from hybrid_kv.cli.display import note, waiting
    from hybrid_kv.cli.files import check_target, write_report
    from hybrid_kv.report import probe_environment
    from hybrid_kv.report.schema import ListReport

    check_target(output)
    with waiting("looking for models", output):
        found = list(_found(paths or []))
        listed = tuple(map(_listed, found))
    for path in paths or ():
        if not any(one.path is not None and one.path.is_relative_to(path) for one in found):
            note(f"no model below '{path}'", output)
    if not output.json_only:
        _print(listed)
    write_report(ListReport(environment=probe_environment(), models=listed), output)


def _found(paths: Sequence[Path]) -> Iterator[FoundModel]:
    from hybrid_kv.models.local_models import (
        FoundModel,
        models_below,
        models_of_hub,
        models_of_package,
    )
    from hybrid_kv.models.shapes import SHAPES

    for path in paths:
        yield from models_below(path)
    yield from models_of_hub()
    yield from models_of_package()
    yield from (FoundModel(f"random:{shape}", "random", None) for shape in SHAPES)


def _listed(found: FoundModel) -> ListedModel:
    from hybrid_kv.models.model_facts import facts_of
    from hybrid_kv.report.schema import ListedModel

    facts = facts_of(found)
    why = found.why or facts.why
    return ListedModel(
        name=found.name,
        kind=found.kind,
        path=None if found.path is None else str(found.path),
        num_bytes=found.num_bytes,
        architecture=facts.architecture,
        num_layers=facts.num_layers,
        kv_bytes_per_token=facts.kv_bytes_per_token,
        served=not why,
        why=why,
    )


def _print(models: Sequence[ListedModel]) -> None:
    from rich.text import Text

    from hybrid_kv.cli.display import Column, console, human_bytes

    def shown(count: int | None) -> str:
        return human_bytes(count) if count else "-"

    out = console()
    columns = [
        Column("kind", [one.kind for one in models], left=True),
        Column("served", ["yes" if one.served else "no" for one in models], left=True),
        Column("size", [shown(one.num_bytes) for one in models]),
        Column("layers", [str(one.num_layers or "-") for one in models]),
        Column("KV a token", [shown(one.kv_bytes_per_token) for one in models]),
        Column("architecture", [one.architecture or "-" for one in models], left=True),
    ]
    names = ["model", *(one.name for one in models)]  # last, for paths are long
    cells = [[column.title, *map(str, column.cells)] for column in columns]
    for name, *row in zip(names, *cells, strict=True):
        padded = [
            cell.ljust(column.width) if column.left else cell.rjust(column.width)
            for column, cell in zip(columns, row, strict=True)
        ]
        out.print("  ".join([*padded, name]), soft_wrap=True)
    refused = [one for one in models if not one.served]
    if refused:
        out.print()
    for one in refused:
        out.print(Text.assemble((one.name, "bold"), f": {one.why}"), soft_wrap=True)
