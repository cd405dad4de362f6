"""The benchmark of many texts: its manifest, its rows, and what its summary makes of them."""

from __future__ import annotations

import csv
import json
from collections import Counter
from pathlib import Path

import pytest
import torch

from benchmarks.texts import make, run, summary
from benchmarks.texts.summary import Results, Row
from hybrid_kv.config import HybridConfig
from hybrid_kv.contest.prompts import PrefilledPrompt
from hybrid_kv.types import Needs


def _row(text: str, method: str, budget: str, kl: float, kind: str = "prose") -> Row:
    return Row(text, kind, method, budget, 45.5, 0, 2e6, 0.1, kl, 0.9)


def test_there_are_24_texts_of_eight_kinds_with_licences_and_a_manifest() -> None:
    known = {one["name"]: one for one in json.loads(make.MANIFEST.read_text())}
    assert len(make.TEXTS) >= 24
    assert list(Counter(text.kind for text in make.TEXTS).values()) == [3] * 8
    assert list(known) == [text.name for text in make.TEXTS]
    for text in make.TEXTS:
        said = known[text.name]
        assert (said["kind"], said["source"], said["licence"]) == text[1:4]
        assert len(said["sha256"]) == 64


@pytest.mark.parametrize("name", ["records", "orders", "log"])
def test_drawn_texts_are_those_of_the_manifest(name: str, tmp_path: Path) -> None:
    (text,) = (one for one in make.TEXTS if one.name == name)
    content = text.make(make.Packages(tmp_path))[: make._CHARACTERS]
    assert make.describe(text, content) == make.known()[name]


def test_a_text_of_another_version_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = make.Text("mine", "prose", "nowhere", "none", lambda _: "other words")
    monkeypatch.setattr(make, "TEXTS", (text,))
    monkeypatch.setattr(make, "MANIFEST", tmp_path / "manifest.json")
    monkeypatch.setattr("sys.argv", ["make.py", str(tmp_path), "--write-manifest"])
    make.main()
    monkeypatch.setattr("sys.argv", ["make.py", str(tmp_path)])
    make.main()
    assert (tmp_path / "mine.txt").read_text() == "other words"
    monkeypatch.setattr(make, "TEXTS", (text._replace(make=lambda _: "still others"),))
    with pytest.raises(SystemExit, match="another version of a package: mine"):
        make.main()


def test_texts_come_in_rounds_of_their_kinds() -> None:
    order = run.in_rounds(make.TEXTS)
    assert sorted(order) == sorted(make.TEXTS)
    assert len({text.kind for text in order[:8]}) == 8


def test_rows_are_kept_and_those_asked_for_again_are_dropped(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    rows = run.Rows(path)
    for method in ("hybrid", "h2o"):
        rows.add(dict.fromkeys(run.COLUMNS, "1") | {"method": method, "budget": "5%"})
    assert ("1", "h2o", "5%") in run.Rows(path)
    again = run.Rows(path, again=("h2o",))
    assert ("1", "h2o", "5%") not in again
    assert ("1", "hybrid", "5%") in again
    with path.open(newline="") as file:
        assert [row["method"] for row in csv.DictReader(file)] == ["hybrid"]


def test_a_reading_of_an_earlier_version_is_taken_up() -> None:
    # a field that PrefilledPrompt got later was not there, and every method failed
    old = object.__new__(PrefilledPrompt)
    for name, value in (("ids", torch.ones(1, 3)), ("layers", ()), ("evidence", ())):
        object.__setattr__(old, name, value)
    kept = run.restored(old, Needs(), torch.ones(1), {})
    assert kept.prompt.others == {}


def test_the_estimate_counts_as_the_entries_that_its_bytes_are_worth() -> None:
    from hybrid_kv.planning.plan import model_facts

    facts = model_facts("random:llama-3-8b", dtype="float32", layers=1)  # head_dim 128
    assert run.estimate_entries(facts, HybridConfig(method="hybrid"), 4096) == 192
    assert run.estimate_entries(facts, HybridConfig(method="flat"), 4096) == 0
    none = HybridConfig(method="hybrid", cold={"estimate": "none"})
    assert run.estimate_entries(facts, none, 4096) == 0


def test_intervals_are_over_texts() -> None:
    values = [0.01 * i for i in range(1, 25)]
    low, high = summary.interval(values)
    assert 0.05 < low < 0.125 < high < 0.2
    assert summary.interval([0.3] * 24) == (0.3, 0.3)


def test_the_worst_text_stands_by_its_name_and_what_was_refused_as_a_dash() -> None:
    rows = [_row(name, "hybrid", "1%", kl) for name, kl in (("a", 0.01), ("b", 0.3), ("c", 0.02))]
    rows += [_row(name, "quest", "5%", 0.5) for name in "abc"]
    rows += [_row("a", "h2o", "1%", 0.5)]
    lines = list(summary.headline(Results(rows)))
    assert any(line.startswith("| `h2o` (1 texts) |") for line in lines)
    assert "| `hybrid` | .020 (.010 to .30) · 2.0 | – | b .30 |" in lines
    assert "| `quest` | – | .50 (.50 to .50) · 2.0 | – |" in lines


def test_texts_on_which_the_estimate_does_not_help_are_named() -> None:
    rows = [_row("a", "flat", "1%", 0.1), _row("b", "flat", "1%", 0.1, "repeats")]
    rows += [_row("a", "hybrid", "1%", 0.01), _row("b", "hybrid", "1%", 0.2, "repeats")]
    said = "\n".join(summary.claims(Results(rows)))
    assert "(median over texts; 0.5 on b, 10.0 on a; by kind: repeats 0.5, prose 10.0)" in said
    assert "it does not help on 1 of 2 texts: b." in said


def test_documents_tell_of_the_texts_that_all_methods_have_read() -> None:
    rows = [_row(name, "flat", "1%", kl) for name, kl in (("a", 0.1), ("b", 0.3))]
    results = summary.of_the_same_texts([*rows, _row("a", "hybrid", "1%", 0.01)])
    assert results.texts() == 1
    assert results.values("flat", "1%", "kl") == [0.1]


def test_numbers_of_tokens_stand_beside_shares() -> None:
    rows = [_row("a", "hybrid", "1%", 0.01), _row("a", "flat", "1%", 0.1)]
    rows += [_row("a", "flat", "106", 0.05), _row("a", "flat", "2%", 0.005)]
    said = "\n".join([*summary.headline(Results(rows)), *summary.claims(Results(rows))])
    assert "`flat` at 106 tokens" in said
    assert "than `flat` at 2% on 0 of 1, at 106 tokens on 1 of 1 texts." in said


def test_documents_take_tables_between_their_marks(tmp_path: Path) -> None:
    path = tmp_path / "page.md"
    path.write_text("one\n<!-- texts -->\nold\n<!-- end of texts -->\ntwo\n")
    summary.put(path, "texts", "| new |")
    assert path.read_text() == "one\n<!-- texts -->\n| new |\n<!-- end of texts -->\ntwo\n"
    path.write_text("one\n")
    with pytest.raises(SystemExit, match="has no marks"):
        summary.put(path, "texts", "| new |")


def test_the_documents_say_what_the_rows_say() -> None:
    if not summary.ROWS.exists():
        pytest.skip("the rows of all texts are not in the tree")
    results = summary.of_the_same_texts(summary.read(summary.ROWS))
    assert summary.readme(results) in (summary.ROOT / "README.md").read_text()
    assert summary.overview(results) in (summary.ROOT / "docs" / "results.md").read_text()
    assert summary.documented(results) in (summary.ROOT / "docs" / "eval.md").read_text()
