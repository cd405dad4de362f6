"""State of a cache: what its layers share, and layers whose state has one size at any context.

Shared are its store, who uses it, and the padding that was shown. Of one size is the state of
linear attention, in layers of transformers' own: the last columns that a convolution has seen, a
recurrent sum over all tokens, or both. It is written over at each token, so that nothing of it can
be taken back; it can be copied.

transformers passes a KV cache as `cache`, before 5.24 as `past_key_values`. A graph that somebody
else makes of a model with torch.compile is cut around what stores and attends: it records tensors,
and a cache of ours is no tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from inspect import signature
from threading import RLock
from typing import Any, Final, ParamSpec, TypeGuard, TypeVar

import torch
from torch import Tensor, nn
from transformers import Cache, GenerationMixin
from transformers.cache_utils import LinearAttentionLayer

from hybrid_kv.errors import BrokenCacheError, BusyError, ConfigError, UnsupportedModelError
from hybrid_kv.runtime import KVCache

CACHE_NAMES: Final = ("cache", "past_key_values")

CACHE_ARGUMENT: Final = next(
    name
    for name in CACHE_NAMES
    if name in signature(GenerationMixin.prepare_inputs_for_generation).parameters
)
"""The one of `CACHE_NAMES` that the installed transformers gives to its models."""


def passing(cache: Cache | None) -> dict[str, Any]:
    """Keyword arguments that pass `cache` to a model or to its `generate`."""
    return {CACHE_ARGUMENT: cache}


def passed(kwargs: Mapping[str, Any]) -> Any:
    """Cache among the keyword arguments of a forward, under either name."""
    return next((kwargs[name] for name in CACHE_NAMES if kwargs.get(name) is not None), None)


def renamed(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Keyword arguments of a forward, the cache under the name that the model takes.

    Models of transformers before 5.24 drop `cache` without a word.
    """
    return {CACHE_ARGUMENT if name in CACHE_NAMES else name: kwargs[name] for name in kwargs}


_P = ParamSpec("_P")
_R = TypeVar("_R")

REASON = (
    "a forward with a cache of hybrid_kv cannot be part of another graph; call torch.compile "
    "without fullgraph=True, or leave it out"
)


