"""A tiny random model that reads the needle language, attached."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import hybrid_kv as hkv
from tests.cli.support import save_model


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def llm(folder: Path) -> Iterator[hkv.LLM]:
    with hkv.load(folder, dtype="float32", config="full") as found:
        yield found
