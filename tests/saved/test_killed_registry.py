from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_processes_that_are_killed_or_share_a_folder_harm_nothing() -> None:
    """At ten random moments, before every third call to the file system, and two side by side."""
    run = subprocess.run(
        [sys.executable, "-m", "tests.saved.killed_registry", "10", "3", "25"],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert run.returncode == 0, run.stderr[-3000:]
    told = json.loads(run.stdout.splitlines()[-1])
    assert sum(told["found"].values()) == 10
    # A new context, then the eviction that makes room for it: each happens once, and stays.
    order = ["0 added, 0 evicted", "1 added, 0 evicted", "1 added, 1 evicted"]
    assert told["seen"] == sorted(told["seen"], key=order.index)
    assert set(told["seen"]) == set(order)
    assert told["seen"].index(order[1]) >= 3
    both = told["together"]
    assert both["codes"] == [0, 0]
    assert both["takes"] == 50
    assert both["hits"] > 5
    assert both["tokens"] == 301 * both["hits"]
    assert both["damaged"] == 0
    assert both["there"] <= 4
    assert told["left"] == ["counters.json", "lock"]
    assert told["parts"] == []
