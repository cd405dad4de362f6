"""Headers of GGUF files: whole ones, damaged ones, hostile ones, and files in parts."""

from __future__ import annotations

import random
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("gguf", reason="the package gguf is not installed")

import gguf

from hybrid_kv.errors import HybridKVError, ModelNotFoundError
from hybrid_kv.models.gguf_file import GgufFile, open_gguf
from hybrid_kv.models.load import load_model
from tests.models.gguf_files import LAYERS, finish, packed, write

KINDS = ("Q4_1", "Q8_0", "Q5_0")


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("gguf") / "tiny.gguf", kinds=KINDS, head="Q5_1")


def test_tensors_lie_where_the_package_finds_them(file: Path) -> None:
    opened, expected = GgufFile(file), gguf.GGUFReader(file).tensors
    assert opened.tensors.keys() == {tensor.name for tensor in expected}
    for tensor in expected:
        found = opened.tensors[tensor.name]
        assert found.kind == tensor.tensor_type.name
        assert found.shape == tuple(reversed(tensor.shape.tolist()))
        values = gguf.dequantize(tensor.data, tensor.tensor_type)
        np.testing.assert_array_equal(found.values().numpy(), values)


def test_keys_are_read_and_arrays_of_texts_are_counted(tmp_path: Path) -> None:
    def more(writer: Any) -> None:
        writer.add_token_list([f"word {n}" for n in range(77)])
        writer.add_token_types([1, 3, 4])
        writer.add_string("name", "ein Löffel")
        writer.add_bool("flag", False)

    values = GgufFile(write(tmp_path / "keys.gguf", more=more)).values
    assert values["tokenizer.ggml.tokens"] == 77
    assert values["tokenizer.ggml.token_type"] == [1, 3, 4]
    assert (values["name"], values["flag"]) == ("ein Löffel", False)
    assert values["llama.block_count"] == LAYERS
    assert values["llama.rope.freq_base"] == 1e4


def test_a_file_is_taken_apart_once_and_again_when_it_has_changed(tmp_path: Path) -> None:
    path = write(tmp_path / "tiny.gguf")
    first = open_gguf(path)
    assert open_gguf(str(path)) is first
    path.unlink()
    write(path, kinds=("Q4_0",))
    assert {tensor.kind for tensor in open_gguf(path).tensors.values()} == {"F32", "Q4_0"}


# Bad input --------------------------------------------------------------------------------------


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


LLAMA = text("general.architecture") + struct.pack("<I", 8) + text("llama")


