"""`hybrid-kv generate` and `chat`: one prompt that is continued, or a conversation."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Protocol

import typer

from hybrid_kv.cli import INTERRUPTED
from hybrid_kv.cli.display import note, percent, stats_line
from hybrid_kv.cli.options import (
    CacheOptions,
    ChatOptions,
    LayersOption,
    ModelArgument,
    ModelOptions,
    OutputOptions,
    SamplingOptions,
    TokenErrorsOption,
    count,
)

if TYPE_CHECKING:
    from hybrid_kv.api import LLM, Generation
    from hybrid_kv.cli.model_run import Outcome
    from hybrid_kv.report.schema import ChatReport, ContextChatReport

    Chat = ChatReport | ContextChatReport


_PROMPT = "Prompt"


@dataclass(frozen=True, slots=True)
class PromptOptions:
    """Other places that a prompt may come from."""

    prompt_file: Annotated[
        str | None,
        typer.Option(metavar="FILE|-", help="Read the text from a file.", rich_help_panel=_PROMPT),
    ] = None
    prompt_tokens: Annotated[
        int | None,
        typer.Option(
            parser=count,
            metavar="N",
            help="Take N random tokens; for models without tokenizer.",
            rich_help_panel=_PROMPT,
        ),
    ] = None


def generate(
    model: ModelArgument,
    prompt: Annotated[str | None, typer.Argument(metavar="PROMPT", help="The text.")] = None,
    *,
    source: PromptOptions,
    talk: ChatOptions,
    num_beams: Annotated[
        int,
        typer.Option(
            min=1, metavar="N", help="Beam search; not streamed.", rich_help_panel="Sampling"
        ),
    ] = 1,
    no_stream: Annotated[
        bool,
        typer.Option("--no-stream", help="Print the text at its end.", rich_help_panel="Output"),
    ] = False,
    sampling: SamplingOptions,
    options: ModelOptions,
    cache: CacheOptions,
    cut: LayersOption,
    token_errors: TokenErrorsOption = False,
    output: OutputOptions,
) -> None:
    """Answer or continue a prompt; the text goes to stdout, everything else to stderr."""
    from hybrid_kv.cli.files import (
        build_config,
        check_target,
        describe_run,
        environment_of,
        exactness_notice,
        find_prompt,
        given_settings,
        write_report,
    )
    from hybrid_kv.cli.model_run import opened
    from hybrid_kv.report import RunReport

    config = build_config(options)
    found = find_prompt(prompt, source.prompt_file, source.prompt_tokens, sampling.seed or 0)
    found.check(model)
    talk.check(text=found.text is not None)
    check_target(output)
    with opened(model, options, config, output, cut.layers, cache) as llm:
        streaming = not no_stream and num_beams == 1
        start = partial(llm.generate, found.for_model(llm, talk.system, raw=talk.raw))
        asked = {**sampling.as_options(), "num_beams": num_beams, "token_errors": token_errors}
        outcome = answer(llm, start, asked, streaming, output)
        got = outcome.generation
        note(stats_line(got, interrupted=outcome.interrupted), output)
        note_doubts(llm, got, output)
        notice = exactness_notice(given_settings(options), got.work, got.prompt_tokens)
        if notice is not None:
            note(notice, output)
        if output.json is not None:
            run = describe_run(llm, model, outcome)
            write_report(RunReport(environment=environment_of(llm), **dict(run)), output)
    if outcome.interrupted:
        raise typer.Exit(INTERRUPTED)


def answer(
    llm: LLM,
    start: Callable[..., Any],
    options: dict[str, Any],
    streaming: bool,
    output: OutputOptions,
) -> Outcome:
    """Generates, and prints the text unless stdout belongs to the JSON."""
    from hybrid_kv.cli.model_run import run, write_now

    streaming = streaming and llm.tokenizer is not None and not output.json_only
    outcome = run(start, options, write_now if streaming else None, output)
    if not output.json_only:
        got = outcome.generation
        # A model without tokenizer has ids instead of text.
        text = got.text if llm.tokenizer else " ".join(map(str, got.token_ids))
        print("" if streaming else text, flush=True)
    return outcome


_DOUBTFUL = 0.1
"""Risk of another token from which on one is doubtful."""
_NAMED = 8


def note_doubts(llm: LLM, got: Generation, output: OutputOptions) -> None:
    """One line on the tokens that full attention might have chosen otherwise, if that was asked."""
    errors = got.token_errors
    if not errors:
        return
    doubtful = [place for place, one in enumerate(errors) if one.flip >= _DOUBTFUL]
    worst = sorted(sorted(doubtful, key=lambda place: -errors[place].flip)[:_NAMED])

    def named(place: int) -> str:
        token = got.token_ids[place]
        word = repr(llm.tokenizer.decode([token])) if llm.tokenizer else str(token)
        return f"{place + 1} {word} {percent(errors[place].flip)}"

    kl = sum(one.kl for one in errors) / len(errors)
    text = f"token errors: expected KL {kl:.2g} nats a token, {len(doubtful)} of {len(errors)} "
    text += f"tokens doubtful (risk of another one from {_DOUBTFUL:.0%} on)"
    listed = ", ".join(map(named, worst))
    more = f" and {len(doubtful) - len(worst)} more" if len(doubtful) > len(worst) else ""
    note(f"{text}: {listed}{more}" if doubtful else text, output)


# A conversation whose cache is kept between turns -------------------------------------------------


_HELP = "/reset forgets the conversation, /stats tells what the last answer cost, /quit leaves"


def chat(
    model: ModelArgument,
    *,
    talk: ChatOptions,
    sampling: SamplingOptions,
    options: ModelOptions,
    cache: CacheOptions,
    cut: LayersOption,
    output: OutputOptions,
) -> None:
    """Talk to a model; /reset, /stats and /quit are commands, Ctrl-C ends an answer."""
    from hybrid_kv.cli.files import build_config, check_target, has_no_tokenizer
    from hybrid_kv.cli.model_run import opened
    from hybrid_kv.errors import ConfigError
    from hybrid_kv.report.schema import ChatReport

    config = build_config(options)
    talk.check()
    check_target(output)
    if has_no_tokenizer(model):
        raise ConfigError(f"a conversation needs a tokenizer, and model '{model}' has none")
    with opened(model, options, config, output, cut.layers, cache) as llm:
        llm.require_tokenizer()
        begin = partial(llm.conversation, system=talk.system, raw=talk.raw)
        talk_with(Session(begin, sampling, output), llm, model, output, ChatReport)


def talk_with(
    session: Session, llm: LLM, model: str, output: OutputOptions, kind: type[Chat]
) -> None:
    """Runs a session and reports what was said in it, however it ends."""
    from hybrid_kv.cli.files import describe_run, environment_of, write_report

    if sys.stdin.isatty():
        note(_HELP, output)
    try:
        session.run()
    finally:
        turns = tuple(describe_run(llm, model, outcome) for outcome in session.outcomes)
        write_report(kind(environment=environment_of(llm), turns=turns), output)


class ChatSession(Protocol):
    """A conversation on the screen; send: see `Conversation.send`."""

    @property
    def send(self) -> Callable[..., Any]: ...


class Session:
    """Reads messages and commands until the end of stdin."""

    def __init__(
        self, begin: Callable[[], ChatSession], sampling: SamplingOptions, output: OutputOptions
    ) -> None:
        self._begin, self._output = begin, output
        self._options = sampling.as_options()
        self._conversation = begin()
        self.outcomes: list[Outcome] = []
        self._commands: dict[str, Callable[[], None]] = {
            "/reset": self._reset,
            "/stats": self._stats,
        }

    def run(self) -> None:
        """Answers every line; returns on /quit and at the end of stdin."""
        while (line := read_line()) is not None and line != "/quit":
            if line in self._commands:
                self._commands[line]()
            elif line.startswith("/"):
                note(f"unknown command '{line}'; {_HELP}", self._output)
            elif line:
                self._answer(line)

    def _answer(self, message: str) -> None:
        from hybrid_kv.cli.known_names import describe
        from hybrid_kv.cli.model_run import run, write_now
        from hybrid_kv.errors import CapacityError

        write = None if self._output.json_only else write_now
        send = partial(self._conversation.send, message)
        try:
            outcome = run(send, self._options, write, self._output)
        except CapacityError as error:  # the conversation is as it was: something shorter may fit
            if not sys.stdin.isatty():
                raise
            print(describe(error)[1], file=sys.stderr)
            return
        self.outcomes.append(outcome)
        if write is not None:
            write("\n")

    def _reset(self) -> None:
        self._conversation = self._begin()
        note("the conversation begins anew", self._output)

    def _stats(self) -> None:
        if not self.outcomes:
            note("nothing has been answered yet", self._output)
            return
        last = self.outcomes[-1]
        note(stats_line(last.generation, interrupted=last.interrupted), self._output)


def read_line() -> str | None:
    """The next message without surrounding space; None at the end of stdin."""
    if not sys.stdin.isatty():
        line = sys.stdin.readline()
        return line.strip() if line else None
    if sys.stdout.isatty():
        import readline  # noqa: F401 (input() edits lines and keeps a history once it is there)
    else:
        sys.stderr.write("> ")
        sys.stderr.flush()
    try:
        return input("> " if sys.stdout.isatty() else "").strip()
    except EOFError:
        return None
