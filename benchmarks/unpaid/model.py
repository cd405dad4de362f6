"""What hot pages and page digests lose on a model: KL from full attention, token by token.

    python benchmarks/unpaid/model.py smollm2 7424 96
    python benchmarks/unpaid/model.py needle 32768 96
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch

import hybrid_kv as hkv
from benchmarks.common import accuracy
from benchmarks.real_model.text import prose
from benchmarks.unpaid.layer import Digests  # noqa: F401 (registers it)
from hybrid_kv.config import HybridConfig
from hybrid_kv.eval import prefilled
from hybrid_kv.eval.needle import filler, make_sample

accuracy._TEXT_STEP = 1


def settings(tokens: int) -> dict[str, dict[str, Any]]:
    near = {"sink_tokens": 16, "window_tokens": 256}
    hot = tokens // 16 // 16 * 16

    def hybrid(cold: Any = None, **own: Any) -> dict[str, Any]:
        cold = {"index": {"kind": "sketch"}, "top_k": 64, **(cold or {})}
        return {"method": "hybrid", "cold": cold, **near, **own}

    def retrieval(top_k: int, **index: Any) -> dict[str, Any]:
        return {"method": "retrieval_attention", "cold": {"index": index, "top_k": top_k}, **near}

    table = {}
    for estimate in ("gaussian", "none"):
        own = {"estimate": estimate}
        table |= {
            f"{estimate}": hybrid(own),
            f"{estimate} hot {hot}": hybrid(own, hot_tokens=hot, page_budget=16),
            f"{estimate} spare {hot}": hybrid(own, spare_tokens=hot, page_budget=16),
            f"{estimate} top_k 320": hybrid({**own, "top_k": 320}),
        }
    return table | {
        "scan (stand-in)": retrieval(64, kind="flat", precision="int8"),
        "pages (stand-in)": retrieval(64, kind="digests"),
    }


def main() -> None:
    name, tokens, then = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    llm = hkv.load(name, dtype="float32", config=HybridConfig(method="full"))
    questions = []
    if name == "needle":
        sample = make_sample("key_value", tokens, num_records=64, num_questions=20, seed=1)
        context, text, questions = sample.context, filler(then, 3), sample.questions
    else:
        ids = prose(llm.tokenizer, tokens + then).numpy()
        context, text = ids[:tokens], ids[tokens:]
    table = {n: HybridConfig(**chosen) for n, chosen in settings(tokens).items()}
    needs = table["gaussian"].build().needs
    prompt = prefilled.prefill(llm.runtime, context, needs)
    print("prefilled", flush=True)
    full = accuracy.text_log_probs(llm.runtime, HybridConfig(method="full"), prompt, text)
    for label, config in table.items():
        cache = prefilled.open_cache(llm.runtime, config, prompt)
        found = accuracy.read_text(llm.runtime, cache, text)
        work = cache.work
        half = slice(len(text) // 2, None)
        cells = [
            label,
            f"KL {accuracy.mean_kl(full, found):.5f}",
            f"second half {accuracy.mean_kl(full[half], found[half]):.5f}",
            f"attended {work.attended / work.steps:.0f}",
            f"hot ratio {work.hot_ratio}",
            f"promoted {work.promoted_pages / len(text):.2f} pages a step",
        ]
        if questions:
            right = accuracy.ask_all(llm.runtime, config, prompt, questions)
            cells.append(f"{right.correct} of {right.asked}")
        print(" | ".join(cells), flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
