"""Forwards of an attached model: with a cache of ours they attend through it, else as before."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import wraps
from inspect import signature
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hybrid_kv.config import HybridConfig
from hybrid_kv.errors import BusyError, ConfigError
from hybrid_kv.models import hf_attention
from hybrid_kv.models.cache_layers import max_context
from hybrid_kv.models.cache_state import CACHE_ARGUMENT, outside_graphs, passed, renamed
from hybrid_kv.models.hf_cache import ServedCache, TieredCache
from hybrid_kv.models.layer_major import LayerMajorPrefill
from hybrid_kv.models.support import text_config, text_parts
from hybrid_kv.plugins import Method
from hybrid_kv.runtime import check_host_memory
from hybrid_kv.types import ModelInfo, bytes_per_token

if TYPE_CHECKING:
    from hybrid_kv.models.decoder_step import DecoderSteps
    from hybrid_kv.models.early_queries import EarlyQueries
    from hybrid_kv.models.few_tokens import FewTokens
    from hybrid_kv.models.joined import JoinedCache
    from hybrid_kv.models.step_graphs import StepGraphs
    from hybrid_kv.runtime.device_plan import DevicePlan


_PROMPT, _ROOM = 64, 256
"""Tokens of a forward that make it a prompt, and those behind it that have room at once."""


class Serving:
    """Wraps the forwards of a model, one of which runs at a time, until it is closed.

    The model refers to it and it refers to the model, but neither to the attachment: so an
    attachment that is dropped can end it.
    """

    def __init__(self, model: PreTrainedModel, info: ModelInfo, config: HybridConfig) -> None:
        self.info, self.text_config = info, text_config(model)
        self._model, self._dtype = model, model.dtype
        self._lock = threading.RLock()  # held by the thread whose forward runs
        self._cache: TieredCache | JoinedCache | None = None  # of the forward that runs
        self._entered: set[nn.Module] = set()  # whose forwards run with it
        self._wrapped: list[tuple[nn.Module, Callable[..., Any] | None]] = []
        hf_attention.register()
        self._graphs = _step_graphs(model) if config.capture_decode else None
        chunk, states = config.prefill_chunk_tokens, config.prefill_states
        self._prefill = LayerMajorPrefill(model, chunk, states)
        self._early: EarlyQueries | None = None
        self._few = _few_tokens(model)
        # Whole layers first: they look at the forwards of what is in them.
        both = _decoder_steps(model, self._few), self._few
        self._faster = [one for one in both if one is not None]
        for part in text_parts(model, self.text_config):
            self._wrap(part)

    def compute_early_queries(self, info: ModelInfo) -> Mapping[int, str]:
        """From now on caches that search ahead are told the queries of the next layer.

        Returns:
            By tiered layer why it is not; empty where it is.
        """
        if self._early is None:
            from hybrid_kv.models.early_queries import EarlyQueries

            self._early = EarlyQueries(self._model, info)
        return self._early.unforeseen

    def try_products(self) -> None:
        """See `Attachment.try_products`."""
        if self._few is not None:
            self._few.try_all()

    def _wrap(self, module: nn.Module) -> None:
        # Not by hooks: an interrupt would skip the one that ends a forward.
        self._wrapped.append((module, module.__dict__.get("forward")))
        inner = module.forward
        names = list(signature(inner).parameters)
        place = names.index(CACHE_ARGUMENT) if CACHE_ARGUMENT in names else len(names)

        # Not with what is noted on `inner`: torch.compile would find its way past us there.
        @wraps(inner, updated=())
        def forward(*args: Any, **kwargs: Any) -> Any:
            cache = args[place] if place < len(args) else passed(kwargs)
            if _is_served(cache):
                kwargs = renamed(kwargs)
                # torch.compile of PyTorch 2.9 takes strict=False for strict.
                inputs = {**dict(zip(names, args)), **kwargs}  # noqa: B905
                return self._serve(module, cache, inputs, inner, lambda: inner(*args, **kwargs))
            if torch.compiler.is_dynamo_compiling():
                return inner(*args, **kwargs)
            with self._lock:
                return inner(*args, **kwargs)

        module.forward = forward

    @outside_graphs
    def _serve(
        self,
        module: nn.Module,
        cache: TieredCache | JoinedCache,
        inputs: dict[str, Any],
        inner: Callable[..., Any],
        call: Callable[[], Any],
    ) -> Any:
        """A forward with a cache of ours; `inner` is the model's own, `call` calls it."""
        # Before it waits for its turn: somebody else's forward would change what was looked at.
        with cache.alone(), self._lock:
            if cache is self._cache and module not in self._entered:  # a part of the whole
                with self._inside(module):
                    return call()
            with self._turned_on(module, cache, inputs), self._inside(module):
                plans = _advanced(cache, inputs)
                if self._graphs is not None and isinstance(cache, TieredCache):
                    output = self._graphs.forward(cache, module, inputs, plans, inner)
                else:
                    with ExitStack() as stack:
                        for faster in self._faster:
                            stack.enter_context(faster.served(_num_tokens(inputs)))
                        output = call()
                _watch_logits(cache, output)
                return output

    @contextmanager
    def _inside(self, module: nn.Module) -> Iterator[None]:
        """While a module's forward runs: a second one inside of it is somebody else's."""
        self._entered.add(module)
        try:
            yield
        finally:
            self._entered.discard(module)

    @contextmanager
    def _turned_on(
        self, module: nn.Module, cache: TieredCache | JoinedCache, inputs: dict[str, Any]
    ) -> Iterator[None]:
        """Our attention instead of the model's own."""
        if self._cache is not None:
            raise BusyError(
                "the model is computing already in this thread; call it again when that forward "
                "has returned"
            )
        if isinstance(cache, TieredCache):
            self._check(cache, inputs)
        else:
            self._check_joined(cache, inputs)
        text = self.text_config
        previous, text._attn_implementation = text._attn_implementation, hf_attention.NAME
        self._set_cache(cache)
        try:
            mask = cache.state.shown.here if isinstance(cache, TieredCache) else None
            with (
                cache.forward(),
                self._as_prompt(module, cache, inputs),
                hf_attention.with_mask(mask),
            ):
                yield
        finally:
            text._attn_implementation = previous
            self._set_cache(None)

    def _as_prompt(
        self, module: nn.Module, cache: TieredCache | JoinedCache, inputs: dict[str, Any]
    ) -> AbstractContextManager[None]:
        if not isinstance(cache, TieredCache) or self._records(inputs, "output_router_logits"):
            return nullcontext()  # a joined step is no prompt; those are of a layer, not of chunks
        source = _source(inputs)
        shape = None if source is None else (source.shape[0], source.shape[1])
        # Somebody else may hold on to these tensors; then chunks must not be written over them.
        records = self._records(inputs, "output_hidden_states", "output_attentions")
        in_place = inputs.get("inputs_embeds") is None and not records
        asked = None if records or shape is None else _rows_asked(module, inputs, shape[1])
        return self._prefill.serving(cache, shape, in_place=in_place, asked=asked)

    def _set_cache(self, cache: TieredCache | JoinedCache | None) -> None:
        self._cache = cache
        if self._early is not None:
            # Rows of a joined step are not searched ahead.
            self._early.cache = cache if isinstance(cache, TieredCache) else None

    def _check_joined(self, cache: JoinedCache, inputs: dict[str, Any]) -> None:
        for row in cache.caches:
            self._check_belongs(row, inputs)
        source = _source(inputs)
        if source is None or source.shape[:2] != (cache.num_rows, 1):
            raise ConfigError(
                f"joined caches take one new token for each of their {cache.num_rows} rows, got "
                f"{None if source is None else list(source.shape)}; prompts go one by one"
            )
        self.check_context(cache.get_seq_length() + 1)

    def _check_belongs(self, cache: TieredCache, inputs: dict[str, Any]) -> None:
        if cache.kv.info.layers is not self.info.layers:
            raise ConfigError(
                "this cache was made for another model; take it from this attachment's cache()"
            )
        if inputs.get("output_attentions"):
            raise ConfigError(
                "output_attentions must be off: a tiered KV cache computes no attention weights"
            )

    def _check(self, cache: TieredCache, inputs: dict[str, Any]) -> None:
        self._check_belongs(cache, inputs)
        source = _source(inputs)
        if source is None:
            return
        rows, new = source.shape[:2]
        mask = inputs.get("attention_mask")
        if mask is None or (isinstance(mask, Tensor) and mask.ndim == 2):
            seen, is_tiered = cache.get_seq_length(), bool(self.info.layers)
            cache.state.shown.accept(mask, seen, new, is_tiered=is_tiered)
        self.check_context(cache.get_seq_length() + new)
        if new > 1:
            kv = rows * new * self.bytes_per_token(cache.kv.means.method, new)
            check_host_memory(kv + self._prefill.widened_bytes(rows * new), new)
        if new >= _PROMPT:  # chunk by chunk all pages would move three times, and in a step
            cache.kv.means.reserve(cache.get_seq_length() + new + _ROOM)

    def check_context(self, num_tokens: int) -> None:
        """Raises ConfigError where `num_tokens` exceed what the model was made for."""
        if (limit := max_context(self.text_config)) is not None and num_tokens > limit:
            raise ConfigError(
                f"context must be at most {limit} tokens for this model, got {num_tokens}; shorten "
                "the prompt, ask for fewer new tokens or take a model with a longer context"
            )

    def _records(self, inputs: dict[str, Any], *names: str) -> bool:
        return any(inputs.get(n, getattr(self.text_config, n, False)) for n in names)

    def bytes_per_token(self, method: Method, num_tokens: int) -> int:
        """Bytes of K and V and of indexes for each of `num_tokens`, over all tiered layers."""
        return sum(
            bytes_per_token(shape, self._dtype) + method.index_bytes_per_token(shape, num_tokens)
            for shape in self.info.layers
        )

    def close(self) -> None:
        """Gives the model its own forwards back, when the one that runs has returned."""
        with self._lock:
            for module, previous in reversed(self._wrapped):
                if previous is None:
                    module.__dict__.pop("forward", None)
                else:
                    module.forward = previous
            self._wrapped.clear()
            if self._early is not None:
                self._early.close()


