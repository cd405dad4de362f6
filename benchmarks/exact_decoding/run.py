"""Exact decoding: what its passes cost, and whether its tokens are those of full attention.

    python benchmarks/exact_decoding/run.py cost --tokens 32768,131072 --weights bfloat16,q4_k
    python benchmarks/texts/make.py TEXTS
    python benchmarks/exact_decoding/run.py texts TEXTS --context 4096 --new 160
    python benchmarks/exact_decoding/run.py limit TEXTS --budgets 0.05 --texts 3 --new 64
    python benchmarks/exact_decoding/run.py rounding TEXTS --context 2048 --texts 8 --dtype bfloat16
    python benchmarks/exact_decoding/run.py needle --tokens 32768

`cost`: one decoder layer of Llama-3-8B with its weights over made-up keys and values, in one
thread: milliseconds of a step of `full`, of a draft by the method, and of dense passes of some
numbers of tokens. From these, by the acceptance given, the time of a token over that of `full`.
`texts`: SmolLM2 in float32 continues texts, greedily or `--sampled`: tokens of `exact=True` against
those of `full`, and how many drafts were accepted. `limit`: milliseconds of CPU time a token by the
method alone, with `max_error=0.01`, with `exact=True` and by `full`, in turns on one context, and
of these the median. `rounding`: tokens of passes of 8 that are not those of steps of `full` behind
the same tokens, with their places and how far apart both logits are in a step, in logits and in
steps of the dtype. `needle`: answers about records in a long
context that are those of `full`.
Stdout is one JSON document.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from operator import eq
from pathlib import Path
from statistics import median
from typing import Any

if __name__ == "__main__":  # a script: the project's root is not on the path
    sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from torch import Tensor

import hybrid_kv as hkv
from benchmarks.common.surroundings import surroundings
from benchmarks.prompt_attention.run import told
from benchmarks.texts.make import TEXTS
from benchmarks.texts.run import in_rounds, prompt_of
from hybrid_kv.config import HybridConfig
from hybrid_kv.eval.filling import SyntheticContext
from hybrid_kv.eval.needle import Sample, is_correct, make_sample
from hybrid_kv.models.cache_layers import hybrid_layers
from hybrid_kv.models.cache_state import passing
from hybrid_kv.models.exact_steps import ExactWork
from hybrid_kv.models.hf_cache import TieredCache
from hybrid_kv.report.files import compact
from hybrid_kv.report.run import probe_environment
from hybrid_kv.types import Needs

Row = dict[str, Any]
_RUN = 8


def cost(options: argparse.Namespace) -> Iterator[Row]:
    """Rows of `cost`."""
    for weights in options.weights.split(","):
        plain = weights in ("bfloat16", "float16", "float32")
        dtype, packed = (weights, {}) if plain else ("bfloat16", {"weights": weights})
        with hkv.load("random:llama-3-8b", layers=1, dtype=dtype, **packed) as llm:
            for tokens in map(int, options.tokens.split(",")):
                yield told(
                    {"weights": weights, "tokens": tokens, **layer_cost(llm, tokens, options)}
                )


def layer_cost(llm: hkv.LLM, tokens: int, options: argparse.Namespace) -> Row:
    """Milliseconds of steps and passes of the only layer of a model."""
    info, drafts = llm.runtime.info, [int(count) for count in options.drafts.split(",")]
    context = SyntheticContext(info, tokens, max_steps=2, made_heads=1, seed=0)
    row: Row = {}
    budget = max(128, round(options.budget * tokens))
    for name, config in (
        ("full", HybridConfig(method="full")),
        ("draft", HybridConfig.model_validate({"method": "hybrid", "top_k": budget})),
    ):
        cache = filled(llm, context, config.replace(index_build="wait"))
        row[f"{name} ms"] = timed(llm, cache, 1, options.rounds, dense=False)
        if name == "draft":
            for count in drafts:
                row[f"pass of {count + 1} ms"] = timed(
                    llm, cache, count + 1, max(2, options.rounds // 2), dense=True
                )
        cache.close()
    for count in drafts:
        agreed = options.agreement
        tokens_out = (1 - agreed ** (count + 1)) / (1 - agreed)
        spent = count * row["draft ms"] + row[f"pass of {count + 1} ms"]
        row[f"of full at {count}"] = spent / tokens_out / row["full ms"]
    return row


def filled(llm: hkv.LLM, context: SyntheticContext, config: HybridConfig) -> TieredCache:
    """A cache that holds made-up keys and values."""
    cache = llm.runtime.cache(config)
    needs, dtype = cache.kv.means.method.needs, llm.model.dtype
    with torch.inference_mode():
        for layer in hybrid_layers(cache.layers):
            seen = context.evidence(layer.layer_idx, needs, dtype) if needs != Needs() else None
            layer.fill(*context.kv(layer.layer_idx, dtype), () if seen is None else (seen,))
    return cache


def timed(llm: hkv.LLM, cache: TieredCache, new: int, rounds: int, *, dense: bool) -> float:
    """Milliseconds of a forward of `new` tokens through the decoder layers, the median; of one
    that is not dense among _RUN in a row.
    """
    ids, body, times = torch.full((1, new), 7), llm.model.get_decoder(), []
    with llm.runtime.generating(), torch.inference_mode():
        for _ in range(rounds + 1):
            cache.kv.more_prompt = dense
            for _ in range(1 if dense else _RUN):
                begin = time.thread_time()
                body(ids, **passing(cache), use_cache=True)
                times.append(time.thread_time() - begin)
            cache.kv.more_prompt = False
            cache.crop(-(1 if dense else _RUN) * new)
    return 1e3 * median(times[1:])


def texts(options: argparse.Namespace) -> Iterator[Row]:
    """Rows of `texts`."""
    wanted = in_rounds([one for one in TEXTS if one.name in options.only or not options.only])
    configs = [HybridConfig.model_validate(one) for one in settings(options)]
    with hkv.load("smollm2", config="full", dtype="float32", dequantize=True) as llm:
        tokenizer, prompts = llm.require_tokenizer(), []
        for text in wanted[: options.texts]:
            prompt = prompt_of(options.folder, text, tokenizer, options.context, 1)
            prompts.append((text, [int(token) for token in prompt.context]))
        full = [whole(llm, ids, options) for _, ids in prompts]
    for config in configs:
        with hkv.load("smollm2", config=config, dtype="float32", dequantize=True) as llm:
            for (text, ids), right in zip(prompts, full, strict=True):
                yield told(
                    {"text": text.name, "kind": text.kind, **compared(llm, ids, right, options)}
                )


def limit(options: argparse.Namespace) -> Iterator[Row]:
    """Rows of `limit`."""
    wanted = in_rounds([one for one in TEXTS if one.name in options.only or not options.only])
    same: dict[str, Any] = {"dtype": "float32", "dequantize": True}
    with (
        hkv.load("smollm2", config=settings(options)[0], **same) as llm,
        hkv.load("smollm2", config="full", **same) as full,
    ):
        for text in wanted[: options.texts]:
            prompt = prompt_of(options.folder, text, llm.require_tokenizer(), options.context, 1)
            ids = [int(token) for token in prompt.context]
            with llm.context(ids[:-1]) as own, full.context(ids[:-1]) as other:
                ways: dict[str, tuple[hkv.Context, Row]] = {
                    "alone": (own, {}),
                    "limit": (own, {"max_error": 0.01}),
                    "exact": (own, {"exact": True}),
                    "full": (other, {}),
                }
                yield told({"text": text.name, **milliseconds(ways, ids[-1], options)})


def milliseconds(
    ways: dict[str, tuple[hkv.Context, Row]], last: int, options: argparse.Namespace
) -> Row:
    """CPU time of a token each way, the median of rounds behind a first one."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(options.rounds + 1):
        for name, (context, how) in ways.items():
            begin = time.process_time()
            context.ask([last], max_new_tokens=options.new, eos_token_id=[], **how)
            times[name].append(1e3 * (time.process_time() - begin) / options.new)
    return {f"{name} ms": median(own[1:]) for name, own in times.items()}


