"""Description of one plug-in: the same in a terminal, as JSON and as a page of the site.

Everything comes from where the plug-in is written: its docstring, the paper it was registered with
and its parameters. A docstring has a summary, how it works with its formula, and paragraphs that
begin with `Kept:`, `Lost:` and `Deviations:` (from the paper). What a class does not say of the
first two, its bases may.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybrid_kv.cli.parameters import Parameter, parameters_of
from hybrid_kv.plugins import METHODS, Plugin

INHERITED = ("Kept", "Lost")
LABELS = (*INHERITED, "Deviations")
_LABEL = re.compile(rf"^({'|'.join(LABELS)}): ", re.MULTILINE)
_NUMBER = re.compile(r"arXiv:(\d{4}\.\d{4,5})")


@dataclass(frozen=True, slots=True)
class Page:
    """One plug-in as its author describes it.

    how: paragraphs. sections: by label, one paragraph each; those that nobody wrote are not there.
    """

    name: str
    summary: str
    paper: str
    how: str
    sections: dict[str, str]
    parameters: list[Parameter]


def page_of(plugin: Plugin[Any]) -> Page:
    """The page of a registered plug-in."""
    how, sections = _parts(plugin.factory)
    for base in plugin.factory.__mro__[1:]:
        for label, text in _parts(base)[1].items():
            if label in INHERITED:
                sections.setdefault(label, text)
    ordered = {label: sections[label] for label in LABELS if label in sections}
    params = parameters_of(plugin.params)
    return Page(plugin.name, plugin.summary, plugin.paper, how, ordered, params)


def _parts(owner: type) -> tuple[str, dict[str, str]]:
    """Of a class's own docstring the body without its summary, and its labelled paragraphs."""
    doc = inspect.cleandoc(owner.__dict__.get("__doc__") or "")
    _, _, body = doc.partition("\n")
    how, *labelled = _LABEL.split(body)
    sections = dict(zip(labelled[::2], map(_flat, labelled[1::2]), strict=True))
    return "\n\n".join(_flat(part) for part in how.strip().split("\n\n")), sections


def _flat(text: str) -> str:
    return " ".join(text.split())


def markdown(page: Page) -> str:
    """The page as a document, whose links are of the site."""
    paper = _NUMBER.sub(r"[arXiv:\1](https://arxiv.org/abs/\1)", page.paper)
    parts = [f"# {page.name}", page.summary, f"Paper: {paper}." if paper else "", page.how]
    parts += [f"**{label}.** {_sentence(text)}" for label, text in page.sections.items()]
    parts.append("## Parameters")
    if page.parameters:
        rows = [
            f"| `{one.name}` | `{one.shown}` | {_cell(one.range)} | {_cell(one.meaning)} |"
            for one in page.parameters
        ]
        parts.append(
            "\n".join(["| name | default | range | meaning |", "|---|---|---|---|", *rows])
        )
    else:
        parts.append("None of its own.")
    parts.append(
        "Beside them stand the [settings](../settings.md) of every method "
        "(`hybrid-kv methods --verbose`)."
    )
    parts.append(f"`hybrid-kv methods --describe {page.name}` shows this page.")
    return "\n\n".join(part for part in parts if part) + "\n"


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:]


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def write_pages(folder: Path, names: Iterable[str] | None = None) -> Sequence[Path]:
    """Writes NAME.md of every method into a folder, which is made.

    Args:
        names: of these alone; None for all.
    """
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name in METHODS if names is None else names:
        path = folder / f"{name}.md"
        path.write_text(markdown(page_of(METHODS[name])), encoding="utf-8")
        written.append(path)
    return written
