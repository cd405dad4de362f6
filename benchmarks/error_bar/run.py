"""What error bars of tokens are worth: true KL and flips of many texts beside what predicts them.

    python benchmarks/texts/make.py TEXTS
    python benchmarks/error_bar/run.py TEXTS --rows ROWS.csv   # goes on where it was stopped
    python benchmarks/error_bar/run.py TEXTS --rows ROWS.csv --prefills PREFILLS
    python benchmarks/error_bar/fit.py ROWS.csv                # constants, tables
    python benchmarks/error_bar/cost.py                        # a step with and without

SmolLM2-135M (extra smollm2, float32) reads the first tokens of a text exactly, 2K, 3K, 4K or 6K of
them in turn, and full attention goes on greedily. The same tokens then pass through `hybrid` at
each budget, one by one, or `--at-once` so many. Of each the CSV has the KL divergence from full
attention and whether the most probable token is another one, with half, entropy and margin as
`token_errors` of `generate` has them. Texts come in rounds of the eight kinds. `--prefills` takes
what `benchmarks/texts/run.py` has read exactly, 4,096, 2,048 or 3,072 tokens in turn, and reads
2,048 of other texts; of a text that is cut indexes learn from its sampled queries alone.
"""

from __future__ import annotations

import argparse
import csv
import gc
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any

if __name__ == "__main__":  # a script: the project's root is not on the path
    sys.path.insert(0, str(Path(__file__).parents[2]))

import numpy as np
import torch
from torch import Tensor

import hybrid_kv as hkv
from benchmarks.texts.make import TEXTS, Text
from benchmarks.texts.run import in_rounds, restored
from hybrid_kv.config import HybridConfig
from hybrid_kv.contest.prompts import PrefilledPrompt, open_cache, prefill
from hybrid_kv.models.attach import Attachment
from hybrid_kv.models.cache_state import passing
from hybrid_kv.models.hf_cache import TieredCache
from hybrid_kv.types import Evidence, PartialAttention
from hybrid_kv.watch.token_errors import HalvedStep, halves_of, spreads_of

MODEL = "smollm2"
COLUMNS = ("text", "kind", "tokens", "budget", "kl", "flip", "half", "entropy", "margin")
BUDGETS = ("1%", "2%", "5%", "180")
"""180 tokens are 128 keys chosen, `hybrid`'s default, beside sinks and window."""
LENGTHS = (4096, 2048, 6144, 3072)
KEPT_LENGTHS = (4096, 2048, 3072)
_PAGE = 8
"""Tokens; 1% of 2,048 are 20."""


class Halves:
    """Watcher that takes `half` of every token, a mean over heads and layers."""

    def __init__(self) -> None:
        self._halves: list[Tensor] = []

    def wants(self, layer_idx: int, q: Tensor) -> bool:
        """All steps of all layers."""
        return True

    def add(self, step: HalvedStep, part: PartialAttention) -> None:
        """Takes the step of a layer."""
        self._halves.append(halves_of(step, part).flatten(0, 1))

    def take(self) -> list[float]:
        """By token, since the last call."""
        halves, self._halves = self._halves, []
        return torch.cat(halves).mean(0).tolist()  # type: ignore[no-any-return]


def forward(runtime: Attachment, cache: TieredCache, tokens: Sequence[int]) -> Tensor:
    """Logits [T, V] behind each of more tokens."""
    with torch.inference_mode():
        step = torch.tensor([list(tokens)])
        logits: Tensor = runtime.model(step, **passing(cache), use_cache=True).logits
    return logits[0]


def go_on(runtime: Attachment, prompt: PrefilledPrompt, last: int, steps: int) -> Tensor:
    """Logits [steps, V] of full attention, which reads its own most probable tokens."""
    cache, found, token = open_cache(runtime, HybridConfig(method="full"), prompt), [], last
    for _ in range(steps):
        found.append(forward(runtime, cache, [token])[0])
        token = int(found[-1].argmax())
    cache.close()
    return torch.stack(found)


def rows_of(
    runtime: Attachment,
    config: HybridConfig,
    prompt: PrefilledPrompt,
    last: int,
    full: Tensor,
    at_once: int = 1,
) -> Iterator[dict[str, Any]]:
    """What a configuration gives for each of the same tokens."""
    cache, halves, best = open_cache(runtime, config, prompt), Halves(), full.argmax(-1).tolist()
    cache.kv.watchers.append(halves)
    for some in torch.arange(len(full)).split(at_once):
        first, end = int(some[0]), int(some[-1]) + 1
        block = forward(runtime, cache, [last, *best][first:end])
        for logits, true, half in zip(block, full[first:end], halves.take(), strict=True):
            logs, exact = logits.log_softmax(-1), true.log_softmax(-1)
            entropy, margin = spreads_of(logits).tolist()
            yield {
                "kl": f"{float((exact.exp() * (exact - logs)).sum().clamp_min(0)):.4g}",
                "flip": int(int(logits.argmax()) != int(true.argmax())),
                "half": f"{half:.5g}",
                "entropy": f"{entropy:.5g}",
                "margin": f"{margin:.5g}",
            }
    cache.close()


