"""Requests to the engine and its answers: the border between serving and HTTP."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from time import monotonic
from typing import TYPE_CHECKING, Literal, TypeAlias

from hybrid_kv.api.arguments import largest_error
from hybrid_kv.config import HybridConfig
from hybrid_kv.errors import ConfigError, HybridKVError, said
from hybrid_kv.models.exact_steps import ExactWork

if TYPE_CHECKING:
    from hybrid_kv.serve.grammars import Grammar
    from hybrid_kv.watch.token_errors import TokenError

Reason: TypeAlias = Literal["stop", "length", "cancelled", "timeout", "error"]
"""Why an answer ended."""


def _number(name: str, value: float, least: float, most: float = math.inf) -> None:
    """Raises ConfigError unless a value is a finite number within limits."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if is_number and math.isfinite(value) and least <= value <= most:
        return
    upper = "" if most == math.inf else f" and at most {most:g}"
    raise ConfigError(f"{name} must be a number of at least {least:g}{upper}, got {said(value)}")


def _whole(name: str, value: object, least: int, most: float = math.inf) -> None:
    """Raises ConfigError unless a value is a whole number within limits."""
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        upper = "" if most == math.inf else f" and at most {int(most)}"
        raise ConfigError(
            f"{name} must be a whole number of at least {least}{upper}, got {said(value)}"
        )


@dataclass(frozen=True, slots=True)
class Sampling:
    """Rule by which the next token is chosen.

    temperature: 0 takes the likeliest token. top_p: of the likeliest tokens as many as hold this
    share of the probability. top_k: of the likeliest tokens so many; 0 for all. seed: the same one
    draws the same tokens from the same logits; None for a new one. logprobs: report the log
    probability of each token and of so many likeliest ones beside it; None for neither. min_p:
    tokens with less than this share of the likeliest one's probability are left out.
    frequency_penalty, presence_penalty: taken off a logit for each time, and once, that the answer
    has the token. repetition_penalty: logits of tokens in prompt or answer are divided by it, or
    multiplied where they are below 0. logit_bias: added to the logits of these tokens. min_tokens:
    before so many, none ends the answer.

    Raises:
        ConfigError: a number is out of range.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    logprobs: int | None = None
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_tokens: int = 0

    def __post_init__(self) -> None:
        _number("temperature", self.temperature, 0, 100)
        _number("min_p", self.min_p, 0, 1)
        _number("frequency_penalty", self.frequency_penalty, -2, 2)
        _number("presence_penalty", self.presence_penalty, -2, 2)
        _number("repetition_penalty", self.repetition_penalty, 0.01, 100)
        for token, bias in self.logit_bias:
            _whole("token ids of logit_bias", token, 0)
            _number("logit_bias", bias, -100, 100)
        _whole("min_tokens", self.min_tokens, 0)
        _number("top_p", self.top_p, 0, 1)
        if self.top_p == 0:
            raise ConfigError("top_p must be above 0, got 0; use temperature=0 for greedy answers")
        _whole("top_k", self.top_k, 0)
        if self.seed is not None:
            _whole("seed", self.seed, 0, 2**64 - 1)
        if self.logprobs is not None:
            _whole("logprobs", self.logprobs, 0, 20)


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt and how it is continued; n answers to one prompt are n requests.

    ids: of the prompt. stop: texts that end the answer and are cut off. end_ids: tokens that do.
    config: method and budgets of this request; None for the model's. audit_every: decode steps from
    one look of the audit to the next, in place of the configuration's. timeout_s: from submission;
    None for the server's limit. places: report where in the prompt the answer looked. exact: every
    token is full attention's; the method drafts them. grammar: that the answer keeps to, and with
    which it ends. max_error: tokens whose expected KL is larger, in nats, are full attention's;
    None for no limit. errors: report the error of each token.

    Raises:
        ConfigError: a field is of a wrong type or out of range.
    """

    ids: tuple[int, ...]
    max_new_tokens: int
    sampling: Sampling = Sampling()
    stop: tuple[str, ...] = ()
    end_ids: tuple[int, ...] = ()
    config: HybridConfig | None = None
    audit_every: int | None = None
    timeout_s: float | None = None
    places: bool = False
    exact: bool = False
    grammar: Grammar | None = None
    max_error: float | None = None
    errors: bool = False

    def __post_init__(self) -> None:
        if not self.ids:
            raise ConfigError("prompt is empty; pass at least one token")
        _whole("max_new_tokens", self.max_new_tokens, 1)
        if not all(isinstance(stop, str) and stop for stop in self.stop):
            raise ConfigError("stop strings must be text and not empty; leave `stop` out for none")
        if self.grammar is not None and self.sampling.min_tokens:
            raise ConfigError(
                "min_tokens must be 0 beside a schema, a grammar or a call that must come, got "
                f"{self.sampling.min_tokens}; the answer ends where they end; leave it out"
            )
        self._check_errors()
        if self.audit_every is not None:
            _whole("audit_every", self.audit_every, 0)
        if self.timeout_s is not None:
            _number("timeout_s", self.timeout_s, 0)

    def _check_errors(self) -> None:
        if self.max_error is not None:
            largest_error(self.max_error)
        if self.exact and self.max_error is not None:
            raise ConfigError(
                "max_error must go with tokens that may come out unverified, got exact, which "
                "verifies all; leave one of them out"
            )
        if self.exact and self.errors:
            raise ConfigError(
                "errors must go with steps that leave entries unread, got exact, whose tokens have "
                "none; leave one of them out"
            )

    @property
    def is_drafted(self) -> bool:
        """Whether full attention verifies its tokens, all or some, in passes of its own."""
        return self.exact or self.max_error is not None


