"""Contexts that are built layer by layer: what was interrupted goes on and comes out the same."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import hybrid_kv as hkv
from hybrid_kv.api.building import build_context
from hybrid_kv.api.generation import PrefillCancelled
from hybrid_kv.errors import ConfigError, WriteError
from hybrid_kv.saved import verify_context
from tests import forked
from tests.contracts.architectures import build
from tests.contracts.edges.test_forks import drawn
from tests.saved.scene import INDEXES, SMALL, TEXT, TOKENS, blocks_of, loaded, long_model

METHODS: dict[str, dict[str, Any]] = {
    "full": {},
    "hybrid": {**SMALL, "cold": {"top_k": 5, "index": INDEXES["sketch"]}},
    "streaming_llm": SMALL,
    "snapkv": {},
    "kivi": {},
}


@pytest.fixture(scope="module")
def plain() -> PreTrainedModel:
    return long_model()


@contextmanager
def counted(llm: hkv.LLM) -> Iterator[list[int]]:
    """Tokens that each layer computes in the block, whichever way they come."""
    seen: list[int] = []
    layers = [layer.self_attn for layer in llm.model.model.layers]
    hooks = [it.register_forward_hook(lambda *a: seen.append(a[2][0].shape[1])) for it in layers]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


def cancelled_in_layer(number: int) -> dict[str, Any]:
    """Options of a build that is given up when some layer has seen its first tokens."""
    cancel = threading.Event()

    def report(done: int, total: int) -> None:
        if done > number * TOKENS:
            cancel.set()

    return {"cancel": cancel, "on_prefill": report}


@pytest.mark.parametrize("method", METHODS)
def test_what_is_built_is_what_is_saved(
    plain: PreTrainedModel, method: str, tmp_path: Path
) -> None:
    with loaded(plain, method, **METHODS[method]) as llm:
        llm.context(TEXT).save(tmp_path / "saved.hkv")
        with pytest.raises(PrefillCancelled):
            build_context(llm, TEXT, tmp_path / "a.hkv", every_s=0, **cancelled_in_layer(1))
        assert not (tmp_path / "a.hkv").exists()
        with counted(llm) as seen:
            built = build_context(llm, TEXT, tmp_path / "a.hkv", every_s=0)
        assert (built.num_tokens, built.num_layers, built.found_layers) == (TOKENS, 2, 1)
        assert sum(seen) == TOKENS  # one layer of two
        verify_context(tmp_path / "a.hkv")
        expected, found = (
            {path.name: path.read_bytes() for path in sorted(blocks_of(tmp_path / name).iterdir())}
            for name in ("saved.hkv", "a.hkv")
        )
        assert found.keys() == expected.keys()
        tensors = {name for name in expected if name.endswith(".safetensors")}
        assert {name for name in tensors if found[name] != expected[name]} == set()
        answers = [
            llm.open(tmp_path / name).ask("oak", max_new_tokens=6).token_ids
            for name in ("saved.hkv", "a.hkv")
        ]
        assert answers[0] == answers[1]
        assert {path.name for path in tmp_path.iterdir()} == {"saved.hkv", "a.hkv"}
        assert len(list((tmp_path / "a.hkv").iterdir())) == 2


def test_progress_begins_where_it_ended(plain: PreTrainedModel, tmp_path: Path) -> None:
    with loaded(plain, "full") as llm:
        with pytest.raises(PrefillCancelled):
            build_context(llm, TEXT, tmp_path / "a.hkv", every_s=0, **cancelled_in_layer(1))
        seen: list[tuple[int, int]] = []
        build_context(llm, TEXT, tmp_path / "a.hkv", on_prefill=lambda *at: seen.append(at))
    assert seen[0][0] > TOKENS
    assert seen[-1] == (2 * TOKENS, 2 * TOKENS)


def test_another_build_begins_anew(plain: PreTrainedModel, tmp_path: Path) -> None:
    """Other tokens, other settings, a damaged or a missing file: nothing is gone on with."""
    root = tmp_path / "a.hkv"

    def interrupted(llm: hkv.LLM) -> Path:
        with pytest.raises(PrefillCancelled):
            build_context(llm, TEXT, root, every_s=0, **cancelled_in_layer(1))
        return tmp_path / ".a.hkv.building"

    with loaded(plain, "full") as llm:
        interrupted(llm)
        assert build_context(llm, TEXT + " oak", root).found_layers == 0
        left = interrupted(llm)
        (hidden,) = left.glob("*/hidden-*")
        content = bytearray(hidden.read_bytes())
        content[-5] ^= 1
        hidden.write_bytes(content)
        assert build_context(llm, TEXT, root).found_layers == 0
        left = interrupted(llm)
        next(left.glob("*/layer-0000.safetensors")).unlink()
        assert build_context(llm, TEXT, root).found_layers == 0
        interrupted(llm)
        assert build_context(llm, TEXT, root, compress="int8").found_layers == 0
        interrupted(llm)
    with loaded(plain, "quest", page_size=16) as llm:
        assert build_context(llm, TEXT, root).found_layers == 0
        verify_context(root)
    assert [path.name for path in tmp_path.iterdir()] == ["a.hkv"]


def test_an_interrupted_build_leaves_the_old_context(
    plain: PreTrainedModel, tmp_path: Path
) -> None:
    with loaded(plain, "full") as llm:
        llm.context("oak sea").save(tmp_path / "a.hkv")
        with pytest.raises(PrefillCancelled):
            build_context(llm, TEXT, tmp_path / "a.hkv", every_s=0, **cancelled_in_layer(1))
        assert verify_context(tmp_path / "a.hkv").manifest.num_tokens == 2
        assert build_context(llm, TEXT, tmp_path / "a.hkv").found_layers == 1
        assert verify_context(tmp_path / "a.hkv").manifest.num_tokens == TOKENS


def test_one_build_at_a_time(plain: PreTrainedModel, tmp_path: Path) -> None:
    with loaded(plain, "full") as llm:

        def again(done: int, total: int) -> None:
            build_context(llm, TEXT, tmp_path / "a.hkv")

        with pytest.raises(ConfigError, match="is being built by another process; wait for it"):
            build_context(llm, TEXT, tmp_path / "a.hkv", on_prefill=again)


def test_what_cannot_be_written_is_said(
    plain: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with loaded(plain, "full") as llm:
        monkeypatch.setattr(os, "fsync", full)
        with pytest.raises(WriteError, match="No space left on device; free space, and start"):
            build_context(llm, TEXT, tmp_path / "a.hkv")
        monkeypatch.undo()
        with pytest.raises(ConfigError, match="compress must be 'int8' or left out, got 'int4'"):
            build_context(llm, TEXT, tmp_path / "a.hkv", compress="int4")
        assert build_context(llm, TEXT, tmp_path / "a.hkv").found_layers == 0


CHILD = """
import os, signal, sys, torch
from tests.saved.test_building import *
torch.set_num_threads(1)
with loaded(long_model(), "full") as llm:
    def report(done, total):
        if done > TOKENS:
            os.kill(os.getpid(), signal.SIGKILL)
    build_context(llm, TEXT, sys.argv[1], every_s=0, on_prefill=report)
