"""A cluster of two nodes on this machine; `scripts/check_engines` makes an environment with Ray."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cli.support import save_model

os.environ |= {
    "RAY_raylet_start_wait_time_s": "120",  # a busy machine
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}


@pytest.fixture(scope="session")
def cluster() -> Iterator[Any]:
    pytest.importorskip("ray", reason="Ray is not installed; run scripts/check_engines")
    from ray.cluster_utils import Cluster

    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    made.add_node(num_cpus=1)
    yield made
    made.shutdown()


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random model that reads the needle language."""
    return save_model(tmp_path_factory.mktemp("model"))
