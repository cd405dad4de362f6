"""Blocks of a saved context: files of tensors, each with its checksum, which may be verified.

Keys and values may be rounded to 8 bits: one scale for each token and head.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from hybrid_kv.entries import Entries
from hybrid_kv.errors import ConfigError, FileFormatError, said
from hybrid_kv.ragged import Ragged
from hybrid_kv.rotary import Rotary
from hybrid_kv.saved.manifest import Block, Manifest, damaged, read_manifest, unreadable

_ALIGNMENT = 64
_BUFFER = 2**20


class BlockWriter:
    """Writes blocks into a new folder and notes their checksums.

    blocks: what was written, by name.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.blocks: dict[str, Block] = {}

    def tensors(
        self, name: str, tensors: Mapping[str, Tensor], meta: Mapping[str, str] | None = None
    ) -> str:
        """A block of tensors, whose memory begins at a multiple of 64 bytes; returns its name.

        Raises:
            OSError: it cannot be written.
        """
        whole = {key: tensor.detach().cpu().contiguous() for key, tensor in tensors.items()}
        # Of no tensors and empty metadata safetensors makes a header that it cannot read.
        data = memoryview(save(whole, dict(meta or {}) if whole else None))
        begin = 8 + int.from_bytes(data[:8], "little")
        header = bytes(data[8:begin]) + b" " * (-begin % _ALIGNMENT)  # the format lets it be longer
        self._write(name, len(header).to_bytes(8, "little") + header, data[begin:])
        return name

    def raw(self, name: str, content: bytes) -> str:
        """A block of bytes; returns its name."""
        self._write(name, content)
        return name

    def note(self, name: str) -> str:
        """A block that somebody else has written here; returns its name."""
        path = self.folder / name
        self.blocks[name] = Block(num_bytes=path.stat().st_size, sha256=hash_of(path))
        return name

    def _write(self, name: str, *parts: bytes | memoryview) -> None:
        check, count = sha256(), 0
        with (self.folder / name).open("xb", buffering=0) as file:
            for part in parts:
                check.update(part)
                count += len(part)
                left = memoryview(part)
                while left:  # a file without buffer may take a part
                    left = left[file.write(left) :]
            os.fsync(file.fileno())
        self.blocks[name] = Block(num_bytes=count, sha256=check.hexdigest())


def hash_of(path: Path) -> str:
    """SHA-256 of a file, which is read in pieces.

    Raises:
        OSError: it cannot be read.
    """
    check = sha256()
    with path.open("rb", buffering=0) as file:
        while piece := file.read(_BUFFER):
            check.update(piece)
    return check.hexdigest()


def mapped(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors of a block, and its metadata; nothing is read before somebody looks at it.

    What is written to these tensors stays in memory and never reaches the file.

    Raises:
        ValueError: the block does not hold what it should.
        OSError: it cannot be read.
    """
    try:
        # Outside of inference mode: a cache lives longer than the mode it is opened in.
        with torch.inference_mode(False), safe_open(path, "pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(str(error)) from None


# What a method keeps ----------------------------------------------------------------------------


def entries_tensors(kept: Entries) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Entries of a method as named tensors, and the rest of them JSON-ready."""
    kept = kept.copied()
    tensors = {f"columns.{name}": column for name, column in kept.columns.items()}
    tensors |= {f"state.{name}": tensor for name, tensor in kept.state.items()}
    tables = {}
    for name, shared in kept.tables.items():
        table = shared.copied()
        tensors |= {f"tables.{name}.{column}": rows for column, rows in table.columns.items()}
        tables[name] = list(table.lengths)
    own = {field.name for field in fields(kept)} - {field.name for field in fields(Entries)}
    return tensors, {
        "kind": type(kept).__name__,
        "lengths": list(kept.lengths),
        "tables": tables,
        "own": {name: _plain(getattr(kept, name)) for name in sorted(own)},
    }


def entries_of(
    tensors: Mapping[str, Tensor], meta: Mapping[str, Any], device: torch.device
) -> Entries:
    """Entries from what `entries_tensors` gave, in memory of their own on a device.

    Raises:
        LookupError, TypeError, ValueError: it does not fit together.
    """
    with torch.inference_mode(False):
        here = {name: tensor.to(device) for name, tensor in tensors.items()}
        tables = {
            name: _ragged(Ragged, _below(here, f"tables.{name}."), lengths).copied()
            for name, lengths in meta["tables"].items()
        }
        kind = next(kind for kind in _kinds(Entries) if kind.__name__ == meta["kind"])
        own = {name: _of_plain(value) for name, value in meta["own"].items()}
        more = {"tables": tables, "state": _below(here, "state."), **own}
        kept: Entries = _ragged(kind, _below(here, "columns."), meta["lengths"], **more)
        return kept.copied()


def _plain(value: Any) -> Any:
    """JSON-ready: how positions turn is told by its fields."""
    return {"rotary": asdict(value)} if isinstance(value, Rotary) else value


def _of_plain(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    fields_of = dict(value["rotary"])
    return Rotary(**{**fields_of, "frequencies": tuple(fields_of["frequencies"])})


def _ragged(kind: Any, columns: dict[str, Tensor], lengths: list[int], **more: Any) -> Any:
    if any(len(column) != sum(lengths) for column in columns.values()):
        raise ValueError(f"{kind.__name__} must have {sum(lengths)} rows in every column")
    starts = tuple(sum(lengths[:head]) for head in range(len(lengths)))
    return kind(columns=columns, starts=starts, lengths=tuple(lengths), **more)


def _below(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}


def _kinds(kind: type[Entries]) -> list[type[Entries]]:
    """The kind and all that derive from it: those of a method are there once it is."""
    return [kind, *(found for below in kind.__subclasses__() for found in _kinds(below))]


Compression: TypeAlias = Literal["int8"]

_LARGEST = 127
_BLOCK = 2**16  # rows at a time: their float32 copies are small


def checked_compression(value: object) -> Compression | None:
    """Raises ConfigError for one that there is not."""
    if value is None or value == "int8":
        return value
    raise ConfigError(f"compress must be 'int8' or left out, got {said(value)}")


def rounded(x: Tensor) -> tuple[Tensor, Tensor]:
    """Codes int8 and scales float32 [..., N] of x [..., N, D]."""
    wide = x.float()
    scales = wide.abs().amax(-1) / _LARGEST
    codes = wide / scales.clamp_min(torch.finfo(torch.float32).tiny)[..., None]
    return codes.round().clamp(-_LARGEST, _LARGEST).to(torch.int8), scales


def unrounded(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Entries from their rounded form: [..., N, D] in `dtype`, in memory of their own."""
    back = torch.empty(codes.shape, dtype=dtype)
    for start in range(0, codes.shape[-2], _BLOCK):
        rows = slice(start, start + _BLOCK)
        back[..., rows, :] = codes[..., rows, :].float() * scales[..., rows, None]
    return back


def relative_error(x: Tensor, back: Tensor) -> float:
    """Root mean square of what was lost over that of x; 0 for nothing."""
    lost = (x.float() - back.float()).square().sum(dtype=torch.float64)
    whole = x.float().square().sum(dtype=torch.float64)
    return float((lost / whole).sqrt()) if whole else 0.0


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
