"""Scores of KV heads by how far back they look, for `duo_attention`, from a calibration text."""

from __future__ import annotations

import torch

from hybrid_kv.api.llm import LLM
from hybrid_kv.api.turn import Turn
from hybrid_kv.config import HybridConfig
from hybrid_kv.errors import ConfigError

OBSERVED_TOKENS = 256
_SINKS, _WINDOW = 64, 256


def observing() -> HybridConfig:
    """The configuration under which a model is observed."""
    return HybridConfig(
        method="duo_attention",
        page_size=16,
        sink_tokens=_SINKS,
        window_tokens=_WINDOW,
        heads="prompt",
        retrieval_ratio=1.0,
        observed_tokens=OBSERVED_TOKENS,
    )


def observe_heads(llm: LLM, text: str, num_tokens: int) -> list[list[float]]:
    """Scores in 0..1 by tiered layer and KV head, of a text that is read twice in a row.

    What lies between sinks and window is then mostly the first copy, which a head that retrieves
    looks up while the second is read; a score is the share of its attention that a head gives there
    with the last queries, which is what it would miss without. The paper trains a gate for each
    head instead.

    Args:
        llm: opened with `observing()`.
        num_tokens: of the text, its first; it is read twice.

    Raises:
        ConfigError: the model has no tokenizer, or the text is too short to look back in.
    """
    tokens = llm.require_tokenizer()(text)["input_ids"][:num_tokens]
    least = _SINKS + _WINDOW + OBSERVED_TOKENS
    if len(tokens) < least:
        raise ConfigError(
            f"a calibration text must have at least {least} tokens, got {len(tokens)}; give a "
            "longer one, or raise --tokens"
        )
    with llm.runtime.generating():
        cache = llm.runtime.cache()
        try:
            Turn(llm, cache, torch.tensor([tokens + tokens]), {"max_new_tokens": 1}).run()
            for shape in cache.kv.info.layers:
                cache.kv.layers.seal_if_open(shape.layer_idx)
            kept = [store.rows[0].kept for store in cache.kv.stores.values()]
        finally:
            cache.close()
    return [entries.state["scores"].tolist() for entries in kept if entries is not None]
