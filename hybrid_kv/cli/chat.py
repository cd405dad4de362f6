"""`hybrid-kv chat`: a conversation whose cache is kept between turns."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from hybrid_kv.cli.display import note, stats_line
from hybrid_kv.cli.options import (
    CacheOptions,
    ChatOptions,
    LayersOption,
    ModelArgument,
    ModelOptions,
    OutputOptions,
    SamplingOptions,
)

if TYPE_CHECKING:
    from hybrid_kv.api import LLM
    from hybrid_kv.cli.model_run import Outcome
    from hybrid_kv.report.schema import ChatReport, ContextChatReport

    Chat = ChatReport | ContextChatReport

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
    from hybrid_kv.cli.files import check_target, has_no_tokenizer
    from hybrid_kv.cli.model_run import opened
    from hybrid_kv.cli.settings import build_config
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
        from hybrid_kv.cli.failures import describe
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
