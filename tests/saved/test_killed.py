from __future__ import annotations

from tests.saved.killed import told_by


def test_a_process_that_is_killed_leaves_the_old_context_or_none() -> None:
    """At ten random moments, and before every call to the file system that changes something."""
    told = told_by("tests.saved.killed", "10", "--calls")
    assert set(told["found"]) <= {"None", "400", "900"}
    assert sum(told["found"].values()) == 10
    # First with nothing there, then with a context of 400 tokens: one change, which stays.
    assert told["seen"][0] is None
    first = told["seen"].index(400)
    for part, old in ((told["seen"][:first], None), (told["seen"][first:], 400)):
        change = part.index(900)
        assert change > 10
        assert set(part[:change]) == {old}
        assert set(part[change:]) == {900}
    # A name of blocks, one manifest, the context: nothing else.
    assert [name for name in told["left"] if not name.startswith("blocks-")] == [
        "a.hkv",
        "manifest.json",
    ]
    assert len(told["left"]) == 3