def cut(prompt: PrefilledPrompt, tokens: int) -> PrefilledPrompt:
    """The first tokens of a prompt as a prompt, with what is known of their queries."""

    def own(one: Evidence) -> Evidence:
        positions, queries = one.sampled_positions, one.sampled_queries
        if positions is not None and queries is not None:
            inside = positions < tokens
            positions, queries = positions[inside], queries[:, inside]
        return replace(
            one,
            num_tokens=tokens,
            sampled_positions=positions,
            sampled_queries=queries,
            last_queries=None,
        )

    layers = tuple((k[:, :, :tokens], v[:, :, :tokens]) for k, v in prompt.layers)
    evidence = tuple(tuple(own(row) for row in rows) for rows in prompt.evidence)
    return PrefilledPrompt(prompt.ids[:, :tokens], layers, evidence)


def measure(
    runtime: Attachment,
    ids: Sequence[int],
    budgets: Sequence[str],
    steps: int,
    known: PrefilledPrompt | None = None,
    at_once: int = 1,
) -> Iterator[dict[str, Any]]:
    """Rows of one text, by budget.

    Args:
        known: an exact reading of at least all but the last id; None makes one.
    """
    base = HybridConfig(page_size=_PAGE)
    configs = [base.at_budget(budget, len(ids)) for budget in budgets]
    if known is None:
        prompt = prefill(runtime, np.array(ids[:-1]), configs[0].build().needs)
    else:
        prompt = cut(known, len(ids) - 1)
    full = go_on(runtime, prompt, ids[-1], steps)
    for budget, config in zip(budgets, configs, strict=True):
        for row in rows_of(runtime, config, prompt, ids[-1], full, at_once):
            yield {"tokens": len(ids), "budget": budget, **row}
        gc.collect()  # caches hold each other


def kept(path: Path) -> set[str]:
    """Texts that a CSV has; it is begun where there is none."""
    if not path.exists():
        with path.open("w", newline="") as file:
            csv.DictWriter(file, COLUMNS, lineterminator="\n").writeheader()
        return set()
    with path.open(newline="") as file:
        return {row["text"] for row in csv.DictReader(file)}


def ids_of(folder: Path, text: Text, tokenizer: Any, tokens: int) -> list[int]:
    """The first tokens of a text."""
    content = (folder / f"{text.name}.txt").read_bytes().decode()
    ids = list(tokenizer(content)["input_ids"])
    if len(ids) < tokens:
        raise SystemExit(f"{text.name} has {len(ids)} tokens, {tokens} are needed")
    return ids[:tokens]


def exact_reading(folder: Path | None, text: Text) -> PrefilledPrompt | None:
    """What `benchmarks/texts/run.py` kept of a text; None for nothing."""
    found = [] if folder is None else sorted(folder.glob(f"{text.name}-*.pt"))
    return restored(*torch.load(found[0], weights_only=False)).prompt if found else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("texts", type=Path, help="folder of benchmarks/texts/make.py")
    parser.add_argument("--rows", type=Path, required=True, help="CSV")
    parser.add_argument("--steps", type=int, default=96, help="tokens of each text and budget")
    parser.add_argument("--at-once", type=int, default=1, help="tokens of a step")
    parser.add_argument("--prefills", type=Path, help="folder of benchmarks/texts/run.py")
    parser.add_argument("--budgets", default=BUDGETS, type=lambda text: tuple(text.split(",")))
    args = parser.parse_args()
    known = kept(args.rows)
    texts = [one for one in TEXTS if (args.texts / f"{one.name}.txt").exists()]
    lengths = LENGTHS if args.prefills is None else KEPT_LENGTHS
    with hkv.load(MODEL, dtype="float32", dequantize=True) as llm:
        tokenizer = llm.require_tokenizer()
        for number, text in enumerate(in_rounds(texts)):
            if text.name in known:
                continue
            begin, tokens = perf_counter(), lengths[(number + number // 8) % len(lengths)]
            reading = exact_reading(args.prefills, text)
            if args.prefills is not None and reading is None:
                tokens = min(lengths)
            ids = ids_of(args.texts, text, tokenizer, tokens)
            how = args.budgets, args.steps, reading, args.at_once
            rows = list(measure(llm.runtime, ids, *how))
            with args.rows.open("a", newline="") as file:
                writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
                writer.writerows({"text": text.name, "kind": text.kind, **row} for row in rows)
            print(f"{text.name}: {perf_counter() - begin:.0f} s", file=sys.stderr, flush=True)


if __name__ == "__main__":
    torch.manual_seed(0)
    main()
