"""Exact decoding: the cache's method drafts tokens, one dense pass over both tiers verifies them.

    newest token -> drafts by the method -> crop them -> one dense pass over newest token and drafts
    -> logits by position -> tokens, as long as they are the drafts, and one more -> crop the others

Every token that comes out is chosen from logits of full attention over entries of full attention.
In float32 greedy tokens are those of `full`. In 16 bits a pass of several tokens rounds otherwise
than steps of one: the token is the pass's own, and `ExactWork.ties` counts where that can matter.
Sampling draws each token from the same state of the generator as plain sampling does, for the draft
and for the token itself: so the distribution and, with one seed, the tokens are full attention's,
and a draft is accepted where both distributions lead that draw to one token.

Source: Leviathan et al. 2023 (speculative decoding); drafts by a sparse cache: TriForce (Sun et al.
2024). The coupling of draws is the Gumbel one, by which torch.multinomial draws.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteriaList,
)
from transformers.generation.configuration_utils import GenerationMode
from transformers.generation.streamers import BaseStreamer

from hybrid_kv.errors import ConfigError
from hybrid_kv.models.cache_state import stuck_layers
from hybrid_kv.models.forwards import passing
from hybrid_kv.models.hf_cache import TieredCache
from hybrid_kv.plugins import Method

_OTHER_LOOPS = ("guidance_scale", "watermarking_config", "prefill_chunk_size", "dola_layers")
"""Settings of transformers that stand for passes of the model, or a state, of their own."""

MOST_DRAFTS_CPU, MOST_DRAFTS_GPU = 8, 32
"""Drafts of one verification. On a CPU a dense pass costs more with each token in it; on a GPU it
waits for the bus, whatever their number."""


@dataclass(slots=True)
class ExactWork:
    """Counters of exact decoding.

    passes: dense passes behind the prompt. drafted: tokens that the method drafted for them;
    accepted: of these, tokens that came out. unverified: tokens of steps that read every entry, so
    that no pass was needed. ties: tokens of 16-bit models whose two best logits differ by no more
    than one rounding, where full attention in single steps may choose the other.
    """

    passes: int = 0
    drafted: int = 0
    accepted: int = 0
    unverified: int = 0
    ties: int = 0


class ExactDecoding:
    """A decoding loop for transformers' `generate(custom_generate=...)`, of one sequence.

    work: what it took so far.

    Args:
        cache: of one row; tokens of earlier steps that left entries unread are computed again.
        most_drafts: of one verification; None for the default of the cache's device.
        streamer: takes the tokens as they are verified.

    Raises:
        ConfigError: the method loses entries, or the prompt's attention is sparse.
    """

    def __init__(
        self,
        cache: TieredCache,
        most_drafts: int | None = None,
        streamer: BaseStreamer | None = None,
    ) -> None:
        check_exact(cache)
        self._cache, self._streamer = cache, streamer
        self._most_drafts = most_drafts
        self.work = ExactWork()

    def __call__(
        self,
        model: PreTrainedModel,
        input_ids: Tensor,
        *,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        **_: Any,
    ) -> Tensor:
        """Continues input_ids [1, tokens], of which the cache may hold the first ones.

        Returns:
            [1, tokens + new] int64.
        """
        check_generation(generation_config)
        on_gpu = input_ids.device.type != "cpu"
        most = self._most_drafts or (MOST_DRAFTS_GPU if on_gpu else MOST_DRAFTS_CPU)
        run = _Decoding(
            *(model, self._cache, logits_processor, stopping_criteria, generation_config),
            streamer=self._streamer,
            work=self.work,
            most_drafts=most,
        )
        drop_inexact(self._cache, input_ids.shape[1])
        with _past_recorded(self._cache):
            return run.decode(input_ids)


def drop_inexact(cache: TieredCache, num_tokens: int) -> None:
    """Forgets tokens of earlier steps that left entries unread, to compute them again with the last
    of `num_tokens` at least.
    """
    held = cache.get_seq_length()
    exact = min(cache.exact_tokens, num_tokens - 1)
    if 0 < exact < held and cache.can_crop:
        cache.crop(exact - held)
    elif exact < held:
        with cache.in_use():
            cache.start_over()


def check_exact(cache: TieredCache) -> None:
    """Raises ConfigError where tokens of a cache cannot be full attention's."""
    kv, name = cache.kv, cache.kv.config.method
    method = kv.means.method
    if any(_loses(method.of_layer(idx), idx) for idx in kv.layers):
        raise ConfigError(
            f"exact=True must have a method that keeps every entry as it is, got '{name}', which "
            "drops or rounds some; take method='hybrid', or leave exact out"
        )
    if kv.means.prefill_error is not None:
        raise ConfigError(
            "exact=True must have prefill='exact', got sparse prefill, which leaves some of the "
            "prompt unread; load the model with prefill='exact', or leave exact out"
        )
    if (stuck := next(stuck_layers(cache.layers), None)) is not None:
        raise ConfigError(
            f"exact=True must have a model from whose cache tokens can be taken back, got linear "
            f"attention in layer {stuck}; leave exact out"
        )


