"""The training forward pass of a small Llama: batched-matmul attention with an additive bias.

At 128 to 512 tokens plain batched matmuls are several times faster on a CPU, forward and
backward, than scaled_dot_product_attention, whose bf16 backward is slow there.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from needle.recipe import ModelSize

Weights = dict[str, Tensor]
_OFFSET_LOGITS = (18.0, 9.0, 6.0, 5.0, 5.0, 5.0, 5.0, 5.0, 5.0, 5.0)
"""Logit that each RoPE pair, the fastest first, gives a previous-token head at its offset.

The first tells neighbours apart (9 logits), the others keep 128K further keys from adding up.
"""
_CONSTANT = 0.3
"""First coordinate of every embedding; the other coordinates have norm 1 together."""
MATRICES = ("wq", "wk", "wv", "wo", "gate", "up", "down")


def init_weights(size: ModelSize, vocab_size: int, generator: torch.Generator) -> Weights:
    """Fresh float32 weights; matrices are [num_layers, out, in], as `torch.nn.Linear` has them."""
    q_width = size.num_q_heads * size.head_dim
    kv_width = size.num_kv_heads * size.head_dim
    shapes = {
        "wq": (q_width, size.hidden),
        "wk": (kv_width, size.hidden),
        "wv": (kv_width, size.hidden),
        "wo": (size.hidden, q_width),
        "gate": (size.intermediate, size.hidden),
        "up": (size.intermediate, size.hidden),
        "down": (size.hidden, size.intermediate),
    }
    weights = {
        name: torch.randn((size.num_layers, *shape), generator=generator) * shape[1] ** -0.5
        for name, shape in shapes.items()
    }
    # Residual branches start silent, but for the first layer's attention.
    weights["wo"][0] *= 0.5
    weights["wo"][1:] *= 0.0
    weights["down"] *= 0.0
    weights["embed"] = torch.randn((vocab_size, size.hidden), generator=generator)
    weights["attention_norm"] = torch.ones(size.num_layers, size.hidden)
    weights["mlp_norm"] = torch.ones(size.num_layers, size.hidden)
    weights["final_norm"] = torch.ones(size.hidden)
    pin_previous_token_heads(weights, size)
    return weights


@torch.no_grad()
def pin_previous_token_heads(weights: Weights, size: ModelSize) -> None:
    """Makes the query heads of layer 0's first KV head look 1, 2, 3, ... tokens back, sharply.

    Retrieval by several tokens needs such heads below it. Left to training they take millions of
    tokens to appear, and stay blurred over neighbouring offsets when they merely start sharp: then
    a model tells two tokens in a row from their likes, but not three. One coordinate of every
    embedding holds a constant; keys and queries made of it alone depend on the distance only: pair
    i adds cos(angle_i * (distance - offset)) times its share to the logit. Values are learned.
    """
    rest = weights["embed"][:, 1:]
    rest /= rest.norm(dim=1, keepdim=True)
    weights["embed"][:, 0] = _CONSTANT
    weights["attention_norm"][0, 0] = 1.0
    constant = _CONSTANT * (size.hidden / (1 + _CONSTANT**2)) ** 0.5  # after the norm
    width, half = size.head_dim, size.head_dim // 2
    device = weights["wq"].device
    angles = size.rope_theta ** (-torch.arange(half, device=device) / half)
    logits = torch.zeros(half, device=device)
    logits[: len(_OFFSET_LOGITS)] = torch.tensor(_OFFSET_LOGITS, device=device)
    strength = (logits * width**0.5).sqrt() / constant
    weights["wk"][0, :width] = 0.0
    weights["wk"][0, :half, 0] = strength
    for head in range(size.group_size):
        turn = -(1 + head) * angles
        rows = slice(head * width, (head + 1) * width)
        weights["wq"][0, rows] = 0.0
        weights["wq"][0, rows, 0] = torch.cat([strength * turn.cos(), strength * turn.sin()])


def rotary_table(positions: Tensor, size: ModelSize) -> tuple[Tensor, Tensor]:
    """Cosines and sines of plain RoPE, each [B, L, 1, D/2] float32."""
    powers = torch.arange(0, size.head_dim, 2, device=positions.device) / size.head_dim
    angles = positions[:, :, None].float() / size.rope_theta**powers
    return angles.cos()[:, :, None], angles.sin()[:, :, None]


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return (x * scale * weight).bfloat16()


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.float().chunk(2, dim=-1)
    rotated = (first * cos - second * sin, second * cos + first * sin)
    return torch.cat(rotated, dim=-1).bfloat16()


def _query_key_value(
    x: Tensor, layer: Weights, cos: Tensor, sin: Tensor, size: ModelSize
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries [B*Hkv, G*L, D], keys and values [B*Hkv, L, D], all bfloat16."""
    batch, length, _ = x.shape
    heads, group, width = size.num_kv_heads, size.group_size, size.head_dim
    h = _rms_norm(x, layer["attention_norm"], size.norm_eps)
    fused = torch.cat([layer["wq"], layer["wk"], layer["wv"]]).bfloat16()
    q, k, v = functional.linear(h, fused).split(
        [heads * group * width, heads * width, heads * width], dim=-1
    )
    q = _rotate(q.view(batch, length, heads * group, width), cos, sin)
    k = _rotate(k.view(batch, length, heads, width), cos, sin)
    q = q.view(batch, length, heads, group, width).permute(0, 2, 3, 1, 4)
    q = q.reshape(batch * heads, group * length, width)
    k = k.permute(0, 2, 1, 3).reshape(batch * heads, length, width)
    v = v.view(batch, length, heads, width).permute(0, 2, 1, 3)
    return q, k, v.reshape(batch * heads, length, width)