def _is_served(cache: object) -> TypeGuard[TieredCache | JoinedCache]:
    return isinstance(cache, ServedCache)


def _step_graphs(model: PreTrainedModel) -> StepGraphs:
    from hybrid_kv.models.step_graphs import StepGraphs

    return StepGraphs(model)


def _few_tokens(model: PreTrainedModel) -> FewTokens | None:
    """The products of a model's 16-bit weights; None where it has none in host memory."""
    halves = (torch.bfloat16, torch.float16)
    if not any(one.dtype in halves and one.device.type == "cpu" for one in model.parameters()):
        return None
    from hybrid_kv.models.few_tokens import FewTokens

    return FewTokens(model)


def _decoder_steps(model: PreTrainedModel, few: FewTokens | None) -> DecoderSteps | None:
    """Layers with packed or 16-bit weights in host memory; None where a model has none."""
    packed = any(one.dtype == torch.uint8 for one in model.parameters())
    if few is None and not packed:
        return None
    from hybrid_kv.models.decoder_step import DecoderSteps

    return DecoderSteps(model, few.pays if few is not None else lambda weight, tokens: False)


def _source(inputs: dict[str, Any]) -> Tensor | None:
    """The new tokens [B, T], or their embeddings [B, T, hidden]."""
    ids: Tensor | None = inputs.get("input_ids")
    return inputs.get("inputs_embeds") if ids is None else ids


