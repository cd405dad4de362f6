"""The container of saved indexes refuses everything that was not written as it stands."""

from __future__ import annotations

import json
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hybrid_kv.errors import FileFormatError
from hybrid_kv.index._file import read_arrays, write_arrays

ARRAYS: dict[str, Any] = {
    "lists": np.arange(37 * 3, dtype=np.int32).reshape(37, 3),
    "codes": np.arange(65, dtype=np.uint8),
    "nothing": np.empty((0, 5), dtype=np.float32),
    "mean": np.linspace(-1, 1, 72, dtype=np.float32),
}
META = {"heads": 2, "note": "größer"}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "index.hkv"
    write_arrays(file, "graph", META, ARRAYS)
    return file


def test_arrays_come_back_as_they_were(path: Path) -> None:
    meta, arrays = read_arrays(path, "graph")
    assert meta == META
    assert list(arrays) == list(ARRAYS)
    for name, array in ARRAYS.items():
        assert arrays[name].dtype == array.dtype
        np.testing.assert_array_equal(arrays[name], array)


def test_the_layout_is_the_documented_one(path: Path) -> None:
    content = path.read_bytes()
    magic, version, crc, size = struct.unpack_from("<8sIIQ", content)
    assert (magic, version) == (b"HKVINDEX", 2)
    assert (24 + size) % 64 == 0
    header = content[24 : 24 + size]
    assert zlib.crc32(header) == crc
    entry = json.loads(header)["arrays"][3]
    begin = 24 + size + entry["offset"]
    np.testing.assert_array_equal(np.frombuffer(content, "<f4", 72, begin), ARRAYS["mean"])
    assert begin % 64 == 0


def test_every_flipped_bit_is_noticed_or_lies_in_the_filling(path: Path, tmp_path: Path) -> None:
    content = path.read_bytes()
    harmless = 0
    for at in range(len(content)):
        bad = bytearray(content)
        bad[at] ^= 1 << (at % 8)
        other = tmp_path / "bad.hkv"
        other.write_bytes(bad)
        try:
            _, arrays = read_arrays(other, "graph")
        except FileFormatError:
            continue
        harmless += 1
        for name, array in ARRAYS.items():
            np.testing.assert_array_equal(arrays[name], array)
    assert harmless <= 3 * 63, "more bytes than the filling behind three arrays"


def test_every_truncation_is_noticed(path: Path, tmp_path: Path) -> None:
    content = path.read_bytes()
    last = len(content) - (-ARRAYS["mean"].nbytes % 64)
    for size in range(last):
        other = tmp_path / "short.hkv"
        other.write_bytes(content[:size])
        with pytest.raises(FileFormatError):
            read_arrays(other, "graph")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: b"PK" + c[2:], "is not a hybrid_kv index"),
        (
            lambda c: c[:8] + struct.pack("<I", 1) + c[12:],
            "has format version 1, this package reads 2; build the index again",
        ),
        (lambda c: c[:200], "its header is cut off"),
        (lambda c: c[:40] + b"~" + c[41:], "checksum of its header"),
        (lambda c: c[:-500], "is cut off"),
    ],
)
def test_the_sentence_says_what_is_wrong(path: Path, change: Any, message: str) -> None:
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(FileFormatError, match=message):
        read_arrays(path, "graph")


def test_another_kind_is_refused(path: Path) -> None:
    with pytest.raises(FileFormatError, match="holds an index of kind 'graph', expected 'ivf'"):
        read_arrays(path, "ivf")


def test_a_failed_write_leaves_the_old_file(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: int) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr("os.fsync", fail)
    with pytest.raises(OSError, match="no space"):
        write_arrays(path, "graph", {}, {"lists": np.zeros(1000, np.int32)})
    assert read_arrays(path, "graph")[0] == META
    assert [file.name for file in path.parent.iterdir()] == ["index.hkv"]
