"""Watching a generation step by step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, StoppingCriteria
from transformers.generation.streamers import BaseStreamer

from hybrid_kv.models.cache_state import passing
from hybrid_kv.models.hf_cache import TieredCache
from hybrid_kv.types import Work
from hybrid_kv.watch.phases import ATTENTION, BETWEEN, FORWARD, PHASES
from hybrid_kv.watch.recorder import HOST, Event, Recorder, TraceSpan

FEWEST_STEPS = 4
"""Steps that are measured even where the row's time is over."""


@dataclass(slots=True)
class Steps:
    """Costs of a generation, token by token.

    Args:
        skip: steps after the first token that are not measured.

    times_s: when each token came, on the clock of `perf_counter`. first, before, after: seconds by
    phase at the first token, and at the first and the last moment that is measured. entered: pieces
    of work measured between them. device_s: device seconds by phase between them, empty where the
    host computes.
    """

    skip: int
    times_s: list[float] = field(default_factory=list)
    first: dict[str, float] = field(default_factory=dict)
    before: dict[str, float] = field(default_factory=dict)
    after: dict[str, float] = field(default_factory=dict)
    entered: int = 0
    device_s: dict[str, float] = field(default_factory=dict)

    @property
    def step_s(self) -> list[float]:
        """Each measured step."""
        times = self.times_s[self.skip :]
        return [end - begin for begin, end in pairwise(times)]

    def phases_s(self) -> dict[str, float]:
        """Mean seconds of a step by phase; {} if none was measured.

        model: the forward outside attention; python: between two forwards, and in attention between
        its phases; other: what none of these has seen.
        """
        taken = self.step_s
        if not taken:
            return {}
        spent = {name: self.after[name] - self.before[name] for name in self.after}
        parts = {name: spent[name] for name in PHASES}
        own = spent[ATTENTION] - sum(parts.values())
        parts["model"] = spent[FORWARD] - spent[ATTENTION]
        parts["python"] = spent[BETWEEN] + own
        parts["other"] = sum(taken) - sum(parts.values())
        return {name: seconds / len(taken) for name, seconds in parts.items()}

    def device_phases_s(self) -> dict[str, float]:
        """Mean device seconds of a step by phase; `model` is the forward outside attention."""
        count = len(self.step_s)
        if not count or not self.device_s:
            return {}
        spent = dict(self.device_s)
        spent["model"] = spent.pop(FORWARD) - spent.pop(ATTENTION)
        return {name: seconds / count for name, seconds in spent.items()}


