"""How many cold entries a query attends: what may be asked for, and what is refused."""

from __future__ import annotations

import math
from typing import Any

import pytest

from hybrid_kv.config import HybridConfig
from hybrid_kv.errors import ConfigError
from hybrid_kv.types import Read, TokenBudget

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"min_share": -0.5}, "min_share: input should be greater than or equal to 0, got -0.5"),
    ({"min_share": math.nan}, "min_share: input should be a finite number, got nan"),
    ({"min_share": 1}, "min_share: input should be less than 1, got 1"),
    ({"min_share": "few"}, "min_share: input should be a valid number, unable to parse"),
    ({"max_tokens": 0}, "max_tokens: input should be greater than or equal to 1, got 0"),
    ({"max_tokens": 99}, "cold: max_tokens must be at least top_k 100, got 99; raise it"),
    (
        {"top_k": "all", "min_share": 0.1},
        "cold: min_share limits a search, and top_k 'all' attends",
    ),
    ({"top_k": "all", "max_tokens": 3}, "cold: max_tokens limits a search, and top_k 'all'"),
]


@pytest.mark.parametrize(("cold", "text"), REFUSED)
@pytest.mark.parametrize("method", ["retrieval_attention", "ivf"])
def test_a_budget_that_means_nothing_is_refused(
    method: str, cold: dict[str, Any], text: str
) -> None:
    with pytest.raises(ConfigError) as refusal:
        HybridConfig(method=method, cold=cold)
    assert str(refusal.value).startswith(text)


@pytest.mark.parametrize("method", ["full", "quest", "streaming_llm"])
def test_methods_that_search_nothing_know_no_shares(method: str) -> None:
    with pytest.raises(ConfigError, match=f"unknown {method} setting 'min_share'"):
        HybridConfig.from_settings({"method": method, "min_share": "0.1"})


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ((0,), "top_k"),
        ((5, 4), "max_tokens"),
        ((5, None, -1.0), "min_share"),
        ((5, 9, math.nan), "min_share"),
    ],
)
def test_the_value_itself_refuses_what_it_cannot_mean(
    arguments: tuple[Any, ...], name: str
) -> None:
    with pytest.raises(ConfigError, match=f"^{name} must be"):
        TokenBudget(*arguments)


def test_short_names_reach_the_budget() -> None:
    settings = {"method": "flat", "top_k": "64", "max_tokens": "1k", "min_share": "7.5e-4"}
    cold = HybridConfig.from_settings(settings).cold
    assert cold.budget == TokenBudget(64, 1024, 7.5e-4)
    assert cold.budget.most == 1024
    assert TokenBudget(64).most == 64


def test_heads_that_share_are_searched_wider_than_they_attend_on_average() -> None:
    assert TokenBudget(64, shared=True).most == 256
    assert TokenBudget(64, shared=True).width == 128
    assert TokenBudget(64, 96, shared=True).width == 96
    assert TokenBudget(64, 96).width == 64


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"pages": TokenBudget(3)}, "pages must be a number of resident pages or 'all', got Token"),
        ({"pages": -1}, "pages must be a number of resident pages or 'all', got -1"),
        ({"cold": 3}, "cold must be a TokenBudget, 'all' or None, got 3; say TokenBudget(3)"),
        ({"cold": "some"}, "cold must be a TokenBudget, 'all' or None, got 'some'"),
    ],
)
def test_a_step_reads_each_tier_by_a_budget_of_its_kind(
    arguments: dict[str, Any], text: str
) -> None:
    with pytest.raises(ConfigError) as refusal:
        Read(**arguments)
    assert str(refusal.value).startswith(text)


def test_widening_multiplies_cold_entries_and_nothing_else() -> None:
    read = Read(7, TokenBudget(5, 9, 0.1, shared=True))
    assert read.widened(3) == Read(7, TokenBudget(15, 27, 0.1, shared=True))
    assert Read(cold=TokenBudget(5)).widened(2) == Read(cold=TokenBudget(10))
    for same in (Read(7, "all"), Read(7)):
        assert same.widened(3) == same


@pytest.mark.parametrize("method", ["streaming_llm", "lm_infinite"])
def test_an_opened_window_has_no_end_whatever_the_page_size(method: str) -> None:
    sizes = {"page_size": 3, "sink_tokens": 3, "window_tokens": 6}
    opened = HybridConfig(method=method, **sizes).opened()
    assert opened.replace(audit_every=2).params == opened.params
