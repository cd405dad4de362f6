"""English prose that every Python brings: its language reference, as tokens of a model."""

from __future__ import annotations

import importlib
import re

import torch
from transformers import PreTrainedTokenizerBase


def prose(
    tokenizer: PreTrainedTokenizerBase, num_tokens: int, skip_tokens: int = 0
) -> torch.Tensor:
    """[num_tokens] ids of the reference's longest topics, after so many others."""
    topics: dict[str, str] = importlib.import_module("pydoc_data.topics").topics
    # Grammar and tables are no prose; the longest topics are mostly text.
    longest = sorted(topics.values(), key=len, reverse=True)
    paragraphs = [
        re.sub(r"\s+", " ", paragraph).strip()
        for text in longest
        for paragraph in text.split("\n\n")
        if len(paragraph) > 200 and "::=" not in paragraph
    ]
    ids = tokenizer("\n\n".join(paragraphs), return_tensors="pt")["input_ids"][0]
    if len(ids) < skip_tokens + num_tokens:
        raise SystemExit(f"the text has {len(ids)} tokens, {skip_tokens + num_tokens} are needed")
    return ids[skip_tokens : skip_tokens + num_tokens]