def pass_on(hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """The forward of a layer that is left out."""
    return hidden


@contextmanager
def replaced(forwards: Iterable[tuple[nn.Module, Callable[..., Any]]]) -> Iterator[None]:
    """A block in which each of some modules runs another forward, as an attribute of the instance.

    Then the forward is again what it was, an attribute of the instance or the class's own, unless
    somebody else has put one there meanwhile.
    """
    before: list[tuple[nn.Module, Callable[..., Any], Callable[..., Any] | None]] = []
    try:
        for module, forward in forwards:
            before.append((module, forward, module.__dict__.get("forward")))
            module.__dict__["forward"] = forward
        yield
    finally:
        for module, forward, previous in reversed(before):
            if module.__dict__.get("forward") is not forward:
                continue
            if previous is None:
                del module.__dict__["forward"]
            else:
                module.__dict__["forward"] = previous


def outside_graphs(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """`function`, which no graph has inside: it is called as it is, with all that it calls."""
    apart: Callable[_P, _R] = torch.compiler.disable(function, reason=REASON)
    return apart


def is_compiled(module: nn.Module) -> bool:
    """Whether torch.compile was told of a module or of its forward, which we may have wrapped."""
    forward = module.__dict__.get("forward")
    while forward is not None and not hasattr(forward, "_torchdynamo_orig_callable"):
        forward = getattr(forward, "__wrapped__", None)
    return forward is not None or module._compiled_call_impl is not None


def with_copy(mask: Tensor, here: Tensor) -> Tensor:
    """Hangs its values on the host on a mask that goes to the attention function."""
    mask.hybrid_kv_here = here  # type: ignore[attr-defined]
    return mask


def seen_on_host(mask: Tensor) -> Tensor | None:
    """A mask's values on the host; None where it has to be looked at, for which a device waits."""
    return getattr(mask, "hybrid_kv_here", None)


class ShownTokens:
    """The tokens of a cache that attention masks have shown: the others are padding.

    here: the mask [B, tokens seen] of the forward that runs, as bool on the host; None for none.
    """

    def __init__(self) -> None:
        self._shown: Tensor | None = None  # [B, tokens] bool on the host; None if all are shown
        self.here: Tensor | None = None
        self._mask: Tensor | None = None  # that was looked at last, and whether it hides nothing
        self._is_plain = True

    def accept(self, mask: Tensor | None, seen: int, new_tokens: int, *, is_tiered: bool) -> None:
        """Takes note of what a forward shows: its mask [B, tokens seen], or None for everything.

        Args:
            seen: tokens in the cache.
            is_tiered: whether tokens that are hidden are not stored.

        Raises:
            ConfigError: the mask has another length, or hides or shows other tokens than it did
                when they were cached: padding is not stored, what is stored cannot be hidden.
        """
        before = self._shown
        if mask is not None and mask.shape[1] != seen + new_tokens:
            raise ConfigError(
                f"attention_mask must cover the {seen} tokens in the cache and the {new_tokens} "
                f"new ones, got {mask.shape[1]}; extend the mask of the call before by ones"
            )
        # The one look of a forward at its mask: a device that computed it is waited for.
        here = self.here = None if mask is None else mask.bool().cpu()
        shown = None if here is None or bool(here.all()) else here
        if is_tiered and seen and (shown is not None or before is not None):
            _check_change(before, shown, seen)
        self._shown = shown

    def newest(self, mask: Tensor | None, new_tokens: int) -> Tensor | None:
        """Mask of the newest tokens, [B, T] bool, True for real ones; None if all are."""
        if mask is None:
            return None
        newest = mask[:, -new_tokens:].bool()
        if mask is not self._mask:  # one look per forward, not per layer
            here = seen_on_host(mask)
            flags = newest if here is None else here[:, -new_tokens:]
            self._mask, self._is_plain = mask, bool(flags.all())
        return None if self._is_plain else newest

    def end_forward(self) -> None:
        """Lets go of the masks of a forward."""
        self.here, self._mask, self._is_plain = None, None, True

    def cut(self, seen: int) -> None:
        """Forgets all but the first tokens of each row."""
        if self._shown is not None:
            self._shown = self._shown[:, :seen]

    def take_rows(self, rows: Tensor) -> None:
        """Row r goes on from row rows[r]."""
        if self._shown is not None:
            self._shown = self._shown[rows.cpu()]

    def forked(self) -> ShownTokens:
        """The shown tokens of a fork of the cache."""
        new = ShownTokens()
        new._shown = self._shown  # replaced, never written to
        return new


def _check_change(before: Tensor | None, now: Tensor | None, seen: int) -> None:
    """Raises ConfigError where the first `seen` tokens differ; None stands for all shown."""
    then = torch.ones_like(now) if before is None and now is not None else before
    now = torch.ones_like(then) if now is None and then is not None else now
    if then is None or now is None:
        return
    changed = (then[:, :seen] != now[:, :seen]).nonzero().tolist()
    if changed:
        row, token = changed[0]
        verb, was = ("hides", "shown") if then[row, token] else ("shows", "hidden")
        raise ConfigError(
            f"attention_mask {verb} token {token} of row {row}, which was {was} when it was "
            f"cached, and {len(changed) - 1} more; pass the mask of the call before, extended "
            "by ones (where none is passed, generate() hides every pad token of input_ids)"
        )


NOT_ATTACHED = (
    "this cache was given to a model that is not attached, or to a part of one; call the attached "
    "model itself"
)


class CacheState:
    """State that the layers of a cache share, and who may use it now. It knows none of them, nor
    does it know the cache, so that a cache which nobody refers to is freed at once.

    kv: what all layers store to and attend by. shown: see `ShownTokens`. is_unfinished: a
    forward runs, or has ended without putting the layers back in step. inexact_from: position of
    the first token whose entries come from a step that left entries unread; None for none.
    """

    def __init__(self, kv: KVCache, is_open: Callable[[], bool]) -> None:
        self.kv, self._is_open = kv, is_open
        self.in_forward = self.is_closed = self.is_unfinished = False
        self._lock = RLock()  # held by the thread that uses the cache
        self.shown = ShownTokens()
        self.inexact_from: int | None = None

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """A block in which nobody else uses the cache, which is whole.

        Raises:
            BusyError: another thread does, or this one in the middle of a forward.
            BrokenCacheError: a forward has ended in the middle and left it so.
        """
        with self.alone():
            self.require_idle()
            if self.is_unfinished:
                raise BrokenCacheError(
                    "this cache was interrupted in the middle of a forward, and what its layers "
                    "have lost since does not come back; call its reset(), or take a new one"
                )
            yield

    @contextmanager
    def alone(self) -> Iterator[None]:
        """A block in which no other thread uses the cache; raises BusyError where one does."""
        if not self._lock.acquire(blocking=False):
            raise BusyError(
                "this cache is in use in another thread, and serves one at a time; wait for that "
                "one, or fork the cache before"
            )
        try:
            yield
        finally:
            self._lock.release()

    def require_idle(self) -> None:
        """Raises BusyError in the middle of a forward."""
        if self.in_forward:
            raise BusyError(
                "this cache is in the middle of a forward in this thread; wait until that one has "
                "returned"
            )

    def require_open(self) -> None:
        """Raises ConfigError where our attention is off: the model would attend new keys only.

        Raises BusyError where a forward runs in another thread.
        """
        with self.alone():
            self.require_life()
        if not self.in_forward:
            raise ConfigError(NOT_ATTACHED)

    def require_life(self) -> None:
        """Raises ConfigError where the cache or the attachment that it belongs to has ended."""
        if not self._is_open():
            raise ConfigError(
                "this cache belongs to a model that was detached; use it inside its `with "
                "hybrid_kv.attach(...)` block"
            )
        if self.is_closed:
            raise ConfigError("this cache is closed and holds nothing any more; take a new one")

    def check_shapes(self, layer_idx: int, k: Tensor, v: Tensor) -> None:
        """Raises UnsupportedModelError where keys or values are not as the model's config says."""
        shape = next(shape for shape in self.kv.info.layers if shape.layer_idx == layer_idx)
        expected = (shape.num_kv_heads, shape.head_dim)
        for name, tensor in (("keys", k), ("values", v)):
            if (tensor.shape[1], tensor.shape[3]) != expected:
                raise UnsupportedModelError(
                    f"{name} of layer {layer_idx} must have {expected[0]} heads of {expected[1]} "
                    f"channels by the model's configuration, got {tensor.shape[1]} of "
                    f"{tensor.shape[3]}; use this model without hybrid_kv"
                )

    def forked(self, kv: KVCache) -> CacheState:
        """The state of a fork of the cache, which stores in `kv`."""
        new = CacheState(kv, self._is_open)
        new.shown, new.inexact_from = self.shown.forked(), self.inexact_from
        return new


STATE_KINDS = ("conv", "recurrent")


def is_fixed(layer: Any) -> TypeGuard[LinearAttentionLayer]:
    """Whether a layer holds a state of a fixed size and nothing else."""
    return type(layer) is LinearAttentionLayer


def is_written_in_place(layer: Any) -> bool:
    """Whether each further token overwrites a layer's states where they lie, of a fixed size."""
    return is_fixed(layer) and all(layer.has_previous_state.values()) and not layer.record_past


def states_of(layer: Any) -> dict[str, Tensor]:
    """The states that a layer holds, by kind and number; {} for one that holds none.

    They are the layer's own tensors, whose first axis is the row of the batch.
    """
    return {
        f"{kind}-{number}": state
        for kind in STATE_KINDS
        for number, state in getattr(layer, f"{kind}_states", {}).items()
        if state is not None
    }


def stuck_layers(layers: list[Any]) -> Iterator[int]:
    """The layers of a cache whose states cannot follow when its newest tokens are cropped."""
    for number, layer in enumerate(layers):
        records = getattr(layer, "record_past", False) and layer.is_croppable
        if hasattr(layer, "recurrent_states") and not records:
            yield number
