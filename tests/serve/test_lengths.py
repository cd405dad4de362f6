"""Prompts that are refused by their bytes, and what encodes beside a very long one."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

import httpx
import pytest
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from hybrid_kv.api import LLM
from hybrid_kv.serve.http.tokenizer import Texts, bytes_per_token
from tests.serve.fake_engine import FakeEngine
from tests.serve.running import serving
from tests.serve.test_hostile import connected, posted, until
from tests.serve.test_http import CHAT, COMPLETIONS, completion

LONGEST = "abcdefgh"


def by_bytes(**parts: Any) -> PreTrainedTokenizerBase:
    """A tokenizer of bytes and one longer token."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {word: idx for idx, word in enumerate([*letters, LONGEST])}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[], ignore_merges=True))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    for name, part in parts.items():
        setattr(backend, name, part)
    return PreTrainedTokenizerFast(tokenizer_object=backend)


def test_the_longest_token_bounds_a_text() -> None:
    assert bytes_per_token(by_bytes()) == len(LONGEST)
    composing = by_bytes(normalizer=normalizers.NFC())
    bound = bytes_per_token(composing)
    assert bound == 4 * len(LONGEST)
    for text in (LONGEST, "\u212a" * 50, "\u1100\u1161\u11a8" * 50, "\u03b1\u0313\u0342\u0345"):
        ids = composing(text, add_special_tokens=False)["input_ids"]
        assert len(text.encode()) <= bound * len(ids)


@pytest.mark.parametrize(
    "parts",
    [
        {"normalizer": normalizers.StripAccents()},
        {"normalizer": normalizers.Replace("aa", "b")},
        {"normalizer": normalizers.Sequence([normalizers.NFC(), normalizers.Strip()])},
        {"pre_tokenizer": pre_tokenizers.WhitespaceSplit()},
        {"pre_tokenizer": pre_tokenizers.Split(" ", "removed")},
    ],
)
def test_a_tokenizer_that_drops_text_bounds_none(parts: dict[str, Any]) -> None:
    assert bytes_per_token(by_bytes(**parts)) is None


def test_a_special_token_that_takes_spaces_in_bounds_none() -> None:
    tokenizer = by_bytes()
    tokenizer.backend_tokenizer.add_special_tokens([_added("<m>", lstrip=True)])
    assert bytes_per_token(tokenizer) is None


def _added(word: str, **how: bool) -> Any:
    from tokenizers import AddedToken

    return AddedToken(word, **how)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (COMPLETIONS, {"prompt": "a" * 100_000}, "prompt"),
        (CHAT, {"messages": [{"role": "user", "content": "a" * 100_000}]}, "messages"),
    ],
)
def test_a_prompt_that_is_too_long_by_its_bytes_is_never_encoded(
    tiny: LLM, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any], param: str
) -> None:
    monkeypatch.setattr("hybrid_kv.serve.http.tokenizer.bytes_per_token", lambda _: 8)
    encoded: list[str] = []
    own = type(tiny.require_tokenizer())
    call = own.__call__

    def noted(self: Any, text: str, *args: Any, **how: Any) -> Any:
        encoded.append(text)
        return call(self, text, *args, **how)

    monkeypatch.setattr(own, "__call__", noted)
    with serving(tiny, FakeEngine(tiny.require_tokenizer())) as running:
        answer = httpx.post(running.url + path, json={"model": "tiny", **body})
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (400, "context_length_exceeded")
        assert error["param"] == param
        assert "bytes of text at most, got 100," in error["message"]
        assert all(len(text) < 1000 for text in encoded)


@contextmanager
def held_up(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Texts of x take until the end of the block; the beginnings of all that began."""
    begun, over, encode = list[str](), threading.Event(), Texts._encode

    def slow(self: Texts, own: Any, prompt: Any) -> Any:
        begun.append(prompt[:9])
        if prompt.startswith("x"):
            assert over.wait(30)
        return encode(self, own, prompt)

    monkeypatch.setattr(Texts, "_encode", slow)
    try:
        yield begun
    finally:
        over.set()


def test_a_long_text_holds_up_no_other(tiny: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = FakeEngine(tiny.require_tokenizer())
    with (
        held_up(monkeypatch) as begun,
        serving(tiny, engine) as running,
        closing(connected(running.url)) as wire,
    ):
        wire.sendall(posted(completion(prompt="x 1")))
        assert until(lambda: begun == ["x 1"])
        answer = httpx.post(running.url + COMPLETIONS, json=completion(), timeout=10)
        assert answer.status_code == 200


def test_texts_of_clients_that_left_are_not_encoded(
    tiny: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = FakeEngine(tiny.require_tokenizer())
    with serving(tiny, engine) as running, held_up(monkeypatch) as begun:
        wires = [connected(running.url) for _ in range(8)]
        for number, wire in enumerate(wires):
            wire.sendall(posted(completion(prompt=f"x {number}")))
        assert until(lambda: len(begun) == 4)
        for wire in wires:
            wire.close()
        left = 'hybrid_kv_http_responses_total{status="499"} 8.0'
        assert until(lambda: left in httpx.get(running.url + "/metrics").text)
    assert len(begun) == 4
    assert engine.seen == []
