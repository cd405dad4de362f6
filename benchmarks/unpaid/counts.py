"""What a decode step tells an emulated device with hot pages, fetching and page digests."""

from __future__ import annotations

import sys
import warnings
from collections import Counter
from concurrent.futures import Future
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch

import hybrid_kv as hkv
from hybrid_kv.models.cache_argument import passing
from hybrid_kv.runtime import builds
from tests.device.emulate import emulated
from tests.device.models import llama, tokens

CONTEXT, STEPS, AFTER = 300, 20, 12
NEAR = {"sink_tokens": 16, "window_tokens": 32, "index_build": "wait"}
HOST = {"select": "host", "top_k": 16, "index": {"kind": "sketch", "min_keys": 64}}


class Never:
    """Builds that do not end."""

    def here(self, work: Any) -> None:
        work()

    def beside(self, work: Any, held_bytes: int = 0) -> Future[None]:
        return Future()


def counted(config: hkv.HybridConfig, *, never: bool = False) -> dict[str, float]:
    with emulated() as machine:
        model = llama().to("cuda")
        with torch.inference_mode(), hkv.attach(model, config) as runtime:
            cache = runtime.cache()
            if never:
                cache.kv.means.builds.beside = Never().beside
            model(tokens(CONTEXT).cuda(), **passing(cache), use_cache=True, logits_to_keep=1)
            found = []
            for number in range(STEPS):
                ids = tokens(1, 2 + number).cuda()
                before = machine.counts.copy()
                model(ids, **passing(cache), use_cache=True, logits_to_keep=1)
                found.append(machine.counts.since(before))
            work = cache.work
    late = found[AFTER:]
    mean = {
        name: sum(getattr(one, name) for one in late) / len(late)
        for name in ("launches", "copies", "num_waits", "to_device", "to_host")
    }
    quiet = min(late, key=lambda one: (one.launches + one.copies, one.num_waits))
    waits: Counter[str] = Counter()
    for one in late:
        waits += one.waits
    return {"quiet": (quiet.launches, quiet.copies, quiet.num_waits, quiet.to_device, quiet.to_host),
            **mean, "hot": work.hot, "retrieved": work.retrieved, "promoted": work.promoted_pages,
            "fetched": work.fetched_bytes, "scored": work.scored, "waits": waits.most_common(8)}


def main() -> None:
    warnings.simplefilter("ignore")
    graph = {"kind": "graph", "min_keys": 64}
    cases = {
        "hybrid, host": ({"method": "hybrid", "cold": HOST}, False),
        "spare 256": ({"method": "hybrid", "cold": HOST, "spare_tokens": 64, "page_budget": 2}, False),
        "hot 256": ({"method": "hybrid", "cold": HOST, "hot_tokens": 64, "page_budget": 2}, False),
        "fetch": ({"method": "hybrid", "cold": {**HOST, "attend": "fetch"}}, False),
        "fetch, no estimate": ({"method": "hybrid", "cold": {**HOST, "attend": "fetch", "estimate": "none"}}, False),
        "host, no estimate": ({"method": "hybrid", "cold": {**HOST, "estimate": "none"}}, False),
        "hybrid, device": ({"method": "hybrid", "cold": {**HOST, "select": "device"}}, False),
        "scan serves": ({"method": "retrieval_attention", "cold": {"index": graph, "top_k": 16, "stand_in": "scan", "look_ahead": "never"}}, True),
        "pages serve": ({"method": "retrieval_attention", "cold": {"index": graph, "top_k": 16, "stand_in": "pages", "look_ahead": "never"}}, True),
    }
    for name, (settings, never) in cases.items():
        if sys.argv[1:] and not any(word in name for word in sys.argv[1:]):
            continue
        config = hkv.HybridConfig(**NEAR | ({"index_build": "background"} if never else {}), **settings)
        print(name, counted(config, never=never), flush=True)


main()
