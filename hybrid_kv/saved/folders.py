"""Folders of saved contexts: one that takes its place whole, and one that several processes use.

A context is a folder of files: there as it should be, or as it was before. Everything is written
into a folder beside the target and forced to the disk. A new target is that folder, renamed. Where
one is there already, the new blocks move into it, and the manifest that names them then replaces
the old one in a single step; only after that the old blocks go. What a process left behind that was
killed is told by its lock, which ended with it.

    FOLDER/
      lock                                   of counting and making room
      counters.json
      <32 hex digits>/                       contexts that were made with the same
        <32 hex digits>.hkv                  one of them; docs/context-file.md
      gone-<16 hex digits>                   on its way out

A reader locks the folder of the context that it opens, and what is locked is not removed. Once it
is open it may be: files that are mapped stay readable until they are closed.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from hybrid_kv.errors import ConfigError, FileFormatError, ReadError, WriteError
from hybrid_kv.saved.manifest import MANIFEST, read_manifest

_WAIT_S = 60.0
_GROUP = re.compile(r"[0-9a-f]{32}")
_NAME = re.compile(r"[0-9a-f]{32}\.hkv")
_GONE = "gone-"


class ContextFolder:
    """Contexts below one folder, by the group of those that were made with the same.

    Raises:
        ConfigError: the folder is none, or cannot be made or written to.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._lock = FileLock(folder / "lock", timeout=_WAIT_S, mode=0o600)
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            with self._lock:
                pass
        except OSError as error:
            raise ConfigError(
                f"cache_dir '{folder}' must be a folder that can be written to, got: "
                f"{error.strerror or error}; choose another one"
            ) from None

    @contextmanager
    def locked(self) -> Iterator[None]:
        """A block that one process at a time is in.

        Raises:
            WriteError: another one has been in it for a minute.
        """
        try:
            with self._lock:
                yield
        except Timeout:
            raise WriteError(
                f"cache_dir '{self.folder}' has been locked by another process for {_WAIT_S:.0f} "
                "s; end that process"
            ) from None

    def path_of(self, group: str, name: str) -> Path:
        """Path where a context of a group lies, or would."""
        return self.folder / group[:32] / f"{name[:32]}.hkv"

    def paths(self, group: str) -> list[Path]:
        """The contexts of a group."""
        return self._below(self.folder / group[:32])

    def all_paths(self) -> list[Path]:
        """The contexts of all groups, the one that was used last at the end."""
        groups = [path for path in _listed(self.folder) if _GROUP.fullmatch(path.name)]
        used: list[tuple[int, Path]] = []
        for path in (path for group in groups for path in self._below(group)):
            with suppress(OSError):  # another process has made room
                used.append((path.stat().st_mtime_ns, path))
        return [path for _, path in sorted(used)]

    @staticmethod
    def _below(group: Path) -> list[Path]:
        return sorted(path for path in _listed(group) if _NAME.fullmatch(path.name))

    def use(self, path: Path) -> None:
        """Notes that a context was used just now."""
        with suppress(FileNotFoundError):
            os.utime(path)

    @contextmanager
    def reading(self, path: Path) -> Iterator[None]:
        """A block in which nobody removes a context.

        Raises:
            ReadError: it is gone, or may not be read.
        """
        try:
            held = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except OSError as error:
            raise ReadError(f"saved context '{path}' cannot be read: {error.strerror}") from None
        try:
            fcntl.flock(held, fcntl.LOCK_SH)
            if not (path.exists() and os.path.samestat(os.fstat(held), path.stat())):
                raise ReadError(f"saved context '{path}' was removed meanwhile")
            yield
        finally:
            os.close(held)

    def remove(self, path: Path) -> bool:
        """Takes a context away, unless somebody opens it just now; gone as a whole, at once."""
        gone = self.folder / f"{_GONE}{os.urandom(8).hex()}"
        if path.is_symlink():
            path.unlink(missing_ok=True)
            return True
        try:
            held = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except FileNotFoundError:
            return False
        except NotADirectoryError:
            path.unlink(missing_ok=True)
            return True
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.rename(path, gone)
        except (BlockingIOError, FileNotFoundError):
            return False
        finally:
            os.close(held)
        shutil.rmtree(gone, ignore_errors=True)  # what is left is swept out the next time
        return True

    def sweep(self) -> None:
        """Removes what processes left behind that were killed."""
        for path in _listed(self.folder):
            if path.name.startswith(_GONE):
                shutil.rmtree(path, ignore_errors=True)
            elif _GROUP.fullmatch(path.name):
                with one_at_a_time(path):  # nobody is about to begin
                    remove_abandoned(path)


def num_bytes(root: Path) -> int:
    """Bytes of all files of a context."""
    total = 0
    for folder, _, files in os.walk(root):
        for name in files:
            with suppress(FileNotFoundError):
                total += os.lstat(Path(folder) / name).st_size
    return total


def _listed(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []


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
