"""Attaching the runtime to an unmodified transformers model, and detaching it without a trace."""

from __future__ import annotations

import weakref
from dataclasses import replace
from functools import wraps
from inspect import signature
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hybrid_kv.config import HybridConfig
from hybrid_kv.errors import ConfigError
from hybrid_kv.models import hf_attention
from hybrid_kv.models.compiled import CompiledSteps
from hybrid_kv.models.hf_cache import HybridCache
from hybrid_kv.models.layer_major import LayerMajorPrefill
from hybrid_kv.models.rotary import find_rotary
from hybrid_kv.models.support import (
    check_backend,
    check_context,
    devices_of,
    inspect_model,
    text_config,
    text_parts,
)
from hybrid_kv.plugins import Method
from hybrid_kv.runtime import check_host_memory, make_executor
from hybrid_kv.transfer import Executor
from hybrid_kv.types import bytes_per_token

_attached: weakref.WeakSet[nn.Module] = weakref.WeakSet()


class Attachment:
    """A model whose attention reads from tiered caches; see `attach`."""

    def __init__(self, model: PreTrainedModel, config: HybridConfig) -> None:
        if model in _attached:
            raise ConfigError(
                "model is attached already; close that attachment (leave its `with` block) first"
            )
        self._devices = devices_of(model)
        check_backend(config.backend, self._devices)
        self.model, self.config = model, config
        self.info = inspect_model(model)
        self._text_config = text_config(model)
        self._find_rotary(config)
        self._open = True
        self._serving: nn.Module | None = None  # the outermost module that runs with our cache
        self._previous: str | None = None  # the model's own attention meanwhile
        self._executor: Executor | None = None  # of all caches that build in the background
        self._caches: weakref.WeakSet[HybridCache] = weakref.WeakSet()
        hf_attention.register()
        self._prefill = LayerMajorPrefill(model, config.prefill_chunk_tokens)
        self._steps = CompiledSteps(model, self._text_config) if config.compile_decode else None
        self._own_forward = model.__dict__.get("forward")
        self._hooks: list[Any] = []
        if self._steps is not None:
            self._route(model, self._steps)
        for part in text_parts(model, self._text_config):
            self._hooks += [
                part.register_forward_pre_hook(self._before_forward, with_kwargs=True),
                part.register_forward_hook(self._after_forward, with_kwargs=True, always_call=True),
            ]
        _attached.add(model)

    def _route(self, model: PreTrainedModel, steps: CompiledSteps) -> None:
        """Sends decode steps with a cache of ours to the compiled forward, the rest to the old."""
        eager = model.forward
        names = list(signature(eager).parameters)

        @wraps(eager)
        def forward(*args: Any, **kwargs: Any) -> Any:
            inputs = {**dict(zip(names, args, strict=False)), **kwargs}
            cache = self._prefill.cache
            if cache is None or not steps.serves(inputs):
                return eager(*args, **kwargs)
            return steps.forward(cache, inputs)

        model.forward = forward

    def cache(self, config: HybridConfig | None = None) -> HybridCache:
        """A new, empty cache: one per conversation, passed as `past_key_values`.

        Args:
            config: in place of the attachment's, to compare methods on one model.
        """
        if not self._open:
            raise ConfigError("attachment is closed; attach the model again for a new cache")
        config = config or self.config
        self._find_rotary(config)
        cache = HybridCache(
            self.info, config, self._text_config, lambda: self._open, self._executor_for(config)
        )
        self._caches.add(cache)
        return cache

    def _find_rotary(self, config: HybridConfig) -> None:
        """Asks the model how it turns queries, once, where something is learned from them."""
        if config.build().needs.horizon_tokens and not self.info.rotary:
            self.info = replace(self.info, rotary=find_rotary(self.model, self.info))

    def _executor_for(self, config: HybridConfig) -> Executor:
        on_gpu = any(device.type == "cuda" for device in self._devices)
        device_type = "cuda" if on_gpu else "cpu"
        if config.index_build == "wait":
            return make_executor(config, device_type)
        self._executor = self._executor or make_executor(config, device_type)
        return self._executor

    @property
    def device(self) -> torch.device:
        """Where the model takes its tokens: the device of its first weights that lie anywhere."""
        return self._devices[0] if self._devices else self.model.device

    def bytes_per_token(self, method: Method, num_tokens: int) -> int:
        """Bytes of K and V and of indexes for each of `num_tokens`, over all tiered layers."""
        dtype = self.model.dtype
        return sum(
            bytes_per_token(shape, dtype) + method.index_bytes_per_token(shape, num_tokens)
            for shape in self.info.layers
        )

    def _before_forward(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Turns our attention on for a forward with a cache of ours; others stay what they are."""
        if self._serving is module:  # an interrupt, which runs no hooks, ended the last forward
            self._end_forward(failed=True)
        cache = kwargs.get("past_key_values")
        if self._serving is not None or not isinstance(cache, HybridCache):
            return
        if args:
            names = signature(module.forward).parameters
            kwargs = {**dict(zip(names, args, strict=False)), **kwargs}
        embeds, tokens = kwargs.get("inputs_embeds"), kwargs.get("input_ids")
        self._check(cache, embeds if tokens is None else tokens, kwargs)
        self._serving, self._previous = module, self._text_config._attn_implementation
        self._text_config._attn_implementation = hf_attention.NAME
        cache.begin_forward()
        self._prefill.cache = cache
        # Somebody else may hold on to these tensors; then chunks must not be written over them.
        self._prefill.in_place = embeds is None and not self._records_hidden(kwargs)

    def _check(self, cache: HybridCache, source: Tensor | None, kwargs: dict[str, Any]) -> None:
        if cache.kv.info.layers is not self.info.layers:
            raise ConfigError(
                "this cache was made for another model; take it from this attachment's cache()"
            )
        if kwargs.get("output_attentions"):
            raise ConfigError(
                "output_attentions must be off: a tiered KV cache computes no attention weights"
            )
        if source is None:
            return
        rows, new = source.shape[:2]
        mask = kwargs.get("attention_mask")
        if mask is None or (isinstance(mask, Tensor) and mask.ndim == 2):
            cache.accept_mask(mask, new)
        check_context(self._text_config, cache.get_seq_length() + new)
        if new > 1:
            check_host_memory(rows * new * self.bytes_per_token(cache.kv.method, new), new)

    def _records_hidden(self, kwargs: dict[str, Any]) -> bool:
        names = ("output_hidden_states", "output_attentions", "output_router_logits")
        return any(kwargs.get(n, getattr(self._text_config, n, False)) for n in names)

    def _after_forward(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if self._serving is module:
            self._end_forward(failed=output is None)

    def _end_forward(self, *, failed: bool) -> None:
        self._text_config._attn_implementation = self._previous
        cache, self._prefill.cache, self._serving = self._prefill.cache, None, None
        if cache is not None:
            cache.end_forward(failed=failed)

    def close(self) -> None:
        """Detaches: the model's attention, forwards and hooks are what they were before.

        Index builds in the background are given up; what cannot stop at once is waited for.
        """
        if not self._open:
            return
        self._open = False
        for cache in list(self._caches):
            cache.close()
        if self._executor is not None:
            self._executor.close()
        if self._serving is not None:
            self._end_forward(failed=True)
        for hook in self._hooks:
            hook.remove()
        self._prefill.close()
        if self._steps is not None:
            self._steps.close()
            self.model.__dict__.pop("forward")
            if self._own_forward is not None:
                self.model.forward = self._own_forward
        _attached.discard(self.model)

    def __enter__(self) -> Attachment:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def attach(model: PreTrainedModel, config: HybridConfig | None = None) -> Attachment:
    """Lets a loaded transformers model generate from a tiered KV cache.

    Use it as a context manager; inside, pass `past_key_values=runtime.cache()` to `generate`. Calls
    without such a cache work as before.

    Raises:
        UnsupportedModelError: the model's attention cannot be served (MLA, DSA, encoder-decoder).
        BackendUnavailable: the back end asked for cannot serve here, or not this model.
        ConfigError: the model is attached already.

    Warns:
        BackendWarning: the model is on a GPU for which "auto" finds no kernels.
    """
    return Attachment(model, config or HybridConfig())
