"""The recipe: sizes of the model, and the stages of one training run.

docs/archive/needle.md says where every number comes from and what happened without it.
"""

from __future__ import annotations

from dataclasses import dataclass

MAX_POSITION = 160_000
"""Positions seen in training; contexts of 128K tokens and their answers lie below."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSize:
    """Shape of the Llama model."""

    hidden: int = 256
    num_layers: int = 4
    num_q_heads: int = 8
    num_kv_heads: int = 2
    head_dim: int = 64
    intermediate: int = 512
    rope_theta: float = 1e12
    norm_eps: float = 1e-5
    max_position: int = 262_144

    @property
    def group_size(self) -> int:
        """Query heads per KV head."""
        return self.num_q_heads // self.num_kv_heads


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One stage: what its sequences look like and for how long it runs.

    Attributes:
        steps: optimizer steps.
        seq_tokens: tokens of a sequence.
        batch: sequences of a step.
        max_copies: largest virtual weight M of one filler token (1 = none).
        max_position: largest position id; above `seq_tokens` positions jump.
        record_share: range of the share of tokens in records, questions and answers.
        alphabet: range of the number of bytes that a sequence uses.
        mix: share of each task; "phrases" are repeated random phrases.
        answer_total: weight that all answers of one sequence get together, so that a task with
            one answer token per sequence counts as much as one with forty; 0 leaves them alone.
    """

    steps: int
    seq_tokens: int
    batch: int
    max_copies: float
    max_position: int = MAX_POSITION
    record_share: tuple[float, float]
    alphabet: tuple[int, int]
    mix: dict[str, float]
    answer_total: float = 40.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimisation:
    """Learning rates and the clip of the attention logits."""

    muon_lr: float = 0.02
    muon_momentum: float = 0.95
    adam_lr: float = 3e-3
    warmup_steps: int = 30
    decay_share: float = 0.50
    first_tau: float = 1000.0
    last_tau: float = 24.0
    tau_share: float = 0.20
    """Tau reaches `last_tau` after this share of all steps."""
    clip_every: int = 4


_PHRASES = {"phrases": 0.9, "key_value": 0.08, "passkey": 0.02}
_MOSTLY_PLAIN = {
    "key_value": 0.50,
    "passkey": 0.06,
    "multi_query": 0.10,
    "multi_value": 0.12,
    "variable_tracking": 0.12,
    "most_frequent": 0.10,
}
_ALL_TASKS = {
    "key_value": 0.30,
    "passkey": 0.04,
    "multi_query": 0.17,
    "multi_value": 0.20,
    "variable_tracking": 0.14,
    "most_frequent": 0.15,
}

STAGES: tuple[Stage, ...] = (
    Stage(
        steps=200,
        seq_tokens=128,
        batch=32,
        max_copies=1,
        max_position=128,
        record_share=(0.35, 0.75),
        alphabet=(256, 256),
        mix=_PHRASES,
        answer_total=0.0,
    ),
    Stage(
        steps=350,
        seq_tokens=128,
        batch=32,
        max_copies=50,
        record_share=(0.60, 0.97),
        alphabet=(5, 20),
        mix=_MOSTLY_PLAIN,
    ),
    Stage(
        steps=2000,
        seq_tokens=256,
        batch=16,
        max_copies=640,
        record_share=(0.40, 0.95),
        alphabet=(6, 96),
        mix=_ALL_TASKS,
    ),
    Stage(
        steps=1400,
        seq_tokens=256,
        batch=16,
        max_copies=640,
        record_share=(0.30, 0.95),
        alphabet=(8, 256),
        mix=_ALL_TASKS,
    ),
    Stage(
        steps=250,
        seq_tokens=512,
        batch=8,
        max_copies=320,
        record_share=(0.30, 0.95),
        alphabet=(16, 256),
        mix=_ALL_TASKS,
    ),
)
