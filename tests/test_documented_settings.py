"""Every setting that a method's page prints can be set by the name that is printed there."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest

from hybrid_kv.cli.files import parse_settings, read_settings
from hybrid_kv.cli.method_pages import Parameter, parameters_of
from hybrid_kv.config import HybridConfig, MethodConfig, as_printed
from hybrid_kv.errors import ConfigError
from hybrid_kv.plugins import METHODS

BESIDE: dict[str, dict[str, Any]] = {
    "prompt_scores": {"sampled_queries": {"prompt_scores": "sampled"}},
    "value_weighting": {"sure_ratio": {"value_weighting": "values"}},
    "spare_tokens": {"page_budget": {"spare_tokens": 32}},
    "index.precision": {"index.rerank": {"index.precision": "int8"}},
}
"""Of a method that has the first setting, what must stand beside the second to let it act."""
BY_HAND: dict[str, Any] = {
    "by_head.heads": {"0": "full", "rest": "h2o"},
    "by_layer.layers": {"0": "full", "rest": "h2o"},
    "chain.first": "zipvl",
    "chain.then": "think",
    "share.of": "pyramidkv",
    "locret.heads": "trained.safetensors",
    "rekv.max_tokens": 2**14,  # at least its 64 frames
    "share.selection_layers": (1, 3),
    "tidal_decode.selection_layers": (1, 3),
}


def other(method: str, one: Parameter) -> Any:
    """A value in the range that is printed, not the default."""
    if f"{method}.{one.name}" in BY_HAND:
        return BY_HAND[f"{method}.{one.name}"]
    default, words = one.default, one.range.split(" or ")
    if one.name == "index":
        return default  # some methods have one kind alone
    if one.range == "true or false":
        return not default
    if words[0].startswith("a whole number"):
        most = int(words[0].rpartition("to ")[2]) if "to " in words[0] else 2**31
        if not isinstance(default, int):
            return min(4096, most)
        return default + 16 if default + 16 <= most else default - 1
    if words[0].startswith("a number"):
        if default is None:
            return 0.25
        return default + 0.25 if words[0] == "a number from 1" else default * 0.5
    if words[0] == "a text":
        return ((0.5, 0.25),)
    if one.name == "estimate" and not METHODS[method].params().cold.index.ranks:
        words = [word for word in words if word != "gaussian"]
    value = next(word for word in words if word != str(default))
    return int(value) if value.isdigit() else value


def without_effect(method: str, one: Parameter) -> bool:
    """Whether the method's own index kind gives the setting nothing to do."""
    if not hasattr(METHODS[method].params(), "cold"):
        return False
    return one.name == "select" and method != "hybrid" and other(method, one) == "device"


def beside(method: str, one: Parameter, names: set[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for needed, settings in BESIDE.items():
        if needed in names:
            found |= settings.get(one.name, {})
    cold = getattr(METHODS[method].params(), "cold", None)
    of_cold = cold is not None and one.name.partition(".")[0] in type(cold).model_fields
    if of_cold and "demote" in names:
        found["demote"] = "offload"
    return found


def nested(settings: dict[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for name, value in settings.items():
        *groups, leaf = name.split(".")
        place = tree
        for group in groups:
            place = place.setdefault(group, {})
        place[leaf] = value
    return tree


def values(tree: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(tree, dict) or prefix.rstrip(".") in ("heads", "layers", "first", "then"):
        return {prefix.rstrip("."): tree}
    return {
        key: v for name, one in tree.items() for key, v in values(one, f"{prefix}{name}.").items()
    }


def printed_values(config: HybridConfig) -> dict[str, Any]:
    return {as_printed(name): value for name, value in values(config.flat()).items()}


def as_text(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


@pytest.mark.parametrize("method", sorted(METHODS))
def test_every_printed_setting_is_set_by_its_name_and_changes_nothing_else(
    method: str, tmp_path: Path
) -> None:
    printed = parameters_of(METHODS[method].params)
    names = {one.name for one in printed}
    for one in printed:
        wanted = {**beside(method, one, names), one.name: other(method, one)}
        if without_effect(method, one):
            with pytest.raises(ConfigError, match=r"has no effect|select 'device'"):
                HybridConfig(method=method, **wanted)
            continue
        usual = printed_values(HybridConfig(method=method))
        config = HybridConfig(method=method, **wanted)
        changed = {
            name for name, value in printed_values(config).items() if value != usual.get(name)
        }
        groups = {name.partition(".")[0] for name in changed}
        expected = {name for name in wanted if name != "index"}
        assert expected in (changed, groups), one.name
        if one.name in ("chain.first", "share.of"):
            continue
        assert HybridConfig.from_settings({"method": method, **wanted}) == config
        assert HybridConfig(method=method).replace(**wanted) == config
        assert HybridConfig(method=method, **nested(wanted)) == config
        assert HybridConfig(**json.loads(json.dumps(config.flat()))) == config
        assert pickle.loads(pickle.dumps(config)) == config
        assert MethodConfig(method=method, **nested(wanted)).params == config.params
        path = tmp_path / "settings.yaml"
        path.write_text(json.dumps({"method": method, **nested(wanted)}))  # YAML as well
        assert HybridConfig.from_settings(read_settings(path)) == config
        if isinstance(wanted[one.name], dict) or one.name == "heads":
            continue  # no text of a command line
        texts = [f"{name}={as_text(value)}" for name, value in wanted.items()]
        assert HybridConfig.from_settings(parse_settings([f"method={method}", *texts])) == config


@pytest.mark.parametrize("method", list(METHODS))
def test_settings_of_every_method_can_be_pickled(method: str) -> None:
    config = HybridConfig(method=method)
    assert pickle.loads(pickle.dumps(config)) == config
