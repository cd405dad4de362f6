"""Heads to search in: made-up ones, and those of two small trained models."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.cold_search import minilm, needle
from hybrid_kv.eval.synthetic import PROFILES, SyntheticHead

Prompt = Callable[..., torch.Tensor]
"""(rows [M], horizon=0): queries [G, M, D] of the prompt at these rows, turned to so many positions
behind it where that is known how.
"""


@dataclass(frozen=True)
class Head:
    """A head to search in.

    keys: [N, D] float32. prompt: queries at the keys' positions. calibration, test: queries
    [P, G, D] after the prompt, one group a position, of disjoint positions. steps: [P] positions of
    `test`, of `num_steps`.
    """

    data: str
    seed: int
    keys: torch.Tensor
    prompt: Prompt
    calibration: torch.Tensor
    test: torch.Tensor
    steps: torch.Tensor
    num_steps: int
    source: str

    @property
    def group(self) -> int:
        return self.test.shape[1]


def names_of(data: str) -> list[str]:
    """The heads that a word stands for: all of a trained model, or the one that it names."""
    every = {"minilm": minilm.HEADS, "needle": needle.HEADS}
    return [f"{data}:{name}" for name in every[data]] if data in every else [data]


def load(name: str, num_keys: int, seed: int, positions: int, text: Path | None) -> Head:
    """A head by its name: `paper`, `stress`, `minilm:L4H8`, `needle:L2H1`.

    Args:
        positions: for the test, and as many for calibration.
        text: a file or a folder that `minilm` reads.

    Raises:
        LookupError: what it needs is not installed, or there is no such data.
    """
    kind, _, part = name.partition(":")
    if kind in PROFILES:
        return synthetic(kind, num_keys, seed, positions)
    if kind == "minilm":
        q, k, later, source = minilm.collect(part, num_keys, seed, text)
    elif kind == "needle":
        q, k, later, source = needle.collect(part, num_keys, seed)
    else:
        raise LookupError(
            f"no data is called '{name}'; there are: {', '.join(PROFILES)}, minilm, needle"
        )
    steps = draw_steps(later.shape[1], positions, seed)
    groups = later.transpose(0, 1)
    return Head(
        *(name, seed, k, lambda rows, horizon=0: q[:, rows]),
        *(groups[steps[1]].clone(), groups[steps[0]].clone(), steps[0], len(groups), source),
    )


def synthetic(profile: str, num_keys: int, seed: int, positions: int) -> Head:
    made = SyntheticHead(PROFILES[profile], num_keys, weight_seed=seed, text_seed=seed)
    heads = range(made.num_q_heads)

    def prompt(rows: torch.Tensor, horizon: int = 0) -> torch.Tensor:
        return made.build_samples(rows, horizon).queries[0]

    def later(rows: torch.Tensor) -> torch.Tensor:
        return torch.stack([made.test_queries(head, rows) for head in heads], 1)

    test, calibration = draw_steps(made.num_test, positions, seed)
    source = "hybrid_kv.eval.synthetic"
    return Head(
        *(profile, seed, made.keys, prompt),
        *(later(calibration), later(test), test, made.num_test, source),
    )


def draw_steps(count: int, positions: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Positions of 0..count-1 for the test and for calibration: disjoint, each in order."""
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    positions = min(positions, count // 2)
    test, calibration = order[:positions], order[positions : 2 * positions]
    return test.sort().values, calibration.sort().values
