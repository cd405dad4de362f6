"""The verbs of contexts in files."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from hybrid_kv.api.building import ContextBuild, build_context
from hybrid_kv.cli import model_run
from hybrid_kv.saved import verify_context
from hybrid_kv.saved.manifest import read_manifest
from tests.cli.support import PROMPT, call, refused, report_of
from tests.saved.scene import blocks_of, flip, rewrite

QUESTION = "? key 3f a0"
BOOK = " ".join([PROMPT] * 30)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "book.md"
    path.write_text(BOOK)
    return path


@pytest.fixture(scope="module")
def built(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("built")
    (folder / "book.md").write_text(BOOK)
    result = call("context", "build", model, folder / "book.md", "-o", folder / "book.hkv", "-q")
    assert result.exit_code == 0, result.output
    return folder / "book.hkv"


def test_a_built_context_is_asked(model: Path, built: Path) -> None:
    whole = report_of(
        call("generate", model, BOOK + QUESTION, "--max-new-tokens", 5, "--json", "-")
    )
    asked = report_of(
        call(
            "context",
            "ask",
            built,
            QUESTION,
            "--max-new-tokens",
            5,
            "--json",
            "-",
            "--set",
            "top_k=all",
        )
    )
    assert asked.command == "context ask"
    assert asked.token_ids == whole.token_ids
    assert asked.context_tokens == whole.context_tokens
    assert asked.model == str(model.resolve())
    assert asked.config["cold"]["top_k"] == "all"
    shown = call("context", "ask", built, QUESTION, "--max-new-tokens", 5)
    assert shown.stdout.strip() == asked.text.strip()
    assert "TTFT" in shown.stderr


def test_an_answer_tells_the_errors_of_its_tokens(built: Path) -> None:
    words = ("context", "ask", built, QUESTION, "--max-new-tokens", 5, "--json", "-")
    result = call(*words, "--token-errors")
    assert len(report_of(result).token_errors) == 5
    assert "token errors: expected KL " in result.stderr
    assert report_of(call(*words)).token_errors is None


def test_a_chat_keeps_what_was_asked_and_the_file_does_not(model: Path, built: Path) -> None:
    words = ("context", "chat", built, "--max-new-tokens", 4, "--set", "top_k=all", "--json", "-")
    before = sorted((path, path.stat().st_mtime_ns) for path in built.rglob("*"))
    report = report_of(call(*words, stdin=f"{QUESTION}\nthe hill.\n/reset\n{QUESTION}\n"))
    assert report.command == "context chat"
    first, second, third = report.turns
    assert (first.token_ids, first.context_tokens) == (third.token_ids, third.context_tokens)
    whole = f"{BOOK}{QUESTION} {first.text} the hill."
    asked = report_of(call("generate", model, whole, "--max-new-tokens", 4, "--json", "-"))
    assert (second.token_ids, second.context_tokens) == (asked.token_ids, asked.context_tokens)
    assert sorted((path, path.stat().st_mtime_ns) for path in built.rglob("*")) == before


@pytest.mark.parametrize("verb", ["ask", "chat"])
def test_a_context_is_asked_exactly(model: Path, text: Path, tmp_path: Path, verb: str) -> None:
    few = [f"--set={one}" for one in ("sink_tokens=16", "window_tokens=32")]
    path = tmp_path / "few.hkv"
    assert call("context", "build", model, text, "-o", path, "-q", *few).exit_code == 0
    asked = ("context", verb, path, *([QUESTION] if verb == "ask" else []))
    end = ("--max-new-tokens", 9, "--json", "-")
    runs = [
        report_of(call(*asked, *settings, *end, stdin=f"{QUESTION}\n"))
        for settings in (["--set", "top_k=all"], ["--set", "top_k=2", "--exact"])
    ]
    whole, found = runs if verb == "ask" else (run.turns[0] for run in runs)
    assert found.token_ids == whole.token_ids
    assert found.exact.passes > 0


def test_several_files_of_several_kinds_are_one_text(model: Path, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("the river.")
    (tmp_path / "b.md").write_text("the hill.")
    (tmp_path / "c.pdf").write_bytes(pdf_of("the lake."))
    target = tmp_path / "a.hkv"
    files = [tmp_path / name for name in ("a.txt", "b.md", "c.pdf")]
    assert (
        call("context", "build", model, *files, "-", "-o", target, stdin="the sea.").exit_code == 0
    )
    whole = call(
        "context",
        "build",
        model,
        "-",
        "-o",
        tmp_path / "b.hkv",
        stdin="the river.\n\nthe hill.\n\nthe lake.\n\nthe sea.",
    )
    assert whole.exit_code == 0, whole.output
    assert read_manifest(target).ids_sha256 == read_manifest(tmp_path / "b.hkv").ids_sha256


def pdf_of(text: str) -> bytes:
    """One page with a line of text."""
    stream = f"BT /F1 24 Tf 72 700 Td ({text}) Tj ET".encode()
    objects = [
        b"<</Type/Catalog/Pages 2 0 R>>",
        b"<</Type/Pages/Kids[3 0 R]/Count 1>>",
        b"<</Type/Page/Parent 2 0 R/MediaBox[0 0 612 792]/Contents 4 0 R"
        b"/Resources<</Font<</F1<</Type/Font/Subtype/Type1/BaseFont/Helvetica>>>>>>>>",
        b"<</Length %d>>stream\n%s\nendstream" % (len(stream), stream),
    ]
    body, places = b"%PDF-1.4\n", []
    for number, content in enumerate(objects, 1):
        places.append(len(body))
        body += b"%d 0 obj\n%s\nendobj\n" % (number, content)
    table = b"".join(b"%010d 00000 n \n" % place for place in places)
    head = b"xref\n0 %d\n0000000000 65535 f \n" % (len(objects) + 1)
    end = b"trailer<</Size %d/Root 1 0 R>>\nstartxref\n%d\n%%%%EOF" % (len(objects) + 1, len(body))
    return body + head + table + end


def test_info_tells_what_is_there(model: Path, built: Path) -> None:
    told = report_of(call("context", "info", built, "--json", "-"))
    assert told.command == "context info"
    assert (told.num_layers, told.is_chat, told.method) == (2, False, "hybrid")
    assert told.source == str(model.resolve())
    assert told.num_tokens == verify_context(built).manifest.num_tokens
    files = sum(path.stat().st_size for path in built.rglob("*") if path.is_file())
    assert sum(told.num_bytes.values()) == files
    per_token = 2 * 2 * 2 * 8 * 4  # layers, k and v, heads, head_dim, float32
    assert told.num_bytes["keys and values"] == pytest.approx(told.num_tokens * per_token, rel=0.02)
    assert told.indexed_keys + told.unindexed_keys == 0 == told.dropped_tokens
    assert (told.compress, told.k_error) == (None, 0)
    assert (told.index_heads, told.check_recall, told.audit) == ({}, None, None)
    shown = call("context", "info", built).stdout
    assert "none before it was saved" in shown
    assert f"{told.num_tokens:,} of raw text" in shown
    assert "hybrid, page_size" in shown


def test_info_tells_the_index_and_the_error_of_compression(
    model: Path, text: Path, tmp_path: Path
) -> None:
    small = ("--set", "sink_tokens=16", "--set", "window_tokens=32", "--set", "spare_tokens=0")
    words = ("context", "build", model, text, "-o", tmp_path / "a.hkv", "--compress", "int8")
    result = call(*words, *small)
    assert result.exit_code == 0, result.output
    told = report_of(call("context", "info", tmp_path / "a.hkv", "--json", "-"))
    assert told.indexed_keys > told.num_tokens
    assert told.index_heads == {"flat": 4}
    assert told.compress == "int8"
    assert 0 < told.k_error < 0.02
    assert 0 < told.v_error < 0.02
    assert "error" in result.stdout
    assert call("context", "ask", tmp_path / "a.hkv", QUESTION).exit_code == 0


def test_info_tells_what_was_checked_and_audited(model: Path, built: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(built, tmp_path / "a.hkv"))
    head = {"serves": "sketch", "recall": 0.975, "mass": 0.9985}
    other = {"serves": "flat", "recall": None, "mass": None}
    extent = {"length": 5, "index": None, "heads": [head, other], "samples": None}
    audit = {"looks": 9, "recall": 0.5, "missed_mass": 0.25, "missed_by_index": 0.125}

    def change(content: dict[str, Any]) -> None:
        content["layers"][0]["extents"] = [extent]
        content["audit"] = {**audit, "output_error": 0.75, "mass_error": -0.0625}

    rewrite(copy, change)
    told = report_of(call("context", "info", copy, "--json", "-"))
    assert told.index_heads == {"flat": 1, "sketch": 1}
    assert (told.check_recall, told.check_mass) == (0.975, 0.9985)
    assert (told.audit.looks, told.audit.recall_at_k, told.audit.missed_mass) == (9, 0.5, 0.25)
    shown = " ".join(call("context", "info", copy).stdout.split())
    assert "1 by flat, 1 by sketch" in shown
    assert "recall 0.975, mass 0.9985 of the worst head" in shown
    assert "recall 0.500, missed mass 0.2500 (0.1250 by the index)" in shown
    assert "mass error -0.0625, output error 0.750, 9 looks" in shown


def test_verify_finds_what_is_damaged(built: Path, tmp_path: Path) -> None:
    assert "all as they were written" in call("context", "verify", built).stdout
    copy = tmp_path / "a.hkv"
    shutil.copytree(built, copy)
    flip(blocks_of(copy) / "layer-0001.safetensors", 900)
    assert "not as written: 'layer-0001.safetensors'" in refused("context", "verify", copy)


def test_a_prompt_begins_with_what_is_in_the_folder(model: Path, tmp_path: Path) -> None:
    words = ("generate", model, BOOK, "--max-new-tokens", 4, "--json", "-")
    cache = ("--cache-dir", tmp_path / "c", "--cache-limit", "1GiB")
    plain = report_of(call(*words))
    first, second = (report_of(call(*words, *cache)) for _ in range(2))
    assert plain.token_ids == first.token_ids == second.token_ids
    counters = json.loads((tmp_path / "c" / "counters.json").read_text())
    assert (counters["hits"], counters["misses"]) == (1, 1)
    talk = call("chat", model, *cache, "--max-new-tokens", 4, stdin=BOOK + "\n")
    assert talk.exit_code == 0, talk.output
    (tmp_path / "t.md").write_text(BOOK + " the end.")
    target = tmp_path / "a.hkv"
    assert call("context", "build", model, tmp_path / "t.md", "-o", target, *cache).exit_code == 0
    counters = json.loads((tmp_path / "c" / "counters.json").read_text())
    assert (counters["hits"], counters["misses"]) == (3, 1)
    assert call("context", "ask", target, QUESTION).exit_code == 0
    assert "--cache-limit needs --cache-dir" in refused(*words, "--cache-limit", "1GiB")
    limit = refused(*words, "--cache-dir", tmp_path / "c", "--cache-limit", "much")
    assert "cache_limit must be a number of bytes like '20GiB', got 'much'" in limit
    (tmp_path / "file").touch()
    folder = refused(*words, "--cache-dir", tmp_path / "file")
    assert "must be a folder that can be written to" in folder


# Mistakes ---------------------------------------------------------------------------------------


def test_what_cannot_be_read_is_refused(model: Path, tmp_path: Path) -> None:
    def build(*files: object, stdin: str | None = None) -> str:
        return refused("context", "build", model, *files, "-o", tmp_path / "a.hkv", stdin=stdin)

    for name, content in (
        ("empty.txt", b" \n"),
        ("bytes.txt", b"\xff\xfe\xfd"),
        ("bad.pdf", b"no pdf"),
        ("scan.pdf", pdf_of("")),
        ("cut.pdf", pdf_of("the river.")[:200]),
    ):
        (tmp_path / name).write_bytes(content)
    assert "needs text, got none in" in build(tmp_path / "empty.txt")
    assert "needs text, got none in -" in build("-", stdin="")
    assert "must be UTF-8 text or PDF" in build(tmp_path / "bytes.txt")
    assert "bad.pdf' must be PDF, got" in build(tmp_path / "bad.pdf")
    assert "scanned pages have none" in build(tmp_path / "scan.pdf")
    assert "pdf'" in build(tmp_path / "cut.pdf")
    assert "cannot be read: No such file or directory" in build(tmp_path / "none.txt")
    assert "cannot be read: Is a directory" in build(tmp_path)
    assert not (tmp_path / "a.hkv").exists()


def test_a_place_that_holds_something_else_is_refused(model: Path, text: Path) -> None:
    words = ("context", "build", model, text, "-o")
    assert "choose another name, or remove what is there" in refused(*words, text)
    assert "make its folder" in refused(*words, text.parent / "none" / "a.hkv")


def test_what_is_no_context_is_refused(built: Path, text: Path, tmp_path: Path) -> None:
    for words in (("info",), ("verify",), ("ask", QUESTION), ("chat",)):
        verb, more = words[0], words[1:]
        assert "there is no saved context" in refused("context", verb, tmp_path / "no", *more)
        assert "is no saved context of hybrid_kv" in refused("context", verb, text, *more)
    assert "unknown verb 'aks'; did you mean 'ask'?" in refused("context", "aks", built)


def test_questions_that_do_not_fit_are_refused(built: Path) -> None:
    assert "question is empty" in refused("context", "ask", built, "")
    long = refused("context", "ask", built, " ".join(["river"] * 900))
    assert "1,024" in long or "1024" in long


def test_settings_and_models_that_do_not_fit_are_refused(built: Path, tmp_path: Path) -> None:
    words = ("context", "ask", built, QUESTION)
    assert "made with, 'hybrid', got 'quest'" in refused(*words, "--method", "quest")
    assert "page_size 16, got 32" in refused(*words, "--set", "page_size=32")
    assert "made with dtype float32, got bfloat16" in refused(*words, "--dtype", "bfloat16")
    assert "was made with a model of" in refused(*words, "--model", "needle")
    copy = tmp_path / "a.hkv"
    shutil.copytree(built, copy)
    rewrite(copy, lambda content: content.update(source=None))
    assert "name it with --model" in refused("context", "ask", copy, QUESTION)


# Interruptions ----------------------------------------------------------------------------------


def test_an_interrupted_build_goes_on(
    model: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["context", "build", str(model), str(text), "-o", str(tmp_path / "a.hkv")]
    note = ContextBuild._note

    def noted(self: ContextBuild, hidden: Tensor) -> None:
        note(self, hidden)
        signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(ContextBuild, "_note", noted)
        patch.setitem(build_context.__kwdefaults__, "every_s", 0)
        result = call(*words)
    assert result.exit_code == 130, result.output
    assert result.stderr == f"interrupted: the same command goes on with '{tmp_path}/a.hkv'\n"
    assert not (tmp_path / "a.hkv").exists()
    result = call(*words)
    assert result.exit_code == 0, result.output
    assert result.stderr == "1 of 2 layers were there\n"
    verify_context(tmp_path / "a.hkv")
    assert not (tmp_path / ".a.hkv.building").exists()


def test_ctrl_c_ends_an_answer_and_keeps_its_text(
    built: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def write(piece: str) -> None:
        seen.append(piece)
        if len(seen) == 3:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(model_run, "write_now", write)
    result = call("context", "ask", built, QUESTION, "--max-new-tokens", 500)
    assert result.exit_code == 130, result.output
    assert result.stderr.startswith("interrupted: ")
    assert "".join(seen).strip()
    assert 3 <= len(seen) < 100
    assert read_manifest(built).num_tokens > 0
