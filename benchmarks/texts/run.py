"""What methods lose on many texts: one row of a CSV for each text, method and budget.

    python benchmarks/texts/make.py TEXTS
    python benchmarks/texts/run.py TEXTS --prefills PREFILLS   # goes on where it was stopped
    python benchmarks/texts/summary.py

SmolLM2-135M (extra smollm2, float32) reads the first 4,096 tokens of a text exactly, once for all
methods, and 128 more through each of them, 16 at a time. Texts come in rounds of the eight kinds,
so that a run that was stopped has some of each. `--prefills` keeps what the exact readings left,
half a gigabyte each, for the next run; `--prefills-only` makes them and ends. `--again` measures
methods anew whose rows are of older code.
"""

from __future__ import annotations

import argparse
import csv
import gc
import sys
from collections.abc import Iterator, Sequence
from dataclasses import fields as fields_of
from functools import reduce
from hashlib import sha256
from operator import or_
from pathlib import Path
from statistics import fmean
from time import perf_counter
from typing import Any, NamedTuple

if __name__ == "__main__":  # a script: the project's root is not on the path
    sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from torch import Tensor

import hybrid_kv as hkv
from benchmarks.texts.make import TEXTS, Text
from hybrid_kv.config import HybridConfig
from hybrid_kv.contest.arguments import FULL, EvalCase, contenders
from hybrid_kv.contest.measure import EvalTarget, reading
from hybrid_kv.contest.prompts import PrefilledPrompt, Prompt, PromptBuilder, SharedPrompt
from hybrid_kv.ops.tail import moments_bytes
from hybrid_kv.planning.plan import ModelFacts, model_facts
from hybrid_kv.types import Needs

MODEL = "smollm2"
ROWS = Path(__file__).with_name("rows.csv")
COLUMNS = (
    "text",
    "kind",
    "method",
    "budget",
    "attended",
    "estimate",
    "bytes",
    "nats",
    "kl",
    "top1",
)
METHODS = (
    "hybrid",
    "flat",
    "quest",
    "shadowkv",
    "infllm",
    "snapkv",
    "snapkv:demote=offload",
    "h2o",
    "streaming_llm",
    "sparq",
    "retroinfer",
    "pqcache",
    "magic_pig",
)
_STEP, _TIMED = 16, 2
"""Tokens read at once; steps of one token, whose bytes are counted."""
_PAGE = 8
"""Tokens; 1% of 4,096 are 41."""


class Kept(NamedTuple):
    """What an exact reading left: the prompt, the evidence it has, log-probabilities [T, V]."""

    prompt: PrefilledPrompt
    needs: Needs
    full: Tensor
    full_fields: dict[str, Any]

    def context(self) -> PrefilledPrompt:
        """As `SharedPrompt`."""
        return self.prompt


class Rows:
    """The CSV: read whole, appended to row by row."""

    def __init__(self, path: Path, again: Sequence[str] = ()) -> None:
        self._path = path
        rows = []
        if path.exists():
            with path.open(newline="") as file:
                rows = [row for row in csv.DictReader(file) if row["method"] not in again]
        self._known = {self._key(row) for row in rows}
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)

    def __contains__(self, key: tuple[str, str, str]) -> bool:
        return key in self._known

    def add(self, row: dict[str, Any]) -> None:
        """Appends a row."""
        self._known.add(self._key(row))
        with self._path.open("a", newline="") as file:
            csv.DictWriter(file, COLUMNS, lineterminator="\n").writerow(row)

    @staticmethod
    def _key(row: dict[str, Any]) -> tuple[str, str, str]:
        return row["text"], row["method"], row["budget"]


def in_rounds(texts: Sequence[Text]) -> list[Text]:
    """The first text of every kind, then the second of each."""
    kinds: dict[str, list[Text]] = {}
    for text in texts:
        kinds.setdefault(text.kind, []).append(text)
    longest = max(map(len, kinds.values()))
    return [some[i] for i in range(longest) for some in kinds.values() if i < len(some)]


def taking_part(methods: Sequence[str], budgets: Sequence[str], context: int) -> list[EvalCase]:
    """Full attention and the methods under each budget; those that a budget refuses are named."""
    found = list(contenders(methods, budgets, context, {"page_size": _PAGE}))
    for one in found:
        if one.refused is not None:
            print(f"{one.name} at {one.budget}: {one.refused}", file=sys.stderr)
    return [one for one in found if one.refused is None]


def estimate_entries(facts: ModelFacts, config: HybridConfig, context: int) -> int:
    """Entries that a query head could attend for the bytes of the moments that it is given."""
    cold = getattr(config, "cold", None)
    if getattr(cold, "estimate", "none") != "gaussian":
        return 0
    worth = [
        moments_bytes(1, shape.head_dim, context) / (2 * shape.head_dim * facts.dtype_bytes)
        for shape in facts.layers
    ]
    return round(fmean(worth))


def read_exactly(
    place: EvalTarget, prompt: Prompt, needs: Needs, config: HybridConfig, path: Path | None
) -> Kept:
    """The prompt under full attention; from `path`, where an earlier run left all evidence."""
    if path is not None and path.exists():
        kept = restored(*torch.load(path, weights_only=False))
        if kept.needs | needs == kept.needs:
            return kept
    shared = SharedPrompt(place.runtime, prompt.context, needs)
    try:
        fields, full = reading(
            place, config, shared, prompt, _STEP, None, looked=False, timed=_TIMED
        )
        kept = Kept(shared.context(), needs, full, fields)
        if path is not None:
            partial = path.with_suffix(".part")
            torch.save(tuple(kept), partial)
            partial.replace(path)
        return kept
    finally:
        shared.close()


