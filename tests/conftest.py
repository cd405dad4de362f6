"""Every test runs with fixed seeds, no network and one thread per worker; skips have reasons."""

from __future__ import annotations

import gc
import os
import shutil
import tempfile

# Before torch and transformers are imported, or they have read their own values already.
os.environ["HF_HUB_OFFLINE"] = "1"
# What `auto` measures in a test is nothing for the user's cache, nor the other way round.
os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="hybrid-kv-tests-")
# A plan of a step that was not told of a change fails, instead of reading what was.
os.environ["HYBRID_KV_CHECK_PLANS"] = "1"
# torch.compile would look at all objects of all tests for cycles after each of its graphs.
os.environ["TORCH_DYNAMO_RUN_GC_AFTER_COMPILE"] = "0"
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import random
from collections.abc import Iterator
from importlib.util import find_spec

import numpy as np
import pytest
import torch

from hybrid_kv.methods.locret import Locret, RetainingHeads
from hybrid_kv.plugins import INDEXES, METHODS
from hybrid_kv.types import ModelInfo
from tests import interpreter
from tests.tolerances import TOLERANCES, Tolerance
from tests.trained_heads import draw_heads

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)

if os.environ.get("TRITON_INTERPRET") == "1" and find_spec("triton"):
    interpreter.hasten()

pytest_plugins = ("tests.device.plugin",)


def pytest_collection_finish() -> None:
    gc.freeze()  # else each collection looks at all modules and tests again


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """Nor at what earlier modules left: graphs, caches of models, what they import."""
    yield
    if nextitem is not None and nextitem.path != item.path:
        gc.collect()
        gc.freeze()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # for libraries that count what is left at the end
    shutil.rmtree(os.environ["XDG_CACHE_HOME"], ignore_errors=True)


@pytest.fixture(autouse=True)
def _fixed_seed() -> None:
    random.seed(0)
    np.random.seed(0)
    torch.default_generator.manual_seed(0)  # torch.manual_seed takes 0.7 ms where there is no GPU
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(0)


@pytest.fixture
def own_plugins() -> Iterator[None]:
    """What a test registers is gone after it."""
    with METHODS.scope(), INDEXES.scope():
        yield


@pytest.fixture
def untrained_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Locret's heads are random ones of the model's shapes: for tests of all methods."""

    def drawn(path: str, info: ModelInfo) -> RetainingHeads:
        return RetainingHeads({one.layer_idx: draw_heads(one) for one in info.layers})

    monkeypatch.setattr(RetainingHeads, "load", drawn)
    monkeypatch.setattr(Locret, "lacks", lambda params: None)


@pytest.fixture(params=sorted(TOLERANCES, key=str), ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    """Each dtype that keys and values come in."""
    return request.param


@pytest.fixture
def tolerance(dtype: torch.dtype) -> Tolerance:
    """What `torch.testing.assert_close` is given for this test's dtype."""
    return TOLERANCES[dtype]
