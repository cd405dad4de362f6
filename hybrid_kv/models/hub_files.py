"""Choice of a hub repository's files: those that loading a model needs, and no others.

--file X.gguf             that file, with its other parts where it was split
safetensors               one file or all shards, configuration, tokenizer
pytorch_model.bin         the same, where there are no safetensors
GGUF files and no others  the only one, else a refusal that lists them
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from difflib import get_close_matches
from fnmatch import fnmatch
from typing import NamedTuple

from hybrid_kv.errors import ModelNotFoundError

BESIDE_WEIGHTS = (
    *("config.json", "generation_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("tokenizer.json", "tokenizer_config.json", "tokenizer.model*", "vocab.*", "merges.txt"),
    *("*.tiktoken", "tekken.json", "spiece.model", "sentencepiece.bpe.model"),
    *("chat_template.*", "additional_chat_templates/*.jinja"),
)
"""Patterns of what is read beside the weights: configuration, tokenizer, chat templates."""

_SHARD = r"[.-].*\d{5}-of-\d{5}\."
WEIGHTS = (
    ("model.safetensors", rf"model{_SHARD}safetensors", "model.safetensors.index.json"),
    ("pytorch_model.bin", rf"pytorch_model{_SHARD}bin", "pytorch_model.bin.index.json"),
)
"""Weights that transformers reads: the one file, its shards, their list; the best kind first."""

_PART = re.compile(r"(?P<stem>.*)-\d{5}-of-(?P<count>\d{5})\.gguf", re.IGNORECASE | re.DOTALL)
_LISTED = 5  # files that a sentence names


class HubFile(NamedTuple):
    """A file of a repository: its path there, its bytes, and the name of its blob in the cache."""

    name: str
    num_bytes: int
    digest: str | None = None


def choose_files(model: str, files: Sequence[HubFile], gguf: str | None) -> list[HubFile]:
    """Files to download.

    Args:
        model: the repository; for messages.
        gguf: a GGUF file among them, by its path or the last part of it.

    Raises:
        ModelNotFoundError: there are no weights, no such file, or several GGUF files.
    """
    by_name = {file.name: file for file in files}
    if gguf is not None:
        return _parts(_gguf_named(model, by_name, gguf), by_name)
    if weights := _weights(by_name):
        if "config.json" not in by_name:
            raise ModelNotFoundError(
                f"model '{model}' has no config.json, without which its weights are no model; take "
                "a repository that transformers loads (an adapter or a part of a pipeline is none)"
            )
        beside = (name for name in by_name if any(fnmatch(name, one) for one in BESIDE_WEIGHTS))
        return [by_name[name] for name in dict.fromkeys([*beside, *weights])]
    models = gguf_models(list(by_name))
    if not models:
        raise ModelNotFoundError(
            f"model '{model}' has neither safetensors nor GGUF files, got "
            f"{_named(sorted(by_name))}; take a repository that holds a language model"
        )
    if len(models) > 1:
        raise ModelNotFoundError(
            f"model '{model}' has {len(models)} GGUF files, and one is loaded; choose it with "
            f"--file: {', '.join(models)}"
        )
    return _parts(models[0], by_name)


def gguf_models(names: Sequence[str]) -> list[str]:
    """GGUF files that are models, of a split one the first part; no projectors of images."""
    return [
        name
        for name in sorted(names)
        if name.lower().endswith(".gguf")
        and not name.rpartition("/")[2].lower().startswith("mmproj")
        and ("-00001-of-" in name or not _PART.fullmatch(name))
    ]


def _gguf_named(model: str, by_name: dict[str, HubFile], wanted: str) -> str:
    if wanted in by_name:
        return wanted
    known = [name for name in sorted(by_name) if name.lower().endswith(".gguf")]
    below = [name for name in known if name.rpartition("/")[2] == wanted]
    if len(below) == 1:
        return below[0]
    if not known:
        raise ModelNotFoundError(f"model '{model}' has no GGUF files; leave --file out")
    short = {name.rpartition("/")[2].lower(): name for name in known}
    near = get_close_matches(wanted.rpartition("/")[2].lower(), short, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(short[one] for one in near)}? " if near else ""
    raise ModelNotFoundError(
        f"--file '{wanted}' is no file of model '{model}'; {hint}it has {_named(known)}"
    )


def gguf_parts(name: str, names: Sequence[str]) -> list[str]:
    """All parts of a GGUF file among these names, in order; the file alone where it is whole."""
    split = _PART.fullmatch(name)
    if split is None:
        return [name]
    part = re.compile(re.escape(split["stem"]) + rf"-\d{{5}}-of-{split['count']}\.gguf", re.I)
    return [one for one in sorted(names) if part.fullmatch(one)]


def _parts(name: str, by_name: dict[str, HubFile]) -> list[HubFile]:
    return [by_name[part] for part in gguf_parts(name, list(by_name))]


def _weights(by_name: dict[str, HubFile]) -> list[str]:
    for whole, shard, index in WEIGHTS:
        if whole in by_name:
            return [whole]
        shards = [name for name in sorted(by_name) if re.fullmatch(shard, name)]
        if shards and index in by_name:
            return [index, *shards]
    return []


def _named(names: Sequence[str]) -> str:
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return (", ".join(names[:_LISTED]) or "no files") + more
