"""`hybrid-kv context`: contexts in files, built once and asked many times."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hybrid_kv.cli import INTERRUPTED
from hybrid_kv.cli.display import human_bytes, human_seconds, note, stats_line
from hybrid_kv.cli.known_names import KnownVerbs
from hybrid_kv.cli.options import (
    CacheOptions,
    ChatOptions,
    ModelArgument,
    ModelOptions,
    OutputOptions,
    SamplingOptions,
    TokenErrorsOption,
    grouped,
)

if TYPE_CHECKING:
    from hybrid_kv.api import LLM, Context
    from hybrid_kv.report.schema import ContextAudit, ContextReport
    from hybrid_kv.saved.manifest import Manifest

ContextArgument = Annotated[
    Path, typer.Argument(metavar="CONTEXT", help="What build or Context.save wrote.")
]
ModelOption = Annotated[
    str | None,
    typer.Option(
        "--model",
        metavar="MODEL",
        help="Where the model lies now. [dim]default: where it lay when the context was built[/]",
        rich_help_panel="Model and cache",
    ),
]


def build(
    model: ModelArgument,
    files: Annotated[
        list[str],
        typer.Argument(metavar="FILE...", help="Text, Markdown or PDF; - reads stdin."),
    ],
    *,
    target: Annotated[
        Path, typer.Option("-o", "--output", metavar="CONTEXT", help="Where it goes: book.hkv.")
    ],
    compress: Annotated[
        str | None,
        typer.Option(
            "--compress",
            metavar="int8",
            help="Keys and values in 8 bits: half the file, with an error that info shows.",
        ),
    ] = None,
    talk: ChatOptions,
    options: ModelOptions,
    cache: CacheOptions,
    output: OutputOptions,
) -> None:
    """Read files into a context and save it; started again, it goes on where it ended."""
    from hybrid_kv.api.building import build_context
    from hybrid_kv.api.generation import PrefillCancelled
    from hybrid_kv.cli.display import prefill_bar
    from hybrid_kv.cli.files import PromptSource, build_config, check_target, read_texts
    from hybrid_kv.cli.model_run import cancel_on_ctrl_c, opened
    from hybrid_kv.saved.file_blocks import checked_compression

    config = build_config(options)
    talk.check()
    check_target(output)
    rounding = checked_compression(compress)
    found = PromptSource(read_texts(files), None, 0)
    found.check(model)
    with opened(model, options, config, output, cache=cache) as llm:
        prompt = found.for_model(llm, talk.system, raw=talk.raw)
        if cache.cache_dir is not None:  # may begin with what is there, and is left there
            with llm.context(prompt) as made:
                made.save(target, compress=rounding)
            return print_facts(target, output)
        with cancel_on_ctrl_c() as cancel, prefill_bar(output) as report:
            try:
                built = build_context(
                    *(llm, prompt, target), compress=rounding, on_prefill=report, cancel=cancel
                )
            except PrefillCancelled:
                note(f"interrupted: the same command goes on with '{target}'", output)
                raise typer.Exit(INTERRUPTED) from None
        if built.found_layers:
            note(f"{built.found_layers} of {built.num_layers} layers were there", output)
    return print_facts(target, output)


def ask(
    context: ContextArgument,
    question: Annotated[str, typer.Argument(metavar="QUESTION", help="What is asked.")],
    *,
    model: ModelOption = None,
    no_stream: Annotated[
        bool,
        typer.Option("--no-stream", help="Print the text at its end.", rich_help_panel="Output"),
    ] = False,
    sampling: SamplingOptions,
    options: ModelOptions,
    token_errors: TokenErrorsOption = False,
    output: OutputOptions,
) -> None:
    """Ask a saved context; the answer goes to stdout, everything else to stderr."""
    from hybrid_kv.cli.files import check_target, describe_run, environment_of, write_report
    from hybrid_kv.cli.generate import answer, note_doubts
    from hybrid_kv.report.schema import AskReport

    check_target(output)
    with _opened(context, model, options, output) as (llm, opened, name):
        start = partial(opened.ask, question)
        asked = {**sampling.as_options(), "token_errors": token_errors}
        outcome = answer(llm, start, asked, not no_stream, output)
        note(stats_line(outcome.generation, interrupted=outcome.interrupted), output)
        note_doubts(llm, outcome.generation, output)
        if output.json is not None:
            run = describe_run(llm, name, outcome)
            write_report(AskReport(environment=environment_of(llm), **dict(run)), output)
    if outcome.interrupted:
        raise typer.Exit(INTERRUPTED)


def chat(
    context: ContextArgument,
    *,
    model: ModelOption = None,
    sampling: SamplingOptions,
    options: ModelOptions,
    output: OutputOptions,
) -> None:
    """Talk about a saved context, which stays as it is; /reset, /stats and /quit are commands."""
    from hybrid_kv.cli.files import check_target
    from hybrid_kv.cli.generate import Session, talk_with
    from hybrid_kv.report.schema import ContextChatReport

    check_target(output)
    with _opened(context, model, options, output) as (llm, opened, name):
        session = Session(partial(_Talk, opened), sampling, output)
        talk_with(session, llm, name, output, ContextChatReport)


class _Talk:
    """Questions to a fork of a context, each of which is asked behind those before."""

    def __init__(self, context: Context) -> None:
        self._context = context.fork()

    def send(self, text: str, **options: Any) -> Any:
        """The answer, which becomes part of the fork."""
        return self._context.ask(text, keep=True, **options)


@contextmanager
def _opened(
    path: Path, model: str | None, options: ModelOptions, output: OutputOptions
) -> Iterator[tuple[LLM, Context, str]]:
    """The context with its model, by whatever name that has."""
    from hybrid_kv.cli.files import config_of_context
    from hybrid_kv.cli.model_run import opened
    from hybrid_kv.errors import ConfigError
    from hybrid_kv.saved.manifest import read_manifest

    manifest = read_manifest(path)
    name = model or manifest.source
    if name is None:
        raise ConfigError(
            f"saved context '{path}' does not say where its model lies; name it with --model"
        )
    config = config_of_context(manifest.config, options)
    options = replace(options, dtype=options.dtype or manifest.dtype)
    with opened(name, options, config, output) as llm, llm.open(path) as context:
        yield llm, context, name


def info(context: ContextArgument, *, output: OutputOptions) -> None:
    """Show what a saved context holds: tokens, bytes by part, index, model, method."""
    from hybrid_kv.cli.files import check_target

    check_target(output)
    print_facts(context, output)


def verify(context: ContextArgument, *, output: OutputOptions) -> None:
    """Compare every byte of a saved context with its checksums."""
    from hybrid_kv.cli.display import human_bytes
    from hybrid_kv.saved import verify_context

    found = verify_context(context)
    print(
        f"{context}: {len(found.manifest.blocks)} blocks, {human_bytes(found.num_bytes)}, "
        "all as they were written"
    )


app = typer.Typer(cls=KnownVerbs, no_args_is_help=True, rich_markup_mode="rich")

_EXAMPLES: dict[Callable[..., None], str] = {
    build: "hybrid-kv context build smollm2 book.md notes.pdf -o book.hkv",
    ask: 'hybrid-kv context ask book.hkv "Who is the narrator?"',
    chat: "hybrid-kv context chat book.hkv --set top_k=128",
    info: "hybrid-kv context info book.hkv --json -",
    verify: "hybrid-kv context verify book.hkv",
}

for _verb, _example in _EXAMPLES.items():
    app.command(epilog=f"Example: {_example}")(grouped(_verb))


# Facts of a saved context, told without a model ---------------------------------------------------


def print_facts(path: Path, output: OutputOptions) -> None:
    """Prints the facts of a context, and writes them where --json says."""
    from hybrid_kv.cli.display import console, facts_table
    from hybrid_kv.cli.files import write_report

    report = facts_of(path)
    if not output.json_only:
        table = facts_table("bold")
        for name, value in _lines(report):
            table.add_row(name, value)
        console().print(table)
    write_report(report, output)


def facts_of(path: Path) -> ContextReport:
    """Facts in the manifest of a context.

    Raises:
        FileFormatError, ReadError: there is none that can be read.
    """
    from hybrid_kv.report import probe_environment
    from hybrid_kv.report.schema import ContextReport
    from hybrid_kv.saved.manifest import read_manifest

    manifest = read_manifest(path)
    layers, extents = manifest.layers, [ext for it in manifest.layers for ext in it.extents]
    heads = [head for extent in extents for head in extent.heads]
    losses = [layer.int8 for layer in layers if layer.int8 is not None]
    return ContextReport(
        environment=probe_environment(),
        path=str(path),
        package=manifest.package,
        source=manifest.source,
        method=manifest.config["method"],
        config=manifest.config,
        dtype=manifest.dtype,
        page_size=manifest.page_size,
        num_layers=manifest.num_layers,
        num_tokens=manifest.num_tokens,
        is_chat=manifest.messages is not None,
        prefill_s=manifest.prefill_s,
        num_bytes=_bytes_by_part(path, manifest),
        dropped_tokens=max((layer.length - layer.num_entries for layer in layers), default=0),
        indexed_keys=sum(ext.length for ext in extents if ext.index is not None),
        unindexed_keys=sum(ext.length for ext in extents if ext.index is None),
        index_heads=Counter(head.serves for head in heads),
        check_recall=min((it.recall for it in heads if it.recall is not None), default=None),
        check_mass=min((it.mass for it in heads if it.mass is not None), default=None),
        audit=_audit(manifest),
        compress="int8" if losses else None,
        k_error=max((loss.k_error for loss in losses), default=0.0),
        v_error=max((loss.v_error for loss in losses), default=0.0),
    )


def _audit(manifest: Manifest) -> ContextAudit | None:
    from hybrid_kv.report.schema import ContextAudit

    if (found := manifest.audit) is None:
        return None
    return ContextAudit(
        looks=found.looks,
        recall_at_k=found.recall,
        missed_mass=found.missed_mass,
        missed_by_index=found.missed_by_index,
        output_error=found.output_error,
        mass_error=found.mass_error,
    )


def _bytes_by_part(path: Path, manifest: Manifest) -> dict[str, int]:
    kv = {layer.kv for layer in manifest.layers} | {layer.kv for layer in manifest.windows}
    kept = {layer.kept for layer in manifest.layers}
    states = {layer.states for layer in manifest.states}
    parts = {
        "keys and values": 0,
        "states": 0,
        "index": 0,
        "samples": 0,
        "kept by the method": 0,
        "other": 0,
    }
    for name, block in manifest.blocks.items():
        if name in kv:
            part = "keys and values"
        elif name in states:
            part = "states"
        elif name in kept:
            part = "kept by the method"
        elif name.endswith(".index"):
            part = "index"
        else:
            part = "samples" if "-samples" in name else "other"
        parts[part] += block.num_bytes
    parts["other"] += (path / "manifest.json").stat().st_size
    return parts


def _lines(report: ContextReport) -> Iterator[tuple[str, str]]:
    kind = "messages" if report.is_chat else "raw text"
    yield "tokens", f"{report.num_tokens:,} of {kind}, {report.num_layers} layers"
    parts = [f"{name} {human_bytes(count)}" for name, count in report.num_bytes.items() if count]
    yield "bytes", f"{human_bytes(sum(report.num_bytes.values()))}: {', '.join(parts)}"
    if report.compress is not None:
        errors = f"{report.k_error:.2%} of keys and {report.v_error:.2%} of values"
        yield "compressed", f"{report.compress}, error {errors} in the worst layer"
    index = f"{report.indexed_keys:,} keys in saved indexes"
    if report.unindexed_keys:
        index += f", {report.unindexed_keys:,} without (none needed, or built when it is opened)"
    yield "index", index
    if report.index_heads:
        heads = ", ".join(
            f"{count} by {kind}" for kind, count in sorted(report.index_heads.items())
        )
        yield "heads", f"{heads} (of all layers)"
    if report.check_recall is not None and report.check_mass is not None:
        told = f"recall {report.check_recall:.3f}, mass {report.check_mass:.4f}"
        yield "self-check", f"{told} of the worst head, on queries held out when it was made"
    yield "audit", _audit_line(report.audit)
    if report.dropped_tokens:
        yield "dropped", f"{report.dropped_tokens:,} tokens, by the method"
    yield "method", f"{report.method}, page_size {report.page_size}, {report.dtype}"
    yield "model", report.source or "unknown"
    if report.prefill_s is not None:
        yield "prefill", human_seconds(report.prefill_s)
    yield "written by", f"hybrid_kv {report.package}"


def _audit_line(audit: ContextAudit | None) -> str:
    if audit is None:
        return "none before it was saved; ask with --set audit_every=8 to look"
    recall = "" if audit.recall_at_k is None else f"recall {audit.recall_at_k:.3f}, "
    mass = "" if audit.mass_error is None else f"mass error {audit.mass_error:+z.4f}, "
    return (
        f"{recall}missed mass {audit.missed_mass:.4f} ({audit.missed_by_index:.4f} by the index), "
        f"{mass}output error {audit.output_error:.3f}, {audit.looks} looks before it was saved"
    )
