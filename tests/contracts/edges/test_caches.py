"""Caches as transformers sees them.

Each test asks for the result of eager attention or for a refusal that says why. A result that is
silently wrong is the one forbidden outcome.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from torch import Tensor
from transformers import (
    Cache,
    DynamicCache,
    PreTrainedModel,
)

import hybrid_kv as hkv
from hybrid_kv.models.cache_state import passing
from tests.contracts.architectures import (
    PAD,
    build,
)
from tests.contracts.edges.calls import (
    CLOSE,
    LOSSY,
    NEW,
    PROMPT,
    TIERED,
    config,
    expected,
    fresh,
    greedy,
    padded,
    prompt,
)
from tests.contracts.edges.further_models import further_config
from tests.pairs import in_pairs


@pytest.mark.parametrize("name", ["llama", "gpt_oss", "glm4"])
@pytest.mark.parametrize("count", [1, 3, 7])
def test_cropped_tokens_leave_no_trace(name: str, count: int) -> None:
    model, ids = build(name), prompt(length=48)
    with hkv.attach(model, config()) as runtime:
        cache = runtime.cache()
        cache.activate_past_recording()
        plain = DynamicCache(config=model.config)
        plain.activate_past_recording()
        # Rounds of a guess, all of it wrong, and the right tokens instead.
        for at in range(24, min(24 + 9 * count, 48), count):
            seen = 0 if at == 24 else at
            right = ids[:, seen : at + count]
            wrong = prompt(length=count, seed=at)
            for one in (cache, plain):
                model(torch.cat([right[:, : 24 - seen], wrong], dim=1), **passing(one))
                one.crop(-count)
                one.crop(0)
            cache.check_integrity()
            assert cache.get_seq_length() == plain.get_seq_length() == max(at, 24)
            rest = right[:, 24 - seen :] if seen == 0 else right
            found = model(rest, **passing(cache)).logits
            torch.testing.assert_close(found, model(rest, **passing(plain)).logits, **CLOSE)
            cache.crop(0)
            plain.crop(0)
            cache.check_integrity()


def test_crop_to_nothing_makes_the_cache_new(model: PreTrainedModel) -> None:
    tokens = expected(model, prompt())
    with hkv.attach(model, config()) as runtime:
        cache = runtime.cache()
        model(prompt(seed=1), **passing(cache))
        cache.crop(-PROMPT)
        assert cache.get_seq_length() == 0
        cache.check_integrity()
        assert torch.equal(greedy(model, prompt(), cache), tokens)


def test_reset_makes_the_cache_new(model: PreTrainedModel) -> None:
    tokens = expected(model, prompt())
    with hkv.attach(model, config()) as runtime:
        cache = runtime.cache()
        greedy(model, prompt(seed=1), cache)
        cache.reset()
        assert cache.get_seq_length() == 0
        assert torch.equal(greedy(model, prompt(), cache), tokens)
        cache.check_integrity()


@pytest.mark.parametrize("settings", [TIERED, LOSSY], ids=["tiered", "lossy"])
def test_the_length_is_tokens_seen_not_tokens_kept(
    model: PreTrainedModel, settings: dict[str, Any]
) -> None:
    with hkv.attach(model, hkv.HybridConfig(**settings)) as runtime:
        cache = runtime.cache()
        assert cache.get_seq_length() == 0
        out = greedy(model, prompt(), cache)
        # The last token was chosen, not yet read.
        assert cache.get_seq_length() == out.shape[1] - 1 == PROMPT + NEW - 1
        cache.check_integrity()


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_conversations_do_not_disturb_each_other(name: str) -> None:
    model = build(name)
    seeds = range(3)
    questions = [[prompt(length=9, seed=10 * seed + turn) for turn in range(3)] for seed in seeds]

    def play(histories: list[Tensor], caches: list[Cache]) -> list[Tensor]:
        for turn in range(3):
            for seed in seeds:
                ids = torch.cat([histories[seed], questions[seed][turn]], dim=1)
                histories[seed] = greedy(model, ids, caches[seed], max_new_tokens=3)
        return histories

    starts = [prompt(length=20 + 6 * seed, seed=seed) for seed in seeds]
    want = play(list(starts), [DynamicCache(config=model.config) for _ in seeds])
    with hkv.attach(model, config()) as runtime:
        caches = [runtime.cache() for _ in seeds]
        found = play(list(starts), caches)
        for cache in caches:
            cache.check_integrity()
    for tokens, exact in zip(found, want, strict=True):
        assert torch.equal(tokens, exact)


def test_a_prompt_of_inference_mode_continues_without_it(model: PreTrainedModel) -> None:
    tokens = expected(model, prompt())
    with hkv.attach(model, config()) as runtime:
        cache = runtime.cache()
        with torch.inference_mode():
            model(prompt()[:, :-1], **passing(cache))
        assert torch.equal(greedy(model, prompt(), cache), tokens)
        cache.check_integrity()


def test_a_prompt_without_inference_mode_continues_in_it(model: PreTrainedModel) -> None:
    tokens = expected(model, prompt())
    with hkv.attach(model, config()) as runtime:
        cache = runtime.cache()
        model(prompt()[:, :-1], **passing(cache))
        with torch.inference_mode():
            assert torch.equal(greedy(model, prompt(), cache), tokens)
        cache.check_integrity()


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 16, 17])
def test_short_prompts_equal_eager_attention(model: PreTrainedModel, length: int) -> None:
    ids = prompt(length=length)
    tokens = expected(model, ids, max_new_tokens=24)
    with hkv.attach(model, config()) as runtime:
        cache = runtime.cache()
        assert torch.equal(greedy(model, ids, cache, max_new_tokens=24), tokens)
        cache.check_integrity()


@pytest.mark.parametrize("name", ["llama", "gpt_oss"])
def test_a_draft_model_changes_nothing(name: str) -> None:
    model, draft = build(name), build("qwen2")
    tokens = expected(model, prompt(), assistant_model=draft)
    assert torch.equal(tokens, expected(model, prompt()))
    assistants = [draft]
    # Drafting for itself, every guess is right; with sliding windows 5.17 of transformers fails.
    if name == "llama" or Version(transformers.__version__) >= Version("5.23"):
        assistants.append(model)
    with hkv.attach(model, config()) as runtime:
        for assistant in assistants:
            cache = runtime.cache()
            assert torch.equal(greedy(model, prompt(), cache, assistant_model=assistant), tokens)
            cache.check_integrity()


@pytest.mark.parametrize(
    ("name", "method"),
    [
        *((name, method) for name in ("llama", "gemma3") for method in ("hybrid", "full")),
        *(("llama", "retrieval_attention"), ("mistral", "full")),
    ],
)
def test_rows_of_a_cache_can_be_repeated_and_selected(name: str, method: str) -> None:
    model = build(name)
    settings = config() if method == "hybrid" else config().replace(method=method)

    def play(cache: Cache) -> Tensor:
        found = [model(prompt(rows=2), **passing(cache)).logits[:, -1]]
        cache.batch_repeat_interleave(3)
        for turn in range(4):
            found.append(model(prompt(6, 3, seed=turn), **passing(cache)).logits)
        cache.batch_select_indices(torch.tensor([5, 0, 3]))
        for turn in range(4):
            found.append(model(prompt(3, 3, seed=turn), **passing(cache)).logits)
        return torch.cat([part.flatten() for part in found])

    want = play(DynamicCache(config=model.config))
    with hkv.attach(model, settings) as runtime:
        cache = runtime.cache()
        torch.testing.assert_close(play(cache), want, **CLOSE)
        cache.check_integrity()


@pytest.mark.parametrize("model_type", ["qwen3_next", "falcon_h1"])
def test_rows_with_recurrent_states_can_be_repeated_and_selected(model_type: str) -> None:
    """Regression: such layers of transformers can be reordered alone."""
    model = fresh(further_config(model_type))

    def play(cache: Cache, *changes: Callable[[], None]) -> Tensor:
        found = [model(prompt(rows=2), **passing(cache)).logits[:, -1]]
        for change, rows in zip(changes, (6, 3, 1), strict=True):
            change()
            found.append(model(prompt(rows, 3), **passing(cache)).logits)
        return torch.cat([part.flatten() for part in found])

    plain = DynamicCache(config=model.config)
    sources = map(torch.tensor, ([0, 0, 0, 1, 1, 1], [5, 0, 3], [1]))
    want = play(plain, *(partial(plain.reorder_cache, rows) for rows in sources))
    with hkv.attach(model, config()) as runtime:
        cache = runtime.cache()
        chosen = (torch.tensor([5, 0, 3]), torch.tensor([False, True, False]))
        select = [partial(cache.batch_select_indices, rows) for rows in chosen]
        found = play(cache, partial(cache.batch_repeat_interleave, 3), *select)
        torch.testing.assert_close(found, want, **CLOSE)
        cache.check_integrity()


def test_padding_goes_with_the_rows_that_are_repeated_and_selected() -> None:
    model, (ids, mask) = build("llama"), padded()

    def play(cache: Cache, *changes: Callable[[], None]) -> Tensor:
        at = (mask.cumsum(1) - 1).clamp_min(0)
        model(ids, attention_mask=mask, position_ids=at, **passing(cache))
        for change in changes:
            change()
        seen = torch.cat([mask[[2, 0, 1]], mask.new_ones(3, 3)], dim=1)
        at = (seen.cumsum(1) - 1)[:, -3:]
        new = prompt(3, 3, seed=1)
        return model(new, attention_mask=seen, position_ids=at, **passing(cache)).logits

    plain = DynamicCache(config=model.config)
    want = play(plain, lambda: plain.reorder_cache(torch.tensor([2, 0, 1])))
    with hkv.attach(model, config()) as runtime:
        cache = runtime.cache()
        select = partial(cache.batch_select_indices, torch.tensor([4, 0, 3]))
        found = play(cache, partial(cache.batch_repeat_interleave, 2), select)
    torch.testing.assert_close(found, want, **CLOSE)


def test_beams_of_a_later_turn_equal_eager_attention(model: PreTrainedModel) -> None:
    # Beam search repeats the prompt before it is computed, so a second turn starts from beams.
    ids = prompt()
    more = prompt(length=6, seed=1)

    def play(cache: Cache) -> Tensor:
        out = greedy(model, ids, cache, num_beams=3, num_return_sequences=3)
        return greedy(model, torch.cat([out, more.repeat(3, 1)], dim=1), cache)

    want = play(DynamicCache(config=model.config))
    with hkv.attach(model, config()) as runtime:
        cache = runtime.cache()
        assert torch.equal(play(cache), want)
        cache.check_integrity()


@pytest.mark.parametrize(
    ("name", "beams", "chunk"), in_pairs(["llama", "gemma3", "gpt_oss"], [1, 2], [None, 9])
)
def test_padded_rows_with_beams_chunks_and_a_padded_later_turn(
    name: str, beams: int, chunk: int | None
) -> None:
    model = build(name)
    ids, mask = padded()
    more = mask.new_ones(3 * beams, 6)
    more[0, :4] = 0  # the first row says less than the others: padding in the middle
    way = {"num_beams": beams, "num_return_sequences": beams, "prefill_chunk_size": chunk}

    def play(cache: Cache) -> Tensor:
        out = greedy(model, ids, cache, attention_mask=mask, **way)
        answer = mask.new_ones(3 * beams, out.shape[1] - PROMPT)
        seen = torch.cat([mask.repeat_interleave(beams, 0), answer, more], dim=1)
        said = prompt(3 * beams, 6, seed=1).masked_fill(more == 0, PAD)
        new = slice(-7, None)  # the last token of the answer was not read yet
        logits = model(
            torch.cat([out, said], dim=1)[:, new],
            attention_mask=seen,
            position_ids=(seen.cumsum(1) - 1).clamp_min(0)[:, new],
            **passing(cache),
        ).logits
        return logits[seen[:, new].bool()]

    with hkv.attach(model, config()) as runtime:
        cache = runtime.cache()
        found = play(cache)
        cache.check_integrity()
    torch.testing.assert_close(found, play(DynamicCache(config=model.config)), **CLOSE)
