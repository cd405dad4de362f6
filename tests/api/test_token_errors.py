"""Error bars of tokens by `generate`, `ask` and conversations; others are refused by name."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from transformers import LogitsProcessorList, PreTrainedModel, RepetitionPenaltyLogitsProcessor

import hybrid_kv as hkv
from hybrid_kv.api import token_errors
from hybrid_kv.errors import ConfigError, NoBudgetError
from hybrid_kv.plugins import METHODS
from hybrid_kv.watch.token_errors import TokenError
from tests.kit import cache_of
from tests.models.folder import EOS, model, tokenizer

IDS = [3 + (7 * n + n * n // 5) % 9 for n in range(70)]
TEXT = "sea sky sun ice oak elm bee fox owl sea oak sky sea owl fox ice sun"
CONFIG: dict[str, Any] = {
    **{"method": "hybrid", "page_size": 4, "sink_tokens": 4, "window_tokens": 8},
    **{"cold": {"top_k": 4, "index": "flat"}, "dense_extend_tokens": 3},
}
SERVED = {"full", "hybrid", "retrieval_attention", "flat", "hnsw", "ctkvr", "sparq"}
"""Methods of the registry whose steps can tell their error, as they are by default."""


@pytest.fixture(scope="module")
def plain() -> PreTrainedModel:
    return model()


@pytest.fixture
def llm(plain: PreTrainedModel) -> Iterator[Any]:
    with hkv.load(plain, config=CONFIG, tokenizer=tokenizer()) as loaded:
        yield loaded


def refusal(call: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        call()
    text = str(caught.value)
    assert "\n" not in text
    assert text.startswith("token_errors must ")
    assert "got " in text
    return text


def test_every_token_has_its_error(llm: Any) -> None:
    got = llm.generate(IDS, max_new_tokens=9, token_errors=True)
    same = llm.generate(IDS, max_new_tokens=9)
    assert same.token_ids == got.token_ids
    assert same.token_errors is None
    assert len(got.token_errors) == len(got.token_ids) == 9
    first, *later = got.token_errors
    assert (first.kl, first.kl_bar, first.flip, first.half) == (0, 0, 0, 0)
    assert first.entropy > 0
    for one in later:
        assert 0 < one.half < 1
        assert 0 < one.kl < one.kl_bar
        assert 0 < one.flip < 1
        assert one.margin >= 0
        assert 0 < one.entropy < math.log(100)


def test_signals_are_those_of_the_logits_that_nobody_has_changed(llm: Any) -> None:
    """Processors of logits, temperature and sampling come later, and change them in place."""
    with torch.inference_mode():
        logits = llm.model(torch.tensor([IDS])).logits[0, -1].float()
    logs = logits.log_softmax(-1)
    best = logs.topk(2).values
    processors = LogitsProcessorList([RepetitionPenaltyLogitsProcessor(9.0)])
    how = {"do_sample": True, "temperature": 5.0, "seed": 1, "logits_processor": processors}
    got = llm.generate(IDS, max_new_tokens=1, token_errors=True, repetition_penalty=3.0, **how)
    (one,) = got.token_errors
    assert one.entropy == pytest.approx(float(-(logs.exp() * logs).sum()), rel=1e-3)
    assert one.margin == pytest.approx(float(best[0] - best[1]), abs=1e-3)


def test_half_is_that_of_the_step_that_gave_the_token(
    llm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step of token n gives token n + 1; layers are averaged."""
    halves: list[list[float]] = [[]]
    taken = token_errors.HalfWatcher.take

    def take(self: Any) -> float:
        halves.append([float(one.mean()) for one in self._halves])
        return taken(self)

    monkeypatch.setattr(token_errors.HalfWatcher, "take", take)
    got = llm.generate(IDS, max_new_tokens=4, token_errors=True)
    prompt, *steps = halves[1:]
    assert prompt == []
    assert {len(one) for one in steps} == {llm.model.config.num_hidden_layers}
    for one, by_layer in zip(got.token_errors[1:], steps, strict=True):
        assert one.half == pytest.approx(sum(by_layer) / len(by_layer))


