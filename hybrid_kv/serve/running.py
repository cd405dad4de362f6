"""One running request: its cache, its place in the prompt, its answer so far, and its memory.

`Places` counts where its steps look.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from itertools import pairwise
from time import monotonic
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from hybrid_kv.api.llm import LLM
from hybrid_kv.errors import BusyError, CapacityError, ConfigError, DeviceMemoryError, HybridKVError
from hybrid_kv.masses import logits_of
from hybrid_kv.models.cache_state import passing
from hybrid_kv.models.exact_steps import drop_inexact
from hybrid_kv.models.hf_cache import TieredCache
from hybrid_kv.ops.pinned import free_bytes
from hybrid_kv.runtime import Stage, check_host_memory, spare_host_memory
from hybrid_kv.serve.output import AnswerText, ExactAnswer, Sampler, StepErrors, first_error
from hybrid_kv.serve.requests import (
    Prefilled,
    Reason,
    Request,
    RequestHandle,
    RequestReport,
    Token,
    Usage,
)
from hybrid_kv.store.layer import tier_bytes
from hybrid_kv.types import HIDDEN, PartialAttention, bytes_per_token
from hybrid_kv.watch.audit import WatchedStep

if TYPE_CHECKING:
    from hybrid_kv.watch.token_errors import TokenError


class Places:
    """Weights of positions, mean over all heads, layers and steps that were seen; for one row.

    Of a row with cold entries those that it attends count, for the others are what every step
    reads; of a row without any all resident ones do.
    """

    def __init__(self) -> None:
        self._weights = torch.zeros(0)
        self._heads = 0

    def wants(self, layer_idx: int, q: Tensor) -> bool:
        """Steps of one token; q [B, Hq, T, D]."""
        return q.shape[2] == 1

    def add(self, step: WatchedStep, part: PartialAttention) -> None:
        """Takes a step of one token, with what it has found, and what it gave."""
        row, q = step.layer.rows[0], step.grouped[0].float()
        lse = part.lse[0].reshape(q.shape[:2])[..., None]
        self._heads += lse.numel()
        how = {"scale": step.scale, "softcap": step.softcap}
        if not row.chain.spans:
            keys, positions = row.resident_keys()
            weights = (logits_of(q, keys, **how) - lse).exp()  # type: ignore[arg-type]
            seen = positions != HIDDEN
            self._book(positions[seen], weights.sum((0, 1))[seen])
            return
        if step.found is not None and 0 in step.found:
            _, found = step.found[0]
            parts = [(part.extent, part.ids) for part in found.parts]
        else:
            every = [torch.arange(span.length).expand(*q.shape[:2], -1) for span in row.chain.spans]
            parts = [(s.extent, ids) for s, ids in zip(row.chain.spans, every, strict=True)]
        for extent, ids in parts:
            there = ids.clamp_min(0)
            heads = torch.arange(len(ids))[:, None, None]
            logits = logits_of(q[:, :, None].cpu(), extent.k[heads, there], **how)[:, :, 0]  # type: ignore[arg-type]
            weights = (logits - lse.cpu()).exp().masked_fill(ids < 0, 0)
            self._book(extent.positions[there].flatten(), weights.flatten())

    def _book(self, positions: Tensor, weights: Tensor) -> None:
        if not len(positions):
            return
        longest = int(positions.max()) + 1
        if longest > len(self._weights):
            grown = torch.zeros(max(longest, 2 * len(self._weights)))
            grown[: len(self._weights)] = self._weights
            self._weights = grown
        self._weights.index_add_(0, positions.cpu().long(), weights.cpu())

    def heaviest(self, count: int, below: int) -> list[tuple[int, float]]:
        """Positions before `below` with their weights, the heaviest first."""
        weights = self._weights[:below] / max(1, self._heads)
        values, positions = weights.topk(min(count, len(weights)))
        pairs = zip(positions.tolist(), values.tolist(), strict=True)
        return [(position, weight) for position, weight in pairs if weight > 0]


_log = logging.getLogger(__name__)

_PLACES = 64
"""Most places that are reported."""


class RunningRequest:
    """A request that was admitted; only the engine's thread touches it, and what it puts aside.

    ids: prompt and answer. done: tokens of the prompt that are computed; reused: of those the ones
    that a prefix had. times: when each token of the answer came. leader: a request that computes
    what this one begins with, and goes first.

    Args:
        needed: memory when it is at its longest.
    """

    def __init__(
        self,
        llm: LLM,
        ticket: RequestHandle,
        needed: RequestMemory,
        leader: RunningRequest | None = None,
    ) -> None:
        self.ticket, self.request = ticket, ticket.request
        self.needed, self.leader = needed, leader
        self.ids = list(self.request.ids)
        self.done = self.reused = 0
        self.began: float | None = None
        self.times: list[float] = []
        self._llm = llm
        self._cache: TieredCache | None = None
        self._unsealed: deque[int] = deque()
        self._first: Tensor | None = None  # the logits after the prompt
        self._aside: tuple[Future[None], Callable[[], None]] | None = None
        self._then: Callable[[], None] | None = None
        self._sampler = Sampler(self.request, llm.runtime.device)
        self._text = AnswerText(llm.tokenizer, self.request.stop)
        self._places = Places() if self.request.places else None
        self._exact: ExactAnswer | None = None
        self._errors: StepErrors | None = None

    def begin(self, cache: TieredCache, reused: int) -> None:
        """Takes a cache that holds the first `reused` tokens of the prompt."""
        self._cache, self.began = cache, monotonic()
        if self.request.exact:
            drop_inexact(cache, reused + 1)
            reused = cache.get_seq_length()
        if self.request.is_drafted:
            given = self._llm.model, cache, self.request, self.ids, self._sampler, self.take
            self._exact = ExactAnswer(*given)
        elif self.request.errors:
            self._errors = StepErrors(cache)
        cache.kv.means.reserve(len(self.ids) + self.request.max_new_tokens)
        if self._places is not None:
            cache.kv.watchers.append(self._places)
        self._unsealed.extend(cache.kv.layers)
        if reused:
            self.done = self.reused = reused
            self.ticket.put(Prefilled(reused, len(self.request.ids), reused))

    @property
    def cache(self) -> TieredCache:
        """Cache of the request, once it has begun."""
        assert self._cache is not None
        return self._cache

    @property
    def has_begun(self) -> bool:
        return self._cache is not None

    @property
    def is_prefilled(self) -> bool:
        """Whether the whole prompt is computed."""
        return self.done == len(self.request.ids)

    @property
    def is_ready(self) -> bool:
        """Whether its answer has begun."""
        return bool(self.times)

    @property
    def stage(self) -> Stage:
        return "decode" if self.times else "prefill"

    # The prompt ----------------------------------------------------------------------------------

    def compute(self, count: int) -> None:
        """Computes the next `count` tokens of the prompt."""
        stop = self.done + count
        new = torch.tensor([self.ids[self.done : stop]], device=self._llm.runtime.device)
        kv = self.cache.kv
        # However short the piece is, and whoever has computed what was before.
        kv.more_prompt = True
        try:
            self._first = self._forward(new)
        finally:
            kv.more_prompt = False
        self.done = stop
        self.ticket.put(Prefilled(self.done, len(self.request.ids), self.reused))

    def seal(self, seconds: float = math.inf) -> None:
        """Moves layers of the prompt to where their method wants them, until time is up."""
        end = monotonic() + seconds
        while self._unsealed:
            self.cache.kv.layers.seal_if_open(self._unsealed.popleft())
            if monotonic() >= end:
                return

    @property
    def is_sealed(self) -> bool:
        """Whether all layers of the prompt are there."""
        return self.has_begun and self.is_prefilled and not self._unsealed

    def first_logits(self) -> Tensor:
        """Logits [V] of the first token, once."""
        first, self._first = self._first, None
        assert first is not None
        return first

    # Aside ---------------------------------------------------------------------------------------

    def put_aside(
        self,
        work: Future[None],
        close: Callable[[], None],
        then: Callable[[], None] | None = None,
    ) -> None:
        """Something of this request is done in another thread.

        Args:
            close: gives back what the thread has worked with, if the request has ended by then.
            then: called when the request comes back.
        """
        self._aside, self._then = (work, close), then

    @property
    def work(self) -> Future[None] | None:
        """Work that is done aside; None where nothing is."""
        return None if self._aside is None else self._aside[0]

    @property
    def is_aside(self) -> bool:
        """Whether it must not be touched now."""
        return self._aside is not None and not self._aside[0].done()

    def come_back(self) -> bool:
        """Takes up what was done aside; False where there is nothing.

        Raises:
            Whatever went wrong there.
        """
        if self._aside is None or self.is_aside:
            return False
        (work, _), then = self._aside, self._then
        work.result()
        if then is not None:
            then()
        self._aside = self._then = None  # not where either fails: `abandon` gives back what it has
        return True

    def abandon(self) -> None:
        """Gives the memory back as soon as the other thread is done with it."""
        assert self._aside is not None
        work, close = self._aside
        work.add_done_callback(lambda _: close())

    # The answer ----------------------------------------------------------------------------------

    def step(self) -> Tensor:
        """Computes the next logits [V] by itself."""
        return self._forward(torch.tensor([self.ids[-1:]], device=self._llm.runtime.device))

    def forget_step(self) -> None:
        """Forgets what was seen of a step that stopped in its middle, and is made again."""
        if self._errors is not None:
            self._errors.forget()

    def advance_exactly(self) -> Reason | None:
        """Computes and takes the next tokens by itself, as full attention verifies them; returns as
        `take`.
        """
        assert self._exact is not None
        return self._exact.advance()

    def _forward(self, ids: Tensor) -> Tensor:
        model: Any = self._llm.model
        output = model(ids, **passing(self.cache), use_cache=True, logits_to_keep=1)
        logits: Tensor = output.logits[0, -1]
        return logits

    def take(self, logits: Tensor, error: TokenError | None = None) -> Reason | None:
        """Chooses the next token and hands it out; says why the answer ends with it, if it does.

        Args:
            error: of a token that was drafted; of others it is known here.
        """
        if self._errors is not None:
            error = self._errors.next(logits)
        elif self.request.errors and error is None:
            error = first_error(logits)
        choice = self._sampler.choose(logits, self.ids)
        self.times.append(monotonic())
        self.ids.append(choice.id)
        ends = self._sampler.ends(self.ids)
        full = len(self.times) == self.request.max_new_tokens
        text = self._text.add(choice.id, last=ends or full)
        told = error if self.request.errors else None
        self.ticket.put(Token(choice.id, text, choice.logprob, choice.top, told))
        if ends or self._text.is_stopped:
            return "stop"
        return "length" if full else None

    # The end -------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Waits for what is looked at beside the steps.

        Raises:
            NonFiniteError, AuditError: it was found to be wrong.
        """
        self.cache.kv.finite.look(wait=True)
        if (auditor := self.cache.kv.auditor) is not None:
            auditor.settle()

    @property
    def held_bytes(self) -> int:
        """Of the host's needed bytes those that are taken already, about."""
        total = len(self.request.ids) + self.request.max_new_tokens
        return self.needed.host * (self.done + len(self.times)) // total

    @property
    def coming(self) -> RequestMemory:
        """Bytes that it will take yet; on a device nothing from the end of its prompt on, where
        most of it leaves.
        """
        total = len(self.request.ids) + self.request.max_new_tokens
        device = 0 if self.is_sealed else self.needed.device * (total - self.done) // total
        return RequestMemory(self.needed.host - self.held_bytes, device)

    def usage(self) -> Usage:
        return Usage(len(self.request.ids), len(self.times), self.reused)

    def report(self, alone: str) -> RequestReport:
        """Report of its costs. alone: see `RequestReport`."""
        times, submitted = self.times, self.ticket.submitted
        waited = (self.began or monotonic()) - submitted
        ttft = times[0] - submitted if times else None
        itl = [1e3 * (new - old) for old, new in pairwise(times)]
        if not self.has_begun or self.is_aside:
            return RequestReport(ttft, itl, waited, alone=alone)
        kv = self.cache.kv
        work, audit = kv.work, None if kv.auditor is None else kv.auditor.audit
        held = tier_bytes(kv.stores.values())
        recall, missed, error = (
            (None, None, None)
            if audit is None
            else (audit.recall(), audit.missed_mass(), audit.mass_error())
        )
        lost = kv.prefill_loss()
        return RequestReport(
            ttft_s=ttft,
            itl_ms=itl,
            queue_s=waited,
            attended_per_token=work.attended / work.steps if work.steps else 0.0,
            prompt_share=work.attended / work.visible if work.visible else 1.0,
            recall=None if recall is None else recall.mean,
            missed_mass=None if missed is None else missed.mean,
            mass_error=None if error is None else error.mean,
            prefill_density=None if lost is None else lost.density,
            prefill_error=None if lost is None else lost.error,
            device_kv_bytes=held.device_kv,
            host_kv_bytes=held.host_kv,
            host_index_bytes=held.host_index,
            places=[]
            if self._places is None
            else self._places.heaviest(_PLACES, len(self.request.ids)),
            exact=None if self._exact is None else self._exact.work,
            alone=alone,
        )

    def close(self) -> None:
        """Gives its memory back."""
        if self._cache is not None:
            self._cache.close()


