"""Text of an answer token by token."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from hybrid_kv.eval.needle import make_sample
from hybrid_kv.models.load import NEEDLE_PATH, load_tokenizer
from hybrid_kv.serve.output import AnswerText
from tests.models.folder import tokenizer

WORDS = tokenizer()


def of_bytes() -> PreTrainedTokenizerBase:
    """One token for each byte, so that a character takes up to four."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({letter: n for n, letter in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend)


def pieces(text: str, stops: tuple[str, ...] = ()) -> tuple[list[str], AnswerText]:
    ids = WORDS(text)["input_ids"]
    answer = AnswerText(WORDS, stops)
    return [answer.add(token, last=n == len(ids) - 1) for n, token in enumerate(ids)], answer


def test_text_comes_with_each_token() -> None:
    assert pieces("sea sky sun")[0] == ["sea", " sky", " sun"]


def test_a_stop_string_across_tokens_is_cut_off_with_what_follows() -> None:
    shown, answer = pieces("sea sky sun ice oak", ("y sun i",))
    assert shown == ["sea", " sk", "", "", ""]
    assert answer.is_stopped


def test_all_but_the_last_character_of_a_stop_string_is_held_back() -> None:
    shown, answer = pieces("sea sky sun", ("sky ",))
    assert shown == ["sea", " ", ""]
    assert answer.is_stopped


def test_what_only_began_a_stop_string_is_shown_later() -> None:
    shown, answer = pieces("sea sky oak", ("sky sun", "oaks"))
    assert shown == ["sea", " ", "sky oak"]
    assert not answer.is_stopped


def test_the_first_of_several_stop_strings_counts() -> None:
    shown, answer = pieces("sea sky sun ice", ("ice", "sun ic", " sky"))
    assert "".join(shown) == "sea"
    assert answer.is_stopped


def test_without_a_tokenizer_there_is_no_text() -> None:
    assert AnswerText(None, ()).add(3, last=True) == ""


@pytest.mark.parametrize("count", [50, 400])
def test_long_answers_come_out_as_if_decoded_at_once(count: int) -> None:
    needle, letters = load_tokenizer(NEEDLE_PATH), of_bytes()
    assert needle is not None
    sample = make_sample("passkey", 1000, num_records=8, num_questions=1, seed=count)
    text = "Größe 10 € · naïve 北京 🦊 " * (count // 20)
    for words, ids in (
        (needle, sample.context.tolist()[:count]),
        (letters, letters(text)["input_ids"]),
    ):
        answer = AnswerText(words, ())
        shown = [answer.add(token, last=n == len(ids) - 1) for n, token in enumerate(ids)]
        assert "".join(shown) == words.decode(ids, skip_special_tokens=True)
        assert "\ufffd" not in "".join(shown)
        assert sum(map(bool, shown)) > len(ids) // 4
        assert len(answer._ids) < 100, "it decodes a few tokens, however many there are"


def test_half_a_character_is_shown_only_where_nothing_follows() -> None:
    words = of_bytes()
    ids = words("a🦊")["input_ids"][:3]
    answer = AnswerText(words, ())
    assert [answer.add(token, last=n == 2) for n, token in enumerate(ids)] == ["a", "", "\ufffd"]
