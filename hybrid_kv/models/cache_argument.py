"""The name under which transformers passes a KV cache: `cache`, before 5.24 `past_key_values`."""

from __future__ import annotations

from collections.abc import Mapping
from inspect import signature
from typing import Any, Final

from transformers import Cache, GenerationMixin

CACHE_NAMES: Final = ("cache", "past_key_values")

CACHE_ARGUMENT: Final = next(
    name
    for name in CACHE_NAMES
    if name in signature(GenerationMixin.prepare_inputs_for_generation).parameters
)
"""The one of `CACHE_NAMES` that the installed transformers gives to its models."""


def passing(cache: Cache | None) -> dict[str, Any]:
    """Keyword arguments that pass `cache` to a model or to its `generate`."""
    return {CACHE_ARGUMENT: cache}


def passed(kwargs: Mapping[str, Any]) -> Any:
    """Cache among the keyword arguments of a forward, under either name."""
    return next((kwargs[name] for name in CACHE_NAMES if kwargs.get(name) is not None), None)


def renamed(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Keyword arguments of a forward, the cache under the name that the model takes.

    Models of transformers before 5.24 drop `cache` without a word.
    """
    return {CACHE_ARGUMENT if name in CACHE_NAMES else name: kwargs[name] for name in kwargs}
