"""The manifest of a saved context: what it was made with and which blocks it has.

Specified in docs/context-file.md. Nothing in it is believed before its own checksum fits, and it
names blocks of its own folder only.
"""

from __future__ import annotations

import json
import os
import stat
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from hybrid_kv.errors import FileFormatError, ReadError

FORMAT = "hybrid_kv context"
VERSION = 5
_READ = (1, 2, 3, 4, VERSION)
MANIFEST = "manifest.json"
_MAX_BYTES = 64 * 2**20
_BLOCK = r"^[a-z0-9]+(-[a-z0-9]+)*\.(safetensors|index|json)$"
_FOLDER = r"^blocks-[0-9a-f]{16}$"
_HASH = r"^[0-9a-f]{64}$"


class SavedPart(BaseModel):
    """A part of what is written: nothing unknown, nothing converted."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Block(SavedPart):
    """A file: its size, and the SHA-256 of all that is in it."""

    num_bytes: int = Field(ge=0)
    sha256: str = Field(pattern=_HASH)


class SavedSamples(SavedPart):
    """Queries that an index learns from again; see `Samples` and `IndexRefresh`."""

    block: str = Field(pattern=_BLOCK)
    first: int
    horizon: int
    prompt_keys: int
    num_keys: int


class SavedMoments(SavedPart):
    """Moments of the first `num_entries` of an extent, of one cluster before version 5; `Tail`."""

    block: str = Field(pattern=_BLOCK)
    num_entries: int = Field(ge=1)


class SavedHead(SavedPart):
    """Kind that finds the keys of one KV head: "sketch", "graph", "flat", ...

    recall, mass: shares of the best keys and of their softmax mass that held-out queries found when
    it was made; None where nothing was checked.
    """

    serves: str
    recall: float | None = Field(default=None, ge=0)
    mass: float | None = Field(default=None, ge=0)


class SavedExtent(SavedPart):
    """A run of cold entries.

    index: the block of what finds them, None where it is built anew; heads: what it says of itself.
    """

    length: int = Field(ge=1)
    index: str | None = Field(default=None, pattern=_BLOCK)
    heads: list[SavedHead] = []
    samples: SavedSamples | None = None
    moments: SavedMoments | None = None


class SavedAudit(SavedPart):
    """Findings of the audit by the time of saving, means over the looks; see `Finding`.

    mass_error: None in files of before it was measured.
    """

    looks: int = Field(ge=1)
    recall: float | None = Field(ge=0)
    missed_mass: float = Field(ge=0)
    missed_by_index: float = Field(ge=0)
    output_error: float = Field(ge=0)
    mass_error: float | None = None


class SavedRounding(SavedPart):
    """Keys and values in 8 bits; k_error, v_error: relative, root mean square over all entries."""

    k_error: float = Field(ge=0)
    v_error: float = Field(ge=0)


class SavedLayer(SavedPart):
    """See `LayerSnapshot`; kv, kept: blocks. int8: None where keys and values are as they were."""

    layer_idx: int = Field(ge=0)
    num_kv_heads: int = Field(ge=1)
    head_dim: int = Field(ge=1)
    kv: str = Field(pattern=_BLOCK)
    num_entries: int = Field(ge=0)
    length: int = Field(ge=1)
    num_first: int = Field(ge=0)
    extents: list[SavedExtent]
    kept: str | None = Field(default=None, pattern=_BLOCK)
    shadows: bool
    int8: SavedRounding | None = None


class SavedWindow(SavedPart):
    """A layer with a sliding window, transformers' own: its newest tokens, as they are.

    kv: block. length: tokens seen; window: the model's, which holds one less between two calls.
    """

    layer_idx: int = Field(ge=0)
    kv: str = Field(pattern=_BLOCK)
    length: int = Field(ge=1)
    window: int = Field(ge=1)

    @property
    def num_entries(self) -> int:
        return min(self.length, self.window - 1)


class SavedState(SavedPart):
    """A layer that is transformers' own, as it is after all tokens; see `own_layers`.

    states: block.
    """

    layer_idx: int = Field(ge=0)
    states: str = Field(pattern=_BLOCK)


AnyLayer: TypeAlias = SavedLayer | SavedWindow | SavedState


class SavedModel(SavedPart):
    """facts: of its configuration, by name. weights: SHA-256 over a sample of all weights."""

    facts: dict[str, Any]
    weights: str = Field(pattern=_HASH)


class Manifest(SavedPart):
    """All of a saved context but its tensors and text.

    folder: where its blocks lie, inside of its own. tokens: their number; ids, messages: blocks.
    source: where the model was loaded from, None where nobody said. prefill_s: what computing it
    took, None where nobody measured. audit: None where nobody looked. inexact_from: position of the
    first token whose entries may differ from full attention's; None for none.
    """

    package: str
    folder: str = Field(pattern=_FOLDER)
    num_tokens: int = Field(ge=1)
    ids: str = Field(pattern=_BLOCK)
    ids_sha256: str = Field(pattern=_HASH)
    messages: str | None = Field(default=None, pattern=_BLOCK)
    source: str | None = None
    model: SavedModel
    tokenizer: str | None = Field(default=None, pattern=_HASH)
    config: dict[str, Any]
    dtype: Literal["float16", "bfloat16", "float32"]
    page_size: int = Field(ge=1)
    prefill_s: float | None = Field(default=None, ge=0)
    audit: SavedAudit | None = None
    inexact_from: int | None = Field(default=0, ge=0)  # files before version 4 do not say it
    layers: list[SavedLayer]
    windows: list[SavedWindow] = []
    states: list[SavedState] = []
    blocks: dict[str, Block]

    @property
    def num_layers(self) -> int:
        """Layers of all kinds."""
        return len(self.layers) + len(self.windows) + len(self.states)

    def path_of(self, root: Path, name: str) -> Path:
        """Path of a block, a plain file of the size that it should have.

        Raises:
            FileFormatError: it is not there, or is something else.
            ReadError: it may not be looked at.
        """
        folder = root / self.folder
        if name not in self.blocks:
            raise damaged(root, f"its manifest has no block '{name}'")
        _plain(root, folder, stat.S_ISDIR, "folder")
        size = _plain(root, folder / name, stat.S_ISREG, "file").st_size
        if size != self.blocks[name].num_bytes:
            raise damaged(
                root, f"block '{name}' must have {self.blocks[name].num_bytes} bytes, got {size}"
            )
        return folder / name


def write_manifest(path: Path, manifest: Manifest) -> None:
    """Writes it with its checksum and forces it to the disk.

    Raises:
        OSError: it cannot be written.
    """
    content = manifest.model_dump(mode="json")
    whole = {"format": FORMAT, "version": VERSION, "sha256": _hash(content), "content": content}
    with path.open("x", encoding="utf-8") as file:
        json.dump(whole, file, indent=1)
        file.flush()
        os.fsync(file.fileno())


def read_manifest(root: Path) -> Manifest:
    """The manifest of the context in a folder.

    Raises:
        FileFormatError: the folder holds none, or a damaged one, or one of another version.
        ReadError: there is nothing, or it may not be read.
    """
    try:
        if not root.is_dir():
            if not root.exists():
                raise ReadError(f"there is no saved context '{root}'; check the path")
            raise FileFormatError(f"{_foreign(root)}: it is no folder")
        if not os.path.lexists(root / MANIFEST):
            raise FileFormatError(f"{_foreign(root)}: it has no {MANIFEST}")
        if _plain(root, root / MANIFEST, stat.S_ISREG, "file").st_size > _MAX_BYTES:
            raise damaged(root, f"{MANIFEST} is too large")
        raw = (root / MANIFEST).read_bytes()
    except OSError as error:
        raise unreadable(root, error) from error
    return _parsed(root, raw)


def _parsed(root: Path, raw: bytes) -> Manifest:
    try:
        whole = json.loads(raw)
    except (ValueError, RecursionError):
        raise damaged(root, f"{MANIFEST} is not JSON") from None
    if not isinstance(whole, dict) or whole.get("format") != FORMAT:
        raise FileFormatError(f"{_foreign(root)}: its {MANIFEST} is of another program")
    version = whole.get("version")
    if version not in _READ:
        raise FileFormatError(
            f"'{root}' has format version {version!r}, this package reads {_READ[0]} to {VERSION}; "
            "make the context again or use the package that wrote it"
        )
    content = whole.get("content")
    if not isinstance(content, dict) or whole.get("sha256") != _hash(content):
        raise damaged(root, f"the checksum of {MANIFEST} does not fit")
    try:
        return Manifest.model_validate(content)
    except ValidationError as error:
        problem = error.errors()[0]
        where = ".".join(str(part) for part in problem["loc"])
        if problem["type"] == "string_pattern_mismatch":
            raise FileFormatError(
                f"'{root}' is refused: {where} in {MANIFEST} must name something inside its own "
                f"folder, got {problem['input']!r}; make the context again"
            ) from None
        raise damaged(root, f"{where} in {MANIFEST}: {problem['msg'].lower()}") from None


def _hash(content: dict[str, Any]) -> str:
    return sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _plain(root: Path, path: Path, is_kind: Any, kind: str) -> os.stat_result:
    """Status of a path, which must be a file or a folder itself and no link to one."""
    try:
        found = path.lstat()
    except FileNotFoundError:
        raise damaged(root, f"its {kind} '{path.name}' is not there") from None
    except OSError as error:
        raise unreadable(root, error) from error
    if stat.S_ISLNK(found.st_mode):
        raise FileFormatError(
            f"'{root}' is refused: '{path.name}' in it is a symbolic link, which may lead "
            "anywhere; copy what it points to into its place"
        )
    if not is_kind(found.st_mode):
        raise damaged(root, f"'{path.name}' is no {kind}")
    return found


def damaged(root: Path, what: str) -> FileFormatError:
    """An error for a context that is not as it was written."""
    return FileFormatError(f"saved context '{root}' is damaged: {what}; make the context again")


def unreadable(root: Path, error: OSError) -> ReadError:
    """An error for one that the system does not let us read; an error of our own is kept."""
    if isinstance(error, ReadError):
        return error
    return ReadError(f"saved context '{root}' cannot be read: {error.strerror}; check its path")


def _foreign(root: Path) -> str:
    return f"'{root}' is no saved context of hybrid_kv"
