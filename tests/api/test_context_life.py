"""A context's life: forked, and closed."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import PreTrainedModel

import hybrid_kv as hkv
from hybrid_kv.errors import ConfigError
from tests.models.folder import model, tokenizer

SMALL: dict[str, Any] = {"page_size": 4, "sink_tokens": 4, "window_tokens": 8}
TEXT = "sea sky sun ice oak elm bee fox owl sea oak sky sea owl fox ice sun"


@pytest.fixture(scope="module")
def plain() -> PreTrainedModel:
    return model()


@pytest.fixture
def llm(plain: PreTrainedModel) -> Any:
    config = hkv.HybridConfig.from_settings({**SMALL, "cold.top_k": "all"})
    with hkv.load(plain, tokenizer=tokenizer(), config=config) as loaded:
        yield loaded


def test_a_fork_answers_when_its_source_is_closed(llm: hkv.LLM) -> None:
    with llm.context(TEXT) as context:
        expected = context.ask("fox owl", max_new_tokens=30).token_ids
        fork = context.fork()
        assert fork.ask("fox owl", max_new_tokens=30).token_ids == expected
        assert context.ask("fox owl", max_new_tokens=30).token_ids == expected
    assert fork.ask("fox owl", max_new_tokens=30).token_ids == expected
    with pytest.raises(ConfigError, match="context must be open, got one that was closed"):
        context.ask("fox owl")
    with pytest.raises(ConfigError, match="context must be open"):
        context.fork()
    fork._cache.check_integrity()