class StepWatch(BaseStreamer):
    """Hears from transformers of each token, and from the model of each forward.

    Args:
        cache: gets counters of its own (`work`) when measuring begins.
        recorder: of the cache's phases meanwhile; None where nothing but sums is wanted.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        cache: TieredCache,
        skip: int,
        recorder: Recorder | None = None,
    ) -> None:
        self.steps, self.work = Steps(skip), Work()
        self._model, self._cache, self._phases = model, cache, cache.kv.phases
        self._recorder = recorder
        self._prompt_passed = False
        self._device_before: dict[str, float] = {}
        self._entered_before = 0
        self._phase = BETWEEN
        self._mark: Event | None = None
        self._since_s: float | None = None

    @contextmanager
    def watching(self) -> Iterator[StepWatch]:
        """The model's forwards are measured inside."""
        hooks = [
            self._model.register_forward_pre_hook(lambda *_: self._enter(FORWARD)),
            self._model.register_forward_hook(lambda *_: self._enter(BETWEEN)),
            *self._layer_hooks(),
        ]
        self._phases.observe(self._recorder)
        try:
            yield self
        finally:
            self._phases.observe(None)
            self._cache.kv.work = Work()  # what comes after this is somebody else's
            for hook in hooks:
                hook.remove()

    def _enter(self, phase: str) -> None:
        self._switch(phase)  # whose result would replace the model's

    def _switch(self, phase: str) -> float:
        """From now on it is `phase`, FORWARD or BETWEEN, that time passes in; the time of now."""
        now, recorder, phases = perf_counter(), self._recorder, self._phases
        if self._since_s is not None:
            phases.seconds[self._phase] += now - self._since_s
            phases.entered += 1
            if recorder is not None:
                recorder.end(self._phase, None, self._since_s, now, self._mark)
        self._phase, self._since_s = phase, now
        self._mark = None if recorder is None else recorder.begin(phase)
        return now

    def _layer_hooks(self) -> list[Any]:
        """Spans of whole decoder layers, where spans are kept."""
        if self._recorder is None or not self._recorder.keeps_spans:
            return []
        hooks: list[Any] = []
        for idx, layer in enumerate(decoder_layers(self._model)):
            begun: list[float] = []
            hooks.append(
                layer.register_forward_pre_hook(
                    lambda *_, begun=begun: begun.append(perf_counter())
                )
            )
            hooks.append(
                layer.register_forward_hook(
                    lambda *_, begun=begun, idx=idx: self._keep(begun.pop(), "layer", idx)
                )
            )
        return hooks

    def _keep(self, begin_s: float, what: str, layer_idx: int | None) -> None:
        assert self._recorder is not None
        self._recorder.spans.append(TraceSpan(begin_s, perf_counter(), what, layer_idx, HOST))

    def put(self, value: Tensor) -> None:
        """See `BaseStreamer`: the prompt first, then token by token."""
        if not self._prompt_passed:
            self._prompt_passed = True
            return
        steps, recorder = self.steps, self._recorder
        if recorder is not None:
            if recorder.keeps_spans and steps.times_s:
                self._keep(steps.times_s[-1], "step", None)
            recorder.step_ended()
        clock = None if recorder is None else recorder.clock
        steps.times_s.append(self._switch(BETWEEN))
        if len(steps.times_s) == 1:
            steps.first = dict(self._phases.seconds)
        measured = len(steps.times_s) - 1 - steps.skip
        if measured == 0:
            steps.before = dict(self._phases.seconds)
            self._cache.kv.work = self.work
            self._entered_before = self._phases.entered
            self._device_before = {} if clock is None else dict(clock.seconds)
        if measured >= 0:
            steps.after = dict(self._phases.seconds)
            steps.entered = self._phases.entered - self._entered_before
            if clock is not None:
                before = self._device_before
                steps.device_s = {k: v - before[k] for k, v in clock.seconds.items()}

    def end(self) -> None:
        """See `BaseStreamer`."""


def decoder_layers(model: nn.Module) -> list[Any]:
    """The modules that have an attention, `self_attn`, in the order of the model."""
    return [m for m in model.modules() if isinstance(getattr(m, "self_attn", None), nn.Module)]


class _TimeIsOver(StoppingCriteria):
    """Ends a generation that takes too long, once enough steps are measured."""

    def __init__(self, watch: StepWatch, is_over: Callable[[], bool], fewest: int) -> None:
        self._watch, self._is_over, self._fewest = watch, is_over, fewest

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: Any) -> Tensor:
        # transformers asks before it hands the token on, so that a step more is done than is known.
        enough = len(self._watch.steps.step_s) + 1 >= self._fewest
        ends = enough and self._is_over()
        return torch.full((input_ids.shape[0],), ends, device=input_ids.device)


def generate_watched(
    watch: StepWatch,
    ids: Tensor,
    count: int,
    is_over: Callable[[], bool],
    fewest: int = FEWEST_STEPS,
) -> Tensor:
    """Continues ids [1, N] greedily by `count` tokens under the watch; ids of all.

    Args:
        is_over: asked after each step; ends the generation early.
        fewest: steps that are measured in any case.
    """
    model: Any = watch._model
    known = model.generation_config.pad_token_id
    with watch.watching():
        output: Tensor = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            **passing(watch._cache),
            min_new_tokens=count,
            max_new_tokens=count,
            do_sample=False,
            streamer=watch,
            stopping_criteria=[_TimeIsOver(watch, is_over, fewest)],
            **({} if known is not None else {"pad_token_id": 0}),
        )
    return output
