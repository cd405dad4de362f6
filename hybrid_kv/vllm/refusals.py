"""Configurations of vLLM that decoding with a selection does not serve, and the ways out."""

from __future__ import annotations

from typing import Any

from hybrid_kv.errors import ConfigError, UnsupportedModelError

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
    if config.kv_transfer_config is not None:
        raise ConfigError(
            "kv_transfer_config must be None with hybrid_kv, as connectors write keys that its "
            f"index does not see; leave it out, {_OFF}"
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
    if getattr(config.model_config, "is_hybrid", False):
        raise UnsupportedModelError(
            "hybrid_kv inside vLLM does not serve models with recurrent layers, whose blocks vLLM "
            f"copies without a word; use another model, {_OFF}"
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
