"""The decode steps of one layer: made by a plan, and anew when what that describes has changed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hybrid_kv.plugins import Method
from hybrid_kv.runtime.cache_context import CacheContext, append, reads_alike, stores_as_is
from hybrid_kv.runtime.engine_plan import EnginePlan
from hybrid_kv.runtime.plan import CompiledStep, compile_step
from hybrid_kv.runtime.step import Found, Step
from hybrid_kv.runtime.step_numbers import store_reserved
from hybrid_kv.store import LayerStore
from hybrid_kv.types import LayerShape, PartialAttention, Read, SearchResult

if TYPE_CHECKING:
    from hybrid_kv.runtime.checked_method import CheckedMethod
    from hybrid_kv.runtime.device_plan import DevicePlan
    from hybrid_kv.runtime.look_ahead_state import LookAheadResults


class PlannedSteps:
    """A layer's decode steps, and how they are made: it holds on to what its plan describes.

    keeper: the method, where it keeps entries, from the prompt's end on; None where it does not.
    """

    def __init__(self, shape: LayerShape, method: Method, means: CacheContext) -> None:
        self._layer_idx, self._method, self._means = shape.layer_idx, method, means
        self._stores_as_is = stores_as_is(method)
        self._reads_alike = reads_alike(method)
        self._read: Read | None = None  # where it is the same in every step
        told = self._stores_as_is and self._reads_alike
        self._numbers = means.numbers if told else None
        self._compiled: CompiledStep | None = None  # how the last step was made
        self._num_plans = 0
        self.keeper: CheckedMethod | None = None

    def make(
        self,
        store: LayerStore,
        q: Tensor,
        scale: float,
        softcap: float | None,
        *,
        new: tuple[Tensor, Tensor] | None = None,
        found: Found | None = None,
        ahead: LookAheadResults | None = None,
        asked: SearchResult | None = None,
    ) -> Step:
        """A step of q [B, Hq, T, D].

        Args:
            new: k, v [B, Hkv, T, D] of its tokens, which `attend` stores; None where they are.
            found, ahead, asked: see `Step`.
        """
        means = self._means
        return Step(
            ops=means.ops,
            executor=means.executor,
            phases=means.phases,
            work=means.work,
            layer=store,
            q=q,
            new=q.shape[2],
            scale=scale,
            softcap=softcap,
            at_home=q.is_cpu and means.executor.at_once,
            found=found,
            ahead=ahead,
            asked=asked,
            unstored=new,
        )

    def attend(
        self, step: Step, read: Read | None = None, *, widening: int = 1
    ) -> PartialAttention:
        """Stores the tokens of a step, and attends what the method reads for it.

        Args:
            read: what to read instead; None asks the method.
            widening: times so many cold entries.

        Returns:
            out [B, Hq, T, D] in the dtype of q, lse [B, Hq, T] float32.

        Raises:
            NonFiniteError: see `append`.
        """
        if read is None and (read := self._read) is None:
            read = self._method.read(self._layer_idx, step.q)
            self._read = read if self._reads_alike else None
        if widening != 1:
            read = read.widened(widening)
        compiled, numbers = self._compiled, self._means.numbers
        if step.unstored is not None and self._layer_idx in numbers.reserved:
            store_reserved(step, numbers)
        if compiled is not None and not compiled.serves(step, read):
            compiled = None
        new = step.unstored
        if new is not None and (
            compiled is None or not self._stores_as_is or not compiled.plan.takes(*new)
        ):
            step.unstored = None
            append(step.layer, self._means, self._method, *new, None)
            if compiled is not None and not compiled.serves(step, read):  # pages have moved
                compiled = None
        if compiled is None:
            compiled = self._compiled = compile_step(step, read, self._numbers)
            self._num_plans += 1
        part, keeper = compiled.plan.attend(step), self.keeper
        if keeper is not None and keeper.follows:
            told = self._means.executor, step.layer, step.q, part.lse
            keeper.follow(*told, scale=step.scale, softcap=step.softcap)
        return part

    def joint_plan(self, step: Step) -> EnginePlan | None:
        """The plan by which a step, its token included, is one call of the engine; None where it is
        made otherwise, or something has to be done before.
        """
        compiled, new = self._compiled, step.unstored
        if compiled is None or new is None or self._numbers is None:
            return None
        plan = compiled.plan
        if not isinstance(plan, EnginePlan) or not compiled.serves(step, compiled.read):
            return None
        return plan if plan.takes(*new) else None

    def device_plan(self, store: LayerStore) -> DevicePlan | None:
        """The plan of the next step where it can be advanced already; see `Layers.advance`."""
        return None if self._compiled is None else self._compiled.device_plan(store.rows)

    def renew(self, store: LayerStore, scale: float, softcap: float | None) -> None:
        """Makes the plan of the next step anew where something has changed since the last one."""
        compiled = self._compiled
        if compiled is None or not compiled.stamp.reason:
            return
        shape = compiled.next_shape(store.rows)
        plan = compiled.plan.by_numbers
        if shape is not None and plan is not None:
            q = torch.empty(shape[0], dtype=shape[1], device=store.resident.pool.device)
            step = self.make(store, q, scale, softcap)  # of which only the shape counts
            self._compiled = compile_step(step, plan.read, self._means.numbers)
            self._num_plans += 1

    def drop(self) -> None:
        """Lets go of the plan: what it describes is no longer what the layer holds."""
        self._compiled = None

    def describe(self) -> dict[str, Any]:
        """JSON-ready: whether the last decode step was one call of the engine.

        code, reason: why it was not, empty where it was, None before the first step. plans: how
        many were made for the steps so far.
        """
        told = {"layer": self._layer_idx, "plans": self._num_plans}
        if self._compiled is None:
            return {**told, "one_call": False, "code": None, "reason": None}
        code, text = self._compiled.plan.reason or ("", "")
        return {**told, "one_call": not code, "code": code, "reason": text}
