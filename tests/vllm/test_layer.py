"""A layer over a paged cache, with what stands for vLLM's kernel; vLLM is not needed."""

from __future__ import annotations

import random
from functools import partial

import numpy as np
import pytest
import torch

from hybrid_kv.ops.native import engine_state
from hybrid_kv.ops.native.paged_cache import PagedSketch, SearchRange
from hybrid_kv.ops.tail import AttendedSums, Tail
from hybrid_kv.vllm.settings import VllmSettings
from tests.vllm.paged import BLOCK, DIM, GROUP, HEADS, PagedDriver, PagedSequence, attention

pytestmark = pytest.mark.skipif(engine_state().isa is None, reason="decoding needs the engine")


@pytest.fixture(autouse=True)
def short_contexts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hybrid_kv.vllm.settings.LEAST_SEARCHED", 1024)
    monkeypatch.setattr("hybrid_kv.vllm.layer.LEARN_TOKENS", 1024)


SMALL = VllmSettings(budget="64", sink_tokens=16, window_tokens=32)


def near(found: torch.Tensor, one: PagedSequence, query: torch.Tensor, atol: float = 1e-5) -> None:
    torch.testing.assert_close(found, attention(query, one.k, one.v), atol=atol, rtol=1e-4)


def test_chunks_mixed_steps_and_decodes_attend_everything_with_budget_all() -> None:
    driver = PagedDriver(VllmSettings(budget="all"))
    one, other = PagedSequence(), PagedSequence()
    for work in ([(one, 70)], [(one, 1), (other, 33)], [(other, 40), (one, 1)], [(other, 1)]):
        outputs = driver.step(*work)
        for (sequence, _), out, query in zip(work, outputs, driver.queries, strict=True):
            near(out, sequence, query)


def test_a_chunk_of_one_token_is_a_prompt() -> None:
    driver, one = PagedDriver(SMALL), PagedSequence()
    driver.step((one, 3000))
    (out,) = driver.step((one, 1), prompts=True)
    near(out, one, driver.queries[0])


def test_a_short_context_is_attended_as_a_whole() -> None:
    driver, one = PagedDriver(SMALL), PagedSequence()
    driver.step((one, 1040))
    assert driver.layer.index is not None
    (out,) = driver.step((one, 1))
    near(out, one, driver.queries[0])


