"""The JSON document of a check: begun, extended row by row, joined with what was there before."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

from benchmarks.gpu_check import table
from benchmarks.gpu_check.jobs import Row

SCHEMA = 1
Document = dict[str, Any]

REHEARSAL_LABEL = "REHEARSAL with tiny sizes: no figure in it is a result"


def label_of(device: dict[str, Any] | None, rehearse: bool) -> str:
    """What figures of capped rows are called; never the name of a card that was not there."""
    if rehearse or device is None:
        return REHEARSAL_LABEL
    return f"memory-capped {device['name']}"


def folder_name(device_name: str, date: str) -> str:
    """Letters, digits and '-' alone."""
    return "-".join([*re.findall(r"[a-z0-9]+", device_name.lower()), date])


def stem(rehearse: bool) -> str:
    return "gpu_check-rehearsal" if rehearse else "gpu_check"


def read(folder: Path, *, rehearse: bool, label: str) -> list[Row]:
    """The rows of an earlier call that wrote into the same folder.

    Raises:
        ValueError: they are of another machine, or of another version of this check.
    """
    path = folder / f"{stem(rehearse)}.json"
    if not path.is_file():
        return []
    found = json.loads(path.read_text(encoding="utf-8"))
    if found.get("schema") != SCHEMA or found.get("label") != label:
        raise ValueError(
            f"{path.name} in the folder must be of schema {SCHEMA} and '{label}', got schema "
            f"{found.get('schema')} and '{found.get('label')}'; choose another --out"
        )
    return list(found["rows"])


def joined(before: list[Row], now: list[Row]) -> list[Row]:
    """All rows, those of now in place of earlier ones of their jobs; "not run" replaces nothing."""
    measured = {_job(row) for row in now if row["status"] != "not run"}
    kept = [row for row in before if _job(row) not in measured]
    known = set(map(_job, kept))
    return kept + [row for row in now if _job(row) not in known]


def _job(row: Row) -> tuple[str, str]:
    return row["part"], row["job"]


def write(folder: Path, document: Document) -> tuple[Path, Path]:
    """Writes the document and its table; a run that is killed in the middle leaves earlier ones."""
    folder.mkdir(parents=True, exist_ok=True)
    name = stem(document["rehearsal"])
    data, page = folder / f"{name}.json", folder / f"{name}.md"
    _replace(data, json.dumps(document, indent=1) + "\n")
    _replace(page, table.markdown(document))
    return data, page


def _replace(path: Path, text: str) -> None:
    """The file has the text, on the disk, or what it had before."""
    new = path.with_name(f".{path.name}.new")
    with new.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)
