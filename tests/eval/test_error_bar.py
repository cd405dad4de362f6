"""How the constants of error bars are learned from rows, and judged on texts that were left out."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.error_bar import fit
from benchmarks.error_bar.fit import Rows, auc, by_budget, learned, left_out, logistic, risk
from benchmarks.error_bar.run import COLUMNS, cut, kept
from hybrid_kv.contest.prompts import PrefilledPrompt
from hybrid_kv.types import Evidence


@pytest.fixture
def rows() -> Rows:
    """Three texts whose KL is twice the size, but for noise; flips follow margin and half."""
    draw = np.random.default_rng(0)
    count = 3000
    half, entropy = draw.uniform(0.01, 0.3, count), draw.uniform(0.1, 6, count)
    margin = draw.exponential(1.0, count)
    odds = -1 - 1.2 * np.log(margin) + 0.8 * np.log(half)
    text = np.repeat(np.array(["a", "b", "c"]), count // 3)
    return Rows(
        *(text, text, np.tile(np.array(["1%", "2%"]), count // 2)),
        kl=2 * half**2.5 * entropy**0.75 * draw.exponential(1.0, count),
        flip=(draw.uniform(size=count) < 1 / (1 + np.exp(-odds))).astype(float),
        half=half,
        entropy=entropy,
        margin=margin,
    )


def test_auc_is_the_share_of_pairs_in_order() -> None:
    signal = np.array([3.0, 1, 2, 2, 5, 0])
    is_hit = np.array([True, False, True, False, False, False])
    pairs = [(a > b) + (a == b) / 2 for a in signal[is_hit] for b in signal[~is_hit]]
    assert auc(signal, is_hit) == pytest.approx(np.mean(pairs))
    assert np.isnan(auc(signal, is_hit & False))


def test_constants_are_found_again(rows: Rows) -> None:
    kl, bar = learned(rows)
    assert kl == pytest.approx(2, rel=0.1)
    assert bar == pytest.approx(2 * np.log(10), rel=0.1)
    assert logistic(rows) == pytest.approx([-1, -1.2, 0.8], abs=0.35)
    assert risk(rows, logistic(rows)).sum() == pytest.approx(rows.flip.sum(), rel=0.01)


def test_a_limit_verifies_a_block_from_the_first_token_above_it(rows: Rows) -> None:
    own = np.nonzero((rows.text == "b") & (rows.budget == "2%"))[0]
    expected = np.zeros(len(rows.kl))
    expected[own[[5, 6, 9]]] = 1.0
    verified, passes = fit.limited(rows, expected, 0.5, block=4)
    assert np.nonzero(verified)[0].tolist() == own[[5, 6, 7, 9, 10, 11]].tolist()
    assert np.nonzero(passes)[0].tolist() == own[[5, 9]].tolist()
    assert not fit.limited(rows, expected, 1.0)[0].any()


def test_a_text_is_judged_by_the_others_alone(rows: Rows) -> None:
    kl, bar, flip = left_out(rows)
    own = rows.text == "b"
    other = rows._replace(kl=np.where(own, 100 * rows.kl, rows.kl))
    assert np.array_equal(left_out(other)[0][own], kl[own])
    assert np.array_equal(left_out(other)[1][own], bar[own])
    assert not np.array_equal(left_out(other)[1][~own], bar[~own])
    assert 0 < flip.min() < flip.max() < 1


def test_lines_by_budget(rows: Rows) -> None:
    found = by_budget(rows)
    assert list(found) == ["1%", "2%", "all"]
    assert found["1%"]["tokens"] + found["2%"]["tokens"] == found["all"]["tokens"]
    assert found["all"]["coverage"] == pytest.approx(0.9, abs=0.03)
    assert found["all"]["worst_coverage"] <= found["all"]["coverage"]
    assert set(fit.SUMMED) <= found["all"].keys()
    covered = fit.covered_by_kind(rows)
    assert list(covered) == ["1%", "2%"]
    assert covered["1%"].keys() == {"a", "b", "c"}
    assert min(covered["1%"].values()) >= found["1%"]["worst_kind_coverage"]


def test_rows_come_from_a_csv_that_is_gone_on_with(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    assert kept(path) == set()
    with path.open("a", newline="") as file:
        csv.DictWriter(file, COLUMNS).writerow(
            dict(zip(COLUMNS, ("x", "prose", 9, "1%", "1e-3", 1, ".1", "2", ".5"), strict=True))
        )
    assert kept(path) == {"x"}
    assert Rows.read(path).size == pytest.approx([0.1**2.5 * 2**0.75])


def test_a_reading_is_cut_with_what_is_known_of_its_queries() -> None:
    queries, k = torch.randn(4, 5, 8), torch.randn(1, 2, 40, 8)
    seen = Evidence(40, queries, queries, torch.tensor([0, 8, 16, 24, 32]))
    whole = PrefilledPrompt(torch.arange(40)[None], ((k, k + 1),), ((seen,),))
    part = cut(whole, 17)
    assert part.ids.tolist() == [list(range(17))]
    assert torch.equal(part.layers[0][0], k[:, :, :17])
    assert torch.equal(part.layers[0][1], k[:, :, :17] + 1)
    (row,) = part.evidence[0]
    assert row.num_tokens == 17
    assert row.last_queries is None
    assert row.sampled_positions is not None
    assert row.sampled_queries is not None
    assert row.sampled_positions.tolist() == [0, 8, 16]
    assert torch.equal(row.sampled_queries, queries[:, :3])
