"""`hybrid-kv ls` and `pull`: models that are here, and one of the hub that comes here."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hybrid_kv.cli import INTERRUPTED
from hybrid_kv.cli.options import OutputOptions

if TYPE_CHECKING:
    from hybrid_kv.models.local_models import FoundModel
    from hybrid_kv.models.pull import Download
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


# A model of the hub, downloaded before it is used -------------------------------------------------


def pull(
    name: Annotated[
        str, typer.Argument(metavar="NAME[@REVISION]", help="A hub id like OWNER/NAME.")
    ],
    *,
    file: Annotated[
        str | None,
        typer.Option("--file", metavar="FILE.gguf", help="One GGUF file in place of safetensors."),
    ] = None,
    output: OutputOptions,
) -> None:
    """Download what loading a model needs into the hub's cache; print the name to load it by.

    Started again, it takes the files that are not there yet.
    """
    from hybrid_kv.cli.display import human_bytes, note, shows_progress
    from hybrid_kv.models.pull import check_gguf_name, download, prepare_download, split_name

    check_gguf_name(file)
    repository, revision = split_name(name)
    if output.json is not None:  # the report's modules import torch, which nothing else here does
        from hybrid_kv.cli.files import check_target

        check_target(output)
    try:
        planned = prepare_download(repository, revision, file)
        note(
            f"{human_bytes(planned.num_bytes)} in {len(planned.files)} files, "
            f"{human_bytes(planned.absent_bytes)} of them to come; "
            f"{human_bytes(planned.free_bytes)} free on the disk",
            output,
        )
        model = download(planned, progress=shows_progress(output))
    except KeyboardInterrupt:
        note("interrupted: the same command goes on; whole files are kept", output)
        raise typer.Exit(INTERRUPTED) from None
    if not output.json_only:
        print(model)
    if output.json is not None:
        _write(planned, model, output)


def _write(planned: Download, model: str, output: OutputOptions) -> None:
    from hybrid_kv.cli.files import write_report
    from hybrid_kv.report import probe_environment
    from hybrid_kv.report.schema import PullReport

    report = PullReport(
        environment=probe_environment(),
        name=planned.name,
        commit=planned.commit,
        files={one.name: one.num_bytes for one in planned.files},
        downloaded_bytes=planned.absent_bytes,
        model=model,
    )
    write_report(report, output)
