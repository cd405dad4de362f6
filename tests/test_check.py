"""scripts/check says at its end what failed and what was left out, and its exit code says the same.

Its steps are stand-ins that only succeed or fail; they and the tools named are all that PATH has.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "scripts" / "check"
TOOLS = ("bash", "cat", "dirname", "env", "grep", "mktemp", "rm", "tail")
OPTIONAL = ("chromium", "qemu-x86_64")
LEFT_OUT = {
    "chromium": "the page in a browser",
    "qemu-x86_64": "CPUs that this one is not",
    "kvpress": "kvpress as an oracle",
}

pytestmark = pytest.mark.skipif(
    any(shutil.which(tool) is None for tool in TOOLS), reason=f"not all of {', '.join(TOOLS)}"
)


def check(root: Path, *arguments: str, lacks: str = "", fails: str = "", **more: str) -> list[str]:
    """Lines of output, the exit code last."""
    scripts, tools = root / "scripts", root / "bin"
    scripts.mkdir()
    tools.mkdir()
    for tool in TOOLS:
        (tools / tool).symlink_to(str(shutil.which(tool)))

    def write(path: Path, text: str) -> None:
        path.write_text(f"#!{tools}/bash\n{text}\n")
        path.chmod(0o755)

    for tool in OPTIONAL:
        if tool != lacks:
            write(tools / tool, "")
    write(tools / "python", f'[[ -z "{fails}" || "$*" != *"{fails}"* ]]')
    write(
        scripts / "_env.sh",
        f"root={root} python={tools}/python\nprepare() {{ :; }}\nfail() {{ exit 1; }}",
    )
    for name in ("sanitize", "check_cpus"):
        write(scripts / name, f'[[ "{fails}" != {name} ]]')
    ends = "echo no network >&2; exit 1" if lacks == "kvpress" else "echo /python"
    write(scripts / "kvpress", ends)
    shutil.copy(SCRIPT, scripts / "check")
    run = subprocess.run(
        [tools / "bash", scripts / "check", *arguments],
        env={"PATH": str(tools), **more},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert run.stderr == ""
    return [*run.stdout.splitlines(), str(run.returncode)]


def test_all_that_is_there_succeeds(tmp_path: Path) -> None:
    said = check(tmp_path, "--triton", CI="true")
    assert said[-2:] == ["check: all steps succeeded", "0"]
    assert not any("left out" in line for line in said)


@pytest.mark.parametrize(
    ("fails", "step"),
    [("mypy", "types"), ("sanitize", "native"), ("check_cpus", "cpus"), ("tests/ops", "kernels")],
)
def test_a_step_that_fails_is_named_and_the_others_run(
    tmp_path: Path, fails: str, step: str
) -> None:
    said = check(tmp_path, "--triton", fails=fails)
    assert said[-2:] == [f"check: failed: {step}", "1"]
    assert "== kernels" in said


@pytest.mark.parametrize("lacks", LEFT_OUT)
def test_what_is_left_out_is_named_and_fails_ci_alone(tmp_path: Path, lacks: str) -> None:
    for name, settings, code in (("alone", {}, "0"), ("ci", {"CI": "true"}, "1")):
        (tmp_path / name).mkdir()
        said = check(tmp_path / name, "--triton", lacks=lacks, **settings)
        assert said[-1] == code
        assert any(line.startswith(f"check: left out: {LEFT_OUT[lacks]}; ") for line in said)
