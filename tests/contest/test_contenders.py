"""Who takes part under which budget, and what is refused before anything is computed."""

from __future__ import annotations

from typing import Any

import pytest

from hybrid_kv.config import HybridConfig, budget_tokens
from hybrid_kv.contest.arguments import EvalArguments, contenders, parse_spec, split_outside_quotes
from hybrid_kv.errors import ConfigError
from hybrid_kv.methods.windows import StreamingLLM
from hybrid_kv.plugins import METHODS, Method


def asked(**values: Any) -> EvalArguments:
    return EvalArguments.of({"model": "needle", **values})


@pytest.mark.parametrize(
    ("text", "tokens"), [("5%", 205), ("0.5%", 20), ("512", 512), ("1k", 1024), (" 2 % ", 82)]
)
def test_a_budget_is_a_share_or_a_number(text: str, tokens: int) -> None:
    assert budget_tokens(text, 4096) == tokens


@pytest.mark.parametrize("text", ["0", "0%", "-1", "101%", "five", "nan%", "", "%"])
def test_what_is_no_budget_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="a budget must be a share of the context such as 5%"):
        budget_tokens(text, 4096)


def test_full_attention_takes_part_once_and_first() -> None:
    found = [*contenders(["quest", "full"], ["5%", "10%"], 4096, {})]
    assert [(one.name, one.budget) for one in found] == [
        ("full", None),
        ("quest", "5%"),
        ("quest", "10%"),
    ]
    assert [one.config.page_budget for one in found[1:]] == [8, 18]


def test_a_methods_own_settings_hold_whatever_the_budget_says() -> None:
    _, own = contenders(["quest:dense_layers=3:page_size=8"], ["5%"], 4096, {"page_size": 4})
    assert (own.config.dense_layers, own.config.page_size) == (3, 8)
    assert own.config.sink_tokens == 8


def test_common_settings_reach_the_methods_that_know_them() -> None:
    _, quest, hybrid = contenders(["quest", "hybrid"], ["5%"], 4096, {"cold.index": "ivf"})
    assert hybrid.config.cold.index.kind == "ivf"
    assert "cold" not in quest.config.flat()


def test_settings_stand_behind_a_name() -> None:
    assert parse_spec("quest:a=1:b.c=x=y") == ("quest", {"a": "1", "b.c": "x=y"})
    with pytest.raises(ConfigError, match="'quest:dense' must be a name with settings like"):
        parse_spec("quest:dense")


def test_a_value_with_a_comma_or_a_colon_stands_in_quotes() -> None:
    """Regression: commas part methods, so that no list could be given to one."""
    text = "tidal_decode:selection_layers='2,13',headkv:heads=\"c:\\a,b.json\",quest:page_size=it's"
    specs = split_outside_quotes(text, ",")
    assert [parse_spec(one) for one in specs] == [
        ("tidal_decode", {"selection_layers": "2,13"}),
        ("headkv", {"heads": "c:\\a,b.json"}),
        ("quest", {"page_size": "it's"}),
    ]
    _, own = contenders(specs[:1], ["5%"], 4096, {})
    assert own.config.selection_layers == (2, 13)
    with pytest.raises(ConfigError, match="a quote must have an end, got quest:a='1,2; close it"):
        split_outside_quotes("quest:a='1,2", ",")


class Unbudgeted(StreamingLLM):
    """A plug-in that says nothing of budgets."""

    at_budget = classmethod(Method.at_budget.__func__)  # type: ignore[attr-defined]


@pytest.mark.usefixtures("own_plugins")
def test_who_takes_no_budget_is_named_and_the_others_go_on() -> None:
    METHODS.register("unbudgeted")(Unbudgeted)
    found = asked(methods=("unbudgeted", "locret", "quest"))
    assert [one.name for one in found.contenders(4096)] == ["full", "quest"]
    refused = {one.name: str(one.refused) for one in found.refused(4096)}
    assert "Unbudgeted does not say how a budget of tokens sets" in refused["unbudgeted"]
    assert "method 'locret': heads must be a file of trained heads" in refused["locret"]
    with pytest.raises(ConfigError, match=r"Unbudgeted does not say.*no method is left to compare"):
        asked(methods=("unbudgeted",))


