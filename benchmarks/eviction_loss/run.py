"""What eviction costs a layer's output: Ada-SnapKV beside SnapKV at the same total budget.

    python benchmarks/eviction_loss/run.py --heads 200 --tokens 1k --budget 128
    python benchmarks/eviction_loss/run.py --model smollm2 --tokens 2k --budget 128

A random attention layer: hidden states that are alike within --span tokens, random projections to
the keys and values of eight KV heads, and queries that are alike but for noise in each head. Heads
differ in concentration: the standard deviation of a head's logits lies between --least and --most,
evenly in the logarithm. The methods evict after the prompt; the loss is the L1 distance of the next
query's output from full attention's, a head on average (Ada-KV, arXiv:2407.11550, equation 8 with
an output matrix of 1 on the diagonal); the mass that was lost is half its bound (theorem 2). With
--model the layers are a model's own: of smollm2 on prose, of needle on its key-value records; the
loss is of the query behind the prompt. Stdout is one JSON document.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from hybrid_kv.config import HybridConfig, parse_count  # noqa: E402
from hybrid_kv.contest.prompts import python_prose  # noqa: E402
from hybrid_kv.entries import Entries  # noqa: E402
from hybrid_kv.eval.needle import make_sample  # noqa: E402
from hybrid_kv.models.load import load_model, load_tokenizer  # noqa: E402
from hybrid_kv.plugins import Method  # noqa: E402
from hybrid_kv.report.files import compact  # noqa: E402
from hybrid_kv.types import Evidence, LayerShape, ModelInfo  # noqa: E402

METHODS = ("snapkv", "ada_snapkv")
HEADS = 8  # KV heads of a layer
GROUP = 3
DIM = 72
WIDTH = 128  # of hidden states: keys and values share some of what they hold
ALIKE = 0.95  # correlation of a head's queries


@dataclass(frozen=True)
class Layer:
    """Queries q [Hq, N + 1, D], keys and values [Hkv, N, D]; the last query comes after them."""

    q: Tensor
    k: Tensor
    v: Tensor


def draw_layer(tokens: int, span: int, least: float, most: float, seed: int) -> Layer:
    """A random layer; of a token's hidden state half belongs to its span."""
    draw = torch.Generator().manual_seed(seed)
    topics = torch.randn(-(-tokens // span), WIDTH, generator=draw).repeat_interleave(span, 0)
    own = torch.randn(tokens, WIDTH, generator=draw)
    hidden = (topics[:tokens] + own) / 2**0.5
    project = torch.randn(2, HEADS, WIDTH, DIM, generator=draw) / WIDTH**0.5
    k, v = hidden @ project
    spread = least * (most / least) ** torch.rand(HEADS, 1, 1, 1, generator=draw)
    wanted = torch.randn(HEADS, 1, 1, DIM, generator=draw)
    wanted = (wanted + 0.3 * torch.randn(HEADS, GROUP, 1, DIM, generator=draw)) / 1.09**0.5
    noise = torch.randn(HEADS, GROUP, tokens + 1, DIM, generator=draw)
    q = spread * (ALIKE**0.5 * wanted + (1 - ALIKE) ** 0.5 * noise)
    return Layer(q.flatten(0, 1), k, v)


def kept_after_prompt(method: Method, layer: Layer, window: int) -> Entries:
    """What a method keeps of the prompt before the window."""
    tokens = layer.k.shape[1]
    method.open(ModelInfo((LayerShape(0, len(layer.q), len(layer.k), layer.k.shape[-1]),)))
    left = tokens - window
    leaving = Entries.of(layer.k[:, :left], layer.v[:, :left], torch.arange(left))
    prompt = layer.q[:, :tokens]
    last = prompt[:, -method.needs.last_queries :]
    scale = layer.k.shape[-1] ** -0.5
    seen = Evidence(tokens, last_queries=last, scale=scale, keys=layer.k)
    kept = method.absorb(0, 0, None, leaving, seen)
    assert kept is not None
    return kept


def losses(layer: Layer, kept: Entries, window: int) -> tuple[list[float], list[float]]:
    """By KV head: L1 distance of the outputs of its group, and mass lost, both on average."""
    errors, lost = [], []
    heads, _, dim = layer.k.shape
    queries = layer.q[:, -1].view(heads, -1, dim).double()
    for h, positions in enumerate(kept.split("positions")):
        weights = (queries[h] @ layer.k[h].double().T * dim**-0.5).softmax(-1)
        stays = torch.zeros(weights.shape[1], dtype=torch.bool)
        stays[positions] = stays[-window:] = True
        some = weights * stays
        out = (some / some.sum(-1, keepdim=True) - weights) @ layer.v[h].double()
        errors.append(float(out.abs().sum(-1).mean()))
        lost.append(float(1 - some.sum(-1).mean()))
    return errors, lost


def measure(
    heads: int,
    tokens: int,
    budget: int,
    *,
    span: int = 8,
    least: float = 1.0,
    most: float = 10.0,
    seed: int = 0,
) -> dict[str, dict[str, float]]:
    """By method the mean L1 error and lost mass of a head, and the entries kept by one."""
    layers = heads // HEADS
    return compare(
        (draw_layer(tokens, span, least, most, seed * layers + n) for n in range(layers)), budget
    )


def compare(layers: Iterable[Layer], budget: int) -> dict[str, dict[str, float]]:
    """By method the mean L1 error and lost mass of a head, and the entries kept by one."""
    window, total = 32, 0
    sums = {name: [0.0, 0.0, 0.0] for name in METHODS}
    for layer in layers:
        total += len(layer.k)
        for name in METHODS:
            config = HybridConfig(method=name, window_tokens=window, budget_tokens=budget)
            kept = kept_after_prompt(config.build(), layer, window)
            errors, lost = losses(layer, kept, window)
            row = (sum(errors), sum(lost), sum(kept.lengths))
            sums[name] = [a + b for a, b in zip(sums[name], row, strict=True)]
    return {
        name: {"l1_error": error / total, "lost_mass": lost / total, "kept": kept / total}
        for name, (error, lost, kept) in sums.items()
    }


def model_layers(name: str, tokens: int) -> list[Layer]:
    """Queries, keys and values after RoPE of all layers of a model, on a prompt and one token."""
    model = load_model(name, dtype=torch.float32)
    if name == "needle":
        sample = make_sample("key_value", tokens + 1, num_records=6, num_questions=2, seed=5)
        ids = torch.as_tensor(sample.context)[None, : tokens + 1]
    else:
        tokenizer = load_tokenizer(name)
        assert tokenizer is not None
        ids = tokenizer(python_prose(), return_tensors="pt").input_ids[:, : tokens + 1]
    found: list[Layer] = []

    def watch(module: Any, q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> Any:
        found.append(Layer(q[0].clone(), k[0, :, :tokens].clone(), v[0, :, :tokens].clone()))
        return sdpa_attention_forward(module, q, k, v, *args, **kwargs)

    ALL_ATTENTION_FUNCTIONS.register("eviction_loss", watch)
    model.set_attn_implementation("eviction_loss")
    with torch.no_grad():
        model(ids)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--heads", type=int, default=200, help="KV heads, eight to a layer")
    parser.add_argument("--model", help="needle or smollm2: its layers in the place of random ones")
    parser.add_argument("--tokens", default="1k", help="of the prompt")
    parser.add_argument(
        "--budget", type=int, default=128, help="entries of a head, window included"
    )
    parser.add_argument("--span", type=int, default=8, help="neighbours that are alike")
    parser.add_argument("--least", type=float, default=1.0, help="standard deviation of logits")
    parser.add_argument("--most", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    given = vars(options) | {"tokens": parse_count(options.tokens)}
    if options.model is None:
        rows = measure(**{key: value for key, value in given.items() if key != "model"})
    else:
        given = {key: given[key] for key in ("model", "tokens", "budget")}
        rows = compare(model_layers(options.model, given["tokens"]), given["budget"])
    for name, row in rows.items():
        print(
            f"{name:<11} L1 error {row['l1_error']:.4f}  lost mass {row['lost_mass']:.4f}  "
            f"kept {row['kept']:.2f} a head",
            file=sys.stderr,
        )
    snap, ada = (rows[name]["l1_error"] for name in METHODS)
    print(f"margin {snap - ada:.4f} ({1 - ada / snap:.1%} of SnapKV's error)", file=sys.stderr)
    print(compact({"benchmark": "eviction_loss", "settings": given, "rows": rows}), end="")


if __name__ == "__main__":
    main()
