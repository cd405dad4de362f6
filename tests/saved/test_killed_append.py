from __future__ import annotations

from tests.saved.killed import told_by


def test_a_process_that_is_killed_while_a_saved_context_grows_loses_nothing_saved() -> None:
    told = told_by("tests.saved.killed_append", "6")
    assert sum(told["found"].values()) == 6
    assert set(told["found"]) <= {"between saves", "new", "old"}
    blocks = told["left"][1]
    assert told["left"] == ["a.hkv", blocks, "log", "manifest.json"]
    assert blocks.startswith("blocks-")
