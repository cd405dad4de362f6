"""--method, --set and --config make one configuration."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hybrid_kv.cli.files import build_config, parse_settings
from hybrid_kv.cli.options import ModelOptions
from hybrid_kv.errors import ConfigError


def options(tmp_path: Path, yaml: str, *sets: str, method: str | None = None) -> ModelOptions:
    file = tmp_path / "run.yaml"
    file.write_text(yaml)
    return ModelOptions(method=method, settings=list(sets), config=file)


def test_yaml_takes_nested_dotted_and_short_names(tmp_path: Path) -> None:
    yaml = "cold:\n  index:\n    kind: hnsw\n    ef_search: 64\ntop_k: 9\nwindow_tokens: 4k\n"
    config = build_config(options(tmp_path, yaml))
    assert config.cold.top_k == 9
    assert config.cold.index.params.ef_search == 64
    assert config.window_tokens == 4096


@pytest.mark.parametrize("yaml", ["top_k: 9", "cold.top_k: 9", "cold: {top_k: 9}"])
@pytest.mark.parametrize("flag", ["top_k=7", "cold.top_k=7"])
def test_flag_overrides_the_file(tmp_path: Path, yaml: str, flag: str) -> None:
    assert build_config(options(tmp_path, yaml, flag)).cold.top_k == 7


def test_flag_for_a_group_replaces_its_members(tmp_path: Path) -> None:
    yaml = "cold: {index: {kind: ivf, nprobe: 3}, top_k: 9}"
    config = build_config(options(tmp_path, yaml, "cold.index=hnsw"))
    assert config.cold.index.kind == "hnsw"
    assert config.cold.top_k == 9


def test_method_flag_overrides_the_file(tmp_path: Path) -> None:
    assert build_config(options(tmp_path, "method: quest", method="full")).method == "full"


@pytest.mark.parametrize(
    ("yaml", "text"),
    [("a: [", "must be YAML"), ("- 1", "must hold settings"), ("widow_tokens: 5", "window_tokens")],
)
def test_bad_file_is_refused(tmp_path: Path, yaml: str, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        build_config(options(tmp_path, yaml))


def test_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        build_config(ModelOptions(config=tmp_path / "absent.yaml"))


def test_value_may_hold_an_equals_sign() -> None:
    assert parse_settings(["a=b=c"]) == {"a": "b=c"}


@pytest.mark.parametrize(
    ("yaml", "text"),
    [
        ("top_k: 9\npage_size: 16\ntop_k: 7", "gives 'top_k' twice, again in line 3"),
        ("cold: {top_k: 9}\ncold: {beta: 1}", "gives 'cold' twice, again in line 2"),
        ("cold: {top_k: 9, top_k: 9}", "gives 'top_k' twice, again in line 1"),
        ("cold.top_k: 9\ncold: {top_k: 7}", "gives setting 'cold.top_k' twice"),
        ("top_k: 9\ncold: {top_k: 7}", "'top_k' is given twice"),
        ("index: hnsw\ncold: {index: {kind: ivf}}", "'index.kind' is given twice"),
    ],
)
def test_a_setting_stands_in_a_file_once(tmp_path: Path, yaml: str, text: str) -> None:
    """YAML takes the last of equal keys, without a word."""
    with pytest.raises(ConfigError, match=re.escape(text)):
        build_config(options(tmp_path, yaml))


@pytest.mark.parametrize("yaml", ["window_tokens: yes", "cold: {top_k: on}", "backend: no"])
def test_yes_and_no_are_no_numbers_or_names(tmp_path: Path, yaml: str) -> None:
    """`window_tokens: yes` was a window of one token."""
    with pytest.raises(ConfigError, match="must not be true or false"):
        build_config(options(tmp_path, yaml))


def test_what_is_true_or_false_stays_so(tmp_path: Path) -> None:
    yaml = "capture_decode: yes\ncold.index: {kind: hnsw, centre: no}"
    config = build_config(options(tmp_path, yaml))
    assert config.capture_decode is True
    assert config.cold.index.centre is False
