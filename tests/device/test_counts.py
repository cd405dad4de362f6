"""How much a decode step tells a device, and how often it waits: no more than today."""

from __future__ import annotations

import os

import pytest

from tests.device.models import small
from tests.device.step_counts import counted

pytestmark = [
    pytest.mark.skipif(
        os.environ.get("TRITON_INTERPRET") == "1", reason="bounds are those of torch's twins"
    ),
    pytest.mark.filterwarnings("ignore::hybrid_kv.errors.BackendWarning"),
    pytest.mark.filterwarnings("ignore::hybrid_kv.errors.DeviceSelectWarning"),
]

MOST = {  # of a model of two layers: launches, copies and waits; then the same where a page leaves
    "full": ((92, 3, 2), (92, 3, 2)),
    "quest": ((176, 3, 2), (176, 5, 2)),
    "hybrid": ((152, 9, 6), (166, 20, 6)),
    "streaming_llm": ((134, 5, 4), (136, 6, 4)),
    "snapkv": ((154, 5, 4), (224, 8, 4)),
}


@pytest.mark.parametrize("method", MOST)
def test_a_step_takes_no_more_launches_copies_and_waits(method: str) -> None:
    config = small(method)
    if method == "hybrid":  # torch's twin of selection on the device copies what kernels read
        config = config.replace(select="host")
    found = counted(config)
    for one, most in zip((found.quiet, found.leaving), MOST[method], strict=True):
        told = one.launches, one.copies, one.num_waits
        assert all(count <= limit for count, limit in zip(told, most, strict=True)), (told, most)
