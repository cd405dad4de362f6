"""Each refusal is one sentence that says what and why; an old context stays as it was."""

from __future__ import annotations

import errno
import os
import resource
import shutil
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import hybrid_kv as hkv
from hybrid_kv.errors import (
    ConfigError,
    FileFormatError,
    OtherContextError,
    ReadError,
    WriteError,
)
from hybrid_kv.saved import opening, verify_context
from hybrid_kv.saved.identity import settings_of_file
from tests.models.folder import model, tokenizer
from tests.saved.scene import INDEXES, SMALL, TEXT, blocks_of, flip, loaded, long_model, rewrite

COLD = {"top_k": 5, "index": INDEXES["sketch"]}


@pytest.fixture(scope="module")
def plain() -> PreTrainedModel:
    return long_model()


@pytest.fixture(scope="module")
def twin() -> PreTrainedModel:
    """The same once more, for other attachments."""
    return long_model()


@pytest.fixture(scope="module")
def llm(plain: PreTrainedModel) -> Iterator[hkv.LLM]:
    with loaded(plain, "hybrid", **SMALL, cold=COLD) as made:
        yield made


@pytest.fixture(scope="module")
def context(llm: hkv.LLM) -> hkv.Context:
    return llm.context(TEXT)


@pytest.fixture(scope="module")
def original(context: hkv.Context, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("saved") / "a.hkv"
    context.save(root)
    return root


@pytest.fixture
def saved(original: Path, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    return Path(shutil.copytree(original, tmp_path / "a.hkv"))


# Other models, tokenizers and settings ----------------------------------------------------------


def test_another_model_is_refused(saved: Path) -> None:
    other = long_model()
    with torch.no_grad():
        other.model.layers[1].mlp.up_proj.weight.mul_(1.01)
    with (
        loaded(other, "hybrid", **SMALL, cold=COLD) as llm,
        pytest.raises(OtherContextError, match="made with a model of other weights; open it with"),
    ):
        llm.open(saved)


def test_a_model_of_another_shape_is_refused_by_what_differs(saved: Path) -> None:
    other = long_model()
    other.config.rms_norm_eps = 0.5
    with (
        loaded(other, "hybrid", **SMALL, cold=COLD) as llm,
        pytest.raises(OtherContextError, match=r"a model of rms_norm_eps 1e-06, got 0\.5"),
    ):
        llm.open(saved)


def test_another_dtype_is_refused(saved: Path) -> None:
    other = model(torch.bfloat16)
    with (
        loaded(other, "hybrid", **SMALL, cold=COLD) as llm,
        pytest.raises(OtherContextError, match="made with dtype float32, got bfloat16"),
    ):
        llm.open(saved)


def test_a_changed_tokenizer_is_refused(twin: PreTrainedModel, saved: Path) -> None:
    words = tokenizer()
    words.add_tokens(["seasky"])
    config = hkv.HybridConfig(method="hybrid", **SMALL, cold=COLD)
    with (
        hkv.load(twin, tokenizer=words, config=config) as llm,
        pytest.raises(OtherContextError, match="made with another tokenizer or chat template"),
    ):
        llm.open(saved)


def test_a_tokenizer_that_has_padded_is_still_the_same(twin: PreTrainedModel, saved: Path) -> None:
    words = tokenizer()
    words(["sea", "sky sun"], padding=True, truncation=True, max_length=9)
    config = hkv.HybridConfig(method="hybrid", **SMALL, cold=COLD)
    with hkv.load(twin, tokenizer=words, config=config) as llm:
        llm.open(saved)


@pytest.mark.parametrize(
    ("method", "settings", "sentence"),
    [
        ("hybrid", {**SMALL, "page_size": 8, "cold": COLD}, "page_size 16, got 8; open it with"),
        ("hybrid", {**SMALL, "window_tokens": 64, "cold": COLD}, "window_tokens 32, got 64"),
        ("hybrid", {**SMALL, "cold": {"top_k": 5}}, r"cold\.index\.\w+ .*, got "),
        ("full", {}, "method 'hybrid', got 'full'"),
    ],
)
def test_settings_under_which_other_entries_are_stored_are_refused(
    twin: PreTrainedModel, saved: Path, method: str, settings: dict[str, Any], sentence: str
) -> None:
    with (
        loaded(twin, method, **settings) as llm,
        pytest.raises(OtherContextError, match=sentence),
    ):
        llm.open(saved)


def test_an_audit_of_what_was_not_saved_is_refused(twin: PreTrainedModel, tmp_path: Path) -> None:
    with loaded(twin, "streaming_llm", **SMALL) as llm:
        llm.context(TEXT).save(tmp_path / "a.hkv")
    with (
        loaded(twin, "streaming_llm", **SMALL, audit_every=4) as llm,
        pytest.raises(OtherContextError, match="open it with audit_every=0"),
    ):
        llm.open(tmp_path / "a.hkv")


# Damaged and foreign files ----------------------------------------------------------------------


def test_a_flipped_bit_in_any_block_is_found(saved: Path) -> None:
    blocks = sorted(blocks_of(saved).iterdir())
    names = {path.name for path in blocks}
    assert {"tokens.safetensors", "layer-0001.safetensors", "layer-0000-extent-0.index"} <= names
    verify_context(saved)
    for path in blocks:
        size = path.stat().st_size
        for at in (0, 8, size // 3, size // 2, size - 1):
            flip(path, at)
            with pytest.raises(FileFormatError, match=f"not as written: '{path.name}'; make"):
                verify_context(saved)
            flip(path, at)
    verify_context(saved)


@pytest.mark.parametrize("share", [0.0, 0.1, 0.3, 0.5, 0.7, 0.9, 0.999])
def test_a_flipped_bit_in_the_manifest_is_found(llm: hkv.LLM, saved: Path, share: float) -> None:
    path = saved / "manifest.json"
    flip(path, int(share * path.stat().st_size))
    with pytest.raises(FileFormatError):
        verify_context(saved)
    with pytest.raises(FileFormatError):
        llm.open(saved)


@pytest.mark.parametrize("name", ["tokens.safetensors", "layer-0000-extent-0.index"])
def test_opening_finds_what_it_reads(llm: hkv.LLM, saved: Path, name: str) -> None:
    path = blocks_of(saved) / name
    flip(path, path.stat().st_size - 200)
    with pytest.raises(FileFormatError, match="damaged"):
        llm.open(saved)


def test_a_flipped_bit_in_keys_is_found_when_a_context_is_opened(
    llm: hkv.LLM, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to a size, or where it is asked for: a large one is opened without being read."""
    path = blocks_of(saved) / "layer-0001.safetensors"
    flip(path, path.stat().st_size - 200)
    with pytest.raises(FileFormatError, match=r"the checksum of block 'layer-0001\.safetensors'"):
        llm.open(saved)
    llm.open(saved, verify=False).ask("?", max_new_tokens=1)
    total = sum(block.stat().st_size for block in blocks_of(saved).iterdir())
    monkeypatch.setattr(opening, "VERIFIED_BYTES", total - 1)
    llm.open(saved)
    with pytest.raises(FileFormatError, match="the checksum of block"):
        llm.open(saved, verify=True)
    monkeypatch.setattr(opening, "VERIFIED_BYTES", total)
    with pytest.raises(FileFormatError, match="the checksum of block"):
        llm.open(saved)


def test_a_block_that_is_cut_while_it_is_open_is_an_error(
    llm: hkv.LLM, saved: Path, tmp_path: Path
) -> None:
    """Whoever reads a page that is not there any more is killed by SIGBUS."""
    opened = llm.open(saved)
    fork = opened.fork()
    before = opened.ask("?", max_new_tokens=2).text
    path = blocks_of(saved) / "layer-0001.safetensors"
    whole = path.read_bytes()
    os.truncate(path, 4096)
    for use in (
        lambda: opened.ask("?", max_new_tokens=2),
        lambda: fork.ask("?", max_new_tokens=2),
        lambda: opened.save(tmp_path / "b.hkv"),
    ):
        with pytest.raises(FileFormatError, match="was cut while it was open: block 'layer-0001"):
            use()
    path.write_bytes(whole)
    assert opened.ask("?", max_new_tokens=2).text == before
    path.unlink()  # what is mapped stays
    assert opened.ask("?", max_new_tokens=2).text == before


@pytest.mark.parametrize("name", ["layer-0000.safetensors", "layer-0001-extent-0.index"])
def test_a_block_that_is_cut_off_or_gone_is_refused(llm: hkv.LLM, saved: Path, name: str) -> None:
    path = blocks_of(saved) / name
    size = path.stat().st_size
    os.truncate(path, size - 1)
    for look in (llm.open, verify_context):
        with pytest.raises(FileFormatError, match=name):
            look(saved)
    path.unlink()
    for look in (llm.open, verify_context):
        with pytest.raises(FileFormatError, match=name):
            look(saved)


def test_a_newer_version_is_refused(llm: hkv.LLM, saved: Path) -> None:
    path = saved / "manifest.json"
    path.write_text(path.read_text().replace('"version": 5', '"version": 6', 1))
    with pytest.raises(FileFormatError, match="format version 6, this package reads 1 to 5"):
        llm.open(saved)


@pytest.mark.parametrize(
    ("version", "later"),
    [
        (1, ("windows", "states", "inexact_from")),
        (2, ("states", "inexact_from")),
        (3, ("inexact_from",)),
    ],
)
def test_a_context_of_an_earlier_version_is_opened(
    llm: hkv.LLM, saved: Path, version: int, later: tuple[str, ...]
) -> None:
    rewrite(saved, lambda content: [content.pop(name) for name in later])
    path = saved / "manifest.json"
    path.write_text(path.read_text().replace('"version": 5', f'"version": {version}', 1))
    llm.open(saved).close()


@pytest.mark.parametrize(
    ("hot", "attend", "stand_in"), [(0, "cpu", "auto"), (64, "fetch", "pages")]
)
def test_a_context_with_settings_that_were_removed_is_opened(
    llm: hkv.LLM, saved: Path, hot: int, attend: str, stand_in: str
) -> None:
    """None of them decided what was stored."""

    def as_then(content: dict[str, Any]) -> None:
        content["config"]["hot_tokens"] = hot
        content["config"]["cold"] |= {"attend": attend, "stand_in": stand_in}

    rewrite(saved, as_then)
    llm.open(saved).close()


def test_a_context_with_settings_that_are_none_any_more_is_opened(
    twin: PreTrainedModel, tmp_path: Path
) -> None:
    """Sizes of an auto index stood beside its settings, and hybrid had those of all budgets."""

    def as_then(content: dict[str, Any]) -> None:
        index = content["config"]["cold"]["index"]
        index["sizes"] |= {"link_keys": 0, "link_positions": 1024}
        written.append(deepcopy(content["config"]))
        index |= index.pop("sizes")
        content["config"]["cold"] |= {"max_tokens": None, "min_share": None, "shared": False}
        written.append(content["config"])

    written: list[dict[str, Any]] = []
    cold = {"top_k": 5, "index": INDEXES["auto"]}
    with loaded(twin, "hybrid", **SMALL, cold=cold) as llm:
        llm.context(TEXT).save(tmp_path / "a.hkv")
        rewrite(tmp_path / "a.hkv", as_then)
        llm.open(tmp_path / "a.hkv").close()
        for config in written:
            assert hkv.HybridConfig(**settings_of_file(config)) == llm.runtime.config


def test_a_file_of_another_program_is_refused(
    llm: hkv.LLM, context: hkv.Context, tmp_path: Path
) -> None:
    file, folder, foreign = tmp_path / "file", tmp_path / "folder", tmp_path / "foreign"
    file.write_text("{}")
    folder.mkdir()
    foreign.mkdir()
    (foreign / "manifest.json").write_text('{"version": 5}')
    for path in (file, folder, foreign):
        with pytest.raises(FileFormatError, match="is no saved context of hybrid_kv"):
            llm.open(path)
        with pytest.raises(ConfigError, match="choose another name, or remove what is there"):
            context.save(path)
    assert file.read_text() == "{}"
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("name", ["../outside.safetensors", "/etc/passwd", "a/../../b.index", ".."])
def test_a_manifest_that_points_outside_its_folder_is_refused(
    llm: hkv.LLM, saved: Path, name: str
) -> None:
    rewrite(saved, lambda content: content.update(ids=name))
    with pytest.raises(FileFormatError, match="must name something inside its own folder, got"):
        llm.open(saved)


@pytest.mark.parametrize("name", ["../blocks-0123456789abcdef", "..", "/tmp"])
def test_a_folder_of_blocks_elsewhere_is_refused(llm: hkv.LLM, saved: Path, name: str) -> None:
    rewrite(saved, lambda content: content.update(folder=name))
    with pytest.raises(FileFormatError, match="must name something inside its own folder, got"):
        llm.open(saved)


@pytest.mark.parametrize("where", ["manifest", "folder", "block"])
def test_symbolic_links_inside_are_refused(llm: hkv.LLM, saved: Path, where: str) -> None:
    path = {
        "manifest": saved / "manifest.json",
        "folder": blocks_of(saved),
        "block": blocks_of(saved) / "layer-0001.safetensors",
    }[where]
    moved = saved.parent / "elsewhere"
    path.rename(moved)
    path.symlink_to(moved)
    for look in (llm.open, verify_context):
        with pytest.raises(FileFormatError, match="is a symbolic link"):
            look(saved)


def test_counts_that_do_not_fit_together_are_refused(llm: hkv.LLM, saved: Path) -> None:
    rewrite(saved, lambda content: content["layers"][0].update(num_first=10**6))
    with pytest.raises(FileFormatError, match="layer 0 counts its entries wrongly"):
        llm.open(saved)


@pytest.mark.parametrize("wrong", [{"num_kv_heads": 1}, {"num_kv_heads": 7}, {"head_dim": 6}])
def test_another_shape_with_a_checksum_that_fits_is_refused(
    llm: hkv.LLM, saved: Path, wrong: dict[str, int]
) -> None:
    rewrite(saved, lambda content: content["layers"][1].update(wrong))
    with pytest.raises(FileFormatError, match=r"layer 1 is said to have \d KV heads of \d+ chan"):
        llm.open(saved)


def test_what_is_not_there_is_refused(llm: hkv.LLM, context: hkv.Context, tmp_path: Path) -> None:
    with pytest.raises(ReadError, match="there is no saved context"):
        llm.open(tmp_path / "none.hkv")
    with pytest.raises(ConfigError, match="make its folder"):
        context.save(tmp_path / "none" / "a.hkv")


# Places that cannot be written or read ----------------------------------------------------------


def test_a_link_stays_and_what_it_points_to_is_replaced(
    llm: hkv.LLM, context: hkv.Context, saved: Path
) -> None:
    link = saved.parent / "link.hkv"
    link.symlink_to(saved)
    before = blocks_of(saved)
    context.save(link)
    assert link.is_symlink()
    assert blocks_of(saved) != before
    llm.open(link)


def _is_unharmed(saved: Path, before: Path) -> None:
    assert blocks_of(saved) == before
    verify_context(saved)
    assert [path.name for path in saved.parent.iterdir()] == ["a.hkv"]
    assert len(list(saved.iterdir())) == 2


def test_a_full_disk_leaves_the_old_context(context: hkv.Context, saved: Path) -> None:
    before, limits = blocks_of(saved), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limits[1]))  # less than a layer
    try:
        with pytest.raises(WriteError, match="cannot be written: File too large; free space"):
            context.save(saved)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    _is_unharmed(saved, before)


def _told(context: hkv.Context, saved: Path) -> str | None:
    """What a save was refused with; None where it was not."""
    try:
        context.save(saved)
    except WriteError as error:
        return str(error)
    return None


@pytest.mark.parametrize("call", ["fsync", "replace", "rename"])
def test_an_error_of_the_disk_at_any_call_leaves_the_old_context(
    context: hkv.Context, saved: Path, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first, the second, ... call fails, until none does."""
    before, real, refused = blocks_of(saved), getattr(os, call), 0
    for fatal in range(100):
        count = iter(range(1000))

        def failing(*args: Any, fatal: int = fatal, count: Any = count, **kw: Any) -> Any:
            if next(count) == fatal:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return real(*args, **kw)

        monkeypatch.setattr(os, call, failing)
        told = _told(context, saved)
        monkeypatch.setattr(os, call, real)
        assert "No space left on device" in (told or "No space left on device")
        refused += told is not None
        verify_context(saved)
        assert [path.name for path in saved.parent.iterdir()] == ["a.hkv"]
        if next(count) <= fatal:
            break
    assert refused >= 1
    assert blocks_of(saved) != before


@pytest.mark.skipif(os.geteuid() == 0, reason="permissions do not bind root")
def test_no_permission_is_said(llm: hkv.LLM, context: hkv.Context, saved: Path) -> None:
    (saved / "manifest.json").chmod(0)
    with pytest.raises(ReadError, match="Permission denied"):
        llm.open(saved)
    saved.parent.chmod(0o500)
    with pytest.raises(WriteError, match="Permission denied"):
        context.save(saved.parent / "b.hkv")
    saved.parent.chmod(0o700)


def test_no_permission_to_write_is_said(
    context: hkv.Context, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = blocks_of(saved)

    def refusing(*_: Any, **__: Any) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(Path, "mkdir", refusing)
    with pytest.raises(WriteError, match="cannot be written: Permission denied"):
        context.save(saved)
    _is_unharmed(saved, before)