def test_full_attention_has_no_error(plain: PreTrainedModel) -> None:
    with hkv.load(plain, config="full", tokenizer=tokenizer()) as llm:
        for one in llm.generate(IDS, max_new_tokens=5, token_errors=True).token_errors:
            assert (one.kl, one.kl_bar, one.flip, one.half) == (0, 0, 0, 0)


def test_a_stream_a_stop_and_an_end_have_an_error_for_each_token(llm: Any) -> None:
    stream = llm.generate(IDS, max_new_tokens=9, stream=True, token_errors=True)
    text = "".join(stream)
    assert len(stream.result.token_errors) == len(stream.result.token_ids) == 9
    stop = text.split()[2]
    stopped = llm.generate(IDS, max_new_tokens=9, stop=stop, token_errors=True)
    assert len(stopped.token_errors) == len(stopped.token_ids) < 9
    ids = stream.result.token_ids
    ended = llm.generate(IDS, max_new_tokens=9, eos_token_id=ids[3], token_errors=True)
    assert len(ended.token_errors) == len(ended.token_ids) == 1 + ids.index(ids[3])
    assert EOS is not None


def test_a_question_that_is_short_is_read_through_the_method(llm: Any) -> None:
    """Then its first token has an error as well; a long one is read exactly."""
    with llm.context(IDS) as context:
        short = context.ask([5, 6], max_new_tokens=3, token_errors=True)
        assert all(one.half > 0 for one in short.token_errors)
        assert len(short.token_errors) == 3
        long = context.ask([5, 6, 7, 8, 9, 3], max_new_tokens=3, token_errors=True)
        assert [one.half > 0 for one in long.token_errors] == [False, True, True]
        assert context.ask([5, 6], max_new_tokens=3).token_errors is None


def test_turns_of_a_conversation(llm: Any) -> None:
    talk = llm.conversation(raw=True)
    for _ in range(2):
        got = talk.send(" ".join([TEXT] * 3), max_new_tokens=4, token_errors=True)
        assert [one.half > 0 for one in got.token_errors] == [False, True, True, True]


@pytest.mark.parametrize("when", [0, 2], ids=["prompt", "decode"])
def test_nobody_watches_after_an_error(llm: Any, when: int) -> None:
    class FailError(Exception):
        pass

    calls = []

    def fail(input_ids: Any, scores: Any, **_: Any) -> Any:
        calls.append(len(calls))
        if len(calls) > when:
            raise FailError
        return torch.zeros(1, dtype=torch.bool)

    hooks = len(llm.model._forward_hooks)
    with llm.context(IDS) as context:
        watchers = list(cache_of(context).kv.watchers)
        with pytest.raises(FailError):
            context.ask([5, 6], max_new_tokens=6, token_errors=True, stopping_criteria=[fail])
        assert cache_of(context).kv.watchers == watchers
        assert len(llm.model._forward_hooks) == hooks
        again = context.ask([5, 6], max_new_tokens=6, token_errors=True)
        assert len(again.token_errors) == 6


def test_a_call_that_is_given_up_has_errors_of_what_came(llm: Any) -> None:
    event = threading.Event()
    event.set()
    got = llm.generate(IDS, max_new_tokens=6, token_errors=True, cancel=event)
    assert len(got.token_errors) == len(got.token_ids) <= 1


def test_other_threads_that_run_the_model_change_nothing(llm: Any) -> None:
    alone = llm.generate(IDS, max_new_tokens=4, token_errors=True).token_errors

    def other(input_ids: Any, scores: Any, **_: Any) -> Any:
        def run() -> None:
            with torch.inference_mode():
                llm.model(torch.tensor([[3, 4, 5]]))

        worker = threading.Thread(target=run)
        worker.start()
        worker.join()
        return torch.zeros(1, dtype=torch.bool)

    got = llm.generate(IDS, max_new_tokens=4, token_errors=True, stopping_criteria=[other])
    assert got.token_errors == alone


# Who cannot tell


