"""Opening a saved context: a cache that reads from the file as it needs, and marks it as in use."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hybrid_kv.errors import ConfigError, FileFormatError, OtherContextError
from hybrid_kv.index._base import SavedIndex
from hybrid_kv.models.cache_layers import HybridLayer, SlidingLayer
from hybrid_kv.models.hf_cache import TieredCache
from hybrid_kv.ops.tail import Tail, sizes_of_moments
from hybrid_kv.plugins import Placement
from hybrid_kv.rotary import Samples
from hybrid_kv.runtime import KVCache
from hybrid_kv.runtime.snapshot import ExtentSnapshot, LayerSnapshot
from hybrid_kv.saved.file_blocks import entries_of, hash_of, mapped, unrounded
from hybrid_kv.saved.identity import check_identity, ids_hash
from hybrid_kv.saved.manifest import (
    Manifest,
    SavedExtent,
    SavedLayer,
    SavedSamples,
    SavedState,
    SavedWindow,
    damaged,
    read_manifest,
    unreadable,
)
from hybrid_kv.saved.own_layers import check_tensors, is_own, take_tensors
from hybrid_kv.store.live_index import IndexRefresh

VERIFIED_BYTES = 256 * 2**20
"""Up to so many bytes all checksums are compared when a context is opened: a fraction of a second,
where reading all of a large one would take longer than its first answer."""


@dataclass(frozen=True, slots=True)
class LoadedContext:
    """ids: [1, tokens] int64 on the host. messages: see `save_context`."""

    ids: Tensor
    messages: list[Any] | None


class _Content(NamedTuple):
    """Parts of a context as they were read: text, and what goes to the layers of each kind."""

    opened: LoadedContext
    layers: list[tuple[SavedLayer, LayerSnapshot]]
    windows: list[tuple[SavedWindow, Tensor, Tensor]]
    states: list[tuple[SavedState, dict[str, Tensor]]]

    def go_to(self, cache: TieredCache, device: torch.device) -> None:
        """Lets the empty layers of a cache go on from it."""
        for layer, held in self.layers:
            tiered = cache.layers[layer.layer_idx]
            assert isinstance(tiered, HybridLayer)
            tiered.take(held, device)
        for window, k, v in self.windows:
            sliding = cache.layers[window.layer_idx]
            assert isinstance(sliding, SlidingLayer)
            sliding.take(k, v, window.length, device)
        for state, tensors in self.states:
            take_tensors(cache.layers[state.layer_idx], tensors, device)


@torch.no_grad()
def open_context(
    path: str | Path,
    cache: TieredCache,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    device: torch.device,
    *,
    verify: bool | None = None,
) -> LoadedContext:
    """Fills an empty cache with what `save_context` wrote.

    Cold keys and values are looked at where they lie in the file, resident ones are copied to
    `device`. Every forward looks first whether the files still have their sizes.

    Args:
        verify: compare all blocks with their checksums; None where all together have at most
            `VERIFIED_BYTES`. Ids, text, indexes and what a method keeps are compared in any case.

    Raises:
        ConfigError: the model lies on several devices.
        OtherContextError: it was made with another model, tokenizer or settings.
        FileFormatError: it is damaged, foreign or of another version.
        ReadError: it is not there or cannot be read.
    """
    root = Path(path)
    if len(devices := {weight.device for weight in model.parameters()}) > 1:
        raise ConfigError(
            f"a context is opened for a model on one device, got weights on {len(devices)}; load "
            "the model without a device map"
        )
    while True:
        manifest = read_manifest(root)
        check_identity(root, manifest, model, tokenizer, cache.kv.config)
        try:
            content = _read(root, manifest, cache, device, verify)
        except FileFormatError:
            if read_manifest(root).folder == manifest.folder:
                raise
            continue  # somebody has saved to it meanwhile
        content.go_to(cache, device)
        cache.kv.check_source = OpenFiles.of(root, manifest).check
        cache.state.inexact_from = manifest.inexact_from
        return content.opened


def _read(
    root: Path, manifest: Manifest, cache: TieredCache, device: torch.device, verify: bool | None
) -> _Content:
    with _refusing(root):
        if verify is None:
            verify = sum(block.num_bytes for block in manifest.blocks.values()) <= VERIFIED_BYTES
        for name in manifest.blocks:
            manifest.path_of(root, name)
        opened = _read_text(root, manifest)
        kinds = {
            number: SavedState if is_own(layer) else type(layer)
            for number, layer in enumerate(cache.layers)
        }
        saved_kinds: dict[int, type] = {saved.layer_idx: HybridLayer for saved in manifest.layers}
        saved_kinds |= {saved.layer_idx: SlidingLayer for saved in manifest.windows}
        saved_kinds |= {saved.layer_idx: SavedState for saved in manifest.states}
        if saved_kinds != kinds or manifest.num_layers != len(kinds):
            raise ValueError("it has other layers than the model")
        for name in manifest.blocks if verify else ():
            _check(root, manifest, name)
        reader = _Reader(root, manifest, cache.kv, device)
        windows, states = [], []
        for window in manifest.windows:
            sliding = cache.layers[window.layer_idx]
            assert isinstance(sliding, SlidingLayer)
            windows.append((window, *reader.window(window, sliding)))
        for state in manifest.states:
            states.append((state, reader.states(state, cache.layers[state.layer_idx])))
        layers = [(saved, reader.layer(saved)) for saved in manifest.layers]
        return _Content(opened, layers, windows, states)


@contextmanager
def _refusing(root: Path) -> Iterator[None]:
    """Turns what a file's content raises, when it is made sense of, into our own errors."""
    try:
        yield
    except (FileFormatError, OtherContextError):
        raise
    except FileNotFoundError as error:
        raise damaged(root, f"'{Path(error.filename or '').name}' is not there") from None
    except OSError as error:
        raise unreadable(root, error) from error
    except KeyError as error:
        raise damaged(root, f"it lacks {error}") from None
    except (LookupError, TypeError, ValueError, StopIteration) as error:
        raise damaged(root, str(error).partition("\n")[0]) from None


