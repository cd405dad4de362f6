"""Arguments of Python calls: unknown names and wrong types are refused in one sentence."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from threading import Event
from typing import Any, TypedDict

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteria

from hybrid_kv.errors import ConfigError, said
from hybrid_kv.keywords import refuse_unknown
from hybrid_kv.models.cache_state import CACHE_NAMES


class LoadOptions(TypedDict, total=False):
    """Keywords of `load` for a model that is loaded by name; see `load_model`."""

    device: str | torch.device | None
    dtype: str | torch.dtype | None
    layers: int | None
    weights: str | None
    quantization_config: Any
    dequantize: bool
    exact_products: bool
    seed: int


class GenerateOptions(TypedDict, total=False):
    """Keywords of `generate`, `send` and `ask`: ours, then those of transformers' generate.

    The rest of GenerationConfig is taken, too.
    """

    max_new_tokens: int
    stop: str | Sequence[str] | None
    seed: int | None
    on_prefill: Callable[[int, int], None] | None
    cancel: Event | None
    exact: bool | int
    max_error: float | None
    token_errors: bool

    generation_config: GenerationConfig | None
    logits_processor: LogitsProcessorList | None
    stopping_criteria: Sequence[StoppingCriteria] | None
    prefix_allowed_tokens_fn: Callable[[int, Tensor], list[int]] | None
    assistant_model: PreTrainedModel | None

    do_sample: bool
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    typical_p: float
    epsilon_cutoff: float
    eta_cutoff: float
    repetition_penalty: float
    no_repeat_ngram_size: int
    bad_words_ids: list[list[int]]
    suppress_tokens: list[int]
    begin_suppress_tokens: list[int]
    sequence_bias: dict[tuple[int, ...], float] | list[list[Any]]
    guidance_scale: float
    renormalize_logits: bool
    num_beams: int
    length_penalty: float
    early_stopping: bool | str
    min_new_tokens: int
    max_time: float
    eos_token_id: int | list[int]
    pad_token_id: int
    prefill_chunk_size: int
    prompt_lookup_num_tokens: int


_ATTACHED = "call model.generate() inside hybrid_kv.attach(model)"
_REFUSED: Mapping[str, str] = {
    **dict.fromkeys(CACHE_NAMES, "a conversation() or context() keeps its cache"),
    "streamer": f"use stream=True, or {_ATTACHED}",
    "num_return_sequences": f"call it again with another seed, or {_ATTACHED}",
    "return_dict_in_generate": f"a Generation comes back; for more {_ATTACHED}",
    "output_scores": f"a Generation has none; {_ATTACHED}",
    "output_logits": f"a Generation has none; {_ATTACHED}",
    "output_attentions": "a tiered cache computes no matrix of weights",
    "output_hidden_states": f"a Generation has none; {_ATTACHED}",
    "cache_implementation": "write config=... where the model is loaded",
    "cache_config": "write config=... where the model is loaded",
    "use_cache": "the cache is always used",
    "attention_mask": "a single prompt has no padding",
    "input_ids": "pass them as the prompt",
    "inputs": "pass them as the prompt",
    "inputs_embeds": f"pass text or token ids, or {_ATTACHED}",
    "max_length": "write max_new_tokens",
    "min_length": "write min_new_tokens",
    "stop_strings": "write stop",
    "tokenizer": "pass it to load",
}
"""Arguments that a call with one cache and one answer cannot have, each with the way out."""

_AS_IT_IS: Mapping[str, int] = {"use_cache": True, "num_return_sequences": 1}
"""Values of refused options that ask for what is done anyway; of all others, False, and None."""

_OF_TRANSFORMERS = {
    name for name in GenerationConfig().to_dict() if not name.startswith(("_", "transformers_"))
}


def check_source(model: object) -> None:
    """Raises ConfigError unless it says where a model can be read."""
    if not isinstance(model, (str, Path)) or not str(model):
        raise ConfigError(
            "model must be a folder, a GGUF file, a hub id, 'needle', 'smollm2' or 'random:SHAPE', "
            f"got {said(model)}; write one as text"
        )


def check_load_options(given: Mapping[str, Any]) -> None:
    """Raises ConfigError for options that `load` does not have, or whose numbers are none."""
    known = {"model", "config", "tokenizer", "cache_dir", "cache_limit"}
    refuse_unknown("load", given, known | LoadOptions.__annotations__.keys())
    if given.get("layers") is not None:
        whole_number("layers", given["layers"])
    random_seed(given.get("seed"))
    for name in ("dequantize", "exact_products"):
        truth(name, given.get(name, False))


def generate_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of a call, fields of a `generation_config` included; keywords come first.

    Raises:
        ConfigError: a name is unknown, or stands for what cannot be served.
    """
    known = GenerateOptions.__annotations__
    refuse_unknown("generate", given, known, _OF_TRANSFORMERS | _REFUSED.keys())
    options = {**_fields(given.get("generation_config")), **given}
    options.pop("generation_config", None)
    for name in _REFUSED.keys() & options.keys():
        value = options.pop(name)
        plain = value is None or isinstance(value, int)
        if not (plain and value in (None, _AS_IT_IS.get(name, False))):
            raise ConfigError(f"{name} cannot be served here, got {said(value)}; {_REFUSED[name]}")
    return options


