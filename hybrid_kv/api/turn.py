"""One call of transformers' generate on one cache, which may begin with a context on disk and be
left there.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from math import nan
from queue import SimpleQueue
from time import perf_counter
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase, StoppingCriteria

from hybrid_kv.api.arguments import (
    check_temperature,
    check_watchers,
    generate_options,
    largest_error,
    most_drafts,
    random_seed,
    stop_strings,
    truth,
    whole_number,
)
from hybrid_kv.api.generation import (
    Generation,
    PrefillCancelled,
    PrefillProgress,
    PrefillWatch,
    StopOnEvent,
    StopOnText,
    TextStream,
    TokenClock,
)
from hybrid_kv.api.tokens import NO_TEMPLATE, ChatTemplate, decode_text
from hybrid_kv.errors import ConfigError
from hybrid_kv.models.attach import Attachment
from hybrid_kv.models.cache_state import passing
from hybrid_kv.models.exact_decoding import ExactDecoding
from hybrid_kv.models.exact_steps import check_exact, drop_inexact
from hybrid_kv.models.hf_cache import TieredCache
from hybrid_kv.runtime import Stage, check_host_memory, memory_errors
from hybrid_kv.saved import ContextRegistry
from hybrid_kv.saved.saving import Provenance
from hybrid_kv.store.layer import tier_bytes
from hybrid_kv.types import Work
from hybrid_kv.watch.phases import INDEX_BUILD, PHASES

if TYPE_CHECKING:
    from hybrid_kv.api.token_errors import TokenErrorLimit, TokenErrorWatch


class Prefixes:
    """Saved contexts of a registry that belong to one model.

    A prompt's rest attends exactly to what was taken, however short it is, as if the prompt had
    been computed in one. So only a method that keeps every entry takes part; contexts of others are
    taken as a whole or not at all.
    """

    def __init__(self, maker: Provenance, device: torch.device, registry: ContextRegistry) -> None:
        self._maker, self._device, self.registry = maker, device, registry

    def take(self, cache: TieredCache, ids: Tensor) -> int:
        """Fills an empty cache with first tokens of ids [1, tokens]; returns how many."""
        return self.registry.take(cache, ids, self._maker, self._device)

    @contextmanager
    def begun(self, cache: TieredCache, ids: Tensor) -> Iterator[int]:
        """A block that computes a prompt, ids [1, tokens], and the answer, in a cache.

        The prompt is left at the end, as it was before the answer; but where the cache held
        something at the beginning, or the block fails, it is not.

        Yields:
            How many tokens were taken: not the last, whose logits are needed.
        """
        if cache.get_seq_length() or not cache.keeps_all:
            yield 0
            return
        reused = self.take(cache, ids[:, :-1])
        with _Prompt(self._maker.model, cache, ids.shape[1], reused, forks=True) as prompt:
            yield reused
            if prompt.end is not None:
                self._leave(prompt.end, ids, prompt)

    def _leave(self, cache: TieredCache, ids: Tensor, prompt: _Prompt) -> None:
        tokens = ids.shape[1]
        whole_s = prompt.spent_s * tokens / (tokens - prompt.reused)
        self.registry.add(cache, ids, self._maker, prefill_s=whole_s)

    @contextmanager
    def context(self, cache: TieredCache, ids: Tensor) -> Iterator[int]:
        """A block that computes the rest of ids [1, tokens] in an empty cache.

        Yields:
            How many were taken; all of them, perhaps.
        """
        reused = self.take(cache, ids)
        with _Prompt(self._maker.model, cache, ids.shape[1], reused) as prompt:
            yield reused
        if reused < ids.shape[1]:
            self._leave(cache, ids, prompt)


class _Prompt:
    """Watches the rest of a prompt being computed: all of it attends exactly.

    end: a fork of the cache as it was then, if wanted; the answer goes on without it. spent_s: what
    the rest took.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        cache: TieredCache,
        num_tokens: int,
        reused: int,
        *,
        forks: bool = False,
    ) -> None:
        self._model, self._cache, self._num_tokens = model, cache, num_tokens
        self._forks = forks
        self.reused = reused
        self.end: TieredCache | None = None
        self.spent_s = 0.0

    def __enter__(self) -> _Prompt:
        self._begin, self._hook = perf_counter(), None
        if self.reused < self._num_tokens:
            self._cache.kv.more_prompt = self.reused > 0
            self._hook = self._model.register_forward_hook(self._after_forward)
        return self

    def _after_forward(self, *_: Any) -> None:
        if self._cache.get_seq_length() < self._num_tokens:
            return
        self.spent_s = perf_counter() - self._begin
        self._stop_watching()
        if self._forks and self._cache.get_seq_length() == self._num_tokens:
            self.end = self._cache.fork()

    def _stop_watching(self) -> None:
        self._cache.kv.more_prompt = False
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    def __exit__(self, *_: object) -> None:
        self._stop_watching()
        if self.end is not None:
            self.end.close()


