"""Identity of a saved context: the model that computed it, its tokenizer, settings and tokens.

Common beginnings are found by a chain of hashes. The hash of a block of tokens is taken over these
and the hash of the block before, so that equal hashes mean equal beginnings, however long.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from hybrid_kv.config import HybridConfig
from hybrid_kv.errors import OtherContextError
from hybrid_kv.former import is_former, is_removed
from hybrid_kv.models.support import text_config
from hybrid_kv.models.weight_kinds import stored_tensors
from hybrid_kv.plugins import INDEXES
from hybrid_kv.saved.manifest import Manifest, SavedModel

_SAMPLED = 64
"""Numbers of each weight: 300 weights of an 8B model are read in milliseconds, and training or
quantising changes nearly all of them."""
_FACTS = (
    *("model_type", "vocab_size", "num_hidden_layers", "hidden_size", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "rms_norm_eps", "rope_theta", "rope_scaling"),
    *("rope_parameters", "partial_rotary_factor", "sliding_window", "layer_types"),
    *("attn_logit_softcapping", "query_pre_attn_scalar"),
)
_READING = frozenset(
    {
        *("page_budget", "cold.top_k", "cold.max_tokens", "cold.min_share", "cold.shared"),
        *("cold.look_ahead", "cold.look_ahead_factor", "cold.estimate", "cold.select"),
    }
)
"""Settings of methods that say how much is attended and where, and not what is stored or by what it
is found."""
_RUNNING = frozenset(HybridConfig.model_fields) - {"method", "page_size", "params"}


def model_identity(model: PreTrainedModel) -> SavedModel:
    """Identity that tells a model from others, the same in every process."""
    facts = model_facts(text_config(model))
    return SavedModel(facts=facts, weights=weights_hash(stored_tensors(model)))


def model_facts(config: PreTrainedConfig) -> dict[str, Any]:
    """Shape and positions as the configuration of a text model says them."""
    known = config.to_dict()
    facts = {name: known[name] for name in _FACTS if known.get(name) is not None}
    found: dict[str, Any] = json.loads(json.dumps(facts))
    return found


def weights_hash(named: Iterable[tuple[str, Tensor]], dtype: torch.dtype | None = None) -> str:
    """SHA-256 over name, shape, dtype and a sample of each weight.

    Args:
        dtype: of a model that is loaded from these weights; None where they are a model's own.
    """
    weights = sha256()
    for name, weight in sorted(named, key=lambda pair: pair[0]):
        flat = weight.reshape(-1)
        sample = flat[:: max(1, len(flat) // _SAMPLED)][:_SAMPLED].cpu().contiguous()
        if dtype is not None and sample.is_floating_point():
            sample = sample.to(dtype)
        weights.update(f"{name} {list(weight.shape)} {sample.dtype}".encode())
        weights.update(_bytes_of(sample))
    return weights.hexdigest()


def tokenizer_identity(tokenizer: PreTrainedTokenizerBase | None) -> str | None:
    """SHA-256 over what decides its tokens, chat template included; None where there is none."""
    if tokenizer is None:
        return None
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        known: Any = {"vocabulary": tokenizer.get_vocab(), "kind": type(tokenizer).__name__}
    else:
        known = json.loads(backend.to_str())
        for changing in ("truncation", "padding"):  # by calls, not by the tokenizer
            known.pop(changing, None)
    known = [known, tokenizer.chat_template, sorted(map(str, tokenizer.all_special_tokens))]
    return sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()


def identity_hash(model: PreTrainedModel, tokenizer: str | None, config: HybridConfig) -> str:
    """SHA-256 over all that `check_identity` compares: equal where a context of the one can be
    opened with the other.

    Args:
        tokenizer: its `tokenizer_identity`.
    """
    made_with = [
        model_identity(model).model_dump(mode="json"),
        tokenizer,
        name_of(model.dtype),
        _flat(config.flat()),
        [config.method, config.page_size],
    ]
    return sha256(json.dumps(made_with, sort_keys=True).encode()).hexdigest()


def ids_hash(ids: Tensor) -> str:
    """SHA-256 over token ids."""
    return sha256(_bytes_of(ids.cpu().long().contiguous())).hexdigest()


def _bytes_of(tensor: Tensor) -> bytes:
    return tensor.view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def check_identity(
    root: Path,
    saved: Manifest,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    config: HybridConfig,
) -> None:
    """Raises OtherContextError unless a context was made with these."""
    facts = model_identity(model)
    for name in sorted(saved.model.facts.keys() | facts.facts.keys()):
        then, now = saved.model.facts.get(name), facts.facts.get(name)
        if then != now:
            raise _other(root, f"a model of {name} {then}, got {now}", "the same model")
    if (dtype := name_of(model.dtype)) != saved.dtype:
        raise _other(root, f"dtype {saved.dtype}, got {dtype}", f"dtype='{saved.dtype}'")
    if facts.weights != saved.model.weights:
        raise _other(root, "a model of other weights", "the same model")
    known = tokenizer_identity(tokenizer)
    if saved.tokenizer is not None and known is not None and saved.tokenizer != known:
        raise _other(root, "another tokenizer or chat template", "the same tokenizer")
    _check_settings(root, saved, config)


def _check_settings(root: Path, saved: Manifest, config: HybridConfig) -> None:
    if config.page_size != saved.page_size:
        got = f"page_size {saved.page_size}, got {config.page_size}"
        raise _other(root, got, f"page_size={saved.page_size}")
    then, now = _flat(saved.config), _flat(config.flat())
    for name in ("method", *sorted(then.keys() | now.keys())):
        if then.get(name) != now.get(name):
            got = f"{name} {then.get(name)!r}, got {now.get(name)!r}"
            raise _other(root, got, "the settings that it was made with")


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Settings that decide what is stored, by dotted name.

    Those that were removed and stand in older files never did: found entries and pages that had
    copies on a device lay in the host tier as all others.
    """
    found: dict[str, Any] = {}
    # Files from before sparse prefill do not have the setting, and are of exact prompts.
    is_exact = tree.get("prefill", "exact") == "exact"
    running = _RUNNING if is_exact else _RUNNING - {"prefill"}
    for name, value in tree.items():
        if not prefix and name in running:
            continue
        if prefix == "cold.index." and name == "sizes":  # stood beside the others once
            found |= _flat(value, prefix)
        elif isinstance(value, Mapping):
            found |= _flat(value, f"{prefix}{name}.")
        elif prefix + name not in _READING and not is_removed(prefix + name):
            found[prefix + name] = value
    return found


