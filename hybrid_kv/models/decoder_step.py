"""Decode steps on the CPU: what a decoder layer does around its attention, in two engine calls.

A layer of a small model waits for Python: fifty operations of a few microseconds each. For layers
whose code is known, norms, products, rotation and feed-forward of a few tokens are computed by the
engine, from packed or 16-bit weights. The model is never touched: while a step passes, a layer's
`forward` is ours. It is left alone where anybody may see or change what lies inside of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from operator import is_
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling
from torch.nn.modules import module as torch_module
from torch.utils.hooks import RemovableHandle
from transformers.activations import GELUTanh, SiLUActivation

from hybrid_kv.models.cache_state import CACHE_NAMES, is_compiled, passed, replaced
from hybrid_kv.models.few_tokens import is_small
from hybrid_kv.models.hf_attention import hybrid_attention
from hybrid_kv.models.hf_cache import ServedCache
from hybrid_kv.models.last_rows import is_heard
from hybrid_kv.models.packed_experts import activation_of
from hybrid_kv.models.packed_linear import PackedLinear
from hybrid_kv.models.support import has_own_forward
from hybrid_kv.ops.native.bindings import NORM, NORM_CENTRED, NORM_ONCE
from hybrid_kv.ops.native.decoder import BoundDecoder, DecoderWeights, Matrix, Norm
from hybrid_kv.ops.native.library import Pool, engine_state, pool_here
from hybrid_kv.ops.native.linear import MAX_TOKENS, PLAIN, multiplies

_LINEAR = {
    "self_attn.q_proj": ("query",),
    "self_attn.k_proj": ("key",),
    "self_attn.v_proj": ("value",),
    "self_attn.o_proj": ("output",),
    "mlp.gate_proj": ("gate",),
    "mlp.up_proj": ("up",),
    "mlp.down_proj": ("down",),
}
_OF_ATTENTION = {path: names for path, names in _LINEAR.items() if path.startswith("self_attn.")}
_FUSED = {
    "self_attn.qkv_proj": ("query", "key", "value"),
    "self_attn.o_proj": ("output",),
    "mlp.gate_up_proj": ("gate", "up"),
    "mlp.down_proj": ("down",),
}
_BEFORE = {"before_attention": "input_layernorm", "before_feed_forward": "post_attention_layernorm"}
_AROUND = {
    "before_attention": "input_layernorm",
    "after_attention": "post_attention_layernorm",
    "before_feed_forward": "pre_feedforward_layernorm",
    "after_feed_forward": "post_feedforward_layernorm",
}


class _Family(NamedTuple):
    """Decoder layers of transformers that compute what `hybrid_kv_decoder.h` says.

    norms: modules of a layer, by their names in `DecoderWeights`. linear: the names there of what
    each linear layer computes, in the order of its outputs. norm_form: as of `Norm`.
    epsilon: the attribute of a norm that holds it. activation: that of a feed-forward.
    dropouts: modules of a layer that act in training alone. has_softcap: attention scores may be
    capped. partial: a part of each head may be rotated. has_experts: the feed-forward is called as
    it is, and the norm before it. has_sinks: heads have sinks, and cosines and sines are those of
    half of a head, which the other half shares. home: name of their module; None for that of their
    classes.
    """

    norms: dict[str, str] = _BEFORE
    linear: Mapping[str, tuple[str, ...]] = _LINEAR
    norm_form: int = NORM
    epsilon: str = "variance_epsilon"
    activation: str = "act_fn"
    dropouts: tuple[str, ...] = ()
    has_softcap: bool = False
    partial: bool = False
    has_experts: bool = False
    has_sinks: bool = False
    home: str | None = None


_LIKE_LLAMA = "Llama", "Mistral", "Ministral", "Qwen2", "Qwen3", "Granite", "SmolLM3"
_MIXTURE = _Family({"before_attention": "input_layernorm"}, linear=_OF_ATTENTION, has_experts=True)
_FAMILIES = {
    **dict.fromkeys(_LIKE_LLAMA, _Family()),
    "Phi3": _Family(
        linear=_FUSED,
        activation="activation_fn",
        dropouts=("resid_attn_dropout", "resid_mlp_dropout"),
        partial=True,
    ),
    "Gemma": _Family(norm_form=NORM_CENTRED, epsilon="eps"),
    "Gemma2": _Family(_AROUND, norm_form=NORM_CENTRED, epsilon="eps", has_softcap=True),
    "Gemma3": _Family(_AROUND, norm_form=NORM_CENTRED, epsilon="eps"),
    "Mixtral": _MIXTURE,
    "GptOss": _MIXTURE._replace(home="gpt_oss", norm_form=NORM_ONCE, has_sinks=True),
    "Qwen2Moe": _MIXTURE._replace(home="qwen2_moe"),
    "Qwen3Moe": _MIXTURE._replace(home="qwen3_moe"),
}
"""By the name that their classes have in front of `DecoderLayer`, `Attention`, `MLP`, `RMSNorm`."""
_PLAIN_PARTS = nn.Linear, nn.Dropout, nn.SiLU, SiLUActivation, GELUTanh
_OF_ALL = ("forward", "_compiled_call_impl", "training", "_modules", "_parameters")
_OF_SOME = (
    *("variance_epsilon", "eps", "_norm", "act", "exact", "use_rope", "residual_multiplier"),
)
"""Attributes of a layer and its parts that change what they compute: those of every module, and
those that some have.
"""
_INPUTS = {
    *("attention_mask", "position_ids", "use_cache", "position_embeddings", *CACHE_NAMES),
    "output_router_logits",  # which are recorded where experts are called
}
"""Arguments that such a layer takes beside its hidden states."""

_REST = 64
"""Steps for which a layer that the engine would not compute faster keeps its own forward."""

Pays: TypeAlias = Callable[[Tensor, int], bool]
"""Whether the engine multiplies a 16-bit weight [N, K] with so many tokens faster than torch."""


class DecoderSteps:
    """The decoder layers of a model, and the block in which the engine may compute them.

    Args:
        pays: makes the trial where there is none.
    """

    def __init__(self, model: nn.Module, pays: Pays) -> None:
        able = engine_state().isa is not None
        self._layers = [DecoderStep(m, pays) for m in model.modules() if able and _family_of(m)]
        self._classes = {type(part) for one in self._layers for part in _parts(one.layer)}
        self._classes |= {PackedLinear, *_PLAIN_PARTS}  # which may come to be parts
        self._functions: list[Any] = []  # of these, as of the last step
        self._hooks = -1  # that were ever registered in this process, as of the last step

    @contextmanager
    def served(self, num_tokens: int) -> Iterator[None]:
        """A block in which a forward of so many tokens, over all rows, takes what is fastest."""
        may = 0 < num_tokens <= MAX_TOKENS and not torch.is_grad_enabled()
        if not (may and self._layers) or torch.is_autocast_enabled("cpu") or _is_watched():
            yield
            return
        self._note_changes()
        pool = pool_here()
        ready = [one for one in self._layers if one.begin(num_tokens, pool)]
        with replaced((one.layer, one) for one in ready):
            yield

    def _note_changes(self) -> None:
        """Layers are bound anew where a class was changed, and looked at where a hook was
        registered anywhere.
        """
        functions = [(one.forward, getattr(one, "_norm", None)) for one in self._classes]
        hooks = RemovableHandle.next_id
        if functions != self._functions or hooks != self._hooks:
            for layer in self._layers:
                layer.is_free = False
                if functions != self._functions:
                    layer.seen = None
            self._functions, self._hooks = functions, hooks


class _Seen:
    """A layer and its parts as they were looked at. Whether they are still so is asked in each
    step, of things that have left the caches meanwhile: it touches few, and loops without Python.
    """

    def __init__(self, layer: nn.Module, parts: list[nn.Module]) -> None:
        found: list[tuple[dict[str, Any], str]] = []
        for module in (layer, *parts):
            own = module.__dict__
            names = [one for one in _OF_SOME if one in own or hasattr(type(module), one)]
            found += [(own, name) for name in (*_OF_ALL, *names)]
            found += [
                (among, name) for among in map(own.__getitem__, _OF_ALL[-2:]) for name in among
            ]
        self._dicts, self._names = zip(*found, strict=True)
        self._modules = layer, *parts
        self._things = self._read()
        self._tensors = [one for one in self._things if type(one) in PLAIN and one.is_cpu]
        self._layouts = self._read_layouts()

    def is_so(self) -> bool:
        """Whether nothing was exchanged."""
        return all(map(is_, self._read(), self._things)) and self._read_layouts() == self._layouts

    def _read(self) -> list[Any]:
        return [*map(dict.get, self._dicts, self._names), *map(type, self._modules)]

    def _read_layouts(self) -> list[Any]:
        # `.data = ` exchanges what a parameter holds.
        return [(one.data_ptr(), one.dtype, one.shape, one.stride()) for one in self._tensors]


class DecoderStep:
    """The forward of a decoder layer while a step passes."""

    def __init__(self, layer: nn.Module, pays: Pays) -> None:
        self.layer, self._pays = layer, pays
        self.seen: _Seen | None = None  # as it is bound
        self.is_free = False  # nobody listened when it was last looked at
        self._by_tokens: dict[int, BoundDecoder | None] = {}
        self._rest = 0  # steps until a layer that is refused is looked at again
        self._bound: BoundDecoder | None = None  # of the step that passes
        self._pool: Pool | None = None
        self._has_softcap, self._rotates, self._has_sinks = False, True, False

    def begin(self, num_tokens: int, pool: Pool | None) -> bool:
        """Whether the engine computes this layer in a step of so many tokens, by these threads."""
        if self.is_free and self._rest and self._by_tokens.get(num_tokens, self) is None:
            self._rest -= 1
            return False
        self._rest = _REST
        is_same = self.seen is not None and self.seen.is_so()
        if not (is_same and self.is_free):
            if not is_same:  # nor are weights kept that have been exchanged
                self._by_tokens.clear()
                self.seen = self._bound = None
            parts = _parts(self.layer)
            self.is_free = self._nobody_listens(parts)
            if not self.is_free:
                return False
            self.seen = self.seen or _Seen(self.layer, parts)
        if num_tokens not in self._by_tokens:
            self._by_tokens[num_tokens] = self._bind(num_tokens)
        self._bound, self._pool = self._by_tokens[num_tokens], pool
        return self._bound is not None

    def __call__(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """The layer's output [B, T, hidden] of hidden states, which attend to the cache."""
        bound, cache = self._bound, passed(kwargs)
        rotation = kwargs.get("position_embeddings") if self._rotates else ()
        if self._has_sinks and rotation is not None:
            rotation = [torch.cat((half, half), dim=-1) for half in rotation]
        if (
            bound is None
            or is_dynamo_compiling()  # of what the user compiled around it
            or args
            or not kwargs.keys() <= _INPUTS
            or not isinstance(cache, ServedCache)  # as of another thread
            or not bound.takes(hidden_states, rotation)
            or torch.is_grad_enabled()
        ):
            own: Tensor = type(self.layer).forward(self.layer, hidden_states, *args, **kwargs)
            return own
        assert rotation is not None
        rows, tokens = hidden_states.shape[:2]
        new = bound.inputs(hidden_states, rotation, self._pool)
        q, k, v = (one.view(rows, tokens, *one.shape[1:]).transpose(1, 2) for one in new)
        attention: Any = self.layer.self_attn
        k, v = cache.update(k, v, attention.layer_idx)
        mask = kwargs.get("attention_mask")
        softcap = attention.attn_logit_softcapping if self._has_softcap else None
        attended, _ = hybrid_attention(
            *(attention, q, k, v, mask),
            scaling=attention.scaling,
            softcap=softcap,
            s_aux=attention.sinks if self._has_sinks else None,
        )
        out = bound.outputs(hidden_states, attended, self._pool)
        if bound.has_feed_forward:
            return out
        layer: Any = self.layer
        added: Any = layer.mlp(layer.post_attention_layernorm(out))
        whole: Tensor = out + (added[0] if isinstance(added, tuple) else added)  # or with routing
        return whole

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy of the layer, or a pickle, made while a step passes has its own forward."""
        return partial, (type(self.layer).forward, self.layer)

    def _nobody_listens(self, parts: list[nn.Module]) -> bool:
        """Whether nobody listens to a part, or has given it or the layer a forward."""
        layer = self.layer
        return not (
            "forward" in layer.__dict__
            or layer.training
            or is_compiled(layer)
            or any(
                "forward" in part.__dict__
                or part._compiled_call_impl is not None
                or part._forward_pre_hooks
                or is_heard(part)
                for part in parts
            )
        )

    def _bind(self, num_tokens: int) -> BoundDecoder | None:
        """The engine's calls with the weights as they are; None where it cannot have them, or would
        not be faster.
        """
        layer: Any = self.layer
        family = _family_of(layer)
        if (
            family is None
            or any(getattr(layer, one).training for one in family.dropouts)
            or not all(has_own_forward(type(part)) for part in _parts(layer))
        ):
            return None
        attention, feed_forward = layer.self_attn, layer.mlp
        dtype: torch.dtype = layer.input_layernorm.weight.dtype
        norms = {name: getattr(layer, own) for name, own in family.norms.items()}
        norms |= {
            "of_queries": getattr(attention, "q_norm", None),
            "of_keys": getattr(attention, "k_norm", None),
        }
        weights: dict[str, Any] = {
            name: norm and Norm(norm.weight, getattr(norm, family.epsilon), family.norm_form)
            for name, norm in norms.items()
        }
        if any(one and not _is_plain(one.weight, dtype) for one in weights.values()):
            return None
        linear: list[Any] = [layer.get_submodule(path) for path in family.linear]
        for module, names in zip(linear, family.linear.values(), strict=True):
            matrix = self._matrix(module, dtype, num_tokens)
            if matrix is None:
                return None
            shares = [attention.num_key_value_groups if one == "query" else 1 for one in names]
            weights.update(zip(names, matrix.parts(shares), strict=True))
        if all(type(one) is nn.Linear and is_small(one.weight) for one in linear):
            return None  # of which no trial tells
        if not family.has_experts:
            weights["activation"] = activation_of(getattr(feed_forward, family.activation))
        weights["residual_scale"] = getattr(layer, "residual_multiplier", 1.0)
        if weights["residual_scale"] == 0:
            return None
        self._has_softcap, self._has_sinks = family.has_softcap, family.has_sinks
        self._rotates = getattr(attention, "use_rope", True)
        return BoundDecoder(DecoderWeights(**weights), attention.head_dim, partial=family.partial)

    def _matrix(self, module: nn.Module, dtype: torch.dtype, num_tokens: int) -> Matrix | None:
        """A linear layer as the engine takes it; None where it does not, or torch is faster."""
        bias = module._parameters.get("bias")
        if bias is not None and not _is_plain(bias, dtype):
            return None
        if type(module) is PackedLinear:
            plain = module.columns_in is None and module.weight.is_cpu
            return Matrix(module.packed, bias, module.exact) if plain else None
        if type(module) is not nn.Linear:
            return None
        weight = module.weight
        if type(weight) not in PLAIN or weight.dtype != dtype or weight.dim() != 2:
            return None
        takes = multiplies(weight.new_empty((num_tokens, weight.shape[1])), weight, bias)
        return Matrix(weight, bias) if takes and self._pays(weight, num_tokens) else None


def _parts(layer: nn.Module) -> list[nn.Module]:
    """Modules inside of a layer, but for those of linear layers and norms, and for experts."""
    left = {"mlp", "post_attention_layernorm"} if _has_experts(layer) else ()
    own = layer._modules.items()
    inner = [part for name, part in own if part is not None and name not in left]
    return inner + [one for part in inner for one in part._modules.values() if one is not None]


def _has_experts(layer: nn.Module) -> bool:
    family = _FAMILIES.get(type(layer).__name__.removesuffix("DecoderLayer"))
    return family is not None and family.has_experts


def _is_plain(tensor: Tensor, dtype: torch.dtype) -> bool:
    return (
        type(tensor) in PLAIN and tensor.is_cpu and tensor.dtype == dtype and tensor.is_contiguous()
    )


def _family_of(layer: nn.Module) -> _Family | None:
    """Family of a layer of which all parts are of transformers' classes, with their forwards."""
    name = type(layer).__name__.removesuffix("DecoderLayer")
    family = _FAMILIES.get(name)
    if family is None:
        return None
    attention, feed_forward = getattr(layer, "self_attn", None), getattr(layer, "mlp", None)
    norms = [getattr(layer, one, None) for one in family.norms.values()]
    norms += [getattr(attention, one) for one in ("q_norm", "k_norm") if hasattr(attention, one)]
    named: list[tuple[Any, str]] = [(norm, "RMSNorm") for norm in norms]
    named += [(layer, "DecoderLayer"), (attention, "Attention")]
    named += [] if family.has_experts else [(feed_forward, "MLP")]
    own_name = family.home or name.lower()
    home = f"transformers.models.{own_name}.modeling_{own_name}"
    if any(type(getattr(layer, one, None)) is not nn.Dropout for one in family.dropouts):
        return None
    has_activation = activation_of(getattr(feed_forward, family.activation, None)) is not None
    is_known = (family.has_experts or has_activation) and all(
        (type(part).__module__, type(part).__name__) == (home, name + kind)
        # Else somebody has put another one there.
        and all(
            own.__module__ == home
            for own in (type(part).forward, getattr(type(part), "_norm", None))
            if own is not None
        )
        and "_norm" not in part.__dict__
        for part, kind in named
    )
    return family if is_known else None


def _is_watched() -> bool:
    return bool(torch_module._global_forward_hooks or torch_module._global_forward_pre_hooks)
