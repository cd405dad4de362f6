"""From --method, --set and --config to one HybridConfig."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hybrid_kv.cli.options import ModelOptions
from hybrid_kv.config import HybridConfig, as_printed
from hybrid_kv.errors import ConfigError, unknown_setting
from hybrid_kv.types import Work


def build_config(options: ModelOptions) -> HybridConfig:
    """The configuration; a flag overrides the same setting of the file.

    Raises:
        ConfigError: a setting is unknown, out of range or badly written.
    """
    given = given_settings(options)
    _check_all_are_settings(
        str(given.get("method", HybridConfig.model_fields["method"].default)), given
    )
    return HybridConfig.from_settings(given)


def _check_all_are_settings(method: str, given: Mapping[str, object]) -> None:
    """Raises ConfigError for a name that Python code alone may give."""
    for path in HybridConfig.python_only(method, given):
        for key in given:
            below = (f"{path}.", f"{as_printed(path)}.")
            if key == path or path.endswith(f".{key}") or key.startswith(below):
                known = HybridConfig.settings_of(method, given)
                raise unknown_setting(f"{method} setting", key, known)


def config_of_context(saved: Mapping[str, Any], options: ModelOptions) -> HybridConfig:
    """Configuration of a saved context, changed by what the user gives.

    Args:
        saved: the settings in its manifest.

    Raises:
        ConfigError: another method is given, or a setting is unknown or out of range.
    """
    from hybrid_kv.saved.identity import settings_of_file

    given, known = given_settings(options), dict(_flatten(settings_of_file(saved)))
    if given.get("method", known["method"]) != known["method"]:
        raise ConfigError(
            f"a context must be read by the method that it was made with, '{known['method']}', got "
            f"'{given['method']}'; leave the method out"
        )
    _check_all_are_settings(str(known["method"]), given)
    kept = {key: value for key, value in known.items() if not any(_covers(f, key) for f in given)}
    return HybridConfig.from_settings({**kept, **given})


def given_settings(options: ModelOptions) -> dict[str, object]:
    """Settings that the user gave, by dotted name, defaults left out."""
    flags = parse_settings(options.settings or ())
    if options.method is not None:
        if "method" in flags:
            raise ConfigError("setting 'method' is given twice; keep --method or --set method=")
        flags["method"] = options.method
    stored = read_settings(options.config) if options.config is not None else {}
    kept = {key: value for key, value in stored.items() if not any(_covers(f, key) for f in flags)}
    return {**kept, **flags}


def parse_settings(texts: Sequence[str]) -> dict[str, object]:
    """'key=value' texts as a mapping; values stay text."""
    settings: dict[str, object] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        key = key.strip()
        if not equals or not key:
            raise ConfigError(f"--set must be KEY=VALUE like top_k=64, got '{text}'")
        if key in settings:
            raise ConfigError(f"setting '{key}' is given twice; keep one")
        settings[key] = value.strip()
    return settings


def read_settings(path: Path) -> dict[str, object]:
    """The settings of a YAML file by dotted name."""
    import yaml

    try:
        data = yaml.load(path.read_text(encoding="utf-8"), _loader(path))
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"config '{path}' cannot be read: {reason}; check the path") from None
    except yaml.YAMLError as error:
        line = getattr(getattr(error, "problem_mark", None), "line", 0) + 1
        raise ConfigError(
            f"config '{path}' must be YAML, got a syntax error in line {line}"
        ) from None
    if data is None:
        return {}
    if not isinstance(data, Mapping):
        raise ConfigError(
            f"config '{path}' must hold settings like 'top_k: 64', got {type(data).__name__}"
        )
    settings: dict[str, object] = {}
    for key, value in _flatten(data):
        if key in settings:
            raise ConfigError(f"config '{path}' gives setting '{key}' twice; keep one")
        settings[key] = value
    return settings


def _loader(path: Path) -> Any:
    """YAML's safe loader, which would take the last of two equal keys."""
    import yaml

    class Loader(yaml.SafeLoader):
        """Refuses what is written twice in one mapping."""

        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
            seen: set[str] = set()
            for key, _ in node.value:
                if key.value in seen:
                    raise ConfigError(
                        f"config '{path}' gives '{key.value}' twice, again in line "
                        f"{key.start_mark.line + 1}; keep one"
                    )
                if isinstance(key, yaml.ScalarNode):
                    seen.add(key.value)
            return super().construct_mapping(node, deep)

    return Loader


def _flatten(tree: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, object]]:
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _covers(flag: str, key: str) -> bool:
    """Whether a flag replaces a file's setting: the same name, short or long, or its group."""
    flag, key = as_printed(flag), as_printed(key)
    same = flag == key or flag.endswith(f".{key}") or key.endswith(f".{flag}")
    return same or f".{key}.".find(f".{flag}.") >= 0


def exactness_notice(settings: Mapping[str, object], work: Work, tokens: int) -> str | None:
    """One line if a budget that the user set covered the whole cache."""
    budgets = [key for key in settings if key.split(".")[-1] in ("top_k", "page_budget")]
    given = [f"{key}={settings[key]}" for key in budgets if settings[key] != "all"]
    if not given or work.visible == 0 or work.attended < work.visible:
        return None
    return f"{' and '.join(given)} covers the whole cache of {tokens:,} tokens: attention was exact"
