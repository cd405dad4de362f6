"""One decode step of several caches: the weights see a batch, every row attends to its own cache.

Each row keeps its method, budgets and length. What goes wrong in one of them ends that row only:
the others' outputs do not depend on it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from inspect import signature
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import CacheLayerMixin

from hybrid_kv.errors import ConfigError
from hybrid_kv.models.cache_layers import HybridLayer, hybrid_layers, tag, tiered_layers
from hybrid_kv.models.forwards import outside_graphs
from hybrid_kv.models.hf_cache import ServedCache, TieredCache
from hybrid_kv.models.support import text_config
from hybrid_kv.runtime.together import JointRow, attend_shared
from hybrid_kv.types import PartialAttention

_log = logging.getLogger(__name__)


def why_alone(model: PreTrainedModel) -> str:
    """Why decode steps of several caches of this model cannot be joined; empty where they can."""
    text = text_config(model)
    tiered = set(tiered_layers(text))
    if others := sorted(set(range(text.num_hidden_layers)) - tiered):
        return f"layer {others[0]} keeps a window or a state of transformers' own"
    if "position_ids" not in signature(model.forward).parameters:
        return "the model takes no positions"
    if kinds := {"dynamic", "longrope"} & set(_rope_types(getattr(text, "rope_parameters", None))):
        return f"its positions turn by the length of the longest row (rope type {kinds.pop()})"
    return ""


def _rope_types(parameters: Any) -> Iterator[str]:
    """Of all layers; models with several kinds of layers have one mapping for each kind."""
    if isinstance(parameters, dict):
        yield str(parameters.get("rope_type", "default"))
        for value in parameters.values():
            yield from _rope_types(value) if isinstance(value, dict) else ()


class JoinedLayer(CacheLayerMixin):
    """The same layer of several caches, row by row."""

    is_sliding = False

    def __init__(self, rows: Sequence[HybridLayer], errors: list[Exception | None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._rows, self._errors = rows, errors

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Each row does so by itself."""

    @outside_graphs
    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Hands k, v [B, Hkv, 1, D] to the rows; returns them with a handle to us."""
        for number, row in self._whole_rows():
            own = slice(number, number + 1)
            with self._isolated(number):
                row.update(key_states[own], value_states[own])
        return tag(key_states.view_as(key_states), self), tag(
            value_states.view_as(value_states), self
        )

    @property
    def pending(self) -> bool:
        """Whether new tokens came that no attention has asked for yet."""
        return any(row.pending is not None for _, row in self._whole_rows())

    def attend(
        self, q: Tensor, mask: Tensor | None, *, scale: float, softcap: float | None
    ) -> PartialAttention:
        """Attends with q [B, Hq, 1, D] what rows share together, the rest row by row; a row that
        has failed gets zeros, and so does one without a cache.
        """
        out = torch.zeros_like(q)
        lse = torch.full(q.shape[:3], -torch.inf, dtype=torch.float32, device=q.device)
        joint = {n: _joint_row(row, q[n : n + 1]) for n, row in self._whole_rows()}
        attend_shared([row for row in joint.values() if row], scale=scale, softcap=softcap)
        for number, row in self._whole_rows():
            own, shared = slice(number, number + 1), joint[number]
            with self._isolated(number):
                part = None if shared is None else shared.taken()
                if part is None:
                    part = row.attend(q[own], None, scale=scale, softcap=softcap)
                else:
                    row.pending = None
                out[own], lse[own] = part.out.to(q.dtype), part.lse
        return PartialAttention(out, lse)

    def _whole_rows(self) -> Iterator[tuple[int, HybridLayer]]:
        pairs = enumerate(zip(self._rows, self._errors, strict=True))
        return ((number, row) for number, (row, error) in pairs if error is None)

    @contextmanager
    def _isolated(self, number: int) -> Iterator[None]:
        """A block of one row, whose error is kept for whoever called the model."""
        try:
            yield
        except Exception as error:
            _log.debug("row %d of a joined step failed: %s", number, error)
            self._errors[number] = error
            self._rows[number].pending = None

    def get_seq_length(self) -> int:
        """Tokens of the longest row."""
        return max(row.get_seq_length() for row in self._rows)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        return -1


class JoinedCache(ServedCache):
    """The cache of one decode step [B, 1] of several caches of one row each.

    Pass `position_ids` [B, 1] with it, see `positions`: rows differ in length.

    errors: by cache what ended it in this step; None where nothing did. num_rows: B; rows behind
    those of the caches pass through the weights and attend to nothing.

    Args:
        caches: of one attached model, for which `why_alone` is empty; a prompt in each.
        num_rows: at least as many as there are caches; None for these.

    Raises:
        ConfigError: a layer of one is not tiered.
    """

    def __init__(self, caches: Sequence[TieredCache], num_rows: int | None = None) -> None:
        self.caches = list(caches)
        self.num_rows = num_rows or len(self.caches)
        self.errors: list[Exception | None] = [None] * len(self.caches)
        own = [_tiered_layers(cache) for cache in self.caches]
        super().__init__(layers=[JoinedLayer(rows, self.errors) for rows in zip(*own, strict=True)])

    @contextmanager
    def alone(self) -> Iterator[None]:
        """A block in which no other thread uses one of the caches; BusyError where one does."""
        with ExitStack() as stack:
            for cache in self.caches:
                stack.enter_context(cache.alone())
            yield

    @property
    def positions(self) -> list[list[int]]:
        """[B, 1]: where the next token of each row stands; 0 where it has no cache."""
        own = [[cache.get_seq_length()] for cache in self.caches]
        return own + [[0]] * (self.num_rows - len(own))

    @contextmanager
    def forward(self) -> Iterator[None]:
        """While the attached model runs with this cache.

        Where it fails as a whole, or a row does, its caches go back to where they were before.
        """
        with ExitStack() as stack:
            forwards = [stack.enter_context(cache.forward()) for cache in self.caches]
            yield
            for number, forward in enumerate(forwards):
                forward.failed = self.errors[number] is not None
                try:
                    forward.end()
                except Exception as error:
                    self.errors[number], forward.failed = error, True

    def watch_logits(self, are_finite: Tensor) -> None:
        """Ends the rows whose logits are not finite; are_finite [B] bool."""
        for number, cache in enumerate(self.caches):
            if self.errors[number] is None:
                try:
                    cache.kv.finite.watch("logits", are_finite[number])
                except Exception as error:
                    self.errors[number] = error


def _joint_row(layer: HybridLayer, q: Tensor) -> JointRow | None:
    """A layer's part in a joint step of q [1, Hq, 1, D]; None where another layer stores for it."""
    if layer.pending is None:
        return None
    return JointRow(layer.state.kv, layer.layer_idx, q, layer.pending)


def _tiered_layers(cache: TieredCache) -> list[HybridLayer]:
    """All layers of a cache.

    Raises:
        ConfigError: one is not tiered.
    """
    layers = hybrid_layers(cache.layers)
    if len(layers) < len(cache.layers):
        raise ConfigError(
            "caches can be joined where all of their layers are tiered, got one of which "
            f"{len(cache.layers) - len(layers)} are not; decode them one by one"
        )
    return layers
