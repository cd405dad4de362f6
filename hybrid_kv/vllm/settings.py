"""Settings of the plug-in: `additional_config={"hybrid_kv": {...}}`, or HYBRID_KV_VLLM as JSON.

Without either the plug-in leaves vLLM as it is. `{}` turns it on with the defaults. Configurations
of vLLM that a selection does not serve are refused, with the ways out.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from functools import cache
from types import MappingProxyType
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ValidationError

from hybrid_kv.config import Params, Tokens, budget_tokens, first_sentence
from hybrid_kv.errors import ConfigError, UnsupportedModelError

_log = logging.getLogger("vllm.hybrid_kv")

KEY, VARIABLE = "hybrid_kv", "HYBRID_KV_VLLM"
CONNECTOR = "HybridContexts"
"""The KV connector that writes keys by way of the layers, so that their indexes know of it."""
METHODS = MappingProxyType({"cpu": ("sketch",), "cuda": ("quest",)})
"""Methods that run on each of vLLM's platforms, first the one that is taken where none is named."""
LEAST_SEARCHED, SEARCH_FROM = 4096, 4
"""Tokens that are searched at least, and over those that are found: else all are attended. It takes
no longer then, and the index of longer contexts finds less in short ones."""


def _known_budget(value: object) -> str:
    text = str(value)  # a number of tokens may come as one
    if text != "all":
        budget_tokens(text, 1)
    return text


class VllmSettings(Params):
    """method: "sketch": codes of the keys are searched, the best ranked exactly and attended, the
    unread estimated from their moments; "quest": the blocks whose smallest and largest keys promise
    most are attended; budget: entries that a query head attends beside sinks
    and window, tokens, a share of the context such as 2%, or "all"; sink_tokens, window_tokens:
    the first and the newest tokens, always attended; audit_every: decode steps from one look of the
    audit to the next, 0 for none: a look attends one sequence of one layer exactly as well.
    """

    method: Literal["sketch", "quest"] = "sketch"
    budget: Annotated[str, BeforeValidator(_known_budget)] = "128"
    sink_tokens: Tokens = 16
    window_tokens: Tokens = 256
    audit_every: Tokens = 0

    def top_k(self, context: int) -> int | None:
        """Entries that a search of so many tokens returns; None where all are attended."""
        if self.budget == "all":
            return None
        return budget_tokens(self.budget, context)


def settings_of(additional_config: Any, platform: str = "cpu") -> VllmSettings | None:
    """The settings that a user gave; None where there are none.

    Args:
        additional_config: vLLM's own; that in it comes before the environment.
        platform: of METHODS.

    Raises:
        ConfigError: a setting is unknown or wrong.
    """
    given: Any = None
    if isinstance(additional_config, Mapping):
        given = additional_config.get(KEY)
    where = f"additional_config['{KEY}']"
    if given is None and (text := os.environ.get(VARIABLE)):
        where = VARIABLE
        try:
            given = json.loads(text)
        except ValueError as error:
            raise ConfigError(
                f'{VARIABLE} must be JSON such as {{"budget": "2%"}}, got {text!r} ({error})'
            ) from None
    if given is None:
        return None
    if not isinstance(given, Mapping):
        raise ConfigError(f"{where} must be a group of settings, got {given!r}; give {{}} or more")
    methods = METHODS[platform]
    method = given.get("method", methods[0])
    if method not in methods:
        raise ConfigError(
            f"{where}: method {method!r} does not run inside vLLM on {platform}; those that do: "
            f"{', '.join(methods)}"
        )
    try:
        return VllmSettings.model_validate({**given, "method": method})
    except ValidationError as error:
        raise ConfigError(f"{where}: {first_sentence(error)}") from None


