"""Attaching the runtime to an unmodified transformers model, and detaching it without a trace."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Self

import torch
from torch import nn
from transformers import PreTrainedModel

from hybrid_kv.config import ConfigLike, HybridConfig
from hybrid_kv.errors import BusyError, ConfigError
from hybrid_kv.keywords import known_keywords_only
from hybrid_kv.models.hf_cache import TieredCache
from hybrid_kv.models.serving import Serving
from hybrid_kv.models.support import (
    check_backend,
    check_model,
    devices_of,
    find_rotary,
    inspect_model,
    keep_as_stored,
)
from hybrid_kv.plugins import Method
from hybrid_kv.runtime import make_executor
from hybrid_kv.transfer import Executor

_attached: weakref.WeakKeyDictionary[nn.Module, weakref.ref[Attachment]] = (
    weakref.WeakKeyDictionary()
)

_OF_THE_MODEL = ("prefill_chunk_tokens", "prefill_states", "capture_decode")
"""Settings that change the model's forwards, which all of its caches share."""


class Attachment:
    """A model whose attention reads from tiered caches; see `attach`.

    It ends with `close`, with its `with` block, or when nobody refers to it nor to its caches.
    """

    def __init__(self, model: PreTrainedModel, config: HybridConfig) -> None:
        check_model(model)
        if _attachment_of(model) is not None:
            gc.collect()  # its owner may be gone, in a cycle that waits for the collector
        if _attachment_of(model) is not None:
            raise ConfigError(
                "model is attached already; close that attachment (leave its `with` block) or call "
                "hybrid_kv.detach(model) first"
            )
        self._devices = devices_of(model)
        check_backend(config.backend, self._devices)
        self.model, self.config = model, config
        self.info = inspect_model(model)
        keep_as_stored(model)
        self._open = True
        self._turn = threading.RLock()  # held by the thread that generates
        self._executor: Executor | None = None  # of all caches that build in the background
        self._caches: weakref.WeakSet[HybridCache] = weakref.WeakSet()
        self._serving = Serving(model, self.info, config)
        self._end = weakref.finalize(self, self._serving.close)
        self._end.atexit = False
        try:
            self._learn_of_model(config)
        except BaseException:
            self._end()
            raise
        _attached[model] = weakref.ref(self)

    @known_keywords_only
    def cache(self, config: ConfigLike = None) -> HybridCache:
        """A new, empty cache: one per conversation, passed as `cache`.

        Args:
            config: in place of the attachment's, to compare methods on one model.

        Raises:
            ConfigError: the attachment is closed, or a setting is not one of a single cache
                (`prefill_chunk_tokens`, `prefill_states`, `capture_decode`) and differs from the
                attachment's.
        """
        if not self._open:
            raise ConfigError("attachment is closed; attach the model again for a new cache")
        return HybridCache.of(self, config)

    def _checked(self, config: ConfigLike) -> HybridConfig:
        """The configuration of a cache; the attachment's for None."""
        if config is None or config is self.config:
            return self.config
        own = HybridConfig.of(config)
        for name in _OF_THE_MODEL:
            asked, value = getattr(own, name), getattr(self.config, name)
            if asked != value and name in own.model_fields_set:
                raise ConfigError(
                    f"{name} is set when the model is attached, for all of its caches, to {value!r}"
                    f", got {asked!r} for one; leave it out, or attach the model with it"
                )
        if own.backend != self.config.backend:
            check_backend(own.backend, self._devices)
        self._learn_of_model(own)
        return own

    def _learn_of_model(self, config: HybridConfig) -> None:
        """Asks the model, once, what somebody has a use for beside its shapes: how queries turn,
        how they can be computed early, and the output projections.
        """
        config.check_complete()
        method = config.build()
        needs = method.needs
        if config.prefill_error is not None:
            from hybrid_kv.runtime.sparse_prefill import check_sparse

            check_sparse(needs, len(self.info.layers))
        foresight = method.foresight
        early = foresight is not None and (foresight.mode == "always" or self._on_gpu)
        if (needs.horizon_tokens or needs.rotary or early) and not self.info.rotary:
            self.info = replace(self.info, rotary=find_rotary(self.model, self.info))
        if needs.outputs and not self.info.outputs:
            from hybrid_kv.models.weight_kinds import find_outputs

            self.info = replace(self.info, outputs=find_outputs(self.model, self.info))
        if early and self.info.unforeseen is None:
            unforeseen = self._serving.compute_early_queries(self.info)
            self.info = replace(self.info, unforeseen=unforeseen)

    @property
    def _on_gpu(self) -> bool:
        return any(device.type == "cuda" for device in self._devices)

    def _executor_for(self, config: HybridConfig) -> Executor:
        device_type = "cuda" if self._on_gpu else "cpu"
        if config.index_build == "wait":
            return make_executor(config, device_type)
        self._executor = self._executor or make_executor(config, device_type)
        return self._executor

    @property
    def device(self) -> torch.device:
        """Device that takes the model's tokens: that of its first weights that lie anywhere."""
        return self._devices[0] if self._devices else self.model.device

    def try_products(self) -> None:
        """Measures now who multiplies with few tokens, once per process.

        That takes some .1 s for each shape of weights and number of tokens, up to 8; else the first
        step of so many rows takes it.
        """
        self._serving.try_products()

    def bytes_per_token(self, method: Method, num_tokens: int) -> int:
        """Bytes of K and V and of indexes for each of `num_tokens`, over all tiered layers."""
        return self._serving.bytes_per_token(method, num_tokens)

    def check_context(self, num_tokens: int) -> None:
        """Raises ConfigError where `num_tokens` exceed what the model was made for."""
        self._serving.check_context(num_tokens)

    @contextmanager
    def generating(self) -> Iterator[None]:
        """A block in which this thread generates.

        Raises:
            BusyError: another thread does.
        """
        if not self._turn.acquire(blocking=False):
            raise BusyError(
                "the model is generating in another thread and serves one call at a time; wait for "
                "that one, close its stream, or load the model a second time"
            )
        try:
            yield
        finally:
            self._turn.release()

    def close(self) -> None:
        """Detaches: the model's attention and forwards are what they were before.

        Its caches are closed. Index builds in the background are given up; what cannot stop at once
        is waited for, as is a forward that runs in another thread.
        """
        if not self._open:
            return
        self._open = False
        self._end()
        if _attached.get(self.model) is not None and _attached[self.model]() is self:
            del _attached[self.model]
        for cache in list(self._caches):
            cache.close()
        if self._executor is not None:
            self._executor.close()

    def __enter__(self) -> Attachment:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class HybridCache(TieredCache):
    """A tiered KV cache for one conversation: `model.generate(cache=HybridCache(model))`.

    The model is attached where it is not yet, and stays so as long as somebody refers to one of its
    caches or to its attachment; `attach` it yourself to keep captured steps (`capture_decode`) from
    one conversation to the next. One cache is for one thread at a time; several caches of a model
    may be used in as many threads, whose forwards take turns.

    Args:
        config: the default is that of the model's attachment, or else the `hybrid` method.

    Raises:
        UnsupportedModelError, BackendUnavailable, ConfigError: see `attach` and `Attachment.cache`.
    """

    @known_keywords_only
    def __init__(self, model: PreTrainedModel, config: ConfigLike = None) -> None:
        check_model(model)
        self._begin(_attachment_of(model) or Attachment(model, HybridConfig.of(config)), config)

    @classmethod
    def of(cls, home: Attachment, config: ConfigLike = None) -> HybridCache:
        """A cache of an attachment; see `Attachment.cache`."""
        new = cls.__new__(cls)
        new._begin(home, config)
        return new

    def _begin(self, home: Attachment, config: ConfigLike) -> None:
        own, text = home._checked(config), home._serving.text_config
        super().__init__(home.info, own, text, lambda: home._open, home._executor_for(own))
        self._home = home
        home._caches.add(self)

    def fork(self) -> Self:
        """See `TieredCache.fork`."""
        new = super().fork()
        self._home._caches.add(new)
        return new


