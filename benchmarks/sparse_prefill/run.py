"""Block-sparse prefill: its cost, and what it loses on texts.

    python benchmarks/sparse_prefill/run.py cost --tokens 8192,16384     # attention, made-up heads
    python benchmarks/texts/make.py TEXTS
    python benchmarks/sparse_prefill/run.py texts TEXTS --context 7936   # SmolLM2, end to end
    python benchmarks/sparse_prefill/run.py needle --tokens 16384,32768  # answers of `needle`

`cost`: seconds of a layer's attention over those of exact tiles, for random block lists of some
densities and for the choice of blocks; in the thread's own time, sides take turns. `texts`: the
model reads a text exactly and by block-sparse prefill, in float32 and through `full`, and then 256
tokens more: KL of its distributions from those of exact prefill, and nats of the text beyond it.
One text of each kind, or as many as asked. `needle`: right answers about records in a long context,
through `full`, after exact and block-sparse prefill. Stdout is one JSON document.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

if __name__ == "__main__":  # a script: the project's root is not on the path
    sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from torch import Tensor

import hybrid_kv as hkv
from benchmarks.common.surroundings import surroundings
from benchmarks.prompt_attention.run import timed, told
from benchmarks.texts.make import TEXTS
from benchmarks.texts.run import in_rounds, prompt_of
from hybrid_kv.config import HybridConfig
from hybrid_kv.eval.needle import Sample, is_correct, make_sample
from hybrid_kv.models.cache_state import passing
from hybrid_kv.ops import get_ops
from hybrid_kv.ops.native.library import work_alone
from hybrid_kv.report.files import compact
from hybrid_kv.report.run import probe_environment
from hybrid_kv.runtime.sparse_prefill import PrefillLoss, SampledQueries, query_block
from hybrid_kv.types import KEY_BLOCK, BlockMask

Row = dict[str, Any]
_STEP = 16


def cost(options: argparse.Namespace) -> Iterator[Row]:
    """Rows of `cost`."""
    work_alone()  # else the thread's time is that of its share of the work
    ops, heads = get_ops("native"), (options.heads, options.kv_heads)
    for tokens in map(int, options.tokens.split(",")):
        for dim in map(int, options.dims.split(",")):
            new = min(tokens, options.chunk or tokens)
            dtype = getattr(torch, options.dtype)
            q = torch.randn(1, heads[0], new, dim).to(dtype)
            k, v = (torch.randn(1, heads[1], tokens, dim).to(dtype) for _ in range(2))
            size, scale = query_block(heads[0] // heads[1]), dim**-0.5
            sides: dict[str, Callable[[], object]] = {
                "exact": partial(ops.attend_causal, q, k, v, scale=scale),
                "choice": partial(
                    SampledQueries, ops, q[0], k[0], v[0], size, scale=scale, softcap=None
                ),
            }
            work = {}
            for density in map(float, options.densities.split(",")):
                mask, work[density] = random_lists(heads[1], tokens, new, size, density)
                sides[f"{density:g}"] = partial(ops.attend_blocks, q, k, v, mask, scale=scale)
            seconds = timed(sides, options.rounds)
            row: Row = {"dim": dim, "tokens": tokens, "chunk": new, "choice": seconds["choice"]}
            row["choice"] /= seconds["exact"]
            for density, share in work.items():
                row[f"over the share at {density:g}"] = (
                    seconds[f"{density:g}"] / seconds["exact"] / share
                )
            yield told(row)


def random_lists(
    kv_heads: int, tokens: int, new: int, size: int, density: float
) -> tuple[BlockMask, float]:
    """Blocks at random, the first one always; and their share of the pairs of a causal chunk."""
    firsts = torch.arange(tokens - new, tokens, size)
    counts = torch.arange(tokens // KEY_BLOCK) < (firsts // KEY_BLOCK)[:, None]
    listed = (torch.rand(1, kv_heads, *counts.shape) < density) & counts
    listed[..., 0] |= counts[:, 0]
    own = len(firsts) * size * (size + KEY_BLOCK) / 2  # beside the blocks: what is behind them
    before = size * KEY_BLOCK
    share = float(listed.sum()) / kv_heads * before + own
    return BlockMask(listed, size), share / (float(counts.sum()) * before + own)


def texts(options: argparse.Namespace) -> Iterator[Row]:
    """Rows of `texts`."""
    wanted = in_rounds([one for one in TEXTS if one.name in options.only or not options.only])
    with hkv.load("smollm2", dtype="float32", dequantize=True) as llm:
        tokenizer = llm.require_tokenizer()
        for text in wanted[: options.texts]:
            given = options.folder, text, tokenizer, options.context, options.then
            prompt = prompt_of(*given)
            ids = torch.tensor([[*prompt.context, *(prompt.text or ())]])[:, :-1]
            exact, seconds, _ = read(llm, ids, options, HybridConfig(method="full"))
            for error in map(float, options.errors.split(",")):
                config = HybridConfig(method="full", prefill=error)
                found, sparse_seconds, lost = read(llm, ids, options, config)
                assert lost is not None
                kl = (exact.exp() * (exact - found)).sum(-1)
                then = torch.tensor((prompt.text or ())[1:])[:, None]
                beyond = [float(-one[: len(then)].gather(1, then).mean()) for one in (exact, found)]
                yield told(
                    {
                        **{"text": text.name, "kind": text.kind, "aim": error, **asdict(lost)},
                        **{"kl": float(kl.mean()), "most kl": float(kl.max())},
                        "nats": beyond[1] - beyond[0],
                        "top1": fmean((exact.argmax(-1) == found.argmax(-1)).float().tolist()),
                        "seconds": sparse_seconds,
                        "of exact": sparse_seconds / seconds,
                    }
                )


def read(
    llm: hkv.LLM, ids: Tensor, options: argparse.Namespace, config: HybridConfig
) -> tuple[Tensor, float, PrefillLoss | None]:
    """Log-probabilities [then, V], seconds of the process for the prompt, and the loss."""
    cache, model = llm.runtime.cache(config), llm.model
    with llm.runtime.generating(), torch.inference_mode():
        cache.kv.means.reserve(ids.shape[1])
        begin = time.process_time()
        model(ids[:, : options.context], **passing(cache), use_cache=True, logits_to_keep=1)
        seconds = time.process_time() - begin
        found = []
        for some in ids[:, options.context :].split(_STEP, 1):
            logits = model(some, **passing(cache), use_cache=True).logits
            found.append(logits[0].float().log_softmax(-1))
    lost = cache.kv.prefill_loss()
    cache.close()
    return torch.cat(found), seconds, lost


def needle(options: argparse.Namespace) -> Iterator[Row]:
    """Rows of `needle`."""
    torch.set_num_threads(1)
    for tokens in map(int, options.tokens.split(",")):
        samples = [
            make_sample(task, tokens, num_records=128, num_questions=options.questions, seed=seed)
            for seed, task in enumerate(options.tasks.split(","))
        ]
        for prefill in ("exact", *map(float, options.errors.split(","))):
            for task, sample in zip(options.tasks.split(","), samples, strict=True):
                yield told(answers(task, tokens, sample, prefill))


def answers(task: str, tokens: int, sample: Sample, prefill: Any) -> Row:
    """Right answers of one context."""
    with hkv.load("needle", dtype="float32", config={"method": "full", "prefill": prefill}) as llm:
        begin = time.process_time()
        with llm.context(sample.context.tolist()) as context:
            seconds = time.process_time() - begin
            right = 0
            for question in sample.questions:
                asked = len(question.answer)
                got = context.ask(list(question.ids), max_new_tokens=asked)
                right += is_correct(question, got.token_ids)
    lost = got.prefill
    return {
        **{"task": task, "tokens": tokens, "prefill": prefill, "seconds": seconds},
        **{"right": right, "of": len(sample.questions)},
        "density": None if lost is None else lost.density,
        "error": None if lost is None else lost.error,
        "worst_error": None if lost is None else lost.worst_error,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("cost")
    one.add_argument("--tokens", default="8192,16384")
    one.add_argument("--chunk", type=int, help="the last tokens alone; all without")
    one.add_argument("--dims", default="64,128")
    one.add_argument("--densities", default="0.25,0.1")
    one.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    one.add_argument("--heads", type=int, default=4)
    one.add_argument("--kv-heads", type=int, default=1)
    one.add_argument("--rounds", type=int, default=3)
    one.set_defaults(rows=cost)
    other = commands.add_parser("texts")
    other.add_argument("folder", type=Path, help="of benchmarks/texts/make.py")
    other.add_argument("--context", type=int, default=7936)
    other.add_argument("--then", type=int, default=255)
    other.add_argument("--errors", default="0.05,0.1")
    other.add_argument("--texts", type=int, default=8)
    other.add_argument("--only", default=(), type=lambda text: tuple(text.split(",")))
    other.set_defaults(rows=texts)
    third = commands.add_parser("needle")
    third.add_argument("--tokens", default="16384,32768")
    third.add_argument("--tasks", default="key_value,multi_query")
    third.add_argument("--errors", default="0.05,0.1")
    third.add_argument("--questions", type=int, default=32)
    third.set_defaults(rows=needle)
    options = parser.parse_args()
    torch.manual_seed(0)
    given = {name: value for name, value in vars(options).items() if name != "rows"}
    document = {
        "benchmark": "sparse_prefill",
        "options": {**given, "folder": ""},
        "surroundings": surroundings(),
        "environment": probe_environment().model_dump(mode="json"),
        "rows": list(options.rows(options)),
    }
    print(compact(document), end="")


if __name__ == "__main__":
    main()