# What comes back ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Prefilled:
    """Progress of a prompt: `done` of `total` tokens are computed, `reused` of them by a prefix
    that was there already.
    """

    done: int
    total: int
    reused: int = 0


@dataclass(frozen=True, slots=True)
class Token:
    """One new token.

    text: what can be shown now; it may be empty, or hold the text of earlier tokens that were held
    back because they might have begun a stop string or lacked the rest of a character. The last
    token of an answer that ends by itself brings all that is left. logprob: its log probability
    before temperature and cuts. top: the likeliest tokens with theirs. error: where it was asked
    for; 0 for tokens that were verified.
    """

    id: int
    text: str = ""
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()
    error: TokenError | None = None


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of one request; reused ones are part of the prompt's."""

    prompt_tokens: int
    completion_tokens: int = 0
    reused_tokens: int = 0


@dataclass(frozen=True, slots=True)
class RequestReport:
    """Costs of an answer.

    ttft_s: from submission to the first token, None if none came. itl_ms: time between each token
    and the one before. queue_s: before prefill began. attended_per_token: entries that a query head
    attended at each token, mean; prompt_share: of those that full attention would have attended.
    recall: of the exact best cold entries, those found; missed_mass: of the softmax, not read by
    exact attention; mass_error: of its mass, estimated too much, or missing below 0; all by audit,
    None without. prefill_density, prefill_error: share of the key blocks that block-sparse prefill
    read, and what it lost (`PrefillLoss`); None where it was exact. device_kv_bytes, host_kv_bytes,
    host_index_bytes: held at the end, of which other requests may have shared some. places:
    positions in the prompt that were attended most, with their mean softmax weight, the heaviest
    first; empty unless asked for. exact: what exact decoding took; None without it. alone: why the
    request was decoded by itself and not joined with others; empty if it could be joined.
    """

    ttft_s: float | None = None
    itl_ms: list[float] = field(default_factory=list)
    queue_s: float = 0.0
    attended_per_token: float = 0.0
    prompt_share: float = 1.0
    recall: float | None = None
    missed_mass: float | None = None
    mass_error: float | None = None
    prefill_density: float | None = None
    prefill_error: float | None = None
    device_kv_bytes: int = 0
    host_kv_bytes: int = 0
    host_index_bytes: int = 0
    places: list[tuple[int, float]] = field(default_factory=list)
    exact: ExactWork | None = None
    alone: str = ""


@dataclass(frozen=True, slots=True)
class Finished:
    """The end of an answer, and its last event. error: what went wrong, if reason is "error"."""

    reason: Reason
    usage: Usage
    error: HybridKVError | None = None
    report: RequestReport = field(default_factory=RequestReport)


Happening: TypeAlias = Prefilled | Token | Finished
"""Events of a request, in this order."""


class RequestHandle:
    """Handle of a submitted request: its events, and the way to end it early.

    Reading never holds up the engine, and not reading neither. Every reader gets all events.

    deadline: on the clock of `time.monotonic`; None for none.

    Args:
        on_cancel: called, in the thread that cancels, when the request shall end.
    """

    def __init__(self, request: Request, on_cancel: Callable[[], None] | None = None) -> None:
        self.request, self.submitted = request, monotonic()
        self.deadline: float | None = None
        self._on_cancel = on_cancel
        self._cancelled = threading.Event()
        self._happened: list[Happening] = []
        self._changed = threading.Condition()
        self._listeners: list[Callable[[], None]] = []

    # The reader's side ---------------------------------------------------------------------------

    @property
    def happened(self) -> list[Happening]:
        """Events so far; waits for none."""
        with self._changed:
            return list(self._happened)

    def events(self) -> Iterator[Happening]:
        """All events up to `Finished`; waits for each."""
        place = 0
        while True:
            with self._changed:
                while len(self._happened) == place:
                    self._changed.wait()
                new = self._happened[place:]
            for event in new:
                yield event
                if isinstance(event, Finished):
                    return
            place += len(new)

    async def aevents(self) -> AsyncIterator[Happening]:
        """The same for asyncio, whose loop is free meanwhile."""
        loop, ready, place = asyncio.get_running_loop(), asyncio.Event(), 0

        def wake() -> None:
            with suppress(RuntimeError):  # the loop has ended, and nobody reads any more
                loop.call_soon_threadsafe(ready.set)

        with self._listening(wake):
            while True:
                ready.clear()
                new = self._happened[place:]
                for event in new:
                    yield event
                    if isinstance(event, Finished):
                        return
                place += len(new)
                if not new:
                    await ready.wait()

    @contextmanager
    def _listening(self, listener: Callable[[], None]) -> Iterator[None]:
        with self._changed:
            self._listeners.append(listener)
        try:
            yield
        finally:
            with self._changed:
                self._listeners.remove(listener)

    def cancel(self) -> None:
        """Ends the request soon, with reason "cancelled"; harmless when it has ended."""
        self._cancelled.set()
        if self._on_cancel is not None:
            self._on_cancel()

    # The engine's side ---------------------------------------------------------------------------

    @property
    def is_cancelled(self) -> bool:
        """Whether somebody has asked for the end."""
        return self._cancelled.is_set()

    @property
    def early_end(self) -> Reason | None:
        """Reason to end the request before its answer does; None while it may go on."""
        if self.is_cancelled:
            return "cancelled"
        return "timeout" if self.deadline is not None and monotonic() >= self.deadline else None

    @property
    def is_finished(self) -> bool:
        """Whether the last event has come."""
        return bool(self._happened) and isinstance(self._happened[-1], Finished)

    def put(self, event: Happening) -> None:
        """Hands an event to whoever reads."""
        with self._changed:
            self._happened.append(event)
            self._changed.notify_all()
            listeners = list(self._listeners)
        for wake in listeners:
            wake()