def rounding(options: argparse.Namespace) -> Iterator[Row]:
    """Rows of `rounding`."""
    wanted = in_rounds([one for one in TEXTS if one.name in options.only or not options.only])
    same: dict[str, Any] = {"dtype": options.dtype, "dequantize": True}
    with (
        hkv.load("smollm2", config="full", **same) as full,
        hkv.load("smollm2", config=settings(options)[0], **same) as llm,
    ):
        for text in wanted[: options.texts]:
            prompt = prompt_of(options.folder, text, llm.require_tokenizer(), options.context, 1)
            ids = torch.tensor([int(token) for token in prompt.context])[None]
            by_steps, tokens = stepped(full, ids, options.new)
            by_passes = passed_over(llm, ids, tokens)
            found = others(by_steps, by_passes)
            row = {"text": text.name, "kind": text.kind, "new": options.new, "others": found}
            furthest = (by_steps - by_passes).abs().max()
            yield told({**row, "logits apart": float(furthest)})


def stepped(llm: hkv.LLM, ids: Tensor, new: int) -> tuple[Tensor, Tensor]:
    """Logits [new, V] of greedy steps behind a prompt [1, T], and the tokens [1, new] they read."""
    cache, logits, tokens = llm.runtime.cache(), list[Tensor](), [ids[:, -1:]]
    with llm.runtime.generating(), torch.inference_mode():
        llm.model(ids[:, :-1], **passing(cache), logits_to_keep=1)
        for _ in range(new):
            logits.append(llm.model(tokens[-1], **passing(cache)).logits[0, -1].float())
            tokens.append(logits[-1].argmax()[None, None])
    cache.close()
    return torch.stack(logits), torch.cat(tokens[:-1], 1)


