"""The documents' table of what fits on a 24 GB card."""

from __future__ import annotations

from benchmarks.what_fits import run


def test_the_page_says_what_the_command_computes() -> None:
    rows = [run.planned(case) for case in run.CASES]
    assert all(row.fits for row in rows)
    assert run.table(rows) in run.PAGE.read_text()
    for row in rows:
        assert row.one_graph_ms < row.as_built_ms
        assert row.code_bytes is not None, "of steps that the prompt leaves room for"


def test_what_does_not_fit_is_said() -> None:
    row = run.planned(run.Case("qwen3-32b", "1m"))
    assert not row.fits
    assert "does not fit" in run.table([row])
