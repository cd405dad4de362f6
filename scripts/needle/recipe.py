"""The recipe: sizes of the model, and the stages of one training run.

docs/lab/needle.md says where every number comes from and what happened without it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

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
    rope_theta: float = 1e8
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
        frame_weight: loss weight of the tokens that frame a value: ordinals, repeated keys, the
            closing stop.
        answer_total: weight that all answers of one sequence get together, so that a task with
            one answer token per sequence counts as much as one with forty; 0 leaves them alone.
    """

    steps: int
    seq_tokens: int
    batch: int
    max_copies: float
    max_position: int
    record_share: tuple[float, float]
    alphabet: tuple[int, int]
    mix: dict[str, float] = field(default_factory=dict)
    frame_weight: float = 0.3
    answer_total: float = 0.0


_PLAIN_MIX = {"phrases": 0.9, "key_value": 0.08, "passkey": 0.02}
_FIRST_MIX = {
    "key_value": 0.60,
    "passkey": 0.08,
    "multi_query": 0.08,
    "multi_value": 0.08,
    "variable_tracking": 0.08,
    "most_frequent": 0.08,
}
_SECOND_MIX = {
    "key_value": 0.22,
    "passkey": 0.05,
    "multi_query": 0.18,
    "multi_value": 0.25,
    "variable_tracking": 0.15,
    "most_frequent": 0.15,
}
_FULL_MIX = {
    "key_value": 0.42,
    "passkey": 0.06,
    "multi_query": 0.10,
    "multi_value": 0.18,
    "variable_tracking": 0.12,
    "most_frequent": 0.12,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimisation:
    """Learning rates and the clip of the attention logits."""

    muon_lr: float = 0.02
    muon_momentum: float = 0.95
    adam_lr: float = 3e-3
    warmup_steps: int = 30
    decay_share: float = 0.30
    first_tau: float = 1000.0
    last_tau: float = 24.0
    tau_share: float = 0.75
    """Tau reaches `last_tau` after this share of all steps."""
    clip_every: int = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """Stages under one learning-rate schedule."""

    name: str
    stages: tuple[Stage, ...]
    settings: Optimisation


STAGES: tuple[Stage, ...] = (
    Stage(
        steps=250,
        seq_tokens=128,
        batch=32,
        max_copies=1,
        max_position=128,
        record_share=(0.35, 0.75),
        alphabet=(256, 256),
        mix=_PLAIN_MIX,
    ),
    Stage(
        steps=500,
        seq_tokens=128,
        batch=32,
        max_copies=50,
        max_position=MAX_POSITION,
        record_share=(0.60, 0.97),
        alphabet=(5, 20),
        mix=_FIRST_MIX,
    ),
    Stage(
        steps=700,
        seq_tokens=256,
        batch=16,
        max_copies=640,
        max_position=MAX_POSITION,
        record_share=(0.40, 0.95),
        alphabet=(6, 64),
        mix=_FULL_MIX,
    ),
    Stage(
        steps=600,
        seq_tokens=256,
        batch=16,
        max_copies=640,
        max_position=MAX_POSITION,
        record_share=(0.30, 0.95),
        alphabet=(8, 256),
        mix=_FULL_MIX,
    ),
    Stage(
        steps=120,
        seq_tokens=512,
        batch=8,
        max_copies=320,
        max_position=MAX_POSITION,
        record_share=(0.20, 0.90),
        alphabet=(16, 256),
        mix=_FULL_MIX,
    ),
)

SECOND_STAGES: tuple[Stage, ...] = (
    Stage(
        steps=1250,
        seq_tokens=256,
        batch=16,
        max_copies=640,
        max_position=MAX_POSITION,
        record_share=(0.40, 0.95),
        alphabet=(6, 96),
        mix=_SECOND_MIX,
        frame_weight=1.0,
        answer_total=40.0,
    ),
    Stage(
        steps=450,
        seq_tokens=256,
        batch=16,
        max_copies=640,
        max_position=MAX_POSITION,
        record_share=(0.30, 0.95),
        alphabet=(8, 256),
        mix=_SECOND_MIX,
        frame_weight=1.0,
        answer_total=40.0,
    ),
    Stage(
        steps=150,
        seq_tokens=512,
        batch=8,
        max_copies=320,
        max_position=MAX_POSITION,
        record_share=(0.20, 0.90),
        alphabet=(16, 256),
        mix=_SECOND_MIX,
        frame_weight=1.0,
        answer_total=40.0,
    ),
)

_THIRD_MIX = {
    "key_value": 0.25,
    "passkey": 0.05,
    "multi_query": 0.12,
    "multi_value": 0.33,
    "variable_tracking": 0.15,
    "most_frequent": 0.10,
}
THIRD_STAGES: tuple[Stage, ...] = (
    Stage(
        steps=700,
        seq_tokens=256,
        batch=16,
        max_copies=640,
        max_position=MAX_POSITION,
        record_share=(0.30, 0.95),
        alphabet=(8, 256),
        mix=_THIRD_MIX,
        frame_weight=1.0,
        answer_total=40.0,
    ),
    Stage(
        steps=80,
        seq_tokens=512,
        batch=8,
        max_copies=320,
        max_position=MAX_POSITION,
        record_share=(0.20, 0.90),
        alphabet=(16, 256),
        mix=_THIRD_MIX,
        frame_weight=1.0,
        answer_total=40.0,
    ),
)

PHASES: tuple[Phase, ...] = (
    Phase(name="retrieval", stages=STAGES, settings=Optimisation()),
    # The second phase starts from a model that retrieves, so its logits stay clipped throughout.
    Phase(
        name="tasks",
        stages=SECOND_STAGES,
        settings=Optimisation(muon_lr=0.015, adam_lr=2e-3, first_tau=24.0, decay_share=0.6),
    ),
    Phase(
        name="polish",
        stages=THIRD_STAGES,
        settings=Optimisation(muon_lr=0.012, adam_lr=1.5e-3, first_tau=24.0, decay_share=0.75),
    ),
)
