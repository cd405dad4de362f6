"""A forked process ends, prints and takes words as an interpreter of its own does."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests import forked

CODES = {
    "prints": "print('é'); import sys; print('no', file=sys.stderr)",
    "words": "import sys; print(sys.argv)",
    "number": "raise SystemExit(3)",
    "sentence": "raise SystemExit('why')",
    "nothing": "raise SystemExit",
    "killed": "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
    "ctrl-c": "import os, signal\n"
    "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a job in the background
    "os.kill(os.getpid(), signal.SIGINT)",
    "at exit": "import atexit; atexit.register(print, 'end'); print('begin')",
    "thread": "import threading, time\n"
    "threading.Thread(target=lambda: (time.sleep(.1), print('late'))).start()",
    "environment": "import os; print(os.environ.get('A'), os.environ.get('HOME'), os.getcwd())",
}


@pytest.mark.parametrize("name", CODES)
def test_it_ends_as_an_interpreter_does(name: str, tmp_path: Path) -> None:
    words = ["-c", CODES[name], "--flag", "1"]
    given = {"cwd": tmp_path, "env": {"A": "b"}}
    run = forked.run(*words, **given)
    command = [sys.executable, *words]
    expected = subprocess.run(command, capture_output=True, text=True, check=False, **given)
    assert (run.returncode, run.stdout) == (expected.returncode, expected.stdout)
    last = [text.splitlines()[-1:] for text in (run.stderr, expected.stderr)]
    assert last[0] == last[1]


def test_an_error_is_a_traceback() -> None:
    run = forked.run("-c", "1 / 0")
    assert run.returncode == 1
    assert run.stderr.startswith("Traceback (most recent call last):\n")
    assert run.stderr.endswith("ZeroDivisionError: division by zero\n")


def test_a_module_runs_and_can_be_ended() -> None:
    with forked.start("-m", "hybrid_kv", "--version", stdout=-1, stderr=-1) as process:
        out, _ = process.communicate(60)
        assert process.returncode == 0
    assert out
    with forked.start("-c", "import time; time.sleep(60)") as process:
        assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == -signal.SIGTERM
    with forked.start("-c", "import time; time.sleep(60)") as process:
        pass
    assert process.returncode == -signal.SIGKILL
