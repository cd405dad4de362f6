"""What a budget loses on a real language model: KL, nats and top-1 on prose, by policy.

SmolLM2-135M-Instruct (extra smollm2) reads the beginning of a text with full attention, then the
rest through each method, 16 tokens at a time, and is compared with full attention on the same
tokens. Needs no network:

    .venv/bin/python benchmarks/real_model/quality.py --tokens 7424 --then 256
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # a script: the other benchmarks' folder is beside its own
    sys.path.insert(0, str(Path(__file__).parents[2]))

import torch

import hybrid_kv as hkv
from benchmarks.common import accuracy
from benchmarks.real_model.text import prose
from hybrid_kv.config import HybridConfig
from hybrid_kv.contest.prompts import open_cache, prefill
from hybrid_kv.report.files import compact
from hybrid_kv.types import Needs

WINDOW = 512


def policies(context: int, shares: list[float]) -> dict[str, dict[str, Any]]:
    """Settings by name; `share` of the context is what a query may attend on average."""
    rows: dict[str, dict[str, Any]] = {}
    for sinks, window, top_k in ((128, 512, 100), (16, 512, 212), (16, 256, 468)):
        for shared in (False, True):
            name = f"{sinks} + {window} + {top_k}{' shared' if shared else ''}"
            rows[name] = _flat(sinks, window, top_k, shared=shared)
    for most in (200, 400, 800):
        for min_share in (1e-4, 2e-4, 4e-4):
            rows[f"16 + 512 + share {min_share:g} of {most}"] = _flat(
                16, 512, most, min_share=min_share
            )
    for sinks, window in ((128, 512), (16, 256), (16, 128)):
        rows[f"{sinks} + {window} + share 0.0002 of 400"] = _flat(
            sinks, window, 400, min_share=2e-4
        )
    rows["16 + 512 + share 0.0001 of 400, 100 shared"] = _flat(
        16, 512, 100, min_share=1e-4, shared=True, max_tokens=400
    )
    for share in shares:
        budget = max(48, round(context * share))
        sinks, window = 16, max(16, budget // 4 // 16 * 16)
        top_k = budget - sinks - window
        rows[f"{share:.0%} fixed"] = _flat(sinks, window, top_k)
        rows[f"{share:.0%} shared"] = _flat(sinks, window, top_k, shared=True)
        rows[f"{share:.0%} streaming_llm"] = {
            "method": "streaming_llm",
            "sink_tokens": 16,
            "window_tokens": (budget - 16) // 16 * 16,
        }
        rows[f"{share:.0%} quest"] = {
            "method": "quest",
            "dense_layers": 0,
            "sink_tokens": 16,
            "window_tokens": window,
            "page_budget": max(1, top_k // 16),
        }
    return rows


def _flat(sinks: int, window: int, top_k: int, **cold: Any) -> dict[str, Any]:
    return {
        "method": "flat",
        "sink_tokens": sinks,
        "window_tokens": window,
        "cold": {"top_k": top_k, **cold},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=7424, help="read with full attention")
    parser.add_argument("--then", type=int, default=256, help="read through each method")
    parser.add_argument("--skip", type=int, default=0, help="of the text, for another part of it")
    parser.add_argument("--shares", default="0.01,0.02,0.05,0.1")
    parser.add_argument("--only", default="", help="policies whose names contain this")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    llm = hkv.load("smollm2", dtype="float32", dequantize=True, config=HybridConfig(method="full"))
    ids = prose(llm.tokenizer, options.tokens + options.then + 1, options.skip)
    context, text = ids[: options.tokens], ids[options.tokens :]
    runtime = llm.runtime
    prompt = prefill(runtime, context.numpy(), Needs())
    read, answers = text[:-1].numpy(), text[1:]
    full = accuracy.text_log_probs(runtime, HybridConfig(method="full"), prompt, read)
    nats = -float(full.gather(1, answers[:, None]).mean())
    print(f"full attention: {nats:.3f} nats per token", flush=True)
    print(
        "| policy | attended | KL | p95 of KL | nats beyond full | top-1 |\n"
        "|---|---|---|---|---|---|"
    )
    rows = []
    shares = [float(share) for share in options.shares.split(",") if share]
    for name, settings in policies(options.tokens, shares).items():
        if options.only not in name:
            continue
        cache = open_cache(runtime, HybridConfig(**settings), prompt)
        found = accuracy.read_text(runtime, cache, read)
        work = cache.work
        kl = (full.exp() * (full - found)).sum(-1)
        row = {
            "policy": name,
            "attended_tokens": work.attended / work.steps,
            "attended_ratio": work.attended / work.visible,
            "kl": float(kl.mean()),
            "kl_p95": float(kl.quantile(0.95)),
            "nats_beyond": -float(found.gather(1, answers[:, None]).mean()) - nats,
            "top_1": float((found.argmax(-1) == full.argmax(-1)).float().mean()),
        }
        rows.append(row)
        print(
            f"| {name} | {row['attended_tokens']:.0f} ({row['attended_ratio']:.1%}) | "
            f"{row['kl']:.4f} | {row['kl_p95']:.3f} | {row['nats_beyond']:+.3f} | "
            f"{row['top_1']:.3f} |",
            flush=True,
        )
    if options.json:
        report = {"tokens": options.tokens, "then": options.then, "full_nats": nats, "rows": rows}
        options.json.write_text(compact(report))


if __name__ == "__main__":
    torch.manual_seed(0)
    main()
