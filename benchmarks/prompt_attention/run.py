"""Attention of a prompt: the engine's tiles beside torch's kernel and torch's matrix product.

    python benchmarks/prompt_attention/run.py --tokens 2048,8192 --dims 64,128

Rates are in GFLOP/s of what is not hidden, of the thread's own time, the best of the rounds; sides
take turns. The product has the shape of a tile, in the dtype in which it is faster. Errors are
against float64, relative to the root mean square of the right output. Stdout is one JSON document.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.common.surroundings import surroundings
from hybrid_kv.ops import fused
from hybrid_kv.ops.native.prompt import attend_prompt
from hybrid_kv.report.files import compact
from hybrid_kv.report.run import probe_environment
from hybrid_kv.testing import softmax_attention
from hybrid_kv.types import PartialAttention

INPUTS = ("normal", "large", "outliers")
"""Of errors: standard normal; scores with a deviation of 4; four channels of the keys 20 higher."""
_TILE, _REPEATS = (256, 512), 50
Row = dict[str, Any]


def drawn(heads: tuple[int, int], tokens: int, dim: int, kind: str = "normal") -> list[Tensor]:
    q, k, v = (torch.randn(1, h, tokens, dim) for h in (heads[0], heads[1], heads[1]))
    if kind == "large":
        q = q * 4
    if kind == "outliers":
        k[..., :4] += 20
    return [q, k, v]


def timed(sides: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Least seconds of each; the first round does not count."""
    least = dict.fromkeys(sides, math.inf)
    for turn in range(rounds + 1):
        for name, call in sides.items():
            begin = time.thread_time()
            call()
            taken = time.thread_time() - begin
            least[name] = min(least[name], taken) if turn else math.inf
    return least


def rate(dtype: torch.dtype, heads: tuple[int, int], tokens: int, dim: int, rounds: int) -> Row:
    q, k, v = (t.to(dtype) for t in drawn(heads, tokens, dim))
    left, right = torch.randn(_TILE[0], dim), torch.randn(dim, _TILE[1])
    narrow = left.to(dtype), right.to(dtype)
    masses = torch.empty(1, heads[0], tokens)
    scale = dim**-0.5
    seconds = timed(
        {
            "tiles": lambda: attend_prompt(q, k, v, scale=scale),
            "with masses": lambda: attend_prompt(q, k, v, scale=scale, masses=masses),
            "torch": lambda: fused.attend_causal(q, k, v, scale=scale),
            "product": lambda: [left @ right for _ in range(_REPEATS)],
            "its own product": lambda: [narrow[0] @ narrow[1] for _ in range(_REPEATS)],
        },
        rounds,
    )
    work = 2 * dim * tokens**2 * heads[0] / 1e9
    product = 2 * dim * math.prod(_TILE) * _REPEATS / 1e9
    product /= min(seconds["product"], seconds["its own product"])
    found: Row = {name: work / seconds[name] for name in ("tiles", "torch")}
    return {
        **{"dtype": str(dtype)[6:], "dim": dim, "tokens": tokens},
        **{**found, "product": product},
        "of torch": found["tiles"] / found["torch"],
        "of the product": found["tiles"] / product,
        "masses add": seconds["with masses"] / seconds["tiles"] - 1,
    }


def errors(dtype: torch.dtype, dim: int, tokens: int = 1024) -> list[Row]:
    rows = []
    for kind in INPUTS:
        q, k, v = (t.to(dtype) for t in drawn((2, 2), tokens, dim, kind))
        scale = dim**-0.5
        seen = torch.ones(tokens, tokens, dtype=torch.bool).tril()
        out, lse = softmax_attention(q, k, v, scale=scale, visible=seen)
        sides: dict[str, PartialAttention] = {
            "tiles": attend_prompt(q, k, v, scale=scale),
            "torch": fused.attend_causal(q, k, v, scale=scale),
        }
        for name, part in sides.items():
            missed, size = part.out.double() - out, out.square().mean().sqrt()
            row = {
                "dtype": str(dtype)[6:],
                "inputs": kind,
                "side": name,
                "rms": float(missed.square().mean().sqrt() / size),
                "most": float(missed.abs().max() / size),
                "lse": float((part.lse - lse).abs().max()),
            }
            rows.append(row)
    return rows


def told(row: Row) -> Row:
    """The same, printed for people."""
    line = (f"{k} {v:.3g}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items())
    print("  ".join(line), file=sys.stderr, flush=True)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--tokens", default="2048,8192")
    parser.add_argument("--dims", default="64,128")
    parser.add_argument("--dtypes", default="bfloat16,float32")
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--kv-heads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    heads = options.heads, options.kv_heads
    document = {
        "benchmark": "prompt_attention",
        "options": vars(options),
        "surroundings": surroundings(),
        "environment": probe_environment().model_dump(mode="json"),
        "rates": [
            told(rate(getattr(torch, dtype), heads, int(tokens), int(dim), options.rounds))
            for dtype in options.dtypes.split(",")
            for dim in options.dims.split(",")
            for tokens in options.tokens.split(",")
        ],
        "errors": [
            told(row)
            for dtype in options.dtypes.split(",")
            for row in errors(getattr(torch, dtype), int(options.dims.split(",")[-1]))
        ],
    }
    print(compact(document), end="")


if __name__ == "__main__":
    main()
