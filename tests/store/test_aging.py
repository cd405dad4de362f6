"""What an index learns from again, across inference mode."""

from __future__ import annotations

import torch

from hybrid_kv.rotary import Samples
from hybrid_kv.store.aging import Aging


def test_queries_are_noted_outside_of_the_mode_that_the_prompt_was_computed_in() -> None:
    """A context that was made in inference mode could not be asked outside of it."""
    with torch.inference_mode():
        aging = Aging(Samples(torch.randn(2, 3, 37, 8)), 100)
        aging.asked.append((torch.randn(2, 3, 8).clone(), 101))
    aging.asked.append((torch.ones(2, 3, 8), 102))
    assert aging.renew(102).queries[:, :, -1].eq(1).all()
