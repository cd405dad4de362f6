"""Bytes that each method holds of one prompt, as the process sees it, beside the arithmetic.

    python benchmarks/method_memory/run.py --context 16k --share 0.1

Every method gets the parameters of one budget (`Method.at_budget`, a share of the context) and the
same random keys and values as a complete prompt, in a process of its own. Measured is by how much
the resident set has grown when all is sealed, offloaded and indexed, and what was let go is handed
back to the system; counted is what the method keeps, and the pages beside it. Stdout is one JSON
document.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from hybrid_kv.config import HybridConfig, parse_count  # noqa: E402
from hybrid_kv.methods.codec import Codec  # noqa: E402
from hybrid_kv.methods.evicting import Evicting  # noqa: E402
from hybrid_kv.methods.h2o import Following  # noqa: E402
from hybrid_kv.methods.low_bits import Kivi  # noqa: E402
from hybrid_kv.methods.low_rank import ThinK  # noqa: E402
from hybrid_kv.methods.retrieval import RetrievalAttention  # noqa: E402
from hybrid_kv.methods.whole_heads import DuoAttention  # noqa: E402
from hybrid_kv.methods.windows import TidalDecode  # noqa: E402
from hybrid_kv.ops.host_memory import HUGE_PAGE_BYTES  # noqa: E402
from hybrid_kv.plugins import METHODS, Method  # noqa: E402
from hybrid_kv.report.files import compact  # noqa: E402
from hybrid_kv.rotary import Rotary  # noqa: E402
from hybrid_kv.runtime import KVCache  # noqa: E402
from hybrid_kv.types import Demotion, Evidence, LayerShape, ModelInfo  # noqa: E402

GROUP = 2
PAGE = 16
_STILL = Rotary(reason="keys are random", still=True)
POSITION_BYTES, SCORE_BYTES, GROUP_BYTES = 8, 4, 4
OFFLOAD: dict[str, Any] = {"demote": "offload", "cold": {"index": "flat"}}


def configured(name: str, tokens: int, budget: int, **settings: Any) -> HybridConfig:
    """A method's configuration at a budget of tokens."""
    config = HybridConfig(method=name, page_size=PAGE, index_build="wait", **settings)
    params = config.build().at_budget(config.params, budget, context_tokens=tokens, page_size=PAGE)
    return HybridConfig(method=name, page_size=PAGE, index_build="wait", params=params)