def stored_settings(config: HybridConfig) -> dict[str, Any]:
    """Settings that decide what a context holds, by dotted name."""
    return {**_flat(config.flat()), "method": config.method, "page_size": config.page_size}


def settings_of_file(tree: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration as `HybridConfig.flat` wrote it once, in today's names.

    What is decided without a setting today is left out, and so is what was removed.
    """
    method = str(tree["method"])
    group = tree.get("cold")
    index = group.get("index") if isinstance(group, Mapping) else None
    kept = {name: value for name, value in tree.items() if not _is_gone(method, name)}
    if isinstance(group, Mapping):
        kept["cold"] = {
            name: value for name, value in group.items() if not _is_gone(method, f"cold.{name}")
        }
        if isinstance(index, Mapping) and (kind := str(index.get("kind"))) in INDEXES:
            own = set(INDEXES[kind].params.model_fields) | {"kind"}
            sizes = {
                name: value
                for name, value in index.items()
                if name not in own and is_former(kind, name)
            }
            known = {name: value for name, value in index.items() if name in own}
            if "sizes" in known:
                known["sizes"] = {
                    name: value for name, value in known["sizes"].items() if not is_removed(name)
                }
            kept["cold"]["index"] = known | ({"sizes": sizes} if sizes else {})
    return kept


def _is_gone(method: str, path: str) -> bool:
    return is_removed(path) or is_former(method, path.rpartition(".")[2])


def name_of(dtype: torch.dtype) -> str:
    """'float32' of torch.float32."""
    return str(dtype).removeprefix("torch.")


def _other(root: Path, what: str, way: str) -> OtherContextError:
    return OtherContextError(f"saved context '{root}' was made with {what}; open it with {way}")


BLOCK_TOKENS = 256
"""Prompts that share less than this are computed anew: that is quicker than opening a file."""


def chain_of(ids: Tensor, size: int = BLOCK_TOKENS) -> list[bytes]:
    """The hash of each whole block of `size` ids [tokens], oldest first."""
    raw = ids.to(torch.int64).cpu().contiguous().numpy()
    hashes, last = [], b""
    for start in range(0, len(raw) - size + 1, size):
        last = sha256(last + raw[start : start + size].tobytes()).digest()
        hashes.append(last)
    return hashes


def common_tokens(first: Tensor, second: Tensor) -> int:
    """Number of tokens that ids [tokens] of both have in common at the start."""
    shorter = min(len(first), len(second))
    differing = (first[:shorter] != second[:shorter]).nonzero()
    return int(differing[0]) if len(differing) else shorter
