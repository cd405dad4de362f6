"""Saved contexts and exact answers: files tell which of their tokens full attention has made."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedModel

import hybrid_kv as hkv
from hybrid_kv.saved.manifest import read_manifest
from tests.contracts.architectures import build
from tests.kit import cache_of
from tests.models.exact_calls import ids, small
from tests.models.folder import tokenizer
from tests.saved.scene import TEXT, long_model, rewrite

NEW = 12
QUESTIONS = [ids(1, 5), ids(2, 20)]


def ask(context: hkv.Context, **options: Any) -> hkv.Generation:
    return context.ask(QUESTIONS[1], max_new_tokens=NEW, **options)


@pytest.mark.parametrize("architecture", ["llama", "gemma2"])
@pytest.mark.parametrize("method", ["hybrid", "quest"])
def test_an_opened_context_is_asked_exactly(architecture: str, method: str, tmp_path: Path) -> None:
    plain, path = build(architecture), tmp_path / "a.hkv"
    with hkv.load(plain, config="full") as llm, llm.context(ids()) as context:
        want = ask(context).token_ids
    with hkv.load(plain, config=small(method)) as llm:
        llm.context(ids()).save(path)
        assert read_manifest(path).inexact_from is None
        opened = llm.open(path)
        found = ask(opened, exact=True)
        assert found.token_ids == want
        assert found.exact is not None
        assert found.exact.drafted > found.exact.accepted > 0
        cache_of(opened).check_integrity()


def _kept(llm: hkv.LLM, path: Path) -> list[int]:
    context = llm.context(ids())
    context.ask(QUESTIONS[0], keep=True, max_new_tokens=NEW)
    context.save(path)
    assert read_manifest(path).inexact_from == ids().shape[1]
    return context.ids[0].tolist()


@pytest.mark.parametrize("architecture", ["llama", "gemma2"])
@pytest.mark.parametrize("keep", [False, True])
def test_approximate_tokens_of_a_file_are_computed_again(
    architecture: str, keep: bool, tmp_path: Path
) -> None:
    """And the file's entries are what they were: a second question sees the same."""
    plain, path = build(architecture), tmp_path / "a.hkv"
    with hkv.load(plain, config=small()) as llm:
        whole = _kept(llm, path)
        opened = llm.open(path)
        assert cache_of(opened).exact_tokens == ids().shape[1]
        found = [ask(opened, exact=True, keep=keep).token_ids for _ in range(2)]
        cache_of(opened).check_integrity()
        assert cache_of(opened).kv.check_source is not None
    with hkv.load(plain, config="full") as llm:
        context = llm.context(whole)
        assert found == [ask(context, keep=keep).token_ids for _ in range(2)]


@pytest.mark.parametrize("how", ["int8", "older"])
def test_files_whose_entries_may_be_others_are_computed_again(how: str, tmp_path: Path) -> None:
    """Of 8 bits; and of versions that did not say which tokens full attention has made."""
    plain, path = build("llama"), tmp_path / "a.hkv"
    with hkv.load(plain, config="full") as llm, llm.context(ids()) as context:
        want = ask(context).token_ids
    with hkv.load(plain, config=small()) as llm:
        context = llm.context(ids())
        if how == "int8":
            context.save(path, compress="int8")
            assert read_manifest(path).inexact_from == 0
        else:
            context.save(path)
            rewrite(path, lambda content: content.pop("inexact_from"))
        opened = llm.open(path)
        assert cache_of(opened).exact_tokens == 0
        assert ask(opened, exact=True).token_ids == want
        cache_of(opened).check_integrity()
        assert cache_of(opened).exact_tokens == 0
        opened.save(tmp_path / "b.hkv")
        assert read_manifest(tmp_path / "b.hkv").inexact_from == 0


@pytest.fixture(scope="module")
def plain() -> PreTrainedModel:
    return long_model()


@pytest.mark.parametrize("first", [False, True], ids=["approximate", "exact"])
def test_prompts_of_a_folder_are_taken_as_they_are(
    plain: PreTrainedModel, first: bool, tmp_path: Path
) -> None:
    """A prompt is exact, whatever answered it."""
    with hkv.load(plain, tokenizer=tokenizer(), config="full") as llm:
        want = llm.generate(f"{TEXT} owl", max_new_tokens=NEW).token_ids
    settings = {"config": small(), "tokenizer": tokenizer(), "cache_dir": tmp_path}
    with hkv.load(plain, **settings) as llm:
        llm.generate(TEXT, exact=first, max_new_tokens=NEW)
    with hkv.load(plain, **settings) as llm:
        found = llm.generate(f"{TEXT} owl", exact=True, max_new_tokens=NEW)
    assert found.token_ids == want
    assert found.reused_tokens > 0
    assert found.exact is not None
    assert found.exact.passes > 0
