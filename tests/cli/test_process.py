"""The command as a process of its own: signals, pipes, what it imports."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests import forked
from tests.cli.support import PROMPT, words_of_ours

COMMAND = (sys.executable, "-m", "hybrid_kv")
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
    words = ("-m", "hybrid_kv", "generate", model, PROMPT, "--max-new-tokens", 900)
    process = forked.start(*words, stdout=pipe, stderr=pipe, env=ENVIRONMENT)
    assert process.stdout is not None
    process.stdout.read(1)
    process.stdout.close()
    assert process.stderr is not None
    assert words_of_ours(process.stderr.read()) == ""
    assert process.wait(timeout=120) == 1


def test_reader_that_is_gone_before_the_end_is_no_traceback() -> None:
    process = start("--version", stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    assert words_of_ours(process.stderr.read()) == ""
    assert process.wait(timeout=120) == 1


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys, hybrid_kv.cli.main;"
        "print({'torch', 'transformers', 'numpy', 'numba', 'faiss'} & set(sys.modules))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "set()"


def test_the_end_searches_no_objects_for_cycles() -> None:
    """With a model loaded that took a second of CPU after the last word."""
    code = (
        "import atexit, gc, sys\n"
        "atexit.register(lambda: print(gc.get_freeze_count() > 0))\n"
        "from hybrid_kv.cli.entry import main\n"
        "sys.argv = ['hybrid-kv', '--version']\n"
        "main()\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.splitlines()[-1] == "True"


def test_the_end_prints_nothing_of_bindings_that_search_for_leaks() -> None:
    pytest.importorskip("triton", reason="needs Triton; scripts/check --triton installs it")
    code = (
        "import sys, triton\n"
        "from hybrid_kv.cli.entry import main\n"
        "sys.argv = ['hybrid-kv', '--version']\n"
        "main()\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stderr == ""


@pytest.mark.parametrize("module", ["typer", "rich.console", "hybrid_kv.cli.profile"])
def test_ctrl_c_while_the_command_is_imported_is_one_line(module: str) -> None:
    """The first tenths of a second go into imports; Ctrl-C in them was a traceback."""
    code = (
        "import os, signal, sys\n"
        "class Finder:\n"
        "    def find_spec(self, name, *rest):\n"
        f"        if name == {module!r}:\n"
        "            os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Finder())\n"
        "from hybrid_kv.cli.entry import main\n"
        "sys.argv = ['hybrid-kv', 'methods']\n"
        "main()\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (run.returncode, run.stdout, run.stderr) == (130, "", "interrupted\n")


def test_an_argument_that_is_no_text_is_one_line() -> None:
    words = [*COMMAND, "generate", b"mod\xffel", "x"]
    run = subprocess.run(words, capture_output=True, text=True, env=ENVIRONMENT, check=False)
    assert run.returncode == 2
    assert run.stderr.startswith("error: argument 2 must be UTF-8, got 'mod\\udcffel'; ")
    assert len(run.stderr.splitlines()) == 1


def test_ctrl_c_ends_a_profile_with_what_was_measured(tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    words = ["profile", "random:tiny", "--device", "cpu", "--context", "100", "--methods"]
    words += ["full,flat", "--new-tokens", "30", "--warmup", "2", "--json", str(file)]
    code = (
        "import os, signal\n"
        "from hybrid_kv.cli.main import app\n"
        "from hybrid_kv.eval.profiling.steps import StepWatch\n"
        "put, seen = StepWatch.put, []\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a job in the background
        "def counting(self, value):\n"
        "    put(self, value)\n"
        "    seen.append(value)\n"
        "    if len(seen) == 20:\n"
        "        os.kill(os.getpid(), signal.SIGINT)\n"
        "StepWatch.put = counting\n"
        f"app({words!r})\n"
    )
    run = forked.run("-c", code, env=ENVIRONMENT)
    assert run.returncode == 130, run.stderr
    assert "Traceback" not in run.stderr
    assert "full at 100: interrupted: ended by the user" in run.stdout
    report = json.loads(file.read_text())
    assert report["interrupted"]
    assert [row["status"] for row in report["rows"]] == ["interrupted"]
    assert len(report["rows"][0]["step_ms"]) == 16  # 20 less the prompt, the first and 2


SWEEPS = {
    "eval": (
        "eval {model} --tasks passkey:records=5 --context 301 --methods streaming_llm --budget 80 "
        "--samples 1 -o {there}",
        "hybrid_kv.contest.folder:ResultsFolder.add",
    ),
    "profile": (
        "profile random:tiny --device cpu --context 100 --methods full,flat --new-tokens 9 "
        "--warmup 2 --json {there}/results.json",
        "hybrid_kv.eval.profiling.steps:StepWatch.put",
    ),
    "demo": (
        "demo --context 700 --records 8 --layer-context 1700 --json {there}/results.json",
        "hybrid_kv.eval.filling:FilledKV.load",
    ),
}
"""A sweep by its verb, and what it calls while it measures."""


@pytest.mark.parametrize("verb", SWEEPS)
def test_ctrl_c_inside_a_destructor_ends_a_sweep_with_what_was_measured(
    verb: str, model: Path, tmp_path: Path
) -> None:
    """What is raised inside a destructor is printed and forgotten: the sweep ran on."""
    line, place = SWEEPS[verb]
    words = line.format(model=model, there=tmp_path).split()
    module, name = place.split(":")
    owner, method = name.split(".")
    code = (
        "import os, signal\n"
        "from hybrid_kv.cli.main import app\n"
        f"from {module} import {owner} as owner\n"
        f"real, seen = owner.{method}, []\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a job in the background
        "class Dying:\n"
        "    def __del__(self):\n"
        "        os.kill(os.getpid(), signal.SIGINT)\n"
        "        for _ in range(1000):\n"  # the handler runs in here
        "            pass\n"
        "def calling(self, *rest):\n"
        "    seen.append(real(self, *rest))\n"
        "    if len(seen) == 1:\n"
        "        Dying()\n"
        f"owner.{method} = calling\n"
        f"app({words!r})\n"
    )
    run = forked.run("-c", code, env=ENVIRONMENT)
    assert run.returncode == 130, run.stderr
    assert "ending after this step; Ctrl-C again ends at once\n" in run.stderr
    assert "Exception ignored" not in run.stderr
    assert "Traceback" not in run.stderr
    report = json.loads((tmp_path / "results.json").read_text())
    if verb == "demo":
        assert len(report["runs"]) == 2
        assert report["layer"] is None
    else:
        assert report["interrupted"]
        assert [row["method"] for row in report["rows"]] == ["full"]


def test_a_second_ctrl_c_ends_at_once() -> None:
    code = (
        "import os, signal\n"
        "from hybrid_kv.cli.options import OutputOptions\n"
        "from hybrid_kv.cli.model_run import ended_by_ctrl_c\n"
        "steps = []\n"
        "try:\n"
        "    with ended_by_ctrl_c(OutputOptions(quiet=True)) as check:\n"
        "        for _ in range(2):\n"
        "            os.kill(os.getpid(), signal.SIGINT)\n"
        "            steps.append(1)\n"
        "except KeyboardInterrupt:\n"
        "    print(len(steps))\n"
    )
    run = forked.run("-c", code)
    assert (run.returncode, run.stdout, run.stderr) == (0, "1\n", "")
