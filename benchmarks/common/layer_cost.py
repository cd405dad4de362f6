"""Python calls of one decoder layer of a decode step, by the part of the step that makes them.

A count, so that it is the same on every machine and at every load. The model is transformers' own
with random 16-bit weights, attached; every product whose weights are large enough is the engine's.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import transformers
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import hybrid_kv as hkv
from hybrid_kv.models import few_tokens
from hybrid_kv.models.cache_state import passing
from hybrid_kv.runtime.layer import LayerCache

PRODUCTS, CACHE, WRAPPERS, CUTS, OTHERS = PARTS = (
    *("products", "cache part", "prompt's wrappers"),
    *("torch.compile's cuts", "transformers, torch"),
)
MODELS = {
    "small": {
        **{"hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9},
        **{"num_key_value_heads": 3, "head_dim": 64},
    },
    "8 heads": {
        **{"hidden_size": 1024, "intermediate_size": 1024, "num_attention_heads": 32},
        **{"num_key_value_heads": 8, "head_dim": 128},
    },
}
"""Shapes: SmolLM2-135M's, whose products for K and V are too small for the engine, and one of 8 KV
heads of 128 channels, where all seven are large enough."""

_PACKAGE = str(Path(hkv.__file__).parent) + "/"
_TRANSFORMERS = str(Path(transformers.__file__).parent) + "/"
_DYNAMO = str(Path(torch.__file__).parent / "_dynamo") + "/"
_PRODUCTS = ("models/few_tokens.py", "ops/native/linear.py")
_WRAPPERS = ("models/layer_major.py", "models/prompt_layers.py", "models/early_queries.py")
_ENDING = (LayerCache.move_on.__code__, LayerCache.settle.__code__)
_FIRST = 1  # steps that make trials and look things up
_CONTEXT, _STEPS, _LAYER, _PAGE = 1500, 20, 1, 16


class PartCost(NamedTuple):
    """Calls of one part: of the package's functions, and of anybody's below them.

    functions: calls by the package's functions, "file:name".
    """

    all_calls: int
    functions: Counter[str]

    @property
    def calls(self) -> int:
        """Of functions that are written down in the package."""
        return self.functions.total()

    @property
    def files(self) -> frozenset[str]:
        """Files of the package."""
        return frozenset(function.partition(":")[0] for function in self.functions)


class LayerCounter:
    """Counts the Python functions that one module's call enters, by part.

    Args:
        stored: the layer of the cache behind it, whose pages leave when a forward ends; None
            leaves that out.
    """

    def __init__(self, layer: nn.Module, stored: LayerCache | None = None) -> None:
        self._layer, self._stored, self._parts = layer, stored, list[str]()
        self._all, self._own = Counter[str](), {part: Counter[str]() for part in PARTS}

    @contextmanager
    def counting(self) -> Iterator[None]:
        """A block in which calls are counted."""
        sys.setprofile(self._note)
        try:
            yield
        finally:
            sys.setprofile(None)

    @property
    def parts(self) -> dict[str, PartCost]:
        """What was counted."""
        return {part: PartCost(self._all[part], self._own[part]) for part in PARTS}

    def _note(self, frame: FrameType, event: str, _: Any) -> None:
        if event == "return" and self._parts:
            self._parts.pop()
        if event != "call" or not (self._parts or self._enters(frame)):
            return
        file = frame.f_code.co_filename
        outer = self._parts[-1] if self._parts else OTHERS
        part = _part_of(file, outer)
        self._parts.append(part)
        self._all[part] += 1
        if file.startswith(_PACKAGE):
            self._own[part][f"{file[len(_PACKAGE) :]}:{frame.f_code.co_qualname}"] += 1

    def _enters(self, frame: FrameType) -> bool:
        if frame.f_code in _ENDING:
            return frame.f_locals["self"] is self._stored
        code = nn.Module._wrapped_call_impl.__code__
        return frame.f_code is code and frame.f_locals["self"] is self._layer


def _part_of(file: str, outer: str) -> str:
    """The part that a function belongs to: by its file, else that of the function that calls it."""
    if file.startswith(_TRANSFORMERS):
        return OTHERS
    if file.startswith(_DYNAMO):
        return CUTS
    if not file.startswith(_PACKAGE):
        return outer
    if outer in (PRODUCTS, WRAPPERS):
        return outer
    name = file[len(_PACKAGE) :]
    if name in _PRODUCTS:
        return PRODUCTS
    return WRAPPERS if name in _WRAPPERS else CACHE


@contextmanager
def engine_serves() -> Iterator[None]:
    """A block in which every trial finds the engine faster; those made before are not known."""
    found = few_tokens.ProductTrial(1.0, 2.0)
    with (
        patch.object(few_tokens, "measure", lambda sets, *_: [found] * len(sets)),
        patch.dict(few_tokens._trials),
    ):
        few_tokens._trials.clear()
        yield


class LayerCosts(NamedTuple):
    """Parts of one layer, by name.

    quiet: of the cheapest of some decode steps, as nearly all are. page: what is beyond that in as
    many steps as a page has tokens, wherever in the forward: one page begins, and one leaves.
    """

    quiet: dict[str, PartCost]
    page: dict[str, PartCost]


def layer_costs(shape: str, config: hkv.HybridConfig) -> LayerCosts:
    """Cost of a layer of a model.

    Args:
        shape: one of `MODELS`.
    """
    layers = {"num_hidden_layers": 3, "vocab_size": 16, "max_position_embeddings": 4096}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model: Any = LlamaForCausalLM(LlamaConfig(**MODELS[shape], **layers))
    model = model.to(torch.bfloat16).eval()
    ids = torch.arange(_CONTEXT + _STEPS)[None] % 16
    costs = []
    config = config.replace(index_build="wait")
    with engine_serves(), torch.inference_mode(), hkv.attach(model, config) as runtime:
        cache = runtime.cache()
        model(ids[:, :_CONTEXT], **passing(cache))
        for token in ids[:, _CONTEXT:].split(1, dim=1):
            stored = cache.kv.layers[_LAYER]
            counter = LayerCounter(model.model.layers[_LAYER], stored)
            with counter.counting():
                model(token, **passing(cache))
            costs.append(counter.parts)
    costs = costs[_FIRST : _FIRST + _PAGE]
    quiet = min(costs, key=lambda parts: sum(part.calls for part in parts.values()))
    page = {part: _beyond([one[part] for one in costs], quiet[part]) for part in PARTS}
    return LayerCosts(quiet, page)


def _beyond(costs: Sequence[PartCost], quiet: PartCost) -> PartCost:
    """Cost of a part in some steps beyond as many quiet ones."""
    functions = sum((one.functions - quiet.functions for one in costs), Counter[str]())
    return PartCost(sum(one.all_calls - quiet.all_calls for one in costs), functions)
