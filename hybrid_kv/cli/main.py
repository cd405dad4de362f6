"""The `hybrid-kv` command and what it does with errors."""

from __future__ import annotations

import logging
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, Any, NoReturn

import typer

from hybrid_kv.cli import ENDED, INTERRUPTED
from hybrid_kv.cli.context import app as context
from hybrid_kv.cli.demo import demo
from hybrid_kv.cli.doctor import doctor
from hybrid_kv.cli.evaluate import evaluate
from hybrid_kv.cli.generate import chat, generate
from hybrid_kv.cli.known_names import KnownVerbs, asked_for, describe, refuse_foreign_bytes
from hybrid_kv.cli.ls import ls, pull
from hybrid_kv.cli.methods import heads, methods
from hybrid_kv.cli.options import grouped
from hybrid_kv.cli.plan import plan
from hybrid_kv.cli.profile import profile
from hybrid_kv.cli.report import report
from hybrid_kv.cli.serve import serve


class Verbs(KnownVerbs):
    """The verbs; every error leaves as one sentence on stderr and an exit code."""

    def invoke(self, ctx: Any) -> Any:
        """Runs a verb; Ctrl-C that the verb has no answer to ends it with a line."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            print(ENDED, file=sys.stderr)
            raise typer.Exit(INTERRUPTED) from None

    def main(self, args: Sequence[str] | None = None, *rest: Any, **extra: Any) -> NoReturn:
        """Runs a command line and leaves with its exit code: 0, 1, 2, or 130 after Ctrl-C."""
        words = list(sys.argv[1:] if args is None else args)
        extra.update(standalone_mode=False, prog_name="hybrid-kv")
        try:
            refuse_foreign_bytes(words)
            with logged(debug="--debug" in words):
                code = super().main(words, *rest, **extra)
            sys.stdout.flush()
        except (KeyboardInterrupt, typer.Abort):
            print(ENDED, file=sys.stderr)
            code = INTERRUPTED
        except BrokenPipeError:  # the reader has gone; a flush at exit must not fail again
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            code = 1
        except Exception as error:
            if asked_for():  # in the middle of a line that is being typed
                sys.exit(1)
            if "--debug" in words:
                traceback.print_exc()
            code, sentence = describe(error)
            print(sentence, file=sys.stderr)
        sys.exit(code if isinstance(code, int) else 0)


def _print_version(wanted: bool) -> None:
    if wanted:
        from hybrid_kv import __version__

        print(f"hybrid-kv {__version__}")
        raise typer.Exit


app = typer.Typer(cls=Verbs, no_args_is_help=True, rich_markup_mode="rich")


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print it and go."),
    ] = False,
) -> None:
    """Long contexts on one small GPU: a KV cache in two tiers, device and host memory."""


_EXAMPLES: dict[Callable[..., None], str] = {
    generate: "hybrid-kv generate needle --prompt-file book.txt --set top_k=64",
    chat: "hybrid-kv chat ./llama --method hybrid --temperature 0.7",
    demo: "hybrid-kv demo --context 16k --method retrieval_attention",
    profile: "hybrid-kv profile random:llama-3-8b --layers 2 --fill synthetic --context 32k,128k "
    "--json run.json --resume",
    plan: "hybrid-kv plan random:llama-3-8b --context 128k --card rtx-4090 --host-memory 64GiB",
    evaluate: "hybrid-kv eval smollm2 --tasks key_value,perplexity --methods hybrid,quest "
    "--budget 2%,10% -o results",
    serve: "hybrid-kv serve smollm2 --port 8000 --set top_k=128",
    report: "hybrid-kv report before.json after.json --html report.html",
    methods: "hybrid-kv methods hybrid",
    ls: "hybrid-kv ls models/ llama.gguf",
    pull: "hybrid-kv pull OWNER/NAME --file model-Q4_K_M.gguf",
    heads: "hybrid-kv heads smollm2 --text book.txt -o heads.json",
    doctor: "hybrid-kv doctor --model random:llama-3-8b --context 128k",
}

_NAMES = {evaluate: "eval"}
"""Verbs whose names mean something else in Python."""

for _verb, _example in _EXAMPLES.items():
    app.command(_NAMES.get(_verb), epilog=f"Example: {_example}")(grouped(_verb))

app.add_typer(context, name="context", help="Build, ask and look at contexts in files.")


@contextmanager
def logged(*, debug: bool) -> Iterator[None]:
    """A block whose log lines are shown: errors, with their tracebacks, and all if `debug`."""
    logger, handler = logging.getLogger("hybrid_kv"), logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(relativeCreated)7d ms %(name)s: %(message)s"))
    level, shown = logger.level, logging.DEBUG if debug else logging.ERROR
    handler.setLevel(shown)
    logger.addHandler(handler)
    if debug:
        logger.setLevel(shown)
    try:
        yield
    finally:
        logger.setLevel(level)
        logger.removeHandler(handler)
