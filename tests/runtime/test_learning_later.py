"""Indexes of what comes after the prompt learn from its queries and from the latest ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import hybrid_kv as hkv
from tests.kit import cache_of, extents
from tests.saved.scene import INDEXES, SMALL, TEXT, loaded, long_model

KINDS = ["sketch", "graph", "auto"]


@pytest.fixture(scope="module")
def plain() -> PreTrainedModel:
    torch.set_num_threads(1)
    return long_model()


def settings(kind: str) -> dict[str, Any]:
    index = dict(INDEXES[kind])
    place = "sizes" if kind == "auto" else None
    longer = {"horizon_tokens": 128}
    index |= longer if place is None else {place: {**index[place], **longer}}
    return {**SMALL, "cold": {"top_k": 5, "index": index}}


def served(context: hkv.Context) -> set[str]:
    indexes = [extent.index for extent in extents(context)]
    return {head["serves"] for index in indexes for head in index.describe()}


def learned(kind: str) -> set[str]:
    return {kind} if kind != "auto" else {"sketch", "graph"}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("first", [5, 100])
def test_a_context_that_began_short_is_learned(
    plain: PreTrainedModel, kind: str, first: int
) -> None:
    """The prompt fits the window, or is too short for codes; what is read later is not."""
    words = TEXT.split()
    with loaded(plain, "hybrid", **settings(kind)) as llm:
        context = llm.context(" ".join(words[:first]))
        assert served(context) == ({"flat"} if extents(context) else set())
        for start in range(first, 900, 200):
            context.append(" ".join(words[start : start + 200]))
        assert kind == "auto" or served(context) == learned(kind)
        for extent in extents(context):
            assert extent.index.aging is not None
            assert len(extent.index.aging.asked) > 64
        cache_of(context).check_integrity()


@pytest.mark.parametrize("kind", ["sketch", "graph"])
def test_what_follows_a_shared_extent_is_learned(plain: PreTrainedModel, kind: str) -> None:
    words = TEXT.split()
    with loaded(plain, "hybrid", **settings(kind)) as llm:
        context = llm.context(" ".join(words[:400]))
        fork = context.fork()
        for start in range(400, 900, 100):
            fork.append(" ".join(words[start : start + 100]))
        (_, own), *_ = zip(extents(fork)[::2], extents(fork)[1::2], strict=True)
        assert {head["serves"] for head in own.index.describe()} == {kind}
        first, later = (extent.index.aging for extent in extents(fork)[:2])
        # The same query stands at the same position, whichever extent asks.
        assert later.prompt.first - later.prompt_keys == (
            first.prompt.first - first.prompt_keys + extents(fork)[0].length
        )


@pytest.mark.parametrize("kind", ["sketch", "graph"])
def test_a_context_that_was_cut_is_learned_again(plain: PreTrainedModel, kind: str) -> None:
    """It was scanned from then on."""
    with loaded(plain, "hybrid", **settings(kind)) as llm:
        context = llm.context(TEXT)
        context.truncate(500)
        context.append(" ".join(TEXT.split()[:100]))
        assert served(context) == {kind}
        assert extents(context)[0].length > 500
        cache_of(context).check_integrity()


def test_queries_of_appended_text_are_noted_where_they_were_asked(plain: PreTrainedModel) -> None:
    with loaded(plain, "hybrid", **settings("sketch")) as llm:
        context = llm.context(TEXT)
        before = context.ids.shape[1]
        context.append(" ".join(TEXT.split()[:150]))
        aging = extents(context)[0].index.aging
        offset = aging.prompt.first - aging.prompt_keys
        positions = [offset + count for _, count in aging.asked]
        assert positions[-1] == before + 149
        assert positions[0] >= before
        assert len(positions) == 75
        assert all(queries.shape == (2, 3, 24) for queries, _ in aging.asked)
