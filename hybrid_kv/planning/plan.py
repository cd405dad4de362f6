"""Data of a plan: a model, a machine, and ways of running a context."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from hybrid_kv.planning.rates import Rates
from hybrid_kv.types import LayerShape

Mode: TypeAlias = Literal["dense", "dense_8bit", "hybrid"]


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Facts of a model that planning knows.

    weight_bytes: all weights; read_bytes: those that one token reads (no embedding table, and of
    experts those that it is routed to); weights: bytes by layout, such as Q4_K or bfloat16.
    layers: the layers that can be tiered. Of the `other_layers`: window_bytes: the most KV that
    sliding windows hold; untiered_kv_bytes: K and V of a token in those that keep all and share a
    cache layer with a state; fixed_bytes: states of one size at any context, as linear attention
    keeps.
    linear_width: numbers of a token in all heads of its keys, values and block, 0 for none.
    products: multiplications of a token with weights, the output over the vocabulary left out.
    dtype_bytes: of activations, keys and values. max_context_tokens: what the model was made for,
    None where it says nothing.
    """

    name: str
    weight_bytes: int
    read_bytes: int
    layers: tuple[LayerShape, ...]
    window_bytes: int
    hidden_size: int
    intermediate_size: int
    dtype_bytes: int = 2
    max_context_tokens: int | None = None
    weights: Mapping[str, int] = field(default_factory=dict)
    other_layers: int = 0
    untiered_kv_bytes: int = 0
    fixed_bytes: int = 0
    linear_width: int = 0
    products: int = 0

    @property
    def num_layers(self) -> int:
        """All layers, tiered or not."""
        return len(self.layers) + self.other_layers

    def other_kv_bytes(self, tokens: int) -> int:
        """Keys and values that layers hold and read which are not tiered."""
        return self.window_bytes + tokens * self.untiered_kv_bytes

    @property
    def kv_bytes_per_token(self) -> int:
        """K and V of one token in all tiered layers."""
        return sum(self.kv_bytes(layer) for layer in self.layers)

    @property
    def largest_layer_bytes(self) -> int:
        """K and V of one token in the widest tiered layer."""
        return max((self.kv_bytes(layer) for layer in self.layers), default=0)

    @property
    def states_bytes(self) -> int:
        """Hidden states of one token."""
        return self.dtype_bytes * self.hidden_size

    def kv_bytes(self, layer: LayerShape) -> int:
        """K and V of one token in one layer."""
        return 2 * layer.num_kv_heads * layer.head_dim * self.dtype_bytes


@dataclass(frozen=True, slots=True)
class PromptRates:
    """Arithmetic of a prompt in 1e9 operations per second, a multiplication and a sum being two.

    assumed: they are shares of a card's specification, and nothing was measured.
    """

    products: float
    attention: float
    assumed: bool = False


@dataclass(frozen=True, slots=True)
class Machine:
    """Hardware to run on.

    device: what to call it. device_bytes: its memory, None where the model runs on the CPU.
    host_bytes: memory that the process may use. assumed: the rates are a card's specification.
    prompt: None where the time of a prompt is not to be predicted.
    """

    device: str
    device_bytes: int | None
    host_bytes: int
    rates: Rates
    assumed: bool = False
    prompt: PromptRates | None = None


@dataclass(frozen=True, slots=True)
class Option:
    """One way of running the context.

    device_bytes, host_bytes: by purpose, at the moment when most is needed.
    ms: predicted milliseconds per token by tier, {} where the method's search is not modelled.
    first_token: predicted seconds of the prompt by part, {} where the machine's arithmetic is not
        known.
    settings: what to hand to HybridConfig beside the given configuration.
    select: who finds cold entries, and why; "" where nobody does. code_bytes: of a key at 128
        channels where a device finds them.
    cold_tokens: that lie in the cold tier; 0 for methods that keep or drop everything.
    """

    mode: Mode
    device_bytes: Mapping[str, int]
    host_bytes: Mapping[str, int]
    fits: bool
    why: str
    ms: Mapping[str, float] = field(default_factory=dict)
    settings: Mapping[str, int | str] = field(default_factory=dict)
    select: str = ""
    code_bytes: int | None = None
    max_context_tokens: int = 0
    cold_tokens: int = 0
    first_token: Mapping[str, float] = field(default_factory=dict)

    @property
    def tpot_ms(self) -> float | None:
        return sum(self.ms.values()) if self.ms else None

    @property
    def ttft_s(self) -> float | None:
        return sum(self.first_token.values()) if self.first_token else None


@dataclass(frozen=True, slots=True)
class Plan:
    """The options in the order in which they are preferred, and the one to take, if any fits."""

    facts: ModelFacts
    machine: Machine
    context_tokens: int
    options: tuple[Option, ...]

    @property
    def recommended(self) -> Option | None:
        return next((option for option in self.options if option.fits), None)

    @property
    def advice(self) -> str:
        """One sentence."""
        option = self.recommended
        if option is None:
            reasons = "; ".join(f"{other.mode}: {other.why}" for other in self.options)
            return f"does not fit, because {reasons}"
        if option.mode == "hybrid" and not option.cold_tokens:
            return "the method fits: what it keeps lies beside the weights, and nothing is cold"
        return {
            "dense": "dense 16-bit KV fits: use method 'full', nothing is approximated",
            "dense_8bit": (
                "dense 8-bit KV fits: use that, in a runtime that stores KV in 8 bits; hybrid_kv "
                "keeps 16 bits and would go to host memory"
            ),
            "hybrid": "hybrid: cold keys and values in host memory, found by an index",
        }[option.mode]
