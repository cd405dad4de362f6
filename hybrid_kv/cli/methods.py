"""`hybrid-kv methods`: what can be chosen, and its parameters."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from hybrid_kv.cli.options import OutputOptions

if TYPE_CHECKING:
    from rich.console import Console

    from hybrid_kv.cli.parameters import Parameter
    from hybrid_kv.plugins import Plugin


def methods(
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="One method or index kind.")
    ] = None,
    *,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="The parameters of all of them.")
    ] = False,
    output: OutputOptions,
) -> None:
    """List the methods and the index kinds, or show one with its parameters."""
    from hybrid_kv.cli.documents import check_target, write_report
    from hybrid_kv.errors import unknown_name
    from hybrid_kv.plugins import INDEXES, METHODS
    from hybrid_kv.report import probe_environment
    from hybrid_kv.report.schema import MethodsReport

    check_target(output)
    if name is not None and name not in METHODS and name not in INDEXES:
        raise unknown_name("method or index kind", name, {*METHODS, *INDEXES})
    kept = [METHODS[key] for key in METHODS if name in (None, key)]
    kinds = [INDEXES[key] for key in INDEXES if name in (None, key)]
    if not output.json_only:
        _print_all(kept, kinds, with_parameters=verbose or name is not None)
    if output.json is not None:
        report = MethodsReport(
            environment=probe_environment(),
            methods=tuple(_describe(plugin) for plugin in kept),
            indexes=tuple(_describe(plugin) for plugin in kinds),
        )
        write_report(report, output)


def _print_all(kept: list[Plugin[Any]], kinds: list[Plugin[Any]], *, with_parameters: bool) -> None:
    from rich.console import Console

    from hybrid_kv.cli.parameters import common_parameters, parameters_of

    console = Console(highlight=False)
    if not with_parameters:
        _print_table(console, "Methods (--method NAME)", kept)
        console.print()
        _print_table(console, "Index kinds (--set cold.index=KIND)", kinds)
        console.print("\nParameters of one: hybrid-kv methods NAME; of all: --verbose", style="dim")
        return
    for plugin in kept:
        _print_one(console, "method", plugin, parameters_of(plugin.params))
    for plugin in kinds:
        _print_one(console, "index kind", plugin, parameters_of(plugin.params))
    if kept:
        console.print("[bold]every method[/]")
        _print_parameters(console, common_parameters())


def _print_table(console: Console, title: str, plugins: list[Plugin[Any]]) -> None:
    from rich.markup import escape
    from rich.table import Table

    table = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=None,
        show_header=False,
        pad_edge=False,
        padding=(0, 2, 0, 0),
    )
    table.add_column(style="cyan", no_wrap=True)
    table.add_column(ratio=1)
    for plugin in plugins:
        source = f"\n[dim]{escape(plugin.paper)}[/]" if plugin.paper else ""
        table.add_row(plugin.name, escape(plugin.summary) + source)
    console.print(table)


def _print_one(
    console: Console, family: str, plugin: Plugin[Any], parameters: list[Parameter]
) -> None:
    from rich.markup import escape

    console.print(f"[bold cyan]{plugin.name}[/] [dim]({family})[/]  {escape(plugin.summary)}")
    if plugin.paper:
        console.print(f"  {plugin.paper}", style="dim", markup=False)
    _print_parameters(console, parameters)
    console.print()


def _print_parameters(console: Console, parameters: list[Parameter]) -> None:
    from rich.table import Table

    if not parameters:
        console.print("  no parameters", style="dim")
        return
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(style="green", no_wrap=True)
    table.add_column(ratio=1)
    for parameter in parameters:
        table.add_row(f"  {parameter.name}", str(parameter.default), parameter.meaning)
    console.print(table)


def _describe(plugin: Plugin[Any]) -> Any:
    from hybrid_kv.cli.parameters import parameters_of
    from hybrid_kv.report.schema import PluginReport

    parameters = {
        parameter.name: {"default": parameter.default, "meaning": parameter.meaning}
        for parameter in parameters_of(plugin.params)
    }
    return PluginReport(
        name=plugin.name, summary=plugin.summary, paper=plugin.paper, parameters=parameters
    )
