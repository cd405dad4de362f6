"""GGUF files: the header, checked as if an enemy had written it, and the tensors where they lie.

    magic, version, numbers of tensors and keys
    keys: name, type, value; a vocabulary is an array of texts among them
    tensors: name, sizes (the fastest first), kind, offset
    data, aligned

The file is mapped, not read: a tensor's bytes come from the disk when they are first touched, and
go again when memory is short. Specification: ggml's docs/gguf.md.
"""

from __future__ import annotations

import mmap
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from pathlib import Path
from struct import Struct
from struct import error as StructError
from typing import Any, TypeAlias

import torch
from torch import Tensor

from hybrid_kv.errors import ModelNotFoundError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
_U32, _U64 = Struct("<I"), Struct("<Q")
_VALUES = {
    **{0: Struct("<B"), 1: Struct("<b"), 2: Struct("<H"), 3: Struct("<h"), 4: _U32},
    **{5: Struct("<i"), 6: Struct("<f"), 7: Struct("<?"), 10: _U64, 11: Struct("<q")},
    12: Struct("<d"),
}
_TEXT, _ARRAY = 8, 9
_MOST_AXES, _MOST_ALIGNMENT = 4, 2**20
_MOST_VALUES = 2**20
"""Of an array of numbers that is taken apart; longer ones are counted, as are arrays of texts."""
_LEAST_TENSOR, _LEAST_KEY = 8 + 4 + 8 + 4 + 8, 8 + 4 + 1  # bytes
_PART = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL)
_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}

