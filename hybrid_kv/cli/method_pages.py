"""Description of one plug-in and its settings: in a terminal, as JSON and as a page of the site.

Everything comes from where the plug-in is written: its docstring, the paper it was registered with
and its parameters. A docstring has a summary, how it works with its formula, and paragraphs that
begin with `Kept:`, `Lost:` and `Deviations:` (from the paper). What a class does not say of the
first two, its bases may.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from hybrid_kv.config import HybridConfig, MethodConfig, PluginConfig, as_printed, settings_in
from hybrid_kv.plugins import METHODS, Plugin


@dataclass(frozen=True, slots=True)
class Parameter:
    """One setting: its dotted name, its default as JSON has it, what it means and may be."""

    name: str
    default: Any
    meaning: str
    range: str = ""

    @property
    def shown(self) -> str:
        """The default as a user would write it."""
        if isinstance(self.default, Mapping):
            parts = self.default.items()
            named = [f"{k}: {one if isinstance(one, str) else one['method']}" for k, one in parts]
            return "; ".join(named)
        listed = isinstance(self.default, tuple)
        return ",".join(map(str, self.default)) if listed else str(self.default)


def parameters_of(params: type[BaseModel]) -> list[Parameter]:
    """The settings of a plug-in's parameter group; those of groups inside it by dotted name."""
    return [replace(one, name=as_printed(one.name)) for one in _walk(params(), "")]


def common_parameters() -> list[Parameter]:
    """The settings that stand beside every method's own."""
    return [
        parameter
        for parameter in _walk(HybridConfig(method="full"), "")
        if parameter.name not in ("method", "params")
    ]


def _walk(group: BaseModel, prefix: str) -> Iterator[Parameter]:
    for name in settings_in(type(group)):
        field, value = type(group).model_fields[name], getattr(group, name)
        if isinstance(value, MethodConfig):
            yield Parameter(prefix + name, _said(value), meaning(type(group), name), "a method")
        elif isinstance(value, Mapping):
            said = {key: _said(one) for key, one in value.items()}
            yield Parameter(prefix + name, said, meaning(type(group), name), "a method for each")
        elif isinstance(value, PluginConfig):
            kind = getattr(value, value.name_field)
            known = ", ".join(value.registry)
            yield Parameter(prefix + name, kind, meaning(type(group), name), f"one of {known}")
            yield from _walk(value.params, f"{prefix}{name}.")
        elif isinstance(value, BaseModel):
            yield from _walk(value, f"{prefix}{name}.")
        else:
            yield Parameter(prefix + name, value, meaning(type(group), name), range_of(field))


def _said(part: MethodConfig) -> Any:
    """A method as a user would write it: its name, or a group where something is set."""
    usual = type(part.params)().model_dump()
    own = {key: one for key, one in part.params.model_dump().items() if one != usual[key]}
    return {"method": part.method, **own} if own else part.method


def range_of(field: FieldInfo) -> str:
    """Range of a setting in words, by annotation: 'a number from 0, to 1', 'drop or offload'."""
    return _alternatives(field.annotation, field.metadata)


def _alternatives(annotation: Any, limits: list[Any]) -> str:
    if get_origin(annotation) is Annotated:
        inner, *more = get_args(annotation)
        flat = [one for some in more for one in getattr(some, "metadata", [some])]
        return _alternatives(inner, [*flat, *limits])
    if get_origin(annotation) is Literal:
        return " or ".join(map(str, get_args(annotation)))
    if annotation in (int, float):
        return " ".join([_NAMES[annotation], ", ".join(_bounds(limits))]).strip()
    if annotation in _NAMES:
        return _NAMES[annotation]
    members = [one for one in get_args(annotation) if one is not Ellipsis]
    if get_origin(annotation) is tuple:
        return f"a list, each {_alternatives(members[0], [])}"
    return " or ".join(dict.fromkeys(_alternatives(one, limits) for one in members))


_NAMES = {int: "a whole number", float: "a number", str: "a text", bool: "true or false"} | {
    type(None): "null"
}


def _bounds(limits: list[Any]) -> Iterator[str]:
    for limit in limits:
        if isinstance(limit, Ge):
            yield f"from {limit.ge}"
        elif isinstance(limit, Gt):
            yield f"above {limit.gt}"
        elif isinstance(limit, Le):
            yield f"to {limit.le}"
        elif isinstance(limit, Lt):
            yield f"below {limit.lt}"


def meaning(group: type[BaseModel], name: str) -> str:
    """Meaning of a setting, from the docstrings of its group and of that group's bases.

    They explain settings one after the other: 'a: text; b, c: text' or 'a and b do so; c: text'.
    """
    for owner in group.__mro__:
        for names, text in _explained(owner.__dict__.get("__doc__") or ""):
            if name in names:
                return text
    return ""


def _explained(doc: str) -> Iterator[tuple[list[str], str]]:
    flat = " ".join(doc.split())
    # A new explanation begins behind ';' or '.', with a list of names and a colon or a verb.
    for piece in re.split(r"(?:;|\.|^)\s+(?=[a-z_]+(?:(?:, | and )[a-z_]+)*(?::|\s))|^", flat):
        head = re.match(r"([a-z_]+(?:(?:, | and )[a-z_]+)*)(: | )", piece)
        if head is None:
            continue
        names = re.split(r", | and ", head[1])
        text = piece[head.end() :] if head[2] == ": " else piece
        yield names, text.strip().rstrip(".")


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
