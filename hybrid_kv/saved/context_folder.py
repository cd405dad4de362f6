"""A folder of saved contexts that several processes use: who reads, who makes room.

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

from hybrid_kv.errors import ConfigError, ReadError, WriteError
from hybrid_kv.saved.whole_folder import one_at_a_time, remove_abandoned

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
