"""One method on one prompt: what it answers or predicts, what that takes, and what it misses.

The audit of a cache knows what is stored. Here the keys and values of the whole prompt are at hand,
so that every method is held against the same exact attention, dropped entries included.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from statistics import fmean, median
from time import perf_counter
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from hybrid_kv.config import AuditParams, HybridConfig
from hybrid_kv.contest.prompts import (
    AskedQuestion,
    PrefilledPrompt,
    Prompt,
    PromptBuilder,
    Scorer,
    SharedPrompt,
)
from hybrid_kv.models.attach import Attachment
from hybrid_kv.models.cache_layers import HybridLayer
from hybrid_kv.models.cache_state import passing
from hybrid_kv.models.hf_cache import TieredCache
from hybrid_kv.models.rollback import rolled_back
from hybrid_kv.planning.plan import ModelFacts
from hybrid_kv.planning.traffic import bytes_per_step
from hybrid_kv.report.evaluation import Asking, Counters
from hybrid_kv.runtime import KVCache
from hybrid_kv.transfer import SyncExecutor
from hybrid_kv.types import PartialAttention, Work, bytes_per_token
from hybrid_kv.watch.audit import WatchedStep
from hybrid_kv.watch.auditor import Auditor


class LookMeans(NamedTuple):
    """Means over heads.

    missed_mass: share of the softmax that no exact attention read. mass_error: what was estimated
    too much of the mass of that softmax, below 0 what is missing. output_error: relative L2
    distance of a head's output from exact attention's.
    """

    missed_mass: float
    mass_error: float
    output_error: float


class Probe:
    """Looks at the newest query of every step: all layers and heads, one batch row.

    looks: means over heads, one for each step and layer.
    """

    def __init__(self, prompt: PrefilledPrompt) -> None:
        self._prompt = prompt
        self._later: dict[int, tuple[Tensor, Tensor]] = {}
        self.looks: list[LookMeans] = []
        self._estimated: Tensor | None = None

    def wants(self, layer_idx: int, q: Tensor) -> bool:
        """Every step."""
        return True

    def add(self, step: WatchedStep, part: PartialAttention) -> None:
        """Takes what a step through the method estimated of the entries that it did not read."""
        if step.found is not None and 0 in step.found:
            self._estimated = step.found[0][1].estimated

    def look(
        self,
        layer_idx: int,
        q: Tensor,
        new: tuple[Tensor, Tensor] | None,
        part: PartialAttention,
        scale: float,
        softcap: float | None,
    ) -> None:
        """Takes the queries, the new entries and the result of one layer's attention."""
        k, v = self._stored(layer_idx, new)
        asked = q[0, :, -1].float().unflatten(0, (k.shape[0], -1))  # [Hkv, G, D]
        logits = scale * (asked @ k.float().mT)
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        lse = logits.logsumexp(-1)
        exact = (logits.softmax(-1) @ v.float()).flatten(0, 1)
        out = part.out[0, :, -1].float()
        whole = (part.lse[0, :, -1].float() - lse.flatten()).exp()
        missed = 1 - whole
        if self._estimated is not None:
            guess = self._estimated.unflatten(1, (asked.shape[1], -1))[..., -1].flatten()
            missed, self._estimated = missed + (guess - lse.flatten()).exp(), None
        errors = (out - exact).norm(dim=-1) / exact.norm(dim=-1).clamp_min(1e-30)
        self.looks.append(
            LookMeans(
                float(missed.clamp(0, 1).mean()), float((whole - 1).mean()), float(errors.mean())
            )
        )

    def means(self) -> LookMeans | None:
        """Over all looks; None without any."""
        return LookMeans(*map(fmean, zip(*self.looks, strict=True))) if self.looks else None

    def _stored(self, layer_idx: int, new: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor]:
        """Everything up to the newest token, [Hkv, N, D] each."""
        if new is not None:
            later = self._later.get(layer_idx)
            k, v = new[0][0], new[1][0]
            if later is not None:
                k, v = torch.cat([later[0], k], 1), torch.cat([later[1], v], 1)
            self._later[layer_idx] = k, v
        later = self._later[layer_idx]
        k, v = (tensor[0] for tensor in self._prompt.of_layer(layer_idx))
        return torch.cat([k, later[0]], 1), torch.cat([v, later[1]], 1)


class ProbedKV(KVCache):
    """A cache whose steps somebody may look at."""

    probe: Probe | None = None

    @contextmanager
    def probed(self, prompt: PrefilledPrompt) -> Iterator[Probe]:
        """A block whose steps are looked at, right behind the prompt."""
        self.probe = Probe(prompt)
        self.watchers.append(self.probe)
        try:
            yield self.probe
        finally:
            self.watchers.remove(self.probe)
            self.probe = None

    def attend(
        self,
        layer_idx: int,
        q: Tensor,
        new: tuple[Tensor, Tensor] | None,
        valid: Tensor | None,
        *,
        scale: float,
        softcap: float | None = None,
    ) -> PartialAttention:
        part = super().attend(layer_idx, q, new, valid, scale=scale, softcap=softcap)
        if self.probe is not None:
            self.probe.look(layer_idx, q, new, part, scale, softcap)
        return part


