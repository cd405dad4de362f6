"""Layer-major prefill: each decoder layer takes the whole prompt in chunks, in place.

A plain forward pass holds several full-length temporaries per layer; here only one hidden-state
tensor has full length and the layer's KV can leave before the next layer begins. Decoder layers
work token by token outside attention, and attention sees the layer's earlier chunks in the cache,
so the result is that of one pass; linear attention goes on from its state there. Works for any
model whose decoder layers have one of `_MIXERS`.

That tensor, 8 GiB at 1M tokens of Llama-3-8B, may lie in pinned host memory, from the token
embeddings to the head: each chunk goes to the weights and back, twice its bytes over the bus for
each layer, little beside attention to so many keys.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import wraps
from typing import TYPE_CHECKING, Any, Literal, TypeAlias
from weakref import ref

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hybrid_kv.errors import ConfigError
from hybrid_kv.models.cache_state import outside_graphs, pass_on, replaced
from hybrid_kv.models.hf_cache import TieredCache
from hybrid_kv.models.prompt_layers import MIN_TOKENS, widened, widened_bytes
from hybrid_kv.store.memory import allocate
from hybrid_kv.types import bytes_per_token

if TYPE_CHECKING:
    from hybrid_kv.models.last_rows import LastRows

_MIN_CHUNK, _MAX_CHUNK = 256, 4096
_Forward: TypeAlias = Callable[..., Any]
_Stack: TypeAlias = tuple[nn.Module, nn.ModuleList, list[nn.Module]]
_Way: TypeAlias = Callable[..., Any]
"""Serves a call of a module: takes it, its own forward, and what that one takes."""
StatesPlace: TypeAlias = Literal["auto", "device", "host"]

_MIXERS = ("self_attn", "linear_attn", "conv")
"""Modules of decoder layers that mix tokens, and go on from what the cache has of earlier chunks.
Not those of Mamba: Bamba's and Jamba's lose some of their state between two chunks."""
_SHARE = 2 / 3
"""Of the free device memory, for what has a prompt's full length; the rest is for chunks, for what
stays of layers that are done, and for what the allocator cannot use."""


def chunk_size(setting: int | Literal["auto"], num_tokens: int) -> int:
    """Tokens per chunk: the setting, or an eighth of the prompt between 256 and 4096."""
    if setting == "auto":
        return min(_MAX_CHUNK, max(_MIN_CHUNK, num_tokens // 8))
    return setting


class LayerMajorPrefill:
    """Wraps the forward methods of one model's decoder layers while a prompt passes.

    Args:
        states: where the hidden states of a prompt lie; "auto" is the host for those that would
            leave a GPU too little memory.

    Raises:
        ConfigError: they cannot lie on the host, which was asked for.
    """

    def __init__(
        self,
        model: nn.Module,
        chunk_tokens: int | Literal["auto"],
        states: StatesPlace = "auto",
    ) -> None:
        self._chunk_tokens, self._states = chunk_tokens, states
        self._ways: dict[nn.Module, _Way] = {}
        self._wrappers: dict[nn.Module, tuple[_Forward, _Forward]] = {}  # around which forward
        self._head: nn.Module | None = None
        self._cache: TieredCache | None = None  # of the prompt that passes
        self._home: torch.device | None = None  # of the weights, while states lie on the host
        self._in_place = True
        self._asked: int | None = None
        self._last: LastRows | None = None  # made when rows are asked for
        self._stack: _Stack | None = None  # where one is all that states pass
        self._model = ref(model)  # which may go
        stacks = decoder_stacks(model)
        table = token_table(model, stacks[0][0]) if len(stacks) == 1 else None
        if table is None and states == "host":
            raise ConfigError(
                "prefill_states must be 'auto' or 'device' for this model, got 'host': its hidden "
                "states do not begin in one table on one device; leave the setting out"
            )
        for owner, layers in stacks:
            for module in (*layers, *_between(owner, layers, table)):
                self._ways[module] = self._layer_forward
        if len(stacks) == 1:
            self._stack = *stacks[0], list(_between(*stacks[0], table))
        if table is not None:
            self._ways[table] = self._table_forward
            head = model.get_output_embeddings() if isinstance(model, PreTrainedModel) else None
            self._head = head if isinstance(head, nn.Module) else None

    @contextmanager
    def serving(
        self,
        cache: TieredCache,
        shape: tuple[int, int] | None,
        *,
        in_place: bool = True,
        asked: int | None = None,
    ) -> Iterator[None]:
        """A block in which a forward with a cache runs; one of few tokens meets nothing of this.

        Args:
            shape: [B, T] of the new tokens; None where it is not known.
            in_place: chunks may be written over the hidden states they came from.
            asked: the last rows of the hidden states that are needed at the end; None for all.
        """
        if shape is not None and not self._changes(*shape):
            yield
            return
        self._cache, self._home, self._in_place, self._asked = cache, None, in_place, asked
        try:
            with self._bringing_home(), replaced(self._wrapped()):
                yield
        finally:
            self._cache = self._home = None

    def _changes(self, rows: int, tokens: int) -> bool:
        """Whether layers take so many new tokens in chunks, or are widened for them."""
        return tokens > chunk_size(self._chunk_tokens, tokens) or rows * tokens >= MIN_TOKENS

    def _wrapped(self) -> Iterator[tuple[nn.Module, _Forward]]:
        """The wrappers, around the forwards that the modules have now."""
        for module, way in self._ways.items():
            # An instance attribute may be there (accelerate's hooks): it is what we call.
            inner = module.forward
            if inner is pass_on:
                continue
            known = self._wrappers.get(module)
            if known is None or known[0] != inner:
                known = self._wrappers[module] = inner, self._wrap(module, inner, way)
            yield module, known[1]

    def _wrap(self, module: nn.Module, inner: _Forward, way: _Way) -> _Forward:
        apart = outside_graphs(way)

        @wraps(inner, updated=())
        def forward(x: Tensor, *args: Any, **kwargs: Any) -> Any:
            if self._cache is None or (torch.is_grad_enabled() and x.requires_grad):
                return inner(x, *args, **kwargs)
            return apart(module, inner, x, *args, **kwargs)

        return forward

    @contextmanager
    def _bringing_home(self) -> Iterator[None]:
        if self._head is None:
            yield
            return
        # A hook leaves the head's forward to those who multiply few tokens by its large matrix.
        hook = self._head.register_forward_pre_hook(self._bring_home)
        try:
            yield
        finally:
            hook.remove()

    # What is wrapped ----------------------------------------------------------------------------

    def _table_forward(
        self, table: nn.Embedding, inner: _Forward, ids: Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        """Token embeddings; on the host where the prompt's hidden states are to lie there."""
        total = ids.shape[-1]
        size = chunk_size(self._chunk_tokens, total)
        if ids.ndim != 2 or total <= size or not self._go_to_host(ids, table.weight):
            return inner(ids, *args, **kwargs)
        self._home = home = ids.device
        states: Tensor | None = None
        for start in range(0, total, size):
            piece = inner(ids[:, start : start + size], *args, **kwargs)
            states = host_states(piece, total) if states is None else states
            put(states, start, piece)
        arrived(home)
        return states

    def _go_to_host(self, ids: Tensor, weight: Tensor) -> bool:
        if self._states != "auto" or ids.device.type != "cuda" or self._cache is None:
            return self._states == "host"
        from hybrid_kv.ops.pinned import free_bytes

        layers = self._cache.kv.info.layers
        # Where every layer slides, none has KV of ours.
        layer_kv = max((bytes_per_token(shape, weight.dtype) for shape in layers), default=0)
        states, free = weight[0].nbytes * ids.numel(), free_bytes(ids.device)
        return lie_on_host(self._states, states, layer_kv * ids.numel(), free)

    def _layer_forward(
        self, module: nn.Module, inner: _Forward, hidden: Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        size = chunk_size(self._chunk_tokens, hidden.shape[1])
        with (
            self._rows_asked(module, hidden.shape[1]),  # what it takes over need not be widened
            widened(module, hidden.shape[0] * hidden.shape[1]),
        ):
            if hidden.shape[1] <= size:
                return inner(hidden, *args, **kwargs)
            return self._in_chunks(module, inner, size, hidden, args, kwargs)

    def _rows_asked(self, module: nn.Module, num_tokens: int) -> AbstractContextManager[None]:
        if self._asked is None or self._stack is None or module is not self._stack[1][-1]:
            return nullcontext()
        if self._last is None:
            from hybrid_kv.models.last_rows import LastRows

            model = self._model()
            assert model is not None  # whose forward this is
            self._last = LastRows(model, *self._stack)
        assert self._cache is not None
        attention = getattr(module, "self_attn", None)
        layer = self._cache.kv.layers.get(getattr(attention, "layer_idx", -1))
        if layer is not None and layer.is_sealed:
            layer = None
        return self._last.only(self._asked, num_tokens, layer)

    def _bring_home(self, head: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """Before the head: hidden states that lie on the host go to where its weights are."""
        return None if self._home is None else (bring(args[0], self._home), *args[1:])

    def _in_chunks(
        self,
        module: nn.Module,
        inner: _Forward,
        size: int,
        hidden: Tensor,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        total, home = hidden.shape[1], self._home
        attends = hasattr(module, "self_attn")
        target = hidden if self._in_place else torch.empty_like(hidden)
        result: Any = None
        others: list[list[Any]] = []  # by chunk its length, and what it gives beside hidden states
        with self._prompt_in_pieces(module):
            for start in range(0, total, size):
                stop = min(total, start + size)
                cut = _slice((hidden, *args), total, start, stop)
                named = {name: _slice(x, total, start, stop) for name, x in kwargs.items()}
                if attends and "attention_mask" in kwargs:
                    named["attention_mask"] = _mask(kwargs["attention_mask"], total, stop)
                if home is not None:
                    cut = bring(cut, home)
                    named = {name: bring(x, home) for name, x in named.items()}
                result = inner(*cut, **named)
                out, *more = result if isinstance(result, tuple) else (result,)
                others.append([stop - start, *more])
                if home is not None:
                    put(target, start, out)
                    continue
                if start == 0 and out.device != target.device:  # what follows is there as well
                    target = out.new_empty(target.shape)
                target[:, start:stop] = out
        if home is not None:
            arrived(home)
        lengths, *parts = zip(*others, strict=True)
        more = [_joined(part, lengths) for part in parts]
        return (target, *more) if isinstance(result, tuple) else target

    @contextmanager
    def _prompt_in_pieces(self, module: nn.Module) -> Iterator[None]:
        """Keeps a layer open between its chunks, then seals it: its KV may leave now."""
        assert self._cache is not None
        kv = self._cache.kv
        before, kv.more_prompt = kv.more_prompt, True
        try:
            yield
        finally:
            kv.more_prompt = before
        layer_idx = getattr(getattr(module, "self_attn", None), "layer_idx", None)
        if layer_idx is not None and not before:  # else this is a piece of a longer prompt
            # States go to the host where memory is short: then no two layers' KV shares it.
            kv.layers.seal_if_open(layer_idx, wait=self._home is not None)

    def widened_bytes(self, num_tokens: int) -> int:
        """Bytes of the largest layer that is widened while so many tokens pass; 0 if none is."""
        if num_tokens < MIN_TOKENS:
            return 0
        return max((widened_bytes(module, num_tokens) for module in self._ways), default=0)


def decoder_stacks(model: nn.Module) -> list[tuple[nn.Module, nn.ModuleList]]:
    """Each list of decoder layers with the module that owns it."""
    return [
        (owner, child)
        for owner in model.modules()
        for child in owner.children()
        if isinstance(child, nn.ModuleList)
        and len(child)
        and all(any(hasattr(layer, mixer) for mixer in _MIXERS) for layer in child)
    ]


def _between(
    owner: nn.Module, layers: nn.ModuleList, table: nn.Embedding | None
) -> Iterator[nn.Module]:
    """The other modules that hidden states pass: the last norm, whatever it is called."""
    for name, child in owner.named_children():
        weighs = next(child.parameters(), None) is not None
        if name == "norm" or (table is not None and weighs and child not in (layers, table)):
            yield child


def _mask(value: Any, total: int, stop: int) -> Any:
    """The chunk's share of an attention's mask [B, tokens seen]: later chunks do not exist yet."""
    if not isinstance(value, Tensor) or value.ndim < 2:
        return value
    return value[:, : value.shape[1] - (total - stop)]


def _slice(value: Any, total: int, start: int, stop: int) -> Any:
    """The chunk's share of an argument: what runs along the sequence is cut, the rest passes."""
    if isinstance(value, tuple):
        return tuple(_slice(item, total, start, stop) for item in value)
    if not isinstance(value, Tensor) or value.ndim < 2:
        return value
    # Mostly axis 1; M-RoPE positions are [3, B, T], factors on queries [1, 1, T, 1].
    axis = next((axis for axis in range(1, value.ndim) if value.shape[axis] == total), None)
    return value if axis is None else value.narrow(axis, start, stop - start)


def _joined(parts: tuple[Any, ...], lengths: tuple[int, ...]) -> Any:
    """An output of all chunks: what runs along the sequence is joined, else the last chunk's."""
    pairs = zip(parts, lengths, strict=True)
    runs = all(isinstance(x, Tensor) and x.ndim > 1 and x.shape[1] == count for x, count in pairs)
    return torch.cat(parts, 1) if runs else parts[-1]


# Where a prompt's hidden states wait between two layers -------------------------------------------


def lie_on_host(setting: StatesPlace, states: int, layer_kv: int, free: int) -> bool:
    """Whether a prompt's hidden states lie in host memory, and a layer leaves before the next.

    Args:
        states: bytes of the hidden states. layer_kv: of K and V of the widest layer, of which
            there are two where layers overlap. free: of the device, beside the weights.
    """
    return setting == "host" or (setting == "auto" and states + 2 * layer_kv > _SHARE * free)


def host_states(like: Tensor, num_tokens: int) -> Tensor:
    """An empty tensor [B, num_tokens, width] in host memory for pieces like [B, T, width].

    Raises:
        CapacityError: host memory does not suffice.
    """
    rows, _, width = like.shape
    size, host = (rows, num_tokens, width), torch.device("cpu")
    return allocate(size, like.dtype, host, pinned=like.device.type == "cuda")


def bring(value: Any, device: torch.device) -> Any:
    """Tensors, those in tuples too, on `device`; all else as it is."""
    if isinstance(value, tuple):
        return tuple(bring(item, device) for item in value)
    # Copies and what reads them are in the order of one stream.
    return value.to(device, non_blocking=True) if isinstance(value, Tensor) else value


def put(states: Tensor, start: int, piece: Tensor) -> None:
    """Writes a piece [B, T, width] to host states; they are there after `arrived`."""
    states[:, start : start + piece.shape[1]].copy_(piece, non_blocking=True)


def arrived(device: torch.device) -> None:
    """Returns when all that was put has arrived from `device`: the host may read it."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def token_table(model: nn.Module, owner: nn.Module) -> nn.Embedding | None:
    """The embeddings that begin the only stack of decoder layers, from which states can go to the
    host; None where something is added to them, or the weights lie on several devices.
    """
    tables = [child for child in owner.children() if isinstance(child, nn.Embedding)]
    devices = {weight.device for weight in model.parameters()}
    if not isinstance(model, PreTrainedModel) or len(tables) != 1 or len(devices) != 1:
        return None
    return tables[0] if tables[0] is model.get_input_embeddings() else None
