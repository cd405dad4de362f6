"""Tests are given an emulated device by a flag, must use it, and leave none behind."""

from __future__ import annotations

from pathlib import Path

from tests import forked

CONTRACTS = """
import pytest, torch
from tests.device import emulated
from tests.device.placement import placed

def test_uses_it():
    model = placed(torch.nn.Linear(3, 5))
    assert model(placed(torch.ones(2, 3))).device == torch.device("cuda", 0)

def test_forgets_to_place_its_model():
    torch.nn.Linear(3, 5)(torch.ones(2, 3))

@pytest.mark.host("lies in host memory")
def test_of_the_host():
    assert False
"""
OTHERS = """
import torch
from tests.device import emulated

left = []

def test_leaves_a_device():
    left.append(emulated())
    left[0].__enter__()
    assert torch.ones(2, device="cuda").sum().item() == 2

def test_that_follows_sees_no_device():
    assert not torch.cuda.is_available()
    assert torch.ones(2).sum().item() == 2

def test_touches_a_device_that_it_has_not_asked_for():
    torch.ones(2, device="cuda")
"""


def test_a_device_is_given_by_a_flag_must_be_used_and_is_not_left_behind(tmp_path: Path) -> None:
    (tmp_path / "contracts").mkdir()
    (tmp_path / "contracts/test_contracts.py").write_text(CONTRACTS)
    (tmp_path / "test_others.py").write_text(OTHERS)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = host: of the host")
    words = ["-m", "pytest", "-p", "tests.device.plugin", "-v", "-rsfE"]
    words += ["--device", "emulated", "-p", "no:cacheprovider", str(tmp_path)]
    done = forked.run(*words, cwd=tmp_path)
    said = done.stdout
    for claim in (
        "test_contracts.py::test_uses_it PASSED",
        "test_contracts.py::test_forgets_to_place_its_model FAILED",
        "contracts/test_contracts.py:13: lies in host memory",
        "test_others.py::test_leaves_a_device ERROR",
        "test_others.py::test_that_follows_sees_no_device PASSED",
        "test_others.py::test_touches_a_device_that_it_has_not_asked_for FAILED",
        "an emulated device is left behind: enter `emulated()` in a with statement",
        "nothing ran on the device: place the test's models, or mark it `host(reason)`",
    ):
        assert claim in said, said
