"""Cases of an evaluation: every method with its settings, at every budget."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hybrid_kv.config import HybridConfig, budget_tokens
from hybrid_kv.errors import ConfigError, NoBudgetError, said, unknown_name, unknown_setting
from hybrid_kv.plugins import METHODS

FULL = "full"
"""What all others are held against; it always takes part."""

_LONG_QUESTION = 2**20
"""A question of up to so many tokens reads through the method, as the answer does."""


@dataclass(frozen=True, slots=True)
class EvalCase:
    """A method under a budget.

    name: as it was asked for; budget: as it was asked for, None where it changes nothing. refused:
    why the method cannot be given the budget; `config` is then without it, and never run.
    never: no budget would change that: the method takes none, or lacks what it runs with.
    """

    name: str
    budget: str | None
    config: HybridConfig
    refused: str | None = None
    never: bool = False


def parse_spec(text: str) -> tuple[str, dict[str, str]]:
    """'quest:dense_layers=2:page_size=8' -> its name and settings; a value may stand in quotes.

    Raises:
        ConfigError: a part after the name is no setting, or a quote has no end.
    """
    name, *parts = split_outside_quotes(text, ":")
    settings: dict[str, str] = {}
    for part in parts:
        key, equals, value = part.partition("=")
        if not equals or not key:
            raise ConfigError(
                f"'{text}' must be a name with settings like {name}:key=value, got '{part}'"
            )
        settings[key.strip()] = _unquoted(value.strip())
    return name.strip(), settings


def split_outside_quotes(text: str, separator: str) -> list[str]:
    """'a:b="1,2",c' at ',' -> ['a:b="1,2"', 'c']; a quote begins a part or a value.

    Raises:
        ConfigError: a quote has no end.
    """
    parts, quote = [""], ""
    for letter in text:
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "'\"" and parts[-1].rstrip()[-1:] in ("", "="):
            quote = letter
        elif letter == separator:
            parts.append("")
            continue
        parts[-1] += letter
    if quote:
        raise ConfigError(f"a quote must have an end, got {text}; close it with {quote}")
    return parts


def _unquoted(text: str) -> str:
    quoted = len(text) > 1 and text[0] == text[-1] and text[0] in "'\""
    return text[1:-1] if quoted else text


def contenders(
    names: Sequence[str],
    budgets: Sequence[str],
    context_tokens: int,
    settings: Mapping[str, Any],
) -> Iterator[EvalCase]:
    """Every method under every budget, full attention first; one without budgets once.

    A method's own settings hold whatever the budget says.

    Args:
        names: of methods, each with settings of its own or without.
        settings: for all methods that know them.

    Raises:
        ConfigError: a method or setting is unknown, or a budget is none.
    """
    for budget in budgets:
        budget_tokens(budget, context_tokens)
    for name in dict.fromkeys((FULL, *names)):
        method, own = parse_spec(name)
        plain = _config(method, own, settings)
        under = [_under(name, plain, own, budget, context_tokens) for budget in budgets]
        if all(one.config == plain and one.refused is None for one in under):
            yield EvalCase(name, None, plain)
        else:
            yield from under


def check_settings(names: Sequence[str], settings: Mapping[str, Any]) -> None:
    """Raises ConfigError for a method that is unknown, or a setting that none of them has."""
    methods = [parse_spec(name)[0] for name in names]
    for method in methods:
        if method not in METHODS:
            raise unknown_name("method", method, METHODS)
    for key in settings:
        if not any(HybridConfig.knows(method, key) for method in methods):
            known = {setting for method in methods for setting in HybridConfig.settings_of(method)}
            raise unknown_setting("setting of the methods", key, known)


def _under(
    name: str, plain: HybridConfig, own: Mapping[str, str], budget: str, context_tokens: int
) -> EvalCase:
    try:
        plain.check_complete()
    except ConfigError as error:
        return EvalCase(name, budget, plain, str(error), never=True)
    try:
        given = plain.at_budget(budget, context_tokens)
    except NoBudgetError as error:
        return EvalCase(name, budget, plain, str(error), never=True)
    except ConfigError as error:
        return EvalCase(name, budget, plain, str(error))
    return EvalCase(name, budget, given.replace(**own))


def _config(method: str, own: Mapping[str, str], settings: Mapping[str, Any]) -> HybridConfig:
    common = {key: value for key, value in settings.items() if HybridConfig.knows(method, key)}
    given = {"dense_extend_tokens": _LONG_QUESTION, "index_build": "wait", **common, **own}
    config = HybridConfig.from_settings({"method": method, **given})
    if config.prefill_error is not None:
        raise ConfigError(
            f"prefill={said(config.prefill)} has no effect in an evaluation, which reads each "
            "prompt once for all methods, exactly; leave it out"
        )
    return config
