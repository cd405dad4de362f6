"""`hybrid-kv methods`: what can be chosen, and its parameters."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from hybrid_kv.cli import completion
from hybrid_kv.cli.options import OutputOptions, Plugins

if TYPE_CHECKING:
    from rich.console import Console

    from hybrid_kv.cli.parameters import Parameter
    from hybrid_kv.plugins import Plugin


def methods(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME",
            autocompletion=completion.plugins,
            help="One method or index kind.",
        ),
    ] = None,
    *,
    plugins: Plugins = None,
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
    from hybrid_kv.cli.display import console
    from hybrid_kv.cli.parameters import common_parameters, parameters_of

    out = console()
    if not with_parameters:
        _print_table(out, "Methods (--method NAME)", kept)
        out.print()
        _print_table(out, "Index kinds (--set cold.index=KIND)", kinds)
        out.print("\nParameters of one: hybrid-kv methods NAME; of all: --verbose", style="dim")
        return
    for plugin in kept:
        _print_one(out, "method", plugin, parameters_of(plugin.params))
    for plugin in kinds:
        _print_one(out, "index kind", plugin, parameters_of(plugin.params))
    if kept:
        out.print("every method", style="bold")
        _print_parameters(out, common_parameters())


def _print_table(out: Console, title: str, plugins: list[Plugin[Any]]) -> None:
    from rich.text import Text

    from hybrid_kv.cli.tables import facts_table

    out.print(title, style="bold")
    table = facts_table("cyan")
    for plugin in plugins:
        source = ("\n" + plugin.paper, "dim") if plugin.paper else ""
        table.add_row(plugin.name, Text.assemble(plugin.summary, source))
    out.print(table)


def _print_one(out: Console, family: str, plugin: Plugin[Any], parameters: list[Parameter]) -> None:
    from rich.text import Text

    name = (plugin.name, "bold cyan")
    out.print(Text.assemble(name, (f" ({family})", "dim"), f"  {plugin.summary}"))
    if plugin.paper:
        out.print(f"  {plugin.paper}", style="dim")
    _print_parameters(out, parameters)
    out.print()


def _print_parameters(out: Console, parameters: list[Parameter]) -> None:
    from hybrid_kv.cli.tables import facts_table

    if not parameters:
        out.print("  no parameters", style="dim")
        return
    table = facts_table("", "green")
    for parameter in parameters:
        table.add_row(f"  {parameter.name}", parameter.shown, parameter.meaning)
    out.print(table)


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
