"""Writing a context: layer by layer, the manifest last."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from statistics import fmean
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hybrid_kv.errors import ConfigError
from hybrid_kv.index._base import SavedIndex
from hybrid_kv.models.cache_layers import HybridLayer, SlidingLayer
from hybrid_kv.models.hf_cache import TieredCache
from hybrid_kv.plugins import Index
from hybrid_kv.runtime.snapshot import ExtentSnapshot, LayerSnapshot
from hybrid_kv.saved.file_blocks import (
    BlockWriter,
    Compression,
    entries_tensors,
    relative_error,
    rounded,
    unrounded,
)
from hybrid_kv.saved.folders import replacing
from hybrid_kv.saved.identity import ids_hash, model_identity, name_of, tokenizer_identity
from hybrid_kv.saved.manifest import (
    MANIFEST,
    AnyLayer,
    Manifest,
    SavedAudit,
    SavedExtent,
    SavedHead,
    SavedLayer,
    SavedMoments,
    SavedRounding,
    SavedSamples,
    SavedState,
    SavedWindow,
    write_manifest,
)
from hybrid_kv.saved.own_layers import is_own, tensors_of
from hybrid_kv.store.live_index import IndexRefresh
from hybrid_kv.types import Needs


class Provenance(Protocol):
    """Provenance of a context; source: where the model was loaded from, None if unknown."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None
    source: str | None


@torch.no_grad()
def save_context(
    path: str | Path,
    cache: TieredCache,
    ids: Tensor,
    messages: Sequence[Any] | None,
    maker: Provenance,
    *,
    prefill_s: float | None = None,
    compress: Compression | None = None,
) -> None:
    """Writes what a cache of one row holds.

    Args:
        path: a new folder, or a saved context, which is replaced.
        ids: [1, tokens], of which the cache holds all.
        messages: JSON-ready, what the ids were rendered from; None for raw text.
        prefill_s: what computing them took.
        compress: "int8" for keys and values in 8 bits.

    Raises:
        ConfigError: something else lies there, or something here has no form in a file.
        WriteError: it cannot be written; what was there before still is.
        FileFormatError: what it was opened from was cut.
    """
    kv = cache.kv
    check_layers(cache)
    if kv.check_source is not None:
        kv.check_source()
    for layer_idx in kv.layers:
        kv.layers.seal_if_open(layer_idx)
    with replacing(path) as (root, folder):
        writer = BlockWriter(root / folder)
        layers = [
            write_layer(writer, cache, number, compress) for number in range(len(cache.layers))
        ]
        write_rest(root, writer, cache, ids, messages, maker, layers, prefill_s)


def write_rest(
    root: Path,
    writer: BlockWriter,
    cache: TieredCache,
    ids: Tensor,
    messages: Sequence[Any] | None,
    maker: Provenance,
    layers: Sequence[AnyLayer],
    prefill_s: float | None,
) -> None:
    """Writes what a context has beside its layers, and the manifest of both.

    Raises:
        OSError: it cannot be written.
    """
    told: str | None = None
    if messages is not None:
        told = writer.raw("messages.json", json.dumps(messages).encode())
    is_rounded = any(isinstance(layer, SavedLayer) and layer.int8 for layer in layers)
    manifest = {
        "package": version("hybrid-kv"),
        "folder": writer.folder.name,
        "num_tokens": ids.shape[1],
        "ids": writer.tensors("tokens.safetensors", {"ids": ids[0].int()}),
        "ids_sha256": ids_hash(ids),
        "messages": told,
        "source": maker.source,
        "model": model_identity(maker.model),
        "tokenizer": tokenizer_identity(maker.tokenizer),
        "config": cache.kv.config.flat(),
        "dtype": name_of(maker.model.dtype),
        "page_size": cache.kv.config.page_size,
        "prefill_s": prefill_s,
        "audit": _audited(cache),
        "inexact_from": 0 if is_rounded else cache.state.inexact_from,
        "layers": [layer for layer in layers if isinstance(layer, SavedLayer)],
        "windows": [layer for layer in layers if isinstance(layer, SavedWindow)],
        "states": [layer for layer in layers if isinstance(layer, SavedState)],
        "blocks": writer.blocks,
    }
    write_manifest(root / MANIFEST, Manifest.model_validate(manifest))


def _audited(cache: TieredCache) -> SavedAudit | None:
    """Findings on this cache's misses; None where nobody looked."""
    auditor = cache.kv.auditor
    if auditor is None or not auditor.audit.findings:
        return None
    found, recall = auditor.audit.findings, auditor.audit.recall()
    return SavedAudit(
        looks=len(found),
        recall=None if recall is None else recall.mean,
        missed_mass=fmean(one.missed_mass for one in found),
        missed_by_index=fmean(one.missed_by_index for one in found),
        output_error=fmean(one.output_error for one in found),
        mass_error=fmean(one.mass_error for one in found),
    )


def check_layers(cache: TieredCache) -> None:
    """Raises ConfigError where a layer has state that no file holds."""
    for number, layer in enumerate(cache.layers):
        if not isinstance(layer, HybridLayer | SlidingLayer) and not is_own(layer):
            raise ConfigError(
                f"layer {number} must be one of full attention, of a sliding window, of linear "
                f"attention or of both to be saved, got a {type(layer).__name__}, whose state the "
                "file format does not hold; keep the context in memory"
            )


