"""Queries and keys of the shipped `needle` model over its own documents: RoPE and real groups.

They are seen by the runtime itself, as it collects evidence for an index; the prefill is exact.
"""

from __future__ import annotations

from functools import cache

import torch

import hybrid_kv as hkv
from hybrid_kv.contest import prompts
from hybrid_kv.eval.needle import make_sample
from hybrid_kv.types import Needs

HEADS = tuple(f"L{layer}H{head}" for layer in range(4) for head in range(2))
"""Layers and KV heads."""
SINKS, WINDOW, STEPS = 4, 512, 2048
"""Tokens that stay on the device, and those after the prompt; as with the made-up heads."""
RECORDS = 128
TASK = "multi_query"
Found = tuple[torch.Tensor, torch.Tensor, torch.Tensor, str]


def collect(name: str, num_keys: int, seed: int) -> Found:
    """Queries [G, N, D] and keys [N, D] of one KV head, queries [G, P, D] after them, source.

    Raises:
        LookupError: there is no such head.
    """
    if name not in HEADS:
        raise LookupError(f"no head is called '{name}'; there are: {', '.join(HEADS)}")
    layer, head = int(name[1]), int(name[3])
    prompt = _prefill(num_keys, seed)
    keys, (evidence, *_) = prompt.layers[layer][0][0, head], prompt.evidence[layer]
    queries = evidence.queries
    assert queries is not None
    group = queries.unflatten(0, (prompt.layers[layer][0].shape[1], -1))[head].float()
    last = SINKS + num_keys
    source = f"needle, {TASK}, {RECORDS} records"
    own, later = group[:, SINKS:last], group[:, last + WINDOW :]
    return own, keys[SINKS:last].float(), later, source


@cache
def _prefill(num_keys: int, seed: int) -> prompts.PrefilledPrompt:
    """A document of all positions that are needed, with all its queries."""
    tokens = SINKS + num_keys + WINDOW + STEPS
    sample = make_sample(TASK, tokens, num_records=RECORDS, seed=seed)
    with hkv.load("needle", dtype="float32") as llm:
        return prompts.prefill(llm.runtime, sample.context, Needs(sampled_queries=tokens))
