"""Saved contexts of small random models, for engines that begin with them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from hybrid_kv.models.attach import attach
from hybrid_kv.saved import save_context


def save_prefix(
    model: Path, path: Path, ids: list[int], dtype: torch.dtype = torch.float32, **settings: Any
) -> Path:
    """Save the context of these ids with a model's folder; `full` where no method is given."""
    own = AutoModelForCausalLM.from_pretrained(model, dtype=dtype).eval()
    tokens = torch.tensor([ids])
    compress = settings.pop("compress", None)
    with torch.no_grad(), attach(own, {"method": "full"} | settings) as runtime:
        cache = runtime.cache()
        own(tokens, past_key_values=cache)
        maker = SimpleNamespace(model=own, tokenizer=None, source=None)
        save_context(path, cache, tokens, None, maker, compress=compress)
    return path