@pytest.mark.parametrize("name", sorted(METHODS))
def test_every_method_serves_or_is_refused_by_name(plain: PreTrainedModel, name: str) -> None:
    try:
        config = hkv.HybridConfig.from_settings({"method": name, "page_size": 4})
        config = config.at_budget("32", len(IDS))
    except NoBudgetError:
        pass
    if METHODS[name].factory.lacks(config.params) is not None:
        pytest.skip("it has to be given something first")
    with hkv.load(plain, config=config, tokenizer=tokenizer()) as llm:
        if name in SERVED:
            got = llm.generate(IDS, max_new_tokens=3, token_errors=True)
            assert len(got.token_errors) == 3
            assert all(isinstance(one, TokenError) for one in got.token_errors)
            return
        text = refusal(lambda: llm.generate(IDS, max_new_tokens=3, token_errors=True))
        assert f"got {name}, which " in text
        assert text.endswith(
            "; choose hybrid, retrieval_attention or full, or leave token_errors out"
        )


def test_layers_of_different_methods_are_asked_one_by_one(plain: PreTrainedModel) -> None:
    search = {"method": "flat", "cold": {"top_k": 4}, "sink_tokens": 4, "window_tokens": 8}
    for other, is_served in (
        ({"method": "full"}, True),
        ({"method": "quest", "dense_layers": 0}, False),
    ):
        config = {"method": "by_layer", "page_size": 4, "layers": {"0": search, "rest": other}}
        with hkv.load(plain, config=config, tokenizer=tokenizer()) as llm:
            if not is_served:
                refused = refusal(lambda: llm.generate(IDS, token_errors=True))
                assert "got by_layer, which leaves out resident pages" in refused
                continue
            got = llm.generate(IDS, max_new_tokens=2, token_errors=True).token_errors
            assert got[1].half > 0


@pytest.mark.parametrize(
    ("settings", "options", "text"),
    [
        ({}, {"num_beams": 2}, "one sequence, got num_beams=2; set num_beams=1 or"),
        ({}, {"prompt_lookup_num_tokens": 3}, "got prompt_lookup_num_tokens, by which one forward"),
        ({}, {"guidance_scale": 1.5}, "got guidance_scale=1.5, which mixes those of two prompts"),
        ({"prefill": "sparse", "prefill_chunk_tokens": 128}, {}, "an exact prefill"),
        ({}, {"exact": True}, "got exact=True, whose tokens have no error"),
        (
            {"spare_tokens": 16, "page_budget": 2},
            {},
            "got hybrid, which leaves out resident pages by their bounds",
        ),
    ],
)
def test_what_leaves_no_error_to_tell_is_refused(
    plain: PreTrainedModel, settings: dict[str, Any], options: dict[str, Any], text: str
) -> None:
    with hkv.load(plain, config={**CONFIG, **settings}, tokenizer=tokenizer()) as llm:
        assert text in refusal(lambda: llm.generate(IDS, token_errors=True, **options))
        assert len(llm.generate(IDS, max_new_tokens=2).token_ids) == 2


def test_a_switch_is_true_or_false(llm: Any) -> None:
    with pytest.raises(ConfigError, match=r"^token_errors must be True or False, got 'yes'"):
        llm.generate(IDS, token_errors="yes")


def test_a_method_that_looks_at_its_prompt_is_refused_behind_it(
    plain: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a plug-in may: it does not answer before there is a prompt."""
    factory = METHODS["streaming_llm"].factory
    seal, forwards = factory.seal, []

    def late(self: Any, layer_idx: int, evidence: Any) -> Any:
        if not forwards:
            raise RuntimeError("there is no prompt")
        return seal(self, layer_idx, evidence)

    monkeypatch.setattr(factory, "seal", late)
    config = {"method": "streaming_llm", "page_size": 4, "sink_tokens": 4, "window_tokens": 8}
    with hkv.load(plain, config=config, tokenizer=tokenizer()) as llm:
        before = llm.model.register_forward_pre_hook(lambda *_: forwards.append(1))
        text = refusal(lambda: llm.generate(IDS, max_new_tokens=3, token_errors=True))
        assert "got streaming_llm, which drops entries" in text
        assert len(forwards) == 2
        before.remove()


def test_the_errors_of_two_calls_are_alike(llm: Any) -> None:
    one, two = (llm.generate(IDS, max_new_tokens=4, token_errors=True) for _ in range(2))
    assert one.token_errors == two.token_errors
    assert all(a != b for a, b in pairwise(one.token_errors))
