"""The unit for systemd and the container file, checked by their own tools where these exist."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.cli.support import call

ROOT = Path(__file__).parents[1]
UNIT = ROOT / "scripts" / "hybrid-kv.service"


def unit_for(level: str) -> str:
    """The unit as it is installed for a user, or as its head says for the machine."""
    text = UNIT.read_text()
    return re.sub("^#system ", "", text, flags=re.MULTILINE) if level == "system" else text


@pytest.mark.parametrize("level", ["user", "system"])
def test_systemd_takes_the_unit(level: str, tmp_path: Path) -> None:
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("needs systemd-analyze, which comes with systemd")
    path = tmp_path / UNIT.name
    path.write_text(unit_for(level))
    run = subprocess.run(
        [analyze, "verify", f"--{level}", str(path)],
        env={"XDG_RUNTIME_DIR": str(tmp_path), "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    said = [line for line in run.stderr.splitlines() if UNIT.name in line]
    assert (run.returncode, said) == (0, []), run.stderr  # a setting that is unknown is only told


def test_the_unit_keeps_memory_locked_and_contexts_saved() -> None:
    settings = dict(re.findall(r"^(\w+)=(.*)$", unit_for("user"), re.MULTILINE))
    assert settings["LimitMEMLOCK"] == "infinity"
    assert settings["Restart"] == "on-failure"
    assert settings["WorkingDirectory"] == f"%S/{settings['StateDirectory']}"
    system = unit_for("system")
    assert "\nDynamicUser=yes\n" in system
    for broken in ("MemoryDenyWriteExecute", "PrivateDevices", "ProtectClock", "DevicePolicy"):
        assert f"\n{broken}=" not in system


def test_the_unit_s_command_has_options_that_exist() -> None:
    words = re.search('^Environment="HYBRID_KV_SERVE=(.*)"$', UNIT.read_text(), re.MULTILINE)
    assert words is not None
    options = call("serve", "--help").output
    given = [word for word in words[1].split() if word.startswith("-")]
    assert given == ["--cache-dir"]
    assert all(f" {option} " in options for option in given)


@pytest.mark.slow
def test_the_container_file_builds() -> None:
    tool = shutil.which("podman") or shutil.which("docker")
    if tool is None:
        pytest.skip("needs podman or docker")
    state = subprocess.run([tool, "info"], capture_output=True, text=True, check=False)
    words = state.stderr.strip().splitlines()
    if state.returncode or any("Cannot connect" in line for line in words):
        pytest.skip(f"{Path(tool).name} runs no containers here: {words[-1] if words else ''}")
    file = ROOT / "scripts" / "Containerfile"
    for image in set(re.findall(r"^FROM (\S+)", file.read_text(), re.MULTILINE)):
        known = subprocess.run([tool, "image", "inspect", image], capture_output=True, check=False)
        if known.returncode:  # a test downloads no images
            pytest.skip(f"needs {image}: {Path(tool).name} pull {image}")
    build = [tool, "build", "-f", "scripts/Containerfile", "-t", "hybrid-kv-test", "."]
    run = subprocess.run(build, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-2000:]
    words = [tool, "run", "--rm", "hybrid-kv-test", "--version"]
    run = subprocess.run(words, capture_output=True, text=True, check=False)
    assert run.stdout.startswith("hybrid-kv "), run.stderr
