"""Models on disk, made once."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.support import save_model


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny random model and a tokenizer."""
    return save_model(tmp_path_factory.mktemp("model"))
