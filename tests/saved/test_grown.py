"""Every method: a context that was asked and continued is saved as it stands, or refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import hybrid_kv as hkv
from hybrid_kv.errors import ConfigError
from hybrid_kv.index._base import SavedIndex
from hybrid_kv.plugins import METHODS
from hybrid_kv.types import Needs
from tests.contracts.test_generate_matrix import _parameters_of
from tests.kit import cache_of, extents
from tests.saved.scene import INDEXES, SMALL, TEXT, loaded, long_model

BUILT_AGAIN = {"loki", "magic_pig"}
"""Over all keys, where the context's own index had learned from the first ones: it finds others."""


@pytest.fixture(scope="module")
def plain() -> PreTrainedModel:
    torch.set_num_threads(1)
    return long_model()


def learns_without_file(context: hkv.Context) -> bool:
    """Whether an index learns from the prompt's queries and has no form in a file."""
    return any(
        type(index).needs(index.params) != Needs() and not isinstance(index, SavedIndex)
        for index in (extent.index.serving for extent in extents(context) if extent.has_index)
    )


@pytest.mark.usefixtures("untrained_heads")
@pytest.mark.parametrize("method", list(METHODS))
def test_a_grown_context_answers_the_same_from_its_file(
    plain: PreTrainedModel, method: str, tmp_path: Path
) -> None:
    settings = {name: SMALL[name] for name in SMALL if name in _parameters_of(method)}
    with loaded(plain, method, **{"page_size": 16, **settings}) as llm:
        context = llm.context(" ".join(TEXT.split()[:120]))
        context.ask("oak fox", keep=True, max_new_tokens=9)
        context.append(" ".join(TEXT.split()[120:180]))
        if learns_without_file(context):
            with pytest.raises(
                ConfigError, match="choose one of kind auto, sketch, graph or blocks"
            ):
                context.save(tmp_path / "a.hkv")
            assert list(tmp_path.iterdir()) == []
            return
        context.save(tmp_path / "a.hkv")
        opened = llm.open(tmp_path / "a.hkv")
        cache_of(opened).check_integrity()
        assert torch.equal(opened.ids, context.ids)
        if method in BUILT_AGAIN:
            assert len(opened.ask("sea owl", max_new_tokens=3).token_ids) == 3
            return
        expected = context.ask("sea owl", max_new_tokens=3).token_ids
        assert opened.ask("sea owl", max_new_tokens=3).token_ids == expected
        opened.append("elm ice sky")
        context.append("elm ice sky")
        expected = context.ask("bee", max_new_tokens=3).token_ids
        assert opened.ask("bee", max_new_tokens=3).token_ids == expected


@pytest.mark.parametrize("kind", [*INDEXES, "blocks"])
def test_what_is_cut_is_saved_with_its_index(
    plain: PreTrainedModel, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was built of keys alone when it was opened, and never learned again."""
    index = INDEXES.get(kind, {"kind": kind, "page_size": 16})
    with loaded(plain, "hybrid", **SMALL, cold={"top_k": 5, "index": index}) as llm:
        context = llm.context(TEXT)
        serves = {head.get("serves") for head in described(context)}
        context.truncate(500)
        context.save(tmp_path / "a.hkv")
        for owner in {type(index) for index in serving(context)}:
            monkeypatch.setattr(owner, "build", lambda *_: pytest.fail("built again"))
        opened = llm.open(tmp_path / "a.hkv")
        assert {head.get("serves") for head in described(opened)} == serves
        assert [len(index) for index in serving(opened)] == [it.length for it in extents(context)]
        assert all(it.length < len(it.index.serving) for it in extents(context))
        cache_of(opened).check_integrity()
        assert len(opened.ask("sea owl", max_new_tokens=4).token_ids) == 4
        agings = [extent.index.aging for extent in extents(opened)]
        assert all((aging is None) == (kind == "blocks") for aging in agings)


def serving(context: hkv.Context) -> list[Any]:
    return [extent.index.serving for extent in extents(context)]


def described(context: hkv.Context) -> list[dict[str, Any]]:
    return [head for index in serving(context) for head in index.describe()]


def test_a_context_that_was_cut_is_saved(plain: PreTrainedModel, tmp_path: Path) -> None:
    with loaded(plain, "hybrid", **SMALL, cold={"top_k": "all"}) as llm:
        context: hkv.Context = llm.context(TEXT)
        context.truncate(300)
        context.save(tmp_path / "a.hkv")
        opened = llm.open(tmp_path / "a.hkv")
        cache_of(opened).check_integrity()
        fresh = llm.context(" ".join(TEXT.split()[:300]))
        expected = fresh.ask("sea owl", max_new_tokens=20).token_ids
        assert opened.ask("sea owl", max_new_tokens=20).token_ids == expected
