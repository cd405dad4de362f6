"""Small GGUF files of random weights, written by the package gguf."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

LAYERS, HEADS, KV_HEADS, VOCAB = 2, 4, 2, 96

_SCALES: dict[str, tuple[int, ...]] = {
    **{"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "IQ4_NL": (0,), "Q3_K": (108,)},
}
"""Where a block has its numbers of 16 bits, of the kinds that the package does not pack."""


def width_of(kind: str) -> int:
    """Channels of a small model whose rows are whole blocks of a kind, and no even number of them
    where these are small.
    """
    return 256 if kind.endswith("_K") else 96


def packed(kind: str, shape: tuple[int, ...], rng: np.random.Generator) -> NDArray[np.uint8]:
    """Random weights in blocks, [..., bytes of a row]."""
    number = gguf.GGMLQuantizationType[kind]
    if kind not in _SCALES:
        return gguf.quantize(rng.standard_normal(shape, dtype=np.float32) / 4, number)
    values, size = gguf.GGML_QUANT_SIZES[number]
    blocks = rng.integers(0, 256, (*shape[:-1], shape[-1] // values, size), dtype=np.uint8)
    small = np.float16(2e-4 if kind in ("Q6_K", "Q3_K") else 1e-3)
    for at in _SCALES[kind]:
        blocks[..., at : at + 2] = np.frombuffer(small.tobytes(), np.uint8)
    return blocks.reshape(*shape[:-1], -1)


def write(
    path: Path,
    architecture: str = "llama",
    kinds: Iterable[str] = ("Q8_0",),
    *,
    head: str | None = None,
    heads: tuple[int, int] = (HEADS, KV_HEADS),
    more: Callable[[gguf.GGUFWriter], Any] | None = None,
) -> Path:
    """A tiny model of Llama's layout.

    Args:
        kinds: of its matrices, in turn.
        head: kind of an output projection of its own; None for the embeddings.
        heads: numbers of query heads and KV heads.
        more: writes further keys.
    """
    kinds = list(kinds)
    width, (queries, keys) = max(map(width_of, kinds)), heads
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(512)
    writer.add_embedding_length(width)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(2 * width)
    writer.add_head_count(queries)
    writer.add_head_count_kv(keys)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(1e4)
    writer.add_vocab_size(VOCAB)
    if more is not None:
        more(writer)
    rng, written = np.random.default_rng(0), 0

    def norm(name: str) -> None:
        writer.add_tensor(name, 1 + rng.standard_normal(width, dtype=np.float32) / 10)

    def matrix(name: str, *shape: int, kind: str | None = None) -> None:
        nonlocal written
        kind, written = kind or kinds[written % len(kinds)], written + 1
        number = gguf.GGMLQuantizationType[kind]
        writer.add_tensor(name, packed(kind, shape, rng), raw_dtype=number)

    matrix("token_embd.weight", VOCAB, width)
    norm("output_norm.weight")
    if head is not None:
        matrix("output.weight", VOCAB, width, kind=head)
    for layer in range(LAYERS):
        norm(f"blk.{layer}.attn_norm.weight")
        norm(f"blk.{layer}.ffn_norm.weight")
        matrix(f"blk.{layer}.attn_q.weight", width, width)
        matrix(f"blk.{layer}.attn_k.weight", width * keys // queries, width)
        matrix(f"blk.{layer}.attn_v.weight", width * keys // queries, width)
        matrix(f"blk.{layer}.attn_output.weight", width, width)
        matrix(f"blk.{layer}.ffn_gate.weight", 2 * width, width)
        matrix(f"blk.{layer}.ffn_up.weight", 2 * width, width)
        matrix(f"blk.{layer}.ffn_down.weight", width, 2 * width)
    finish(writer)
    return path


def finish(writer: gguf.GGUFWriter) -> None:
    """Writes all that a writer was given."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
