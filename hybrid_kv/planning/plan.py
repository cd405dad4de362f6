"""Data of a plan: a model, from its configuration, a machine, and ways of running a context."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    Cache,
    DynamicCache,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from hybrid_kv.errors import UnsupportedModelError
from hybrid_kv.models.cache_layers import max_context
from hybrid_kv.models.cache_state import passing, states_of
from hybrid_kv.models.load import load_config, packed_weights, resolve_dtype
from hybrid_kv.models.support import inspect_model, text_config
from hybrid_kv.models.weight_kinds import (
    kind_of_checkpoint,
    read_share,
    stored_weights,
    weight_kind,
)
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


def model_facts(
    spec: str | Path,
    *,
    dtype: str | torch.dtype | None = None,
    layers: int | None = None,
    weights: str | None = None,
    dequantize: bool = False,
    device: str | None = None,
) -> ModelFacts:
    """Facts for planning, from the configuration alone.

    Args:
        spec: as `load_model`.
        weights: a name of `WEIGHT_KINDS`, in which weights would be stored; None for what the
            checkpoint says, and for a GGUF file's own layouts.
        dequantize: packed weights are unpacked.
        device: where the model would run, in words; None where that does not matter.

    Raises:
        ModelNotFoundError, ConfigError: as `load_model`, which refuses packed weights on a GPU.
        UnsupportedModelError: the model's attention cannot be tiered.
    """
    kind = None if weights is None else weight_kind(weights, device)
    config = load_config(spec, layers)
    stored: Any = resolve_dtype(dtype) or getattr(config, "dtype", None) or torch.bfloat16
    in_file = packed_weights(spec, stored, kind=weights, dequantize=dequantize, device=device)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=stored)
    if in_file is None and kind is None and not dequantize:
        kind = kind_of_checkpoint(config, device)
    parts = list(stored_weights(model, kind) if in_file is None else in_file)
    by_layout: Counter[str] = Counter()
    for part in parts:
        by_layout[part.layout] += part.num_bytes
    shapes, text = inspect_model(model).layers, text_config(model)
    others = other_layers(model, len(shapes))
    return ModelFacts(
        name=str(spec),
        weight_bytes=by_layout.total(),
        read_bytes=round(sum(read_share(model, part.target) * part.num_bytes for part in parts)),
        layers=shapes,
        window_bytes=others.window_bytes,
        hidden_size=text.hidden_size,
        intermediate_size=_widest(model, text),
        dtype_bytes=stored.itemsize,
        max_context_tokens=max_context(text),
        weights=dict(by_layout.most_common()),
        other_layers=others.num_layers,
        untiered_kv_bytes=others.untiered_kv_bytes,
        fixed_bytes=others.fixed_bytes,
        linear_width=others.linear_width,
        products=_products(model),
    )


def _products(model: PreTrainedModel) -> int:
    """Multiplications of a token with matrices of weights, the output projection left out."""
    head = getattr(model.get_output_embeddings(), "weight", None)
    matrices = [
        (name, weight)
        for name, weight in model.named_parameters()
        if weight.ndim > 1 and weight is not head
    ]
    return round(sum(read_share(model, name) * weight.numel() for name, weight in matrices))


def _widest(model: PreTrainedModel, text: PreTrainedConfig) -> int:
    """Output channels of the widest linear layer that is not the output over the vocabulary."""
    output = model.get_output_embeddings()
    widths = [
        m.out_features for m in model.modules() if isinstance(m, nn.Linear) and m is not output
    ]
    return max(getattr(text, "intermediate_size", 0) or 0, *widths, 0)


_BLOCK = 64
"""Tokens whose products with one another linear attention makes at a time."""


class OtherLayers(NamedTuple):
    """num_layers: those that are not tiered. window_bytes: keys and values of their windows at full
    length. untiered_kv_bytes: of a token in layers that keep all of them. fixed_bytes: states that
    have one size at any context, as linear attention keeps. linear_width: see `ModelFacts`.
    """

    num_layers: int
    window_bytes: int
    untiered_kv_bytes: int
    fixed_bytes: int
    linear_width: int


@torch.no_grad()
def other_layers(model: PreTrainedModel, num_tiered: int) -> OtherLayers:
    """Memory of a model on the meta device beside its tiered layers, for one sequence.

    Raises:
        UnsupportedModelError: the model cannot be passed without being computed.
    """
    count = len(DynamicCache(config=text_config(model)).layers) - num_tiered
    if not count:
        return OtherLayers(0, 0, 0, 0, 0)
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("batched_mm")  # others look at numbers, or at dtypes
    try:
        try:
            layers = _filled_layers(model, once=True)
        except Exception:  # of layers that hand keys to later ones, as Gemma 4's
            layers = _filled_layers(model, once=False)
    except Exception as error:  # of any kind, in the model's own code
        raise UnsupportedModelError(
            f"what the layers of {type(model).__name__} hold that are not tiered cannot be found "
            f"without computing it ({str(error).partition(chr(10))[0]})"
        ) from error
    windows = untiered = 0
    for layer in layers:
        if isinstance(layer, DynamicSlidingWindowLayer):
            windows += layer.sliding_window * _kv_bytes(layer)
        elif isinstance(layer, DynamicLayer) and type(layer) is not DynamicLayer:
            untiered += _kv_bytes(layer)
    states = [state for layer in layers for state in states_of(layer).values()]
    # [1, heads, key channels, value channels] of a linear attention; those of kernels have 3 axes.
    widths = [x.shape[1] * (x.shape[2] + x.shape[3] + _BLOCK) for x in states if x.ndim == 4]
    fixed = sum(state.nbytes for state in states)
    return OtherLayers(count, windows, untiered, fixed, max(widths, default=0))


def _filled_layers(model: PreTrainedModel, *, once: bool) -> list[Any]:
    """By layer a cache layer of its shapes that holds a token.

    Args:
        once: of layers that are alike the first alone computes.
    """
    cache = DynamicCache(config=text_config(model))
    token = torch.zeros(1, 1, dtype=torch.long, device="meta")
    alike = _each_kind_once(model, cache) if once else nullcontext(range(len(cache.layers)))
    with alike as first:
        model(input_ids=token, use_cache=True, **passing(cache))
    return [cache.layers[layer_idx] for layer_idx in first]


@contextmanager
def _each_kind_once(model: PreTrainedModel, cache: Cache) -> Iterator[Sequence[int]]:
    """By layer the first that is like it, in class, shapes of weights and cache.

    In a forward within only these compute, and others give what theirs gave: a layer of meta
    tensors takes .05 s.
    """
    config = text_config(model)
    count = len(cache.layers)
    stacks = (m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == count)
    layers, first = next(stacks, ()), list(range(count))
    seen: dict[object, int] = {}
    for layer_idx, layer in enumerate(layers):
        held, types = cache.layers[layer_idx], getattr(config, "layer_types", None)
        kind = (
            *(type(layer), tuple((name, x.shape) for name, x in layer.named_parameters())),
            *(type(held), getattr(held, "sliding_window", None), types and types[layer_idx]),
        )
        first[layer_idx] = seen.setdefault(kind, layer_idx)
    given: dict[int, Any] = {}

    def keep(layer_idx: int, module: nn.Module, inputs: Any, output: Any) -> None:
        given[layer_idx] = output

    with ExitStack() as stack:
        for layer_idx, layer in enumerate(layers):
            if (like := first[layer_idx]) != layer_idx:
                layer.forward = partial(_given, given, like)
                stack.callback(delattr, layer, "forward")
            else:
                stack.callback(layer.register_forward_hook(partial(keep, layer_idx)).remove)
        yield first


def _given(given: Mapping[int, Any], layer_idx: int, *args: Any, **kwargs: Any) -> Any:
    return given[layer_idx]


def _kv_bytes(layer: DynamicLayer) -> int:
    """Keys and values of one token."""
    return sum(entry.nbytes for entry in (layer.keys, layer.values) if entry is not None)