def made(
    *tensors: bytes, keys: tuple[bytes, ...] = (LLAMA,), data: int = 1024, **counts: int
) -> bytes:
    """A file by hand; counts: num_tensors, num_keys and version other than true."""
    head = struct.pack(
        "<IQQ",
        counts.get("version", 3),
        counts.get("num_tensors", len(tensors)),
        counts.get("num_keys", len(keys)),
    )
    body = b"GGUF" + head + b"".join((*keys, *tensors))
    return body.ljust(-(-len(body) // 32) * 32 + data, b"\0")


def tensor(name: str, *sizes: int, kind: int = 8, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(sizes)}QIQ", len(sizes), *sizes, kind, offset)


HUGE = 2**63
HOSTILE: dict[str, tuple[bytes, str]] = {
    "no architecture": (made(keys=()), r"does not say its general\.architecture"),
    "architecture of no text": (
        made(keys=(text("general.architecture") + struct.pack("<II", 4, 7),)),
        r"general\.architecture is no text",
    ),
    "more tensors": (made(num_tensors=HUGE), r"counts 9,223,372,036,854,775,808 tensors"),
    "more keys": (made(num_keys=2**32), "counts 4,294,967,296 keys"),
    "long text": (made(keys=(struct.pack("<Q", HUGE),)), "goes beyond its end"),
    "long array": (
        made(keys=(LLAMA, text("list") + struct.pack("<IIQ", 9, 12, HUGE))),
        "counts .* numbers of 'list'",
    ),
    "long texts": (
        made(keys=(LLAMA, text("list") + struct.pack("<IIQ", 9, 8, 2**40))),
        "counts .* texts of 'list'",
    ),
    "texts beyond": (
        made(keys=(LLAMA, text("list") + struct.pack("<IIQQ", 9, 8, 2, HUGE))),
        "goes beyond its end",
    ),
    "array of arrays": (
        made(keys=(LLAMA, text("list") + struct.pack("<IIQ", 9, 9, 1))),
        "'list' is an array of the unknown type 9",
    ),
    "type of a key": (
        made(keys=(LLAMA, text("odd") + struct.pack("<I", 77))),
        "'odd' has a value of the unknown type 77",
    ),
    "a key twice": (made(keys=(LLAMA, LLAMA)), "'general.architecture' is there twice"),
    "no UTF-8": (made(keys=(struct.pack("<Q", 1) + b"\xff",)), "is not UTF-8"),
    "alignment": (
        made(
            tensor("a", 32),
            keys=(LLAMA, text("general.alignment") + struct.pack("<II", 4, 0)),
        ),
        r"general\.alignment is 0",
    ),
    "unknown kind": (made(tensor("a.weight", 32, kind=99)), "'a.weight' .* is of kind 99"),
    "no axes": (made(tensor("a")), "tensor 'a' has 0 axes"),
    "many axes": (made(tensor("a", *[1] * 900)), "tensor 'a' has 900 axes"),
    "part of a block": (made(tensor("a", 33, 2)), r"'a' of kind Q8_0 is \[2, 33\]"),
    "no values": (made(tensor("a", 32, 0)), r"'a' of kind Q8_0 is \[0, 32\]"),
    "sizes that overflow": (
        made(tensor("a", 2**32, 2**32)),
        r"tensor 'a' of kind Q8_0 lies at bytes .* beyond the end",
    ),
    "offset outside": (made(tensor("a", 32, offset=2**40)), "tensor 'a' .* beyond the end"),
    "offset of no alignment": (made(tensor("a", 32, offset=1)), "tensor 'a' of kind Q8_0 lies"),
    "over another": (
        made(tensor("a", 64), tensor("b", 64, offset=32)),
        "tensor 'b' of kind Q8_0 lies at .* over another one",
    ),
    "a tensor twice": (
        made(tensor("a", 32), tensor("a", 32, offset=64)),
        "tensor 'a' is there twice",
    ),
    "newer": (made(version=4), "is of GGUF version 4, .* update hybrid-kv"),
    "older": (made(version=1), "is of GGUF version 1, .* recent llama.cpp"),
    "big-endian": (made(version=0x03000000), "convert it again for little-endian"),
    "foreign": (b"PK\3\4" + bytes(99), r"is no GGUF file: it begins with b'PK"),
    "empty": (b"", "it is empty"),
    "short": (b"GGUF\3\0\0\0\0", "goes beyond its end"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_headers_are_refused_with_the_reason(case: str, tmp_path: Path) -> None:
    content, why = HOSTILE[case]
    path = tmp_path / "hostile.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelNotFoundError, match=why):
        GgufFile(path)


def test_every_truncation_of_a_header_is_refused(file: Path, tmp_path: Path) -> None:
    data, path = file.read_bytes(), tmp_path / "cut.gguf"
    header = data.index(b"blk.1.ffn_down.weight") + 60
    for length in (*range(0, header, 7), len(data) - 1):
        path.write_bytes(data[:length])
        with pytest.raises(ModelNotFoundError):
            GgufFile(path)


def test_more_layers_than_tensors_are_refused(tmp_path: Path) -> None:
    """The model would be made before a tensor is missed."""

    def more(writer: Any) -> None:
        writer.kv_data[-1]["llama.block_count"].value = 2**31

    with pytest.raises(ModelNotFoundError, match="counts 2,147,483,648 layers and 20 tensors"):
        load_model(write(tmp_path / "layers.gguf", more=more), device="cpu")


@pytest.mark.filterwarnings("ignore::hybrid_kv.errors.GgufWarning")
@pytest.mark.parametrize("seed", range(3))
def test_flipped_bytes_load_or_are_refused(file: Path, tmp_path: Path, seed: int) -> None:
    draw, data = random.Random(seed), file.read_bytes()
    path, header = tmp_path / "flipped.gguf", data.index(b"blk.1.ffn_down.weight") + 60
    outcomes = set()
    for _ in range(60):
        flipped = bytearray(data)
        for _ in range(draw.choice((1, 1, 2, 5))):
            flipped[draw.randrange(4, header)] ^= 1 << draw.randrange(8)
        path.write_bytes(flipped)
        try:
            load_model(path, device="cpu")
            outcomes.add("loaded")
        except HybridKVError:
            outcomes.add("refused")
    assert outcomes == {"loaded", "refused"}


# Parts ------------------------------------------------------------------------------------------


def write_parts(folder: Path) -> list[Path]:
    """A file in three parts, the first of which has all keys, as llama.cpp splits it."""
    rng, paths = np.random.default_rng(3), []
    for number in range(3):
        path = folder / f"tiny-{number + 1:05d}-of-00003.gguf"
        writer = gguf.GGUFWriter(path, "llama")
        writer.add_uint16("split.no", number)
        writer.add_uint16("split.count", 3)
        writer.add_int32("split.tensors.count", 3)
        kind = gguf.GGMLQuantizationType.Q8_0
        writer.add_tensor(f"tensor.{number}", packed("Q8_0", (2, 96), rng), raw_dtype=kind)
        finish(writer)
        paths.append(path)
    return paths


def test_all_parts_of_a_split_file_are_opened_by_any_of_them(tmp_path: Path) -> None:
    for path in (paths := write_parts(tmp_path)):
        found = GgufFile(path)
        assert list(found.tensors) == ["tensor.0", "tensor.1", "tensor.2"]
        assert found.num_bytes == sum(part.stat().st_size for part in paths)


def test_a_missing_part_is_named(tmp_path: Path) -> None:
    first, second, _ = write_parts(tmp_path)
    second.unlink()
    with pytest.raises(ModelNotFoundError, match=f"'{second.name}' is missing"):
        GgufFile(first)


def test_a_part_that_was_renamed_is_refused(tmp_path: Path) -> None:
    first = write_parts(tmp_path)[0].rename(tmp_path / "model.gguf")
    with pytest.raises(ModelNotFoundError, match="one of 3 parts, and its name does not say"):
        GgufFile(first)


def test_parts_that_lack_tensors_are_refused(tmp_path: Path) -> None:
    _, second, third = write_parts(tmp_path)
    writer = gguf.GGUFWriter(third, "llama")
    finish(writer)
    with pytest.raises(ModelNotFoundError, match="have 2 of 3 tensors"):
        GgufFile(second)
