"""Two profiles: what may be called a difference, and what else differs."""

from __future__ import annotations

import random

import pytest

from hybrid_kv.errors import ConfigError
from hybrid_kv.report.html.compare import (
    LEAST_STEPS,
    differences,
    ratio_of_medians,
    ratios_of,
)
from hybrid_kv.report.html.page import render
from hybrid_kv.report.html.sources import ComparedProfiles, Source, comparisons
from hybrid_kv.report.schema import ProfileReport
from tests.report import profiles

CONTEXTS = (4096, 32768)


def steps(count: int, mean: float, seed: int, noise: float = 0.03) -> list[float]:
    rng = random.Random(seed)
    return [mean * rng.lognormvariate(0, noise) for _ in range(count)]


def compare(first: ProfileReport, second: ProfileReport) -> ComparedProfiles:
    (one,) = comparisons([Source(first, "before.json"), Source(second, "after.json")])
    return one


def test_a_run_against_itself_is_no_difference() -> None:
    own = steps(31, 50.0, 1)
    ratio = ratio_of_medians(own, own)
    assert ratio.value == 1.0
    assert ratio.verdict == 0


@pytest.mark.parametrize(("factor", "verdict"), [(0.8, -1), (1.25, 1)])
def test_a_large_difference_is_found_with_its_direction(factor: float, verdict: int) -> None:
    ratio = ratio_of_medians(steps(31, 50.0, 1), steps(31, 50.0 * factor, 2))
    assert ratio.verdict == verdict
    assert ratio.low is not None
    assert ratio.high is not None
    assert ratio.low <= factor <= ratio.high


def test_equal_runs_are_rarely_called_different() -> None:
    """At a level of 5%; the bound leaves room for 31 steps and for chance."""
    verdicts = [
        ratio_of_medians(steps(31, 50.0, 2 * i), steps(31, 50.0, 2 * i + 1)).verdict
        for i in range(100)
    ]
    assert sum(map(abs, verdicts)) <= 13


def test_steps_in_runs_alike_widen_the_interval() -> None:
    """Neighbours that are alike hold less evidence than as many independent steps."""
    alike = [50.0 + 5.0 * (i // 9 % 2) + 0.01 * i for i in range(63)]
    mixed = random.Random(3).sample(alike, len(alike))
    other = steps(63, 50.0, 5, noise=0.001)
    wide, narrow = ratio_of_medians(other, alike), ratio_of_medians(other, mixed)
    assert wide.high - wide.low > narrow.high - narrow.low  # type: ignore[operator]


def test_few_steps_have_no_interval() -> None:
    few, enough = steps(LEAST_STEPS - 1, 1.0, 1), steps(LEAST_STEPS, 99.0, 2)
    assert ratio_of_medians(few, enough).low is None
    assert ratio_of_medians(few, enough).verdict == 0
    assert ratio_of_medians(enough, enough).low is not None


def test_the_same_runs_give_the_same_interval() -> None:
    a, b = steps(31, 50.0, 1), steps(29, 51.0, 2)
    assert ratio_of_medians(a, b) == ratio_of_medians(a, b)


@pytest.mark.parametrize(("a", "b"), [([], [1.0]), ([1.0], []), ([0.0], [1.0])])
def test_a_ratio_of_nothing_is_refused(a: list[float], b: list[float]) -> None:
    with pytest.raises(ValueError, match="steps of both runs"):
        ratio_of_medians(a, b)


def test_only_what_both_have_measured_is_compared() -> None:
    first = profiles.profile(CONTEXTS)  # hnsw failed at 32K, flat was skipped at 4K
    rows = tuple(profiles.row(name, 32768, slower=0.5) for name in ("full", "hnsw", "flat"))
    ratios = ratios_of(compare(first, profiles.profile(rows=rows)))
    assert [(ratio.method, ratio.context_tokens) for ratio in ratios] == [
        ("full", 32768),
        ("flat", 32768),
    ]
    assert [ratio.tpot_ratio for ratio in ratios] == pytest.approx([0.5, 0.5])


def test_rows_without_steps_are_compared_by_their_means() -> None:
    first = profiles.profile(rows=(profiles.row("flat", 37, tpot_ms=10.0, step_ms=()),))
    second = profiles.profile(rows=(profiles.row("flat", 37, tpot_ms=15.0, step_ms=()),))
    (ratio,) = ratios_of(compare(first, second))
    assert (ratio.tpot_ratio, ratio.low, ratio.high) == (1.5, None, None)


def test_profiles_with_nothing_in_common_are_refused() -> None:
    first, second = profiles.profile((4096,)), profiles.profile((8192,))
    with pytest.raises(ConfigError, match=r"'before\.json' and 'after\.json' with nothing in"):
        ratios_of(compare(first, second))


def test_the_page_colours_only_what_is_sure() -> None:
    rows = {name: profiles.row(name, 4096) for name in ("full", "ivf", "quest")}
    slower = profiles.row("ivf", 4096, slower=1.5)
    faster = profiles.row("quest", 4096, slower=0.5)
    first = profiles.profile(rows=tuple(rows.values()))
    second = profiles.profile(rows=(rows["full"], slower, faster))
    text = render([Source(first, "a.json"), Source(second, "b.json")])
    assert text.count('<td class="good"') == 1
    assert text.count('<td class="bad"') == 1
    assert "faster in 1, slower in 1" in text
    assert "bootstrap" in text


def test_each_further_profile_is_compared_with_the_first() -> None:
    one = profiles.profile(CONTEXTS)
    sources = [Source(one, name) for name in ("a", "b", "c")]
    assert [made.names for made in comparisons(sources)] == [("a", "b"), ("a", "c")]


def test_what_differs_between_the_runs_is_listed() -> None:
    first = profiles.profile(rows=(profiles.row("flat", 4096),))
    changed = profiles.row("flat", 4096, config={"method": "flat", "window_tokens": 640})
    second = profiles.profile(rows=(changed,), torch="2.14.0", new_tokens=37)
    found = {name: (a, b) for name, a, b in differences(first, second)}
    assert found["environment.versions.torch"] == ("2.13.0+cpu", "2.14.0")
    assert found["new_tokens"] == ("32", "37")
    assert found["flat, 4K: window_tokens"] == ("512", "640")
    assert found["flat, 4K: page_size"] == ("16", "–")
    assert len(found) == 5  # and cold.top_k
    assert differences(first, first) == []