def read_ids(root: Path, manifest: Manifest) -> Tensor:
    """The token ids [tokens] int64 of a saved context.

    Raises:
        FileFormatError: they are damaged.
        ReadError: they cannot be read.
    """
    with _refusing(root):
        tensors, _ = mapped(manifest.path_of(root, manifest.ids))
        ids = tensors["ids"].long()
        if ids.shape != (manifest.num_tokens,) or ids_hash(ids) != manifest.ids_sha256:
            raise ValueError("its token ids are not those that were saved")
        return ids


def _read_text(root: Path, manifest: Manifest) -> LoadedContext:
    ids, messages = read_ids(root, manifest)[None], None
    if manifest.messages is not None:
        _check(root, manifest, manifest.messages)
        messages = json.loads(manifest.path_of(root, manifest.messages).read_bytes())
    return LoadedContext(ids, messages)


def _check(root: Path, manifest: Manifest, name: str) -> Path:
    """Path of a block whose every byte is as it was written."""
    path = manifest.path_of(root, name)
    if hash_of(path) != manifest.blocks[name].sha256:
        raise ValueError(f"the checksum of block '{name}' does not fit")
    return path


class _Reader:
    """Makes layers of blocks."""

    def __init__(self, root: Path, manifest: Manifest, kv: KVCache, device: torch.device) -> None:
        self._root, self._manifest = root, manifest
        self._kv, self._device = kv, device

    def layer(self, saved: SavedLayer) -> LayerSnapshot:
        k, v = self._keys_and_values(saved)
        placement = self._kv.means.method.seal(saved.layer_idx, ())
        if self._kv.means.audits and placement.drops and not saved.shadows:
            raise OtherContextError(
                f"saved context '{self._root}' has not what its method dropped, at which the audit "
                "looks; open it with audit_every=0"
            )
        extents, start = [], saved.num_first
        for extent in saved.extents:
            keys = k[:, start : start + extent.length]
            found = self._extent(extent, saved.layer_idx, placement, keys)
            extents.append(replace(found, moments=self._moments(extent, keys)))
            start += extent.length
        kept = None
        if saved.kept is not None:
            tensors, meta = mapped(_check(self._root, self._manifest, saved.kept))
            kept = entries_of(tensors, json.loads(meta["kept"]), self._device)
        own = saved.length, saved.num_first
        return LayerSnapshot(k, v, *own, extents=extents, kept=kept, shadows=saved.shadows)

    def window(self, saved: SavedWindow, layer: SlidingLayer) -> tuple[Tensor, Tensor]:
        """k, v [Hkv, N, D] of a sliding window."""
        tensors, _ = mapped(_check(self._root, self._manifest, saved.kv))
        k, v, dtype = tensors["k"], tensors["v"], getattr(torch, self._manifest.dtype)
        if (saved.length, saved.window) != (self._manifest.num_tokens, layer.sliding_window):
            raise ValueError(
                f"the window of layer {saved.layer_idx} is another one than the model's"
            )
        if k.shape != v.shape or k.shape[1] != saved.num_entries or {k.dtype, v.dtype} != {dtype}:
            raise ValueError(f"the window of layer {saved.layer_idx} has not what it should")
        return k, v

    def states(self, saved: SavedState, layer: Any) -> dict[str, Tensor]:
        """Tensors of a layer that is transformers' own, by name."""
        tensors, _ = mapped(_check(self._root, self._manifest, saved.states))
        manifest = self._manifest
        check_tensors(layer, tensors, manifest.num_tokens, getattr(torch, manifest.dtype))
        return tensors

    def _keys_and_values(self, saved: SavedLayer) -> tuple[Tensor, Tensor]:
        tensors, _ = mapped(self._manifest.path_of(self._root, saved.kv))
        dtype = getattr(torch, self._manifest.dtype)
        if saved.int8 is not None:
            for name in ("k", "v"):
                tensors[name] = unrounded(tensors[name], tensors[f"{name}_scales"], dtype)
        shape = self._kv.layers[saved.layer_idx].shape
        if (saved.num_kv_heads, saved.head_dim) != (shape.num_kv_heads, shape.head_dim):
            raise ValueError(
                f"layer {saved.layer_idx} is said to have {saved.num_kv_heads} KV heads of "
                f"{saved.head_dim} channels, the model's has {shape.num_kv_heads} of "
                f"{shape.head_dim}"
            )
        expected = (shape.num_kv_heads, saved.num_entries, shape.head_dim)
        for name in ("k", "v"):
            if tensors[name].shape != expected or tensors[name].dtype != dtype:
                raise ValueError(
                    f"{name} of layer {saved.layer_idx} must be {list(expected)} {dtype}, got "
                    f"{list(tensors[name].shape)} {tensors[name].dtype}"
                )
        cold = sum(extent.length for extent in saved.extents)
        if not saved.num_first + cold <= saved.num_entries <= saved.length:
            raise ValueError(f"layer {saved.layer_idx} counts its entries wrongly")
        return tensors["k"], tensors["v"]

    def _extent(
        self, saved: SavedExtent, layer_idx: int, placement: Placement, keys: Tensor
    ) -> ExtentSnapshot:
        if saved.index is None:
            return ExtentSnapshot(saved.length, None, None)
        kind = None if placement.index is None else type(placement.index())
        if kind is None or not issubclass(kind, SavedIndex):
            raise ValueError(f"the method of layer {layer_idx} has no index that could be read")
        index = kind.load(self._manifest.path_of(self._root, saved.index), keys)
        aging = None if saved.samples is None else self._aging(saved.samples, layer_idx)
        return ExtentSnapshot(saved.length, index, aging)

    def _moments(self, extent: SavedExtent, keys: Tensor) -> Tail | None:
        """Of an extent's keys [Hkv, n, D]; copied into memory."""
        if (saved := extent.moments) is None:
            return None
        tensors, _ = mapped(_check(self._root, self._manifest, saved.block))
        heads, _, dim = keys.shape
        found = {name: tensor.clone() for name, tensor in tensors.items()}
        if "shares" not in found:  # before version 5 all entries were one cluster
            found |= {name: found[name][:, None] for name in ("keys", "values")}
            found["shares"] = torch.ones(heads, 1)
        sizes = sizes_of_moments(heads, found["shares"].shape[-1], dim)
        for name, size in sizes.items():
            tensor = found[name]
            if tensor.shape != size or tensor.dtype != torch.float32:
                raise ValueError(f"moments '{name}' in block '{saved.block}' have another size")
        if saved.num_entries > extent.length:
            raise ValueError(f"block '{saved.block}' is of more entries than there are")
        return Tail(saved.num_entries, **{name: found[name] for name in sizes})

    def _aging(self, saved: SavedSamples, layer_idx: int) -> IndexRefresh:
        tensors, _ = mapped(self._manifest.path_of(self._root, saved.block))
        rotary = self._kv.layers[layer_idx].rotary
        positions = tensors.get("positions")
        samples = Samples(tensors["queries"], positions, rotary, saved.first, saved.horizon)
        return IndexRefresh(samples, saved.num_keys, saved.prompt_keys)


