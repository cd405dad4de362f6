"""Files that users asked for, there as a whole or as they were before; and compact JSON.

A file is written beside its target, forced to the disk and renamed, so that a full disk or a power
cut leaves the old file or none. What has no contents to lose is written to directly: stdout, a
pipe, a terminal.
"""

from __future__ import annotations

import errno
import json
import os
import stat
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from hybrid_kv.errors import ConfigError, WriteError

STDOUT = "-"


def write_file(target: str | Path, content: str | bytes, what: str) -> None:
    """Puts all of `content` where `target` says; text as UTF-8.

    A link stays a link and what it points to is replaced; an existing file's permissions are kept.

    Args:
        target: a path, or "-" for stdout.
        what: it is called so in the error, such as "report".

    Raises:
        WriteError: it cannot be written; what was there before still is.
        BrokenPipeError: the reader of stdout or of a pipe has gone.
    """
    data = content.encode() if isinstance(content, str) else content
    try:
        _write(target, data)
    except BrokenPipeError:
        raise
    except OSError as error:
        raise WriteError(
            f"{what} '{target}' cannot be written: {error.strerror}; free space or choose another "
            "place"
        ) from error


def is_replaced(target: str | Path) -> bool:
    """Whether each writing replaces the one before, rather than follow it in a stream."""
    path = Path(os.path.realpath(target))
    return _stream_of(target) is None and _replaceable(target, path)


def check_files(targets: Mapping[str, str | Path | None], inputs: Iterable[Path] = ()) -> None:
    """Raises ConfigError unless each option's file could be written; leaves nothing behind.

    Args:
        targets: by option; None where it was not given.
        inputs: files that are read and must not be written over.
    """
    taken = {os.path.realpath(path): f"'{path}', which is read" for path in inputs}
    for option, target in targets.items():
        if target is None:
            continue
        place = STDOUT if str(target) == STDOUT else os.path.realpath(target)
        if place in taken:
            raise ConfigError(
                f"{option} must not overwrite {taken[place]}; choose another file for one of them"
            )
        taken[place] = f"what {option} writes to '{target}'"
        _check_file(option, target)


def _check_file(option: str, target: str | Path) -> None:
    path = Path(os.path.realpath(target))
    try:
        if _stream_of(target) is not None:
            return
        if path.is_dir() or not path.parent.is_dir():
            raise ConfigError(f"{option} must name a file in an existing folder, got '{target}'")
        _refuse_protected(path)
        if _replaceable(target, path):
            with _unfinished(path):
                pass
    except OSError as error:
        raise ConfigError(
            f"{option} must name a file that can be written, got '{target}': {error.strerror}"
        ) from None


def check_folder(option: str, folder: Path) -> None:
    """Raises ConfigError unless the folder is there or could be made, and files in it."""
    base = folder if folder.exists() else folder.absolute().parent
    if not base.is_dir():
        raise ConfigError(
            f"{option} must name a folder, or a new one in an existing, got '{folder}'"
        )
    _check_file(option, base / "figure")


def _write(target: str | Path, data: bytes) -> None:
    stream = _stream_of(target)
    if stream is not None:
        stream(data)
        return
    path = Path(os.path.realpath(target))
    _refuse_protected(path)
    if not _replaceable(target, path):
        with open(target, "wb", buffering=0) as file:
            _all_of(file, data)
        return
    with _unfinished(path) as (file, unfinished):
        _all_of(file, data)
        os.fsync(file.fileno())
        os.replace(unfinished, path)
    _sync_folder(path.parent)


def _stream_of(target: str | Path) -> Callable[[bytes], None] | None:
    """Stream that appends to our own stdout or stderr, where the target is one of them under any
    name.

    A file that the shell sends stdout to must not be renamed over, nor cut.
    """
    if str(target) == STDOUT:
        return _printer(sys.stdout)
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):  # closed, or no file at all
            if os.path.samestat(os.fstat(stream.fileno()), os.stat(target)):
                return _printer(stream)
    return None


def _printer(stream: object) -> Callable[[bytes], None]:
    def put(data: bytes) -> None:
        stream.write(data.decode())  # type: ignore[attr-defined]
        stream.flush()  # type: ignore[attr-defined]

    return put


def _replaceable(target: str | Path, path: Path) -> bool:
    """Whether the target is a file, or none yet, rather than a pipe, a device or a descriptor."""
    descriptor = os.path.realpath(Path(target).absolute().parent).startswith("/proc/")
    return not descriptor and (not path.exists() or path.is_file())


def _refuse_protected(path: Path) -> None:
    """Raises PermissionError for a file that may not be written, though its folder may."""
    if path.exists() and not os.access(path, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))


@contextmanager
def _unfinished(path: Path) -> Iterator[tuple[BinaryIO, Path]]:
    """A new file beside `path` with its owner and permissions, gone at the end unless renamed."""
    unfinished = path.parent / f".hybrid-kv-{os.getpid()}-{os.urandom(4).hex()}.part"
    descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        with open(descriptor, "wb", buffering=0) as file:
            if path.exists():
                old = path.stat()
                with suppress(PermissionError):  # only root gives files away
                    os.fchown(descriptor, old.st_uid, old.st_gid)
                os.fchmod(descriptor, stat.S_IMODE(old.st_mode))
            yield file, unfinished
    finally:
        unfinished.unlink(missing_ok=True)


def _all_of(file: BinaryIO, data: bytes) -> None:
    """Writes everything: a single write to a file without buffer may take a part."""
    view = memoryview(data)
    while view:
        view = view[file.write(view) :]


def _sync_folder(folder: Path) -> None:
    """Makes the new name last; some file systems cannot, and lose no data by it."""
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


# The compact form: rows as tables, a line for each, floats of four digits -------------------------
#
# A list of objects becomes {"same": ..., "columns": [...], "rows": [[...], ...]}: what all rows
# have in common stands once, every other name once, nested names with a slash.


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
