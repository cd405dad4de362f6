"""Contexts on disk: room for them, and what is damaged, foreign, or cannot be read or written."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import hybrid_kv as hkv
from hybrid_kv.api.building import build_context
from hybrid_kv.errors import ConfigError, ContextWarning, FileFormatError, WriteError
from hybrid_kv.saved import ContextRegistry, RegistryCounters, verify_context
from hybrid_kv.saved.folders import ContextFolder, num_bytes
from hybrid_kv.saved.manifest import VERSION
from tests.saved.scene import SMALL, blocks_of, flip, long_model, rewrite
from tests.saved.test_registry import WORDS, cached, generated, text


@pytest.fixture(scope="module")
def plain() -> PreTrainedModel:
    return long_model()


# Room -------------------------------------------------------------------------------------------


def sizes(folder: Path) -> list[int]:
    return [num_bytes(path) for path in folder.glob("*/*.hkv")]


def tokens_there(folder: Path) -> set[int]:
    return {verify_context(path).manifest.num_tokens for path in folder.glob("*/*.hkv")}


def apart(count: int) -> str:
    """A text that shares no block with that of another length."""
    return " ".join([*["oak"] * (count % 7), *["elm"] * (count % 5), *WORDS[:count]][:count])


def test_what_was_used_least_recently_makes_room(plain: PreTrainedModel, tmp_path: Path) -> None:
    with cached(plain, tmp_path, "full") as llm:
        for count in (401, 402, 403):
            llm.context(apart(count))
        limit = sum(sizes(tmp_path)) + 4000
    with cached(plain, tmp_path, "full", cache_limit=limit) as llm:
        assert llm.generate(apart(401), max_new_tokens=1).reused_tokens == 400
        llm.context(apart(404))
        assert tokens_there(tmp_path) == {401, 403, 404}
        assert llm.prefixes.registry.counters.evicted == 1
        llm.context(apart(405))
        assert tokens_there(tmp_path) == {401, 404, 405}
        assert sum(sizes(tmp_path)) <= limit


def test_a_context_that_is_being_opened_stays_and_an_open_one_is_readable(
    plain: PreTrainedModel, tmp_path: Path
) -> None:
    with cached(plain, tmp_path, "flat", **SMALL, cold={"top_k": 5}) as llm:
        expected = llm.context(apart(401)).ask("oak", max_new_tokens=20).token_ids
        (path,) = tmp_path.glob("*/*.hkv")
        limit = num_bytes(path) + 1000
    with cached(plain, tmp_path, "flat", cache_limit=limit, **SMALL, cold={"top_k": 5}) as llm:
        opened = llm.context(apart(401))
        assert llm.prefixes.registry.counters.hits == 1
        with ContextFolder(tmp_path).reading(path):  # as another process does
            llm.context(apart(402))
        assert tokens_there(tmp_path) == {401, 402}
        llm.context(apart(403))
        assert tokens_there(tmp_path) == {403}
        assert opened.ask("oak", max_new_tokens=20).token_ids == expected


def test_a_context_that_is_too_large_is_not_kept(plain: PreTrainedModel, tmp_path: Path) -> None:
    with cached(plain, tmp_path, "full", cache_limit=1000) as llm:
        with pytest.warns(ContextWarning, match="that the cache may have; raise cache_limit; the"):
            llm.context(apart(401))
        assert sizes(tmp_path) == []
    for wrong in (0, -1, "much", True, 2.5, None):
        with pytest.raises(ConfigError, match="cache_limit must be a number of bytes like '20GiB'"):
            ContextRegistry(tmp_path, wrong)


def test_a_small_share_of_a_large_context_is_computed(
    plain: PreTrainedModel, tmp_path: Path
) -> None:
    with cached(plain, tmp_path, "full") as llm:
        ids = torch.tensor([[3, 4, 5, 6, 7, 8] * 683])[:, :4090]
        llm.context(ids)
        for shared, taken in ((255, 0), (256, 256)):
            changed = ids[:, : shared + 3].clone()
            changed[0, shared] = 9
            assert llm.generate(changed, max_new_tokens=1).reused_tokens == taken
    with cached(plain, tmp_path / "2", "full") as llm:
        llm.model.config.max_position_embeddings = 8192
        long = torch.tensor([[3, 4, 5, 6, 7, 8] * 820])
        llm.context(long)  # of which 256 are less than a sixteenth
        changed = long[:, :300].clone()
        changed[0, 256] = 9
        assert llm.generate(changed, max_new_tokens=1).reused_tokens == 0
        llm.model.config.max_position_embeddings = 4096


def test_what_takes_longer_to_find_than_to_compute_saves_no_time(
    plain: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = count(0.0, 1000.0)  # each look at the clock is much later than the one before
    monkeypatch.setattr("hybrid_kv.saved.registry.perf_counter", lambda: next(now))
    for _ in range(2):
        with cached(plain, tmp_path, "full") as llm:
            llm.generate(apart(600), max_new_tokens=1)
    found = ContextRegistry(tmp_path).counters
    assert (found.hits, found.seconds_saved) == (1, 0)


def test_counters_last(plain: PreTrainedModel, tmp_path: Path) -> None:
    for _ in range(2):
        with cached(plain, tmp_path, "full") as llm:
            llm.generate(apart(600), max_new_tokens=1)
            llm.generate("oak", max_new_tokens=1)  # too short to count
    found = ContextRegistry(tmp_path).counters
    assert (found.hits, found.misses, found.tokens_saved, found.added) == (1, 1, 599, 1)
    assert 0 <= found.seconds_saved < 60  # finding it took longer than computing it: negative once
    (tmp_path / "counters.json").write_text("{")
    assert ContextRegistry(tmp_path).counters == RegistryCounters()


# What is not as it was written -------------------------------------------------------------------


def _flip_a_value(path: Path) -> None:
    block = blocks_of(path) / "layer-0001.safetensors"
    flip(block, block.stat().st_size - 100)


def _link(path: Path) -> None:
    moved = path.with_name("elsewhere")
    path.rename(moved)
    path.symlink_to(moved)


def _link_inside(path: Path) -> None:
    block = blocks_of(path) / "layer-0001.safetensors"
    block.rename(path.parent / "elsewhere")
    block.symlink_to(path.parent / "elsewhere")


def _file(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.write_text("of another program")


DAMAGE: dict[str, tuple[Any, str]] = {
    "a value": (_flip_a_value, "not as written: 'layer-0001.safetensors'"),
    "ids": (lambda p: flip(blocks_of(p) / "tokens.safetensors", 300), "token ids are not those"),
    "manifest": (lambda p: (p / "manifest.json").write_text("{"), "manifest.json is not JSON"),
    "outside": (lambda p: rewrite(p, lambda c: c.update(ids="../x")), "inside its own folder"),
    "a link": (_link, "is a symbolic link, which may lead anywhere"),
    "a link inside": (_link_inside, "is a symbolic link, which may lead anywhere"),
    "a file": (_file, "is no saved context of hybrid_kv: it is no folder"),
    "gone": (lambda p: (blocks_of(p) / "layer-0000.safetensors").unlink(), "is not there|not as"),
    "version": (
        lambda p: (p / "manifest.json").write_text(
            (p / "manifest.json").read_text().replace(f'"version": {VERSION}', '"version": 9', 1)
        ),
        "has format version 9",
    ),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_what_is_damaged_is_dropped_and_never_used(
    plain: PreTrainedModel, what: str, tmp_path: Path
) -> None:
    damage, sentence = DAMAGE[what]
    with cached(plain, tmp_path, "full") as llm:
        expected = generated(llm, apart(500))
    with cached(plain, tmp_path, "full") as llm:
        (path,) = tmp_path.glob("*/*.hkv")
        damage(path)
        with pytest.warns(ContextWarning, match=sentence):
            assert generated(llm, apart(500)) == expected
        assert generated(llm, apart(500)) == (expected[0], 499)
        counters = llm.prefixes.registry.counters
    assert (counters.damaged, counters.hits) == (1, 1)
    elsewhere = path.with_name("elsewhere")
    assert what not in ("a link", "a link inside", "a file") or elsewhere.exists()


def test_what_another_process_leaves_in_the_place_of_what_was_read_stays(
    plain: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes a context away and leaves it again while this one reads it: half of it had gone."""
    with cached(plain, tmp_path, "full") as llm:
        llm.context(apart(401))
    (path,) = tmp_path.glob("*/*.hkv")

    def reading(root: Path, manifest: Any) -> torch.Tensor:
        shutil.copytree(root, beside := tmp_path / "beside")
        shutil.rmtree(root)
        beside.rename(root)
        raise FileFormatError("its ids are not there")

    monkeypatch.setattr("hybrid_kv.saved.registry.read_ids", reading)
    with cached(plain, tmp_path, "full") as llm:
        assert llm.generate(apart(401), max_new_tokens=1).reused_tokens == 0
        assert llm.prefixes.registry.counters.damaged == 0
    assert verify_context(path).manifest.num_tokens == 401


