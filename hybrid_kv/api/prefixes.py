"""Prompts that begin with a context on disk, and are left there themselves."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hybrid_kv.models.hf_cache import TieredCache
from hybrid_kv.saved import ContextRegistry
from hybrid_kv.saved.saving import Provenance


class Prefixes:
    """Saved contexts of a registry that belong to one model.

    A prompt's rest attends exactly to what was taken, however short it is, as if the prompt had
    been computed in one. So only a method that keeps every entry takes part; contexts of others are
    taken as a whole or not at all.
    """

    def __init__(self, maker: Provenance, device: torch.device, registry: ContextRegistry) -> None:
        self._maker, self._device, self.registry = maker, device, registry

    def take(self, cache: TieredCache, ids: Tensor) -> int:
        """Fills an empty cache with first tokens of ids [1, tokens]; returns how many."""
        return self.registry.take(cache, ids, self._maker, self._device)

    @contextmanager
    def begun(self, cache: TieredCache, ids: Tensor) -> Iterator[int]:
        """A block that computes a prompt, ids [1, tokens], and the answer, in a cache.

        The prompt is left at the end, as it was before the answer; but where the cache held
        something at the beginning, or the block fails, it is not.

        Yields:
            How many tokens were taken: not the last, whose logits are needed.
        """
        if cache.get_seq_length() or not cache.keeps_all:
            yield 0
            return
        reused = self.take(cache, ids[:, :-1])
        with _Prompt(self._maker.model, cache, ids.shape[1], reused, forks=True) as prompt:
            yield reused
            if prompt.end is not None:
                self._leave(prompt.end, ids, prompt)

    def _leave(self, cache: TieredCache, ids: Tensor, prompt: _Prompt) -> None:
        tokens = ids.shape[1]
        whole_s = prompt.spent_s * tokens / (tokens - prompt.reused)
        self.registry.add(cache, ids, self._maker, prefill_s=whole_s)

    @contextmanager
    def context(self, cache: TieredCache, ids: Tensor) -> Iterator[int]:
        """A block that computes the rest of ids [1, tokens] in an empty cache.

        Yields:
            How many were taken; all of them, perhaps.
        """
        reused = self.take(cache, ids)
        with _Prompt(self._maker.model, cache, ids.shape[1], reused) as prompt:
            yield reused
        if reused < ids.shape[1]:
            self._leave(cache, ids, prompt)


class _Prompt:
    """Watches the rest of a prompt being computed: all of it attends exactly.

    end: a fork of the cache as it was then, if wanted; the answer goes on without it. spent_s: what
    the rest took.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        cache: TieredCache,
        num_tokens: int,
        reused: int,
        *,
        forks: bool = False,
    ) -> None:
        self._model, self._cache, self._num_tokens = model, cache, num_tokens
        self._forks = forks
        self.reused = reused
        self.end: TieredCache | None = None
        self.spent_s = 0.0

    def __enter__(self) -> _Prompt:
        self._begin, self._hook = perf_counter(), None
        if self.reused < self._num_tokens:
            self._cache.kv.more_prompt = self.reused > 0
            self._hook = self._model.register_forward_hook(self._after_forward)
        return self

    def _after_forward(self, *_: Any) -> None:
        if self._cache.get_seq_length() < self._num_tokens:
            return
        self.spent_s = perf_counter() - self._begin
        self._stop_watching()
        if self._forks and self._cache.get_seq_length() == self._num_tokens:
            self.end = self._cache.fork()

    def _stop_watching(self) -> None:
        self._cache.kv.more_prompt = False
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    def __exit__(self, *_: object) -> None:
        self._stop_watching()
        if self.end is not None:
            self.end.close()
