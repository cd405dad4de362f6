"""Decode steps of a whole model captured as one CUDA graph and replayed.

    first    the step runs on the stream of captures: kernels are loaded, work spaces are made
    then     it is captured, which runs nothing, and replayed
    later    numbers and inputs are copied to where the graph reads them, and it is replayed

Launching a step reads no host number that changes (`DevicePlan`), and what has been launched may
be launched again: so a capture needs no undo, and one that fails is followed by an eager step. What
a graph takes for granted is compared before each replay; what it cannot say is refused by name.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from inspect import signature
from itertools import chain
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from hybrid_kv.models.cache_layers import HybridLayer, hybrid_layers
from hybrid_kv.models.cache_state import CACHE_ARGUMENT, is_written_in_place, states_of
from hybrid_kv.models.early_queries import is_idle_on_devices
from hybrid_kv.models.hf_cache import TieredCache
from hybrid_kv.models.last_rows import is_heard
from hybrid_kv.ops.pinned import CaptureBusyError
from hybrid_kv.runtime import PlanReason
from hybrid_kv.runtime.device_plan import DevicePlan
from hybrid_kv.store.memory import allocate
from hybrid_kv.transfer.graph_cache import CudaRecorder

_log = logging.getLogger(__name__)

_IDS, _POSITIONS, _MASK = "input_ids", "position_ids", "attention_mask"
_READ = (_IDS, _POSITIONS, "cache_position")
"""Tensors among the inputs that a graph reads; a mask of one row says nothing of its new token."""
_RECORDS = ("output_hidden_states", "output_attentions", "output_router_logits")
_FIRST_REST = 16
"""Steps until a capture that failed is tried again; then twice as many, and so on."""

_CACHE = object()
"""Stands for the cache in what a model returned."""

_FIRST = PlanReason("first", "it is captured when a step like it has run")


@dataclass(slots=True)
class _StepGraph:
    """The graph of a cache, and what it takes for granted.

    given: by name where it reads its inputs. replay: runs it; None before the capture. kind,
    values: what the model returned, with this graph's tensors. rest: steps before the next
    attempt.
    """

    granted: tuple[Any, ...]
    given: dict[str, Tensor]
    replay: Callable[[], None] | None = None
    kind: Any = None
    values: dict[str, Any] = field(default_factory=dict)
    failures: int = 0
    rest: int = 0


class StepGraphs:
    """The graphs of an attached model's decode steps, one for each cache.

    Args:
        model: whose steps are captured, whole or any part that is called by itself.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._modules = list(model.modules())
        self._recorders: dict[torch.device, CudaRecorder] = {}
        self._read: dict[torch.device, torch.cuda.Event] = {}  # when the last results have been
        self._known: WeakKeyDictionary[TieredCache, _StepGraph] = WeakKeyDictionary()

    def forward(
        self,
        cache: TieredCache,
        module: nn.Module,
        inputs: Mapping[str, Any],
        plans: Sequence[DevicePlan],
        inner: Callable[..., Any],
    ) -> Any:
        """Output of `inner(**inputs)`, with tensors of its own.

        Args:
            module: whose forward `inner` is.
            plans: by layer how the step is made, which has been advanced; empty where it was not.
        """
        use = cache.kv.graph_use
        use.reason = self._why_not(cache, module, inputs, plans)
        if use.reason is not None:
            self._known.pop(cache, None)
            return inner(**inputs)
        granted = self._granted(cache, module, inputs, plans)
        known = self._known.get(cache)
        if known is None or known.granted != granted:
            places = self._places(cache, inputs, {} if known is None else known.given)
            known = self._known[cache] = _StepGraph(granted, places)
            use.reason = _FIRST
        device = _device_of(cache)
        if (read := self._read.get(device)) is not None:
            torch.cuda.current_stream(device).wait_event(read)  # another thread's, perhaps
        step = self._prepared(known, inputs, inner)
        if use.reason is not None:
            return self._launched(cache, step)
        if known.replay is not None:
            _note_launched(cache)
        elif not self._captured(cache, known, step):
            return self._launched(cache, step)
        assert known.replay is not None
        known.replay()
        use.replays += 1
        output = _returned(known.kind, known.values, cache)
        event = self._read[device] = torch.cuda.Event()
        event.record(torch.cuda.current_stream(device))
        return output

    # What is refused ------------------------------------------------------------------------------

    def _why_not(
        self,
        cache: TieredCache,
        module: nn.Module,
        inputs: Mapping[str, Any],
        plans: Sequence[DevicePlan],
    ) -> PlanReason | None:
        """Reason why a step cannot be captured; None where it can."""
        for idx, layer in enumerate(cache.layers):
            if type(layer) is not HybridLayer and not is_written_in_place(layer):
                kind = type(layer).__name__
                return PlanReason("layers", f"layer {idx} keeps its state in a {kind}")
        if (why := _why_not_inputs(module, inputs)) is not None:
            return why
        kv, config = cache.kv, getattr(self._model, "config", None)
        if any(inputs.get(name, getattr(config, name, False)) for name in _RECORDS):
            return PlanReason("inputs", "it returns what layers compute")
        if not (inputs.get("return_dict") is not False and getattr(config, "return_dict", True)):
            return PlanReason("inputs", "it returns a tuple")
        if kv.watchers:
            return PlanReason("watched", "somebody looks at its steps")
        if torch.is_grad_enabled() or self._model.training:
            return PlanReason("training", "gradients or dropout are on")
        if (name := self._hooked()) is not None:
            return PlanReason("hooks", f"{name} has hooks")
        if not plans:
            return PlanReason("plan", _why_not_advanced(cache))
        return None

    def _hooked(self) -> str | None:
        """A module that calls hooks, which a replay would pass by."""
        if torch_module._global_forward_hooks or torch_module._global_forward_pre_hooks:
            return "every module"
        for module in self._modules:
            before = module._forward_pre_hooks
            called = before and not all(map(is_idle_on_devices, before.values()))
            if called or is_heard(module) or "_hf_hook" in module.__dict__:
                return type(module).__name__
        return None

    # What a graph hangs on ------------------------------------------------------------------------

    def _granted(
        self,
        cache: TieredCache,
        module: nn.Module,
        inputs: Mapping[str, Any],
        plans: Sequence[DevicePlan],
    ) -> tuple[Any, ...]:
        """All that is baked into a graph: plans, weights and states of a fixed size by where they
        lie, forwards, settings.
        """
        modes = torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cuda")
        told = sorted((name, _kind(name, value)) for name, value in inputs.items())
        hang_on = [plan.hangs_on() for plan in plans]
        states = [x.data_ptr() for layer in cache.layers for x in states_of(layer).values()]
        return hang_on, module, modes, told, states, self._weights()

    def _weights(self) -> tuple[list[Any], list[int]]:
        held = [
            (own["_parameters"], own["_buffers"], own["_modules"], own.get("forward"))
            for own in map(vars, self._modules)
        ]
        tensors = [t for p, b, *_ in held for t in chain(p.values(), b.values()) if t is not None]
        told = [id(one) for *_, inside, forward in held for one in (*inside.values(), forward)]
        return told, [tensor.data_ptr() for tensor in tensors]

    # How a step is made ---------------------------------------------------------------------------

    def _places(
        self, cache: TieredCache, inputs: Mapping[str, Any], before: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """Memory where the graph reads what changes: copies of inputs, and the position among
        numbers.
        """
        given = {}
        for name in _READ:
            if (value := inputs.get(name)) is not None:
                old = before.get(name)
                if old is None or _kind(name, old) != _kind(name, value):
                    old = allocate(value.shape, value.dtype, value.device)
                given[name] = old
        if _POSITIONS not in given:
            given[_POSITIONS] = cache.kv.means.step_numbers().position_on(inputs[_IDS].device)
        return given

    def _prepared(
        self, known: _StepGraph, inputs: Mapping[str, Any], inner: Callable[..., Any]
    ) -> Callable[[], Any]:
        """The step of what the inputs hold now, which have been copied to where it reads them."""
        for name, place in known.given.items():
            if (value := inputs.get(name)) is not None:
                place.copy_(value)
        changed = {**inputs, **known.given}
        if _MASK in changed:
            changed[_MASK] = None
        return lambda: inner(**changed)

    def _recorder(self, cache: TieredCache) -> CudaRecorder:
        device = _device_of(cache)
        if device not in self._recorders:
            self._recorders[device] = CudaRecorder(device)
        return self._recorders[device]

    def _launched(self, cache: TieredCache, step: Callable[[], Any]) -> Any:
        """An eager step where captures are made."""
        with self._recorder(cache).on_stream():
            output = step()
        return _returned(type(output), _values(output, cache), cache)

    def _captured(self, cache: TieredCache, known: _StepGraph, step: Callable[[], Any]) -> bool:
        """Captures a step, which is then to be replayed; whether that could be done."""
        use = cache.kv.graph_use
        if known.rest:
            known.rest -= 1
            return False
        try:
            with _launched_again(cache):
                known.replay, output = self._recorder(cache).capture(step)
        except CaptureBusyError as error:
            use.reason = PlanReason("busy", str(error))
            return False
        except RuntimeError as error:
            known.rest = _FIRST_REST << known.failures
            known.failures += 1
            line = str(error).strip().split("\n")[0]
            use.reason = PlanReason("capture", f"a capture failed ({line}); it is tried again")
            _log.warning("a decode step could not be captured: %s", line)
            return False
        known.kind, known.values = type(output), _values(output, cache)
        use.captures += 1
        return True


def _note_launched(cache: TieredCache) -> None:
    """A step that was advanced is launched without any layer being asked."""
    for layer in hybrid_layers(cache.layers):
        layer.go_back(layer.mark() + 1)
    cache.kv.means.step_numbers().forget()


@contextmanager
def _launched_again(cache: TieredCache) -> Iterator[None]:
    """A block that launches a step which was advanced; if it fails, another one may."""
    numbers, layers = cache.kv.means.step_numbers(), hybrid_layers(cache.layers)
    seen = [layer.mark() for layer in layers]
    reserved, noted = set(numbers.reserved), set(numbers.noted)
    try:
        yield
    except BaseException:
        for layer, mark in zip(layers, seen, strict=True):
            layer.go_back(mark)
        numbers.reserved, numbers.noted = reserved, noted
        raise


def _device_of(cache: TieredCache) -> torch.device:
    """Device of the first layer, which has seen a token."""
    device: torch.device = hybrid_layers(cache.layers)[0].device
    return device


def _why_not_inputs(module: nn.Module, inputs: Mapping[str, Any]) -> PlanReason | None:
    ids = inputs.get(_IDS)
    if not isinstance(ids, Tensor) or inputs.get("inputs_embeds") is not None:
        return PlanReason("inputs", "it gets embeddings in place of token ids")
    if ids.shape[0] > 1:
        return PlanReason("several_rows", "several rows")
    if ids.shape[1] > 1:
        return PlanReason("several_tokens", "several new tokens")
    if not ids.is_cuda:
        return PlanReason("device", "it does not run on a CUDA device")
    for name, value in inputs.items():
        plain = value is None or isinstance(value, (bool, int, float, str))
        known = name in (*_READ, _MASK) and isinstance(value, Tensor) and value.is_cuda
        if not (plain or known or name == CACHE_ARGUMENT or isinstance(value, TieredCache)):
            return PlanReason("inputs", f"it gets {name}")
    mask = inputs.get(_MASK)
    if mask is not None and mask.ndim != 2:
        return PlanReason("inputs", f"it gets an attention mask of {mask.ndim} axes")
    if _POSITIONS not in signature(module.forward).parameters:
        return PlanReason("inputs", f"{type(module).__name__} takes no {_POSITIONS}")
    return None


def _why_not_advanced(cache: TieredCache) -> str:
    for told in cache.kv.describe_steps():
        if told["code"] is None:
            return f"layer {told['layer']} has made no step yet"
    return (
        "a layer's step is not told by numbers: its method reads the host, or asks for something "
        "else in each step, or what its plan describes has just changed"
    )


def _kind(name: str, value: Any) -> Any:
    """Facts of an input on which a graph depends."""
    if name == _MASK:
        return ""
    if isinstance(value, Tensor):
        return f"{tuple(value.shape)} {value.dtype} {value.device}"
    return "" if isinstance(value, TieredCache) else repr(value)


def _values(output: Any, cache: TieredCache) -> dict[str, Any]:
    """Output of a model by name, without the cache, which would hold on to itself."""
    return {name: _CACHE if value is cache else value for name, value in output.items()}


def _returned(kind: Any, values: Mapping[str, Any], cache: TieredCache) -> Any:
    """The same with tensors of its own: the graph's are overwritten by the next step."""
    own = {n: v.clone() if isinstance(v, Tensor) else v for n, v in values.items()}
    return kind(**{n: cache if v is _CACHE else v for n, v in own.items()})