def arithmetic(
    config: HybridConfig, shape: LayerShape, layers: int, tokens: int, itemsize: int
) -> int | None:
    """Bytes of one layer by what the method says of itself; None for one that is not known here."""
    method: Method = config.build()
    method.open(ModelInfo((shape,), (_STILL,)))
    token = 2 * shape.num_kv_heads * shape.head_dim * itemsize
    index = tokens * method.index_bytes_per_token(shape, tokens)
    if isinstance(method, Evicting):
        params = method.params
        around = params.sink_tokens + params.window_tokens
        own = shape.num_kv_heads * POSITION_BYTES
        if isinstance(method, Following):
            own += shape.num_kv_heads * SCORE_BYTES
        kept = around * token + (params.budget_tokens - around) * (token + own)
        cold = cold_bytes(shape, tokens - around, itemsize)
        return kept + (index + cold if params.demote == "offload" else 0)
    if isinstance(method, DuoAttention):
        around = method.params.sink_tokens + method.params.window_tokens
        far = (tokens - around) * (token + shape.num_kv_heads * POSITION_BYTES)
        heads = layers * shape.num_kv_heads  # of which whole ones are kept
        return around * token + round(method.params.retrieval_ratio * heads) * far // heads
    if isinstance(method, Codec):
        around = method.params.sink_tokens + method.params.window_tokens
        coded = coded_bytes(method, shape.head_dim, itemsize) + POSITION_BYTES
        return around * token + round((tokens - around) * shape.num_kv_heads * coded)
    if isinstance(method, RetrievalAttention | TidalDecode):
        around = method.params.sink_tokens + method.params.window_tokens
        resident = 2 * on_huge_pages(around * token // 2)
        return resident + cold_bytes(shape, tokens - around, itemsize) + index
    place = method.seal(shape.layer_idx, [])
    if place.rest is Demotion.KEEP:
        digests = token // PAGE if place.digests else 0
        return tokens * (token + digests)
    if place.rest is Demotion.DROP:
        return 2 * on_huge_pages((place.sink_tokens + place.window_tokens) * token // 2)
    return None


def on_huge_pages(num_bytes: int) -> int:
    """What an array of K or V takes on a host: large ones lie on huge pages, all of the last."""
    large = num_bytes >= HUGE_PAGE_BYTES
    return -(-num_bytes // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES if large else num_bytes


def coded_bytes(method: Codec, dim: int, itemsize: int) -> float:
    """K and V of an entry of one head."""
    params = method.params
    if isinstance(method, ThinK):
        return itemsize * (max(1, int(params.channel_ratio * dim)) + dim)
    assert isinstance(method, Kivi)
    codes = 2 * dim * params.bits / 8
    scales = 2 * itemsize * (-(-dim // params.group_size) + dim / params.group_size)
    return codes + scales + GROUP_BYTES  # values' in the entry, keys' shared by group_size entries


def cold_bytes(shape: LayerShape, tokens: int, itemsize: int) -> int:
    """What K and V of a cold tier take: each head has room for as many again, on huge pages, of
    which those are there that hold a key.
    """
    head = tokens * shape.head_dim * itemsize
    touched: set[int] = set()
    for start in range(0, 2 * head * shape.num_kv_heads, 2 * head):
        touched |= set(range(start // HUGE_PAGE_BYTES, -(-(start + head) // HUGE_PAGE_BYTES)))
    return 2 * HUGE_PAGE_BYTES * len(touched)


def resident_bytes() -> int:
    """Of this process, once what it has let go is handed back; without pages of files, which is
    code that is first run while the method is measured.
    """
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    held = psutil.Process().memory_info()
    return int(held.rss - held.shared)


def fill(config: HybridConfig, info: ModelInfo, k: Tensor, v: Tensor) -> KVCache:
    """A cache whose layers all hold k, v [1, Hkv, N, D] as their prompt."""
    cache = KVCache(info, config)
    tokens, needs = k.shape[2], cache.means.method.needs
    for shape in info.layers:
        draw = torch.Generator().manual_seed(shape.layer_idx)
        count = max(needs.sampled_queries, needs.last_queries, 1)
        q = torch.randn(shape.num_q_heads, count, shape.head_dim, generator=draw)
        sums = torch.rand(shape.num_q_heads, tokens, generator=draw)
        seen = Evidence(
            tokens,
            q[:, : needs.sampled_queries] if needs.sampled_queries else None,
            q[:, : needs.last_queries] if needs.last_queries else None,
            torch.arange(needs.sampled_queries) * (tokens // max(1, needs.sampled_queries)),
            sums if needs.column_sums else None,
            scale=shape.head_dim**-0.5,
        )
        cache.load(shape.layer_idx, k, v, (seen,))
    return cache


def measure(name: str, options: argparse.Namespace, settings: dict[str, Any]) -> dict[str, Any]:
    """One method, in this process."""
    tokens, dtype = parse_count(options.context), getattr(torch, options.dtype)
    assert isinstance(tokens, int)
    shape = LayerShape(0, GROUP * options.kv_heads, options.kv_heads, options.head_dim)
    shapes = tuple(
        LayerShape(i, shape.num_q_heads, shape.num_kv_heads, shape.head_dim)
        for i in range(options.layers)
    )
    config = configured(name, tokens, round(options.share * tokens), **settings)
    torch.manual_seed(0)
    k, v = torch.randn(2, 1, shape.num_kv_heads, tokens, shape.head_dim, dtype=dtype)
    # As much once before, for libraries keep what they need for work of this size.
    fill(config, ModelInfo(shapes[:1], (_STILL,)), k, v).stores  # noqa: B018 (ends what is leaving)
    before = resident_bytes()
    cache = fill(config, ModelInfo(shapes, (_STILL,) * len(shapes)), k, v)
    stores = cache.stores
    grown = resident_bytes() - before
    kept = [row.kept for store in stores.values() for row in store.rows if row.kept is not None]
    expected = arithmetic(config, shape, options.layers, tokens, dtype.itemsize)
    return {
        "method": name,
        "settings": settings,
        "measured_bytes": grown,
        "expected_bytes": None if expected is None else expected * options.layers,
        "kept_bytes": sum(entries.nbytes for entries in kept),
        "cold_bytes": sum(s.cold.kv_bytes + s.cold.overhead_bytes for s in stores.values()),
        "full_bytes": 2 * k.nbytes * options.layers,
    }


def measured_apart(name: str, settings: dict[str, Any], arguments: list[str]) -> dict[str, Any]:
    """One method, in a process of its own."""
    command = [sys.executable, __file__, *arguments, "--only", name]
    run = subprocess.run(
        [*command, "--settings", json.dumps(settings)], stdout=subprocess.PIPE, check=True
    )
    row: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--context", default="16k")
    parser.add_argument("--share", type=float, default=0.1, help="of the context, as budget")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--kv-heads", type=int, default=4)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--methods", default=None, help="separated by commas; all of them")
    parser.add_argument("--only", default=None, help=argparse.SUPPRESS)
    parser.add_argument("--settings", type=json.loads, default={}, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.only:
        print(json.dumps(measure(options.only, options, options.settings)))
        return
    trained = {"locret"}  # whose heads no random tensors stand for
    every = [name for name in METHODS if name not in trained]
    names = options.methods.split(",") if options.methods else every
    rows = []
    for name in names:
        offloads = issubclass(METHODS[name].factory, Evicting)
        for settings in ({}, OFFLOAD) if offloads else ({},):
            rows.append(measured_apart(name, settings, sys.argv[1:]))
            print(_line(rows[-1]), file=sys.stderr, flush=True)
    print(compact({"benchmark": "method_memory", "settings": vars(options), "rows": rows}), end="")


def _line(row: dict[str, Any]) -> str:
    measured, expected = row["measured_bytes"], row["expected_bytes"]
    name = " ".join([row["method"], *map(str, row["settings"].values())][:2])
    said = "-" if expected is None else f"{expected / 2**20:8.2f}"
    off = "-" if expected is None else f"{measured / expected - 1:+.1%}"
    full = measured / row["full_bytes"]
    cold = row["cold_bytes"] / 2**20
    return (
        f"{name:<24} MiB {measured / 2**20:8.2f}  arithmetic {said} {off:>7}  of full {full:.1%}  "
        f"cold tier as it counts {cold:8.2f}"
    )


if __name__ == "__main__":
    main()
