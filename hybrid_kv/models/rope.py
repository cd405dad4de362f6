"""A model's rotation of queries by position, found out by asking it: one token, two positions.

Configurations say how a model works in a dozen ways, and code may do otherwise: layers without
positions, norms behind the rotation, frequencies of their own for some layers. A single token
attends to itself alone, whatever its position, so that all layers see the same hidden states, and
its queries at two positions differ by the rotation and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from hybrid_kv.rotary import Rotary
from hybrid_kv.types import ModelInfo

_LENGTH_DEPENDENT = ("dynamic", "longrope")
_NAME = "hybrid_kv_one_token"
AWAY = 37
"""Positions between the two tokens: fast channels turn often, slow ones enough to be seen."""
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 4e-2}
"""Largest difference of two queries over their largest entry."""
_TOLD_CHARACTERS = 160
"""Of an error's first line; every head's report has the reason."""


def find_rotary(model: PreTrainedModel, info: ModelInfo) -> tuple[Rotary, ...]:
    """Rotation of queries by each tiered layer, or the reason why it is not understood."""
    try:
        asked = run_one_token(model).queries
    except Exception as error:  # whatever a model raises here, it can be served without an answer
        return tuple(Rotary(reason=told(error)) for _ in info.layers)
    known = list(_frequencies(model))
    return tuple(_explain(asked.get(shape.layer_idx), known) for shape in info.layers)


def _explain(queries: Tensor | None, known: list[tuple[tuple[float, ...], str]]) -> Rotary:
    """The rotation between queries [2, Hq, D] of one token at positions 0 and AWAY."""
    if queries is None or queries.device.type == "meta":
        return Rotary(reason="the layer's queries were not seen")
    here, there = queries.float()
    bound = TOLERANCE.get(queries.dtype, 4e-2) * float(here.abs().max())
    if float((here - there).abs().max()) <= bound:
        return Rotary(reason="the layer does not turn its queries", still=True)
    away = torch.full((1,), AWAY, device=here.device)
    for frequencies, kind in known:
        if 2 * len(frequencies) > here.shape[-1]:
            continue
        for interleaved in (False, True):
            rotary = Rotary(frequencies, interleaved)
            if float((rotary.turn(here[:, None], away)[:, 0] - there).abs().max()) <= bound:
                if kind in _LENGTH_DEPENDENT:
                    return Rotary(reason=f"RoPE of type {kind} depends on the length")
                return rotary
    return Rotary(reason="the layer turns its queries in a way that is not known")


def _frequencies(model: PreTrainedModel) -> Iterator[tuple[tuple[float, ...], str]]:
    """All that the model's rotary modules hold, with the type of their RoPE; the longest first."""
    found: dict[tuple[float, ...], str] = {}
    for module in model.modules():
        kinds = getattr(module, "rope_type", "default")
        for name, buffer in module.named_buffers(recurse=False):
            if not name.endswith("inv_freq") or "original" in name or buffer.device.type == "meta":
                continue
            layer_type = name.removesuffix("inv_freq").rstrip("_")
            kind = kinds.get(layer_type, "default") if isinstance(kinds, dict) else str(kinds)
            found[tuple(buffer.flatten().tolist())] = kind
    yield from sorted(found.items(), key=lambda item: -len(item[0]))


# One token run through a model, with what its layers made of it -----------------------------------


@dataclass(slots=True)
class OneToken:
    """Record of a forward of one token.

    queries: [2, Hq, D] by layer_idx, at positions 0 and AWAY; attention: the module that asked.
    stacks: all lists of modules that were run; entered: by module of a stack what it was given.
    """

    queries: dict[int, Tensor] = field(default_factory=dict)
    attention: dict[int, nn.Module] = field(default_factory=dict)
    stacks: list[nn.ModuleList] = field(default_factory=list)
    entered: dict[nn.Module, Tensor] = field(default_factory=dict)


def run_one_token(model: PreTrainedModel) -> OneToken:
    """Runs the token. Raises whatever the model raises."""
    AttentionInterface.register(_NAME, _attend_oneself)
    device = next(model.parameters()).device
    token = torch.ones(2, 1, dtype=torch.long, device=device)
    positions = torch.tensor([[0], [AWAY]], device=device)
    config = model.config.get_text_config(decoder=True)
    before, was_training = config._attn_implementation, model.training
    found = OneToken(stacks=[m for m in model.modules() if isinstance(m, nn.ModuleList)])
    hooks = [
        layer.register_forward_pre_hook(_note_entered, with_kwargs=True)
        for stack in found.stacks
        for layer in stack
    ]
    config._attn_implementation = _NAME
    model.eval()
    noted = _seen.set(found)
    try:
        with torch.inference_mode():
            model(input_ids=token, position_ids=positions, use_cache=False)
        return found
    finally:
        _seen.reset(noted)
        for hook in hooks:
            hook.remove()
        config._attn_implementation = before
        model.train(was_training)


def told(error: Exception) -> str:
    """Words for a model that could not be asked."""
    line = next(iter(str(error).splitlines()), "")[:_TOLD_CHARACTERS]
    return f"the model cannot be asked ({type(error).__name__}{line and f': {line}'})"


def _note_entered(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    hidden = entering(args, kwargs)
    if hidden is not None:
        _seen.get().entered.setdefault(module, hidden.clone())


def entering(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """The hidden states [B, T, width] among the arguments of a decoder layer."""
    hidden = args[0] if args else kwargs.get("hidden_states")
    return hidden if isinstance(hidden, Tensor) and hidden.ndim == 3 else None


def _attend_oneself(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
) -> tuple[Tensor, None]:
    """Attention of one token [2, H, 1, D] to itself, whose queries are noted by layer."""
    seen, layer_idx = _seen.get(), int(getattr(module, "layer_idx", -1))
    if layer_idx not in seen.queries:
        seen.queries[layer_idx], seen.attention[layer_idx] = query[:, :, 0].clone(), module
    # Softmax over one key: its value, for each query head of its group.
    out = value.repeat_interleave(query.shape[1] // value.shape[1], 1)
    return out.transpose(1, 2).contiguous(), None


_seen: ContextVar[OneToken] = ContextVar("what one token shows")
