"""Exact decoding that samples: by each seed the tokens of full attention, and its distribution."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import hybrid_kv as hkv
from hybrid_kv.models.cache_state import passing
from tests.contracts.architectures import build
from tests.models.exact_calls import NEW, answer, ids, small
from tests.models.folder import model

SEEDS = range(6)
SHARP = {"do_sample": True, "temperature": 0.5}


@pytest.fixture(scope="module")
def plain() -> PreTrainedModel:
    """Of twelve tokens, three of which hardly come."""
    return model()


@pytest.mark.parametrize(
    ("architecture", "method", "options"),
    [
        ("llama", "hybrid", SHARP),
        ("llama", "hybrid", {"do_sample": True, "temperature": 1.3, "top_p": 0.9}),
        ("llama", "quest", {"do_sample": True, "top_k": 5, "repetition_penalty": 1.2}),
        ("gemma2", "hybrid", {"do_sample": True, "top_p": 0.8, "min_p": 0.02}),
    ],
    ids=["cool", "top_p", "top_k", "min_p"],
)
def test_tokens_of_each_seed_are_those_of_full(
    architecture: str, method: str, options: dict[str, Any]
) -> None:
    built, drafted, accepted = build(architecture), 0, 0
    with hkv.load(built, config="full") as llm:
        want = [llm.generate(ids(), max_new_tokens=NEW, seed=s, **options) for s in SEEDS]
    with hkv.load(built, config=small(method)) as llm:
        for seed, whole in zip(SEEDS, want, strict=True):
            found = answer(llm, ids(), seed=seed, exact=True, **options)
            assert found.token_ids == whole.token_ids
            assert found.exact is not None
            drafted, accepted = drafted + found.exact.drafted, accepted + found.exact.accepted
    assert drafted > accepted > 0
    assert len({tuple(one.token_ids) for one in want}) > 3


def test_the_generator_ends_where_that_of_plain_sampling_does() -> None:
    """Without a seed: the next call goes on with the same numbers."""
    options = {**SHARP, "max_new_tokens": NEW}
    answers, states = [], []
    for config, exact in (("full", False), (small(), True), (small(), 3)):
        with hkv.load(build("llama"), config=config) as llm:
            torch.manual_seed(5)
            answers += [[llm.generate(ids(), exact=exact, **options).token_ids for _ in range(2)]]
            states.append(torch.get_rng_state())
    assert answers[0] == answers[1] == answers[2]
    assert torch.equal(states[0], states[1])
    assert torch.equal(states[0], states[2])


def test_greedy_calls_draw_nothing() -> None:
    with hkv.load(build("llama"), config=small()) as llm:
        before = torch.get_rng_state()
        llm.generate(ids(), exact=True, max_new_tokens=NEW)
    assert torch.equal(torch.get_rng_state(), before)


DRAWS = 120


def test_drafted_tokens_have_the_distribution_of_full_attention(plain: PreTrainedModel) -> None:
    """Chi-square over all seeds: 11 degrees of freedom, exceeded once in 10,000 by 38.

    Of the second token, whose draft is verified; drafts that were taken as they are would fail.
    """
    given, found, accepted = ids() % 9 + 3, Counter[int](), 0
    options = {"do_sample": True, "temperature": 2.0, "max_new_tokens": 3, "exact": 1}
    with hkv.load(plain, config=small()) as llm, llm.context(given[:, :-1]) as context:
        for seed in range(DRAWS):
            one = context.ask(given[:, -1:], seed=seed, **options)
            assert one.exact is not None
            found[one.token_ids[1]] += 1
            accepted += one.exact.accepted
    assert 0 < accepted < DRAWS
    expected = torch.zeros(12)
    with hkv.attach(plain, "full") as runtime, torch.no_grad():
        first = plain(given, **passing(runtime.cache())).logits[0, -1].div(2.0).softmax(-1)
        for token, mass in enumerate(first):
            whole = torch.cat([given, torch.tensor([[token]])], 1)
            logits = plain(whole, **passing(runtime.cache())).logits[0, -1]
            expected += mass * logits.div(2.0).softmax(-1)
    counts = torch.tensor([float(found[token]) for token in range(12)])
    assert ((counts - DRAWS * expected) ** 2 / (DRAWS * expected)).sum() < 38
