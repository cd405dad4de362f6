"""Every test of the edges runs without gradients and with torch's strict settings."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from transformers import (
    PreTrainedModel,
)

from tests.contracts.architectures import (
    build,
    strict_torch,
)


@pytest.fixture(autouse=True)
def _strict() -> Iterator[None]:
    with strict_torch(), torch.no_grad():
        yield


@pytest.fixture
def model() -> PreTrainedModel:
    return build("llama")
