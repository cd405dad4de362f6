"""Tests ask what a cache holds through `tests/kit.py`; the lines that do not can only get fewer."""

from __future__ import annotations

import pytest

from tests.walks import OWN, counts, reaches, walks

WALKS, REACHES = 4, 88
"""Lower these with every line that goes; `python -m tests.walks` says where the others are."""


def test_tests_walk_no_further_into_a_cache() -> None:
    found = counts(walks, own=OWN)
    assert sum(found.values()) <= WALKS, f"ask through tests/kit.py: {found}"


def test_tests_reach_no_further_for_what_is_private() -> None:
    found = counts(reaches)
    assert sum(found.values()) <= REACHES, f"make it public, or test what it does: {found}"


OF_STORE = "from hybrid_kv.store import ColdStore, LayerKV"


@pytest.mark.parametrize(
    ("code", "lines"),
    [
        ("kv.stores[0]", {1}),
        ("kv.stores[0].rows[0].chain.num_tokens", {1}),
        ("kv.layers[0].held\nkv.layers[1].store", {1, 2}),
        ("row = kv.stores[0].rows[0]\nrow.length\nrow.table.positions()", {1, 3}),
        ("for store in kv.stores.values():\n    print(store.cold)", {1, 2}),
        ("a, b = 1, kv.stores[0]\na.rows\nb.rows", {1, 3}),
        ("[one.pool\nfor one in kv.stores]", {1, 2}),
        (
            "class Scene:\n    @property\n    def row(self):\n        return kv.stores\nx.row.pool",
            {4, 5},
        ),
        ("class Scene:\n    def __init__(self):\n        self.own = kv.stores\nx.own.pool", {3, 4}),
        (f"{OF_STORE}\ndef look(layer: LayerKV | None):\n    return layer.rows", {3}),
        (f"{OF_STORE}\nlayer = LayerKV()\nlayer.rows", {3}),
        (f"{OF_STORE}\nlayer = LayerKV()\nheld(layer).rows", {3}),
        (f"{OF_STORE}\nchain = ColdStore(shape).chains[0]\nchain.num_tokens", {2}),
        ("step.layer.rows", {1}),
    ],
)
def test_a_walk_is_seen(code: str, lines: set[int]) -> None:
    assert walks(code) == lines


@pytest.mark.parametrize(
    "code",
    [
        "report.rows[0].table",
        "def look(row: Row):\n    return row.table",  # another one
        "def one():\n    row = kv.layers[0]\ndef other():\n    row.pool",
        f"{OF_STORE}\nfrom tests.kit import held\nlayer = LayerKV()\nheld(layer).extents[0].pool",
        "kv.layers[0].steps",
    ],
)
def test_what_is_no_walk_is_not_counted(code: str) -> None:
    assert walks(code) == set()


def test_a_reach_is_seen() -> None:
    code = "self._cache\ncls._cache\nother._cache\nother.__class__\nself.one._cache\ntorch._C"
    assert reaches(code) == {3, 5}
