"""From an exception to one sentence and an exit code."""

from __future__ import annotations

import re
from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any

from hybrid_kv.errors import ConfigError, HybridKVError, unknown_name


def describe(error: Exception) -> tuple[int, str]:
    """The exit code and the line for stderr."""
    if isinstance(error, HybridKVError):
        return error.exit_code, f"error: {error}"
    # The command line library brings its exceptions along in private modules: known by their form.
    if hasattr(error, "format_message"):
        return int(getattr(error, "exit_code", 2)), _usage(error)
    text = " ".join(str(error).split()) or "no message"
    if type(error).__name__ == "OutOfMemoryError" or isinstance(error, MemoryError):
        return 1, (
            f"error: memory ran out: {_first_sentence(text)}; shorten the prompt, keep fewer "
            "tokens on the device (window_tokens, spare_tokens) or use --device cpu"
        )
    return 1, (
        f"error: {type(error).__name__}: {_first_sentence(text)}; run again with --debug for the "
        "traceback"
    )


def _first_sentence(text: str) -> str:
    return re.split(r"(?<=[a-z)])\. ", text)[0].rstrip(".")


def _usage(error: Any) -> str:
    name = type(error).__name__
    if name == "NoArgsIsHelpError":
        return str(error.format_message())
    verb = error.ctx.command_path if getattr(error, "ctx", None) is not None else "hybrid-kv"
    help_hint = f"see {verb} --help"
    if name == "NoSuchOption":
        options = [option for param in error.ctx.command.params for option in param.opts]
        near = get_close_matches(error.option_name, options, n=1, cutoff=0.5)
        hint = f"did you mean '{near[0]}'? " if near else ""
        return f"error: unknown option '{error.option_name}'; {hint}{help_hint}"
    text = " ".join(error.format_message().split()).rstrip(".")
    text = re.sub(r"^Invalid value for '?([^':]+)'?: ", r"\1: ", text)
    text = re.sub(r"^(\S+: )Value error, ", r"\1", text)
    text = re.sub(r"^Missing argument '?([^']+)'?", r"\1 is missing", text)
    return f"error: {text[0].lower() if text[:2].istitle() else text[0]}{text[1:]}; {help_hint}"


def refuse_foreign_bytes(words: Iterable[str]) -> None:
    """Raises ConfigError for an argument that is no text: no report could name it."""
    for number, word in enumerate(words, 1):
        try:
            word.encode()
        except UnicodeEncodeError:
            shown = word.encode(errors="backslashreplace").decode()
            raise ConfigError(
                f"argument {number} must be UTF-8, got '{shown}'; write it so, and rename a file "
                "that is called so"
            ) from None


def refuse_unknown_verb(name: str, known: Iterable[str]) -> None:
    """Raises ConfigError with the nearest verb unless `name` is a verb or an option."""
    if name not in set(known) and not name.startswith("-"):
        raise unknown_name("verb", name, known)
