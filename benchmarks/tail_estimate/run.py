"""How near a head's output is to full attention's, by what becomes of the keys it does not attend.

    python benchmarks/tail_estimate/run.py --model smollm2 --tokens 4k
    python benchmarks/tail_estimate/run.py --model needle --tokens 16k

Every query of the last --queries positions attends sinks, a window of a quarter of the budget and
the exact best of the other keys of the prompt. The rest is left out, or attended as an estimate:
the mean value with the true mass of what is left (more than SparQ can know), the same entries to
first order (MomentKV), as one Gaussian of keys and values (`hybrid_kv.ops.tail`), or as one for
each of several segments.
Printed: the mean relative L2 error of a head's output, and the missed mass; one JSON document comes
last.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from pathlib import Path

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.eviction_loss.run import Layer, model_layers  # noqa: E402
from hybrid_kv.config import parse_count  # noqa: E402
from hybrid_kv.ops.tail import AttendedSums, Form, Tail  # noqa: E402
from hybrid_kv.report.files import compact  # noqa: E402
from hybrid_kv.types import PartialAttention  # noqa: E402

SINKS = 4
SHARES = (0.01, 0.02, 0.05, 0.1)
SEGMENTS = (4, 16)


def merged(parts: list[PartialAttention]) -> Tensor:
    """[Hkv, M, D] of parts with out [Hkv, M, D] and lse [Hkv, M]."""
    weights = torch.stack([part.lse for part in parts]).softmax(0)
    return (weights[..., None] * torch.stack([part.out for part in parts])).sum(0)


def segments_of(
    count: int,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    left: Tensor,
    limit: Tensor,
    scale: float,
    form: Form = "gaussian",
) -> list[PartialAttention]:
    """What is `left` [Hkv, M, N] of entries [Hkv, N, D], by the moments of so many segments."""
    size, parts = -(-k.shape[1] // count), []
    for first in range(0, k.shape[1], size):
        own = slice(first, first + size)
        known = Tail.of(k[:, own], v[:, own])
        found = (~left[..., own]).float()
        sums = AttendedSums(found.sum(-1), (found * (q @ k[:, own].float().mT)).sum(-1))
        part = known.attend(q, left[..., own].shape[-1], sums, limit, scale=scale, form=form)
        parts.append(part.without(found @ v[:, own].float()))
    return parts


def errors(layer: Layer, queries: int, share: float) -> dict[str, float]:
    """By what becomes of the rest: mean relative error of the heads of a layer; and missed mass."""
    heads, tokens, dim = layer.k.shape
    q = layer.q[:, -queries:].unflatten(0, (heads, -1)).flatten(1, 2).float()
    scale, budget = dim**-0.5, int(share * tokens)
    logits = scale * q @ layer.k.float().mT
    exact = logits.softmax(-1) @ layer.v
    stop = tokens - max(8, budget // 4)
    k, v, cold = layer.k[:, SINKS:stop], layer.v[:, SINKS:stop], logits[..., SINKS:stop]
    best = cold.topk(budget - SINKS - (tokens - stop), -1)
    left = torch.ones_like(cold, dtype=torch.bool).scatter_(-1, best.indices, value=False)
    attended = torch.ones_like(logits, dtype=torch.bool)
    attended[..., SINKS:stop] = ~left
    some = logits.masked_fill(~attended, -torch.inf)
    near = PartialAttention(some.softmax(-1) @ layer.v, some.logsumexp(-1))
    mass = cold.masked_fill(~left, -torch.inf).logsumexp(-1)
    limit = best.values[..., -1]
    mean = PartialAttention(v.mean(1, keepdim=True).expand_as(exact), mass)
    rest = {"left_out": [], "mean_value_with_true_mass": [mean]}
    rest["first_order"] = segments_of(1, q, k, v, left, limit, scale, "first_order")
    for count in (1, *SEGMENTS):
        name = "gaussian" if count == 1 else f"gaussians_of_{count}_segments"
        rest[name] = segments_of(count, q, k, v, left, limit, scale)
    found = {
        name: float(((merged([near, *parts]) - exact).norm(dim=-1) / exact.norm(dim=-1)).mean())
        for name, parts in rest.items()
    }
    found["missed_mass"] = float((mass - logits.logsumexp(-1)).exp().mean())
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="smollm2", help="needle or smollm2")
    parser.add_argument("--tokens", default="4k", help="of the prompt")
    parser.add_argument("--queries", type=int, default=64, help="the last of the prompt")
    options = parser.parse_args()
    tokens = parse_count(options.tokens)
    rows: dict[float, dict[str, float]] = {}
    layers = model_layers(options.model, tokens)
    for share in SHARES:
        sums: defaultdict[str, float] = defaultdict(float)
        for layer in layers:
            for name, value in errors(layer, options.queries, share).items():
                sums[name] += value / len(layers)
        rows[share] = dict(sums)
        print(
            f"{share:>4.0%} " + "  ".join(f"{n} {v:.4f}" for n, v in sums.items()), file=sys.stderr
        )
    print(compact({"benchmark": "tail_estimate", "settings": vars(options), "rows": rows}), end="")


if __name__ == "__main__":
    main()
