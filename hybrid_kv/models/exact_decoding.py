"""Exact decoding inside transformers' `generate`; see `exact_steps`.

Sampling draws each token from the same state of the generator as plain sampling does, for the draft
and for the token itself: so the distribution and, with one seed, the tokens are full attention's,
and a draft is accepted where both distributions lead that draw to one token. That is the Gumbel
coupling, by which torch.multinomial draws.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
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
from hybrid_kv.models.exact_steps import (
    ErrorLimit,
    ExactSteps,
    ExactWork,
    PromptLookup,
    check_exact,
    drop_inexact,
    most_drafts_on,
    past_recorded,
)
from hybrid_kv.models.hf_cache import TieredCache

_OTHER_LOOPS = (
    *("guidance_scale", "watermarking_config", "prefill_chunk_size", "dola_layers"),
    "return_dict_in_generate",
)
"""Settings of transformers that stand for passes of the model, a state or a result of their own."""


class ExactDecoding:
    """A decoding loop for transformers' `generate(custom_generate=...)`, of one sequence.

    work: what it took so far.

    Args:
        cache: of one row.
        most_drafts: of one verification; None for the default of the cache's device.
        streamer: takes the tokens as they come out.
        limit: of errors, below which drafts come out unverified; None verifies all, and computes
            tokens of earlier steps that left entries unread again.

    Raises:
        ConfigError: the method loses entries, or the prompt's attention is sparse.
    """

    def __init__(
        self,
        cache: TieredCache,
        most_drafts: int | None = None,
        streamer: BaseStreamer | None = None,
        limit: ErrorLimit | None = None,
    ) -> None:
        check_exact(cache)
        self._cache, self._streamer, self._limit = cache, streamer, limit
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
        **inputs: Any,
    ) -> Tensor:
        """Continues input_ids [1, tokens], of which the cache may hold the first ones.

        Returns:
            [1, tokens + new] int64.

        Raises:
            ConfigError: it is several sequences, or padded, or the settings ask for another loop.
        """
        check_generation(generation_config, "exact=True" if self._limit is None else "max_error")
        # Not by name, or transformers would take it away from its own preparation.
        mask: Tensor | None = inputs.get("attention_mask")
        padded = mask is not None and not bool(mask.all())
        if len(input_ids) != 1 or padded:
            got = f"{len(input_ids)} sequences" if len(input_ids) != 1 else "padding"
            raise ConfigError(
                f"exact decoding must have one sequence without padding, got {got}; call it for "
                "each by itself"
            )
        cache, most = self._cache, self._most_drafts or most_drafts_on(input_ids.device)
        steps = ExactSteps(model, cache, most, self.work, self._limit)
        run = _Answer(steps, logits_processor, stopping_criteria, generation_config, self._streamer)
        if self._limit is None:
            drop_inexact(cache, input_ids.shape[1])
        with past_recorded(cache):
            return run.decode(input_ids, cache.get_seq_length(), self._limit)


def check_generation(config: GenerationConfig, asked: str = "exact=True") -> None:
    """Raises ConfigError where transformers' settings ask for another loop, or for passes of the
    model that this one does not make. asked: what the user wrote.
    """
    plain = GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE
    others = [name for name in _OTHER_LOOPS if getattr(config, name, None) not in (None, False)]
    if not others and config.get_generation_mode() not in plain:
        others = [config.get_generation_mode().value]
    if others:
        raise ConfigError(
            f"{asked} works with greedy decoding and plain sampling, got {', '.join(others)}; "
            "leave one of them out"
        )


class _Answer:
    """The answer of one call of an `ExactDecoding`; arguments as there."""

    def __init__(
        self,
        steps: ExactSteps,
        processor: LogitsProcessorList,
        stopping: StoppingCriteriaList,
        config: GenerationConfig,
        streamer: BaseStreamer | None,
    ) -> None:
        self._steps, self._streamer = steps, streamer
        self._processor, self._stopping, self._config = processor, stopping, config
        ends = [one.eos_token_id for one in stopping if hasattr(one, "eos_token_id")]
        self._ends = {int(token) for some in ends for token in some}

    def decode(self, ids: Tensor, held: int, limit: ErrorLimit | None) -> Tensor:
        """Continues ids [1, tokens], of which the cache holds the first `held`, to its end."""
        self._ids, self._lookup = ids, PromptLookup(ids[0].tolist())
        logits = self._steps.dense(ids[:, held:], 1)
        _, has_ended = self.take(logits[0])
        if limit is not None:
            limit.chosen_from(0, logits)
            limit.came_out(1)
        while not has_ended:
            room = self._config.max_length - self._ids.shape[1]
            has_ended = self._steps.advance(int(self._ids[0, -1]), room, self)
        if self._streamer is not None:
            self._streamer.end()
        return self._ids

    def drafting(self) -> AbstractContextManager[None]:
        return _same_draws(self._ids.device)

    def draft(self, logits: Tensor, before: list[int]) -> tuple[int, bool]:
        ids = self._ids
        drafted = torch.tensor([before], dtype=ids.dtype, device=ids.device)
        token = int(self._choose(torch.cat([ids, drafted], 1), logits))
        return token, token in self._ends

    def guess(self, before: list[int], count: int) -> list[int]:
        return self._lookup.guess(before, count)

    def take(self, logits: Tensor) -> tuple[int, bool]:
        token = self._choose(self._ids, logits)
        self._ids = torch.cat([self._ids, token], 1)
        self._lookup.add(int(token))
        if self._streamer is not None:
            self._streamer.put(token[0].cpu())
        has_ended: Any = self._stopping(self._ids, None)
        return int(token), bool(has_ended.all())

    def _choose(self, ids: Tensor, logits: Tensor) -> Tensor:
        """The token [1, 1] that follows ids [1, tokens], from logits [V] that stay as they are."""
        scores = self._processor(ids, logits[None].clone())  # type: ignore[arg-type]
        if not self._config.do_sample:
            return scores.argmax(-1, keepdim=True)
        return torch.multinomial(scores.softmax(-1), 1)


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