def _rows_asked(module: nn.Module, inputs: dict[str, Any], num_tokens: int) -> int | None:
    """Rows of hidden states that a forward needs, counted from the last; None for all."""
    asked = inputs.get("logits_to_keep")
    few = type(asked) is int and 0 < asked < num_tokens
    return asked if few and "logits_to_keep" in signature(module.forward).parameters else None


def _advanced(cache: TieredCache | JoinedCache, inputs: dict[str, Any]) -> list[DevicePlan]:
    """Begins a step where a forward is one of one token of one row; see `Layers.advance`."""
    source = _source(inputs)
    is_one_token = source is not None and source.shape[:2] == (1, 1)
    if not is_one_token or not isinstance(cache, TieredCache) or cache.kv.more_prompt:
        return []
    return cache.kv.layers.advance(cache.get_seq_length())


def _num_tokens(inputs: dict[str, Any]) -> int:
    """New tokens over all rows; 0 where they are not known."""
    source = _source(inputs)
    return 0 if source is None else source.shape[0] * source.shape[1]


def _watch_logits(cache: TieredCache | JoinedCache, output: Any) -> None:
    """Lets the cache look at the last token's logits.

    Raises:
        NonFiniteError: they are not finite, or those of the step before were not; of joined caches
            the row keeps the error.
    """
    values = getattr(output, "logits", None)
    values = getattr(output, "last_hidden_state", None) if values is None else values
    if isinstance(values, Tensor) and values.numel():
        # The largest: a token that a model rules out by minus infinity is no error.
        are_finite = torch.isfinite(values[:, -1].amax(-1))
        if isinstance(cache, TieredCache):
            cache.kv.finite.watch("logits", are_finite.all())
        else:
            cache.watch_logits(are_finite)