class Model(Protocol):
    """An attached model with its tokenizer."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None
    source: str | None
    runtime: Attachment
    prefixes: Prefixes | None

    def require_tokenizer(self) -> PreTrainedTokenizerBase: ...

    def require_chat_template(self) -> ChatTemplate: ...


def check_room(llm: Model, cache: TieredCache, total_tokens: int) -> None:
    """Raises unless the model and the host's memory have room for what the cache lacks of
    `total_tokens`.
    """
    llm.runtime.check_context(total_tokens)
    new = max(0, total_tokens - cache.get_seq_length())
    per_token = llm.runtime.bytes_per_token(cache.kv.means.method, total_tokens)
    check_host_memory(new * per_token, total_tokens)


class Turn:
    """One call of transformers' generate on one cache.

    Args:
        template: what rendered the prompt, None for raw text; its end of a message ends the answer.
    """

    shares_prompt = False
    """Whether an empty cache takes what the registry has, and the prompt is left there."""

    def __init__(
        self,
        llm: Model,
        cache: TieredCache,
        ids: Tensor,
        options: Mapping[str, Any],
        template: ChatTemplate | None = None,
    ) -> None:
        self._llm, self.cache, self._ids = llm, cache, ids.to(llm.runtime.device)
        self._template = template
        own = generate_options(options)
        self._stop = stop_strings(own.pop("stop", None))
        self._seed = random_seed(own.pop("seed", None))
        check_temperature(own.get("temperature"))
        self._max_new = whole_number("max_new_tokens", own.pop("max_new_tokens", 128))
        self._most_drafts = most_drafts(own.pop("exact", None))
        self._exact: ExactDecoding | None = None
        cancel: threading.Event | None = own.pop("cancel", None)
        self._on_prefill: PrefillProgress | None = own.pop("on_prefill", None)
        check_watchers(self._on_prefill, cancel)
        self._cancels = [] if cancel is None else [cancel]
        self._criteria = list(own.pop("stopping_criteria", None) or ())
        self._errors: TokenErrorWatch | None = None
        self._limit: TokenErrorLimit | None = None
        most, says = largest_error(own.pop("max_error", None)), own.pop("token_errors", False)
        if most is not None:  # says the errors in any case
            self._limit = self._error_limit(most)
        if truth("token_errors", says) and most is None:
            from hybrid_kv.api.token_errors import TokenErrorWatch

            self._errors = TokenErrorWatch(llm.model, cache.kv, own)
        self._options = own
        self._check()
        self._begin_costs()

    def _check(self) -> None:
        if self._stop and self._llm.tokenizer is None:
            raise ConfigError("stop strings need a tokenizer, and the model has none")
        check_room(self._llm, self.cache, self._ids.shape[1] + self._max_new)
        if self.is_verified:
            self._check_exact()

    def _error_limit(self, most: float) -> TokenErrorLimit:
        from hybrid_kv.api.token_errors import TokenErrorLimit

        if self.is_exact:
            raise ConfigError(
                "max_error must go with tokens that may come out unverified, got exact=True, which "
                "verifies all; leave one of them out"
            )
        return TokenErrorLimit(self._llm.model, self.cache.kv, most)

    def _check_exact(self) -> None:
        asked = ("exact=True", "exact") if self._limit is None else ("max_error", "max_error")
        check_exact(self.cache, *asked)
        if self._errors is not None:
            raise ConfigError(
                "token_errors must go with steps that leave entries unread, got exact=True, whose "
                "tokens have no error; leave one of them out"
            )
        for name in ("assistant_model", "num_beams"):
            if self._options.get(name) not in (None, 1):
                raise ConfigError(
                    f"{asked[0]} works with greedy decoding and plain sampling, got {name}; leave "
                    "one of them out"
                )

    def _begin_costs(self) -> None:
        """The cache counts over all of its turns; a turn reports its own share."""
        self._built_before = self.cache.kv.means.builds.clock.seconds
        auditor = self.cache.kv.auditor
        self._looks_before = 0 if auditor is None else len(auditor.audit.findings)
        self._waited_before = self.cache.kv.phases.seconds[INDEX_BUILD]
        self._begin_phases()

    def _begin_phases(self) -> None:
        self._phases_before = dict(self.cache.kv.phases.seconds)

    def run(self, pieces: SimpleQueue[Any] | None = None) -> Generation:
        with self._llm.runtime.generating(), self._own_work() as work:
            return self._run(work, pieces)

    @contextmanager
    def _own_work(self) -> Iterator[Work]:
        """Counters of a block, which the cache's own take up at its end."""
        before, own = self.cache.kv.work, Work()
        self.cache.kv.work = own
        try:
            yield own
        finally:
            before.add(own)
            self.cache.kv.work = before

    def _run(self, work: Work, pieces: SimpleQueue[Any] | None) -> Generation:
        clock = TokenClock(self._llm.tokenizer, pieces, self._begin_phases)
        with self._sharing() as reused:
            output = self._compute(clock)
        return self._result(output, clock, work, reused)

    def _sharing(self) -> AbstractContextManager[int]:
        """A block in which the prompt is computed from the tokens on that were taken from disk."""
        prefixes = self._llm.prefixes if self.shares_prompt else None
        if prefixes is None or self._options.get("num_beams", 1) != 1:
            return nullcontext(0)
        return prefixes.begun(self.cache, self._ids)

    def _compute(self, clock: TokenClock) -> Tensor:
        if self.is_exact:
            drop_inexact(self.cache, self._ids.shape[1])
        self.cache.kv.means.reserve(self._ids.shape[1] + self._max_new)
        new = self._ids.shape[1] - self.cache.get_seq_length()
        watch = PrefillWatch(self._llm.model, new, self._on_prefill, self._cancels)
        with torch.random.fork_rng(enabled=self._seed is not None):
            if self._seed is not None:
                torch.manual_seed(self._seed)
            try:
                with (
                    watch,
                    self._errors or nullcontext(),
                    memory_errors(lambda: self._stage(clock)),
                ):
                    return self._generate(clock)
            except PrefillCancelled:
                return self._ids

    def _generate(self, clock: TokenClock) -> Tensor:
        model: Any = self._llm.model
        if self.is_verified:
            self._exact = ExactDecoding(self.cache, self._most_drafts, clock, self._limit)
        output: Tensor = model.generate(
            self._ids,
            attention_mask=torch.ones_like(self._ids),
            **passing(self.cache),
            max_new_tokens=self._max_new,
            # Beams are rearranged as a whole, so they cannot be handed out token by token.
            streamer=None if self.has_beams else clock,
            custom_generate=self._exact,
            stopping_criteria=self._stopping(),
            # A model's own defaults may ask for more than one answer, or for more than tokens.
            num_return_sequences=1,
            return_dict_in_generate=False,
            **self._pad(),
            **self._ends(),
            **self._options,
        )
        return output

    @property
    def has_beams(self) -> bool:
        """Whether rows of the cache are rearranged, of which several are left."""
        return bool(self._options.get("num_beams", 1) != 1)

    @property
    def is_exact(self) -> bool:
        """Whether every token is to be full attention's."""
        return self._most_drafts != 0

    @property
    def is_verified(self) -> bool:
        """Whether tokens are drafted, and all of them or some verified by full attention."""
        return self.is_exact or self._limit is not None

    @property
    def takes_fork(self) -> bool:
        """Whether what comes with the turn cannot be taken back from the cache."""
        forgets = self.is_exact and self.cache.exact_tokens < self.cache.get_seq_length()
        return self.has_beams or forgets

    @contextmanager
    def _on_fork(self) -> Iterator[None]:
        """A block in which the turn runs on a fork of its cache, with a row for each beam."""
        whole, self.cache = self.cache, self.cache.fork()
        try:
            if self.has_beams:
                self.cache.batch_repeat_interleave(self._options["num_beams"])
            yield
        finally:
            fork, self.cache = self.cache, whole
            fork.close()

    def _stage(self, clock: TokenClock) -> Stage:
        beyond = self.cache.get_seq_length() > self._ids.shape[1]  # beams pass no clock
        return "decode" if clock.times or beyond else "prefill"

    def _stopping(self) -> list[StoppingCriteria]:
        criteria = [*self._criteria, *(StopOnEvent(event) for event in self._cancels)]
        if self._stop and self._llm.tokenizer is not None:
            criteria.append(StopOnText(self._llm.tokenizer, self._stop, self._ids.shape[1]))
        if self._errors is not None:
            criteria.append(self._errors)
        return criteria

    def _pad(self) -> dict[str, int]:
        """One sequence is never padded; naming a token keeps transformers from warning about it."""
        known = self._llm.model.generation_config.pad_token_id
        return {} if known is not None or "pad_token_id" in self._options else {"pad_token_id": 0}

    def _ends(self) -> dict[str, list[int]]:
        """Settings that the model's own lack: the token by which its template ends an answer."""
        if self._template is None or "eos_token_id" in self._options:
            return {}
        settings = self._options.get("generation_config") or self._llm.model.generation_config
        known = settings.eos_token_id
        ends = [] if known is None else [known] if isinstance(known, int) else list(known)
        lacking = [token for token in self._template.end_ids() if token not in ends]
        return {"eos_token_id": ends + lacking} if lacking else {}

    def _result(self, output: Tensor, clock: TokenClock, work: Work, reused: int) -> Generation:
        self.cache.kv.finite.look(wait=True)
        token_ids = output[0, self._ids.shape[1] :].tolist()
        tokenizer, times = self._llm.tokenizer, clock.times
        if token_ids and not times:  # beams come all at once
            times = [perf_counter() - clock.begin]
        text = "" if tokenizer is None else decode_text(tokenizer, token_ids)
        for stop in self._stop:
            text = text.split(stop)[0]
        if (auditor := self.cache.kv.auditor) is not None:
            auditor.settle()
        held = tier_bytes(self.cache.kv.stores.values())
        phases = self.cache.kv.phases.seconds
        waited_in_prefill = self._phases_before[INDEX_BUILD] - self._waited_before
        return Generation(
            text=text,
            token_ids=token_ids,
            prompt_tokens=self._ids.shape[1],
            reused_tokens=reused,
            ttft_s=times[0] if times else nan,
            prefill_s=times[0] - waited_in_prefill if times else nan,
            index_build_s=self.cache.kv.means.builds.clock.seconds - self._built_before,
            tpot_ms=1e3 * (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else 0.0,
            token_times_s=times,
            phases_s={name: phases[name] - self._phases_before[name] for name in PHASES},
            work=work,
            device_kv_bytes=held.device_kv,
            host_kv_bytes=held.host_kv,
            host_index_bytes=held.host_index,
            backends=dict(self.cache.kv.ops.served),
            index=self.cache.kv.layers.describe_indexes(),
            audit=None if auditor is None else auditor.audit.since(self._looks_before),
            look_ahead=self.cache.kv.layers.describe_look_ahead(),
            steps=self.cache.kv.describe_steps(),
            prefill=self.cache.kv.prefill_loss(),
            exact=None if self._exact is None else self._exact.work,
            chat_template=NO_TEMPLATE if self._template is None else self._template.name,
            token_errors=None if (told := self._limit or self._errors) is None else told.errors(),
        )

    def stream(self) -> TextStream:
        """Yields text as it comes; closing the iterator ends the generation."""
        if self._llm.tokenizer is None:
            raise ConfigError("stream=True yields text, and the model has no tokenizer")
        if self.has_beams:
            raise ConfigError("stream=True works without beams; set num_beams=1")
        closed = threading.Event()
        self._cancels.append(closed)
        return TextStream(self.run, closed, self._stop)
