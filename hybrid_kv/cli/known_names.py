"""Names of models, methods, tasks and settings: completed by a shell, refused where unknown; and
the one sentence of every error.

Heavy modules load only where needed: unknown names of --set are refused before PyTorch is imported,
which takes seconds. They are in a table that `table()` makes of the built-in methods; tests hold it
to them. What a value may be is said by the method itself, later.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperGroup

from hybrid_kv.errors import ConfigError, HybridKVError, unknown_name, unknown_setting
from hybrid_kv.former import is_former

VARIABLE = "_HYBRID_KV_COMPLETE"
"""Set by the shell's script when it asks."""

_RANDOM = "random:"


def asked_for() -> bool:
    """Whether a shell asks what could follow, so that nothing may be printed but that."""
    return VARIABLE in os.environ


def models(incomplete: str) -> list[str]:
    """Models that have a name; folders are completed by the shell."""
    names = ["needle", "smollm2"]
    if incomplete and _RANDOM.startswith(incomplete[: len(_RANDOM)]):
        from hybrid_kv.models.shapes import SHAPES

        names += [_RANDOM + shape for shape in SHAPES]
    else:
        names.append(_RANDOM)
    return _starting(incomplete, names)


def methods(incomplete: str) -> list[str]:
    """Names of methods."""
    from hybrid_kv.plugins import METHODS

    return _starting(incomplete, METHODS)


def tasks(incomplete: str) -> list[str]:
    """Names of tasks behind those that are there already."""
    from hybrid_kv.eval.tasks import TASKS

    before, comma, last = incomplete.rpartition(",")
    return [f"{before}{comma}{name}" for name in _starting(last, ["ruler", "all", *TASKS])]


def plugins(incomplete: str) -> list[str]:
    """Names of methods and index kinds."""
    from hybrid_kv.plugins import INDEXES, METHODS

    return _starting(incomplete, dict.fromkeys([*METHODS, *INDEXES]))


def settings(ctx: typer.Context, incomplete: str) -> list[str]:
    """Settings of the method that --method names (else of the default), as KEY=, by their dotted
    names and by last parts that are unique; of an index, its kinds.
    """
    from hybrid_kv.cli.method_pages import common_parameters, parameters_of
    from hybrid_kv.config import HybridConfig
    from hybrid_kv.plugins import INDEXES, METHODS

    method = ctx.params.get("method") or HybridConfig().method
    if method not in METHODS:
        return []
    if incomplete.startswith("index="):
        return _starting(incomplete, [f"index={kind}" for kind in INDEXES])
    known = [*parameters_of(METHODS[method].params), *common_parameters()]
    dotted = [parameter.name for parameter in known]
    last = [name.rpartition(".")[2] for name in dotted]
    short = [name for name in last if last.count(name) == 1]
    return _starting(incomplete, [f"{name}=" for name in dict.fromkeys([*short, *dotted])])


def _starting(incomplete: str, names: Iterable[str]) -> list[str]:
    return [name for name in names if name.startswith(incomplete)]


PATH = Path(__file__).parent.parent / "assets" / "settings.json"
_DEFAULT = "hybrid"


def table() -> dict[str, Any]:
    """Names of all settings: those of every method ("common"), and what each has beside them."""
    from hybrid_kv.config import HybridConfig, settings_in
    from hybrid_kv.plugins import INDEXES, METHODS

    own = [name for name in METHODS if METHODS[name].factory.__module__.startswith("hybrid_kv.")]
    names = {method: HybridConfig.settings_of(method) for method in own}
    common = set.intersection(*names.values())
    kinds = {kind: settings_in(INDEXES[kind].params) for kind in INDEXES}
    return {
        "common": sorted(common),
        "index": sorted({name for names in kinds.values() for name in names}),
        "methods": {method: sorted(found - common) for method, found in names.items()},
    }


def check_names(method: str | None, texts: Iterable[str]) -> None:
    """Raises ConfigError for a setting KEY=VALUE that is none of the method's, or of any for None.

    A method that is not built in is asked itself, later.
    """
    known = json.loads(PATH.read_text(encoding="utf-8"))
    methods = known["methods"]
    if method is not None and method not in methods:
        return

    def names(of: str) -> set[str]:
        return {*methods[of], *known["common"]}

    accepted = set.union(*map(names, methods if method is None else [method]))
    if any(name.startswith("cold.index.") for name in accepted):
        accepted.update(known["index"])  # of another kind, which may be given beside it
    for text in texts:
        key, equals, _ = text.partition("=")
        key = key.strip()
        if not equals or not key:
            raise ConfigError(f"--set must be KEY=VALUE like top_k=64, got '{text}'")
        group, _, last = key.rpartition(".")
        if group == "cold" and method is not None and is_former(method, last):
            raise unknown_setting(f"{method} setting", key, ())
        # What lies below a composed method, and its own settings by dots, is known to it alone.
        if "." in key or key in accepted or any(path.endswith(f".{key}") for path in accepted):
            continue
        shown = method or _DEFAULT
        raise unknown_setting(f"{shown} setting", key, names(shown))


# From an exception to one sentence and an exit code -----------------------------------------------


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


class KnownVerbs(TyperGroup):
    """A group of verbs that refuses others."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The verb that is meant; ConfigError with the nearest name where there is none."""
        name = args[0]
        # While a shell asks what may follow, a verb is not yet written to its end.
        if name not in self.commands and not name.startswith("-") and not ctx.resilient_parsing:
            raise unknown_name("verb", name, self.commands)
        return super().resolve_command(ctx, args)
