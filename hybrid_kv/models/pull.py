"""Download of a model's files from the hub into its cache, without torch.

The hub is asked for the files with their sizes; what the cache has already is not downloaded again,
and what does not fit the disk is not begun. Files come one after the other in the calling thread,
so that Ctrl-C ends the download at once; those that are whole stay.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, constants, hf_hub_download, try_to_load_from_cache
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.file_download import repo_folder_name
from huggingface_hub.utils import tqdm, validate_repo_id  # type: ignore[attr-defined]

from hybrid_kv.errors import ConfigError, HybridKVError, ModelNotFoundError, WriteError
from hybrid_kv.models.local_models import HubFile, choose_files

_WAIT_S = 10.0
_TOLD: tuple[type[Exception], ...] = (*HfHubHTTPError.__bases__, EntryNotFoundError, RuntimeError)
"""Errors that a sentence tells: of the HTTP client, of which versions of the hub's package take
another, of the disk (OSError), and of Xet (RuntimeError).
"""
_LOGIN = "log in with `hf auth login` or set HF_TOKEN"


@dataclass(frozen=True, slots=True)
class Download:
    """Files of one revision of a model that are to come.

    name: the repository. revision: as it was asked for, None for the main one. commit: of the
    revision. files: all that loading needs. absent: those that the cache does not have.
    free_bytes: on the disk of the cache.
    """

    name: str
    revision: str | None
    commit: str
    files: tuple[HubFile, ...]
    absent: tuple[HubFile, ...]
    free_bytes: int

    @property
    def num_bytes(self) -> int:
        """Of all files."""
        return sum(file.num_bytes for file in self.files)

    @property
    def absent_bytes(self) -> int:
        """Of those that are to come."""
        return sum(file.num_bytes for file in self.absent)


def split_name(text: str) -> tuple[str, str | None]:
    """'owner/name@revision' -> its two parts.

    Raises:
        ConfigError: it names no model of the hub.
    """
    name, at, revision = text.partition("@")
    if name in ("needle", "smollm2") or name.startswith("random:"):
        raise ConfigError(
            f"NAME must be of a model on the hub, got '{text}', which is none: use it as it is, "
            "without a download"
        )
    try:
        validate_repo_id(name)
    except HFValidationError:
        name = ""
    if not name or (at and not revision.strip()):
        raise ConfigError(
            f"NAME must be a hub id like OWNER/NAME or OWNER/NAME@REVISION, got '{text}'; see the "
            "model's page on the hub"
        )
    return name, revision or None


def check_gguf_name(file: str | None) -> None:
    """Raises ConfigError for a file that is not GGUF by its ending."""
    if file is not None and not file.lower().endswith(".gguf"):
        raise ConfigError(
            f"--file must name a GGUF file, got '{file}'; leave it out for a model in safetensors"
        )


def prepare_download(name: str, revision: str | None = None, gguf: str | None = None) -> Download:
    """The files to download, by the hub's answer.

    Args:
        gguf: one GGUF file of the repository in place of safetensors.

    Raises:
        ModelNotFoundError: the hub cannot be asked, or has no such model, revision or file.
        WriteError: the disk has no room for what is to come.
    """
    with _one_sentence(name, revision):
        found = HfApi().model_info(name, revision=revision, files_metadata=True, timeout=_WAIT_S)
    files = [_hub_file(sibling) for sibling in found.siblings or ()]
    chosen = choose_files(name, files, gguf)
    cache = Path(constants.HF_HUB_CACHE)
    commit = str(found.sha)
    absent = [file for file in chosen if not _is_cached(cache, name, commit, file)]
    free = shutil.disk_usage(_existing(cache)).free
    needed = sum(file.num_bytes for file in absent)
    if needed > free:
        raise WriteError(
            f"model '{name}' needs {_mib(needed)} on the disk of '{cache}', which has {_mib(free)} "
            "free; make room, or set HF_HOME to a folder on another disk"
        )
    return Download(name, revision, commit, tuple(chosen), tuple(absent), free)


def download(planned: Download, *, progress: bool) -> str:
    """Download what is absent, and return the name to load the model by: the repository's, or a
    path for another revision than the main one and for GGUF.

    Args:
        progress: bars on stderr.

    Raises:
        ModelNotFoundError: the hub cannot be reached, or does not give the files.
        WriteError: the disk is full or cannot be written.
    """
    bar = tqdm if progress else _Silent
    paths = {}
    for file in planned.files:
        with _one_sentence(planned.name, planned.revision):
            paths[file.name] = hf_hub_download(
                planned.name, file.name, revision=planned.revision, tqdm_class=bar
            )
    first = planned.files[0].name
    if first.lower().endswith(".gguf"):
        return str(paths[first])
    folders = {path[: -len(name) - 1] for name, path in paths.items()}
    if len(folders) > 1:
        raise ModelNotFoundError(
            f"model '{planned.name}' got another revision while it was downloaded; run the same "
            "command again, which takes what has changed"
        )
    return planned.name if planned.revision is None else folders.pop()


class _Silent(tqdm):
    """A bar that shows nothing."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **{**options, "disable": True})  # type: ignore[no-untyped-call]


