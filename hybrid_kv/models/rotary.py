"""How a model turns its queries by position, found out by asking it.

Configurations say it in a dozen ways, and code may do otherwise (layers without positions, norms
behind the rotation, frequencies of their own for some layers). So one token is run at two
positions: a single token attends to itself alone, whatever its position, so that all layers see the
same hidden states, and their queries differ by the rotation and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from hybrid_kv.rotary import Rotary
from hybrid_kv.types import ModelInfo

_NAME = "hybrid_kv_probe"
_AWAY = 37
"""Positions between the two tokens: fast channels turn often, slow ones enough to be seen."""
_TOLD_CHARACTERS = 160
"""Of an error's first line; every head's report has the reason."""
_LENGTH_DEPENDENT = ("dynamic", "longrope")
_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 4e-2}
"""Largest difference of two queries over their largest entry."""


def find_rotary(model: PreTrainedModel, info: ModelInfo) -> tuple[Rotary, ...]:
    """How each tiered layer turns its queries; one that is not understood says why it is not."""
    try:
        asked = _ask(model)
    except Exception as error:  # whatever a model raises here, it can be served without an answer
        told = next(iter(str(error).splitlines()), "")[:_TOLD_CHARACTERS]
        reason = f"the model cannot be asked ({type(error).__name__}{told and f': {told}'})"
        return tuple(Rotary(reason=reason) for _ in info.layers)
    known = list(_frequencies(model))
    return tuple(_explain(asked.get(shape.layer_idx), known) for shape in info.layers)


def _explain(queries: Tensor | None, known: list[tuple[tuple[float, ...], str]]) -> Rotary:
    """The rotation between queries [2, Hq, D] of one token at positions 0 and _AWAY."""
    if queries is None or queries.device.type == "meta":
        return Rotary(reason="the layer's queries were not seen")
    here, there = queries.float()
    bound = _TOLERANCE.get(queries.dtype, 4e-2) * float(here.abs().max())
    if float((here - there).abs().max()) <= bound:
        return Rotary(reason="the layer does not turn its queries")
    away = torch.full((1,), _AWAY, device=here.device)
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


def _ask(model: PreTrainedModel) -> dict[int, Tensor]:
    """Queries [2, Hq, D] by layer, of one token at positions 0 and _AWAY."""
    AttentionInterface.register(_NAME, _attend_oneself)
    device = next(model.parameters()).device
    token = torch.ones(2, 1, dtype=torch.long, device=device)
    positions = torch.tensor([[0], [_AWAY]], device=device)
    config = model.config.get_text_config(decoder=True)
    before, was_training = config._attn_implementation, model.training
    config._attn_implementation = _NAME
    model.eval()
    noted = _seen.set({})
    try:
        with torch.inference_mode():
            model(input_ids=token, position_ids=positions, use_cache=False)
        return _seen.get()
    finally:
        _seen.reset(noted)
        config._attn_implementation = before
        model.train(was_training)


def _attend_oneself(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
) -> tuple[Tensor, None]:
    """Attention of one token [2, H, 1, D] to itself, whose queries are noted by layer."""
    _seen.get().setdefault(int(getattr(module, "layer_idx", -1)), query[:, :, 0].clone())
    # Softmax over one key: its value, for each query head of its group.
    out = value.repeat_interleave(query.shape[1] // value.shape[1], 1)
    return out.transpose(1, 2).contiguous(), None


_seen: ContextVar[dict[int, Tensor]] = ContextVar("queries by layer")
