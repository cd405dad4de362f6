"""The compact form of a JSON document: rows as tables, a line for each, floats of four digits.

A list of objects becomes {"same": ..., "columns": [...], "rows": [[...], ...]}: what all rows have
in common stands once, every other name once, nested names with a slash.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

_DIGITS = 4
_ABSENT = "-"
"""Stands in a table for what a row does not have; null is a value."""
_TABLE = {"same", "columns", "rows"}


def compact(document: Mapping[str, Any]) -> str:
    """The text of a document, which `expand` makes a document of again."""
    return f"{_text(_compact(document))}\n"


def expand(value: Any) -> Any:
    """Parsed JSON with its tables as lists of objects; anything else as it is."""
    if isinstance(value, list):
        return [expand(one) for one in value]
    if not isinstance(value, dict):
        return value
    if value.keys() != _TABLE:
        return {name: expand(one) for name, one in value.items()}
    return [_row({**value["same"], **_present(value["columns"], line)}) for line in value["rows"]]


def _present(columns: Sequence[str], line: Sequence[Any]) -> dict[str, Any]:
    cells = zip(columns, line, strict=True)
    return {name: value for name, value in cells if value != _ABSENT}


def _row(cells: Mapping[str, Any]) -> dict[str, Any]:
    row: dict[str, Any] = {}
    for name, value in cells.items():
        at = row
        *parents, last = name.split("/")
        for parent in parents:
            at = at.setdefault(parent, {})
        at[last] = expand(value)
    return row


def _compact(value: Any) -> Any:
    if isinstance(value, float):
        short = float(f"{value:.{_DIGITS}g}")
        return int(short) if short.is_integer() and abs(short) < 2**53 else short
    if isinstance(value, Mapping):
        return {str(name): _compact(one) for name, one in value.items()}
    if not isinstance(value, list | tuple):
        return value
    if len(value) > 1 and all(_is_row(one) for one in value):
        return _table([dict(_flat(_compact(one))) for one in value])
    return [_compact(one) for one in value]


def _is_row(value: object) -> bool:
    """Whether it can be a line of a table: an object whose names can be joined and parted again."""
    if not isinstance(value, Mapping):
        return False
    for name, one in value.items():
        if (
            "/" in str(name)
            or one == _ABSENT
            or (isinstance(one, Mapping) and one and not _is_row(one))
        ):
            return False
    return bool(value)


def _table(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    columns = dict.fromkeys(name for row in rows for name in row)
    first = rows[0]
    same = {
        name: first[name]
        for name in columns
        if all(name in row and _equal(row[name], first[name]) for row in rows)
    }
    varied = [name for name in columns if name not in same]
    lines = [[row.get(name, _ABSENT) for name in varied] for row in rows]
    return {"same": same, "columns": varied, "rows": lines}


def _equal(a: Any, b: Any) -> bool:
    """Equal as JSON: 1 is not true."""
    return _line(a) == _line(b)


def _flat(row: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in row.items():
        if isinstance(value, Mapping) and value and value.keys() != _TABLE:
            yield from _flat(value, f"{prefix}{name}/")
        else:
            yield f"{prefix}{name}", value


def _text(value: Any, indent: str = "") -> str:
    if not (isinstance(value, dict) and (not indent or _has_table(value))):
        return _line(value)
    if value.keys() == _TABLE:
        lines = ",\n".join(f"{indent} {_line(row)}" for row in value["rows"])
        head = ",\n".join(f'{indent} "{name}":{_line(value[name])}' for name in ("same", "columns"))
        return f'{{\n{head},\n{indent} "rows":[\n{lines}]}}'
    inner = (f"{indent} {_line(name)}:{_text(one, indent + ' ')}" for name, one in value.items())
    return "{\n" + ",\n".join(inner) + "}"


def _has_table(value: Any) -> bool:
    return isinstance(value, dict) and (
        value.keys() == _TABLE or any(_has_table(one) for one in value.values())
    )


def _line(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)
