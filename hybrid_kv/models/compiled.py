"""Decode steps compiled into one graph that is cut only where a layer attends to its cache.

The cut is a custom operator: the compiler sees a function of q, k and v, and the cache is looked up
when it runs. So a graph depends neither on the conversation nor on its length, and is made once. On
CUDA the operator is marked as unfit for CUDA graphs, and the compiler records what lies between.
"""

from __future__ import annotations

from itertools import count
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch._dynamo.exc import Unsupported
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel

from hybrid_kv.errors import BackendUnavailable, IntegrityError, UnsupportedModelError
from hybrid_kv.models.cache_layers import HybridLayer, tiered_layers
from hybrid_kv.models.hf_cache import TieredCache
from hybrid_kv.models.packed_linear import WAY_OUT, packed_modules
from hybrid_kv.runtime.step import apply_sink
from hybrid_kv.types import PartialAttention

NAME = "hybrid_kv_graph"
"""Has no mask function on purpose: transformers then passes no mask, whose length would change with
every step. Which tokens are padding is known from the prompt."""

_OWNER = "hybrid_kv_steps"
_numbers = count()
_all_steps: WeakValueDictionary[int, CompiledSteps] = WeakValueDictionary()


class CompiledSteps:
    """The forward pass of an attached model for one new token per row, compiled once.

    Args:
        text: the configuration of the decoder that generates text.
        backend: of `torch.compile`.

    Raises:
        UnsupportedModelError: some layers keep a cache of transformers' own or share one; their
            shapes change from step to step.
        BackendUnavailable: this torch cannot compile it for a GPU.
    """

    def __init__(
        self, model: PreTrainedModel, text: PreTrainedConfig, backend: str = "inductor"
    ) -> None:
        _check(model, text)
        _check_torch(model.device.type, torch.__version__)
        AttentionInterface.register(NAME, graph_attention)
        self._model, self._text, self._cache = model, text, None
        self._number = next(_numbers)
        _all_steps[self._number] = self
        self._modules = [m for m in model.modules() if isinstance(getattr(m, "layer_idx", 0), int)]
        for module in self._modules:
            setattr(module, _OWNER, self._number)
        mode = "reduce-overhead" if model.device.type == "cuda" else None
        self._compiled = torch.compile(model.forward, fullgraph=True, mode=mode, backend=backend)

    _cache: TieredCache | None

    def serves(self, module: nn.Module, inputs: dict[str, Any]) -> bool:
        """Whether this is the model itself, with one new token per row and nothing unusual."""
        ids = inputs.get("input_ids")
        plain = all(inputs.get(name) is None for name in ("inputs_embeds", "labels"))
        single = isinstance(ids, Tensor) and ids.shape[1] == 1
        return module is self._model and single and plain

    def forward(self, cache: TieredCache, inputs: dict[str, Any]) -> Any:
        """Output of the model's own forward for these keyword arguments.

        Raises:
            UnsupportedModelError: the model cannot be compiled into one graph.
        """
        ids: Tensor = inputs["input_ids"]
        if inputs.get("position_ids") is None:  # the model would ask the cache for a number
            seen = cache.get_seq_length()
            inputs = {**inputs, "position_ids": torch.full(ids.shape, seen, device=ids.device)}
        before, self._text._attn_implementation = self._text._attn_implementation, NAME
        self._cache, cache.state.in_own_graph = cache, True
        try:
            return self._compiled(**{**inputs, "attention_mask": None})
        except Unsupported as error:
            reason = str(error).split("\n")[0]
            raise UnsupportedModelError(
                f"this model cannot be compiled into one graph: {reason}; set compile_decode=False"
            ) from error
        finally:
            self._cache, cache.state.in_own_graph = None, False
            self._text._attn_implementation = before

    def attend(
        self, layer_idx: int, q: Tensor, k: Tensor, v: Tensor, scale: float, softcap: float | None
    ) -> PartialAttention:
        """Stores k, v [B, Hkv, 1, D] in the cache that is being served, and attends."""
        layer = None if self._cache is None else self._cache.layers[layer_idx]
        if not isinstance(layer, HybridLayer):
            raise IntegrityError("a compiled layer ran outside of a decode step of its model")
        layer.update(k, v)
        return layer.attend(q, None, scale=scale, softcap=softcap)

    def close(self) -> None:
        """Takes the marks off the model's modules."""
        for module in self._modules:
            delattr(module, _OWNER)
        self._modules = []


def _check(model: PreTrainedModel, text: PreTrainedConfig) -> None:
    name, layers = type(model).__name__, text.num_hidden_layers
    if others := sorted(set(range(layers)) - set(tiered_layers(text))):
        raise UnsupportedModelError(
            f"compile_decode serves models whose layers all attend to the whole context, layer "
            f"{others[0]} of {name} does not; set compile_decode=False"
        )
    if any(packed_modules(model)):
        raise UnsupportedModelError(
            f"compile_decode serves plain weights, those of this {name} are packed; set "
            f"compile_decode=False, or {WAY_OUT}"
        )
    if getattr(text, "num_kv_shared_layers", 0):
        raise UnsupportedModelError(
            f"compile_decode serves models whose layers each have a cache, {name} shares some; set "
            "compile_decode=False"
        )


def _check_torch(device_type: str, version: str) -> None:
    """Refuses the torch release that cuts graphs around unsafe operators and loses their inputs."""
    if device_type == "cuda" and version.partition("+")[0] == "2.9.0":
        raise BackendUnavailable(
            f"compile_decode needs torch 2.9.1 or later on a GPU, got {version}, whose compiler "
            "cuts graphs wrongly; upgrade torch or set compile_decode=False"
        )


def graph_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """As `hybrid_attention`, while a graph is made; key and value hold the new tokens only."""
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    number: int = getattr(module, _OWNER)
    out, lse = torch.ops.hybrid_kv.attend(
        query, key, value, number, module.layer_idx, scale, softcap
    )
    part = PartialAttention(out, lse)
    out = out if s_aux is None else apply_sink(part, s_aux).to(query.dtype)
    return out.transpose(1, 2).contiguous(), None


@torch.library.custom_op("hybrid_kv::attend", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def _attend(
    q: Tensor, k: Tensor, v: Tensor, steps: int, layer_idx: int, scale: float, softcap: float | None
) -> tuple[Tensor, Tensor]:
    part = _all_steps[steps].attend(layer_idx, q, k, v, scale, softcap)
    return part.out.to(q.dtype).contiguous(), part.lse.contiguous()


@_attend.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, steps: int, layer_idx: int, scale: float, softcap: float | None
) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), q.new_empty(q.shape[:3], dtype=torch.float32)