def restored(prompt: PrefilledPrompt, *others: Any) -> Kept:
    """What was kept, a prompt of an earlier version with the defaults of fields that it lacks."""
    known = {one.name for one in fields_of(PrefilledPrompt) if hasattr(prompt, one.name)}
    return Kept(PrefilledPrompt(**{name: getattr(prompt, name) for name in known}), *others)


def row_of(
    text: Text, who: tuple[EvalCase, str], place: EvalTarget, fields: dict[str, Any], context: int
) -> dict[str, Any]:
    """A row of the CSV for a case and its budget; nats beyond full attention."""
    one, budget = who
    counters = fields["counters"]
    beyond = fmean(fields["nats"]) - (fmean(fields["full_nats"]) if one.name != FULL else 0)
    return {
        **{"text": text.name, "kind": text.kind, "method": one.name, "budget": budget},
        "attended": f"{counters.attended_tokens:.1f}",
        "estimate": estimate_entries(place.facts, one.config, context),
        "bytes": f"{counters.read_bytes:.0f}",
        "nats": f"{beyond:.5f}",
        "kl": f"{fmean(fields['kl']):.6f}",
        "top1": f"{fmean(fields['agrees']):.5f}",
    }


def prompt_of(folder: Path, text: Text, place_tokenizer: Any, context: int, then: int) -> Prompt:
    """The first tokens of a text, and those behind them."""
    content = (folder / f"{text.name}.txt").read_bytes().decode()
    ids = list(place_tokenizer(content)["input_ids"])
    if len(ids) < context + then + 1:
        raise SystemExit(f"{text.name} has {len(ids)} tokens, {context + then + 1} are needed")
    return Prompt(ids[:context], text=tuple(ids[context : context + then + 1]))


def lacking(rows: Rows, text: Text, found: Sequence[EvalCase]) -> Iterator[tuple[EvalCase, str]]:
    """Whom to measure on a text, and the budget as the CSV has it."""
    for one in found:
        budget = one.budget or ""
        if (text.name, one.name, budget) not in rows:
            yield one, budget


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    listed = {"type": lambda text: tuple(text.split(","))}
    parser.add_argument("texts", type=Path, help="folder of make.py")
    parser.add_argument("--methods", default=METHODS, **listed)
    parser.add_argument("--budgets", default=("1%", "2%", "5%", "10%"), **listed)
    parser.add_argument("--only", default=(), help="names of texts", **listed)
    parser.add_argument("--again", default=(), help="methods to measure anew", **listed)
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--then", type=int, default=128)
    parser.add_argument("--prefills", type=Path, help="folder that keeps exact readings")
    parser.add_argument("--prefills-only", action="store_true")
    parser.add_argument("--out", type=Path, default=ROWS)
    args = parser.parse_args()
    if args.prefills is not None:
        args.prefills.mkdir(parents=True, exist_ok=True)
    rows = Rows(args.out, args.again)
    found = taking_part(args.methods, args.budgets, args.context)
    needs = reduce(or_, (one.config.build().needs for one in found), Needs())
    failed = 0
    with hkv.load(MODEL, dtype="float32", dequantize=True) as llm:
        tokenizer = llm.require_tokenizer()
        place = EvalTarget(
            llm.runtime, model_facts(MODEL, dtype="float32"), PromptBuilder(tokenizer)
        )
        for text in in_rounds([one for one in TEXTS if one.name in args.only or not args.only]):
            wanted = list(lacking(rows, text, found))
            if not wanted and not args.prefills_only:
                continue
            begin = perf_counter()
            prompt = prompt_of(args.texts, text, tokenizer, args.context, args.then)
            read = repr((prompt.context, prompt.text)).encode()
            name = f"{text.name}-{sha256(read).hexdigest()[:12]}.pt"
            path = None if args.prefills is None else args.prefills / name
            kept = read_exactly(place, prompt, needs, found[0].config, path)
            for one, budget in () if args.prefills_only else wanted:
                failed += not _measure(rows, text, place, (one, budget), kept, prompt)
                gc.collect()  # caches hold each other
            print(f"{text.name}: {perf_counter() - begin:.0f} s", file=sys.stderr, flush=True)
    sys.exit(1 if failed else 0)


def _measure(
    rows: Rows, text: Text, place: EvalTarget, who: tuple[EvalCase, str], kept: Kept, prompt: Prompt
) -> bool:
    """Adds a row; a method that fails is named and ends no other."""
    one, budget = who
    try:
        if one.name == FULL:
            fields = kept.full_fields
        else:
            fields, _ = reading(
                place, one.config, kept, prompt, _STEP, kept.full, looked=False, timed=_TIMED
            )
        rows.add(row_of(text, who, place, fields, len(prompt.context)))
    except Exception as error:
        print(f"{text.name}, {one.name} at {budget}: {error}", file=sys.stderr, flush=True)
        return False
    return True


if __name__ == "__main__":
    torch.manual_seed(0)
    main()