def run_layer(
    x: Tensor, layer: Weights, cos: Tensor, sin: Tensor, bias: Tensor, size: ModelSize
) -> Tensor:
    """One decoder layer: x [B, L, H] float32, bias [B, L, L] added to every head's logits."""
    batch, length, _ = x.shape
    heads, group, width = size.num_kv_heads, size.group_size, size.head_dim
    q, k, v = _query_key_value(x, layer, cos, sin, size)
    logits = torch.bmm(q, k.transpose(1, 2)).float() * width**-0.5
    logits = logits.view(batch, heads * group, length, length) + bias[:, None]
    weights = torch.softmax(logits, dim=-1).bfloat16()
    out = torch.bmm(weights.view(batch * heads, group * length, length), v)
    out = out.view(batch, heads, group, length, width).permute(0, 3, 1, 2, 4)
    out = out.reshape(batch, length, heads * group * width)
    x = x + functional.linear(out, layer["wo"].bfloat16()).float()
    h = _rms_norm(x, layer["mlp_norm"], size.norm_eps)
    gate, up = functional.linear(h, torch.cat([layer["gate"], layer["up"]]).bfloat16()).chunk(
        2, dim=-1
    )
    out = functional.silu(gate) * up
    return x + functional.linear(out, layer["down"].bfloat16()).float()


LayerFunction = Callable[[Tensor, Weights, Tensor, Tensor, Tensor, ModelSize], Tensor]


def layer_weights(weights: Weights, index: int) -> Weights:
    """Views on the weights of one layer."""
    names = (*MATRICES, "attention_norm", "mlp_norm")
    return {name: weights[name][index] for name in names}


def forward(
    weights: Weights,
    ids: Tensor,
    positions: Tensor,
    bias: Tensor,
    size: ModelSize,
    layer_function: LayerFunction = run_layer,
) -> Tensor:
    """Next-token logits [B, L, vocabulary] float32 of ids [B, L]."""
    cos, sin = rotary_table(positions, size)
    x = functional.embedding(ids, weights["embed"])
    for index in range(size.num_layers):
        x = layer_function(x, layer_weights(weights, index), cos, sin, bias, size)
    h = _rms_norm(x, weights["final_norm"], size.norm_eps)
    return functional.linear(h, weights["embed"].bfloat16()).float()


@torch.no_grad()
def logit_spread(weights: Weights, ids: Tensor, positions: Tensor, size: ModelSize) -> Tensor:
    """How far a head's logits stand out, [num_layers, Hq] float32.

    The 99th percentile, over queries, of the largest minus the mean logit of the keys before.
    """
    batch, length = ids.shape
    cos, sin = rotary_table(positions, size)
    causal = torch.ones(length, length, dtype=torch.bool, device=ids.device).tril()
    bias = torch.where(causal, 0.0, -1e9).expand(batch, length, length)
    x = functional.embedding(ids, weights["embed"])
    spreads = []
    for index in range(size.num_layers):
        layer = layer_weights(weights, index)
        q, k, _ = _query_key_value(x, layer, cos, sin, size)
        logits = torch.bmm(q, k.transpose(1, 2)).float() * size.head_dim**-0.5
        logits = logits.view(batch, size.num_q_heads, length, length)
        top = (logits + bias[:, None]).amax(-1)
        mean = (logits * causal).sum(-1) / causal.sum(-1)
        stand_out = (top - mean)[:, :, length // 8 :].transpose(0, 1).reshape(size.num_q_heads, -1)
        spreads.append(stand_out.quantile(0.99, dim=1))
        x = run_layer(x, layer, cos, sin, bias, size)
    return torch.stack(spreads)
