"""One configuration tree: what is written means one thing, and nothing written is ignored."""

from __future__ import annotations

import copy
import json
import pickle
from typing import Any

import pytest
from pydantic import Field, ValidationError

from hybrid_kv import config as config_module
from hybrid_kv.config import (
    BudgetField,
    Count,
    HybridConfig,
    IndexConfig,
    Params,
    Tokens,
    parse_count,
)
from hybrid_kv.errors import ConfigError
from hybrid_kv.plugins import METHODS
from hybrid_kv.registry import Registry


class Flat:
    """Scans every key."""

    class Params(Params):
        """No parameters."""

    def __init__(self, params: Any) -> None:
        self.params = params


class Graph(Flat):
    """Walks a graph."""

    class Params(Params):
        """Two parameters, one of them called as one of the method's."""

        max_degree: Count = 32
        interval: Count = 1


class Cold(Params):
    """The cold tier's group."""

    top_k: BudgetField = 64
    index: IndexConfig = Field(default_factory=IndexConfig)


class Tiered:
    """Has every kind of parameter."""

    class Params(Params):
        """Some flat parameters and one group."""

        sink_tokens: Tokens = 16
        window_tokens: Tokens = 64
        interval: Count = 1
        page_budget: BudgetField = "all"
        cold: Cold = Field(default_factory=Cold)

    def __init__(self, params: Any) -> None:
        self.params = params


@pytest.fixture
def _throwaway_plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    indexes: Registry[Any] = Registry("index", provider="json")
    indexes.register("flat")(Flat)
    indexes.register("graph")(Graph)
    methods: Registry[Any] = Registry("method", provider="json")
    methods.register("hybrid")(Tiered)
    methods.register("full")(Flat)
    monkeypatch.setattr(IndexConfig, "registry", indexes)
    monkeypatch.setattr(HybridConfig, "registry", methods)
    monkeypatch.setattr(config_module, "METHODS", methods)


