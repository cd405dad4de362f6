"""Looking at every byte of a saved context."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hybrid_kv.errors import FileFormatError
from hybrid_kv.saved.file_blocks import hash_of
from hybrid_kv.saved.manifest import Manifest, damaged, read_manifest, unreadable


@dataclass(frozen=True, slots=True)
class Verified:
    """A context all of whose blocks are as they were written; num_bytes: of all of them."""

    manifest: Manifest
    num_bytes: int


def verify_context(path: str | Path) -> Verified:
    """Compares all blocks with their checksums; needs no model.

    Raises:
        FileFormatError: a block is damaged; the message names those that are.
        ReadError: the context is not there or cannot be read.
    """
    root = Path(path)
    while True:
        manifest = read_manifest(root)
        wrong = [name for name in sorted(manifest.blocks) if not _is_whole(root, manifest, name)]
        if not wrong:
            total = sum(block.num_bytes for block in manifest.blocks.values())
            return Verified(manifest, total)
        if read_manifest(root).folder == manifest.folder:
            break  # else somebody has saved to it meanwhile
    more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
    blocks = ", ".join(f"'{name}'" for name in wrong[:3])
    raise damaged(
        root, f"of {len(manifest.blocks)} blocks these are not as written: {blocks}{more}"
    )


def _is_whole(root: Path, manifest: Manifest, name: str) -> bool:
    try:
        return hash_of(manifest.path_of(root, name)) == manifest.blocks[name].sha256
    except FileFormatError as error:
        if "symbolic link" in str(error):
            raise
        return False
    except OSError as error:
        raise unreadable(root, error) from error