_BEFORE = 4
"""Questions that are asked before the eviction: each takes a cache, and indexes, of its own."""
_LOOKS = 6
"""Steps of one token that are looked at."""
_TIMED = 8
"""Steps of one token that are timed where none are taken anyway."""
_SHOWN = 200
"""Letters of an answer that are kept."""


@dataclass(frozen=True, slots=True)
class EvalTarget:
    """An attached model on which methods are measured, with its facts."""

    runtime: Attachment
    facts: ModelFacts
    writer: PromptBuilder


class ContextSource(Protocol):
    """A context that methods read on from."""

    def context(self) -> PrefilledPrompt:
        """Its keys, values and evidence."""
        ...


@dataclass(slots=True)
class Tally:
    """Counts of a method's run; by_token: in steps of one token, as decoding reads."""

    work: Work = field(default_factory=Work)
    by_token: Work = field(default_factory=Work)
    step_s: list[float] = field(default_factory=list)
    looks: list[LookMeans] = field(default_factory=list)
    recalls: list[float] = field(default_factory=list)
    read_bytes: list[float] = field(default_factory=list)
    device_bytes: list[int] = field(default_factory=list)
    host_bytes: list[int] = field(default_factory=list)

    def counters(self) -> Counters:
        work = self.work
        return Counters(
            attended_tokens=work.attended / work.steps if work.steps else None,
            attended_ratio=work.attended / work.visible if work.visible else None,
            read_bytes=_mean(self.read_bytes),
            device_bytes=_mean(self.device_bytes),
            host_bytes=_mean(self.host_bytes),
            ms_per_token=1e3 * median(self.step_s) if self.step_s else None,
            missed_mass=_mean([look.missed_mass for look in self.looks]),
            mass_error=_mean([look.mass_error for look in self.looks]),
            output_error=_mean([look.output_error for look in self.looks]),
            recall=_mean(self.recalls),
        )


def answers(
    place: EvalTarget, config: HybridConfig, shared: SharedPrompt, prompt: Prompt, asking: Asking
) -> dict[str, Any]:
    """The fields of a `Cell` that a method's answers give."""
    tally, found, questions = Tally(), list[list[int]](), prompt.asked
    if asking == "after":
        context = shared.context()
        with _opened(place, config, context) as cache:
            _look(place, cache, context, prompt.asked[0].ids, tally)
            for asked in prompt.asked:
                with rolled_back(cache):
                    found.append(_answer(place, cache, asked.ids, asked.judge, [], tally))
                    _count_held(cache, tally)
            _end(place, cache, tally)
    else:
        questions = questions[:_BEFORE]
        for number, asked in enumerate(questions):
            whole, first = shared.with_question(asked.ids)
            with _opened(place, config, whole) as cache:
                if not number:
                    _look(place, cache, whole, [first], tally)
                found.append(_answer(place, cache, [first], asked.judge, [first], tally))
                _count_held(cache, tally)
                _end(place, cache, tally)
    return {**_judged(place, questions, found), "counters": tally.counters()}


def reading(
    place: EvalTarget,
    config: HybridConfig,
    shared: ContextSource,
    prompt: Prompt,
    step: int,
    full: Tensor | None,
    *,
    looked: bool = True,
    timed: int = _TIMED,
) -> tuple[dict[str, Any], Tensor]:
    """The fields of a `Cell` that reading on gives, and log-probabilities [tokens, vocabulary].

    Args:
        step: tokens read at once.
        full: those of full attention; None while they are computed.
        looked: some steps go before for missed mass, output error and recall.
        timed: so many steps of one token go before for their time and the bytes that they read.
    """
    tally, context = Tally(), shared.context()
    read, right = prompt.text[:-1], torch.tensor(prompt.text[1:])
    with _opened(place, config, context) as cache:
        if looked:
            _look(place, cache, context, read[:1], tally)
        with rolled_back(cache):
            for token in read[:timed]:
                begin = perf_counter()
                _feed(place, cache, [token])
                tally.step_s.append(perf_counter() - begin)
        tally.by_token.add(cache.kv.work)
        cache.kv.work = Work()
        parts = [_feed(place, cache, read[i : i + step]) for i in range(0, len(read), step)]
        found = torch.cat(parts)
        _count_held(cache, tally)
        _end(place, cache, tally)
    full = found if full is None else full
    fields = {
        "nats": _rounded(-found.gather(1, right[:, None])[:, 0]),
        "full_nats": _rounded(-full.gather(1, right[:, None])[:, 0]),
        "kl": _rounded((full.exp() * (full - found)).sum(-1).clamp_min(0)),
        "agrees": (full.argmax(-1) == found.argmax(-1)).tolist(),
        "counters": tally.counters(),
    }
    return fields, found


