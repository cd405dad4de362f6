"""How a model turns its queries by position, found out by asking it.

Layers without positions, norms behind the rotation, frequencies of their own for some layers: the
queries of one token at two positions differ by the rotation and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hybrid_kv.models.one_token import AWAY, TOLERANCE, run_one_token, told
from hybrid_kv.rotary import Rotary
from hybrid_kv.types import ModelInfo

_LENGTH_DEPENDENT = ("dynamic", "longrope")


def find_rotary(model: PreTrainedModel, info: ModelInfo) -> tuple[Rotary, ...]:
    """How each tiered layer turns its queries; one that is not understood says why it is not."""
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