def test_the_next_best_is_taken(plain: PreTrainedModel, tmp_path: Path) -> None:
    with cached(plain, tmp_path, "full") as llm:
        llm.context(apart(300))
        llm.context(text(0, *apart(300).split(), *WORDS[:300]))
        first = max(tmp_path.glob("*/*.hkv"), key=num_bytes)
        _flip_a_value(first)
    with cached(plain, tmp_path, "full") as llm:
        whole = text(0, *apart(300).split(), *WORDS[:290])
        with pytest.warns(ContextWarning, match="it was dropped from the cache"):
            assert llm.generate(whole, max_new_tokens=1).reused_tokens == 300


def test_a_context_of_another_kind_in_the_wrong_place_is_not_used(
    plain: PreTrainedModel, tmp_path: Path
) -> None:
    """Of another page size and dtype, moved by hand to where others are looked for."""
    with cached(plain, tmp_path, "quest", page_budget="all", page_size=32) as llm:
        llm.context(apart(500))
        (path,) = tmp_path.glob("*/*.hkv")
    with cached(plain, tmp_path, "quest", page_budget="all", page_size=16) as llm:
        llm.context(apart(700))
        own = next(p for p in tmp_path.glob("*/*.hkv") if p != path)
        path.rename(own.parent / path.name)
        with pytest.warns(ContextWarning, match="page_size 32, got 16; .*; the prompt is computed"):
            assert llm.generate(apart(500), max_new_tokens=1).reused_tokens == 0
        rewrite(own, lambda content: content.update(dtype="bfloat16"))
        with pytest.warns(ContextWarning, match="dtype bfloat16, got float32"):
            assert llm.generate(apart(700), max_new_tokens=1).reused_tokens == 0