def estimated(driver: PagedDriver, one: PagedSequence, query: torch.Tensor) -> torch.Tensor:
    """Attention by the definition: sinks, window, the found, and the estimate of the others."""
    settings = driver.settings
    first, end = settings.sink_tokens, (one.length - settings.window_tokens) // 16 * 16
    index = driver.layer.index
    assert index is not None
    top_k = int(settings.budget)
    own = SearchRange(one.blocks, first, end - first, top_k, 2 * top_k)
    q = query.view(1, HEADS, GROUP, DIM)
    ids, scores = index.search(q.contiguous(), [own])
    fresh = PagedSketch(driver.cache, index.maps)
    fresh.encode(one.blocks, end)
    full = torch.from_numpy(one.blocks[: end // BLOCK]).long()
    assert torch.equal(fresh.codes[full], index.codes[full])
    token = torch.arange(one.length)
    rows = driver.shape.rows(one.blocks, token)
    found = (ids[0, ..., None] == rows.T[:, None, None]).any(2)  # [Hkv, G, n]
    attended = found | (token < first) | (token >= end)
    scale = DIM**-0.5
    tail = driver.layer.moments.of(own, partial(driver.shape.rows, one.blocks))
    assert tail is not None
    assert not tail.is_outgrown(end // BLOCK * BLOCK - first)
    known = slice(first, first + tail.count)
    for name, moment in Tail.of(one.k[:, known], one.v[:, known]).tensors().items():
        torch.testing.assert_close(tail.tensors()[name], moment)
    sums = AttendedSums(torch.full(scores.shape[1:3], top_k), scores[0].sum(-1))
    limit = scale * scores[0].amin(-1)
    part = tail.attend(q[0], own.num_tokens, sums, limit, scale=scale)
    rest = part.without(found.float() @ one.v)
    logits = (scale * q[0] @ one.k.mT).masked_fill(~attended, -torch.inf)
    weights = torch.stack([logits.logsumexp(-1), rest.lse]).softmax(0)[..., None]
    out = weights[0] * (logits.softmax(-1) @ one.v) + weights[1] * rest.out
    return out.view(1, HEADS * GROUP, DIM)


def test_a_searched_decode_is_what_its_definition_says() -> None:
    driver, one = PagedDriver(SMALL, seed=3), PagedSequence()
    driver.step((one, 2500))
    for _ in range(20):
        (out,) = driver.step((one, 1))
    torch.testing.assert_close(out, estimated(driver, one, driver.queries[0]), atol=1e-5, rtol=1e-4)


def test_sequences_of_one_step_do_not_disturb_each_other() -> None:
    alone = PagedDriver(SMALL, num_blocks=400, seed=1)
    lengths, sequences = (1500, 3000, 40), [PagedSequence() for _ in range(3)]
    for one, length in zip(sequences, lengths, strict=True):
        alone.step((one, length))
    outputs = alone.step(*((one, 1) for one in sequences))
    for one, query, out in zip(sequences, alone.queries, outputs, strict=True):
        if one.length < 1000:
            near(out, one, query)
        else:
            torch.testing.assert_close(out, estimated(alone, one, query), atol=1e-5, rtol=1e-4)


def test_blocks_that_are_used_again_are_searched_by_their_new_keys() -> None:
    """Sequences come and go over few blocks, whose codes and moments would be those of others."""
    draw = random.Random(5)
    driver = PagedDriver(SMALL, num_blocks=260, seed=2)
    running: list[PagedSequence] = []
    checked = 0
    for _ in range(60):
        needed = draw.randrange(40, 2400)
        while len(driver.free) * BLOCK < needed + BLOCK * 20 and running:
            driver.give_back(running.pop(draw.randrange(len(running))))
        one = PagedSequence()
        running.append(one)
        while one.length < needed:
            driver.step((one, min(600, needed - one.length + 1)))
        outputs = driver.step(*((each, 1) for each in running))
        for each, query, out in zip(running, driver.queries, outputs, strict=True):
            if each.length > 1500:
                checked += 1
                torch.testing.assert_close(
                    out, estimated(driver, each, query), atol=1e-5, rtol=1e-4
                )
            elif each.length < 1000:
                near(out, each, query)
    assert checked > 30


def test_a_shared_prefix_needs_no_codes_of_its_own() -> None:
    driver, one = PagedDriver(SMALL, seed=4), PagedSequence()
    driver.step((one, 64 * BLOCK))
    other = PagedSequence(one.table[:60], one.k[:, : 60 * BLOCK], one.v[:, : 60 * BLOCK])
    driver.step((other, 200))
    index = driver.layer.index
    assert index is not None
    assert index.encode(other.blocks, 60 * BLOCK) == 0
    (out,) = driver.step((other, 1))
    torch.testing.assert_close(
        out, estimated(driver, other, driver.queries[0]), atol=1e-5, rtol=1e-4
    )


def test_a_sequence_whose_keys_are_not_finite_is_attended_as_a_whole() -> None:
    driver, one, other = PagedDriver(SMALL, num_blocks=400), PagedSequence(), PagedSequence()
    driver.step((one, 2000))
    driver.step((other, 1500))
    row = driver.shape.rows(other.blocks, torch.tensor([700]))[0, 0]
    driver.cache.view(-1, DIM)[row] = torch.nan
    driver.layer.index.coded[:] = 0
    outputs = driver.step((one, 1), (other, 1))
    want = estimated(driver, one, driver.queries[0])
    torch.testing.assert_close(outputs[0], want, atol=1e-5, rtol=1e-4)
    assert bool(outputs[1].isnan().any())


def test_a_query_that_is_not_finite_spoils_no_other_sequence() -> None:
    driver, one, other = PagedDriver(SMALL, num_blocks=400), PagedSequence(), PagedSequence()
    driver.step((one, 2000))
    driver.step((other, 1500))
    driver.spoiled = 0
    outputs = driver.step((one, 1), (other, 1))
    want = estimated(driver, other, driver.queries[1])
    torch.testing.assert_close(outputs[1], want, atol=1e-5, rtol=1e-4)
    assert bool(outputs[0].isnan().any())


def test_sinks_that_are_weights_take_their_share() -> None:
    """Of contexts attended as a whole, and of searched ones; prompts are vLLM's."""
    sinks = torch.linspace(-1.0, 6.0, HEADS * GROUP)
    plain, driver = PagedDriver(SMALL, seed=8), PagedDriver(SMALL, seed=8, sinks=sinks)
    for count in (40, 2300):
        outputs = []
        for own in (plain, driver):
            one = PagedSequence()
            own.step((one, count))
            outputs += own.step((one, 1))
        k = one.k.repeat_interleave(GROUP, 0)
        lse = (DIM**-0.5 * driver.queries[0].transpose(0, 1) @ k.mT).logsumexp(-1)[:, 0]
        share = (lse - sinks).sigmoid()[:, None]
        # What is searched estimates the sum of weights of which the sinks take their share.
        torch.testing.assert_close(
            outputs[1], outputs[0] * share, atol=1e-5 if count == 40 else 2e-2, rtol=1e-4
        )


def test_other_memory_is_another_cache() -> None:
    driver, one = PagedDriver(SMALL), PagedSequence()
    driver.step((one, 2000))
    driver.cache = driver.cache.clone()
    (out,) = driver.step((one, 1))
    near(out, one, driver.queries[0])


def test_codes_fall_to_the_first_slot_that_is_written() -> None:
    driver, one = PagedDriver(SMALL), PagedSequence()
    driver.step((one, 2000))
    index = driver.layer.index
    assert index is not None
    assert (index.coded[one.blocks[:62]] == BLOCK).all()
    index.overwrite(np.array([one.table[3] * BLOCK + 21, one.table[3] * BLOCK + 9]))
    assert index.coded[one.table[3]] == 9
    assert index.encode(one.blocks, 1984) == 1984 - 3 * BLOCK


def test_an_index_is_learned_again_when_a_context_has_grown_by_decoding() -> None:
    driver, one = PagedDriver(SMALL, seed=6), PagedSequence()
    driver.step((one, 1200))
    first = driver.layer.index
    for _ in range(310):
        (out,) = driver.step((one, 1))
    assert driver.layer.index is not first
    torch.testing.assert_close(out, estimated(driver, one, driver.queries[0]), atol=1e-5, rtol=1e-4)
