"""Pages that are made from the code: command line, settings, methods, index kinds, Python."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import typer

import hybrid_kv
from hybrid_kv.cli.main import app
from hybrid_kv.cli.method_pages import Parameter, common_parameters, markdown, page_of
from hybrid_kv.plugins import INDEXES, METHODS, Plugin
from hybrid_kv.registry import Registry


def write_reference(folder: Path) -> None:
    """Write every generated page; a page that has not changed is left as it is."""
    pages = {
        "cli.md": command_line(),
        "settings.md": settings(),
        "methods.md": plug_ins("Methods", METHODS, "methods"),
        "indexes.md": plug_ins("Index kinds", INDEXES, "indexes"),
        "python.md": python(),
    }
    for registry, home in ((METHODS, "methods"), (INDEXES, "indexes")):
        pages |= {f"{home}/{name}.md": markdown(page_of(registry[name])) for name in registry}
    for name, text in pages.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
    for path in folder.rglob("*.md"):
        if str(path.relative_to(folder)) not in pages:
            path.unlink()  # of a method that is gone


def command_line() -> str:
    """Every verb with its arguments and options, as `--help` lists them."""
    parts = ["# Command line", "    hybrid-kv VERB [OPTIONS]"]
    for name, command in _verbs(typer.main.get_command(app), "hybrid-kv"):
        parts += [f"## {name}", _flat(command.help or ""), _options(command)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _verbs(group: Any, path: str) -> Iterator[tuple[str, Any]]:
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from _verbs(command, f"{path} {name}")
        else:
            yield f"{path} {name}", command


def _options(command: Any) -> str:
    rows = ["| argument, option | meaning | default |", "|---|---|---|"]
    for one in command.params:
        if getattr(one, "hidden", False):
            continue
        names = [one.metavar or one.name.upper()]
        if one.param_type_name == "option":
            names = [*one.opts, *one.secondary_opts]
        shown = "" if one.default in (None, False, ()) or callable(one.default) else one.default
        told = ", ".join(f"`{name}`" for name in names)
        rows.append(f"| {told} | {_cell(_flat(one.help or ''))} | {_code(shown)} |")
    return "\n".join(rows)


def settings() -> str:
    """Settings that stand beside every method's own."""
    parts = [
        "# Settings",
        "A setting is given to `HybridConfig`, in YAML, or by `--set NAME=VALUE`. These stand "
        "beside the settings of every method, which [its page](methods.md) has.",
        _table(common_parameters()),
    ]
    return "\n\n".join(parts) + "\n"


def plug_ins(title: str, registry: Registry[Any], home: str) -> str:
    """A list of plug-ins by name, each with a page."""
    plugins: list[Plugin[Any]] = [registry[name] for name in registry]
    rows = ["| name | what it does |", "|---|---|"]
    rows += [f"| [`{one.name}`]({home}/{one.name}.md) | {_cell(one.summary)} |" for one in plugins]
    listed = "\n".join(f"{home}/{one.name}" for one in plugins)
    tree = f"```{{toctree}}\n:hidden:\n\n{listed}\n```"
    return "\n\n".join([f"# {title}", "\n".join(rows), tree]) + "\n"


def python() -> str:
    """The public names, from their docstrings."""
    parts = [
        "# Python",
        "Public names of `hybrid_kv`; for authors of plug-ins, `hybrid_kv.plugin`.",
    ]
    for name in hybrid_kv.__all__:
        kind = "autoclass" if isinstance(getattr(hybrid_kv, name), type) else "autofunction"
        members = "\n:members:" if kind == "autoclass" and name in _WITH_MEMBERS else ""
        parts.append(f"```{{eval-rst}}\n.. {kind}:: hybrid_kv.{name}{_indented(members)}\n```")
    return "\n\n".join(parts) + "\n"


_WITH_MEMBERS = {"LLM", "Context", "Conversation", "Generation"}


def _indented(text: str) -> str:
    return text.replace("\n", "\n   ")


def _table(parameters: Iterable[Parameter]) -> str:
    rows = ["| name | default | range | meaning |", "|---|---|---|---|"]
    rows += [
        f"| `{one.name}` | `{one.shown}` | {_cell(one.range)} | {_cell(one.meaning)} |"
        for one in parameters
    ]
    return "\n".join(rows)


def _flat(text: str) -> str:
    return " ".join(text.split())


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _code(value: object) -> str:
    return f"`{_cell(str(value))}`" if value != "" else ""
