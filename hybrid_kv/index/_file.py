"""The container of saved indexes: named arrays with checksums, specified in docs/index-file.md."""

from __future__ import annotations

import json
import os
import struct
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hybrid_kv.errors import FileFormatError

MAGIC = b"HKVINDEX"

VERSION = 2

_ALIGNMENT = 64

_PREFIX = struct.Struct("<8sIIQ")
"""Magic, version, CRC-32 of the header, bytes of the header."""

_MAX_HEADER_BYTES = 64 * 2**20

_DTYPES = frozenset({"uint8", "int8", "int32", "int64", "float32"})


def write_arrays(
    path: Path, kind: str, meta: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]
) -> None:
    """Writes `arrays` and the JSON-ready `meta`; an interrupted write leaves the old file.

    Raises:
        OSError: the file cannot be written.
    """
    entries, offset = [], 0
    for name, array in arrays.items():
        data = np.ascontiguousarray(array)
        entries.append(
            {
                "name": name,
                "dtype": data.dtype.name,
                "shape": list(data.shape),
                "offset": offset,
                "crc32": zlib.crc32(data.data.cast("B") if data.size else b""),
            }
        )
        offset += -(-data.nbytes // _ALIGNMENT) * _ALIGNMENT
    header = json.dumps({"kind": kind, "meta": dict(meta), "arrays": entries}).encode()
    header += b" " * (-(_PREFIX.size + len(header)) % _ALIGNMENT)
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        with unfinished.open("wb") as file:
            file.write(_PREFIX.pack(MAGIC, VERSION, zlib.crc32(header), len(header)))
            file.write(header)
            for array in arrays.values():
                data = np.ascontiguousarray(array)
                file.write(data.tobytes())
                file.write(b"\0" * (-data.nbytes % _ALIGNMENT))
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def read_arrays(path: Path, kind: str) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
    """Reads what `write_arrays` wrote; every byte that is used was checked.

    Raises:
        FileFormatError: the file is damaged, truncated, of another kind or of a newer version.
        OSError: it cannot be read.
    """
    content = path.read_bytes()
    header, start = _read_header(path, content)
    if header.get("kind") != kind:
        raise FileFormatError(
            f"{path} holds an index of kind {header.get('kind')!r}, expected '{kind}'; "
            "open it with that kind"
        )
    arrays: dict[str, NDArray[Any]] = {}
    unread = len(content) - start  # arrays that overlapped could make much of a small file
    try:
        for entry in header["arrays"]:
            array = _read_array(path, content, start, entry)
            unread -= array.nbytes
            if unread < 0:
                raise _damaged(path, "its arrays overlap")
            arrays[entry["name"]] = array
        meta = dict(header["meta"])
    except (LookupError, TypeError, ValueError, OverflowError) as error:
        raise _damaged(path, f"its header is not complete ({error})") from None
    return meta, arrays


@contextmanager
def refusing_what_is_damaged(path: Path) -> Iterator[None]:
    """Turns what a file's content raises, when it is made sense of, into FileFormatError."""
    try:
        yield
    except FileFormatError:
        raise
    except KeyError as error:
        raise _damaged(path, f"it lacks {error}") from None
    except (LookupError, TypeError, ValueError, OverflowError, AttributeError) as error:
        reason = str(error).partition("\n")[0]
        raise FileFormatError(f"{path} is damaged ({reason}); build the index again") from None


def fingerprint(keys: Tensor, count: int) -> dict[str, Any]:
    """Names the first `count` keys that an index was made for, from 1024 spread rows."""
    rows = keys[:, : count : max(1, count // 1024)].contiguous().view(torch.uint8)
    shape = [keys.shape[0], count, keys.shape[2]]
    crc = zlib.crc32(rows.numpy().tobytes())
    return {"shape": shape, "dtype": str(keys.dtype).removeprefix("torch."), "crc32": crc}


def check_fingerprint(path: Path, saved: dict[str, Any], keys: Tensor, count: int) -> None:
    """Raises FileFormatError unless keys begin with those that were `saved`, `count` of them."""
    if not 0 <= count <= keys.shape[1] or saved != fingerprint(keys, count):
        raise FileFormatError(
            f"{path} was made for other keys ({saved['shape']}), got {list(keys.shape)}; load it "
            "with the context it was saved with"
        )


def _read_header(path: Path, content: bytes) -> tuple[dict[str, Any], int]:
    if len(content) < _PREFIX.size or content[: len(MAGIC)] != MAGIC:
        raise FileFormatError(f"{path} is not a hybrid_kv index; give a file that `save` has made")
    _, version, crc, size = _PREFIX.unpack_from(content)
    if version != VERSION:
        raise FileFormatError(
            f"{path} has format version {version}, this package reads {VERSION}; build the index "
            "again or use the package that wrote it"
        )
    stop = _PREFIX.size + size
    if size > _MAX_HEADER_BYTES or stop > len(content):
        raise _damaged(path, "its header is cut off")
    header = content[_PREFIX.size : stop]
    if zlib.crc32(header) != crc:
        raise _damaged(path, "the checksum of its header does not fit")
    try:
        found = json.loads(header)
    except (ValueError, RecursionError) as error:
        raise _damaged(path, f"its header is not JSON ({error})") from None
    if not isinstance(found, dict):
        raise _damaged(path, "its header is not an object")
    return found, stop


def _read_array(path: Path, content: bytes, start: int, entry: dict[str, Any]) -> NDArray[Any]:
    name, shape, offset = entry["name"], tuple(entry["shape"]), entry["offset"]
    if entry["dtype"] not in _DTYPES or offset < 0 or any(size < 0 for size in shape):
        raise _damaged(path, f"array '{name}' is described wrongly")
    dtype = np.dtype(entry["dtype"])
    count = int(np.prod(shape, dtype=object))
    begin, size = start + offset, count * dtype.itemsize
    if begin + size > len(content):
        raise _damaged(path, f"array '{name}' is cut off")
    data = memoryview(content)[begin : begin + size]
    if zlib.crc32(data) != entry["crc32"]:
        raise _damaged(path, f"the checksum of array '{name}' does not fit")
    return np.frombuffer(data, dtype).reshape(shape).copy()


def _damaged(path: Path, what: str) -> FileFormatError:
    return FileFormatError(f"{path} is damaged: {what}; build the index again")