def passed_over(llm: hkv.LLM, ids: Tensor, tokens: Tensor) -> Tensor:
    """Logits [new, V] of dense passes over tokens [1, new]."""
    cache, logits = llm.runtime.cache(), list[Tensor]()
    with llm.runtime.generating(), torch.inference_mode():
        llm.model(ids[:, :-1], **passing(cache), logits_to_keep=1)
        cache.kv.more_prompt = True
        logits += [
            llm.model(one, **passing(cache)).logits[0].float() for one in tokens.split(_RUN, 1)
        ]
        cache.kv.more_prompt = False
    cache.close()
    return torch.cat(logits)


def others(by_steps: Tensor, by_passes: Tensor) -> list[tuple[int, float, float]]:
    """Places where the likeliest tokens differ, and how far apart their logits in a step are, in
    logits and in steps of bfloat16.
    """
    found = []
    for place, (step, other) in enumerate(zip(by_steps, by_passes.argmax(-1), strict=True)):
        if margin := float(step.max() - step[other]):
            spacing = 2.0 ** (torch.frexp(step.max()).exponent.item() - 8)
            found.append((place, margin, margin / spacing))
    return found


def needle(options: argparse.Namespace) -> Iterator[Row]:
    """Rows of `needle`."""
    for tokens in map(int, options.tokens.split(",")):
        sample = make_sample(
            "key_value", tokens, num_records=128, num_questions=options.questions, seed=0
        )
        full, _ = answers(sample, {"method": "full"}, exact=False)
        for keys in (8, 128):
            config = {"method": "hybrid", "top_k": keys, "index_build": "wait"}
            alone, _ = answers(sample, config, exact=False)
            found, works = answers(sample, config, exact=True)
            yield told(
                {
                    **{"tokens": tokens, "keys": keys, "answers": len(full)},
                    "right": sum(map(is_correct, sample.questions, found)),
                    "equal to full": sum(map(eq, found, full)),
                    "method alone": sum(map(eq, alone, full)),
                    "accepted": sum(w.accepted for w in works) / sum(w.drafted for w in works),
                }
            )


