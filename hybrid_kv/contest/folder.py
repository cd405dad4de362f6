"""A folder of results that a killed run leaves whole, and that the next one continues.

One file for each context of a task, written anew after each method, so that it always holds whole
cells; a manifest says what they have in common; a lock keeps a second run out.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Final
from zlib import crc32

from pydantic import Field, ValidationError

from hybrid_kv.config import first_sentence
from hybrid_kv.errors import ConfigError
from hybrid_kv.report.evaluation import Cell
from hybrid_kv.report.files import write_file
from hybrid_kv.report.run import Group, installed_version

VERSION: Final = 1
_MANIFEST, _LOCK, _CELLS = "manifest.json", "lock", "cells"
_MOST_TOLD = 4

Key = tuple[str, int, int, str, str, str | None]
"""Task, context, sample, asking, method and budget."""


class _Manifest(Group):
    """Facts that all cells of a folder have in common."""

    version: int
    package: str | None
    settings: dict[str, Any]


class _Cells(Group):
    """The cells of one context."""

    cells: tuple[Cell, ...] = Field(default=())


def key_of(cell: Cell) -> Key:
    """Key of a cell: what it is about."""
    return cell.task, cell.context_tokens, cell.sample, cell.asking, cell.method, cell.budget


class ResultsFolder:
    """Cells by what they are about; a context manager that holds the lock.

    Args:
        settings: what all cells must have in common, JSON-ready.

    Raises:
        ConfigError: another run uses the folder, it is no results folder, it is damaged, or its
            results are of another version or of other settings.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any]) -> None:
        self.path = path
        self._made_folder, self._made_manifest = not path.exists(), False
        self._lock = _locked(path)
        try:
            self._check_manifest(dict(settings))
            self.cells = {key_of(cell): cell for cell in self._read()}
        except BaseException:
            self._leave_nothing_empty()
            self.close()
            raise

    def lacks(self, key: Key) -> bool:
        """Whether a cell is not there, or has failed."""
        cell = self.cells.get(key)
        return cell is None or cell.error is not None

    def add(self, cell: Cell) -> None:
        """Takes a cell in and writes the cells of its context."""
        self.cells[key_of(cell)] = cell
        name = self._name(cell)
        own = tuple(other for other in self.cells.values() if self._name(other) == name)
        text = _Cells(cells=own).model_dump_json(exclude_defaults=True)
        write_file(self.path / _CELLS / name, text, "results")

    def close(self) -> None:
        """Lets others in."""
        os.close(self._lock)

    def __enter__(self) -> ResultsFolder:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None and not self.cells:
            self._leave_nothing_empty()
        self.close()

    def _leave_nothing_empty(self) -> None:
        """Removes what this run made: without results its settings would refuse the next run."""
        with suppress(OSError):
            if self._made_manifest:
                (self.path / _MANIFEST).unlink(missing_ok=True)
                (self.path / _CELLS).rmdir()
            if self._made_folder:
                (self.path / _LOCK).unlink(missing_ok=True)
                self.path.rmdir()

    @staticmethod
    def _name(cell: Cell) -> str:
        plain = "".join(letter if letter.isalnum() else "-" for letter in cell.task)[:40]
        # Two tasks that look alike so are told apart by the sum.
        return f"{plain}.{crc32(cell.task.encode()):08x}.{cell.context_tokens}.{cell.sample}.json"

    def _check_manifest(self, settings: dict[str, Any]) -> None:
        path = self.path / _MANIFEST
        now = _Manifest(version=VERSION, package=installed_version("hybrid-kv"), settings=settings)
        if not path.exists():
            others = {entry.name for entry in self.path.iterdir()} - {_LOCK}
            if others:
                raise ConfigError(
                    f"results folder '{self.path}' must be a new one or hold results, got one with "
                    f"{sorted(others)[0]} and no {_MANIFEST}; choose another"
                )
            self._made_manifest = True
            (self.path / _CELLS).mkdir()
            write_file(path, now.model_dump_json(indent=1) + "\n", "manifest")
            return
        before = self._parsed(path, _Manifest)
        if (before.version, before.package) != (now.version, now.package):
            raise ConfigError(
                f"results folder '{self.path}' must be of hybrid-kv {now.package} (format "
                f"{VERSION}), got {before.package} (format {before.version}); choose another "
                "folder, or continue with that version"
            )
        found = list(_unequal(before.settings, json.loads(now.model_dump_json())["settings"]))
        if found:
            more = f" and {len(found) - _MOST_TOLD} more" if len(found) > _MOST_TOLD else ""
            raise ConfigError(
                f"results folder '{self.path}' must be of the same settings, it differs in "
                f"{'; '.join(found[:_MOST_TOLD])}{more}; give the same again, or choose another "
                "folder"
            )

    def _read(self) -> Iterator[Cell]:
        for path in sorted((self.path / _CELLS).glob("*.json")):
            yield from self._parsed(path, _Cells).cells

    def _parsed(self, path: Path, kind: type[Any]) -> Any:
        try:
            return kind.model_validate_json(path.read_bytes())
        except OSError as error:
            raise ConfigError(
                f"results folder '{self.path}' cannot be read: {path.name}: {error.strerror}; "
                "check its permissions"
            ) from None
        except ValidationError as error:
            raise ConfigError(
                f"results folder '{self.path}' is damaged: {path.relative_to(self.path)}: "
                f"{first_sentence(error)[:200]}; delete that file to measure it again, or choose "
                "another folder"
            ) from None


def _locked(path: Path) -> int:
    """An open file in the folder that nobody else has locked; the system unlocks it at the end."""
    try:
        path.mkdir(exist_ok=True)
        descriptor = os.open(path / _LOCK, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        raise ConfigError(
            f"results folder '{path}' must be one that can be written, or a new one in an existing "
            f"folder, got: {error.strerror}; choose another"
        ) from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        owner = os.read(descriptor, 64).decode(errors="replace").strip() or "unknown"
        os.close(descriptor)
        raise ConfigError(
            f"results folder '{path}' is in use by another run (process {owner}); wait until it "
            "has ended, or choose another folder"
        ) from None
    os.ftruncate(descriptor, 0)
    os.write(descriptor, str(os.getpid()).encode())
    return descriptor


def _unequal(before: Mapping[str, Any], now: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for key in dict.fromkeys((*before, *now)):
        old, new = before.get(key), now.get(key)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            yield from _unequal(old, new, f"{prefix}{key}.")
        elif old != new:
            yield f"{prefix}{key} (there {old}, now {new})"
