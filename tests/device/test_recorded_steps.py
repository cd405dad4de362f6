"""Steps whose selection a device has recorded, by kernels that are their own definitions.

They are held to a host that scans all cold keys exactly: each list of candidates has room for all
of them here, so that both attend the same entries.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import hybrid_kv as hkv
from hybrid_kv.index import _device_keys
from hybrid_kv.models.cache_state import passing
from hybrid_kv.ops import tail
from tests.device import Machine, emulated
from tests.device.cuda import values
from tests.device.machine import Schedule
from tests.device.models import llama, logits_of, small, tokens

ROUNDING = 2e-4
ON_DEVICE = {"select": "device"}
ON_HOST = {"select": "host", "cold.index.kind": "flat"}
BY_DEVICE = small("hybrid", page_size=8).replace(**ON_DEVICE)
BY_HOST = small("hybrid", page_size=8).replace(**ON_HOST)
STEPS = [tokens(1, 2 + number) for number in range(11)]


def on_device(
    turns: list[Tensor], schedule: Schedule = "late", config: hkv.HybridConfig = BY_DEVICE
) -> tuple[list[Tensor], Machine]:
    with emulated(schedule=schedule, kernels="defined") as machine:
        return logits_of(llama().to("cuda"), config, turns), machine  # type: ignore[arg-type]


def assert_alike(found: list[Tensor], expected: list[Tensor]) -> None:
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, atol=ROUNDING, rtol=0)


@pytest.mark.parametrize("schedule", ["late", "ahead"])
def test_replayed_steps_give_what_the_host_gives(schedule: Schedule) -> None:
    turns = [tokens(260), *STEPS]
    found, machine = on_device(turns, schedule)
    assert_alike(found, logits_of(llama(), BY_HOST, turns))
    assert machine.counts.replays >= len(STEPS)


@pytest.mark.parametrize(
    ("growth", "later_keys"),
    [(8, 4096), (4096, 24), (8, 24)],
    ids=["moments-taken-anew", "codes-that-move", "both"],
)
def test_what_a_recording_reads_may_grow_and_move(
    growth: int, later_keys: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Codes that outgrow their memory are recorded again; moments are renewed where they lie.

    A page leaves between single steps, whose recording goes on where nothing that it reads has
    moved. Turns of several pages move all of it together.
    """
    monkeypatch.setattr(_device_keys, "LATER_KEYS", later_keys)
    monkeypatch.setattr(_device_keys, "_LEAST_ROOM", 4)
    monkeypatch.setattr(tail, "_LEAST_GROWTH", growth)
    turns = [tokens(150), *STEPS, tokens(53, 9), *STEPS[:4], tokens(37, 8), *STEPS[4:7]]
    found, machine = on_device(turns)
    assert_alike(found, logits_of(llama(), BY_HOST, turns))
    assert machine.counts.captures > 2 or (machine.counts.captures == 2 and later_keys == 4096)
    assert machine.counts.replays > machine.counts.captures


def test_rows_of_other_lengths_replay_their_own_results(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages leave each row in steps of its own: recordings end up in another order than rows."""
    monkeypatch.setattr(tail, "_LEAST_GROWTH", 8)
    hidden, length, count = 11, 131, 20

    def steps(device: str, config: hkv.HybridConfig) -> list[Tensor]:
        model = llama().to(device)  # type: ignore[arg-type]
        mask = torch.ones(2, length + count, dtype=torch.long)
        mask[0, :hidden] = 0
        with torch.inference_mode(), hkv.attach(model, config) as runtime:
            cache, parts = runtime.cache(), []
            for end in range(length, length + count):
                new = length if end == length else 1
                ids = torch.cat([tokens(new, end), tokens(new, 2 * end)]).to(device)
                seen = mask[:, :end].to(device)
                out = model(ids, attention_mask=seen, **passing(cache), use_cache=True)
                parts.append(values(out.logits[:, -1]))
            cache.check_integrity()
        return parts

    with emulated(schedule="late", kernels="defined") as machine:
        found = steps("cuda", small("hybrid").replace(**ON_DEVICE))
    assert_alike(found, steps("cpu", small("hybrid").replace(**ON_HOST)))
    assert machine.counts.replays > count


def test_forks_of_other_lengths_search_their_own_entries() -> None:
    """Both read one extent, of which the cropped one must not see all."""

    def steps(device: str, config: hkv.HybridConfig) -> list[Tensor]:
        model = llama().to(device)  # type: ignore[arg-type]
        with torch.inference_mode(), hkv.attach(model, config) as runtime:
            cache, parts = runtime.cache(), []
            model(tokens(230).to(device), **passing(cache), use_cache=True)
            caches = [cache, cache.fork()]
            caches[1].crop(-90)
            for number in range(4):
                for which, one in enumerate(caches):
                    ids = tokens(1, 10 * number + which).to(device)
                    parts.append(values(model(ids, **passing(one)).logits[:, -1]))
        return parts

    with emulated(schedule="late", kernels="defined") as machine:
        found = steps("cuda", BY_DEVICE)
    assert_alike(found, steps("cpu", BY_HOST))
    assert machine.counts.replays > 4
