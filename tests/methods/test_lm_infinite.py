"""LM-Infinite: first tokens stand no farther away than the window is long."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from hybrid_kv.config import HybridConfig
from hybrid_kv.errors import ConfigError
from hybrid_kv.plugins import Method
from hybrid_kv.rotary import Rotary
from hybrid_kv.runtime import KVCache
from hybrid_kv.types import LayerShape, ModelInfo
from tests import drive_method
from tests.drive_method import ROTARY
from tests.tolerances import TOLERANCES

PROMPT, NEW, SINKS, WINDOW, PAGE = 173, 41, 16, 48, 16
SHAPE = LayerShape(0, 6, 2, 72)
CLOSE = TOLERANCES[torch.float32]
drive = partial(drive_method.drive, rotary=ROTARY)


def config(**settings: Any) -> HybridConfig:
    given = {"sink_tokens": SINKS, "window_tokens": WINDOW, **settings}
    return HybridConfig(method="lm_infinite", page_size=PAGE, **given)


def method(**settings: Any) -> Method:
    built: Method = config(**settings).build()
    return built


def turned(keys: NDArray[Any], by: NDArray[Any]) -> NDArray[Any]:
    """Keys [n, 72] turned on by so many positions [n]: pairs of halves as complex numbers."""
    pairs = keys[:, :36] + 1j * keys[:, 36:]
    pairs = pairs * np.exp(1j * by[:, None] * np.array(ROTARY.frequencies))
    return np.concatenate([pairs.real, pairs.imag], 1)


def expected(q: Any, k: Any, v: Any, at: int, first: int) -> NDArray[Any]:
    """[Hq, D]: the query at `at` over first tokens that stand near and the window from `first`."""
    out = []
    for h in range(6):
        keys, values = k[h // 3].double().numpy(), v[h // 3].double().numpy()
        sinks = np.arange(SINKS)
        near = np.minimum(at - sinks, WINDOW)
        keys = np.concatenate([turned(keys[:SINKS], at - near - sinks), keys[first : at + 1]])
        values = np.concatenate([values[:SINKS], values[first : at + 1]])
        logits = keys @ q[h, at].double().numpy() * 72**-0.5
        weights = np.exp(logits - logits.max())
        out.append(weights @ values / weights.sum())
    return np.stack(out)


def test_first_tokens_stand_as_near_as_the_window_is_long() -> None:
    driven = drive(method(), prompt=PROMPT, new=NEW)
    first = PROMPT - WINDOW
    for step, out in enumerate(driven.out):
        at = PROMPT + step
        wanted = expected(driven.q, driven.k, driven.v, at, first)
        np.testing.assert_allclose(out.numpy(), wanted, **CLOSE)
        if at + 1 - first >= WINDOW + PAGE:
            first += PAGE
    assert first > PROMPT - WINDOW


def test_without_the_limit_keys_stay_where_they_are() -> None:
    near, far = (drive(method(limit_distance=on), prompt=PROMPT, new=1) for on in (True, False))
    assert far.kept is not None
    assert torch.equal(far.kept.split("k")[1], far.k[1, :SINKS])
    assert (near.out[0] - far.out[0]).abs().max() > 0.01
    plain = drive(
        HybridConfig(
            method="streaming_llm", page_size=PAGE, sink_tokens=SINKS, window_tokens=WINDOW
        ).build(),
        prompt=PROMPT,
        new=1,
    )
    torch.testing.assert_close(far.out[0], plain.out[0])


@pytest.mark.parametrize("prompt", [5, 37, WINDOW + 7, PROMPT])
def test_first_tokens_are_kept_however_short_the_prompt(prompt: int) -> None:
    driven = drive(method(), prompt=prompt, new=WINDOW + 3 * PAGE)
    assert driven.kept is not None
    for at in driven.kept.split("positions"):
        assert at.tolist() == list(range(SINKS))


def test_what_is_dropped_may_be_found_in_the_cold_tier() -> None:
    offloading = method(demote="offload", limit_distance=False)
    driven = drive(offloading, prompt=PROMPT, new=NEW)
    assert not driven.lost.any()
    assert max(driven.error) < CLOSE["atol"]
    lost = drive(method(), prompt=PROMPT, new=1).lost
    assert lost[0].nonzero()[:, 0].tolist() == list(range(SINKS, PROMPT - WINDOW))


def test_a_cache_does_as_the_driver_says_whatever_it_goes_through() -> None:
    """A step of several tokens is limited as its first; a crop moves the keys back."""
    driven = drive(method(), prompt=PROMPT, new=NEW)
    kv = KVCache(ModelInfo((SHAPE,), (ROTARY,)), config())

    def feed(start: int, stop: int) -> torch.Tensor:
        new = [one[None, :, start:stop] for one in (driven.q, driven.k, driven.v)]
        return kv.attend(0, new[0], (new[1], new[2]), None, scale=72**-0.5).out[0]

    feed(0, PROMPT)
    kv.layers.seal(0)
    for at in range(PROMPT, PROMPT + 5):
        feed(at, at + 1)
    kv.layers[0].crop(3)
    for at in range(PROMPT + 2, PROMPT + NEW):
        found = feed(at, at + 1)[:, 0]
        torch.testing.assert_close(found, driven.out[at - PROMPT].float(), **CLOSE)
    kv.check_integrity()


def test_a_model_that_cannot_be_asked_is_refused_in_one_sentence() -> None:
    for rotary in ((), (Rotary(reason="it is secret"),)):
        with pytest.raises(ConfigError, match="limit_distance must know how layer 0 turns keys"):
            KVCache(ModelInfo((SHAPE,), rotary), config())
    KVCache(ModelInfo((SHAPE,)), config(limit_distance=False))
    KVCache(ModelInfo((SHAPE,), (Rotary(reason="no positions", still=True),)), config())
