from __future__ import annotations

from itertools import combinations, product

import pytest

from tests import pairs
from tests.pairs import in_pairs

SOME = ("abc", [1, 2], [None, 3.0], "xy")


def test_any_two_values_meet_in_far_fewer_rows_than_the_product_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pairs, "WHOLE", False)
    rows = in_pairs(*SOME)
    for one, other in combinations(range(len(SOME)), 2):
        met = {(row[one], row[other]) for row in rows}
        assert met == set(product(SOME[one], SOME[other]))
    assert len(rows) <= 8
    assert len(set(rows)) == len(rows)


def test_two_parameters_meet_in_their_product() -> None:
    assert sorted(in_pairs("ab", [1, 2, 3])) == sorted(product("ab", [1, 2, 3]))


def test_the_whole_product_is_run_where_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pairs, "WHOLE", True)
    assert in_pairs(*SOME) == list(product(*SOME))
