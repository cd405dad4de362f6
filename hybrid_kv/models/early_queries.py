"""The query of a decoder layer, computed where the layer before it begins.

A layer's query is, in all decoders that are served, a norm, a projection, sometimes a norm of each
head, and a rotation by position. Their modules go by a dozen names and their output lies in several
orders. So what a layer has is tried on one token that was run through the model, and only what
gives the model's own query there, up to a factor, is used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from hybrid_kv.models.cache_state import outside_graphs
from hybrid_kv.models.hf_cache import TieredCache
from hybrid_kv.models.support import AWAY, TOLERANCE, OneToken, entering, run_one_token, told
from hybrid_kv.rotary import Rotary
from hybrid_kv.types import LayerShape, ModelInfo

_Part: TypeAlias = Callable[[Tensor], Tensor]

_FIRST = "no layer comes before it"
_ELSEWHERE = "its weights are not where the layer before it computes"
_UNKNOWN = "its query does not follow from the hidden state that enters it, by a norm and a product"


class EarlyQuery:
    """Norm, projection, order of heads and norm of a head: a layer's query before its rotation."""

    def __init__(self, *parts: _Part | None) -> None:
        self._parts = [part for part in parts if part is not None]

    def __call__(self, hidden: Tensor) -> Tensor:
        """Queries [B, T, Hq, D] of hidden states [B, T, width], not turned by position."""
        for part in self._parts:
            hidden = part(hidden)
        return hidden


