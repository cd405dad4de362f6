"""The result of one generation, and the objects that watch it happen.

Of the prompt: how far it is, and an early end. Of the answer: when each token came, its text as it
comes, and what stops it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase, StoppingCriteria
from transformers.generation.streamers import BaseStreamer

from hybrid_kv.api.tokens import NO_TEMPLATE, decode_text
from hybrid_kv.errors import ConfigError
from hybrid_kv.types import Work
from hybrid_kv.watch.audit import Audit

if TYPE_CHECKING:
    from hybrid_kv.models.exact_steps import ExactWork
    from hybrid_kv.runtime.sparse_prefill import PrefillLoss
    from hybrid_kv.watch.token_errors import TokenError


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
    prefill: what block-sparse prefill read and lost of the prompt that the cache began with; None
    where prefill is exact, the prompt was shorter than two key blocks or came from a file.
    exact: what `exact=True` or `max_error` took; None without them.
    chat_template: the first digits of the SHA-256 of the template that rendered the prompt, "none"
    for raw text. reused_tokens: of the prompt, taken from `cache_dir` and not computed.
    token_errors: of each of `token_ids` how far its distribution may be from full attention's; None
    where neither it nor `max_error` was asked for.
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
    prefill: PrefillLoss | None = field(default=None, repr=False)
    exact: ExactWork | None = None
    chat_template: str = NO_TEMPLATE
    reused_tokens: int = 0
    token_errors: list[TokenError] | None = field(default=None, repr=False)


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


# Text as it comes --------------------------------------------------------------------------------

Call = Callable[["SimpleQueue[Any]"], Generation]


class TextStream(Iterator[str]):
    """Pieces of text of one call; closing or dropping it ends the generation.

    Args:
        run: computes the generation and puts pieces of text into the queue that it is given.
        cancel: set to end the run early.
        stops: strings that end the text.
    """

    def __init__(self, run: Call, cancel: threading.Event, stops: list[str]) -> None:
        self._results: list[Generation] = []
        self._pieces = _read(run, cancel, stops, self._results)

    def __next__(self) -> str:
        return next(self._pieces)

    def close(self) -> None:
        """Ends the generation after the token in work; `result` is what came until then."""
        self._pieces.close()

    @property
    def result(self) -> Generation:
        """Result of the call: its answer and its costs.

        Raises:
            ConfigError: the stream has not ended yet.
        """
        if not self._results:
            raise ConfigError("the stream has no result yet; read it to its end or close it")
        return self._results[0]


def _read(
    run: Call, cancel: threading.Event, stops: list[str], results: list[Generation]
) -> Generator[str, None, None]:
    """Runs it in a thread and yields its text; what the run returns is added to `results`."""
    # Knows no stream: a stream that is dropped drops this, which ends the thread.
    pieces: SimpleQueue[Any] = SimpleQueue()

    def work() -> None:
        try:
            results.append(run(pieces))
            pieces.put(results[0])
        except BaseException as error:
            pieces.put(error)

    worker = threading.Thread(target=work, name="hybrid-kv-generate")
    worker.start()
    try:
        yield from until_done(pieces, stops)
    finally:
        cancel.set()
        worker.join()


# The prompt --------------------------------------------------------------------------------------

PrefillProgress = Callable[[int, int], None]
"""Called with (done, total) in tokens x layers."""


class PrefillCancelled(Exception):  # noqa: N818 (an event, not a failure)
    """The prompt was given up between two chunks; the cache is unusable."""


class PrefillWatch:
    """Counts what the attention layers have seen, by hooks that leave with the prompt's last token.

    Without a report or a cancel event nothing is registered and nothing is paid.

    Args:
        done_layers: how many have seen it already.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        new_tokens: int,
        report: PrefillProgress | None,
        cancels: Sequence[threading.Event],
        done_layers: int = 0,
    ) -> None:
        layers = [getattr(module, "self_attn", None) for module in model.modules()]
        self._layers = [layer for layer in layers if isinstance(layer, nn.Module)]
        self._report, self._cancels = report, cancels
        self._done, self._total = new_tokens * done_layers, new_tokens * len(self._layers)
        self._thread = threading.get_ident()  # others may run the model as well
        self._hooks: list[Any] = []

    def __enter__(self) -> PrefillWatch:
        if self._report is not None or self._cancels:
            self._hooks = [layer.register_forward_hook(self._seen) for layer in self._layers]
        return self

    def _seen(self, module: nn.Module, args: Any, output: Any) -> None:
        if threading.get_ident() != self._thread:
            return
        if any(event.is_set() for event in self._cancels):
            raise PrefillCancelled
        self._done = min(self._total, self._done + output[0].shape[1])
        if self._report is not None:
            self._report(self._done, self._total)
        if self._done == self._total:
            self._remove()

    def _remove(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def __exit__(self, *error: object) -> None:
        self._remove()
