"""The training loop: phases and stages, loss, optimiser, clip, and a log line now and then."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from hybrid_kv.eval.needle import vocabulary as vocab
from needle.data import Batch, make_batch
from needle.export import to_transformers
from needle.model import LayerFunction, Weights, forward, init_weights, run_layer
from needle.optimiser import Optimiser, clip_queries, tau_at
from needle.progress import accuracies
from needle.recipe import PHASES, ModelSize, Phase, Stage

_CLIP_SEQUENCES = 4
_LOG_EVERY = 50
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

    The same seed gives the same weights on one machine with one number of threads. Every phase
    has an optimiser and a random stream of its own, so a run can be taken up between phases.
    """

    def __init__(self, seed: int, device: torch.device, checkpoints: Path) -> None:
        self._seed = seed
        self._device = device
        self._checkpoints = checkpoints
        self._size = ModelSize()
        self._layer = _compiled_layer()
        generator = torch.Generator().manual_seed(seed)
        self._weights = self._placed(init_weights(self._size, vocab.VOCAB_SIZE, generator))
        self.report: dict[str, Any] = {
            "seed": seed,
            "device": device.type,
            "threads": torch.get_num_threads(),
            "size": asdict(self._size),
            "steps": 0,
            "tokens": 0,
            "wall_s": 0.0,
            "stages": [],
        }

    def run(self, first_phase: int = 1) -> Weights:
        """Trains from `first_phase` on; a phase above 1 starts from the checkpoint before it."""
        if first_phase > 1:
            saved = torch.load(self._checkpoint(first_phase - 1), weights_only=True)
            self._weights = self._placed(saved["weights"])
            self.report.update(saved["report"])
        for number, phase in enumerate(PHASES[first_phase - 1 :], start=first_phase):
            self._run_phase(number, phase)
            weights = {name: t.detach().cpu() for name, t in self._weights.items()}
            torch.save({"weights": weights, "report": self.report}, self._checkpoint(number))
        model = to_transformers(self._weights, self._size)
        self.report["accuracy"] = {
            f"{tokens} tokens": accuracies(model, tokens) for tokens in _FINAL_TOKENS
        }
        return self._weights

    def _checkpoint(self, phase: int) -> Path:
        return self._checkpoints / f"phase{phase}.pt"

    def _placed(self, weights: Weights) -> Weights:
        return {name: t.to(self._device).requires_grad_() for name, t in weights.items()}

    def _run_phase(self, number: int, phase: Phase) -> None:
        rng = np.random.default_rng(self._seed if number == 1 else [self._seed, number])
        total_steps = sum(stage.steps for stage in phase.stages)
        optimiser = Optimiser(self._weights, phase.settings, total_steps)
        started, step = time.perf_counter(), 0
        for stage_number, stage in enumerate(phase.stages, start=1):
            name = f"{phase.name} {stage_number}"
            for losses in self._steps(rng, stage, phase, optimiser, step, total_steps):
                step += len(losses)
                elapsed = time.perf_counter() - started
                print(
                    f"{elapsed:6.0f} s  {name}  step {step}/{total_steps}  "
                    f"loss {np.mean(losses):.3f}",
                    flush=True,
                )
            scores = accuracies(to_transformers(self._weights, self._size), 1024, 24, samples=1)
            print(f"after {name}: {json.dumps(scores)}", flush=True)
            self.report["stages"].append({"name": name, **asdict(stage), "accuracy": scores})
            self.report["tokens"] += stage.steps * stage.batch * stage.seq_tokens
        self.report["steps"] += step
        self.report["wall_s"] += round(time.perf_counter() - started, 1)

    def _steps(
        self,
        rng: np.random.Generator,
        stage: Stage,
        phase: Phase,
        optimiser: Optimiser,
        first_step: int,
        total_steps: int,
    ) -> Iterator[list[float]]:
        """Runs one stage; yields the losses of every fifty steps."""
        losses: list[float] = []
        few = slice(0, _CLIP_SEQUENCES)
        for step in range(first_step, first_step + stage.steps):
            batch = make_batch(rng, stage).to(self._device)
            loss = _loss(self._weights, batch, self._size, self._layer)
            loss.backward()
            optimiser.step(step)
            losses.append(float(loss.detach()))
            if step % phase.settings.clip_every == 0:
                tau = tau_at(step, total_steps, phase.settings)
                clip_queries(self._weights, batch.ids[few], batch.positions[few], tau, self._size)
            if len(losses) == _LOG_EVERY or step == first_step + stage.steps - 1:
                yield losses
                losses = []
