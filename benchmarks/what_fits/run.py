"""Table of models that fit on a 24 GB card, weights in 4 bits, keys and values in 16.

    python benchmarks/what_fits/run.py
    python benchmarks/what_fits/run.py --write     # into docs/results.md, between marks

Computed from configurations and specifications: nothing is loaded and nothing is measured. A row is
`hybrid-kv plan MODEL --context N --card rtx-4090 --host-memory 256GiB --cores 16 --weights int4`.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

if __name__ == "__main__":  # a script: the project's root is not on the path
    sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.texts.summary import put
from hybrid_kv.config import HybridConfig
from hybrid_kv.counts import parse_count
from hybrid_kv.planning import CARDS, Machine, Plan, Rates, make_plan, rates_of_card
from hybrid_kv.planning.designs import DESKTOP_GBPS, Designs, Host
from hybrid_kv.planning.plan import model_facts
from hybrid_kv.planning.traffic import prompt_rates_of_card

PAGE = Path(__file__).parents[2] / "docs" / "results.md"
CARD, CORES, HOST_BYTES, WEIGHTS = "rtx-4090", 16, 256 * 2**30, "int4"
_GIB = 2**30


class Case(NamedTuple):
    """A shape at a context, with the settings of the cache."""

    shape: str
    context: str
    settings: Mapping[str, str] = MappingProxyType({})


CASES = (
    Case("qwen3.5-27b", "256k"),
    Case("qwen3-32b", "128k", {"prefill_states": "host"}),
    Case("llama-3.1-8b", "1m"),
)


class Row(NamedTuple):
    """One case as it is planned: bytes at the moment when most is needed, milliseconds a token."""

    case: Case
    fits: bool
    device_bytes: int
    weight_bytes: int
    host_bytes: int
    code_bytes: int | None
    as_built_ms: float
    one_graph_ms: float
    dense_tokens: int
    first_token_s: float | None


def planned(case: Case) -> Row:
    """The plan of a case on a card beside a host of two channels of DDR5."""
    card, host = CARDS[CARD], Host(CORES, *DESKTOP_GBPS)
    rates = rates_of_card(card, Rates(host.dram, host.dram, host.gather))
    facts = model_facts(f"random:{case.shape}", weights=WEIGHTS, device=CARD)
    prompt = prompt_rates_of_card(card, facts)
    machine = Machine(CARD, card.memory_bytes, HOST_BYTES, rates, assumed=True, prompt=prompt)
    tokens = parse_count(case.context)
    plan: Plan = make_plan(facts, machine, tokens, HybridConfig(**case.settings))
    dense, hybrid = plan.options[0], plan.options[-1]
    steps = Designs(facts, tokens, card, rates, host, code_bytes=hybrid.code_bytes).all()
    by_design = {re.sub(r".*, ", "", step.design): step.ms for step in steps}
    return Row(
        case,
        hybrid.fits,
        sum(hybrid.device_bytes.values()),
        facts.weight_bytes,
        sum(hybrid.host_bytes.values()),
        hybrid.code_bytes,
        by_design["as built"],
        by_design["one graph"],
        dense.max_context_tokens,
        hybrid.ttft_s,
    )


def table(rows: list[Row]) -> str:
    """The table of docs/results.md."""
    return "\n".join(_lines(rows))


def _lines(rows: list[Row]) -> Iterator[str]:
    free = CARDS[CARD].memory_bytes / _GIB
    device = f"device, of {free:.1f} GiB"
    head = "model, context", device, "host", "ms, as built", "ms, one graph", "prompt"
    yield f"| {' | '.join(head)} | dense ends at |"
    yield "|---|---|---|---|---|---|---|"
    for row in rows:
        device = f"{row.device_bytes / _GIB:.1f} ({row.weight_bytes / _GIB:.1f} weights"
        device += ")" if row.code_bytes is None else f", codes of {row.code_bytes} B a key)"
        given = "".join(f", `{name}={value}`" for name, value in row.case.settings.items())
        yield (
            f"| `{row.case.shape}`, {row.case.context.upper()}{given} | "
            f"{device if row.fits else 'does not fit'} | {row.host_bytes / _GIB:.1f} GiB | "
            f"{row.as_built_ms:.0f} | {row.one_graph_ms:.0f} | "
            f"{'-' if row.first_token_s is None else f'{row.first_token_s:.0f} s'} | "
            f"{row.dense_tokens // 1024}K |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="the page's table")
    made = table([planned(case) for case in CASES])
    if parser.parse_args().write:
        put(PAGE, "what fits", made)
    print(made)


if __name__ == "__main__":
    main()
