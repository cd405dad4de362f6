"""`hybrid-kv pull`: a model of the hub, downloaded before it is used."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from hybrid_kv.cli import INTERRUPTED
from hybrid_kv.cli.options import OutputOptions

if TYPE_CHECKING:
    from hybrid_kv.models.pull import Download


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
