"""English prose that every Python brings: its language reference."""

from __future__ import annotations

import importlib
import re


def python_prose() -> str:
    """The paragraphs of the reference's longest topics."""
    topics: dict[str, str] = importlib.import_module("pydoc_data.topics").topics
    # Grammar and tables are no prose; the longest topics are mostly text.
    longest = sorted(topics.values(), key=len, reverse=True)
    return "\n\n".join(
        re.sub(r"\s+", " ", paragraph).strip()
        for text in longest
        for paragraph in text.split("\n\n")
        if len(paragraph) > 200 and "::=" not in paragraph
    )
