from __future__ import annotations

from tests.saved.killed import told_by


def test_processes_that_are_killed_or_share_a_folder_harm_nothing() -> None:
    """At ten random moments, before every third call to the file system, and two side by side."""
    told = told_by("tests.saved.killed_registry", "10", "3", "25")
    assert sum(told["found"].values()) == 10
    # A new context, then the eviction that makes room for it: each happens once, and stays.
    order = ["0 added, 0 evicted", "1 added, 0 evicted", "1 added, 1 evicted"]
    assert told["seen"] == sorted(told["seen"], key=order.index)
    assert set(told["seen"]) == set(order)
    assert told["seen"].index(order[1]) >= 3
    both = told["together"]
    assert both["codes"] == [0, 0]
    assert both["takes"] == 50
    assert both["hits"] > 0  # how many hangs on who is faster
    assert both["tokens"] == 301 * both["hits"]
    assert both["damaged"] == 0
    assert both["there"] <= 4
    assert told["left"] == ["counters.json", "lock"]
    assert told["parts"] == []
