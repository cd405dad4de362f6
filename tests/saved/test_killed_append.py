from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_a_process_that_is_killed_while_a_saved_context_grows_loses_nothing_saved() -> None:
    run = subprocess.run(
        [sys.executable, "-m", "tests.saved.killed_append", "6"],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert run.returncode == 0, run.stderr[-3000:]
    told = json.loads(run.stdout.splitlines()[-1])
    assert sum(told["found"].values()) == 6
    assert set(told["found"]) <= {"between saves", "new", "old"}
    blocks = told["left"][1]
    assert told["left"] == ["a.hkv", blocks, "log", "manifest.json"]
    assert blocks.startswith("blocks-")