# The engine's limits and figures -----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of what an engine takes on.

    max_running: requests that are computed at a time. max_queue: that wait beside them.
    prefill_chunk_tokens: of a prompt, computed at most between two decode steps of others.
    max_stall_ms: chunks are made so short that with one and a decode step others wait no longer, as
    far as the latest ones tell. request_timeout_s: from submission to the end; None for no limit.
    max_prompt_tokens: of one prompt; None for the model's context. prefix_bytes: host memory for
    contexts of ended requests, which later ones with the same beginning continue.
    reproducible: what a request computes does not depend on others, bit for bit, as long as the
    engine lives: every piece of a prompt has so many tokens, whatever time that takes, every decode
    step as many rows, and nothing is continued that another prompt has computed; None for no such
    care.

    Raises:
        ConfigError: a number is out of range.
    """

    max_running: int = 16
    max_queue: int = 64
    prefill_chunk_tokens: int = 2048
    max_stall_ms: float = 100.0
    request_timeout_s: float | None = 600.0
    max_prompt_tokens: int | None = None
    prefix_bytes: int = 2**30
    reproducible: int | None = None

    def __post_init__(self) -> None:
        _whole("max_running", self.max_running, 1)
        _whole("max_queue", self.max_queue, 0)
        _whole("prefill_chunk_tokens", self.prefill_chunk_tokens, 1)
        _number("max_stall_ms", self.max_stall_ms, 1)
        if self.request_timeout_s is not None:
            _number("request_timeout_s", self.request_timeout_s, 0)
        if self.max_prompt_tokens is not None:
            _whole("max_prompt_tokens", self.max_prompt_tokens, 1)
        _whole("prefix_bytes", self.prefix_bytes, 0)
        if self.reproducible is not None:
            _whole("reproducible", self.reproducible, 1)


@dataclass(frozen=True, slots=True)
class EngineStats:
    """State of an engine, and what it has done since it began.

    queued, prefilling, running: requests now; running ones have their first token. finished: how
    many ended, by reason. prompt_tokens, reused_tokens, completion_tokens: of all requests so far.
    prefix_hits: requests that continued from a prefix. prefixes, prefix_bytes: kept for later ones.
    stall_ms: longest time from one token of a running request to its next while a prompt was
    computed; last_stall_ms: the latest. stalls: how many there were; late_stalls: of those the ones
    beyond stall_bound_ms, `Limits.max_stall_ms`. chunk_tokens: of the next chunk of a prompt.
    steps: decode steps; joined_rows: requests that they served, summed, joined ones by one pass of
    the weights.
    alone: requests decoded by themselves, by reason. recall, missed_mass, mass_error: means over
    the audits of ended requests, None without. device_kv_bytes, host_kv_bytes, host_index_bytes:
    held now by running requests and kept prefixes, shared memory once.
    """

    queued: int = 0
    prefilling: int = 0
    running: int = 0
    finished: dict[str, int] = field(default_factory=dict)
    prompt_tokens: int = 0
    reused_tokens: int = 0
    completion_tokens: int = 0
    prefix_hits: int = 0
    prefixes: int = 0
    prefix_bytes: int = 0
    stall_ms: float = 0.0
    last_stall_ms: float = 0.0
    stalls: int = 0
    late_stalls: int = 0
    stall_bound_ms: float = 0.0
    chunk_tokens: int = 0
    steps: int = 0
    joined_rows: int = 0
    alone: dict[str, int] = field(default_factory=dict)
    recall: float | None = None
    missed_mass: float | None = None
    mass_error: float | None = None
    device_kv_bytes: int = 0
    host_kv_bytes: int = 0
    host_index_bytes: int = 0