def answers(
    sample: Sample, config: dict[str, Any], *, exact: bool
) -> tuple[list[list[int]], list[ExactWork]]:
    """Answers to all questions about one context, and what exact decoding took."""
    found, ids = [], sample.context.tolist()
    with hkv.load("needle", dtype="float32", config=config) as llm, llm.context(ids) as context:
        for question in sample.questions:
            asked = len(question.answer)
            found.append(context.ask(list(question.ids), max_new_tokens=asked, exact=exact))
    return [one.token_ids for one in found], [one.exact for one in found if one.exact is not None]


def settings(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Settings of the method, by share of the context; never fewer than 128 keys."""
    budgets = [float(share) for share in options.budgets.split(",")]
    keys = [max(options.least, round(share * options.context)) for share in budgets]
    return [{"method": "hybrid", "top_k": count, "index_build": "wait"} for count in keys]


def whole(llm: hkv.LLM, ids: list[int], options: argparse.Namespace) -> hkv.Generation:
    """The tokens that follow a prompt, by the method of a model."""
    with llm.context(ids[:-1]) as context:
        return answer(context, ids[-1], options)


def answer(
    context: hkv.Context, last: int, options: argparse.Namespace, exact: int = 0
) -> hkv.Generation:
    """The tokens that follow, the likeliest or drawn from the whole distribution by one seed."""
    how: dict[str, Any] = {"do_sample": True, "seed": 1, "top_k": 0} if options.sampled else {}
    return context.ask(
        [last], max_new_tokens=options.new, eos_token_id=[], exact=exact or False, **how
    )


def compared(
    llm: hkv.LLM, ids: list[int], right: hkv.Generation, options: argparse.Namespace
) -> Row:
    """Tokens of exact decoding and of the method alone against those of `full`."""
    row: Row = {"keys": llm.config.cold.top_k, "new": options.new}
    with llm.context(ids[:-1]) as context:
        alone = answer(context, ids[-1], options)
        row["method alone differs at"] = first_other(alone.token_ids, right.token_ids)
        for drafts in map(int, options.drafts.split(",")):
            found = answer(context, ids[-1], options, drafts)
            work = found.exact
            assert work is not None
            row |= {
                f"differs at, {drafts}": first_other(found.token_ids, right.token_ids),
                f"accepted, {drafts}": work.accepted / max(1, work.drafted),
                f"tokens a pass, {drafts}": (options.new - 1) / max(1, work.passes),
            }
    return row


def first_other(found: list[int], right: list[int]) -> int | None:
    """Place of the first token that is another; None for none."""
    pairs = zip(found, right, strict=True)
    return next((place for place, (one, other) in enumerate(pairs) if one != other), None)


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    ways = parser.add_subparsers(dest="way", required=True)
    for way in (cost, texts, limit, rounding, needle):
        own = ways.add_parser(way.__name__)
        own.set_defaults(run=way)
        own.add_argument("--drafts", default="1,3,7,15" if way is cost else "7")
        if way in (texts, limit, rounding):
            own.add_argument("folder", type=Path)
            own.add_argument("--only", nargs="*", default=())
            own.add_argument("--texts", type=int, default=24)
            own.add_argument("--sampled", action="store_true")
        if way in (cost, needle):
            own.add_argument("--tokens", default="32768")
        if way is cost:
            own.add_argument("--weights", default="bfloat16")
            own.add_argument("--budget", type=float, default=0.001)
            own.add_argument("--agreement", type=float, default=0.987)
            own.add_argument("--rounds", type=int, default=8)
        if way is limit:
            own.add_argument("--rounds", type=int, default=3)
        if way is rounding:
            own.add_argument("--dtype", default="bfloat16")
        if way is needle:
            own.add_argument("--questions", type=int, default=32)
        if way in (texts, limit, rounding):
            own.add_argument("--budgets", default="0.02")
            own.add_argument("--least", type=int, default=128)
            own.add_argument("--context", type=int, default=4096)
            own.add_argument("--new", type=int, default=128)
    options = parser.parse_args()
    rows = list(options.run(options))
    document = {
        "benchmark": "exact_decoding",
        "way": options.way,
        "surroundings": surroundings(),
        "environment": probe_environment().model_dump(mode="json"),
        "rows": rows,
    }
    print(compact(document))


if __name__ == "__main__":
    main()
