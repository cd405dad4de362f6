"""Writes a GGUF file of a mixture of experts with random weights, for `whole.py` to run.

    python -m benchmarks.peers.mixture mixture.gguf --layers 4
    python -m benchmarks.peers.whole --gguf mixture.gguf --prompt 512 --sides llama.cpp hybrid full

Layers of the Qwen3-30B-A3B shape: 128 experts of which a token passes 8; matrices in Q4_K, in every
second layer values and the experts' last ones in Q6_K, as in a "Q4_K_M" file. 400 MB a layer.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter

HIDDEN, EXPERTS, CHOSEN, INNER, HEADS, KV_HEADS, HEAD_DIM = 2048, 128, 8, 768, 32, 4, 128
VOCAB = 4352
ARCHITECTURE = "qwen3moe"
KEYS = {
    **{"context_length": 40960, "embedding_length": HIDDEN, "feed_forward_length": 6144},
    **{"attention.head_count": HEADS, "attention.head_count_kv": KV_HEADS},
    **{"attention.key_length": HEAD_DIM, "attention.value_length": HEAD_DIM},
    **{"expert_count": EXPERTS, "expert_used_count": CHOSEN},
    **{"expert_feed_forward_length": INNER, "vocab_size": VOCAB},
}
MATRICES = {
    **{"attn_q": (HEADS * HEAD_DIM, HIDDEN), "attn_k": (KV_HEADS * HEAD_DIM, HIDDEN)},
    **{"attn_v": (KV_HEADS * HEAD_DIM, HIDDEN), "attn_output": (HIDDEN, HEADS * HEAD_DIM)},
    **{"ffn_gate_exps": (EXPERTS, INNER, HIDDEN), "ffn_up_exps": (EXPERTS, INNER, HIDDEN)},
    "ffn_down_exps": (EXPERTS, HIDDEN, INNER),
}
_SCALES = {"Q4_K": (0, 2), "Q6_K": (208,)}
"""Where a block has numbers of 16 bits."""


def write(path: Path, layers: int) -> None:
    """The file, with norms of ones."""
    writer, draw = GGUFWriter(str(path), ARCHITECTURE), np.random.default_rng(0)
    for key, value in {**KEYS, "block_count": layers}.items():
        writer.add_uint32(f"{ARCHITECTURE}.{key}", value)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(1e6)
    writer.add_tokenizer_model("none")

    def matrix(name: str, kind: str, *shape: int) -> None:
        number = GGMLQuantizationType[kind]
        values, size = GGML_QUANT_SIZES[number]
        blocks = draw.integers(0, 256, (*shape[:-1], shape[-1] // values, size), dtype=np.uint8)
        small = np.frombuffer(np.float16(5e-5 if kind == "Q6_K" else 2e-4).tobytes(), np.uint8)
        for place in _SCALES[kind]:
            blocks[..., place : place + 2] = small
        packed = blocks.reshape(*shape[:-1], -1)
        writer.add_tensor(f"{name}.weight", packed, raw_dtype=number)

    def ones(name: str, count: int) -> None:
        writer.add_tensor(f"{name}.weight", np.ones(count, dtype=np.float32))

    matrix("token_embd", "Q4_K", VOCAB, HIDDEN)
    matrix("output", "Q6_K", VOCAB, HIDDEN)
    ones("output_norm", HIDDEN)
    for layer in range(layers):
        at = f"blk.{layer}"
        for name, count in (("attn_norm", HIDDEN), ("ffn_norm", HIDDEN)):
            ones(f"{at}.{name}", count)
        for name in ("attn_q_norm", "attn_k_norm"):
            ones(f"{at}.{name}", HEAD_DIM)
        router = draw.standard_normal((EXPERTS, HIDDEN), dtype=np.float32) / HIDDEN**0.5
        writer.add_tensor(f"{at}.ffn_gate_inp.weight", router)
        for name, shape in MATRICES.items():
            is_better = layer % 2 == 0 and name in ("attn_v", "ffn_down_exps")
            matrix(f"{at}.{name}", "Q6_K" if is_better else "Q4_K", *shape)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path", type=Path)
    parser.add_argument("--layers", type=int, default=4)
    args = parser.parse_args()
    write(args.path, args.layers)


if __name__ == "__main__":
    main()
