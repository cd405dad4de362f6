"""One decode step of several caches: the weights see a batch, every row attends to its own cache.

Each row keeps its method, budgets and length. What goes wrong in one of them ends that row only:
the others' outputs do not depend on it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from inspect import signature
from threading import get_ident
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import CacheLayerMixin

from hybrid_kv.errors import ConfigError
from hybrid_kv.models.cache_layers import HybridLayer, hybrid_layers, tag, tiered_layers
from hybrid_kv.models.cache_state import NOT_ATTACHED, outside_graphs
from hybrid_kv.models.hf_cache import ServedCache, TieredCache, check_attended
from hybrid_kv.models.support import text_config
from hybrid_kv.runtime.engine_plan import EnginePlan
from hybrid_kv.runtime.step import Step
from hybrid_kv.runtime.together import JointPlan, JointRow, attend_shared
from hybrid_kv.types import PartialAttention

_log = logging.getLogger(__name__)


def why_alone(model: PreTrainedModel) -> str:
    """Reason why decode steps of several caches of this model cannot be joined; empty where they
    can.
    """
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


class _Asked(NamedTuple):
    """A step of one layer by row: q [1, Hq, 1, D], new k, v [1, Hkv, 1, D]; how scores become
    logits.
    """

    q: Sequence[Tensor]
    k: Sequence[Tensor]
    v: Sequence[Tensor]
    scale: float
    softcap: float | None


_Parts: TypeAlias = list[PartialAttention | None]
"""Of each row what it attended; None where that is still to come."""


@dataclass(slots=True, eq=False)
class _Running:
    """A forward as all layers of a joined cache see it.

    errors: by row what has ended it; None where nothing did. thread: in which it runs; 0 for none.
    """

    errors: list[Exception | None]
    thread: int = 0


class JoinedLayer(CacheLayerMixin):
    """The same layer of several caches, row by row.

    Rows whose step is one call of the engine make it in one call together; rows that share entries
    read these together; the others attend by themselves.
    """

    is_sliding = False

    def __init__(self, rows: Sequence[HybridLayer], running: _Running) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._rows, self._running, self._errors = rows, running, running.errors
        self._new: tuple[Tensor, Tensor] | None = None
        self._joint: JointPlan | None = None  # of the last step
        self._shares: list[bool | None] = [None] * len(rows)  # None until it was asked

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Each row does so by itself."""

    @outside_graphs
    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Keeps k, v [B, Hkv, 1, D] aside; returns them with a handle to us.

        Raises:
            ConfigError: no forward of an attached model runs with the cache.
            BusyError: one does, in another thread.
        """
        if self._running.thread != get_ident():
            for row in self._rows:
                row.state.require_open()
            raise ConfigError(NOT_ATTACHED)  # each of them runs with another cache
        self._new = key_states.detach(), value_states.detach()
        return tag(key_states.view_as(key_states), self), tag(
            value_states.view_as(value_states), self
        )

    @property
    def pending(self) -> bool:
        """Whether new tokens came that no attention has asked for yet."""
        return self._new is not None

    def forget_new(self) -> None:
        """Lets go of tokens that no attention has asked for."""
        self._new = None

    def attend(
        self, q: Tensor, mask: Tensor | None, *, scale: float, softcap: float | None
    ) -> PartialAttention:
        """Attends with q [B, Hq, 1, D], each row to its own cache; a row that has failed gets
        zeros, and so does one without a cache.
        """
        new, self._new = self._new, None
        queries, parts = q.split(1), _Parts([None] * len(q))
        if new is not None:
            asked = _Asked(queries, new[0].split(1), new[1].split(1), scale, softcap)
            if not (torch.is_grad_enabled() and q.requires_grad):  # else each row refuses
                self._attend_joint(asked, parts)
            self._attend_shared(asked, parts)
        for number, row in self._whole_rows():
            if parts[number] is None:
                with self._isolated(number):
                    parts[number] = row.attend(queries[number], None, scale=scale, softcap=softcap)
        return _stacked(parts, q)

    def _attend_joint(self, asked: _Asked, parts: _Parts) -> None:
        """Takes the rows whose step is one call of the engine, and which share nothing."""
        numbers: list[int] = []
        plans: list[EnginePlan] = []
        steps: list[Step] = []
        for number, row in self._whole_rows():
            if self._shares[number] is None:
                self._shares[number] = _may_share(row)
            if self._shares[number] or row.state.is_closed:  # `update` says that it is
                continue
            found = row.state.kv.joint_step(
                row.layer_idx,
                asked.q[number],
                (asked.k[number], asked.v[number]),
                scale=asked.scale,
                softcap=asked.softcap,
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

    def _attend_shared(self, asked: _Asked, parts: _Parts) -> None:
        """Stores the new tokens of the other rows, and takes those that share entries."""
        joint: dict[int, JointRow] = {}
        for number, row in self._whole_rows():
            if parts[number] is not None:
                continue
            with self._isolated(number):
                row.update(asked.k[number], asked.v[number])
                assert row.pending is not None
                own = row.layer_idx, asked.q[number], row.pending
                joint[number] = JointRow(row.state.kv, *own)
        attend_shared(list(joint.values()), scale=asked.scale, softcap=asked.softcap)
        for number, one in joint.items():
            with self._isolated(number):
                parts[number] = one.taken()
                if parts[number] is not None:
                    self._rows[number].pending = None
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
        self._running = _Running(self.errors)
        rows_of = zip(*map(_tiered_layers, self.caches), strict=True)
        self._own = [JoinedLayer(rows, self._running) for rows in rows_of]
        super().__init__(layers=list(self._own))

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

        Raises:
            UnsupportedModelError: a layer stored keys and then attended without asking us.
        """
        self.errors[:] = [None] * len(self.caches)
        with ExitStack() as stack:
            forwards = [stack.enter_context(cache.forward()) for cache in self.caches]
            stack.callback(self._end_running)
            self._running.thread = get_ident()
            yield
            check_attended(self.layers)
            for number, forward in enumerate(forwards):
                forward.failed = self.errors[number] is not None
                try:
                    forward.end()
                except Exception as error:
                    self.errors[number], forward.failed = error, True

    def _end_running(self) -> None:
        self._running.thread = 0
        for layer in self._own:
            layer.forget_new()

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


def _stacked(parts: _Parts, q: Tensor) -> PartialAttention:
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
