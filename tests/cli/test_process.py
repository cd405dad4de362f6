"""The command as a process of its own: signals, pipes, what it imports."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from tests.cli.support import PROMPT

COMMAND = (sys.executable, "-m", "hybrid_kv.cli.main")
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
ENVIRONMENT.pop("PYTHONUNBUFFERED", None)  # or a write would fail where a flush at exit fails


def start(*words: object, **streams: int) -> subprocess.Popen[str]:
    texts = [str(word) for word in words]
    return subprocess.Popen([*COMMAND, *texts], text=True, env=ENVIRONMENT, **streams)


def test_ctrl_c_keeps_the_text(model: Path) -> None:
    pipe = subprocess.PIPE
    process = start("generate", model, PROMPT, "--max-new-tokens", 900, stdout=pipe, stderr=pipe)
    assert process.stdout is not None
    beginning = process.stdout.read(3)
    process.send_signal(signal.SIGINT)
    rest, errors = process.communicate(timeout=120)
    assert process.returncode == 130, errors
    assert errors.startswith("interrupted: ")
    assert (beginning + rest).strip()
    assert "Traceback" not in errors


def test_reader_that_leaves_is_no_traceback(model: Path) -> None:
    pipe = subprocess.PIPE
    process = start("generate", model, PROMPT, "--max-new-tokens", 900, stdout=pipe, stderr=pipe)
    assert process.stdout is not None
    process.stdout.read(1)
    process.stdout.close()
    assert process.stderr is not None
    assert process.stderr.read() == ""
    assert process.wait(timeout=120) == 1


def test_reader_that_is_gone_before_the_end_is_no_traceback() -> None:
    process = start("--version", stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    assert process.stderr.read() == ""
    assert process.wait(timeout=120) == 1


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys, hybrid_kv.cli.main;"
        "print({'torch', 'transformers', 'numpy', 'numba', 'faiss'} & set(sys.modules))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "set()"