def write_layer(
    writer: BlockWriter, cache: TieredCache, layer_idx: int, compress: Compression | None
) -> AnyLayer:
    """Writes what a layer of a cache of one row holds.

    Raises:
        ConfigError: its index has no form in a file.
        OSError: it cannot be written.
    """
    layer = cache.layers[layer_idx]
    if isinstance(layer, SlidingLayer):
        return _write_window(writer, layer_idx, layer)
    if is_own(layer):
        block = writer.tensors(f"layer-{layer_idx:04d}-states.safetensors", tensors_of(layer))
        return SavedState(layer_idx=layer_idx, states=block)
    return _write_held(writer, layer_idx, LayerSnapshot.of(cache.kv.stores[layer_idx]), compress)


def _write_window(writer: BlockWriter, layer_idx: int, layer: SlidingLayer) -> SavedWindow:
    """Writes a window, which is small, as it is."""
    k, v = layer.keys, layer.values
    assert k is not None
    assert v is not None
    first = max(0, k.shape[2] - layer.sliding_window + 1)
    tensors = {"k": k[0, :, first:], "v": v[0, :, first:]}
    return SavedWindow(
        layer_idx=layer_idx,
        kv=writer.tensors(f"layer-{layer_idx:04d}-window.safetensors", tensors),
        length=layer.cumulative_length,
        window=layer.sliding_window,
    )


def _write_held(
    writer: BlockWriter, layer_idx: int, held: LayerSnapshot, compress: Compression | None
) -> SavedLayer:
    """Writes what a tiered layer holds.

    Raises:
        ConfigError: its index has no form in a file.
        OSError: it cannot be written.
    """
    name, kept, loss = f"layer-{layer_idx:04d}", None, None
    tensors = {"k": held.k, "v": held.v}
    if compress is not None:
        held, tensors, loss = _rounded(held)
    if held.kept is not None:
        own, meta = entries_tensors(held.kept)
        kept = writer.tensors(f"{name}-kept.safetensors", own, {"kept": json.dumps(meta)})
    extents, start = [], held.num_first
    for number, extent in enumerate(held.extents):
        keys = None if loss is None else held.k[:, start : start + extent.length]
        extents.append(_write_extent(writer, f"{name}-extent-{number}", extent, keys))
        start += extent.length
    return SavedLayer(
        layer_idx=layer_idx,
        num_kv_heads=held.k.shape[0],
        head_dim=held.k.shape[2],
        kv=writer.tensors(f"{name}.safetensors", tensors),
        num_entries=held.k.shape[1],
        length=held.length,
        num_first=held.num_first,
        extents=extents,
        kept=kept,
        shadows=held.shadows,
        int8=loss,
    )


def _rounded(held: LayerSnapshot) -> tuple[LayerSnapshot, dict[str, Tensor], SavedRounding]:
    """A layer as it comes back, what is written of it, and what that has lost."""
    (k, k_scales), (v, v_scales) = rounded(held.k), rounded(held.v)
    back = replace(
        held, k=unrounded(k, k_scales, held.k.dtype), v=unrounded(v, v_scales, held.v.dtype)
    )
    loss = SavedRounding(
        k_error=relative_error(held.k, back.k), v_error=relative_error(held.v, back.v)
    )
    return back, {"k": k, "k_scales": k_scales, "v": v, "v_scales": v_scales}, loss


def _write_extent(
    writer: BlockWriter, name: str, extent: ExtentSnapshot, keys: Tensor | None
) -> SavedExtent:
    """Writes what finds an extent; `keys` are what comes back of its own where that differs."""
    index, saved, heads = extent.index, None, list[SavedHead]()
    if isinstance(index, SavedIndex):
        heads = [_head(told) for told in index.describe()]
        index = index if keys is None else index.over(keys)
        index.save(writer.folder / f"{name}.index")
        saved = writer.note(f"{name}.index")
    elif index is not None:
        _check_needs(index)
    samples = None
    if saved is not None and extent.aging is not None:
        samples = _write_samples(writer, f"{name}-samples.safetensors", extent.aging)
    moments = None
    if (known := extent.moments) is not None:
        block = writer.tensors(f"{name}-moments.safetensors", known.tensors())
        moments = SavedMoments(block=block, num_entries=known.count)
    return SavedExtent(
        length=extent.length, index=saved, heads=heads, samples=samples, moments=moments
    )


def _head(told: dict[str, Any]) -> SavedHead:
    """Of what an index says of a head; one that is scanned was not checked."""
    checked = told if told["serves"] != "flat" else {}
    return SavedHead(serves=told["serves"], recall=checked.get("recall"), mass=checked.get("mass"))


def _check_needs(index: Index) -> None:
    if type(index).needs(index.params) != Needs():
        raise ConfigError(
            f"an index to be saved must have a file format or be built of keys alone, got a "
            f"{type(index).__name__}, which learns from the prompt's queries; choose one of kind "
            "auto, sketch, graph or blocks"
        )


def _write_samples(writer: BlockWriter, block: str, aging: IndexRefresh) -> SavedSamples:
    samples = aging.prompt
    tensors = {"queries": samples.queries}
    if samples.positions is not None:
        tensors["positions"] = samples.positions
    return SavedSamples(
        block=writer.tensors(block, tensors),
        first=samples.first,
        horizon=samples.horizon,
        prompt_keys=aging.prompt_keys,
        num_keys=aging.num_keys,
    )
