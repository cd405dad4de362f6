"""`hybrid-kv demo`: the shipped model finds a record with full attention and with a method."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

import typer

from hybrid_kv.cli import INTERRUPTED
from hybrid_kv.cli.options import ModelOptions, OutputOptions, count

if TYPE_CHECKING:
    from hybrid_kv.cli.comparison import Comparison
    from hybrid_kv.report.schema import DemoReport, LayerReport


def demo(
    *,
    context: Annotated[
        int, typer.Option(parser=count, metavar="N", help="Tokens of the context.")
    ] = 32768,
    records: Annotated[
        int, typer.Option(parser=count, metavar="N", help="Records hidden in it.")
    ] = 64,
    seed: Annotated[int, typer.Option(min=0, metavar="N", help="Of text and question.")] = 0,
    layer: Annotated[
        bool,
        typer.Option("--layer/--no-layer", help="End with one layer of a large model."),
    ] = True,
    layer_context: Annotated[
        int, typer.Option(parser=count, metavar="N", help="Made-up tokens of that layer.")
    ] = 131072,
    options: ModelOptions,
    output: OutputOptions,
) -> None:
    """Find one record in a long text twice, with full attention and with --method; compare.

    Ends with a decode step of one layer of the Llama-3-8B shape, full attention against hybrid.
    Exit code 1 if the answers differ or are wrong.
    """
    from hybrid_kv.cli.comparison import compare
    from hybrid_kv.cli.files import build_config, check_target, given_settings, write_report
    from hybrid_kv.cli.model_run import ended_by_ctrl_c
    from hybrid_kv.eval.needle import make_sample

    config = build_config(options)
    if "index_build" not in given_settings(
        options
    ):  # a build beside so short an answer is all noise
        config = config.replace(index_build="wait")
    check_target(output)
    sample = make_sample("key_value", context, num_records=records, seed=seed)
    result = compare(sample, records, config, options, output)
    if not output.json_only:
        _print(result)
    decoded, interrupted = None, result.interrupted
    if layer and not interrupted:
        try:
            with ended_by_ctrl_c(output) as check:
                decoded = _decode_layer(layer_context, output, check)
        except KeyboardInterrupt:  # the answers are there and are kept
            interrupted = True
    write_report(_describe(result, decoded), output)
    if interrupted:
        raise typer.Exit(INTERRUPTED)
    if not (result.agree and result.correct):
        raise typer.Exit(1)


def _decode_layer(
    num_tokens: int, output: OutputOptions, check: Callable[[], None]
) -> LayerReport | None:
    from hybrid_kv.cli.comparison import decode_layer, print_layer
    from hybrid_kv.cli.display import console

    decoded = decode_layer(num_tokens, output, check)
    if decoded is not None and not output.json_only:
        console().print()
        print_layer(console(), decoded)
    return decoded


def _describe(result: Comparison, layer: LayerReport | None) -> DemoReport:
    from hybrid_kv.cli.display import attended_ratio
    from hybrid_kv.report.schema import DemoReport

    first, second = result.answers
    return DemoReport(
        environment=result.environment,
        question=result.question,
        expected=result.expected,
        agree=result.agree,
        correct=result.correct,
        attended_ratio=attended_ratio(second.generation.work),
        device_kv_bytes=second.generation.device_kv_bytes,
        read_s=result.read_s,
        runs=(first.run, second.run),
        layer=layer,
    )


def _print(result: Comparison) -> None:
    from rich.text import Text

    from hybrid_kv.cli.display import (
        Column,
        attended_ratio,
        console,
        facts_table,
        human_seconds,
        percent,
        print_columns,
    )

    out = console()
    facts = facts_table("bold")
    facts.add_row("model", f"{result.model}, on {result.environment.cpu.model}")
    facts.add_row(
        "context",
        f"{result.context_tokens:,} tokens, {result.records} records in filler; read once in "
        f"{human_seconds(result.read_s)}",
    )
    facts.add_row("it ends", Text(f"… {result.ending}", "dim"))
    facts.add_row("question", Text(result.question, "cyan"))
    facts.add_row("expected", Text(result.expected, "cyan"))
    out.print(facts)
    out.print()
    rows = [answer.rows() for answer in result.answers]
    labels = Column("", [Text(label, "bold") for label, _ in rows[0]], left=True)
    answers = [
        Column(answer.title, [cell for _, cell in cells], left=True)
        for answer, cells in zip(result.answers, rows, strict=True)
    ]
    print_columns(out, [labels], answers)
    out.print()
    share = percent(attended_ratio(result.answers[1].generation.work))
    method = result.answers[1].title
    if result.interrupted:
        found = Text.assemble(("interrupted", "yellow"), " before both answers were complete")
    elif result.agree and result.correct:
        words = ("The answers agree and are right", "green")
        found = Text.assemble(words, f"; {method} attended {share} of the tokens.")
    elif result.agree:
        found = Text("The answers agree and are wrong.", "red")
    else:
        found = Text("The answers differ.", "red")
    out.print(found)
