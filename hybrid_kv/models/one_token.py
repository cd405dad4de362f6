"""One token run through a model, with what its layers made of it.

Configurations say how a model works in a dozen ways, and code may do otherwise. So the model is
asked: one token at two positions. A single token attends to itself alone, whatever its position, so
that all layers see the same hidden states.
"""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

_NAME = "hybrid_kv_one_token"
AWAY = 37
"""Positions between the two tokens: fast channels turn often, slow ones enough to be seen."""
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 4e-2}
"""Largest difference of two queries over their largest entry."""
_TOLD_CHARACTERS = 160
"""Of an error's first line; every head's report has the reason."""


@dataclass(slots=True)
class OneToken:
    """What was seen.

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
    """Why a model could not be asked."""
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
