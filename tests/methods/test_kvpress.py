"""What methods keep of a prompt is what kvpress's own code keeps of the same tensors.

kvpress wants another transformers than this project: HYBRID_KV_KVPRESS names a Python that has it.
scripts/check makes one; `scripts/kvpress` alone makes it and prints its path.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.methods.eviction import PROMPT, Heads, causal_weights, kept_sets, method, run

SCRIPT = Path(__file__).with_name("kvpress_sets.py")
BUDGET, WINDOW, POOL, SINKS = 84, 32, 7, 16
SURE = BUDGET // 2 - WINDOW
"""CriticalKV's first half is of the whole budget there, the window in it."""

pytestmark = pytest.mark.skipif(
    "HYBRID_KV_KVPRESS" not in os.environ,
    reason="HYBRID_KV_KVPRESS names no Python that has kvpress",
)


@pytest.fixture
def output(given: Heads) -> torch.Tensor:
    """[hidden, Hq * D]."""
    return torch.randn(88, len(given[0]) * given[0].shape[-1], dtype=torch.float64)


@pytest.fixture(scope="session")
def presses() -> Iterator[subprocess.Popen[str]]:
    command = [os.environ["HYBRID_KV_KVPRESS"], str(SCRIPT)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
        yield process


@pytest.fixture
def theirs(
    presses: subprocess.Popen[str], given: Heads, output: torch.Tensor, tmp_path: Path
) -> dict[str, Any]:
    q, k, v = (one[:, :PROMPT] for one in given)
    weights = torch.from_numpy(causal_weights(q, k, q.shape[-1] ** -0.5))
    tensors = {"queries": q, "keys": k, "values": v, "weights": weights, "output": output}
    settings = {"budget": BUDGET, "window": WINDOW, "pool": POOL, "sinks": SINKS}
    given_file, kept_file = tmp_path / "given.pt", tmp_path / "kept.pt"
    torch.save(
        {"settings": settings, **{name: one.double() for name, one in tensors.items()}}, given_file
    )
    assert presses.stdin is not None
    assert presses.stdout is not None
    print(given_file, kept_file, sep="\t", file=presses.stdin, flush=True)
    assert presses.stdout.readline() == "kept\n", "kvpress failed; its traceback is on stderr"
    found: dict[str, Any] = torch.load(kept_file)
    return found


def before_window(kept: Any) -> list[set[int]]:
    return [set(head.tolist()) - set(range(PROMPT - WINDOW, PROMPT)) for head in kept]


def test_the_same_entries_are_kept(
    given: Heads, theirs: dict[str, Any], output: torch.Tensor
) -> None:
    common = {"window_tokens": WINDOW, "budget_tokens": BUDGET}
    mean = {"observed_tokens": WINDOW, "pooling": "mean", "pool_tokens": POOL}
    sure = {"value_weighting": "projected", "sure_ratio": (SURE + 0.5) / (BUDGET - WINDOW)}
    ours = {
        "snapkv": method("snapkv", **common, **mean),
        "criticalkv": method("snapkv", **common, **mean, **sure),
        "ada_snapkv": method("ada_snapkv", **common, **mean, safeguard=0.0),
        "keydiff": method("keydiff", budget_tokens=BUDGET, window_tokens=0),
    }
    heads = len(given[1])
    for name, tested in ours.items():
        driven = run(tested, given, new=1, outputs=output.float())
        expected = theirs[name]
        by_head = (
            [set(head.tolist()) for head in expected]
            if name == "keydiff"
            else before_window(expected)
        )
        assert kept_sets(driven.kept, heads) == by_head, name


def test_tova_keeps_the_same_but_for_the_last_token(given: Heads, theirs: dict[str, Any]) -> None:
    """Which stays there in any case."""
    kept = kept_sets(run(method("tova", budget_tokens=BUDGET), given, new=1).kept, len(given[1]))
    for own, other in zip(kept, theirs["tova"], strict=True):
        assert set(other.tolist()) - {PROMPT - 1} <= own
        assert len(own) == BUDGET


def test_streaming_llm_keeps_the_same(given: Heads, theirs: dict[str, Any]) -> None:
    tested = method("streaming_llm", sink_tokens=SINKS, window_tokens=BUDGET - SINKS, page_size=4)
    lost = run(tested, given, new=1, page=4).lost[:, :PROMPT]
    for own, other in zip(lost, theirs["streaming_llm"], strict=True):
        assert set((~own).nonzero()[:, 0].tolist()) == set(other.tolist())


def test_think_keeps_the_same_channels(given: Heads, theirs: dict[str, Any]) -> None:
    tested = method("think", channel_ratio=0.5, observed_tokens=WINDOW)
    kept = run(tested, given, new=1).kept
    assert kept is not None
    for own, other in zip(kept.state["channels"], theirs["think"], strict=True):
        assert own.tolist() == other.nonzero()[:, 0].tolist()
