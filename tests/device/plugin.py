"""Gives tests an emulated device: those marked gpu where there is none, and contracts by a flag.

    pytest --device emulated tests/contracts       # as on a GPU: `placed` puts models and ids there

A contract that cannot run on a device is marked `host` with the reason. One that is not must use
the device, or it would prove nothing. A device that a test leaves behind fails that test, and is
taken away before the next.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.device import tensors
from tests.device.emulate import emulated, remove
from tests.device.guard import why_not

_WARNINGS = ("BackendWarning", "DeviceSelectWarning")
"""Without Triton torch serves the device, whose copies no capture permits; both are said."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--device",
        choices=["host", "emulated"],
        default="host",
        help="what contract tests compute on: the host, or an emulated CUDA device",
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        gpu = item.get_closest_marker("gpu")  # a keyword is the name of a folder, too
        if gpu is not None and not torch.cuda.is_available():
            reason = "needs an NVIDIA GPU: torch.cuda.is_available() is False"
            _emulate(item, "_emulated_gpu", reason if gpu.kwargs.get("real") else why_not())
        elif config.getoption("--device") == "emulated" and _is_contract(item.path):
            host = item.get_closest_marker("host")
            _emulate(item, "_emulated_device", why_not() if host is None else host.args[0])


def _is_contract(path: Path) -> bool:
    return "contracts" in (folder.name for folder in path.parents)


def _emulate(item: pytest.Item, fixture: str, why_skip: str) -> None:
    if why_skip:
        item.add_marker(pytest.mark.skip(reason=why_skip))
        return
    assert isinstance(item, pytest.Function)
    item.fixturenames.insert(0, fixture)
    for name in _WARNINGS:
        item.add_marker(pytest.mark.filterwarnings(f"ignore::hybrid_kv.errors.{name}"))


@pytest.fixture(autouse=True)
def _no_device_is_left() -> Iterator[None]:
    """Fails the test that leaves an emulated device behind; the next one does not see it."""
    if remove():
        pytest.fail("an emulated device was in place before the test: it is put there outside it")
    yield
    if remove():
        pytest.fail("an emulated device is left behind: enter `emulated()` in a with statement")


@pytest.fixture
def _emulated_gpu(_no_device_is_left: None) -> Iterator[None]:
    with emulated():
        yield


@pytest.fixture
def _emulated_device(_no_device_is_left: None) -> Iterator[None]:
    with emulated(schedule="late", kernels="defined"):
        yield


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """A contract that was given the device must use it."""
    yield
    given = "_emulated_device" in getattr(item, "fixturenames", ())
    if given and tensors.running().counts.launches == 0:
        pytest.fail("nothing ran on the device: place the test's models, or mark it `host(reason)`")
