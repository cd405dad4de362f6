"""Peak memory of a prefill beside weights and KV, in units of one hidden-state tensor.

    python benchmarks/prefill_memory/run.py --context 2048 --layers 4

Runs one prompt through a random Llama: plainly, in transformers' own chunks, and layer-major in
several chunk sizes. Every storage that an operation makes is followed from its first to its last
use, so the figure holds for any device; scratch inside a kernel is not seen. Stdout is one JSON
document.
"""

from __future__ import annotations

import argparse
import sys
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig, PreTrainedModel

import hybrid_kv as hkv
from hybrid_kv.config import parse_count
from hybrid_kv.models.cache_state import passing
from hybrid_kv.report.files import compact


class LiveBytes(TorchDispatchMode):
    """Follows the storages that operations make while it is active."""

    def __init__(self) -> None:
        super().__init__()
        self._live: dict[int, weakref.ref[Any]] = {}
        self._events: list[tuple[int, int]] = []  # (number of the storage, bytes gained or lost)
        self._count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        known = {tensor.untyped_storage()._cdata for tensor in inputs}  # views are not made anew
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.untyped_storage()._cdata not in known:
                self._follow(leaf.untyped_storage())
        return result

    def _follow(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._live:
            return
        number, size = self._count, storage.nbytes()
        self._count += 1
        self._events.append((number, size))

        def gone(_: Any) -> None:
            del self._live[key]
            self._events.append((number, -size))

        self._live[key] = weakref.ref(storage, gone)
        storage.number_of_live_bytes = number  # type: ignore[attr-defined]

    def peak(self, without: Iterable[Tensor]) -> int:
        """The most bytes alive at once, not counting the storages of some tensors."""
        left_out = {
            getattr(tensor.untyped_storage(), "number_of_live_bytes", None) for tensor in without
        }
        now = most = 0
        for number, size in self._events:
            if number not in left_out:
                now += size
                most = max(most, now)
        return most


def build(layers: int, hidden: int, dtype: torch.dtype = torch.bfloat16) -> PreTrainedModel:
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=hidden,
        intermediate_size=7 * hidden // 2,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 32,
        num_key_value_heads=hidden // 128,
        max_position_embeddings=2**20,
    )
    return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def measured(forward: Callable[[], object], kv: Callable[[], Iterable[Tensor]]) -> int:
    with torch.inference_mode(), LiveBytes() as live:
        forward()
    return live.peak(kv())


def plain_peak(model: PreTrainedModel, ids: Tensor, chunk: int | None = None) -> int:
    """Bytes of a forward pass of transformers' own, whole or in chunks of tokens."""
    cache = DynamicCache(config=model.config)

    def forward() -> None:
        for part in ids.split(chunk or ids.shape[1], 1):
            model(part, **passing(cache), logits_to_keep=1)

    return measured(
        forward, lambda: [t for layer in cache.layers for t in (layer.keys, layer.values)]
    )


def layer_major_peak(model: PreTrainedModel, ids: Tensor, chunk: int) -> int:
    """Bytes of a layer-major prefill in chunks of tokens."""
    with hkv.attach(model, hkv.HybridConfig(method="full", prefill_chunk_tokens=chunk)) as runtime:
        cache = runtime.cache()
        cache.kv.means.reserve(ids.shape[1])

        def kv() -> list[Tensor]:
            pools = [layer.resident.pool for layer in cache.kv.stores.values()]
            return [t for pool in pools for t in (pool.k, pool.v, pool.positions)]

        return measured(lambda: model(ids, **passing(cache), logits_to_keep=1), kv)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--context", type=parse_count, default=2048)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=512)
    options = parser.parse_args()
    torch.manual_seed(0)
    model, tokens = build(options.layers, options.hidden), options.context
    ids = torch.randint(0, 512, (1, tokens))
    unit = tokens * options.hidden * model.dtype.itemsize
    rows = {"plain": plain_peak(model, ids)}
    for parts in (4, 8, 16, 32):
        rows[f"layer_major_{parts}"] = layer_major_peak(model, ids, tokens // parts)
    for parts in (4, 8):
        rows[f"token_major_{parts}"] = plain_peak(model, ids, tokens // parts)
    peaks = {name: round(found / unit, 2) for name, found in rows.items()}
    for name, peak in peaks.items():
        print(f"{name:>16} {peak:6.2f} hidden-state tensors", file=sys.stderr)
    report = {
        "benchmark": "prefill_memory",
        "context_tokens": tokens,
        "layers": options.layers,
        "hidden_size": options.hidden,
        "hidden_state_bytes": unit,
        "peak_in_hidden_states": peaks,
        "torch": torch.__version__,
    }
    print(compact(report), end="")


if __name__ == "__main__":
    main()