Value: TypeAlias = bool | int | float | str | list[Any]


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """A tensor as it lies in a file.

    shape: the slowest axis first, as torch has it; the last one is a row. kind: as ggml calls it,
    'Q4_K'. data: its bytes, uint8 in mapped memory. mapped: the file, where they begin at `begin`.
    """

    name: str
    shape: tuple[int, ...]
    kind: str
    data: Tensor
    mapped: mmap.mmap
    begin: int

    @property
    def dtype(self) -> torch.dtype | None:
        """Of the values, where they are plain numbers and no blocks."""
        return _FLOATS.get(self.kind)

    def rows(self) -> Tensor:
        """Its bytes as rows: [..., bytes of a row], uint8."""
        return self.data.view(*self.shape[:-1], -1)

    def give_back(self) -> None:
        """Frees the memory of its bytes, which come from the file again when they are touched."""
        page = mmap.PAGESIZE
        begin, end = -(-self.begin // page) * page, (self.begin + self.data.nbytes) // page * page
        if begin < end and hasattr(mmap, "MADV_DONTNEED"):  # not on Windows
            self.mapped.madvise(mmap.MADV_DONTNEED, begin, end - begin)

    def values(self) -> Tensor:
        """Its values in float32, or in the dtype that they have; a copy where they are packed.

        Raises:
            ModelNotFoundError: nothing here unpacks this kind.
        """
        if self.dtype is not None:
            aligned = self.data.data_ptr() % self.dtype.itemsize == 0
            data = self.data if aligned else self.data.clone()
            return data.view(self.dtype).view(self.shape)
        return unpacked(self.rows(), self.kind, self.name)


def unpacked(rows: Tensor, kind: str, name: str = "") -> Tensor:
    """Values [..., K] in float32 of packed rows [..., bytes of a row], through the package gguf.

    Raises:
        ModelNotFoundError: it does not unpack this kind.
    """
    import gguf

    try:
        values = gguf.dequantize(rows.numpy(), gguf.GGMLQuantizationType[kind])
    except NotImplementedError:
        raise ModelNotFoundError(
            f"tensor '{name}' is of kind {kind}, which the package gguf does not unpack; take a "
            "file in another kind, such as Q4_K_M"
        ) from None
    return torch.from_numpy(values)


class GgufFile:
    """A GGUF file, or all parts of one that was split, mapped into memory.

    values: of all keys, but arrays of texts and long arrays of numbers as their lengths.
    tensors: by name, in the order of the file. path: of the file, the first of several.
    num_bytes: of all num_parts parts.

    Args:
        path: of the file, or of any part.

    Raises:
        ModelNotFoundError: a file is missing, foreign, damaged, of another version or not to be
            mapped; the message says which and what.
    """

    def __init__(self, path: str | Path) -> None:
        first, *others = _parts(Path(path).expanduser())
        head = _Header(first)
        self.path, self.values = first, head.values
        self._head = head
        if "general.architecture" not in self.values:
            raise _refused(first, "it does not say its general.architecture")
        count = self.values.get("split.count", 1)
        if count not in (0, 1, 1 + len(others)):
            raise _refused(first, f"it is one of {count} parts, and its name does not say which")
        self.tensors: dict[str, GgufTensor] = {}
        self.num_bytes, self.num_parts = 0, 1 + len(others)
        for header in (head, *map(_Header, others)):
            self.num_bytes += header.size
            for tensor in header.tensors():
                if tensor.name in self.tensors:
                    raise _refused(header.path, f"tensor '{tensor.name}' is there twice")
                self.tensors[tensor.name] = tensor
        wanted = self.values.get("split.tensors.count", len(self.tensors))
        if others and wanted != len(self.tensors):
            raise _refused(first, f"its parts have {len(self.tensors)} of {wanted} tensors")

    @property
    def architecture(self) -> str:
        """The file's word for its model, such as 'llama'."""
        return str(self.values["general.architecture"])

    def raw(self, key: str) -> bytes:
        """A key with its type and value, byte by byte as in the file."""
        return self._head.raw(key)

    @property
    def is_packed(self) -> bool:
        """Whether any tensor is in blocks."""
        return any(tensor.dtype is None for tensor in self.tensors.values())


def open_gguf(path: str | Path) -> GgufFile:
    """A GGUF file; the same one as long as the file is, since a header takes its time.

    Raises:
        ModelNotFoundError: as `GgufFile`.
    """
    file = Path(path).expanduser()
    try:
        facts = file.stat()
    except OSError:
        raise ModelNotFoundError(f"model file '{path}' does not exist; check the path") from None
    if not file.is_file():
        raise ModelNotFoundError(f"model file '{path}' is no file; check the path")
    # Not resolved: the hub's cache links to blobs whose names say neither kind nor part.
    return _opened(str(file.absolute()), facts.st_mtime_ns, facts.st_size, facts.st_ino)


@lru_cache(maxsize=1)  # configuration, weights and tokenizer ask for the same one
def _opened(path: str, *state: int) -> GgufFile:
    return GgufFile(path)


def _parts(path: Path) -> list[Path]:
    """The files of a model, in order: this one, or all parts that its name counts."""
    named = _PART.fullmatch(path.name)
    if named is None:
        return [path]
    count = int(named["count"])
    parts = [path.with_name(f"{named['stem']}-{n:05d}-of-{count:05d}.gguf") for n in _until(count)]
    for part in parts:
        if not part.is_file():
            raise ModelNotFoundError(
                f"model file '{path}' is one of {count} parts, of which '{part.name}' is missing; "
                "get it into the same folder"
            )
    return parts or [path]


def _until(count: int) -> range:
    return range(1, count + 1)


def _refused(path: Path, why: str) -> ModelNotFoundError:
    return ModelNotFoundError(
        f"model file '{path}' cannot be loaded: {why}; check that the download is complete"
    )


class _Header:
    """The header of one file, read from front to back; no count in it is trusted."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._bytes = _mapped(path)
        self.size = len(self._bytes)
        self._at = 0
        self._check_beginning()
        num_tensors, num_keys = self._number(_U64), self._number(_U64)
        self._check_count(num_tensors, _LEAST_TENSOR, "tensors")
        self._check_count(num_keys, _LEAST_KEY, "keys")
        self.values: dict[str, Value] = {}
        self._spans: dict[str, slice] = {}
        for _ in range(num_keys):
            self._take_key()
        if not isinstance(self.values.get("general.architecture", ""), str):
            raise _refused(path, "general.architecture is no text")
        self._infos = [self._take_tensor() for _ in range(num_tensors)]
        self._data = -(-self._at // self._alignment) * self._alignment

    def _check_beginning(self) -> None:
        magic, version = self._bytes[:4], int.from_bytes(self._bytes[4:8], "little")
        if magic != MAGIC:
            raise ModelNotFoundError(
                f"model file '{self.path}' is no GGUF file: it begins with {magic!r} instead of "
                f"{MAGIC!r}; check that the download is complete"
            )
        if version not in VERSIONS:
            big = int.from_bytes(version.to_bytes(4, "little"), "big") in VERSIONS
            newer = "update hybrid-kv" if version > max(VERSIONS) else ""
            way = "convert it again for little-endian machines" if big else newer
            raise ModelNotFoundError(
                f"model file '{self.path}' is of GGUF version {version}, versions 2 and 3 can be "
                f"read; {way or 'convert it again with a recent llama.cpp'}"
            )
        self._at = 8

    @property
    def _alignment(self) -> int:
        found = self.values.get("general.alignment", 32)
        if not isinstance(found, int) or not 1 <= found <= _MOST_ALIGNMENT or found & (found - 1):
            raise _refused(self.path, f"general.alignment is {found!r}, no power of two")
        return found

    def raw(self, key: str) -> bytes:
        """See `GgufFile.raw`."""
        return self._bytes[self._spans[key]]

    # Taking apart -------------------------------------------------------------------------------

    def _number(self, what: Struct) -> Any:
        try:
            (value,) = what.unpack_from(self._bytes, self._at)
        except StructError:
            raise self._ended() from None
        self._at += what.size
        return value

    def _text(self) -> str:
        length = self._number(_U64)
        if length > self.size - self._at:
            raise self._ended()
        begin, self._at = self._at, self._at + length
        try:
            return self._bytes[begin : self._at].decode()
        except UnicodeDecodeError:
            raise _refused(self.path, f"the text at byte {begin} is not UTF-8") from None

    def _take_key(self) -> None:
        begin, key = self._at, self._text()
        if key in self.values:
            raise _refused(self.path, f"the key '{key}' is there twice")
        self.values[key] = self._value(key, self._number(_U32))
        self._spans[key] = slice(begin, self._at)

    def _value(self, key: str, kind: int) -> Value:
        if kind in _VALUES:
            return self._number(_VALUES[kind])  # type: ignore[no-any-return]
        if kind == _TEXT:
            return self._text()
        if kind == _ARRAY:
            return self._array(key)
        raise _refused(self.path, f"the key '{key}' has a value of the unknown type {kind}")

    def _array(self, key: str) -> Value:
        kind, count = self._number(_U32), self._number(_U64)
        if kind in _VALUES:
            single = _VALUES[kind]
            self._check_count(count, single.size, f"numbers of '{key}'")
            begin, self._at = self._at, self._at + count * single.size
            if count > _MOST_VALUES:
                return int(count)
            return [value for (value,) in single.iter_unpack(self._bytes[begin : self._at])]
        if kind != _TEXT:
            raise _refused(self.path, f"the key '{key}' is an array of the unknown type {kind}")
        self._check_count(count, _U64.size, f"texts of '{key}'")
        self._skip_texts(count)
        return int(count)

    def _skip_texts(self, count: int) -> None:
        """Passes texts by their lengths: a vocabulary has some hundred thousand."""
        at, data, unpack = self._at, self._bytes, _U64.unpack_from
        try:
            for _ in range(count):
                at += 8 + unpack(data, at)[0]
        except (StructError, OverflowError):
            raise self._ended() from None
        if at > self.size:
            raise self._ended()
        self._at = at

    def _take_tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        """Name, shape, number of the kind, offset."""
        name, axes = self._text(), self._number(_U32)
        if not 1 <= axes <= _MOST_AXES:
            raise _refused(self.path, f"tensor '{name}' has {axes} axes instead of 1 to 4")
        sizes = [self._number(_U64) for _ in range(axes)]
        return name, tuple(reversed(sizes)), self._number(_U32), self._number(_U64)

    def _check_count(self, count: int, least: int, what: str) -> None:
        if count > (self.size - self._at) // least:
            raise _refused(
                self.path, f"its header counts {count:,} {what}, more than a file of its size holds"
            )

    def _ended(self) -> ModelNotFoundError:
        return _refused(self.path, f"its header goes beyond its end at byte {self.size:,}")

    # Tensors ------------------------------------------------------------------------------------

    def tensors(self) -> Iterator[GgufTensor]:
        """All tensors, after what is said of each of them has been checked."""
        ends = self._data
        for name, shape, number, offset in sorted(self._infos, key=lambda info: info[3]):
            kind, length = self._kind(name, shape, number)
            begin = self._data + offset
            if offset % self._alignment or begin < ends or length > self.size - begin:
                raise _refused(
                    self.path,
                    f"tensor '{name}' of kind {kind} lies at bytes {begin:,} to "
                    f"{begin + length:,}, over another one or beyond the end at {self.size:,}",
                )
            ends = begin + length
            # Each with a storage of its own: who pickles one does not pickle the file.
            data = torch.frombuffer(self._bytes, dtype=torch.uint8, count=length, offset=begin)
            yield GgufTensor(name, shape, kind, data, self._bytes, begin)

    def _kind(self, name: str, shape: tuple[int, ...], number: int) -> tuple[str, int]:
        """The kind of a tensor, and its bytes."""
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

        try:
            kind = GGMLQuantizationType(number)
        except ValueError:
            raise ModelNotFoundError(
                f"tensor '{name}' of model file '{self.path}' is of kind {number}, which the "
                "package gguf does not know; run pip install -U gguf, or check the file"
            ) from None
        values, size = GGML_QUANT_SIZES[kind]
        if not all(shape) or shape[-1] % values:
            raise _refused(
                self.path,
                f"tensor '{name}' of kind {kind.name} is {list(shape)}, and its rows must be "
                f"multiples of {values} values",
            )
        return kind.name, prod(shape) // values * size


def _mapped(path: Path) -> mmap.mmap:
    """A file in memory, of which pages that somebody writes are private copies.

    Raises:
        ModelNotFoundError: it is not there, or cannot be mapped.
    """
    try:
        with path.open("rb") as stream:
            # Torch wants memory that can be written; nothing reaches the file.
            return mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY)
    except ValueError:
        raise ModelNotFoundError(
            f"model file '{path}' is no GGUF file: it is empty; check that the download is complete"
        ) from None
    except OSError as error:
        raise ModelNotFoundError(
            f"model file '{path}' cannot be mapped into memory: {error.strerror}; check its "
            "permissions and the address space (ulimit -v)"
        ) from error
