"""What hot pages, fetching and page digests take and lose: one layer of a Llama-3-8B's shape.

    HYBRID_KV_THREADS=1 OMP_NUM_THREADS=1 python benchmarks/unpaid/layer.py 32768

Process CPU time with one thread, all settings in turns step by step; errors against full attention
in float64 over the same keys. The stand-ins are indexes of caches of their own, never replaced.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
from pathlib import Path
from time import process_time
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from pydantic import Field

from hybrid_kv.config import HybridConfig
from hybrid_kv.eval.filling import FilledKV, SyntheticContext
from hybrid_kv.index.device_pages import DevicePages
from hybrid_kv.index.flat import FlatIndex
from hybrid_kv.ops import Ops
from hybrid_kv.plugins import INDEXES
from hybrid_kv.types import LayerShape, ModelInfo, Needs

SHAPE = LayerShape(0, 32, 8, 128)
DTYPE = torch.bfloat16
WARM = 48


@INDEXES.register("digests")
class Digests(DevicePages):
    """The stand-in of page digests, as an index."""

    class Params(FlatIndex.Params):
        """page_size: tokens per page."""

        page_size: int = Field(default=16)

    def __init__(self, params: Any) -> None:
        super().__init__(Ops(), params.page_size, torch.device("cpu"))


def settings(hot: int) -> dict[str, dict[str, Any]]:
    # A scan is filled at once, and what is measured hangs on no kind.
    sketch = {"kind": "flat", "precision": "int8"}

    def hybrid(cold: Any = None, **own: Any) -> dict[str, Any]:
        return {"method": "hybrid", "cold": {"index": sketch, **(cold or {})}, **own}

    def retrieval(**index: Any) -> dict[str, Any]:
        return {"method": "retrieval_attention", "cold": {"index": index}}

    return {
        "hybrid": hybrid(),
        f"hot {hot}": hybrid(hot_tokens=hot),
        f"spare {hot}": hybrid(spare_tokens=hot),
        "op by op": hybrid(),
        "fetch": hybrid({"attend": "fetch"}),
        "scan (stand-in)": retrieval(kind="flat", precision="int8"),
        "pages (stand-in)": retrieval(kind="digests"),
    }


def main() -> None:
    tokens, steps = int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 60
    torch.set_num_threads(1)
    info = ModelInfo((SHAPE,))
    context = SyntheticContext(info, tokens, max_steps=steps + WARM, made_heads=1, keep=True)
    k, v = context.kv(0, DTYPE)
    caches = {}
    for name, chosen in settings(min(4096, tokens // 16)).items():
        config = HybridConfig(index_build="wait", **chosen)
        cache = FilledKV(info, config, context)
        cache.reserve(tokens + steps + WARM)
        needs = cache.method.needs
        evidence = (context.evidence(0, needs, DTYPE),) if needs != Needs() else ()
        begin = process_time()
        cache.load(0, k, v, evidence)
        print(f"{name}: filled in {process_time() - begin:.1f} s", file=sys.stderr, flush=True)
        caches[name] = cache
    q = torch.ones(1, 32, 1, 128, dtype=DTYPE)
    generator = torch.Generator().manual_seed(5)
    times: dict[str, list[float]] = {name: [] for name in caches}
    errors: dict[str, list[float]] = {name: [] for name in caches}
    masses: dict[str, list[float]] = {name: [] for name in caches}
    seen: dict[str, dict[str, int]] = {}
    room = torch.zeros(8, steps + WARM, 128)
    keys, values = torch.cat([k[0].float(), room], 1), torch.cat([v[0].float(), room], 1)
    for step in range(steps + WARM):
        new = torch.randn(2, 1, 8, 1, 128, generator=generator).to(DTYPE)
        keys[:, tokens + step], values[:, tokens + step] = new[0, 0, :, 0], new[1, 0, :, 0]
        exact, total = None, None
        if step % 5 == 0 and step >= WARM:
            asked = context.query(0, step)[0, :, 0].to(DTYPE).float().view(8, 4, 128)
            stop = tokens + step + 1
            logits = (asked @ keys[:, :stop].transpose(1, 2)) * 128**-0.5
            total = logits.logsumexp(-1)
            exact = logits.softmax(-1) @ values[:, :stop]
        if step == WARM:
            seen = {name: vars_of(cache) for name, cache in caches.items()}
        order = list(caches)
        order = order[step % len(order) :] + order[: step % len(order)]
        for name in order:
            os.environ["HYBRID_KV_ONE_CALL"] = "0" if name == "op by op" else "1"
            with torch.inference_mode():
                begin = process_time()
                part = caches[name].attend(0, q, (new[0], new[1]), None, scale=128**-0.5)
                took = process_time() - begin
            if step >= WARM:
                times[name].append(took)
            if exact is not None:
                out = part.out[0, :, 0].float().view(8, 4, 128)
                lse = part.lse[0, :, 0].view(8, 4)
                errors[name].append(float(((out - exact).norm(dim=-1) / exact.norm(dim=-1)).mean()))
                masses[name].append(float((lse - total).exp().mean()))
    base = times["hybrid"]
    rows = []
    for name, cache in caches.items():
        work = {n: value - seen[name][n] for n, value in vars_of(cache).items()}
        ratios = [own / one for own, one in zip(times[name], base, strict=True)]
        row = {
            "name": name,
            "cpu_ms": 1e3 * statistics.median(times[name]),
            "ratio": statistics.median(ratios),
            "mean_ratio": sum(times[name]) / sum(base),
            "error": statistics.fmean(errors[name]),
            "mass": statistics.fmean(masses[name]),
            "attended": work["attended"] / work["steps"],
            **{n: work[n] / steps for n in ("cold_bytes", "search_bytes", "select_bytes",
                                            "resident_bytes", "fetched_bytes", "promoted_pages",
                                            "hot", "retrieved")},
        }
        rows.append(row)
        print(json.dumps(row), flush=True)
    print(json.dumps(rows))


def vars_of(cache: FilledKV) -> dict[str, int]:
    work = cache.work
    names = ("attended", "steps", "cold_bytes", "search_bytes", "select_bytes", "resident_bytes",
             "fetched_bytes", "promoted_pages", "hot", "retrieved")
    return {name: getattr(work, name) for name in names}


if __name__ == "__main__":
    main()