def refusal(**settings: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        HybridConfig(**settings)
    return str(caught.value)


@pytest.mark.usefixtures("_throwaway_plugins")
class TestCounts:
    @pytest.mark.parametrize(
        ("text", "value"),
        [
            ("128k", 131072),
            ("128K", 131072),
            (" 4 GiB ", 4 * 2**30),
            ("1.5k", 1536),
            ("2mb", 2**21),
            ("17", 17),
        ],
    )
    def test_human_numbers_are_understood(self, text: str, value: int) -> None:
        assert parse_count(text) == value

    @pytest.mark.parametrize("value", ["0.3k", "k", "-1", "4t", "all", 7, 7.5, None])
    def test_anything_else_is_left_to_the_type(self, value: object) -> None:
        assert parse_count(value) is value

    def test_settings_take_them(self) -> None:
        config = HybridConfig(window_tokens="4k", page_budget="2k", prefill_chunk_tokens="1k")
        assert (config.window_tokens, config.page_budget) == (4096, 2048)
        assert config.prefill_chunk_tokens == 1024


@pytest.mark.usefixtures("_throwaway_plugins")
class TestRefusals:
    @pytest.mark.parametrize(
        ("settings", "text"),
        [
            ({"method": "hybird"}, "unknown method 'hybird'; did you mean 'hybrid'? known: full"),
            ({"window_token": 1}, "unknown hybrid setting 'window_token'; did you mean 'window_to"),
            ({"cold": {"topk": 1}}, "cold: unknown setting 'topk'; did you mean 'top_k'? known: i"),
            ({"cold": {"index": "grpah"}}, "index: unknown index 'grpah'; did you mean 'gra"),
            (
                {"cold": {"index": {"kind": "graph", "max_degre": 1}}},
                "index: unknown graph setting 'max_degre'; did you mean 'max_degree'?",
            ),
        ],
    )
    def test_an_unknown_name_has_the_nearest_one(self, settings: Any, text: str) -> None:
        assert refusal(**settings).startswith(text)

    def test_a_setting_of_another_method_is_refused_not_ignored(self) -> None:
        assert refusal(method="full", window_tokens=64).startswith(
            "unknown full setting 'window_tokens'"
        )

    def test_a_setting_of_another_index_is_refused_not_ignored(self) -> None:
        text = refusal(cold={"index": {"kind": "flat", "max_degree": 8}})
        assert text.startswith("index: unknown flat setting 'max_degree'")

    @pytest.mark.parametrize(
        ("settings", "text"),
        [
            ({"window_tokens": -1}, "window_tokens: input should be greater than or equal to 0"),
            ({"window_tokens": "0.3k"}, "window_tokens: input should be a valid integer"),
            ({"interval": 0}, "interval: input should be greater than or equal to 1, got 0"),
            (
                {"page_budget": 0},
                "page_budget: input should be greater than or equal to 1 or 'all'",
            ),
            (
                {"prefill_chunk_tokens": "x"},
                "prefill_chunk_tokens: input should be a valid integer",
            ),
            (
                {"cold": {"top_k": 0}},
                "top_k: input should be greater than or equal to 1 or 'al",
            ),
            ({"cold": 3}, "cold: a group of settings is expected, got"),
        ],
    )
    def test_a_wrong_value_is_named_with_what_came(self, settings: Any, text: str) -> None:
        got = refusal(**settings)
        assert got.startswith(text)
        assert "got " in got
        assert "\n" not in got

    @pytest.mark.parametrize(
        ("tokens", "way_out"), [(40, "use 32 or 48"), (1, "use 0 or 16"), ("1000", "use 992 or 10")]
    )
    def test_whole_pages_are_asked_for_with_the_two_nearest(
        self, tokens: Any, way_out: str
    ) -> None:
        text = refusal(window_tokens=tokens)
        assert text.startswith(f"window_tokens must be a multiple of page_size 16, got {tokens}; ")
        assert way_out in text

    def test_an_index_alone_is_refused_in_the_same_words(self) -> None:
        with pytest.raises(ConfigError, match=r"^unknown index 'grpah'; did you mean 'graph'"):
            IndexConfig(kind="grpah")


@pytest.mark.usefixtures("_throwaway_plugins")
class TestTree:
    def test_method_parameters_stand_beside_the_common_fields(self) -> None:
        config = HybridConfig(method="hybrid", window_tokens=128, page_size=32, sink_tokens=32)
        assert (config.window_tokens, config.page_size) == (128, 32)
        with pytest.raises(AttributeError, match="HybridConfig has no setting 'nope'"):
            config.nope  # noqa: B018

    @pytest.mark.parametrize("name", ["page_size", "window_tokens", "new"])
    def test_it_is_frozen(self, name: str) -> None:
        config = HybridConfig()
        with pytest.raises(ValidationError, match="frozen"):
            setattr(config, name, 32)
        with pytest.raises(ValidationError, match="frozen"):
            config.params.window_tokens = 32

    def test_an_index_may_be_written_as_its_name(self) -> None:
        short = HybridConfig(cold={"index": "graph"})
        assert short == HybridConfig(cold={"index": {"kind": "graph"}})
        assert short.cold.index.max_degree == 32

    def test_building_gives_the_plugin_its_parameters(self) -> None:
        index = IndexConfig(kind="graph", max_degree=8).build()
        assert isinstance(index, Graph)
        assert index.params.max_degree == 8
        assert isinstance(HybridConfig().build(), Tiered)

    def test_flat_round_trip_through_json(self) -> None:
        config = HybridConfig(window_tokens="4k", cold={"index": {"kind": "graph"}, "top_k": "all"})
        flat = config.flat()
        assert flat["window_tokens"] == 4096
        assert flat["cold"] == {
            "top_k": "all",
            "index": {"kind": "graph", "max_degree": 32, "interval": 1},
        }
        assert HybridConfig(**json.loads(json.dumps(flat))) == config

    @pytest.mark.parametrize(
        "twin", [copy.deepcopy, lambda config: pickle.loads(pickle.dumps(config))]
    )
    def test_copies_are_equal_and_hash_alike(self, twin: Any) -> None:
        config = HybridConfig(cold={"index": "graph"})
        assert twin(config) == config
        assert hash(twin(config)) == hash(config)

    def test_replace_keeps_the_rest(self) -> None:
        config = HybridConfig(window_tokens=128, sink_tokens=32)
        changed = config.replace(window_tokens=64)
        assert (changed.window_tokens, changed.sink_tokens) == (64, 32)
        assert config.window_tokens == 128

    def test_replace_with_another_method_keeps_the_common_fields_only(self) -> None:
        changed = HybridConfig(window_tokens=128, page_size=32, sink_tokens=32).replace(
            method="full"
        )
        assert changed == HybridConfig(method="full", page_size=32)


@pytest.mark.usefixtures("_throwaway_plugins")
class TestSettings:
    @pytest.mark.parametrize(
        "settings",
        [
            {"cold.top_k": "9", "cold.index.kind": "graph", "cold.index.max_degree": "8"},
            {"top_k": "9", "kind": "graph", "max_degree": "8"},
            {"top_k": 9, "index": "graph", "max_degree": 8},
            {"cold.index.max_degree": "8", "cold.index": "graph", "cold.top_k": "9"},
        ],
        ids=["dotted", "last parts", "short index", "member before its group"],
    )
    def test_every_spelling_means_the_same(self, settings: dict[str, object]) -> None:
        assert HybridConfig.from_settings(settings) == HybridConfig(
            cold={"top_k": 9, "index": {"kind": "graph", "max_degree": 8}}
        )

    def test_settings_lie_over_the_base_and_leave_it_alone(self) -> None:
        base = {"window_tokens": 128, "cold": {"top_k": 5, "index": "graph"}}
        before = copy.deepcopy(base)
        config = HybridConfig.from_settings({"top_k": "6", "max_degree": "8"}, base)
        assert (config.window_tokens, config.cold.top_k) == (128, 6)
        assert config.cold.index.max_degree == 8
        assert base == before

    def test_another_index_drops_the_parameters_of_the_one_in_the_base(self) -> None:
        base = {"cold": {"index": {"kind": "graph", "max_degree": 8}}}
        config = HybridConfig.from_settings({"index": "flat"}, base)
        assert config.cold.index == IndexConfig(kind="flat")

    def test_the_method_may_come_from_either(self) -> None:
        assert HybridConfig.from_settings({"method": "full"}).method == "full"
        assert HybridConfig.from_settings({}, {"method": "full"}).method == "full"
        assert HybridConfig.from_settings({}).method == "hybrid"

    def test_a_name_of_the_method_itself_comes_before_one_of_a_group(self) -> None:
        config = HybridConfig.from_settings({"interval": "3", "index": "graph"})
        assert (config.interval, config.cold.index.interval) == (3, 1)

    @pytest.mark.parametrize(
        ("settings", "text"),
        [
            ({"top_kk": "6"}, "unknown hybrid setting 'top_kk'; did you mean 'top_k'?"),
            ({"cold.topk": "6"}, "cold: unknown setting 'topk'; did you mean 'top_k'?"),
            ({"params": "6"}, "unknown hybrid setting 'params'"),
            ({"method": "full", "top_k": "6"}, "unknown full setting 'top_k'"),
            ({"top_k": "6", "cold.top_k": "7"}, "setting 'top_k' is given twice; keep one"),
        ],
    )
    def test_what_cannot_be_placed_is_refused(self, settings: Any, text: str) -> None:
        with pytest.raises(ConfigError) as caught:
            HybridConfig.from_settings(settings)
        assert str(caught.value).startswith(text)

    def test_a_last_part_that_fits_twice_is_refused(self) -> None:
        class Twin(Params):
            near: Cold = Cold()
            far: Cold = Cold()

        method = type("Method", (Tiered,), {"Params": Twin})
        HybridConfig.registry.register("twin")(method)
        with pytest.raises(ConfigError, match=r"'top_k' may mean far\.top_k or near\.top_k; write"):
            HybridConfig.from_settings({"method": "twin", "top_k": "6"})

    def test_a_value_is_not_a_group(self) -> None:
        with pytest.raises(
            ConfigError, match=r"'page_size\.x' cannot be placed: 'page_size' holds"
        ):
            HybridConfig.from_settings({"page_size.x": 1}, {"page_size": 16})


@pytest.mark.usefixtures("_throwaway_plugins")
class TestGroupsGivenInPart:
    """What is left out of a group is as the plug-in has it, the kind of an index too."""

    @staticmethod
    def method_with(default: Any) -> type:
        class Own(Params):
            top_k: BudgetField = 64
            index: IndexConfig = default

        class Around(Params):
            cold: Own = Own()

        return type("Method", (Tiered,), {"Params": Around})

    @pytest.mark.parametrize(
        "default",
        [
            Field(default="graph", validate_default=True),
            Field(default={"kind": "graph", "interval": 7}, validate_default=True),
            Field(default_factory=lambda: IndexConfig(kind="graph", interval=7)),
        ],
        ids=["name", "mapping", "factory"],
    )
    def test_an_index_without_a_kind_is_the_methods_own(self, default: Any) -> None:
        HybridConfig.registry.register("own")(self.method_with(default))
        usual = HybridConfig(method="own").cold.index
        for settings in ({"max_degree": 8}, {"index": {"max_degree": 8}}):
            index = HybridConfig(method="own", **settings).cold.index
            assert index == IndexConfig(kind="graph", max_degree=8, interval=usual.interval)
        assert refusal(method="own", cold={"index": {"kind": "flat", "max_degree": 8}}).startswith(
            "index: unknown flat setting 'max_degree'"
        )
        named = HybridConfig(method="own", index={"kind": "graph", "max_degree": 8}).cold.index
        assert named.interval == 1, "a kind that is named begins with its own defaults"

    def test_a_groups_default_keeps_what_it_sets(self) -> None:
        class Around(Params):
            cold: Cold = Cold(top_k=5, index=IndexConfig(kind="graph", interval=7))

        HybridConfig.registry.register("own")(type("Method", (Tiered,), {"Params": Around}))
        cold = HybridConfig(method="own", max_degree=8).cold
        assert (cold.top_k, cold.index) == (5, IndexConfig(kind="graph", max_degree=8, interval=7))
        assert HybridConfig(method="own", cold={"top_k": 6}).cold.index.kind == "graph"

    def test_replace_leaves_the_index_and_what_it_was_set_to(self) -> None:
        config = HybridConfig(index="graph", max_degree=8, top_k=5)
        for changes in ({"cold.index.interval": 3}, {"index": {"interval": 3}}):
            index = config.replace(**changes).cold.index
            assert index == IndexConfig(kind="graph", max_degree=8, interval=3)
        changed = config.replace(cold={"index": {"max_degree": 9}})
        assert (changed.cold.top_k, changed.cold.index.max_degree) == (5, 9)

    @pytest.mark.parametrize("change", [{"kind": "flat"}, {"index": "flat"}])
    def test_another_kind_drops_what_the_one_before_was_set_to(self, change: Any) -> None:
        """Regression: `kind` alone left settings of the other kind, which were then unknown."""
        changed = HybridConfig(index="graph", max_degree=8, top_k=5).replace(**change)
        assert (changed.cold.top_k, changed.cold.index) == (5, IndexConfig(kind="flat"))
        base = {"cold": {"index": {"kind": "flat"}}}
        both = HybridConfig.from_settings({"max_degree": 3, "kind": "graph"}, base)
        assert both.cold.index == IndexConfig(kind="graph", max_degree=3)
        grouped = {"cold.index": {"max_degree": 3}, "cold.index.kind": "graph"}
        assert HybridConfig.from_settings(grouped, base) == both


class TestBuiltInMethods:
    """The same promises for what ships, without throwaway plug-ins."""

    def test_hybrid_is_the_default(self) -> None:
        config = HybridConfig()
        assert config.method == "hybrid"
        assert {"sink_tokens", "window_tokens", "spare_tokens", "page_budget", "cold"} <= set(
            config.flat()
        )
        assert {"top_k", "index"} <= set(config.flat()["cold"])

    @pytest.mark.parametrize("method", sorted(METHODS))
    def test_defaults_survive_a_round_trip_through_json(self, method: str) -> None:
        config = HybridConfig(method=method)
        assert HybridConfig(**json.loads(json.dumps(config.flat()))) == config

    @pytest.mark.parametrize("method", sorted(METHODS))
    def test_it_can_be_built(self, method: str) -> None:
        assert isinstance(HybridConfig(method=method).build(), METHODS[method].factory)

    def test_human_settings_reach_the_tiers(self) -> None:
        settings = {"window_tokens": "4k", "top_k": "1k", "index": "flat", "spare_tokens": 16}
        config = HybridConfig.from_settings(settings)
        assert (config.window_tokens, config.spare_tokens) == (4096, 16)
        assert (config.cold.top_k, config.cold.index.kind) == (1024, "flat")

    @pytest.mark.parametrize(
        ("settings", "text"),
        [
            ({"page_budget": 8}, "page_budget has no effect without spare_tokens"),
            (
                {"look_ahead": "never", "look_ahead_factor": 8},
                "cold: look_ahead_factor has no effect with look_ahead 'never', got 8; leave",
            ),
            ({"select": "device", "look_ahead": "always"}, "cold: look_ahead has no effect with"),
            ({"select": "device", "look_ahead_factor": 2}, "cold: look_ahead_factor has no effect"),
            (
                {"method": "flat", "rerank": 4},
                "index: rerank has no effect with precision 'exact', which scores every key",
            ),
            (
                {"method": "infllm", "sampled_queries": 0, "local_tokens": 99},
                "index: local_tokens has no effect with sampled_queries 0",
            ),
            (
                {"method": "snapkv", "sure_ratio": 0.1},
                "sure_ratio has no effect with value_weighting 'none'",
            ),
            ({"method": "snapkv", "pool_tokens": 1, "pooling": "mean"}, "pooling has no effect"),
            (
                {"method": "h2o", "sampled_queries": 9},
                "sampled_queries has no effect with prompt_scores 'exact', got 9",
            ),
            (
                {"method": "duo_attention", "heads": "masks.json", "observed_tokens": 9},
                "observed_tokens has no effect with heads that are given",
            ),
            (
                {"method": "chain", "first": {"sure_ratio": 0.1}},
                "first: sure_ratio has no effect with value_weighting 'none'",
            ),
        ],
    )
    def test_a_setting_without_effect_is_refused(self, settings: Any, text: str) -> None:
        assert refusal(**settings).startswith(text)
        with pytest.raises(ConfigError, match=r"has no effect"):
            HybridConfig().replace(**settings)

    @pytest.mark.parametrize(
        ("settings", "text"),
        [
            (
                {"hot_tokens": 0},
                "hybrid setting 'hot_tokens' was removed; leave it out, or",
            ),
            ({"method": "h2o", "hot_tokens": 64}, "h2o setting 'hot_tokens' was removed; leave it"),
            (
                {"attend": "fetch"},
                "hybrid setting 'attend' was removed; leave it out: what",
            ),
            ({"cold": {"attend": "cpu"}}, "cold: setting 'attend' was removed; leave it out"),
            ({"cold.attend": "cpu"}, "cold: setting 'attend' was removed; leave it out"),
            ({"stand_in": "pages"}, "hybrid setting 'stand_in' was removed; leave it out: a scan"),
            ({"cold.stand_in": "scan"}, "cold: setting 'stand_in' was removed; leave it out"),
            (
                {"method": "retrieval_attention", "link_keys": 900},
                "retrieval_attention setting 'link_keys' was removed; leave it out: later keys",
            ),
            ({"compile_decode": False}, "hybrid setting 'compile_decode' was removed; leave it"),
        ],
    )
    def test_a_setting_that_was_removed_says_what_to_do(self, settings: Any, text: str) -> None:
        assert text in refusal(**settings)

    @pytest.mark.parametrize("method", sorted(METHODS))
    def test_an_opened_configuration_can_be_written_and_read(self, method: str) -> None:
        opened = HybridConfig(method=method).opened()
        assert HybridConfig(**json.loads(json.dumps(opened.flat()))) == opened

    def test_settings_of_another_kind_are_refused_and_leave_the_index(self) -> None:
        """Regression: they chose index kind flat under the method's name."""
        assert refusal(method="ivf", rerank=4).startswith(
            "index: 'rerank' is a setting of kind flat, label_channels, pca"
        )
        assert refusal(rerank=2).endswith(
            "got another kind; set index=flat beside it or leave it out"
        )
        ivf = HybridConfig(method="ivf", nprobe=4)
        assert (ivf.cold.index.kind, ivf.cold.index.nprobe) == ("ivf", 4)

    def test_full_attention_has_nothing_to_set(self) -> None:
        assert refusal(method="full", window_tokens=64).startswith(
            "unknown full setting 'window_tokens'"
        )

    @pytest.mark.parametrize("name", ["sink_tokens", "window_tokens", "spare_tokens"])
    def test_tiers_hold_whole_pages(self, name: str) -> None:
        assert refusal(**{name: 40}).endswith("got 40; use 32 or 48")

    @pytest.mark.parametrize(
        "spelling",
        [
            {"top_k": 7, "window_tokens": 32},
            {"cold.top_k": "7", "window_tokens": "32"},
            {"cold": {"top_k": 7}, "window_tokens": 32},
        ],
        ids=["last part", "dotted", "nested"],
    )
    def test_the_constructor_takes_every_spelling(self, spelling: dict[str, Any]) -> None:
        """Regression: only nested groups were known to it."""
        config = HybridConfig(**spelling)
        assert (config.cold.top_k, config.window_tokens) == (7, 32)
        assert HybridConfig.of(spelling) == config
        assert HybridConfig().replace(**spelling) == config

    @pytest.mark.parametrize(
        ("settings", "text"),
        [
            ({"top_k": 7, "cold.top_k": 8}, "setting 'top_k' is given twice; keep one"),
            ({"top_k": 7, "cold": {"top_k": 8}}, "setting 'top_k' is given twice; keep one"),
            ({"kind": "flat", "index": "graph"}, "setting 'index.kind' is given twice; keep"),
            ({"top_kk": 7}, "unknown hybrid setting 'top_kk'; did you mean 'top_k'? known:"),
            ({"cold.topk": 7}, "cold: unknown setting 'topk'; did you mean 'top_k'? known: "),
            ({"method": "full", "top_k": 7}, "unknown full setting 'top_k'; known: "),
        ],
    )
    def test_the_constructor_places_nothing_twice_and_nothing_by_guess(
        self, settings: dict[str, Any], text: str
    ) -> None:
        assert refusal(**settings).startswith(text)

    def test_the_constructor_asks_which_of_two_is_meant(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        class Twin(Params):
            near: Cold = Cold()
            far: Cold = Cold()

        method = type("Method", (Tiered,), {"Params": Twin})
        methods: Registry[Any] = Registry("method", provider="json")
        methods.register("twin")(method)
        monkeypatch.setattr(HybridConfig, "registry", methods)
        monkeypatch.setattr(config_module, "METHODS", methods)
        text = refusal(method="twin", top_k=6)
        assert text == "setting 'top_k' may mean far.top_k or near.top_k; write it out"
        assert HybridConfig(method="twin", **{"far.top_k": 6}).far.top_k == 6

    def test_a_copy_forgets_what_followed_from_the_settings(self) -> None:
        config = HybridConfig()
        assert (config.prefill_error, config.build().params) == (None, config.params)
        assert config.cold.index.needs.horizon_tokens
        changed = config.model_copy(update={"prefill": "sparse", "params": config.opened().params})
        assert (changed.prefill_error, changed.build().params) == (0.05, changed.params)
        assert changed.params != config.params
        assert pickle.loads(pickle.dumps(config)) == copy.deepcopy(config) == HybridConfig()
