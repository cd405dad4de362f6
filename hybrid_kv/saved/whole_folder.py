"""A folder of files that takes its place whole: there as it should be, or as it was before.

Everything is written into a folder beside the target and forced to the disk. A new target is that
folder, renamed. Where one is there already, the new blocks move into it, and the manifest that
names them then replaces the old one in a single step; only after that the old blocks go.

What a process left behind that was killed is told by its lock, which ended with it.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from hybrid_kv.errors import ConfigError, FileFormatError, WriteError
from hybrid_kv.saved.manifest import MANIFEST, read_manifest


@contextmanager
def replacing(path: str | Path) -> Iterator[tuple[Path, str]]:
    """A new folder, and the name for the folder of blocks in it, to be filled in the block.

    Where the block ends well, this is what lies at `path`; a link stays, and what it points to is
    replaced.

    Raises:
        ConfigError: something else lies there.
        WriteError: it cannot be written; what was there before still is.
    """
    target, blocks = Path(os.path.realpath(path)), f"blocks-{os.urandom(8).hex()}"
    check_target(target, path)
    try:
        with _staging(target) as staging:
            (staging / blocks).mkdir()
            yield staging, blocks
            for folder in (staging / blocks, staging):
                sync(folder)
            publish(staging, target, blocks)
    except OSError as error:
        if isinstance(error, WriteError):
            raise
        raise WriteError(
            f"saved context '{path}' cannot be written: {error.strerror or error}; free space or "
            "choose another place"
        ) from error


def check_target(target: Path, path: str | Path) -> None:
    """Raises ConfigError unless a context can be put at `target`, which the user calls `path`."""
    if not target.parent.is_dir():
        raise ConfigError(
            f"a context is saved in an existing folder, got '{path}'; make its folder"
        )
    if not os.path.lexists(target):
        return
    try:
        read_manifest(target)
    except FileFormatError as error:
        raise ConfigError(
            f"'{path}' must be a new folder or a saved context, which is replaced, but {error}; "
            "choose another name, or remove what is there"
        ) from None


@contextmanager
def _staging(target: Path) -> Iterator[Path]:
    staging = target.with_name(f".{target.name}.{os.urandom(8).hex()}.part")
    with one_at_a_time(target.parent):
        remove_abandoned(target.parent, target.name)
        staging.mkdir()
        lock = os.open(staging, os.O_RDONLY)
        fcntl.flock(lock, fcntl.LOCK_EX)
    try:
        yield staging
    finally:
        shutil.rmtree(staging, ignore_errors=True)
        os.close(lock)


def remove_abandoned(folder: Path, name: str | None = None) -> None:
    """Removes what others left in a folder who wanted to write a context of this name, or of any,
    and were killed: nobody locks it any more.
    """
    for left in folder.glob(f".{'*' if name is None else _literal(name)}.*.part"):
        with suppress(OSError):
            lock = os.open(left, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(left, ignore_errors=True)
            finally:
                os.close(lock)


def _literal(name: str) -> str:
    """A name as a pattern that only it fits."""
    return "".join(f"[{char}]" if char in "*?[" else char for char in name)


def publish(staging: Path, target: Path, blocks: str) -> None:
    """Puts a folder with a manifest and its folder of blocks, all forced to the disk, in its place.

    Raises:
        OSError: it cannot be; what was there before still is.
    """
    with one_at_a_time(target.parent):
        if not target.exists():
            os.rename(staging, target)
            sync(target.parent)
            return
        os.rename(staging / blocks, target / blocks)
        sync(target)
        os.replace(staging / MANIFEST, target / MANIFEST)
        sync(target)
        for old in target.glob("blocks-*"):
            if old.name != blocks:
                shutil.rmtree(old, ignore_errors=True)  # what is left is removed the next time


@contextmanager
def one_at_a_time(folder: Path) -> Iterator[None]:
    """A block that one process at a time is in, for a folder."""
    lock = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def sync(folder: Path) -> None:
    """Makes names in a folder last."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
