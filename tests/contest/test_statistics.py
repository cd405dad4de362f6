"""From cells to rows: means, intervals that hold what they promise, and depths."""

from __future__ import annotations

import numpy as np
import pytest

from hybrid_kv.contest.evaluation import interval, rows_of
from hybrid_kv.report.evaluation import Cell, Counters


def cell(sample: int, scores: tuple[float, ...], **more: object) -> Cell:
    fields = {
        "depths": tuple(number / 10 for number in range(len(scores))),
        "counters": Counters(attended_tokens=10.0 * sample),
        **more,
    }
    return Cell(
        task="key_value",
        context_tokens=701,
        sample=sample,
        asking="after",
        method="quest",
        budget="5%",
        config={},
        scores=scores,
        **fields,
    )


def test_a_row_has_the_mean_of_all_questions() -> None:
    (row,) = rows_of([cell(1, (1.0, 0.0, 0.5)), cell(0, (1.0,))])
    assert row.score is not None
    assert row.score.mean == pytest.approx(2.5 / 4)
    assert row.score.low <= row.score.mean <= row.score.high
    assert (row.samples, row.questions) == (2, 4)
    assert row.counters.attended_tokens == 5
    assert [(part.low, part.questions) for part in row.depths] == [(0.0, 3), (0.2, 1)]


def test_cells_without_a_result_count_for_nothing_and_say_why() -> None:
    (row,) = rows_of([cell(0, (1.0,)), cell(1, (), error="it broke")])
    assert row.score is not None
    assert (row.score.mean, row.samples, row.error) == (1, 1, "it broke")
    (alone,) = rows_of([cell(1, (), error="it broke")])
    assert (alone.score, alone.samples, alone.error) == (None, 0, "it broke")


def test_reading_is_compared_token_by_token() -> None:
    read = Cell(
        task="perplexity",
        context_tokens=701,
        sample=0,
        asking="none",
        method="quest",
        budget="5%",
        config={},
        nats=(2.0, 3.0),
        full_nats=(1.0, 3.5),
        kl=(0.5, 0.1),
        agrees=(True, False),
    )
    (row,) = rows_of([read])
    assert row.nats_beyond is not None
    assert row.kl is not None
    assert row.score is not None
    assert (row.nats, row.nats_beyond.mean, row.kl.mean, row.score.mean) == (2.5, 0.25, 0.3, 0.5)


def test_an_interval_holds_the_truth_nineteen_times_in_twenty() -> None:
    draw = np.random.default_rng(3)
    held = 0
    for trial in range(200):
        groups = [list(draw.normal(0.7, 0.2, 3)) for _ in range(40)]
        found = interval(groups, trial)
        assert found is not None
        held += found.low <= 0.7 <= found.high
    assert 175 <= held <= 199


def test_values_of_a_group_are_drawn_together() -> None:
    alike = interval([[1.0] * 10, [0.0] * 10, [1.0] * 10, [0.0] * 10])
    single = interval([[value] for value in [1.0] * 20 + [0.0] * 20])
    assert alike is not None
    assert single is not None
    assert alike.high - alike.low > 2 * (single.high - single.low)
    assert interval([]) is None