"""


def test_a_build_that_was_killed_goes_on(plain: PreTrainedModel, tmp_path: Path) -> None:
    run = forked.run("-c", CHILD, tmp_path / "a.hkv", cwd=forked.ROOT)
    assert run.returncode == -signal.SIGKILL, run.stderr
    assert not (tmp_path / "a.hkv").exists()
    note = json.loads((tmp_path / ".a.hkv.building" / "progress.json").read_text())
    assert len(note["layers"]) == 1
    with loaded(plain, "full") as llm, counted(llm) as seen:
        assert build_context(llm, TEXT, tmp_path / "a.hkv").found_layers == 1
        assert sum(seen) == TOKENS
        assert torch.equal(llm.open(tmp_path / "a.hkv").ids, llm.encode(TEXT))
    assert [path.name for path in tmp_path.iterdir()] == ["a.hkv"]


def test_windows_that_were_built_are_gone_on_with(tmp_path: Path) -> None:
    ids, cancel = drawn(0, 40)[0].tolist(), threading.Event()

    def stop(done: int, total: int) -> None:
        if done > total // 2:
            cancel.set()

    with hkv.load(build("gemma3"), config={"method": "full", "page_size": 4}) as llm:
        with pytest.raises(PrefillCancelled):
            build_context(llm, ids, tmp_path / "a.hkv", every_s=0, cancel=cancel, on_prefill=stop)
        built = build_context(llm, ids, tmp_path / "a.hkv", every_s=0)
        assert 1 < built.found_layers < built.num_layers
        expected = llm.context(ids).ask([5], max_new_tokens=9).token_ids
        assert llm.open(tmp_path / "a.hkv").ask([5], max_new_tokens=9).token_ids == expected
