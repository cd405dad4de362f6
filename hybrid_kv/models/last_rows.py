"""The last decoder layer while a prompt passes, for the rows that are asked for.

Behind the keys and values of the last layer no token is looked at by another one. Where only the
logits of the last tokens are asked for (`logits_to_keep`), the output projection and the
feed-forward of that layer take their rows alone, and so does attention where nobody asks for the
weights of all queries; these are made for their rows alone where nobody learns from them. The
others get zeros, and reach the last norm and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, TypeGuard

from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from transformers.utils import output_capturing

from hybrid_kv.models.cache_state import is_compiled, replaced
from hybrid_kv.runtime.layer_prompt import AskedRows

if TYPE_CHECKING:
    from hybrid_kv.runtime.layer import LayerCache

_NAMES = ("mlp", "feed_forward")
"""Of the feed-forward of a decoder layer."""
_OUTPUTS_NAME, _QUERIES_NAME = "o_proj", "q_proj"
"""Of an attention's projections that give each row for itself."""


class LastRows:
    """A model's last decoder layer, while a prompt passes.

    It is left alone where somebody may see the other rows: with hooks on that layer or on what its
    output passes. So it is where the user has compiled it or a part of it: each prompt would bring
    graphs. So is a part with a forward of others, or one that does not give one tensor.

    Args:
        owner: whose list `layers` is. between: modules that the output of the last layer passes.
    """

    def __init__(
        self,
        model: nn.Module,
        owner: nn.Module,
        layers: nn.ModuleList,
        between: Sequence[nn.Module],
    ) -> None:
        self.layer = layers[-1]
        attention = getattr(self.layer, "self_attn", None)
        found = [getattr(self.layer, name, None) for name in _NAMES]
        parts = [next(filter(_is_module, found), None), getattr(attention, _OUTPUTS_NAME, None)]
        self._parts = [part for part in parts if _is_module(part)]
        self._queries = getattr(attention, _QUERIES_NAME, None)
        around = [m for m in model.modules() if m is not model and _holds(m, owner)]
        self._seeing = [*around, *between]

    @contextmanager
    def only(self, asked: int, num_tokens: int, held: LayerCache | None) -> Iterator[None]:
        """A block in which the layer takes a prompt, at once or in chunks.

        Args:
            asked: the last rows that are needed.
            held: its entries, whose prompt has not ended; None where they are not tiered.
        """
        if self._is_seen() or any(map(is_compiled, self.layer.modules())):
            yield
            return
        parts = list(self._parts)
        if held is not None and not _looks_at_queries(held) and _is_module(self._queries):
            parts.append(self._queries)
        own = [part for part in parts if "forward" not in part.__dict__]
        ways = [partial(_of_last, part.forward, AskedRows(asked, num_tokens)) for part in own]
        with replaced(zip(own, ways, strict=True)), _attending(held, asked, num_tokens):
            yield

    def _is_seen(self) -> bool:
        if torch_module._global_forward_hooks or torch_module._global_forward_pre_hooks:
            return True
        seeing = (*self._seeing, *self.layer.modules())
        return any(is_heard(m) or m._forward_pre_hooks or hasattr(m, "_hf_hook") for m in seeing)


def is_heard(module: nn.Module) -> bool:
    """Whether somebody hears what a module gives. Hooks stay where transformers once returned what
    layers compute, and hear nothing while it does not.
    """
    hooks = module._forward_hooks
    if not hooks:
        return False
    home, collector = (
        output_capturing.__name__,
        getattr(output_capturing, "_active_collector", None),
    )
    own = all(getattr(hook, "__module__", None) == home for hook in hooks.values())
    return not own or collector is None or bool(collector.get())


def _looks_at_queries(held: LayerCache) -> bool:
    """Whether somebody wants evidence of the prompt, or chooses blocks by its queries."""
    return held.means.prefill_error is not None or (held.method.needs | held.means.watched).queries


@contextmanager
def _attending(held: LayerCache | None, asked: int, num_tokens: int) -> Iterator[None]:
    """A block in which a layer attends for the last rows alone."""
    if held is None:
        yield
        return
    prompt = held.prompt
    prompt.asked = AskedRows(asked, num_tokens)
    try:
        yield
    finally:
        prompt.asked = None


def _of_last(
    inner: Callable[..., Any], rows: AskedRows, x: Tensor, *args: Any, **kwargs: Any
) -> Any:
    """A module's output for rows that are asked for, and zeros for the others."""
    if args or kwargs or x.ndim != 3:
        return inner(x, *args, **kwargs)
    count = x.shape[1]
    wanted = max(1, rows.among(count))  # one says what comes out
    if wanted == count:
        return inner(x)
    some = inner(x[:, -wanted:])
    if not isinstance(some, Tensor) or some.shape[:2] != (x.shape[0], wanted):
        return inner(x)
    out = some.new_zeros(x.shape[0], count, *some.shape[2:])
    out[:, -wanted:] = some
    return out


def _is_module(part: object) -> TypeGuard[nn.Module]:
    return isinstance(part, nn.Module)


def _holds(module: nn.Module, part: nn.Module) -> bool:
    return any(found is part for found in module.modules())
