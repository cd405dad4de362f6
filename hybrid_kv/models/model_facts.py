"""Facts of a model on this machine, from its configuration alone, and why it cannot be served."""

from __future__ import annotations

import json
import warnings
from dataclasses import dataclass
from logging import CRITICAL
from pathlib import Path
from typing import Any

import torch
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM, PreTrainedConfig
from transformers.utils import logging

from hybrid_kv.errors import HybridKVError, UnsupportedModelError
from hybrid_kv.models.checkpoint import read_config, reason
from hybrid_kv.models.local_models import FoundModel
from hybrid_kv.models.shapes import random_config
from hybrid_kv.models.support import inspect_model

_GENERATES = ("CausalLM", "ConditionalGeneration", "LMHead")
"""Parts of the names of classes that generate text."""


@dataclass(frozen=True, slots=True)
class ConfigFacts:
    """Facts of a configuration.

    architecture: the class of the model, or its type. num_layers: all of them. kv_bytes_per_token:
    K and V in the layers that keep every token. why: the reason why hybrid_kv does not serve it, ""
    where it does. Each fact is None where the configuration does not tell it.
    """

    architecture: str | None = None
    num_layers: int | None = None
    kv_bytes_per_token: int | None = None
    why: str = ""


def facts_of(found: FoundModel) -> ConfigFacts:
    """The facts; whatever is wrong with a model is a reason, and no error."""
    level = logging.get_verbosity()
    logging.set_verbosity(CRITICAL)
    try:
        with warnings.catch_warnings(action="ignore"):
            config = _config_of(found)
            name = _architecture(config)
            num_layers = getattr(config.get_text_config(decoder=True), "num_hidden_layers", None)
            try:
                size, why = _kv_bytes_per_token(config, name), ""
            except Exception as error:  # of any kind, in the model's own code
                size, why = None, _words(error)
            return ConfigFacts(name, num_layers, size, why)
    except Exception as error:
        return ConfigFacts(_named_in(found.path), why=_words(error))
    finally:
        logging.set_verbosity(level)


def _config_of(found: FoundModel) -> PreTrainedConfig:
    if found.path is None:
        return random_config(found.name.removeprefix("random:"), None)
    if found.path.suffix.lower() == ".gguf":
        from hybrid_kv.models.gguf_load import read_gguf_config

        return read_gguf_config(found.name, str(found.path))
    return read_config(found.name, str(found.path), trust_remote_code=False)


def _architecture(config: PreTrainedConfig) -> str:
    stored = getattr(config, "architectures", None)
    known: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    return str(stored[0]) if stored else getattr(known, "__name__", config.model_type)


def _kv_bytes_per_token(config: PreTrainedConfig, name: str) -> int:
    """Raises UnsupportedModelError where the model cannot be served."""
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING or not any(x in name for x in _GENERATES):
        raise UnsupportedModelError(
            f"{name} is no language model that generates text; hybrid_kv serves decoder-only models"
        )
    stored: Any = getattr(config, "dtype", None) or torch.bfloat16
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=stored)
    layers = inspect_model(model).layers
    return sum(2 * one.num_kv_heads * one.head_dim * stored.itemsize for one in layers)


def _words(error: Exception) -> str:
    return str(error) if isinstance(error, HybridKVError) else reason(error)


def _named_in(folder: Path | None) -> str | None:
    """The class that a configuration names which transformers cannot read."""
    try:
        found = json.loads((folder or Path()).joinpath("config.json").read_text(encoding="utf-8"))
        return str(found["architectures"][0])
    except (OSError, ValueError, KeyError, IndexError, TypeError):
        return None
