"""Methods that keep entries, as transformers meets them: failures, going back, drafts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import DynamicCache

import hybrid_kv as hkv
from hybrid_kv.entries import Entries
from hybrid_kv.errors import MethodError
from hybrid_kv.models.cache_state import passing
from hybrid_kv.plugins import METHODS, Method
from tests.contracts.architectures import build
from tests.contracts.edges.calls import CLOSE, expected, greedy, prompt
from tests.kit import every
from tests.runtime.keeping import Absorbs, KeepsHeaviest

SMALL = {"page_size": 4, "sink_tokens": 4, "window_tokens": 8}


pytestmark = pytest.mark.usefixtures("own_plugins")


def config(kind: type[Method], **settings: Any) -> hkv.HybridConfig:
    METHODS.register("sample")(kind)
    return hkv.HybridConfig(method="sample", **SMALL, **settings)


class FailsOnce(Absorbs):
    """Keeps everything, but raises when layer 1 absorbs its second page."""

    def absorb(self, layer_idx: int, row: int, kept: Any, left: Entries, seen: Any) -> Any:
        self.calls += layer_idx == 1
        if layer_idx == 1 and self.calls == 3:
            raise ValueError("too hot")
        return left if kept is None else kept.extended(left)


@pytest.mark.parametrize("rows", [1, 2])
def test_a_method_that_raises_in_mid_answer_costs_the_token_alone(rows: int) -> None:
    model = build("llama")
    ids, exact = prompt(rows, 50), DynamicCache(config=build("llama").config)
    with hkv.attach(model, config(FailsOnce)) as runtime:
        cache = runtime.cache()
        failures: list[str] = []
        for at in (slice(0, 30), *(slice(n, n + 1) for n in range(30, 50))):
            wanted = model(ids[:, at], **passing(exact)).logits
            try:
                found = model(ids[:, at], **passing(cache)).logits
            except MethodError as error:
                failures.append(str(error))
                cache.check_integrity()
                assert cache.get_seq_length() == at.start
                assert {row.length for row in every(cache)} == {at.start}
                found = model(ids[:, at], **passing(cache)).logits
            torch.testing.assert_close(found, wanted, **CLOSE)
        assert len(failures) == 1
        assert "FailsOnce.absorb of layer 1, row 0 must return entries, got Val" in failures[0]
        cache.check_integrity()


class ForgetsInLayerOne(KeepsHeaviest):
    """Keeps everything but in layer 1, which keeps two entries."""

    def absorb(self, layer_idx: int, row: int, kept: Any, left: Entries, seen: Any) -> Any:
        own = type(self.params)(**{**self.params.model_dump(), "budget": 2 if layer_idx else 999})
        self.params, given = own, self.params
        try:
            return super().absorb(layer_idx, row, kept, left, seen)
        finally:
            self.params = given


def test_a_crop_that_one_layer_refuses_changes_no_layer() -> None:
    model = build("llama")
    with hkv.attach(model, config(ForgetsInLayerOne)) as runtime:
        cache = runtime.cache()
        greedy(model, prompt(), cache, max_new_tokens=24)
        seen = cache.get_seq_length()
        with pytest.raises(MethodError, match="has dropped the others; restore a checkpoint"):
            cache.crop(-20)
        assert cache.get_seq_length() == seen
        assert {row.length for row in every(cache)} == {seen}
        cache.check_integrity()
        cache.crop(-2)
        assert cache.get_seq_length() == seen - 2
        assert not cache.can_crop


def test_a_draft_model_changes_nothing() -> None:
    model, draft = build("llama"), build("qwen2")
    tokens = expected(model, prompt(), max_new_tokens=30)
    with hkv.attach(model, config(KeepsHeaviest).opened()) as runtime:
        cache = runtime.cache()
        found = greedy(model, prompt(), cache, max_new_tokens=30, assistant_model=draft)
        assert torch.equal(found, tokens)
        cache.check_integrity()
        assert cache.can_crop