def _fields(config: object) -> dict[str, Any]:
    if config is None:
        return {}
    if not isinstance(config, GenerationConfig):
        raise ConfigError(
            f"generation_config must be transformers' GenerationConfig, got {said(config)}; or "
            "write its fields as keywords"
        )
    fields = config.to_diff_dict()
    return {name: value for name, value in fields.items() if name in _OF_TRANSFORMERS}


def whole_number(name: str, value: object, least: int = 1) -> int:
    """A number without fractions; no truth value and no text.

    Raises:
        ConfigError: it is none, or less than `least`.
    """
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = None
    if number is None or isinstance(value, bool):
        raise ConfigError(f"{name} must be a whole number of at least {least}, got {said(value)}")
    if number < least:
        raise ConfigError(f"{name} must be at least {least}, got {number}")
    return number


def most_drafts(exact: object) -> int | None:
    """Drafts of one verification at most, by the argument `exact`: 0 where it is off, None where
    the default holds.

    Raises:
        ConfigError: it is neither True, False nor a whole number.
    """
    if exact is None or isinstance(exact, bool):
        return None if exact else 0
    try:
        return whole_number("exact", exact)
    except ConfigError:
        raise ConfigError(
            f"exact must be True, False or how many tokens to draft at most, got {said(exact)}; "
            "write True"
        ) from None


def largest_error(value: object) -> float | None:
    """The argument `max_error`: expected KL of a token, nats; None for no limit.

    Raises:
        ConfigError: it is no number above 0.
    """
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise ConfigError(
            f"max_error must be the largest expected KL of a token, a number above 0 such as 0.01, "
            f"got {said(value)}; exact=True verifies every token"
        )
    return float(value)


def truth(name: str, value: object) -> bool:
    """True or False.

    Raises:
        ConfigError: it is neither.
    """
    if not isinstance(value, bool):
        raise ConfigError(f"{name} must be True or False, got {said(value)}")
    return value


def random_seed(value: object) -> int | None:
    """A seed for torch's generators, or None for none.

    Raises:
        ConfigError: it is none that they take.
    """
    if value is None:
        return None
    seed = whole_number("seed", value, 0)
    if seed >= 2**64:
        raise ConfigError(f"seed must be less than 2**64, got {seed}")
    return seed


def check_temperature(value: object) -> None:
    """Raises ConfigError unless it is a number that transformers can divide logits by, or None."""
    if value is None:
        return
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not (number and 0 <= value < math.inf):  # type: ignore[operator]
        raise ConfigError(
            f"temperature must be a number of at least 0, got {said(value)}; leave it out for "
            "greedy answers"
        )


def stop_strings(value: object) -> list[str]:
    """Texts that end an answer.

    Raises:
        ConfigError: they are none, or empty.
    """
    stops = [value] if isinstance(value, str) else value
    if stops is None:
        return []
    if not isinstance(stops, (list, tuple, set, frozenset)):
        raise ConfigError(f"stop must be a string or a list of strings, got {said(value)}")
    for stop in stops:
        if not isinstance(stop, str):
            raise ConfigError(f"stop must hold strings only, got {said(stop)} in it")
    if "" in stops:
        raise ConfigError("stop strings must not be empty; leave `stop` out to have none")
    return list(stops)


def check_watchers(on_prefill: object, cancel: object) -> None:
    """Raises ConfigError unless the one can be called and the other is an event, or both None."""
    if not (on_prefill is None or callable(on_prefill)):
        raise ConfigError(
            f"on_prefill must be a function of (done, total), got {said(on_prefill)}; leave it out "
            "for none"
        )
    if not (cancel is None or callable(getattr(cancel, "is_set", None))):
        raise ConfigError(
            f"cancel must be a threading.Event, got {said(cancel)}; leave it out for none"
        )
