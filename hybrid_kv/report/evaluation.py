"""Report of an evaluation: cells as they were measured, and rows over their samples."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from hybrid_kv.report.run import Group

Asking = Literal["after", "before", "none"]
"""When the question came: after the eviction, before it, or never (the model read on)."""


class Counters(Group):
    """Costs of decoding, as the runtime counted them.

    attended_tokens: entries that a query head attended in a step, on average; attended_ratio: over
    those of full attention. read_bytes: that a step of one token reads, see `Work`: keys, values,
    codes, digests, what indexes scan and moments.
    device_bytes, host_bytes: keys and values held at the end, and indexes on the host.
    ms_per_token: median of the steps of one token. missed_mass: share of the softmax over all of
    the context and what followed it that no exact attention read, dropped entries included;
    mass_error: of the mass of that softmax, what was estimated too much, or is missing below 0;
    output_error: relative distance of a head's output from exact attention's; all by looking at all
    heads in a few steps. recall: of the exact best cold entries, those that a search ranked.
    """

    attended_tokens: float | None = None
    attended_ratio: float | None = None
    read_bytes: float | None = None
    device_bytes: float | None = None
    host_bytes: float | None = None
    ms_per_token: float | None = None
    missed_mass: float | None = None
    mass_error: float | None = None
    output_error: float | None = None
    recall: float | None = None


class Cell(Group):
    """One method under one budget on one context.

    method: as it was asked for, with settings; budget: as it was asked for, None where the method
    has none. scores: one per question, 0 to 1; depths: where in the context each answer stands, 0
    to 1, None where it stands in many places; answers: what the model wrote. nats: of every token
    that was read, by the method's predictions; full_nats: by full attention's; kl: of the method's
    from these; agrees: whether the likeliest token is the same. error: why there is no result.
    """

    task: str
    context_tokens: int
    sample: int
    asking: Asking
    method: str
    budget: str | None
    config: dict[str, Any]
    scores: tuple[float, ...] = ()
    depths: tuple[float | None, ...] = ()
    answers: tuple[str, ...] = ()
    nats: tuple[float, ...] = ()
    full_nats: tuple[float, ...] = ()
    kl: tuple[float, ...] = ()
    agrees: tuple[bool, ...] = ()
    counters: Counters = Counters()
    seconds: float = 0.0
    error: str | None = None


class Interval(Group):
    """A mean with its 95% bootstrap interval; null in summaries that left the interval out."""

    mean: float
    low: float | None = None
    high: float | None = None


class DepthScore(Group):
    """The mean score of questions whose answers stand in one part of their contexts."""

    low: float
    high: float
    score: float
    questions: int


class EvalRow(Group):
    """One method under one budget on one task: all samples together.

    samples: contexts; questions: answered, or tokens read. score: of answers, 0 to 1; of reading,
    the share of tokens whose likeliest prediction is full attention's. nats_beyond: nats per token
    beyond full attention's. depths: where the score depends on one place. error: why samples are
    missing. refused: the method cannot be given so small a budget, and nothing was run.
    """

    task: str
    context_tokens: int
    asking: Asking
    method: str
    budget: str | None
    samples: int
    questions: int
    score: Interval | None = None
    nats: float | None = None
    nats_beyond: Interval | None = None
    kl: Interval | None = None
    counters: Counters = Counters()
    depths: tuple[DepthScore, ...] = ()
    config: dict[str, Any] = Field(default_factory=dict)
    error: str | None = None
    refused: bool = False
