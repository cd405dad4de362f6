"""The error bar of each token of one call of `generate`; loaded where somebody asks for it."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import StoppingCriteria

from hybrid_kv.errors import ConfigError
from hybrid_kv.runtime import KVCache
from hybrid_kv.runtime.cache_context import stores_as_is
from hybrid_kv.watch.token_errors import HalfWatcher, TokenError, spread_of, why_unknown

_SEVERAL_AT_ONCE = ("assistant_model", "assistant_early_exit", "prompt_lookup_num_tokens")
"""Options of generate by which one forward decides on several tokens."""


class TokenErrorWatch(StoppingCriteria):
    """Takes the error of each token as it is chosen; a block during which it watches.

    A stopping criterion that never stops: transformers calls it once for every token, when the
    forward is over that gave its logits. Those are taken from the forward itself, for processors of
    logits see what others have changed.

    Args:
        options: of generate, ours taken out.

    Raises:
        ConfigError: the method cannot tell, or the options leave no single forward for a token.
    """

    def __init__(self, model: nn.Module, kv: KVCache, options: Mapping[str, Any]) -> None:
        _check_options(options)
        self._model, self._kv, self._halves = model, kv, HalfWatcher()
        self._is_known = _check_method(kv)
        self._half = 0.0
        self._logits: Tensor | None = None
        self._signals: list[tuple[float, Tensor]] = []

    def __enter__(self) -> TokenErrorWatch:
        self._thread = threading.get_ident()  # others may run the model as well
        self._hook = self._model.register_forward_hook(self._forward_ended)
        self._kv.watchers.append(self._halves)
        return self

    def __exit__(self, *error: object) -> None:
        self._hook.remove()
        self._kv.watchers.remove(self._halves)
        self._logits = None

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: Any) -> Tensor:
        assert self._logits is not None
        self._signals.append((self._half, spread_of(self._logits)))
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)

    def errors(self) -> list[TokenError]:
        """One for each token so far."""
        if not self._signals:
            return []
        halves, spreads = zip(*self._signals, strict=True)
        pairs = zip(halves, torch.stack(spreads).tolist(), strict=True)  # a device waits once
        return [TokenError.of(half, entropy, margin) for half, (entropy, margin) in pairs]

    def _forward_ended(self, module: nn.Module, args: Any, output: Any) -> None:
        if threading.get_ident() != self._thread:
            return
        if not self._is_known and all(layer.is_sealed for layer in self._kv.layers.values()):
            self._is_known = _check_method(self._kv)
        self._half, self._logits = self._halves.take(), output.logits[0, -1]


def _check_options(options: Mapping[str, Any]) -> None:
    if options.get("num_beams", 1) not in (1, None):
        raise ConfigError(
            f"token_errors must go with one sequence, got num_beams={options['num_beams']}; set "
            "num_beams=1 or leave token_errors out"
        )
    if options.get("guidance_scale") not in (None, 1, 1.0):
        raise ConfigError(
            "token_errors must go with the model's own logits, got guidance_scale="
            f"{options['guidance_scale']}, which mixes those of two prompts; leave out one of them"
        )
    for name in _SEVERAL_AT_ONCE:
        if options.get(name) is not None:
            raise ConfigError(
                f"token_errors must go with one forward for each token, got {name}, by which one "
                "forward checks several; leave out one of them"
            )


def _check_method(kv: KVCache) -> bool:
    """Whether the steps of all layers are known to tell their error.

    Before a prompt is there, a method is asked as far as it answers without one.

    Raises:
        ConfigError: those of a layer cannot.
    """
    if kv.config.prefill_error is not None:
        raise ConfigError(
            "token_errors must go with an exact prefill, which they are measured from, got "
            f"prefill_error={kv.config.prefill_error}; leave out one of them"
        )
    is_known, asked = True, kv.config.build()
    asked.open(kv.info)
    for layer_idx, layer in kv.layers.items():
        shape, method = layer.shape, layer.method if layer.is_sealed else asked.of_layer(layer_idx)
        try:
            place = layer.held.rows[0].placement if layer.is_sealed else method.seal(layer_idx, ())
            read = method.read(layer_idx, torch.zeros(1, shape.num_q_heads, 1, shape.head_dim))
        except Exception:
            if layer.is_sealed:
                raise
            is_known = False  # it looks at the prompt, and is asked again behind it
            continue
        assert place is not None
        why = why_unknown(place, read, as_is=stores_as_is(method))
        if why is not None:
            raise ConfigError(
                "token_errors must go with a method whose steps can tell their error, got "
                f"{kv.config.method}, which {why}; choose hybrid, retrieval_attention or full, or "
                "leave token_errors out"
            )
    return is_known