# Places that cannot be used ----------------------------------------------------------------------


def test_a_folder_that_is_none_is_refused(plain: PreTrainedModel, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ConfigError, match=r"must be a folder that can be written to.*another"):
            hkv.load(plain, cache_dir=folder)


@pytest.mark.skipif(os.geteuid() == 0, reason="permissions do not bind root")
def test_no_permission_is_said(plain: PreTrainedModel, tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(ConfigError, match="Permission denied"):
        hkv.load(plain, cache_dir=tmp_path)


def test_a_context_that_may_not_be_read_is_computed(
    plain: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with cached(plain, tmp_path, "full") as llm:
        expected = generated(llm, apart(500))
    with cached(plain, tmp_path, "full") as llm:
        real = Path.read_bytes

        def refusing(path: Path) -> bytes:
            if path.name == "manifest.json":
                raise PermissionError(13, "Permission denied")
            return real(path)

        monkeypatch.setattr(Path, "read_bytes", refusing)
        with pytest.warns(ContextWarning, match="Permission denied; check its path; the prompt is"):
            assert generated(llm, apart(500)) == expected
        monkeypatch.undo()
        assert generated(llm, apart(500)) == (expected[0], 499)


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system with 512 KiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    words = ["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", str(disk)]
    try:
        run = subprocess.run(words, capture_output=True, check=False)
    except FileNotFoundError:
        pytest.skip("needs the program mount")
    if run.returncode:
        pytest.skip("needs the right to mount a file system")
    try:
        yield disk
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_a_full_disk_costs_no_answer(plain: PreTrainedModel, tiny_disk: Path) -> None:
    small, large = apart(300), apart(900)  # 2 layers, 2 heads, 24 channels, float32: 768 B a token
    with cached(plain, None, "full") as llm:
        expected = [generated(llm, small)[0], generated(llm, large)[0]]
    with cached(plain, tiny_disk / "c", "full") as llm:
        assert generated(llm, small) == (expected[0], 0)
        with pytest.warns(ContextWarning, match="No space left on device; free space or choose an"):
            assert generated(llm, large) == (expected[1], 0)
        assert generated(llm, small) == (expected[0], 299)
        with pytest.warns(ContextWarning):
            context = llm.context(large)
        with pytest.raises(WriteError, match="No space left on device"):
            context.save(tiny_disk / "a.hkv")
        with pytest.raises(WriteError, match="No space left on device; free space, and start"):
            build_context(llm, large, tiny_disk / "b.hkv")
        shutil.rmtree(tiny_disk / "c")
        built = build_context(llm, apart(240), tiny_disk / "b.hkv")
        assert built.num_tokens == 240
        verify_context(tiny_disk / "b.hkv")
