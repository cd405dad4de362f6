"""`hybrid-kv methods` and `heads`: what can be chosen, and a file that one of the methods needs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hybrid_kv.cli import known_names
from hybrid_kv.cli.options import (
    Dequantize,
    Device,
    Dtype,
    ExactProducts,
    ModelArgument,
    ModelOptions,
    OutputOptions,
    Plugins,
    Weights,
    count,
)

if TYPE_CHECKING:
    from rich.console import Console

    from hybrid_kv.cli.method_pages import Page, Parameter
    from hybrid_kv.plugins import Plugin


def methods(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME",
            autocompletion=known_names.plugins,
            help="One method or index kind.",
        ),
    ] = None,
    *,
    describe: Annotated[
        str | None,
        typer.Option(
            "--describe",
            metavar="NAME",
            autocompletion=known_names.plugins,
            help="One method or index kind, as NAME alone does.",
        ),
    ] = None,
    pages: Annotated[
        Path | None,
        typer.Option(
            "--pages", metavar="FOLDER", help="Write a page in Markdown of each method, or of NAME."
        ),
    ] = None,
    plugins: Plugins = None,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="The parameters of all of them.")
    ] = False,
    output: OutputOptions,
) -> None:
    """List the methods and the index kinds, or show one with its parameters."""
    from hybrid_kv.cli.files import check_target, write_report
    from hybrid_kv.errors import ConfigError, unknown_name
    from hybrid_kv.plugins import INDEXES, METHODS
    from hybrid_kv.report import probe_environment
    from hybrid_kv.report.schema import MethodsReport

    check_target(output)
    if name is not None and describe not in (None, name):
        raise ConfigError(
            f"--describe must be the one method that is shown, got '{describe}' beside '{name}'; "
            "leave one out"
        )
    name = name or describe
    if name is not None and name not in METHODS and name not in INDEXES:
        raise unknown_name("method or index kind", name, {*METHODS, *INDEXES})
    kept = [METHODS[key] for key in METHODS if name in (None, key)]
    kinds = [INDEXES[key] for key in INDEXES if name in (None, key)]
    if pages is not None:
        _write_pages(pages, kept)
    elif not output.json_only:
        _print_all(kept, kinds, with_parameters=verbose or name is not None)
    if output.json is not None:
        report = MethodsReport(
            environment=probe_environment(),
            methods=tuple(_describe(plugin) for plugin in kept),
            indexes=tuple(_describe(plugin) for plugin in kinds),
        )
        write_report(report, output)


def _write_pages(folder: Path, kept: list[Plugin[Any]]) -> None:
    from hybrid_kv.cli.display import console
    from hybrid_kv.cli.method_pages import write_pages
    from hybrid_kv.errors import ConfigError

    if not kept:
        raise ConfigError("--pages writes pages of methods, got an index kind; name a method")
    try:
        written = write_pages(folder, [plugin.name for plugin in kept])
    except OSError as error:
        raise ConfigError(
            f"--pages must be a folder that can be written, got '{folder}': {error.strerror}; "
            "choose another"
        ) from error
    console().print(f"{len(written)} pages in {folder}")


def _print_all(kept: list[Plugin[Any]], kinds: list[Plugin[Any]], *, with_parameters: bool) -> None:
    from hybrid_kv.cli.display import console
    from hybrid_kv.cli.method_pages import common_parameters, page_of

    out = console()
    if not with_parameters:
        _print_table(out, "Methods (--method NAME)", kept)
        out.print()
        _print_table(out, "Index kinds (--set index=KIND)", kinds)
        out.print("\nParameters of one: hybrid-kv methods NAME; of all: --verbose", style="dim")
        return
    for plugin in kept:
        _print_one(out, "method", page_of(plugin))
    for plugin in kinds:
        _print_one(out, "index kind", page_of(plugin))
    if kept:
        out.print("every method", style="bold")
        _print_parameters(out, common_parameters())


def _print_table(out: Console, title: str, plugins: list[Plugin[Any]]) -> None:
    from rich.text import Text

    from hybrid_kv.cli.display import facts_table

    out.print(title, style="bold")
    table = facts_table("cyan")
    for plugin in plugins:
        source = ("\n" + plugin.paper, "dim") if plugin.paper else ""
        table.add_row(plugin.name, Text.assemble(plugin.summary, source))
    out.print(table)


def _print_one(out: Console, family: str, page: Page) -> None:
    from rich.padding import Padding
    from rich.text import Text

    name = (page.name, "bold cyan")
    out.print(Text.assemble(name, (f" ({family})", "dim"), f"  {page.summary}"))
    if page.paper:
        out.print(f"  {page.paper}", style="dim")
    if page.how:
        out.print(Padding(Text(page.how), (0, 0, 0, 2)))
    for label, text in page.sections.items():
        out.print(Padding(Text.assemble((f"{label}: ", "bold"), text), (0, 0, 0, 2)))
    _print_parameters(out, page.parameters)
    out.print()


def _print_parameters(out: Console, parameters: list[Parameter]) -> None:
    from hybrid_kv.cli.display import facts_table

    if not parameters:
        out.print("  no parameters", style="dim")
        return
    table = facts_table("", "green")
    for one in parameters:
        meaning = f"{one.meaning} ({one.range})" if one.range else one.meaning
        table.add_row(f"  {one.name}", one.shown, meaning)
    out.print(table)


def _describe(plugin: Plugin[Any]) -> Any:
    from hybrid_kv.cli.method_pages import page_of
    from hybrid_kv.report.schema import PluginReport

    page = page_of(plugin)
    return PluginReport(
        name=page.name,
        summary=page.summary,
        paper=page.paper,
        how=page.how,
        sections=page.sections,
        parameters={
            one.name: {"default": one.default, "meaning": one.meaning, "range": one.range}
            for one in page.parameters
        },
    )


# KV heads that look far back, for duo_attention ---------------------------------------------------


def heads(
    model: ModelArgument,
    *,
    text: Annotated[
        str, typer.Option("--text", metavar="FILE|-", help="The calibration text, read twice.")
    ],
    out: Annotated[Path, typer.Option("--out", "-o", metavar="FILE", help="Where scores go.")],
    tokens: Annotated[
        int, typer.Option(parser=count, metavar="N", help="Tokens of the text that are read.")
    ] = 2048,
    device: Device = None,
    dtype: Dtype = None,
    weights: Weights = None,
    dequantize: Dequantize = None,
    exact_products: ExactProducts = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Say nothing but errors.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Score a model's KV heads by how much they look up far back; a file for duo_attention."""
    import json

    from hybrid_kv.api.planning import observe_heads, observing
    from hybrid_kv.cli.files import find_prompt
    from hybrid_kv.cli.model_run import opened
    from hybrid_kv.errors import ConfigError

    found = find_prompt(None, text, None, 0)
    found.check(model)
    if not out.parent.is_dir():
        raise ConfigError(f"-o '{out}' must be a file in a folder that is there; make the folder")
    output = OutputOptions(quiet=quiet, debug=debug)
    options = ModelOptions(
        device=device,
        dtype=dtype,
        weights=weights,
        dequantize=dequantize,
        exact_products=exact_products,
    )
    with opened(model, options, observing(), output) as llm:
        scores = observe_heads(llm, found.text or "", tokens)
    out.write_text(json.dumps({"model": model, "tokens": tokens, "heads": scores}) + "\n")
    if not quiet:
        flat = sorted((score for layer in scores for score in layer), reverse=True)
        print(f"{len(scores)} layers, {len(flat)} KV heads; scores {flat[0]:.2f} to {flat[-1]:.2f}")
        print(f"use: --method duo_attention --set heads={out} --set retrieval_ratio=0.5")
