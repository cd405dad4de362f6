"""What searching a layer ahead loses, and what of the search it hides.

    .venv/bin/python benchmarks/look_ahead/run.py --model smollm2 --tokens 7424 --then 128

See the README beside it.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from time import perf_counter
from typing import Any

from hybrid_kv.models.cache_state import passing

if __name__ == "__main__":  # a script: the other benchmarks' folder is beside its own
    sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
import torch.nn.functional as F
from torch import Tensor

import hybrid_kv as hkv
from benchmarks.real_model.text import prose
from hybrid_kv.config import HybridConfig
from hybrid_kv.contest import prompts
from hybrid_kv.eval.needle import filler
from hybrid_kv.models.hf_cache import TieredCache
from hybrid_kv.report.files import compact
from hybrid_kv.runtime import look_ahead_state
from hybrid_kv.transfer import SyncExecutor
from hybrid_kv.transfer.cuda import Copies, CudaExecutor

FACTORS = (1, 2, 4)


class HostLane:
    """A way that takes no time, to a device that is the host."""

    def out(self, copies: Copies) -> HostLane:
        for target, source in copies:
            target.copy_(source)
        return self

    def back(self, target: Tensor, source: Tensor) -> None:
        target.copy_(source)

    def stage(self, size: Any, dtype: torch.dtype) -> Tensor:
        return torch.empty(list(size), dtype=dtype)

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


class BesideExecutor(CudaExecutor):
    """Searches in a thread beside the model, as on a GPU machine, and notes when.

    searched: [begin, end] of every search that ran ahead.
    """

    def __init__(self) -> None:
        super().__init__(SyncExecutor(), lambda device: HostLane())
        self.searched: list[tuple[float, float]] = []

    def ahead(self, work: Callable[[], None]) -> Future[None]:
        def timed() -> None:
            begin = perf_counter()
            work()
            self.searched.append((begin, perf_counter()))

        return super().ahead(timed)


def read(llm: hkv.LLM, cache: TieredCache, ids: Tensor) -> tuple[Tensor, list[float]]:
    """Log-probabilities while ids are read one by one, and each step's seconds."""
    parts, times = [], []
    with torch.inference_mode():
        for token in ids:
            begin = perf_counter()
            logits = llm.model(token.view(1, 1), **passing(cache)).logits[0]
            times.append(perf_counter() - begin)
            parts.append(F.log_softmax(logits.float(), -1))
            if cache.kv.auditor is not None:
                cache.kv.auditor.settle()
    return torch.cat(parts), times


def settings(mode: str, factor: int, options: argparse.Namespace) -> HybridConfig:
    return HybridConfig(
        method="retrieval_attention",
        sink_tokens=16,
        window_tokens=512,
        cold={
            "top_k": options.top_k,
            "index": options.index,
            "look_ahead": mode,
            "look_ahead_factor": factor,
        },
        index_build="background",
        audit_every=1,
        audit={"min_recall": 0.0, "max_missed_mass": None, "max_output_error": None},
    )


def by_layer(cache: TieredCache) -> list[dict[str, Any]]:
    ahead = cache.kv.means.look_ahead
    return [] if ahead is None else [ahead.describe(idx) for idx in cache.kv.layers]


def losses_by_layer(llm: hkv.LLM, prompt: Any, ids: Tensor, options: Any) -> dict[int, list[float]]:
    """By layer the mean loss at each of FACTORS, over all steps: a trial that does not end."""
    noted: dict[int, list[list[float]]] = defaultdict(list)
    plain = look_ahead_state.LookAheadState.note
    cache = prompts.open_cache(llm.runtime, settings("auto", 4, options), prompt, wait=False)
    ahead = cache.kv.means.look_ahead
    assert ahead is not None
    known = {id(ahead.standing(idx)): idx for idx in cache.kv.layers}
    look_ahead_state.LookAheadState.note = lambda self, one: noted[known[id(self)]].append(one)  # type: ignore[method-assign]
    try:
        read(llm, cache, ids)
    finally:
        look_ahead_state.LookAheadState.note = plain  # type: ignore[method-assign]
    return {
        idx: [statistics.fmean(of_factor) for of_factor in zip(*rows, strict=True)]
        for idx, rows in sorted(noted.items())
    }