class EarlyQueries:
    """Tells the cache of a forward, at the beginning of each layer, the query of the next one.

    cache: of the forward that runs; None for none.
    unforeseen: by tiered layer why its query cannot be computed early; empty where it can.

    Args:
        info: with the rotations of the layers.
    """

    def __init__(self, model: PreTrainedModel, info: ModelInfo) -> None:
        self.cache: TieredCache | None = None
        self.unforeseen: Mapping[int, str] = {}
        self._hooks: list[RemovableHandle] = []
        layers = [shape.layer_idx for shape in info.layers]
        try:
            seen = run_one_token(model)
        except Exception as error:  # whatever a model raises here, it can be served without this
            self.unforeseen = dict.fromkeys(layers, told(error))
            return
        self.unforeseen = {
            shape.layer_idx: self._listen(shape, info, seen) for shape in info.layers
        }

    def _listen(self, shape: LayerShape, info: ModelInfo, seen: OneToken) -> str:
        """Puts a hook on the layer before, or says why there is none."""
        layer_idx = shape.layer_idx
        if layer_idx not in seen.queries:
            return "its query was not seen"
        before, layer = _neighbours(seen, layer_idx)
        if layer is None:
            return "it stands in no list of layers"
        if before is None:
            return _FIRST
        if _place(before) != _place(layer) or _place(layer).type == "meta":
            return _ELSEWHERE
        rotary = info.rotary_of(layer_idx)
        query = _find(layer, seen, shape, rotary)
        if query is None:
            return rotary.reason or _UNKNOWN
        hook = partial(self._tell, layer_idx, query)
        self._hooks.append(before.register_forward_pre_hook(hook, with_kwargs=True))
        return ""

    def _tell(
        self,
        layer_idx: int,
        query: EarlyQuery,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        if self.cache is None:
            return
        hidden = entering(args, kwargs)
        if hidden is not None and hidden.shape[1] == 1:
            self._search_ahead(self.cache, layer_idx, query, hidden)

    @staticmethod
    @outside_graphs
    def _search_ahead(
        cache: TieredCache, layer_idx: int, query: EarlyQuery, hidden: Tensor
    ) -> None:
        cache.kv.search_ahead(layer_idx, lambda: query(hidden).transpose(1, 2))

    def close(self) -> None:
        """Takes the hooks off."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()


def is_idle_on_devices(hook: object) -> bool:
    """Whether a hook is one of these, which begins no search where a device finds entries."""
    return isinstance(hook, partial) and isinstance(
        getattr(hook.func, "__self__", None), EarlyQueries
    )


def _neighbours(seen: OneToken, layer_idx: int) -> tuple[nn.Module | None, nn.Module | None]:
    """The decoder layer before a layer, and the layer."""
    attention = seen.attention[layer_idx]
    for stack in seen.stacks:
        for number, layer in enumerate(stack):
            if layer in seen.entered and attention is not layer and attention in layer.modules():
                return (stack[number - 1] if number else None), layer
    return None, None


def _place(layer: nn.Module) -> torch.device:
    return next((weight.device for weight in layer.parameters()), torch.device("meta"))


def _find(layer: nn.Module, seen: OneToken, shape: LayerShape, rotary: Rotary) -> EarlyQuery | None:
    """Projection of a layer's queries from the hidden states that entered it, or None."""
    asked, hidden = seen.queries[shape.layer_idx], seen.entered[layer]
    for query in _candidates(layer, seen.attention[shape.layer_idx], shape):
        with suppress(Exception), torch.inference_mode():  # shapes that do not fit, mostly
            made = query(hidden)[:, 0]
            if made.shape == asked.shape and _are_alike(made, asked, rotary):
                return query
    return None


def _are_alike(made: Tensor, asked: Tensor, rotary: Rotary) -> bool:
    """Whether queries [2, Hq, D] of positions 0 and AWAY are the model's when they are turned, up
    to a factor, which changes no order of keys.
    """
    made, true = made.float(), asked.float()
    positions = torch.tensor([0, AWAY], device=made.device)
    turned = rotary.turn(made.transpose(0, 1), positions).transpose(0, 1)
    factor = (turned * true).sum() / turned.square().sum()
    bound = TOLERANCE.get(asked.dtype, 4e-2) * true.abs().max()
    return bool(factor > 0) and bool((factor * turned - true).abs().max() <= bound)


def _candidates(layer: nn.Module, attention: nn.Module, shape: LayerShape) -> Iterator[EarlyQuery]:
    """All that a layer's query may be, what is usual first."""
    norms = [child for _, child in layer.named_children() if _is_norm(child)]
    own = list(attention.named_children())
    of_heads = [child for name, child in own if name.startswith("q") and _is_norm(child)]
    products = [child for _, child in own if not _is_norm(child)]
    # The query's projection by its name before those of key, value and output.
    products.sort(key=lambda child: child is not getattr(attention, "q_proj", None))
    for norm in (*norms, None):
        for product in products:
            for order in _orders(shape):
                for of_head in (*of_heads, None):
                    yield EarlyQuery(norm, product, order, of_head)
                    if of_head is not None:
                        yield EarlyQuery(norm, product, order, partial(_heads_first, of_head))
                        yield EarlyQuery(norm, product, of_head, order)


def _is_norm(module: nn.Module) -> bool:
    return "norm" in type(module).__name__.lower()


def _orders(shape: LayerShape) -> list[_Part]:
    """Ways in which the query's heads may lie in a projection [..., width]."""
    heads, kv_heads, dim = shape.num_q_heads, shape.num_kv_heads, shape.head_dim

    def split(x: Tensor, *sizes: int) -> Tensor:
        return x.reshape(*x.shape[:-1], *sizes)

    def queries_first(x: Tensor) -> Tensor:
        return split(x[..., : heads * dim], heads, dim)

    def by_head(x: Tensor) -> Tensor:  # with its key and value, or its gate
        return split(x, heads, -1)[..., :dim]

    def by_group(x: Tensor) -> Tensor:  # with their key and value
        grouped = split(x, kv_heads, shape.group_size + 2, dim)
        return grouped[..., : shape.group_size, :].flatten(-3, -2)

    return [queries_first, by_head, by_group]


def _heads_first(norm: _Part, x: Tensor) -> Tensor:
    return norm(x.transpose(-3, -2)).transpose(-3, -2)