def as_ours(error: Exception) -> HybridKVError:
    """An error for whoever asked; all that are not the request's own are logged."""
    if isinstance(error, ConfigError | CapacityError | BusyError):
        return error
    if isinstance(error, MemoryError):
        return CapacityError(f"memory ran out: {error}; shorten the prompt, or ask again later")
    _log.error("a request failed", exc_info=error)
    if isinstance(error, HybridKVError):
        return error
    named = HybridKVError(f"the request failed: {type(error).__name__}: {error}; see the log")
    named.__cause__ = error
    return named


# Memory ------------------------------------------------------------------------------------------

# Until the end of its prompt a request has all keys and values where the model computes them; on a
# GPU most of them are offloaded then, by its method.

_SHARE = 0.9
"""Of a device's free memory; the rest is for what a piece of a prompt computes with."""


class RequestMemory(NamedTuple):
    """Bytes of a request when it is at its longest.

    host: keys, values and indexes. device: keys and values at the end of the prompt; 0 where the
    model computes on the host.
    """

    host: int
    device: int


def needed_bytes(llm: LLM, request: Request) -> RequestMemory:
    """Of the prompt and the longest answer."""
    runtime, total = llm.runtime, len(request.ids) + request.max_new_tokens
    host = total * runtime.bytes_per_token((request.config or llm.config).build(), total)
    if free_device_bytes(runtime.device) is None:
        return RequestMemory(host, 0)
    each = sum(bytes_per_token(shape, llm.model.dtype) for shape in runtime.info.layers)
    return RequestMemory(host, total * each)