def measure(
    llm: hkv.LLM, name: str, config: HybridConfig, prompt: Any, ids: Tensor, full: Tensor
) -> dict[str, Any]:
    executor = BesideExecutor() if name != "inline" else None
    llm.runtime._executor = executor or SyncExecutor()
    cache = prompts.open_cache(llm.runtime, config, prompt, wait=False)
    found, times = read(llm, cache, ids[:-1])
    kl, audit = (full.exp() * (full - found)).sum(-1), cache.kv.auditor
    assert audit is not None
    recall, missed = audit.audit.recall(), audit.audit.missed_mass()
    seconds = cache.kv.phases.seconds
    row: dict[str, Any] = {
        "name": name,
        "kl": float(kl.mean()),
        "kl_p95": float(kl.quantile(0.95)),
        "nats": -float(found.gather(1, ids[1:, None]).mean()),
        "top_1": float((found.argmax(-1) == full.argmax(-1)).float().mean()),
        "recall": None if recall is None else recall.mean,
        "missed_mass": None if missed is None else missed.mean,
        "looks": len(audit.audit.findings),
        "step_ms_median": 1e3 * statistics.median(times),
        "wait_ms_per_step": 1e3 * seconds["wait"] / len(times),
        "search_ms_per_step": 1e3 * seconds["search"] / len(times),
        "layers": by_layer(cache),
    }
    if executor is not None and executor.searched:
        searched = sum(end - begin for begin, end in executor.searched)
        row["ahead_ms_per_step"] = 1e3 * searched / len(times)
        row["hidden_share"] = max(0.0, 1 - seconds["wait"] / searched)
    print({k: v for k, v in row.items() if k != "layers"}, file=sys.stderr, flush=True)
    llm.runtime._executor.close()
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2", choices=("smollm2", "needle"))
    parser.add_argument("--tokens", type=int, default=7424, help="read with full attention")
    parser.add_argument("--then", type=int, default=128, help="read one by one, each way")
    parser.add_argument("--top-k", type=int, default=100)
    parser.add_argument("--index", default="flat")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)  # a core for the model, another for the search
    llm = hkv.load(options.model, dtype="float32", config=settings("always", 4, options))
    count = options.tokens + options.then + 1
    if options.model == "needle":
        ids = torch.from_numpy(filler(count, 0))
    else:
        ids = prose(llm.tokenizer, count)
    needs = settings("never", 1, options).build().needs
    prompt = prompts.prefill(llm.runtime, ids[: options.tokens].numpy(), needs)
    ids = ids[options.tokens :]
    cache = prompts.open_cache(llm.runtime, HybridConfig(method="full"), prompt)
    full, _ = read(llm, cache, ids[:-1])
    rows = [measure(llm, "never", settings("never", 1, options), prompt, ids, full)]
    for factor in FACTORS:
        config = settings("always", factor, options)
        rows.append(measure(llm, f"always {factor}x", config, prompt, ids, full))
    rows.append(measure(llm, "auto", settings("auto", 4, options), prompt, ids, full))
    rows.append(measure(llm, "inline", settings("always", 4, options), prompt, ids, full))
    llm.runtime._executor = BesideExecutor()
    lost = losses_by_layer(llm, prompt, ids[:-1], options)
    report = {
        "settings": {k: v for k, v in vars(options).items() if k != "json"},
        "full_nats": -float(full.gather(1, ids[1:, None]).mean()),
        "most_lost": look_ahead_state.MOST_LOST,
        "unforeseen": dict(llm.runtime.info.unforeseen or {}),
        "rows": rows,
        "lost_by_layer": {"factors": FACTORS, **lost},
    }
    for idx, of_factor in lost.items():
        print(idx, " ".join(f"{value:.4f}" for value in of_factor), file=sys.stderr)
    if options.json:
        options.json.write_text(compact(report))
    print(compact(report), end="")


if __name__ == "__main__":
    torch.manual_seed(0)
    main()
