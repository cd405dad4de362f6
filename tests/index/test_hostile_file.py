"""What `scripts/fuzz` looks for, in small: no file harms who loads it and searches."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hybrid_kv.errors import FileFormatError
from hybrid_kv.index._file import read_arrays, write_arrays
from hybrid_kv.index.graph import GraphIndex
from hybrid_kv.ops.native import engine_state
from tests.index.hostile_files import DIM, HEADS, keys_of_file, load_and_search, mutate, seeds

pytestmark = pytest.mark.skipif(
    engine_state().isa is None, reason=f"no native engine: {engine_state().detail}"
)
QUERIES = torch.randn(HEADS, 3, DIM, generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> list[bytes]:
    return seeds(tmp_path_factory.mktemp("seeds"))


def test_the_sound_files_load(sound: list[bytes], tmp_path: Path) -> None:
    for content in sound:
        path = tmp_path / "index.hkv"
        path.write_bytes(content)
        assert load_and_search(path, keys_of_file(), QUERIES)


@settings(
    derandomize=True,
    max_examples=300,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_a_hostile_file_is_refused_or_searched_within_its_keys(
    data: st.DataObject, sound: list[bytes], tmp_path: Path
) -> None:
    content = sound[data.draw(st.integers(0, len(sound) - 1))]
    path = tmp_path / "index.hkv"
    path.write_bytes(mutate(content, lambda limit: data.draw(st.integers(0, limit - 1))))
    load_and_search(path, keys_of_file(), QUERIES)


def test_a_graph_with_settings_that_were_removed_is_read(
    sound: list[bytes], tmp_path: Path
) -> None:
    path = tmp_path / "index.hkv"
    path.write_bytes(sound[2])
    meta, arrays = read_arrays(path, "graph")
    meta["params"] |= {"link_keys": 0, "link_positions": 1024}
    write_arrays(path, "graph", meta, arrays)
    assert GraphIndex.load(path, keys_of_file()).reports


def test_slots_behind_the_degree_are_checked_too(sound: list[bytes], tmp_path: Path) -> None:
    """A search reads whole lists; those of degree 17 have 15 slots that hold no neighbour."""
    path = tmp_path / "index.hkv"
    path.write_bytes(sound[2])
    meta, arrays = read_arrays(path, "graph")
    assert meta["degrees"] == [17, 17]
    arrays["0.lists"][3, 2 * 31 : 2 * 32] = 0xFF
    write_arrays(path, "graph", meta, arrays)
    with pytest.raises(FileFormatError, match=r"lists of a graph must be -1\.\.\d+"):
        GraphIndex.load(path, keys_of_file())


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("linked", [10**30, 60], "is damaged"),
        ("linked", [float("inf"), 60], "cannot convert float infinity"),
        ("linked", [-1, 60], "is damaged"),
        ("keys", 5, "is damaged"),
        ("keys", {"shape": [2, 60, 8]}, "was made for other keys"),
        ("degrees", [0, 16], "degree of a graph must be 1..256"),
        ("degrees", [16], "is damaged"),
    ],
)
def test_meta_data_that_does_not_fit_is_refused(
    sound: list[bytes], tmp_path: Path, name: str, value: object, message: str
) -> None:
    path = tmp_path / "index.hkv"
    path.write_bytes(sound[1])
    meta, arrays = read_arrays(path, "graph")
    write_arrays(path, "graph", {**meta, name: value}, arrays)
    with pytest.raises(FileFormatError, match=message):
        GraphIndex.load(path, keys_of_file())


def test_a_head_without_a_graph_is_noticed(sound: list[bytes], tmp_path: Path) -> None:
    path = tmp_path / "index.hkv"
    path.write_bytes(sound[1])
    meta, arrays = read_arrays(path, "graph")
    write_arrays(path, "graph", {**meta, "reports": meta["reports"][:1]}, arrays)
    with pytest.raises(FileFormatError, match="has 1 graphs for 2 heads"):
        GraphIndex.load(path, keys_of_file())


@pytest.mark.parametrize("beam", ["many", -1, 2**20 + 1, None])
def test_a_report_of_another_form_is_refused(
    sound: list[bytes], tmp_path: Path, beam: object
) -> None:
    path = tmp_path / "index.hkv"
    path.write_bytes(sound[1])
    meta, arrays = read_arrays(path, "graph")
    meta["reports"][0]["beam"] = beam
    write_arrays(path, "graph", meta, arrays)
    with pytest.raises(FileFormatError, match="is damaged"):
        GraphIndex.load(path, keys_of_file())
