"""The error bar of each token of one call of `generate`, and a limit to it; loaded when asked."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from math import inf
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, StoppingCriteria

from hybrid_kv.errors import ConfigError
from hybrid_kv.runtime import KVCache
from hybrid_kv.runtime.cache_context import stores_as_is
from hybrid_kv.watch.token_errors import HalfWatcher, TokenError, spreads_of, why_unknown

_SEVERAL_AT_ONCE = ("assistant_model", "assistant_early_exit", "prompt_lookup_num_tokens")
"""Options of generate by which one forward decides on several tokens."""

_ROUNDING_KL = {"bfloat16": 1.5e-3, "float16": 2.5e-5}
"""Mean KL of a token between a pass of 8 tokens and single steps, both by full attention: SmolLM2,
80 tokens behind 520 of a source text."""


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
        self._is_known = check_tells_errors(kv, "token_errors")
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
        self._signals.append((self._half, spreads_of(self._logits)))
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
            self._is_known = check_tells_errors(self._kv, "token_errors")
        (self._half,) = self._halves.take() or (0.0,)
        self._logits = output.logits[0, -1]


class TokenErrorLimit:
    """The `ErrorLimit` of exact decoding that trusts tokens whose expected KL is small enough.

    coming: error of each token that is chosen now; 0 for those that a pass has verified.

    Args:
        most: expected KL from full attention, nats, of a token that comes out unverified.

    Raises:
        ConfigError: the method cannot tell its errors, or the model rounds more than that.
    """

    def __init__(self, model: PreTrainedModel, kv: KVCache, most: float) -> None:
        dtype = str(model.dtype).partition(".")[2]
        if most < (least := _ROUNDING_KL.get(dtype, 0.0)):
            raise ConfigError(
                f"max_error must be at least {least:g} for a model in {dtype}, whose rounding "
                f"alone moves tokens so far, got {most:g}; take that, load it in float32, or write "
                "exact=True"
            )
        self._kv, self._most, self._halves = kv, most, HalfWatcher(every_token=True)
        self._is_known = check_tells_errors(kv, "max_error")
        self._drafts: list[TokenError] = []
        self.coming: list[TokenError] = []
        self._errors: list[TokenError] = []

    @contextmanager
    def drafting(self) -> Iterator[None]:
        self._drafts.clear()
        self._unread = self._left_unread()
        self._kv.watchers.append(self._halves)
        try:
            yield
        finally:
            self._kv.watchers.remove(self._halves)

    def allows(self, logits: Tensor) -> list[bool]:
        if not self._is_known:
            self._is_known = check_tells_errors(self._kv, "max_error")
        halves, spreads = self._halves.take(), spreads_of(logits).tolist()
        before, self._unread = self._unread, self._left_unread()
        if not halves:  # nothing is cold yet; but a step that nobody has seen is not trusted
            halves = [0.0 if self._unread == before else inf] * len(spreads)
        new = [TokenError.of(half, *spread) for half, spread in zip(halves, spreads, strict=False)]
        self._drafts += new
        return [one.kl <= self._most for one in new]

    def _left_unread(self) -> int:
        """Entries, over all steps so far."""
        return self._kv.work.visible - self._kv.work.attended

    def chosen_from(self, trusted: int, logits: Tensor) -> None:
        others = spreads_of(logits[trusted:]).tolist()
        verified = (TokenError.of(0.0, *spread) for spread in others)
        self.coming = [*self._drafts[:trusted], *verified]

    def came_out(self, count: int) -> None:
        self._errors += self.coming[:count]

    def errors(self) -> list[TokenError]:
        """One for each token so far; 0 for those that a pass has verified."""
        return list(self._errors)


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


def check_tells_errors(kv: KVCache, argument: str) -> bool:
    """Whether the steps of all layers are known to tell their error, for an argument that needs it.

    Before a prompt is there, a method is asked as far as it answers without one.

    Raises:
        ConfigError: those of a layer cannot.
    """
    if kv.config.prefill_error is not None:
        raise ConfigError(
            f"{argument} must go with an exact prefill, which errors are measured from, got "
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
                f"{argument} must go with a method whose steps can tell their error, got "
                f"{kv.config.method}, which {why}; choose hybrid, retrieval_attention or full, or "
                f"leave {argument} out"
            )
    return is_known
