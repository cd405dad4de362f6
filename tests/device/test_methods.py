"""Every method on an emulated device whose work is late: the logits are those of the host."""

from __future__ import annotations

import pytest
import torch

import hybrid_kv as hkv
from hybrid_kv.models.cache_state import passing
from hybrid_kv.plugins import METHODS
from tests.device import emulated
from tests.device.models import llama, logits_of, small, tokens

ROUNDING = 2e-4
"""Of logits with a deviation of about 3: `saq` rounds by a sum whose order differs."""

pytestmark = [
    pytest.mark.usefixtures("untrained_heads"),
    # Where Triton is not installed torch serves the device, and says so.
    pytest.mark.filterwarnings("ignore::hybrid_kv.errors.BackendWarning"),
]

PAGE = 4
TURNS = [tokens(258), *(tokens(1, 2 + number) for number in range(4))]
"""A prompt, and steps in the middle of which pages leave the window."""


@pytest.mark.parametrize("method", sorted(METHODS))
def test_a_method_gives_what_it_gives_on_the_host(method: str) -> None:
    config = small(method, page_size=PAGE)
    expected = logits_of(llama(), config, TURNS)
    with emulated(schedule="late"):
        found = logits_of(llama().to("cuda"), config, TURNS)  # type: ignore[arg-type]
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, atol=ROUNDING, rtol=0)


def test_what_is_offloaded_token_by_token_has_no_page_digests() -> None:
    """At default sizes a GPU made digests of entries that are no whole pages, and failed."""
    config = hkv.HybridConfig(method="snapkv", demote="offload", index_build="background")
    expected = logits_of(llama(), config, TURNS)
    with emulated():
        found = logits_of(llama().to("cuda"), config, TURNS)  # type: ignore[arg-type]
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, atol=ROUNDING, rtol=0)


@pytest.mark.parametrize("select", ["device", "host"])
@pytest.mark.parametrize("seed", [1, 2])
def test_any_order_that_streams_allow_gives_the_same(select: str, seed: int) -> None:
    config = small("hybrid").replace(select=select)
    expected = logits_of(llama(), config, TURNS)
    with emulated(schedule=seed, kernels="defined"):
        found = logits_of(llama().to("cuda"), config, TURNS)  # type: ignore[arg-type]
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, atol=ROUNDING, rtol=0)


@pytest.mark.parametrize("method", ["full", "hybrid"])
@pytest.mark.parametrize("kernels", ["defined", "auto"])
def test_sparse_prefill_gives_what_it_gives_on_the_host(method: str, kernels: str) -> None:
    config = small(method).replace(prefill=0.2, prefill_chunk_tokens=100)
    turns = [tokens(400), *TURNS[1:]]
    expected = logits_of(llama(), config, turns)
    exact = logits_of(llama(), config.replace(prefill="exact"), turns)
    with emulated(schedule="late", kernels=kernels):
        found = logits_of(llama().to("cuda"), config, turns)  # type: ignore[arg-type]
    assert not torch.allclose(expected[0], exact[0], atol=10 * ROUNDING)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, atol=ROUNDING, rtol=0)


def test_beams_attend_their_own_entries_under_selection_on_the_device() -> None:
    """Rows that share cold entries shared one recording, and got the last row's result."""
    config = small("hybrid", context=120, budget="60").replace(select="device")
    asked = {"max_new_tokens": 6, "num_beams": 3, "pad_token_id": 0, "eos_token_id": None}
    prompt, model = tokens(120), llama()
    with hkv.attach(model, config) as runtime:
        expected = model.generate(prompt, **passing(runtime.cache()), **asked).tolist()  # type: ignore[operator]
    with emulated(kernels="defined"):
        model = llama().to("cuda")  # type: ignore[assignment, arg-type]
        with hkv.attach(model, config) as runtime:
            found = model.generate(prompt.cuda(), **passing(runtime.cache()), **asked)  # type: ignore[operator]
            assert found.tolist() == expected


def test_forks_go_on_by_themselves_under_selection_on_the_device() -> None:
    config = small("hybrid").replace(select="device")
    found: dict[str, list[torch.Tensor]] = {}
    for device in ("cpu", "cuda"):
        with emulated(schedule="late", kernels="defined"):
            model = llama().to(device)  # type: ignore[arg-type]
            with torch.inference_mode(), hkv.attach(model, config) as runtime:
                cache, parts = runtime.cache(), []
                model(tokens(300).to(device), **passing(cache), use_cache=True)
                caches = [cache, cache.fork()]
                for number in range(4):
                    for which, one in enumerate(caches):
                        ids = tokens(1, 10 * number + which).to(device)
                        parts.append(model(ids, **passing(one)).logits.cpu())
                found[device] = parts
    for one, other in zip(found["cuda"], found["cpu"], strict=True):
        torch.testing.assert_close(one, other, atol=ROUNDING, rtol=0)
