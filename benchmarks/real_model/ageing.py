"""What an index still finds thousands of tokens after it was learned, learned again or not.

SmolLM2-135M-Instruct (extra smollm2), stretched by YaRN, reads a text with full attention. A head's
index is made when the first part has been read and is then asked with the queries of the rest, one
token after the other, while keys leave the window and join it: what the runtime does
(`store.live_index`), but for the attention. A line per kind: recall@100 of every 1,024 tokens, mean
over heads, and of the worst head. Stdout is one JSON document, which `--out` also
writes to a file after every head.

    .venv/bin/python benchmarks/real_model/ageing.py --tokens 8192 --then 8192 --heads 10
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from time import thread_time
from typing import Any, NamedTuple

if __name__ == "__main__":  # a script: the other benchmarks' folder is beside its own
    sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

import hybrid_kv as hkv
from benchmarks.real_model.text import prose
from hybrid_kv.config import HybridConfig, IndexConfig
from hybrid_kv.contest import prompts
from hybrid_kv.index.graph import GraphIndex
from hybrid_kv.report.files import compact
from hybrid_kv.rotary import Samples
from hybrid_kv.store.index_builder import BuildWork, InlineRunner
from hybrid_kv.store.live_index import LiveIndex
from hybrid_kv.types import Evidence, Needs

SINKS, WINDOW, PAGE, TOP_K, BLOCK = 16, 512, 16, 100, 1024
KINDS: dict[str, dict[str, Any]] = {
    "graph": {"kind": "graph", "min_keys": 1, "max_scanned": 1},
    "sketch": {"kind": "sketch", "min_keys": 1, "gain": 0},
}


class Head(NamedTuple):
    """One KV head: keys [N, D] of the whole text, queries [G, P, D] of its second part."""

    name: str
    keys: Tensor
    later: Tensor
    seen: Evidence
    rotary: Any


class FirstOnly(InlineRunner):
    """Builds the first index; a later one never ends."""

    built = False

    def beside(self, build: BuildWork, holds: int = 0) -> Future[None]:
        if self.built:
            return Future()
        self.built = True
        return super().beside(build, holds)


def stretched(factor: float) -> tuple[Any, Any]:
    """The model for so many times its context, by YaRN, and its tokenizer."""
    with hkv.load("smollm2", dtype="float32", dequantize=True, config=HybridConfig()) as llm:
        model, tokenizer = llm.model, llm.tokenizer
    config = model.config
    trained = config.max_position_embeddings
    config.rope_parameters = {
        **config.rope_parameters,
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": trained,
    }
    config.max_position_embeddings = int(factor * trained)
    model.model.rotary_emb = LlamaRotaryEmbedding(config)
    return model, tokenizer


def heads(tokens: int, then: int, count: int) -> Iterator[Head]:
    """Some KV heads of the model, spread over its layers."""
    model, tokenizer = stretched((tokens + then) / 8192)
    with hkv.load(model, tokenizer=tokenizer, config=HybridConfig()) as llm:
        ids = prose(llm.tokenizer, tokens + then)
        read = prompts.prefill(llm.runtime, ids.numpy(), Needs(4096, then + 4096))
        info = llm.runtime.info
    names = [(layer, head) for layer in range(len(read.layers)) for head in range(3)]
    for layer, head in names[:: max(1, len(names) // count)][:count]:
        seen, group = read.evidence[layer][0], slice(3 * head, 3 * head + 3)
        before = seen.sampled_positions < tokens
        prompt = Evidence(
            tokens,
            seen.sampled_queries[group, before],
            seen.last_queries[group, :-then][:, -4096:],
            seen.sampled_positions[before],
        )
        keys = read.layers[layer][0][0, head, SINKS:].bfloat16().contiguous()
        rotary = info.rotary_of(info.layers[layer].layer_idx)
        yield Head(f"L{layer}H{head}", keys, seen.last_queries[group, -then:], prompt, rotary)


def samples_for(head: Head, needs: Needs) -> Samples:
    """What an index of these needs is given."""
    seen = head.seen
    stride = max(1, seen.sampled_queries.shape[1] // (2 * needs.sampled_queries))
    kept = Evidence(
        seen.num_tokens,
        seen.sampled_queries[:, ::stride],
        seen.last_queries[:, -needs.last_queries :],
        seen.sampled_positions[::stride],
    )
    samples = kept.samples(1, head.rotary)
    return samples.ahead(kept.num_tokens, needs.horizon_tokens)


def measure(head: Head, settings: dict[str, Any], *, again: bool, step: int) -> dict[str, Any]:
    """Recall by block of one head."""
    config = IndexConfig(**settings)
    params = config.build().params
    needs = (GraphIndex if settings["kind"] == "graph" else type(config.build())).needs(params)
    tokens = head.seen.num_tokens
    known = tokens - SINKS - WINDOW
    begin = thread_time()
    live = LiveIndex(
        config.build,
        head.keys[None, :known],
        samples_for(head, needs),
        InlineRunner() if again else FirstOnly(),
    )
    found: list[list[float]] = [[] for _ in range(head.later.shape[1] // BLOCK)]
    for at in range(0, head.later.shape[1], step):
        now = (known + at) // PAGE * PAGE
        if now > len(live.serving):
            live.add(head.keys[None, :now])
        query = head.later[:, at]
        ids = live.search(query[None], TOP_K).ids[0]
        best = (query @ head.keys[: len(live.serving)].float().T).topk(TOP_K).indices
        hit = (ids[:, :, None] == best[:, None]).any(1)
        found[at // BLOCK].append(float(hit.float().mean()))
    (report,) = live.describe()
    return {
        "head": head.name,
        "serves": report["serves"],
        "samples": report["samples"],
        "promise": report["recall"],
        "recall": [sum(block) / len(block) for block in found],
        "seconds": thread_time() - begin,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=8192, help="read before the index is made")
    parser.add_argument("--then", type=int, default=8192, help="read after it")
    parser.add_argument("--heads", type=int, default=10)
    parser.add_argument("--step", type=int, default=4, help="every so many tokens are asked")
    parser.add_argument("--kinds", default="graph,sketch")
    parser.add_argument("--out", type=Path, help="a file for the JSON, as far as it has come")
    options = parser.parse_args()
    torch.manual_seed(0)
    some = list(heads(options.tokens, options.then, options.heads))
    torch.set_num_threads(1)
    settings = {name: value for name, value in vars(options).items() if name != "out"}
    results: dict[str, Any] = {**settings, "heads": len(some)}
    for kind in options.kinds.split(","):
        for again in (True, False):
            name = f"{kind}, {'learned again' if again else 'as it was learned'}"
            rows: list[dict[str, Any]] = results.setdefault(name, [])
            for head in some:
                rows.append(measure(head, KINDS[kind], again=again, step=options.step))
                if options.out is not None:
                    options.out.write_text(compact(results))
            blocks = torch.tensor([row["recall"] for row in rows])
            for what, values in (("mean", blocks.mean(0)), ("worst", blocks.amin(0))):
                told = " | ".join(f"{value:.3f}" for value in values.tolist())
                print(f"| {name} | {what} | {told} |", file=sys.stderr, flush=True)
    print(compact(results), end="")


if __name__ == "__main__":
    main()
