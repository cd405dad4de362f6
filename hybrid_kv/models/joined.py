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
from hybrid_kv.runtime.engine_plan import EnginePlan
from hybrid_kv.runtime.joint_plan import JointPlan
from hybrid_kv.runtime.step import Step
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
    """The same layer of several caches, row by row.

    Rows whose step is one call of the engine make it in one call together; rows that share entries
    read these together; the others attend by themselves.
    """

    is_sliding = False

    def __init__(self, rows: Sequence[HybridLayer], errors: list[Exception | None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._rows, self._errors = rows, errors
        self._new: tuple[Tensor, Tensor] | None = None
        self._joint: JointPlan | None = None  # of the last step
        self._shares: list[bool | None] = [None] * len(rows)  # None until it was asked

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Each row does so by itself."""

    @outside_graphs
    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Keeps k, v [B, Hkv, 1, D] aside; returns them with a handle to us."""
        self._new = key_states.detach(), value_states.detach()
        return tag(key_states.view_as(key_states), self), tag(
            value_states.view_as(value_states), self
        )

    @property
    def pending(self) -> bool:
        """Whether new tokens came that no attention has asked for yet."""
        return self._new is not None

    def attend(
        self, q: Tensor, mask: Tensor | None, *, scale: float, softcap: float | None
    ) -> PartialAttention:
        """Attends with q [B, Hq, 1, D], each row to its own cache; a row that has failed gets
        zeros, and so does one without a cache.
        """
        new, self._new = self._new, None
        parts: list[PartialAttention | None] = [None] * len(q)
        if new is not None:
            self._attend_joint(parts, q, new, scale, softcap)
            self._attend_others(parts, q, new, scale, softcap)
        for number, row in self._whole_rows():
            if parts[number] is None:
                with self._isolated(number):
                    own = q[number : number + 1]
                    parts[number] = row.attend(own, None, scale=scale, softcap=softcap)
        return _stacked(parts, q)

    def _attend_joint(
        self,
        parts: list[PartialAttention | None],
        q: Tensor,
        new: tuple[Tensor, Tensor],
        scale: float,
        softcap: float | None,
    ) -> None:
        """The rows whose step is one call of the engine, and which share nothing."""
        numbers: list[int] = []
        plans: list[EnginePlan] = []
        steps: list[Step] = []
        queries, keys, values = q.split(1), new[0].split(1), new[1].split(1)
        for number, row in self._whole_rows():
            if self._shares[number] is None:
                self._shares[number] = _may_share(row)
            if not self._shares[number] and not row.state.is_closed:  # `update` says that it is
                found = row.state.kv.joint_step(
                    *(row.layer_idx, queries[number], (keys[number], values[number])),
                    scale=scale,
                    softcap=softcap,
                )
                if found is not None:
                    numbers.append(number)
                    plans.append(found[0])
                    steps.append(found[1])
        if len(numbers) < 2:
            return
        if self._joint is None or self._joint.plans != plans:
            self._joint = JointPlan(plans)
        for number, part in zip(numbers, self._joint.attend(steps), strict=True):
            if part is not None:  # else the row says why when it attends by itself
                parts[number] = part
                self._rows[number].seen += 1

    def _attend_others(
        self,
        parts: list[PartialAttention | None],
        q: Tensor,
        new: tuple[Tensor, Tensor],
        scale: float,
        softcap: float | None,
    ) -> None:
        """Attends entries that other rows share; all others take in their new tokens."""
        joint: dict[int, JointRow] = {}
        for number, row in self._whole_rows():
            if parts[number] is not None:
                continue
            own = slice(number, number + 1)
            with self._isolated(number):
                row.update(new[0][own], new[1][own])
                assert row.pending is not None
                joint[number] = JointRow(row.state.kv, row.layer_idx, q[own], row.pending)
        attend_shared(list(joint.values()), scale=scale, softcap=softcap)
        for number, one in joint.items():
            row = self._rows[number]
            with self._isolated(number):
                parts[number] = one.taken()
                if parts[number] is not None:
                    row.pending = None
            self._shares[number] = None  # something may have changed

    def _whole_rows(self) -> list[tuple[int, HybridLayer]]:
        pairs = enumerate(zip(self._rows, self._errors, strict=True))
        return [(number, row) for number, (row, error) in pairs if error is None]

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
    """The cache of decode steps [B, 1] of several caches of one row each.

    Pass `position_ids` [B, 1] with it, see `positions`: rows differ in length.

    errors: by cache what ended it in the last step; None where nothing did. num_rows: B; rows
    behind those of the caches pass through the weights and attend to nothing.

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
        self.errors[:] = [None] * len(self.caches)
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


def _may_share(layer: HybridLayer) -> bool:
    """Whether another cache may read some of a layer's entries with it; see `attend_shared`."""
    store = layer.state.kv.layers[layer.layer_idx].store
    return store is not None and any(row.may_share for row in store.rows)


def _stacked(parts: Sequence[PartialAttention | None], q: Tensor) -> PartialAttention:
    """Out as q [B, Hq, 1, D], lse [B, Hq, 1] float32: of each row its part, zeros without one."""
    found = [part for part in parts if part is not None]
    if len(found) == len(q):
        out = torch.cat([part.out for part in found])
        return PartialAttention(out.to(q.dtype), torch.cat([part.lse for part in found]))
    out = torch.zeros_like(q)
    lse = torch.full(q.shape[:3], -torch.inf, dtype=torch.float32, device=q.device)
    for number, part in enumerate(parts):
        if part is not None:
            out[number], lse[number] = part.out[0].to(q.dtype), part.lse[0]
    return PartialAttention(out, lse)


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
