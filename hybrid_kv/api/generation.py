"""The result of one generation, and the objects that watch it happen."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from queue import SimpleQueue
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase, StoppingCriteria
from transformers.generation.streamers import BaseStreamer

from hybrid_kv.api.template import NO_TEMPLATE
from hybrid_kv.types import Work
from hybrid_kv.watch.audit import Audit


@dataclass(frozen=True, slots=True)
class Generation:
    """The result of one call of `generate`, and its cost.

    token_ids: the new tokens, without the prompt. token_times_s: when each came, seconds after the
    call. ttft_s: time to the first, NaN if none came; prefill_s: the same without the index builds
    that were waited for; index_build_s: wall time of all builds during this call, those in the
    background included. tpot_ms: mean time of each further token.
    phases_s: where the time after the first token went (with beams: all of it). work: of this call.
    device_kv_bytes: K and V in the resident tier at the end; host_kv_bytes, host_index_bytes: what
    the cold tier held then. backends: what computed each op of the cache at last. index: what
    served each layer and KV head at the end, and why; with the `entries` of the extent, the `build`
    ("done", "in progress", "failed: ..."), the `searches` of the cache so far and those before the
    index was built. audit: what was found to be missing during this call, None without
    `audit_every`. look_ahead: by layer whether it is searched ahead ("on", "trial" or "off", with
    the reason), at which factor, and what of a search's softmax mass its trial lost; empty for
    methods that never do. steps: by layer
    whether its last decode step was one call of the engine, and why not ("reason", and "code", one
    of a fixed set; None where there was no step), and how many "plans" its steps took; with
    `capture_decode` also "graph": "captures" and "replays" of whole steps, and why the last forward
    was none ("code", "reason").
    chat_template: the first digits of the SHA-256 of the template that rendered the prompt, "none"
    for raw text. reused_tokens: of the prompt, taken from `cache_dir` and not computed.
    """

    text: str
    token_ids: list[int]
    prompt_tokens: int
    ttft_s: float
    prefill_s: float
    index_build_s: float
    tpot_ms: float
    token_times_s: list[float] = field(repr=False)
    phases_s: dict[str, float] = field(repr=False)
    work: Work = field(repr=False)
    device_kv_bytes: int = 0
    host_kv_bytes: int = 0
    host_index_bytes: int = 0
    backends: dict[str, str] = field(default_factory=dict, repr=False)
    index: list[dict[str, Any]] = field(default_factory=list, repr=False)
    audit: Audit | None = field(default=None, repr=False)
    look_ahead: list[dict[str, Any]] = field(default_factory=list, repr=False)
    steps: list[dict[str, Any]] = field(default_factory=list, repr=False)
    chat_template: str = NO_TEMPLATE
    reused_tokens: int = 0


class TokenClock(BaseStreamer):
    """Takes tokens from transformers as they come: notes the time, passes text on.

    Args:
        pieces: takes the text; None where nobody waits for it.
        on_first: called with the first token.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase | None,
        pieces: SimpleQueue[Any] | None,
        on_first: Callable[[], None],
    ) -> None:
        self.begin, self.times = perf_counter(), list[float]()
        self.token_ids: list[int] = []
        self._on_first = on_first
        self._tokenizer, self._pieces = tokenizer, pieces
        self._prompt_passed, self._printed = False, 0

    def put(self, value: Tensor) -> None:
        if not self._prompt_passed:  # transformers hands the prompt over first
            self._prompt_passed = True
            return
        if not self.times:
            self._on_first()
        self.times.append(perf_counter() - self.begin)
        self.token_ids.extend(value.flatten().tolist())
        if self._pieces is not None:
            self._pass_on(final=False)

    def end(self) -> None:
        if self._pieces is not None:
            self._pass_on(final=True)

    def _pass_on(self, *, final: bool) -> None:
        if self._tokenizer is None or self._pieces is None:
            return
        text = decode_text(self._tokenizer, self.token_ids)
        # A character whose bytes are not complete yet decodes to a replacement mark: wait for it.
        if len(text) > self._printed and (final or not text.endswith("\ufffd")):
            self._pieces.put(text[self._printed :])
            self._printed = len(text)


class StopOnEvent(StoppingCriteria):
    """Ends generation when the consumer has gone away."""

    def __init__(self, event: threading.Event) -> None:
        self._event = event

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: Any) -> Tensor:
        return torch.full((input_ids.shape[0],), self._event.is_set(), device=input_ids.device)


class StopOnText(StoppingCriteria):
    """Ends generation once the new text holds a stop string.

    Looks at decoded text: transformers' own criterion takes tokens apart one by one, which
    tokenizers that write between tokens (the needle model's) do not bear.

    Args:
        prompt_tokens: where the new tokens begin.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, stops: list[str], prompt_tokens: int
    ) -> None:
        self._tokenizer, self._stops, self._prompt_tokens = tokenizer, stops, prompt_tokens
        # A character takes at most four tokens (its bytes); the rest is for special tokens.
        self._tail = 4 * max(len(stop) for stop in stops) + 16

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: Any) -> Tensor:
        first = max(self._prompt_tokens, input_ids.shape[1] - self._tail)
        texts = [decode_text(self._tokenizer, row) for row in input_ids[:, first:].tolist()]
        ended = [any(stop in text for stop in self._stops) for text in texts]
        return torch.tensor(ended, device=input_ids.device)


def decode_text(tokenizer: PreTrainedTokenizerBase, token_ids: list[int]) -> str:
    """Text of one sequence, without special tokens."""
    return str(tokenizer.decode(token_ids, skip_special_tokens=True))


def until_done(pieces: SimpleQueue[Any], stops: list[str]) -> Iterator[str]:
    """Pieces up to the first stop string; a tail that may begin one is held back."""
    held, longest = "", max((len(stop) for stop in stops), default=1)
    while isinstance(piece := pieces.get(), str):
        held += piece
        if any(stop in held for stop in stops):
            break
        ready = held[: max(0, len(held) - longest + 1)]
        held = held[len(ready) :]
        if ready:
            yield ready
    if isinstance(piece, BaseException):
        try:
            raise piece
        finally:
            del piece  # this frame hangs on it
    end = min((held.index(stop) for stop in stops if stop in held), default=len(held))
    if held[:end]:
        yield held[:end]
