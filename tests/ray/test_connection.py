"""Addresses and environments that are no cluster, each said in one sentence; most need no Ray."""

from __future__ import annotations

import socket
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from hybrid_kv.ray import cluster as clusters
from tests.cli.support import refused


@pytest.fixture
def ray_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clusters, "find_spec", lambda name: ModuleSpec(name, None))


def words(tmp_path: Path, address: str) -> tuple[object, ...]:
    return "eval", "needle", "--ray", address, "-o", tmp_path / "results"


@pytest.mark.parametrize("verb", ["eval", "serve"])
def test_without_ray_the_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    monkeypatch.setattr(clusters, "find_spec", lambda name: None)
    serve = ("serve", "needle", "--port", 0, "--ray", "auto")
    error = refused(*(words(tmp_path, "auto") if verb == "eval" else serve))
    assert "--ray needs Ray, got an environment without; pip install 'hybrid-kv[ray]'" in error


@pytest.mark.usefixtures("ray_is_there")
@pytest.mark.parametrize("address", ["", "here", "ray://host:10001", "host:", ":6379", "a b:1"])
def test_addresses_are_of_a_head_node(tmp_path: Path, address: str) -> None:
    error = refused(*words(tmp_path, address))
    assert "must be HOST:PORT of a head node, as `ray start --head` prints it, or auto" in error
    assert f"got '{address}'" in error


@pytest.mark.usefixtures("ray_is_there")
def test_an_address_that_nobody_answers_is_refused_at_once(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
        error = refused(*words(tmp_path, address))
    assert f"must be a cluster that answers, got '{address}' (Connection refused)" in error
    assert not (tmp_path / "results").exists()


def test_a_machine_outside_of_the_cluster_is_told_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ray = pytest.importorskip("ray", reason="Ray is not installed; run scripts/check_engines")

    def init(**options: object) -> None:
        raise ConnectionError("Could not find any running Ray instance.\nPlease specify one.")

    monkeypatch.setattr(ray, "init", init)
    error = refused(*words(tmp_path, "auto"))
    assert "must be a cluster that this machine is a node of, got 'auto': Could not find" in error