@dataclass(frozen=True, slots=True)
class OpenFiles:
    """The blocks of a saved context that are mapped into memory.

    A page of a file that was cut is no memory any more, and whoever reads it is killed by SIGBUS.
    So their sizes are looked at before each forward. What is cut in the middle of one is not seen.

    files: path, inode and size of each when it was opened.
    """

    root: Path
    files: tuple[tuple[Path, int, int], ...]

    @classmethod
    def of(cls, root: Path, manifest: Manifest) -> OpenFiles:
        """Blocks of keys and values.

        Raises:
            FileFormatError, ReadError: one is not as the manifest says.
        """
        blocks = [layer.kv for layer in manifest.layers] + [one.kv for one in manifest.windows]
        paths = [manifest.path_of(root, block) for block in blocks]
        states = [path.stat() for path in paths]
        files = zip(paths, states, strict=True)
        return cls(root, tuple((path, state.st_ino, state.st_size) for path, state in files))

    def check(self) -> None:
        """Raises FileFormatError where one was cut; one that was replaced or removed stays whole
        for whoever has it open.
        """
        for path, inode, size in self.files:
            try:
                now = path.stat()
            except OSError:
                continue
            if now.st_ino == inode and now.st_size < size:
                raise FileFormatError(
                    f"saved context '{self.root}' was cut while it was open: block '{path.name}' "
                    f"must have {size} bytes, got {now.st_size}; make the context again"
                )
