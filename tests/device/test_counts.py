"""How much a decode step tells a device, and how often it waits: no more than today.

Versions of torch differ by a few launches, by what they make of one operator: a bound is the most.
"""

from __future__ import annotations

import pytest

from tests.device.step_counts import FEW_STEPS, INTERPRETED, config_of, counted

SEARCHED = ((101, 6, 3), (206, 16, 7))
"""By the host, for a layer that is predicted and one that is not."""
MOST = {
    # Of two layers: launches, copies and waits; then of the two steps in which a page leaves and
    # has arrived.
    "full": ((90, 2, 0), (180, 4, 0)),
    "quest": ((96, 2, 0), (192, 4, 0)),
    "streaming_llm": ((90, 2, 0), (184, 6, 0)),
    "hybrid": ((96, 2, 0), (202, 10, 1)),
    "hybrid:select=host": SEARCHED,
    "flat": SEARCHED,
    "ivf": SEARCHED,  # clusters
    "hnsw": SEARCHED,  # graphs
    "double_sparsity": SEARCHED,  # channels
    "pqcache": SEARCHED,  # quantised products
    "magic_pig": ((94, 5, 2), (192, 14, 5)),  # hashes
    "infllm": ((94, 5, 2), (192, 14, 5)),  # pages
}
MOST_LATER = {
    # Keep exactly what the window has left: of the prompt no whole page is on its way. One wait is
    # for whether what left is finite.
    "snapkv": ((96, 1, 0), (262, 6, 1)),
    "h2o": ((174, 1, 0), (478, 8, 1)),  # follows weights
    "by_head": ((180, 1, 0), (550, 9, 1)),
    "duo_attention": ((94, 1, 0), (258, 7, 1)),
    "razor_attention": ((111, 1, 0), (391, 10, 1)),
    "lm_infinite": ((130, 1, 0), (330, 8, 1)),
    "gear": ((146, 1, 0), (720, 6, 1)),  # codes
    "cskv": ((150, 1, 0), (424, 6, 1)),  # coefficients of keys before RoPE
    "shadowkv_keys": ((150, 1, 0), (424, 6, 1)),
    "matryoshka_kv": ((150, 1, 0), (424, 6, 1)),
    "kvquant": ((188, 1, 0), (632, 6, 1)),
    "rotate_kv": ((164, 1, 0), (560, 6, 1)),
    "saq": ((168, 1, 0), (624, 6, 1)),
    "zipcache": ((172, 1, 0), (596, 6, 1)),
}
MOST_INTERPRETED = {
    # By Triton's own kernels: attention over pages is two; what a search launches is replayed.
    "full": ((92, 2, 0), (184, 4, 0)),
    "quest": ((98, 2, 0), (196, 4, 0)),
    "streaming_llm": ((92, 2, 0), (188, 6, 0)),
    "hybrid": ((98, 2, 0), (206, 10, 1)),
}


@pytest.mark.parametrize("name", MOST_INTERPRETED if INTERPRETED else [*MOST, *MOST_LATER])
def test_a_step_takes_no_more_launches_copies_and_waits(name: str) -> None:
    # Of a page of 4 tokens the next one leaves in a few steps; counts are those of pages of 16.
    config = config_of(name).replace(page_size=4 if name in MOST_LATER else 16)
    found = counted(config, FEW_STEPS)
    limits = (MOST_INTERPRETED if INTERPRETED else MOST | MOST_LATER)[name]
    for one, most in zip((found.quiet, found.leaving), limits, strict=True):
        told = one.launches, one.copies, one.num_waits
        assert all(count <= limit for count, limit in zip(told, most, strict=True)), (
            *(told, most),
            one.waits,
        )
    assert found.quiet.replays == (2 if name == "hybrid" else 0)