@contextmanager
def _opened(
    place: EvalTarget, config: HybridConfig, prompt: PrefilledPrompt
) -> Iterator[TieredCache]:
    """A cache under `config` that holds the prompt, sealed as if it had computed it alone."""
    runtime = place.runtime
    cache = runtime.cache(config)
    cache.kv = kv = ProbedKV(runtime.info, config, cache.kv.executor)
    needs = kv.means.method.needs
    try:
        with torch.inference_mode():
            tiered = [layer for layer in cache.layers if isinstance(layer, HybridLayer)]
            for layer, (k, v), seen in zip(tiered, prompt.layers, prompt.evidence, strict=True):
                layer.fill(k, v, tuple(row.narrowed(needs) for row in seen))
            for layer_idx, state in prompt.others.items():
                cache.layers[layer_idx].__dict__.update(deepcopy(state))
        kv.work = Work()
        yield cache
    finally:
        cache.close()


def _look(
    place: EvalTarget, cache: TieredCache, prompt: PrefilledPrompt, ids: Sequence[int], tally: Tally
) -> None:
    """A few steps whose heads are attended exactly as well; they leave no trace."""
    kv = cache.kv
    assert isinstance(kv, ProbedKV)
    nobody = AuditParams(min_recall=0, max_missed_mass=None, max_output_error=None)
    with rolled_back(cache), kv.probed(prompt) as probe:
        kv.auditor = auditor = Auditor(1, nobody, kv.info.layers, SyncExecutor())
        try:
            for _ in range(_LOOKS):
                ids = [_next(place, cache, ids)]
            auditor.settle()
        finally:
            auditor.close()
            kv.auditor = None
    if (means := probe.means()) is not None:
        tally.looks.append(means)
    if (recall := auditor.audit.recall()) is not None:
        tally.recalls.append(recall.mean)
    kv.work = Work()


def _answer(
    place: EvalTarget,
    cache: TieredCache,
    ids: Sequence[int],
    judge: Scorer,
    begun: Sequence[int],
    tally: Tally,
) -> list[int]:
    """The greedy answer behind some tokens; `begun` is what there is of it already."""
    answer = list(begun)
    while not answer or not judge.is_over(answer):
        kv, own = cache.kv, Work()
        work, kv.work = kv.work, own
        begin = perf_counter()
        token = _next(place, cache, ids)
        if len(ids) == 1:
            tally.step_s.append(perf_counter() - begin)
            tally.by_token.add(own)
        kv.work = work
        work.add(own)
        answer.append(token)
        ids = [token]
    return answer


def _next(place: EvalTarget, cache: TieredCache, ids: Sequence[int]) -> int:
    """The likeliest token behind some tokens."""
    step = torch.tensor([list(ids)], device=place.runtime.device)
    with torch.inference_mode():
        output = place.runtime.model(step, **passing(cache), logits_to_keep=1)
    return int(output.logits[0, -1].argmax())


def _feed(place: EvalTarget, cache: TieredCache, ids: Sequence[int]) -> Tensor:
    """Log-probabilities [tokens, vocabulary] behind each of the tokens, on the host."""
    step = torch.tensor([list(ids)], device=place.runtime.device)
    with torch.inference_mode():
        logits = place.runtime.model(step, **passing(cache)).logits[0]
        return F.log_softmax(logits.float(), -1).cpu()


def _count_held(cache: TieredCache, tally: Tally) -> None:
    """Bytes that the cache holds."""
    device = host = 0
    for store in cache.kv.stores.values():
        row = store.rows[0]
        device += bytes_per_token(store.shape, store.cold.dtype) * row.table.num_tokens
        device += 0 if row.kept is None else row.kept.nbytes
        host += store.cold.kv_bytes + store.cold.overhead_bytes + store.cold.index_bytes
    tally.device_bytes.append(device)
    tally.host_bytes.append(host)


def _end(place: EvalTarget, cache: TieredCache, tally: Tally) -> None:
    """Takes up what the cache has counted."""
    kv = cache.kv
    read = bytes_per_step(
        place.facts,
        kv,
        tally.by_token,
        on_device=place.runtime.device.type != "cpu",
    )
    if read:
        tally.read_bytes.append(sum(read.values()) - read["weights"])
    tally.work.add(kv.work)


def _judged(
    place: EvalTarget, asked: Sequence[AskedQuestion], found: Sequence[list[int]]
) -> dict[str, Any]:
    pairs = list(zip(asked, found, strict=True))
    return {
        "scores": tuple(question.judge.score(answer) for question, answer in pairs),
        "depths": tuple(question.depth for question in asked),
        "answers": tuple(place.writer.describe(answer)[:_SHOWN] for answer in found),
    }


def _mean(values: Sequence[float]) -> float | None:
    return fmean(values) if values else None


def _rounded(values: Tensor) -> tuple[float, ...]:
    return tuple(round(value, 6) for value in values.tolist())
