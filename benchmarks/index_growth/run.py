"""What becomes of a graph while thousands of keys are added to it.

    HYBRID_KV_THREADS=1 python benchmarks/index_growth/run.py --heads paper:5,stress:5

A made-up head (`hybrid_kv/eval/synthetic.py`, PROFILE:SEED) is decoded from the end of its prompt
on: every position searches, and every 16 positions the keys that have left the window are added.
`tail` scans them one and all, `rebuilt` is built anew at each mark with what the prompt and
decoding asked for. Recall of the exact best 100 and keys read (for the group of
four query heads) are those of positions to come, which took no part in any build. Stdout is one
JSON document.
"""

from __future__ import annotations

import argparse
import sys
from copy import copy
from time import thread_time
from typing import Any

import torch

from hybrid_kv.config import IndexConfig, parse_count
from hybrid_kv.eval.synthetic import PROFILES, SyntheticHead
from hybrid_kv.index.graph import GraphIndex
from hybrid_kv.report.files import compact

TOP_K = 100
WINDOW = 512
PAGE = 16
TEST_SPAN, TEST_EVERY = 512, 8
SAMPLES = 4096  # of the prompt's end, and spread over it


class Decoding:
    """A head's keys [1, N, D] and queries [1, G, D] by position after the prompt."""

    def __init__(self, profile: str, seed: int, num_keys: int, added: int) -> None:
        total = num_keys + added + WINDOW + TEST_SPAN
        self._made = SyntheticHead(PROFILES[profile], total, weight_seed=seed, text_seed=seed)
        self.num_keys, self.added = num_keys, added
        self.keys = self._made.keys.half()[None]
        end = num_keys + WINDOW
        spread = torch.arange(0, end - SAMPLES, max(1, (end - SAMPLES) // SAMPLES))
        self.prompt = self._queries(torch.cat([spread, torch.arange(end - SAMPLES, end)]))[None]
        self._later = self._queries(torch.arange(end, end + added + TEST_SPAN))

    def _queries(self, rows: torch.Tensor) -> torch.Tensor:
        """[G, M, D]."""
        heads = range(self._made.num_q_heads)
        return torch.stack([self._made.build_queries(head, rows) for head in heads])

    def ask(self, position: int) -> torch.Tensor:
        return self._later[None, :, position]

    def samples(self, position: int) -> torch.Tensor:
        """What a build at this position could learn from."""
        return torch.cat([self.prompt, self._later[None, :, :position]], 2)

    def test(self, position: int) -> list[torch.Tensor]:
        span = range(position, position + TEST_SPAN, TEST_EVERY)
        return [self.ask(later) for later in span]


def build(data: Decoding, count: int, samples: torch.Tensor, **params: Any) -> GraphIndex:
    index = IndexConfig(kind="graph", min_keys=1, **params).build()
    assert isinstance(index, GraphIndex)
    index.build(data.keys[:, :count], samples)
    return index


def examine(index: GraphIndex, data: Decoding, position: int, first_beam: int) -> dict[str, Any]:
    """What a search finds and reads, as the index is and with the beam that it had at first."""
    watched = copy(index)
    if index._walks is not None:
        watched._walks = copy(index._walks)
    as_it_is = measure(watched, data, position)
    watched.params = index.params.model_copy(update={"beam": first_beam})
    return {
        "added": position,
        "serves": index.reports[0].serves,
        "beam": index.reports[0].beam,
        **as_it_is,
        "first_beam": {"beam": first_beam, **measure(watched, data, position)},
        "memory_bytes": index.memory_bytes,
    }


def measure(index: GraphIndex, data: Decoding, position: int) -> dict[str, float]:
    keys = data.keys[:, : data.num_keys + position]
    found, new, rows = [], [0, 0], 0
    for queries in data.test(position):
        result = index.search(queries, TOP_K)
        exact = (queries[0] @ keys[0].float().T).topk(TOP_K).indices
        hit = (exact[:, :, None] == result.ids[0][:, None]).any(-1)
        later = exact >= data.num_keys
        found.append(hit.float().mean())
        new[0] += int((hit & later).sum())
        new[1] += int(later.sum())
        rows += result.rows_read or 0
    return {
        "recall": float(torch.stack(found).mean()),
        "later_keys_found": new[0] / max(1, new[1]),
        "later_keys_share": new[1] / (len(found) * TOP_K * queries.shape[1]),
        "rows_read": rows / len(found),
        "rows_ratio": rows / len(found) / keys.shape[1],
    }


def decode(data: Decoding, marks: list[int], **params: Any) -> dict[str, Any]:
    """Searches and adds as a runtime does; what the adds took, and every mark."""
    index = build(data, data.num_keys, data.prompt, **params)
    beam = index.reports[0].beam
    rows, adds = [examine(index, data, 0, beam)], []
    for position in range(data.added):
        index.search(data.ask(position), TOP_K)
        if (position + 1) % PAGE:
            continue
        begin = thread_time()
        index.add(data.keys[:, : data.num_keys + position + 1])
        adds.append(thread_time() - begin)
        if position + 1 in marks:
            rows.append(examine(index, data, position + 1, beam))
            print("  ", rows[-1], file=sys.stderr, flush=True)
    long = [seconds for seconds in adds if seconds > 0.01]
    return {
        "marks": rows,
        "add_s_max": max(adds),
        "add_s_sum": sum(adds),
        "long_adds": len(long),
        "reason": index.reports[0].reason,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--heads", default="paper:5", help="PROFILE:SEED,...")
    parser.add_argument("--n", type=parse_count, default=131072, help="keys of the prompt")
    parser.add_argument("--added", type=parse_count, default=8192)
    parser.add_argument("--skip", default="", help="tail,rebuilt")
    options = parser.parse_args()
    marks = [mark for mark in (2048, 4096, 8192) if mark <= options.added]
    results: dict[str, Any] = {"num_keys": options.n}
    for name in options.heads.split(","):
        profile, _, seed = name.partition(":")
        data = Decoding(profile, int(seed or 0), options.n, options.added)
        table: dict[str, Any] = {}
        print(name, file=sys.stderr, flush=True)
        if "tail" not in options.skip:
            table["tail"] = decode(data, marks)
            print("tail", table["tail"], file=sys.stderr, flush=True)
        if "rebuilt" not in options.skip:
            table["rebuilt"] = {"marks": []}
            for mark in marks:
                index = build(data, options.n + mark, data.samples(mark))
                table["rebuilt"]["marks"].append(examine(index, data, mark, index.reports[0].beam))
                print("rebuilt", table["rebuilt"]["marks"][-1], file=sys.stderr, flush=True)
        results[name] = table
    print(compact(results), end="")


if __name__ == "__main__":
    main()
