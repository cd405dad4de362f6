"""The longest text that a number of tokens can hold, by the tokenizer's own description."""

from __future__ import annotations

import json
from typing import Any

from transformers import PreTrainedTokenizerBase

_COMPOSED = 4
"""Bytes that Unicode's composed forms (NFC) make one of, at most: 3, of the Kelvin sign and of
Hangul, and one to be sure."""

_KEEPING = {"ByteLevel", "Metaspace", "Digits", "Split", "Punctuation", "Sequence"}
"""Kinds of pre-tokenizers that drop nothing of a text, unless their behavior is "Removed"."""

_BYTES = {f"<0x{byte:02X}>" for byte in range(256)}


def bytes_per_token(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The most bytes of UTF-8 that one token can stand for.

    None where there is no such number, because a tokenizer drops text, or makes one token of any
    length of it: words that it does not know, white space beside special tokens.
    """
    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return None
    parts: dict[str, Any] = json.loads(backend.to_str())
    model, added = parts["model"], parts["added_tokens"]
    if model["type"] != "BPE" or any(each["lstrip"] or each["rstrip"] for each in added):
        return None
    normalizers = _flat(parts["normalizer"], "normalizers")
    steps = _flat(parts["pre_tokenizer"], "pretokenizers")
    by_bytes = any(each["type"] == "ByteLevel" for each in normalizers + steps)
    if not by_bytes and not (model["byte_fallback"] and set(model["vocab"]) >= _BYTES):
        return None  # what is in no token is dropped, or joined in one
    if not all(map(_keeps, normalizers)) or not all(map(_splits, steps)):
        return None
    # A byte is a character in the tokens of ByteLevel.
    longest = max(len(token) if by_bytes else len(token.encode()) for token in model["vocab"])
    longest = max([longest, *(len(each["content"].encode()) for each in added)])
    composed = any(each["type"] == "NFC" for each in normalizers)
    return longest * (_COMPOSED if composed else 1)


def _flat(part: dict[str, Any] | None, name: str) -> list[dict[str, Any]]:
    """The steps of a sequence of a sequence, one after the other."""
    if part is None:
        return []
    if part["type"] != "Sequence":
        return [part]
    return [step for each in part[name] for step in _flat(each, name)]


def _keeps(normalizer: dict[str, Any]) -> bool:
    """Whether nothing of a text is lost, but for composing."""
    if normalizer["type"] == "Replace":  # a space becomes a longer mark
        pattern = normalizer["pattern"].get("String", "")
        return 0 < len(pattern.encode()) <= len(normalizer["content"].encode())
    return normalizer["type"] in ("Prepend", "NFC", "ByteLevel")


def _splits(step: dict[str, Any]) -> bool:
    return step["type"] in _KEEPING and step.get("behavior") != "Removed"