@pytest.mark.parametrize("method", sorted(METHODS))
def test_one_percent_of_3400_tokens_is_a_budget(method: str) -> None:
    """Regression: 34 tokens were refused with pages of 16."""
    config = HybridConfig(method=method, **({"heads": "heads.pt"} if method == "locret" else {}))
    given = config.at_budget("1%", 3400)
    assert HybridConfig(**given.flat()) == given
    resident = [getattr(given.params, name, 0) for name in ("sink_tokens", "window_tokens")]
    assert given == config or sum(resident) < 34, "a codec attends everything"


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"methods": ("qest",)}, "unknown method 'qest'; did you mean 'quest'"),
    ({"tasks": ("key_valu",)}, "unknown task 'key_valu'; did you mean 'key_value'"),
    ({"tasks": ("passkey:records",)}, "'passkey:records' must be a name with settings"),
    ({"settings": {"cold.nprobe": 1}, "methods": ("quest",)}, "setting of the methods"),
    (
        {"budgets": (".5%",), "contexts": (1024,), "methods": ("hybrid",)},
        "budget .5% of 1024 token",
    ),
    ({"budgets": ()}, "budgets must name one at least"),
    ({"question": "later"}, "arguments of the evaluation: question"),
    ({"samples": 0}, "arguments of the evaluation: samples"),
]


@pytest.mark.parametrize(("values", "text"), REFUSED)
def test_what_cannot_be_compared_is_refused_at_once(values: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        asked(**values)
    assert text in str(refusal.value)


SMALL: dict[str, Any] = {
    "methods": ("hybrid", "quest", "streaming_llm"),
    "budgets": ("0.5%", "10%"),
    "contexts": (1024,),
}


def test_all_that_is_refused_is_named_with_the_way_out() -> None:
    with pytest.raises(ConfigError) as refusal:
        asked(**SMALL)
    text = str(refusal.value)
    assert "(as are quest at 0.5%, streaming_llm at 0.5%)" in text
    assert text.endswith("or leave out what is refused with --skip-refused")


def test_what_is_refused_is_left_out_by_name_where_that_was_asked() -> None:
    found = asked(**SMALL, skip_refused=True)
    kept = [(one.name, one.budget) for one in found.contenders(1024)]
    assert kept == [("full", None), *((name, "10%") for name in SMALL["methods"])]
    left_out = found.refused(1024)
    assert [(one.name, one.budget) for one in left_out] == [(m, "0.5%") for m in SMALL["methods"]]
    assert "budget 0.5% of 1024 tokens cannot be given to quest" in str(left_out[1].refused)


def test_skipping_excuses_neither_a_wrong_budget_nor_one_that_leaves_no_method() -> None:
    with pytest.raises(ConfigError, match="must be a share of the context such as 5%"):
        asked(**{**SMALL, "budgets": ("10%", "much")}, skip_refused=True)
    with pytest.raises(ConfigError, match="no method is left to compare"):
        asked(**{**SMALL, "budgets": ("0.5%",)}, skip_refused=True)


def test_names_of_groups_are_spelled_out() -> None:
    assert len(asked(tasks=("ruler",)).tasks) == 13
    methods = asked(methods=("all", "h2o:demote=offload"), contexts=(16384,)).methods
    assert {"full", "quest", "hybrid", "h2o", "h2o:demote=offload"} <= set(methods)
    assert len(methods) == len(list(METHODS)) + 1
    needle = asked(tasks=("all",)).tasks_in("needle")
    assert {"key_value", "most_frequent", "perplexity"} <= set(needle)
    assert "qa_1" not in needle


def test_a_task_that_the_model_does_not_speak_is_refused() -> None:
    with pytest.raises(ConfigError, match="task 'qa_1' is not written in the needle language"):
        asked(tasks=("qa_1",)).tasks_in("needle")
    with pytest.raises(ConfigError, match="'most_frequent' is not written in English"):
        asked(tasks=("most_frequent",)).tasks_in("english")
