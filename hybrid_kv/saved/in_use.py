"""The files of a context that is open: their memory is gone where somebody cuts them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hybrid_kv.errors import FileFormatError
from hybrid_kv.saved.manifest import Manifest


@dataclass(frozen=True, slots=True)
class OpenFiles:
    """The blocks of a saved context that are mapped into memory.

    A page of a file that was cut is no memory any more, and whoever reads it is killed by SIGBUS.
    So their sizes are looked at before each forward. What is cut in the middle of one is not seen.

    files: path, inode and size of each when it was opened.
    """

    root: Path
    files: tuple[tuple[Path, int, int], ...]

    @classmethod
    def of(cls, root: Path, manifest: Manifest) -> OpenFiles:
        """Those of keys and values.

        Raises:
            FileFormatError, ReadError: one is not as the manifest says.
        """
        blocks = [layer.kv for layer in manifest.layers] + [one.kv for one in manifest.windows]
        paths = [manifest.path_of(root, block) for block in blocks]
        states = [path.stat() for path in paths]
        files = zip(paths, states, strict=True)
        return cls(root, tuple((path, state.st_ino, state.st_size) for path, state in files))

    def check(self) -> None:
        """Raises FileFormatError where one was cut; one that was replaced or removed stays whole
        for whoever has it open.
        """
        for path, inode, size in self.files:
            try:
                now = path.stat()
            except OSError:
                continue
            if now.st_ino == inode and now.st_size < size:
                raise FileFormatError(
                    f"saved context '{self.root}' was cut while it was open: block '{path.name}' "
                    f"must have {size} bytes, got {now.st_size}; make the context again"
                )
