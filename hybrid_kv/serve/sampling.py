"""Choosing the next token from logits, as one request asks for it."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from hybrid_kv.serve.requests import Sampling


class Choice(NamedTuple):
    """A token, with log probabilities where they were asked for; see `Token`."""

    id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


class Sampler:
    """Draws the tokens of one request, from random numbers of its own.

    Temperature and cuts are transformers' and come in its order, so that a seed gives what
    `generate(do_sample=True, seed=...)` gives.

    Args:
        device: where the logits are.
    """

    def __init__(self, sampling: Sampling, device: torch.device) -> None:
        self._sampling = sampling
        self._generator = torch.Generator(device)
        if sampling.seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(sampling.seed)
        self._warp = LogitsProcessorList()
        if sampling.temperature not in (0, 1):
            self._warp.append(TemperatureLogitsWarper(float(sampling.temperature)))
        if sampling.top_k:
            self._warp.append(TopKLogitsWarper(sampling.top_k))
        if sampling.top_p < 1:
            self._warp.append(TopPLogitsWarper(float(sampling.top_p)))

    def choose(self, logits: Tensor) -> Choice:
        """The next token after logits [V]."""
        row = logits.float()
        if self._sampling.temperature == 0:
            token = int(row.argmax())
        else:
            warped = self._warp(None, row[None])  # type: ignore[arg-type]  # none looks at the ids
            probabilities = warped.softmax(-1)
            token = int(torch.multinomial(probabilities, 1, generator=self._generator))
        if (count := self._sampling.logprobs) is None:
            return Choice(token)
        logprobs = row.log_softmax(-1)
        values, ids = logprobs.topk(min(count, row.shape[0]))
        top = tuple(zip(ids.tolist(), values.tolist(), strict=True))
        return Choice(token, float(logprobs[token]), top)
