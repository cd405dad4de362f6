"""Every kind of index searched by the host for an emulated device: what is found on a CPU."""

from __future__ import annotations

from typing import Any

import pytest

import hybrid_kv as hkv
from hybrid_kv.index import _auto_choice
from hybrid_kv.plugins import INDEXES
from tests.device import emulated
from tests.device.models import llama, small, tokens
from tests.device.placement import placed
from tests.kit import sized

PROMPT, QUESTION = tokens(171)[0].tolist(), tokens(21, 5)[0].tolist()
"""With the question pages leave the window, which an index takes in."""


def answered(kind: str) -> dict[str, Any]:
    """An answer, what finds its cold entries, and how many are looked at and attended."""
    few = {"min_keys": 1} if kind in ("auto", "graph", "sketch") else {}
    changes = {
        **{"select": "host", "look_ahead": "never", "estimate": "none"},
        "cold.index": sized(kind, **few),
    }
    model = placed(llama(layers=1))
    with hkv.load(model, config=small("hybrid").replace(**changes)) as llm:
        answer = llm.context(PROMPT).ask(QUESTION, max_new_tokens=4)
    return {
        "tokens": answer.token_ids,
        "serves": sorted({head["serves"] for head in answer.index}),
        "scored": answer.work.scored,
        "attended": answer.work.attended,
    }


@pytest.mark.parametrize("kind", list(INDEXES))
def test_the_host_finds_for_a_device_what_it_finds_on_a_cpu(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # `auto` takes what is faster, which so few keys leave to chance.
    monkeypatch.setattr(_auto_choice, "cheapest", lambda costs, pace: (costs[0].kind, "the first"))
    expected = answered(kind)
    with emulated(schedule="late", kernels="defined"):
        assert answered(kind) == expected
    assert expected["scored"] > 0
