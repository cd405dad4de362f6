"""Time to the first token of a prompt by its parts: products, attention, entries that leave.

Arithmetic over rates: of this machine, measured with the very products and attention that a prompt
takes, or of a card's specification.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import linear, scaled_dot_product_attention

from hybrid_kv.models.prompt_layers import trial
from hybrid_kv.ops import get_ops
from hybrid_kv.ops.native.library import pool_here
from hybrid_kv.ops.native.packed import (
    PACKED_KINDS,
    PackedWeight,
    multiplies_packed,
    packed_linear,
)
from hybrid_kv.planning.plan import ModelFacts, PromptRates
from hybrid_kv.planning.rates import Card, Rates, median_seconds

ATTAINED_PRODUCTS, ATTAINED_ATTENTION = 0.7, 0.5
"""Shares of a card's specified rate in 16 bit (assumptions, not measurements)."""

SPARSE_DENSITY, _CHOICE = 0.3, 0.04
"""Share of the key blocks that sparse prefill reads (an assumption: what SmolLM2 reads at an error
of .05, of 4K to 8K tokens), and what it costs to choose them, of exact attention."""

_TOKENS, _OUTPUTS, _INPUTS = 256, 1024, 2048
"""Of a measured product, at most: a chunk of a prompt, and as much of a matrix as takes 10 ms."""
_ATTENDED, _HEADS = 2048, 2
"""Tokens and query heads of a measured attention; longer prompts attend somewhat faster."""

_PLAIN = {str(dtype): dtype for dtype in (torch.bfloat16, torch.float16, torch.float32)}


def prompt_rates_of_card(card: Card, facts: ModelFacts) -> PromptRates | None:
    """Rates that a card would reach in 16 bit; None for a model that computes in 32."""
    if facts.dtype_bytes != 2:
        return None
    return PromptRates(
        products=ATTAINED_PRODUCTS * 1e3 * card.tflops,
        attention=ATTAINED_ATTENTION * 1e3 * card.tflops,
        assumed=True,
    )


def measure_prompt_rates(facts: ModelFacts, device: torch.device) -> PromptRates | None:
    """Measures this machine in about .3 seconds.

    None where weights have a layout whose products are a library's, which is not loaded here.
    """
    products = _measured_products(facts, device)
    if products is None or not facts.layers:
        return None
    shape, dtype = facts.layers[0], _dtype(facts)
    q = torch.ones(1, _HEADS, _ATTENDED, shape.head_dim, dtype=dtype, device=device)
    k, v = q[:, :1].contiguous(), q[:, :1].contiguous()
    scale = shape.head_dim**-0.5
    attend: Callable[[], object]
    if device.type == "cpu":
        attend = partial(get_ops("auto").attend_causal, q, k, v, scale=scale)
    else:
        wide = k.expand_as(q)
        attend = partial(scaled_dot_product_attention, q, wide, wide, is_causal=True, scale=scale)
    work = _attention_work(_HEADS * shape.head_dim, _ATTENDED)
    return PromptRates(products, work / median_seconds(attend, device) / 1e9)


def _measured_products(facts: ModelFacts, device: torch.device) -> float | None:
    """A layer's largest product in the layout of most weights, in 1e9 operations a second."""
    inputs, outputs = min(facts.hidden_size, _INPUTS), min(facts.intermediate_size, _OUTPUTS)
    layout, dtype = _layout(facts), _dtype(facts)
    x = torch.ones(_TOKENS, inputs, dtype=dtype, device=device)
    multiply: Callable[[], Tensor]
    if layout in PACKED_KINDS and multiplies_packed(layout, device):
        row_bytes = PACKED_KINDS[layout].row_bytes(inputs)
        blocks = torch.zeros(outputs, row_bytes, dtype=torch.uint8)
        weight = PackedWeight(layout, blocks, inputs)
        multiply = partial(packed_linear, x, weight, pool=pool_here())
    elif f"torch.{layout}" == str(dtype):
        if device.type == "cpu" and dtype != torch.float32 and trial(dtype, _TOKENS).pays:
            x = x.float()  # as `models.prompt_layers`, whose copy of a weight serves all chunks
        multiply = partial(linear, x, torch.ones(outputs, inputs, dtype=x.dtype, device=device))
    else:
        return None
    work = 2 * _TOKENS * inputs * outputs
    return work / median_seconds(multiply, device) / 1e9


def _layout(facts: ModelFacts) -> str:
    """Name of the layout that most weights have; "" where nothing is known of them."""
    return max(facts.weights, key=facts.weights.__getitem__, default="")


def _dtype(facts: ModelFacts) -> torch.dtype:
    """Dtype of activations."""
    known = torch.float32 if facts.dtype_bytes == 4 else torch.bfloat16
    return _PLAIN.get(f"torch.{_layout(facts)}", known)


def first_token_seconds(
    facts: ModelFacts,
    tokens: int,
    prompt: PromptRates | None,
    rates: Rates,
    *,
    cold_tokens: int = 0,
    sparse: bool = False,
) -> dict[str, float]:
    """Seconds of a prompt by part; {} where the machine's rates are not known.

    Not counted: attention within windows and states of fixed size, norms and the like, unpacking
    of weights on a card, and what an index learns from the prompt and takes to be built.

    Args:
        cold_tokens: entries that leave for the cold tier. Over a bus they travel while the next
            layer is computed, and what takes longer shows; on the CPU they are copied.
        sparse: whether attention is block-sparse; exact otherwise.
    """
    if prompt is None or not facts.products:
        return {}
    widths = [shape.num_q_heads * shape.head_dim for shape in facts.layers]
    products = 2 * tokens * facts.products / prompt.products / 1e9
    attention = sum(_attention_work(width, tokens) for width in widths) / prompt.attention / 1e9
    if sparse:
        attention *= SPARSE_DENSITY + _CHOICE
    left = cold_tokens * facts.kv_bytes_per_token / 1e9
    if rates.d2h is None:
        leaving = 2 * left / rates.dram  # read and written
    else:
        depth, travels = max(1, len(facts.layers)), left / rates.d2h
        leaving = max(travels / depth, travels - (products + attention) * (depth - 1) / depth)
    name = "sparse attention" if sparse else "attention"
    return {"products": products, name: attention, "leaving": leaving}


def _attention_work(width: int, tokens: int) -> float:
    """Operations of causal attention over query heads of `width` channels together: q.k and p.v of
    half of all pairs.
    """
    return 2.0 * width * tokens * (tokens + 1)