def _attachment_of(model: PreTrainedModel) -> Attachment | None:
    """The attachment of a model that somebody refers to, if it has one."""
    known = _attached.get(model)
    return None if known is None else known()


@known_keywords_only
def attach(model: PreTrainedModel, config: ConfigLike = None) -> Attachment:
    """Lets a loaded transformers model generate from a tiered KV cache.

    Use it as a context manager; inside, pass `cache=runtime.cache()` to `generate`, before
    transformers 5.24 `past_key_values=`. Calls without such a cache work as before.
    `model.generate` may run in several threads: their forwards take turns.

    Args:
        config: a HybridConfig, a dict of its settings, or the name of a method.

    Raises:
        UnsupportedModelError: the model's attention cannot be served (MLA, DSA, encoder-decoder).
        BackendUnavailable: the back end asked for cannot serve here, or not this model.
        ConfigError: the model is attached already, or it is no transformers model.

    Warns:
        BackendWarning: the model is on a GPU for which "auto" finds no kernels.
    """
    return Attachment(model, HybridConfig.of(config))


@known_keywords_only
def detach(model: PreTrainedModel) -> None:
    """Ends the attachment of a model, whoever made it; harmless where there is none.

    Raises:
        ConfigError: it is no transformers model.
    """
    check_model(model)
    if (home := _attachment_of(model)) is not None:
        home.close()
