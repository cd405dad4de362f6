"""Packed lists of neighbours: every engine packs and unpacks as the plain oracle does."""

from __future__ import annotations

import ctypes

import pytest
import torch
from torch import Tensor

from hybrid_kv.errors import ConfigError
from hybrid_kv.ops.key_graph import list_bytes, pack_lists, unpack_lists
from hybrid_kv.ops.native.graph import pack, unpack

SIZES = [(1, 1), (15, 37), (16, 300), (48, 65536), (50, 65537), (64, 131073), (33, 300000)]


def some_neighbours(degree: int, nodes: int, seed: int = 0) -> Tensor:
    """[nodes, degree] int32 of others, with -1 at the ends of some lists."""
    draw = torch.Generator().manual_seed(seed)
    found = torch.randint(nodes, (nodes, degree), generator=draw, dtype=torch.int32)
    found[found == torch.arange(nodes)[:, None]] = -1
    found[-1] = torch.where(found[-1] < 0, -1, nodes - 2)  # all high bits that occur
    ends = torch.randint(degree + 1, (nodes, 1), generator=draw)
    return torch.where(
        (torch.arange(degree) < ends) | (torch.arange(nodes)[:, None] == 7), found, -1
    )


@pytest.mark.parametrize(("degree", "nodes"), SIZES)
def test_engine_and_oracle_agree_and_give_back_what_they_got(
    engine: ctypes.CDLL, degree: int, nodes: int
) -> None:
    neighbours = some_neighbours(degree, nodes)
    packed = pack(neighbours, engine=engine)
    assert torch.equal(packed, pack_lists(neighbours))
    assert torch.equal(unpack(packed, degree, engine=engine), neighbours)
    assert torch.equal(unpack_lists(packed, degree), neighbours)


def test_the_layout_is_the_documented_one() -> None:
    neighbours = torch.full((70000, 20), -1, dtype=torch.int32)
    neighbours[3, :2] = torch.tensor([65537, 9])
    row = pack_lists(neighbours)[3].tolist()
    assert len(row) == 72  # 32 slots of 2 bytes, a plane of 4, and 4 to a whole word
    assert row[:6] == [1, 0, 9, 0, 3, 0]
    assert row[62:] == [3, 0, 1, 0, 0, 0, 0, 0, 0, 0]


@pytest.mark.parametrize(
    ("degree", "nodes", "wanted"),
    [
        (64, 65536, 128),
        (64, 65537, 136),  # 192 would cost more than an eighth
        (48, 65536, 96),
        (48, 2**20, 128),  # 120 are used
        (32, 131072, 72),
        (2, 0, 32),
    ],
)
def test_a_list_takes_whole_lines_where_that_costs_little(
    engine: ctypes.CDLL, degree: int, nodes: int, wanted: int
) -> None:
    assert list_bytes(degree, nodes) == wanted
    engine.hkv_graph_list_bytes.argtypes = [ctypes.c_int32, ctypes.c_int64]
    engine.hkv_graph_list_bytes.restype = ctypes.c_int64
    assert engine.hkv_graph_list_bytes(degree, nodes) == wanted


@pytest.mark.parametrize("wrong", [-2, 10])
def test_a_list_that_names_no_node_is_not_packed(engine: ctypes.CDLL, wrong: int) -> None:
    neighbours = torch.zeros(10, 3, dtype=torch.int32)
    neighbours[4, 2] = wrong
    with pytest.raises(ConfigError, match="a list names a node that does not exist"):
        pack(neighbours, engine=engine)