def free_device_bytes(device: torch.device) -> int | None:
    """Free bytes of a device for tensors; None where the model computes on the host."""
    return free_bytes(device) if device.type == "cuda" else None


def fits(llm: LLM, needed: RequestMemory, coming: Sequence[RequestMemory]) -> bool:
    """Whether a request fits beside what others will take yet."""
    if needed.host > spare_host_memory(sum(each.host for each in coming)):
        return False
    free = free_device_bytes(llm.runtime.device)
    promised = sum(each.device for each in coming)
    return free is None or needed.device <= _SHARE * free - promised


def check(llm: LLM, needed: RequestMemory, held: RequestMemory, num_tokens: int) -> None:
    """Raises CapacityError unless so much is there when `held` is given back.

    Raises:
        CapacityError: the host has too little.
        DeviceMemoryError: the device has.
    """
    check_host_memory(needed.host - held.host, num_tokens)
    free = free_device_bytes(llm.runtime.device)
    if free is not None and needed.device - held.device > _SHARE * free:
        raise DeviceMemoryError(
            f"a prompt with its answer of {num_tokens} tokens needs {needed.device:,} bytes of GPU "
            f"memory until it is computed, of which {int(_SHARE * free + held.device):,} can be "
            "had; shorten it, or take a smaller model or fewer bits for its weights"
        )