def check_generation(config: GenerationConfig) -> None:
    """Raises ConfigError where transformers' settings ask for another loop, or for passes of the
    model that this one does not make.
    """
    plain = GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE
    others = [name for name in _OTHER_LOOPS if getattr(config, name, None) is not None]
    if not others and config.get_generation_mode() not in plain:
        others = [config.get_generation_mode().value]
    if others:
        raise ConfigError(
            f"exact=True works with greedy decoding and plain sampling, got {', '.join(others)}; "
            "leave one of them out"
        )


def _loses(method: Method, layer_idx: int) -> bool:
    return type(method).write is not Method.write or method.seal(layer_idx, ()).drops


@contextmanager
def _past_recorded(cache: TieredCache) -> Iterator[None]:
    """A block in which sliding windows keep what comes back when newer tokens are cropped."""
    windows = [layer for layer in cache.layers if hasattr(layer, "record_past")]
    before = [layer.record_past for layer in windows]
    cache.activate_past_recording()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        for layer, was in zip(windows, before, strict=True):
            layer.record_past = was


class _Decoding:
    """One call of an `ExactDecoding`; arguments as there."""

    def __init__(
        self,
        model: PreTrainedModel,
        cache: TieredCache,
        processor: LogitsProcessorList,
        stopping: StoppingCriteriaList,
        config: GenerationConfig,
        *,
        streamer: BaseStreamer | None,
        work: ExactWork,
        most_drafts: int,
    ) -> None:
        self._model, self._cache = model, cache
        self._processor, self._stopping, self._config = processor, stopping, config
        self._streamer, self._work = streamer, work
        self._most_drafts = self._num_drafts = most_drafts
        self._takes_rows = "logits_to_keep" in signature(model.forward).parameters
        self._rounding = torch.finfo(model.dtype).eps if model.dtype.itemsize < 4 else 0.0

    def decode(self, ids: Tensor) -> Tensor:
        """Continues ids [1, tokens] until a criterion stops it."""
        verified = self._cache.get_seq_length()
        try:
            logits = self._pass(ids[:, verified:], 1)
            verified = ids.shape[1]
            ids, has_ended = self._take(ids, ids[:, :0], logits)
            verified = ids.shape[1] - 1
            while not has_ended:
                with self._cache.kv.layers.speculating():
                    ids, has_ended = self._advance(ids)
                    self._keep(ids.shape[1] - 1)
                verified = ids.shape[1] - 1
        except BaseException:
            if not self._cache.state.is_unfinished:
                self._keep(verified)
            raise
        if self._streamer is not None:
            self._streamer.end()
        return ids

    def _advance(self, ids: Tensor) -> tuple[Tensor, bool]:
        """Tokens with those that one draft and its verification give; whether they end."""
        room = self._config.max_length - ids.shape[1]
        drafts, logits = self._draft(ids, min(self._num_drafts, max(1, room - 1)))
        count, begin = drafts.shape[1], ids.shape[1]
        if self._cache.exact_tokens == self._cache.get_seq_length():
            # Each step has read every entry: these are the logits of full attention already.
            ids, has_ended = self._take(ids, drafts, logits)
            self._work.unverified += ids.shape[1] - begin
            self._num_drafts = 1
            return ids, has_ended
        drafts = drafts[:, : room - 1]  # a pass gives one token more than it verifies
        self._keep(begin - 1)
        logits = self._pass(torch.cat([ids[:, -1:], drafts], 1), drafts.shape[1] + 1)
        ids, has_ended = self._take(ids, drafts, logits)
        new = ids[:, begin : begin + drafts.shape[1]]
        accepted = int((new == drafts[:, : new.shape[1]]).sum())
        work = self._work
        work.passes, work.drafted = work.passes + 1, work.drafted + count
        work.accepted += accepted
        self._num_drafts = self._next_drafts(count, accepted)
        return ids, has_ended

    def _next_drafts(self, count: int, accepted: int) -> int:
        """How many tokens to draft next: twice as many where all were right, else half where not
        even half of them were.
        """
        if accepted >= count:
            return min(self._most_drafts, 2 * self._num_drafts)
        return max(1, self._num_drafts // 2) if 2 * accepted < count else self._num_drafts

    def _draft(self, ids: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """At most `count` tokens [1, n] by the method, and their logits [1, n, V]; the cache takes
        the tokens before the last one, and the generator stays where it is.
        """
        begin, rows = ids.shape[1], list[Tensor]()
        with _same_draws(ids.device):
            while ids.shape[1] < begin + count:
                rows.append(self._forward(ids[:, -1:], 1))
                ids = torch.cat([ids, self._choose(ids, rows[-1][:, 0])], 1)
                if self._ends(ids):
                    break
        return ids[:, begin:], torch.cat(rows, 1)

    def _take(self, ids: Tensor, drafts: Tensor, logits: Tensor) -> tuple[Tensor, bool]:
        """Tokens with those of full attention's logits [1, n, V], up to the first that is not the
        draft [1, n or n - 1] of its place; whether they end there.
        """
        has_ended = False
        for place in range(logits.shape[1]):
            raw = logits[:, place]
            token = self._choose(ids, raw)
            ids = torch.cat([ids, token], 1)
            self._work.ties += self._is_tie(raw)
            if self._streamer is not None:
                self._streamer.put(token[0].cpu())
            has_ended = bool(self._stopping(ids, None).all())
            if has_ended or place == drafts.shape[1] or token.item() != drafts[0, place].item():
                break
        return ids, has_ended

    def _choose(self, ids: Tensor, logits: Tensor) -> Tensor:
        """The token [1, 1] that follows ids, from logits [1, V] that stay as they are."""
        scores = self._processor(ids, logits.clone())  # type: ignore[arg-type]
        if not self._config.do_sample:
            return scores.argmax(-1, keepdim=True)
        return torch.multinomial(scores.softmax(-1), 1)

    def _ends(self, ids: Tensor) -> bool:
        """Whether the newest token is one that ends an answer."""
        ends = [one.eos_token_id for one in self._stopping if hasattr(one, "eos_token_id")]
        return any(bool((ids[0, -1] == end.to(ids.device)).any()) for end in ends)

    def _is_tie(self, logits: Tensor) -> bool:
        """Whether the two best logits differ by no more than one rounding of the model's dtype."""
        if not self._rounding:
            return False
        best, second = logits[0].topk(2).values.tolist()
        return bool(best - second <= self._rounding * max(abs(best), abs(second)))

    # Forwards -------------------------------------------------------------------------------------

    def _pass(self, new: Tensor, rows: int) -> Tensor:
        """Logits as of `_forward`, by attention to every entry of both tiers."""
        kv = self._cache.kv
        kv.more_prompt = True
        try:
            return self._forward(new, rows)
        finally:
            kv.more_prompt = False

    def _forward(self, new: Tensor, rows: int) -> Tensor:
        """Logits [1, rows, V] float32 of the last of the new tokens [1, n]; the cache takes all."""
        keep = {"logits_to_keep": rows} if self._takes_rows else {}
        model: Callable[..., Any] = self._model
        logits: Tensor = model(new, **passing(self._cache), use_cache=True, **keep).logits
        return logits[:, -rows:].to(dtype=torch.float32, device=new.device, copy=True)

    def _keep(self, count: int) -> None:
        """The cache forgets all but its first `count` tokens; windows become as small as before."""
        self._cache.crop(min(0, count - self._cache.get_seq_length()))


@contextmanager
def _same_draws(device: torch.device) -> Iterator[None]:
    """A block whose random numbers of a device come again behind it."""
    generators: Any = torch if device.type == "cpu" else getattr(torch, device.type)
    where: Sequence[Any] = () if device.type == "cpu" else (device,)
    state = generators.get_rng_state(*where)
    try:
        yield
    finally:
        generators.set_rng_state(state, *where)