def search_range(
    settings: VllmSettings, context: int, unit: int = 16
) -> tuple[int, int, int] | None:
    """First token, number of tokens and top_k of the search of a context; None to attend all.

    Args:
        unit: first and number are multiples of it, by default of the keys whose codes lie together.
    """
    top_k = settings.top_k(context)
    first = -(-settings.sink_tokens // unit) * unit
    count = (context - settings.window_tokens) // unit * unit - first
    if top_k is None or count < max(SEARCH_FROM * top_k, LEAST_SEARCHED):
        return None
    return first, count, top_k


_OFF = "or leave out hybrid_kv's settings"


def check_config(config: Any) -> None:
    """Refuse what bypasses the writing of keys, or reads more than one new token a step.

    Args:
        config: vLLM's `VllmConfig`.

    Raises:
        ConfigError, UnsupportedModelError: hybrid_kv does not serve it.
    """
    if config.speculative_config is not None:
        raise ConfigError(
            "speculative_config must be None with hybrid_kv, which decodes one token of a request "
            f"a step; leave it out, {_OFF}"
        )
    transfer = config.kv_transfer_config
    if transfer is not None and transfer.kv_connector != CONNECTOR:
        raise ConfigError(
            f"kv_transfer_config must be None or of {CONNECTOR} with hybrid_kv, as other "
            f"connectors write keys that its index does not see, got {transfer.kv_connector}; "
            f"leave it out, {_OFF}"
        )
    dtype = config.cache_config.cache_dtype
    if dtype not in ("auto", "bfloat16", "float16"):
        raise ConfigError(
            f"kv_cache_dtype must be auto with hybrid_kv, which reads keys as they are, got "
            f"{dtype}; leave it out, {_OFF}"
        )
    parallel = config.parallel_config
    if parallel.decode_context_parallel_size > 1:
        raise ConfigError(
            "decode_context_parallel_size must be 1 with hybrid_kv, which attends whole contexts, "
            f"got {parallel.decode_context_parallel_size}; leave it out, {_OFF}"
        )
    if parallel.prefill_context_parallel_size > 1 or parallel.use_ubatching:
        raise ConfigError(
            "prefill_context_parallel_size must be 1 and a batch in one piece (no DBO) with "
            f"hybrid_kv, which was not tried with either; leave them out, {_OFF}"
        )
    if config.use_v2_model_runner:
        raise ConfigError(
            "vLLM's model runner must be V1 with hybrid_kv, which was not tried with V2; set "
            f"VLLM_USE_V2_MODEL_RUNNER=0, {_OFF}"
        )
    if getattr(config.model_config, "is_hybrid", False):
        raise UnsupportedModelError(
            "hybrid_kv inside vLLM does not serve models with recurrent layers, whose blocks vLLM "
            f"copies without a word; use another model, {_OFF}"
        )


def check_backend(additional_config: Any, found: str, platform: str) -> None:
    """Refuse settings where vLLM attends with a backend that is not ours.

    Args:
        found: name of the class that vLLM has chosen.
        platform: of METHODS.

    Raises:
        ConfigError: there are settings, and another backend can be asked for.
        UnsupportedModelError: there are settings, and the model has no other backend.
    """
    if settings_of(additional_config, platform) is None:
        return
    if platform == "cuda":
        raise ConfigError(
            f"attention_backend must be CUSTOM with hybrid_kv on CUDA, got {found}; give "
            f"--attention-backend CUSTOM, {_OFF}"
        )
    raise UnsupportedModelError(
        f"hybrid_kv inside vLLM does not serve models that attend by {found}; use another model, "
        f"{_OFF}"
    )


def check_layer(alibi: object, shared_with: str | None) -> None:
    """Refuse a full-attention layer that our decoding would compute wrongly.

    Args:
        alibi: slopes, shared_with: the layer whose keys it reads; None each.

    Raises:
        UnsupportedModelError: one is given.
    """
    for given, what in (
        (alibi, "ALiBi"),
        (shared_with, "layers that read the keys of another layer"),
    ):
        if given is not None:
            raise UnsupportedModelError(
                f"hybrid_kv inside vLLM does not serve full attention with {what}; use another "
                f"model, {_OFF}"
            )


@cache
def say_once(message: str, *, is_warning: bool = False) -> None:
    """Log a sentence, once in a process."""
    _log.log(logging.WARNING if is_warning else logging.INFO, message)
