"""Saved contexts that vLLM's prompts may begin with: which one, how many tokens, keys and values.

A context is taken where all layers keep every entry as full attention computes it, up to the first
token whose entries may be others, and where model, weights and dtype are the ones that it was made
with. Layers with a sliding window hold their newest tokens only, so that no shorter prompt could
go on from them: such contexts are let be. Why one is not taken is said once.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import AutoConfig

from hybrid_kv.errors import ConfigError, FileFormatError, ReadError
from hybrid_kv.saved import verify_context
from hybrid_kv.saved.file_blocks import mapped
from hybrid_kv.saved.identity import common_tokens, model_facts, weights_hash
from hybrid_kv.saved.manifest import MANIFEST, Manifest, damaged, read_manifest
from hybrid_kv.saved.opening import read_ids

_log = logging.getLogger("vllm.hybrid_kv")


@dataclass(frozen=True, slots=True)
class SavedPrefix:
    """A context that may be taken: its token ids [tokens] that are exact, and where it lies."""

    path: Path
    manifest: Manifest
    ids: Tensor


class SavedPrefixes:
    """Contexts in a folder, which is looked at for every prompt.

    Args:
        folder: a context, or a folder with contexts at any depth (`NAME.hkv`).
        facts, weights, dtype: of the model, as `checkpoint_identity` says them; contexts that were
            made with others are not taken, weights None with any.

    Raises:
        ConfigError: there is no such folder.
    """

    def __init__(
        self, folder: Path, facts: dict[str, Any], weights: str | None, dtype: str
    ) -> None:
        if not folder.is_dir():
            raise ConfigError(f"contexts must be a folder with saved contexts, got '{folder}'")
        self._folder, self._facts, self._weights, self._dtype = folder, facts, weights, dtype
        self._known: dict[Path, tuple[tuple[int, int], SavedPrefix | None]] = {}
        self._checked: set[str] = set()

    def best(self, ids: Tensor) -> tuple[SavedPrefix, int] | None:
        """The context that shares most first tokens of ids [n] int64, and how many; None for none.

        Every byte of one is checked when it is found for the first time.
        """
        shared = [(common_tokens(one.ids, ids), one) for one in self._all()]
        for tokens, one in sorted(shared, key=lambda pair: -pair[0]):
            if tokens and self._is_whole(one):
                return one, tokens
        return None

    def _all(self) -> Iterator[SavedPrefix]:
        own = [self._folder] if (self._folder / MANIFEST).is_file() else []
        for path in own or sorted(self._folder.rglob("*.hkv")):
            try:
                found = (path / MANIFEST).lstat()
            except OSError:
                continue  # it has gone, or is being made
            stamp = found.st_ino, found.st_mtime_ns
            known = self._known.get(path)
            if known is None or known[0] != stamp:
                known = self._known[path] = stamp, self._read(path)
            if known[1] is not None:
                yield known[1]

    def _read(self, path: Path) -> SavedPrefix | None:
        try:
            manifest = read_manifest(path)
            problem = self._problem(manifest)
            if problem is None:
                exact = manifest.num_tokens
                if manifest.inexact_from is not None:
                    exact = min(exact, manifest.inexact_from)
                return SavedPrefix(path, manifest, read_ids(path, manifest)[:exact])
        except (FileFormatError, ReadError) as error:
            problem = str(error)
        _log.warning("saved context '%s' is not taken: %s", path, problem)
        return None

    def _problem(self, manifest: Manifest) -> str | None:
        """Why a context cannot be taken; None where it can."""
        model = manifest.model
        for name in sorted(model.facts.keys() | self._facts.keys()):
            then, now = model.facts.get(name), self._facts.get(name)
            if then != now:
                return f"it was made with a model of {name} {then}, this one has {now}"
        if manifest.dtype != self._dtype:
            return f"it was made with dtype {manifest.dtype}, the engine has {self._dtype}"
        if self._weights not in (None, model.weights):
            return "it was made with other weights; check_weights: false takes it all the same"
        if manifest.windows or manifest.states:
            return "the model has layers that hold the newest tokens or a state alone"
        length = manifest.num_tokens
        if any(one.num_entries != length or one.length != length for one in manifest.layers):
            return "its method has dropped entries; make it with one that keeps all"
        if manifest.inexact_from == 0:
            return "its entries are not those of full attention; make it with exact prompts"
        return None

    def _is_whole(self, one: SavedPrefix) -> bool:
        if one.manifest.ids_sha256 + one.manifest.folder not in self._checked:
            try:
                verify_context(one.path)
            except (FileFormatError, ReadError) as error:
                _log.warning("saved context '%s' is not taken: %s", one.path, error)
                self._known[one.path] = self._known[one.path][0], None
                return False
            self._checked.add(one.manifest.ids_sha256 + one.manifest.folder)
        return True


def saved_layers(path: Path, folder: str, span: slice) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Layer, keys and values [n, Hkv, D] of a span of a context's tokens; mapped, not read.

    Args:
        folder: the blocks that the context had when it was found.

    Raises:
        FileFormatError: it is another one now, or damaged.
        ReadError: it cannot be read.
    """
    manifest = read_manifest(path)
    if manifest.folder != folder:
        raise FileFormatError(f"saved context '{path}' was replaced while it was taken")
    for layer in manifest.layers:
        try:
            tensors, _ = mapped(manifest.path_of(path, layer.kv))
        except (OSError, ValueError) as error:
            raise damaged(path, str(error)) from None
        shape = layer.num_kv_heads, layer.num_entries, layer.head_dim
        k, v = tensors["k"], tensors["v"]
        if not k.shape == v.shape == shape:
            raise damaged(path, f"layer {layer.layer_idx} must have {list(shape)} keys and values")
        yield layer.layer_idx, k[:, span].transpose(0, 1), v[:, span].transpose(0, 1)


def checkpoint_identity(
    folder: Path, dtype: torch.dtype, *, weights: bool
) -> tuple[dict[str, Any], str | None]:
    """Facts of the model that is loaded from a folder of safetensors in a dtype, and the hash of
    its weights, None where it is not asked for.

    Raises:
        ConfigError: the folder has no such files.
    """
    config = AutoConfig.from_pretrained(folder).get_text_config(decoder=True)
    if not weights:
        return model_facts(config), None
    named: dict[str, Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            named |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    if not named:
        raise ConfigError(
            f"the weights in '{folder}' must be safetensors to be compared with those of saved "
            "contexts; set check_weights to false"
        )
    if config.tie_word_embeddings:
        named.pop("lm_head.weight", None)
    return model_facts(config), weights_hash(named.items(), dtype)