def _hub_file(sibling: Any) -> HubFile:
    digest = sibling.lfs.sha256 if sibling.lfs is not None else sibling.blob_id
    return HubFile(sibling.rfilename, sibling.size or 0, digest)


def _is_cached(cache: Path, name: str, commit: str, file: HubFile) -> bool:
    blobs = cache / repo_folder_name(repo_id=name, repo_type="model") / "blobs"
    if file.digest is not None and (blobs / file.digest).is_file():
        return True
    return isinstance(try_to_load_from_cache(name, file.name, cache, revision=commit), str)


def _existing(path: Path) -> Path:
    """The path, or the folder above it that is there."""
    absolute = path.expanduser().absolute()
    return next(one for one in (absolute, *absolute.parents) if one.exists())


def _mib(count: int) -> str:
    return f"{count / 2**20:,.1f} MiB"


@contextmanager
def _one_sentence(name: str, revision: str | None) -> Iterator[None]:
    """Turns what the hub, the network and the disk raise into one sentence with the way out."""
    try:
        yield
    except _TOLD as error:
        cause = error.__cause__ if isinstance(error, LocalEntryNotFoundError) else None
        found = cause if isinstance(cause, Exception) else error
        raise _refusal(name, revision, found) from error


def _refusal(name: str, revision: str | None, error: Exception) -> HybridKVError:
    cannot = f"model '{name}' cannot be pulled"
    if isinstance(error, OfflineModeIsEnabled):
        why = "HF_HUB_OFFLINE forbids to ask the hub; unset it, or take a model of `hybrid-kv ls`"
    elif isinstance(error, GatedRepoError):
        why = (
            "its owner gives it to those alone who agree to its terms; agree on its page on the "
            f"hub, then {_LOGIN}"
        )
    elif isinstance(error, RevisionNotFoundError):
        why = f"it has no revision '{revision}'; give a branch, a tag or a commit of it"
    elif isinstance(error, RepositoryNotFoundError):
        why = f"the hub has no such model, or a private one; check the name, or {_LOGIN}"
    elif isinstance(error, HfHubHTTPError):
        status = error.response.status_code
        way = f"agree to the model's terms on its page, or {_LOGIN}"
        why = f"the hub answered {status}; {way if status in (401, 403) else 'try again later'}"
    elif isinstance(error, OSError) and error.errno is not None:
        return WriteError(
            f"{cannot}: '{constants.HF_HUB_CACHE}' cannot be written: {error.strerror}; make room, "
            "or set HF_HOME to another folder"
        )
    else:  # of the client that the hub's package has chosen
        why = (
            f"the hub cannot be reached ({type(error).__name__}); check the network, and run the "
            "same command again, which takes what is absent"
        )
    return ModelNotFoundError(f"{cannot}: {why}")
