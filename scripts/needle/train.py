"""The training loop: stages, loss, optimiser, clip, and a log line now and then."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from transformers import LlamaForCausalLM

from hybrid_kv.eval.needle import facts as vocab
from needle.data import Batch, make_batch
from needle.export import to_transformers
from needle.model import (
    LayerFunction,
    Weights,
    forward,
    init_weights,
    pin_previous_token_heads,
    run_layer,
)
from needle.optimiser import Optimiser, clip_queries, tau_at
from needle.progress import accuracies
from needle.recipe import STAGES, ModelSize, Optimisation, Stage

_CLIP_SEQUENCES = 4
_LOG_EVERY = 100
_FINAL_TOKENS = (2048, 8192)


def _loss(weights: Weights, batch: Batch, size: ModelSize, layer: LayerFunction) -> Tensor:
    logits = forward(weights, batch.ids, batch.positions, batch.bias, size, layer)
    losses = functional.cross_entropy(
        logits[:, :-1].flatten(0, 1), batch.ids[:, 1:].flatten(), reduction="none"
    )
    shares = batch.target_weights[:, 1:].flatten()
    return (losses * shares).sum() / shares.sum()


def _compiled_layer() -> LayerFunction:
    """The layer through torch.compile, or as it is where no compiler is at hand."""
    try:
        compiled: LayerFunction = torch.compile(run_layer, dynamic=False)
        size = ModelSize(hidden=64, num_layers=1, intermediate=64)
        weights = init_weights(size, 8, torch.Generator().manual_seed(0))
        ids = torch.zeros(1, 8, dtype=torch.int64)
        forward(weights, ids, ids, torch.zeros(1, 8, 8), size, compiled)
    except Exception as error:
        print(f"torch.compile is not usable here ({type(error).__name__}): running without it")
        return run_layer
    return compiled


class Trainer:
    """Weights and a record of how they came about.

    The same seed gives the same weights on one machine with one number of threads.
    """

    def __init__(self, seed: int, device: torch.device) -> None:
        self._rng = np.random.default_rng(seed)
        self._device = device
        self._size = ModelSize()
        self._settings = Optimisation()
        self._layer = _compiled_layer()
        weights = init_weights(self._size, vocab.VOCAB_SIZE, torch.Generator().manual_seed(seed))
        self._weights = {name: t.to(device).requires_grad_() for name, t in weights.items()}
        self._step = 0
        self._total_steps = sum(stage.steps for stage in STAGES)
        self._optimiser = Optimiser(self._weights, self._settings, self._total_steps)
        self.report: dict[str, Any] = {
            "seed": seed,
            "device": device.type,
            "threads": torch.get_num_threads(),
            "size": asdict(self._size),
            "settings": asdict(self._settings),
            "stages": [],
        }

    def run(self) -> Weights:
        """Trains through all stages."""
        started = time.perf_counter()
        for number, stage in enumerate(STAGES, start=1):
            for losses in self._run_stage(stage):
                print(
                    f"{time.perf_counter() - started:6.0f} s  stage {number}  "
                    f"step {self._step}/{self._total_steps}  loss {np.mean(losses):.3f}",
                    flush=True,
                )
            scores = accuracies(self._model(), 1024, 24, samples=1)
            print(f"after stage {number}: {json.dumps(scores)}", flush=True)
            self.report["stages"].append({**asdict(stage), "accuracy": scores})
        self.report["steps"] = self._total_steps
        self.report["tokens"] = sum(s.steps * s.batch * s.seq_tokens for s in STAGES)
        self.report["wall_s"] = round(time.perf_counter() - started, 1)
        self.report["accuracy"] = {
            f"{tokens} tokens": accuracies(self._model(), tokens) for tokens in _FINAL_TOKENS
        }
        return self._weights

    def _model(self) -> LlamaForCausalLM:
        return to_transformers(self._weights, self._size)

    def _run_stage(self, stage: Stage) -> Iterator[list[float]]:
        """Runs one stage; yields the losses of every hundred steps."""
        losses: list[float] = []
        few = slice(0, _CLIP_SEQUENCES)
        for left in range(stage.steps - 1, -1, -1):
            batch = make_batch(self._rng, stage).to(self._device)
            loss = _loss(self._weights, batch, self._size, self._layer)
            loss.backward()
            self._optimiser.step(self._step)
            losses.append(float(loss.detach()))
            if self._step % self._settings.clip_every == 0:
                tau = tau_at(self._step, self._total_steps, self._settings)
                clip_queries(self._weights, batch.ids[few], batch.positions[few], tau, self._size)
            pin_previous_token_heads(self._weights, self._size)
            self._step += 1
            if len(losses) == _LOG_EVERY or not left:
                yield losses
                losses = []
