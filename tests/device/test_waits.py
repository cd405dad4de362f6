"""Where the host waits for a device in decode steps: where it needs what the device computes."""

from __future__ import annotations

import warnings
from typing import Literal

import pytest
import torch

import hybrid_kv as hkv
from hybrid_kv.errors import DeviceSelectWarning
from hybrid_kv.models.cache_state import passing
from hybrid_kv.ops import Ops
from hybrid_kv.ops.tail import Tail
from hybrid_kv.runtime.sparse_prefill import SparsePrefill, prefill_loss
from hybrid_kv.store import ColdExtent, ExtentView
from hybrid_kv.types import LayerShape
from tests.contracts.architectures import build
from tests.device import emulated
from tests.device.cuda import values
from tests.device.models import small, tokens
from tests.device.step_counts import FEW_STEPS, LAYERS, QUIET, decoded, leaving

pytestmark = pytest.mark.filterwarnings("ignore::hybrid_kv.errors.BackendWarning")

Kernels = Literal["auto", "defined"]


def test_the_host_waits_for_queries_and_for_nothing_else() -> None:
    with emulated(schedule="late") as machine:
        config = small("hybrid").replace(select="host", look_ahead="never")
        steps = decoded(config, machine, num_steps=FEW_STEPS)
    quiet, number = steps[QUIET], leaving(steps)
    assert quiet.num_waits == LAYERS, quiet.waits
    assert {line.split(" in ")[0] for line in quiet.waits} == {"Event.synchronize"}
    # All copies of a step go by one stream: whoever waits for the last one has the others.
    assert steps[number].num_waits == LAYERS, steps[number].waits
    assert steps[number + 1].num_waits == LAYERS + 1, steps[number + 1].waits


@pytest.mark.parametrize("kernels", ["auto", "defined"])
@pytest.mark.parametrize("method", ["full", "quest", "streaming_llm"])
def test_a_step_without_the_host_waits_for_nothing(method: str, kernels: Kernels) -> None:
    """With kernels and without; nor where pages are dropped."""
    with emulated(schedule="late", kernels=kernels) as machine:
        decoded(small(method), machine, num_steps=FEW_STEPS, first_strict=QUIET)


@pytest.mark.parametrize("hidden", [0, 5, 126])
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_a_mask_is_looked_at_once_a_forward(name: str, rows: int, hidden: int) -> None:
    """Whether it hides anything, hides what was shown, hides new tokens, or some of a sliding
    window, in whichever layer: all by one look.
    """
    length = 131
    mask = torch.ones(rows, length + 3, dtype=torch.long)
    mask[0, :hidden] = 0
    with emulated(schedule="late", kernels="defined") as machine:
        model = build(name)
        with torch.inference_mode(), hkv.attach(model, small("full")) as runtime:
            cache = runtime.cache()
            for end in range(length, length + 4):
                new = length if end == length else 1
                ids = torch.cat([tokens(new, end + row) for row in range(rows)]).cuda()
                seen, before = mask[:, :end].cuda(), machine.counts.copy()
                out = model(ids % 64, attention_mask=seen, **passing(cache), use_cache=True)
                waits = machine.counts.since(before).waits
                if new == 1:
                    assert waits.total() == 1, waits
                out.logits[:, -1].tolist()


def test_what_the_device_selects_and_what_methods_keep_is_waited_for_where_pages_leave() -> None:
    """Pages of 4 tokens leave after a few steps under `snapkv` too, which keeps just the window."""
    for config in (small("hybrid").replace(select="device"), small("snapkv", page_size=4)):
        with emulated(schedule="late", kernels="defined") as machine:
            steps = decoded(config, machine, num_steps=FEW_STEPS)
        number = leaving(steps)
        waits = [one.num_waits for one in (steps[QUIET], steps[number], steps[number + 1])]
        assert waits == [0, 0, 1], [one.waits for one in steps]


def test_torch_in_the_place_of_kernels_is_not_recorded_and_waits_for_ids_alone() -> None:
    """It copies rows of the host, which no capture permits: it tried in vain, and warned of it."""
    with emulated(schedule="late") as machine, warnings.catch_warnings():
        warnings.simplefilter("error", DeviceSelectWarning)
        quiet = decoded(small("hybrid").replace(select="device"), machine, num_steps=3)[QUIET]
    if machine.counts.captures:  # with kernels
        assert (quiet.num_waits, quiet.replays) == (0, 2)
    else:
        assert quiet.num_waits == 4, quiet.waits  # rows to rank and rows to attend, by layer


def test_moments_that_grow_are_taken_on_the_device_and_not_waited_for() -> None:
    """On the host they held up a step for all layers at once, and were copied from plain memory."""
    extent = ColdExtent(LayerShape(0, 4, 2, 16), torch.float32, 580)
    k, v = torch.randn(2, 2, 580, 16).unbind()
    extent.fill(k, v, 0)
    expected = Tail.of(k[:, :280], v[:, :280]).grown(k, v).tensors()
    with emulated(schedule="late") as machine:
        span, device = ExtentView(extent, 280), torch.device("cuda", 0)
        with machine.no_waits():
            span.tail(device)
            span.length = 580
            grown = span.tail(device)
        assert grown.count == 580
        for name, tensor in grown.tensors().items():
            torch.testing.assert_close(values(tensor), expected[name], atol=1e-5, rtol=1e-4)


def test_sparse_prefill_waits_for_nothing() -> None:
    q, k, v = (torch.randn(heads, 700, 24) for heads in (4, 2, 2))
    sparse = SparsePrefill(0.1, 2, torch.device("cpu"))
    expected = sparse.attend(Ops(), q, k, v, scale=0.3, softcap=None)
    with emulated(schedule="late", kernels="defined") as machine:
        here = SparsePrefill(0.1, 2, torch.device("cuda", 0))
        given = [tensor.cuda() for tensor in (q, k, v)]
        with machine.no_waits():
            part = here.attend(Ops(), *given, scale=0.3, softcap=None)
        torch.testing.assert_close(values(part.out), expected.out, atol=1e-5, rtol=1e-4)
        lost, known = prefill_loss([(0, here)]), prefill_loss([(0, sparse)])
    assert lost is not None
    assert known is not None
    assert (lost.density, lost.queries) == (known.density, known.queries)
    assert lost.error == pytest.approx(known.error, abs=1e-4)
