from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import hybrid_kv as hkv
from hybrid_kv.api.generation import until_done
from hybrid_kv.errors import ConfigError
from hybrid_kv.index.flat import FlatIndex, StandIn
from hybrid_kv.index.graph import GraphIndex
from hybrid_kv.watch.phases import PHASES
from tests.kit import cache_of, wait_for_builds
from tests.models.folder import CONTEXT, EOS, WORDS, model, save_model, tokenizer

TEXT = "sea sky sun ice oak elm bee fox owl sea oak sky sea owl fox ice sun"
IDS = [3, 4, 5, 6, 7, 8, 9, 10, 11, 3, 7, 4, 3, 11, 10, 6, 5]
NEW = 16
TIERED: dict[str, Any] = {
    "method": "hybrid",
    "page_size": 4,
    "sink_tokens": 4,
    "window_tokens": 8,
    "cold": {"top_k": "all"},
}


@pytest.fixture(scope="module")
def plain() -> PreTrainedModel:
    return model()


@pytest.fixture(params=["full", "hybrid"])
def llm(plain: PreTrainedModel, request: pytest.FixtureRequest) -> Any:
    config = hkv.HybridConfig(**TIERED) if request.param == "hybrid" else None
    config = config or hkv.HybridConfig(method="full")
    with hkv.load(plain, tokenizer=tokenizer(), config=config) as loaded:
        yield loaded


@pytest.fixture(scope="module")
def greedy(plain: PreTrainedModel) -> list[int]:
    """What transformers itself answers."""
    ids = torch.tensor([IDS])
    mask = torch.ones_like(ids)
    out = plain.generate(ids, attention_mask=mask, max_new_tokens=NEW, do_sample=False)
    return out[0, len(IDS) :].tolist()  # type: ignore[no-any-return]


def text_of(ids: list[int]) -> str:
    return str(tokenizer().decode(ids, skip_special_tokens=True))


# What comes back


@pytest.mark.parametrize(
    "prompt", [TEXT, IDS, torch.tensor(IDS), torch.tensor([IDS])], ids=["text", "ids", "1d", "2d"]
)
def test_greedy_tokens_are_those_of_transformers(
    llm: hkv.LLM, greedy: list[int], prompt: Any
) -> None:
    answer = llm.generate(prompt, max_new_tokens=NEW)
    assert answer.token_ids == greedy
    assert answer.text == text_of(greedy)
    assert answer.prompt_tokens == len(IDS)
    assert len(answer.token_times_s) == NEW
    assert answer.token_times_s == sorted(answer.token_times_s)
    assert answer.ttft_s == answer.token_times_s[0]


def test_calls_are_independent_of_each_other(llm: hkv.LLM, greedy: list[int]) -> None:
    first = llm.generate(TEXT, max_new_tokens=NEW)
    llm.generate("fox owl", max_new_tokens=3)
    again = llm.generate(TEXT, max_new_tokens=NEW)
    assert first.token_ids == again.token_ids == greedy
    assert first.work == again.work


def test_the_cold_tier_is_accounted_for(plain: PreTrainedModel) -> None:
    with hkv.load(plain, tokenizer=tokenizer(), config=hkv.HybridConfig(**TIERED)) as llm:
        answer = llm.generate(TEXT, max_new_tokens=NEW)
    seen = len(IDS) + NEW - 1
    cold = (seen - 8) // 4 * 4 - 4  # all but sinks and window, in pages
    raw = 2 * 2 * 2 * 24 * 4  # layers, K and V, heads, head_dim, bytes
    assert answer.host_kv_bytes == cold * (raw + 2 * 4)
    assert 0 < answer.work.retrieved < answer.work.attended == answer.work.visible


def test_what_serves_each_head_is_told_with_its_reason(plain: PreTrainedModel) -> None:
    cold = {"top_k": 3, "index": "graph"}
    with hkv.load(
        plain, tokenizer=tokenizer(), config=hkv.HybridConfig(**{**TIERED, "cold": cold})
    ) as llm:
        answer = llm.generate(TEXT, max_new_tokens=3)
    assert [(head["layer"], head["kv_head"]) for head in answer.index] == [
        (layer, head) for layer in range(2) for head in range(2)
    ]
    assert {head["serves"] for head in answer.index} == {"flat"}
    cold = (len(IDS) + 2 - 8) // 4 * 4 - 4  # all but sinks and window, in pages
    assert {head["entries"] for head in answer.index} == {cold}
    assert "keys, a graph takes 16384" in answer.index[0]["reason"]


def test_index_builds_are_measured_apart(
    plain: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    build = FlatIndex.build

    def slowly(self: FlatIndex, keys: Tensor, *rest: Tensor | None) -> None:
        time.sleep(0.01)
        build(self, keys, *rest)

    monkeypatch.setattr(FlatIndex, "build", slowly)
    for chunk, before_first_token in ((8, True), ("auto", False)):
        cold = {"top_k": "all", "index": "flat"}
        config = hkv.HybridConfig(**{**TIERED, "cold": cold}, prefill_chunk_tokens=chunk)
        with hkv.load(plain, tokenizer=tokenizer(), config=config) as llm:
            answer = llm.generate(TEXT, max_new_tokens=3)
        assert answer.index_build_s >= 0.02, "two layers"
        assert set(answer.phases_s) == set(PHASES)
        apart = answer.ttft_s - answer.prefill_s
        assert apart >= answer.index_build_s if before_first_token else apart == 0


@pytest.fixture
def slow_graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Graphs are not built until the event is set."""
    let_go, build = threading.Event(), GraphIndex.build

    def slowly(self: GraphIndex, keys: Tensor, *rest: Tensor | None) -> None:
        assert let_go.wait(60)
        build(self, keys, *rest)

    monkeypatch.setattr(GraphIndex, "build", slowly)
    monkeypatch.setattr(GraphIndex, "stand_in", lambda *_: StandIn())
    yield let_go
    let_go.set()


GRAPH = {"top_k": 3, "index": "graph"}


def test_answers_do_not_wait_for_graphs(
    plain: PreTrainedModel, slow_graphs: threading.Event
) -> None:
    config = hkv.HybridConfig(**{**TIERED, "cold": GRAPH}, index_build="background")
    llm = hkv.load(plain, tokenizer=tokenizer(), config=config)
    answer = llm.generate(TEXT, max_new_tokens=NEW)
    assert len(answer.token_ids) == NEW
    assert {(head["serves"], head["build"]) for head in answer.index} == {("flat", "in progress")}
    assert {head["searches_before"] for head in answer.index} == {NEW - 1}
    assert answer.index_build_s > 0, "what is in progress counts"
    assert answer.host_index_bytes > 0
    slow_graphs.set()
    llm.close()
    assert not [t for t in threading.enumerate() if t.name.startswith("hybrid-kv-build")]


def test_a_context_is_asked_while_its_graphs_are_built_and_after(
    plain: PreTrainedModel, slow_graphs: threading.Event
) -> None:
    config = hkv.HybridConfig(**{**TIERED, "cold": GRAPH}, index_build="background")
    with hkv.load(plain, tokenizer=tokenizer(), config=config) as llm:
        context = llm.context(TEXT)
        before = context.ask(" and", max_new_tokens=4)
        assert {head["build"] for head in before.index} == {"in progress"}
        slow_graphs.set()
        wait_for_builds(context)
        after = context.ask(" and", max_new_tokens=4)
        # What an answer adds has an extent, and a build, of its own that may still be under way.
        assert {head["build"] for head in after.index if head["extent"] == 0} == {"done"}
        assert after.token_ids == before.token_ids, "so short a text is scanned in both cases"
        cache_of(context).check_integrity()


def test_sampling_follows_its_seed_and_leaves_the_global_one_alone(llm: hkv.LLM) -> None:
    options: dict[str, Any] = {"do_sample": True, "temperature": 2.0, "max_new_tokens": NEW}
    state = torch.random.get_rng_state()
    one, other, third = (llm.generate(TEXT, seed=seed, **options) for seed in (1, 1, 2))
    assert one.token_ids == other.token_ids != third.token_ids
    assert torch.equal(torch.random.get_rng_state(), state)


def test_a_prompt_ends_at_the_end_token(llm: hkv.LLM, greedy: list[int]) -> None:
    last = greedy[5]
    answer = llm.generate(TEXT, max_new_tokens=NEW, eos_token_id=last)
    assert answer.token_ids == greedy[: greedy.index(last) + 1]
    assert EOS not in greedy


def test_beams_are_those_of_transformers(llm: hkv.LLM, plain: PreTrainedModel) -> None:
    answer = llm.generate(IDS, max_new_tokens=6, num_beams=3)
    llm.close()
    ids = torch.tensor([IDS])
    want = plain.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, num_beams=3)
    assert answer.token_ids == want[0, len(IDS) :].tolist()
    assert len(answer.token_times_s) == 1


# Stop strings


def across_words(greedy: list[int]) -> str:
    """A string that begins in one token and ends in the next."""
    text = text_of(greedy)
    return text[18:21]


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_is_cut_off(llm: hkv.LLM, greedy: list[int], stream: bool) -> None:
    whole = text_of(greedy)
    word = WORDS[greedy[4]]
    for stop in (word, across_words(greedy), [across_words(greedy), word], "not there"):
        stops = [stop] if isinstance(stop, str) else stop
        expected = whole[: min((whole.find(s) for s in stops if s in whole), default=len(whole))]
        answer = llm.generate(TEXT, max_new_tokens=NEW, stop=stop, stream=stream)
        found = "".join(answer) if stream else answer.text  # type: ignore[union-attr]
        assert found == expected


def test_a_stop_string_that_one_token_holds_twice_is_cut_off_at_the_first(llm: hkv.LLM) -> None:
    others = [token for token, word in enumerate(WORDS) if word != "bee"]
    assert llm.generate(TEXT, max_new_tokens=2, stop="e", suppress_tokens=others).text == "b"


def pieces(*texts: str) -> SimpleQueue[Any]:
    queue: SimpleQueue[Any] = SimpleQueue()
    for text in texts:
        queue.put(text)
    queue.put(None)  # the end
    return queue


@pytest.mark.parametrize("text", ["", "ab", "abcd", "xxSTO", "xxSTOP", "xxSTOPyy", "SSTOP", "STOP"])
@pytest.mark.parametrize("size", [1, 2, 3, 9])
def test_no_letter_of_a_stop_string_slips_out(text: str, size: int) -> None:
    """A piece shorter than the stop string was passed on but for its last letters."""
    cut = [text[i : i + size] for i in range(0, len(text), size)]
    for stops in (["STOP"], ["STOP", "y"], ["STOP", "a longer one that never comes"], []):
        ends = [text.find(stop) for stop in stops if stop in text]
        assert "".join(until_done(pieces(*cut), stops)) == text[: min(ends, default=len(text))]


# Streams


def test_pieces_join_to_the_text(llm: hkv.LLM, greedy: list[int]) -> None:
    stream = llm.generate(TEXT, max_new_tokens=NEW, stream=True)
    found = list(stream)
    assert "".join(found) == text_of(greedy)
    assert len(found) == NEW


def workers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "hybrid-kv-generate"]


def test_closing_a_stream_ends_its_worker(llm: hkv.LLM) -> None:
    stream = llm.generate(TEXT, max_new_tokens=200, stream=True)
    assert workers() == [], "nothing runs before the first piece is asked for"
    next(stream)
    assert len(workers()) == 1
    stream.close()
    assert workers() == []


def test_an_error_in_the_worker_comes_out_of_the_stream(
    llm: hkv.LLM, plain: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plain, "generate", lambda *args, **kwargs: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        list(llm.generate(TEXT, stream=True))
    assert workers() == []


# Refusals


@pytest.mark.parametrize(
    ("prompt", "options", "text"),
    [
        ("", {}, "prompt is empty; pass at least one token"),
        ([], {}, "prompt is empty; pass at least one token"),
        ([3, 12], {}, r"token ids must be 0\.\.11, got 3\.\.12"),
        ([-1, 3], {}, r"token ids must be 0\.\.11, got -1\.\.3"),
        ([[3], [4]], {}, "prompt must be one sequence of token ids, got 2 rows"),
        ([3] * CONTEXT, {}, f"context must be at most {CONTEXT} tokens .* got {CONTEXT + 128}"),
        ([3], {"max_new_tokens": 0}, "max_new_tokens must be at least 1, got 0"),
        ([3], {"stop": ""}, "stop strings must not be empty"),
        ([3], {"stop": ["sea", ""]}, "stop strings must not be empty"),
        ([3], {"stream": True, "num_beams": 2}, "works without beams; set num_beams=1"),
    ],
)
def test_a_call_that_cannot_work_is_refused_at_once(
    llm: hkv.LLM, prompt: Any, options: dict[str, Any], text: str
) -> None:
    with pytest.raises(ConfigError, match=text):
        llm.generate(prompt, **options)


def test_text_needs_a_tokenizer(plain: PreTrainedModel) -> None:
    with hkv.load(plain) as llm:
        for call, text in (
            (lambda: llm.generate("sea"), "text needs a tokenizer, and the model has none; pass"),
            (lambda: llm.generate([3], stop="x"), "stop strings need a tokenizer"),
            (lambda: llm.generate([3], stream=True), "the model has no tokenizer"),
            (lambda: llm.conversation().send("sea"), "text needs a tokenizer"),
            (
                lambda: llm.context([3]).ask("sea"),
                "text needs a tokenizer, and the model has none; pass",
            ),
        ):
            with pytest.raises(ConfigError, match=text):
                call()
        assert len(llm.generate([3], max_new_tokens=2).token_ids) == 2


# Loading


def test_a_folder_is_ready_in_one_call(tmp_path: Path, greedy: list[int]) -> None:
    with hkv.load(save_model(tmp_path / "m"), config=hkv.HybridConfig(method="full")) as llm:
        assert llm.generate(TEXT, max_new_tokens=NEW).token_ids == greedy


def test_options_for_loading_are_refused_beside_a_loaded_model(plain: PreTrainedModel) -> None:
    with pytest.raises(ConfigError, match="options dtype apply when a model is loaded by name"):
        hkv.load(plain, dtype="float32")


def test_a_closed_model_is_plain_transformers_again(
    plain: PreTrainedModel, greedy: list[int]
) -> None:
    llm = hkv.load(plain, tokenizer=tokenizer(), config=hkv.HybridConfig(**TIERED))
    llm.close()
    llm.close()
    with pytest.raises(ConfigError, match="attachment is closed"):
        llm.generate(TEXT)
    ids = torch.tensor([IDS])
    out = plain.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW)
    assert out[0, len(IDS) :].tolist() == greedy


# The audit


def test_an_audited_answer_says_what_it_missed(plain: PreTrainedModel) -> None:
    settings = {**TIERED, "cold": {"top_k": 2, "index": "flat"}, "index_build": "wait"}
    unlimited = {"max_missed_mass": None, "max_output_error": None}
    config = hkv.HybridConfig(**settings, audit_every=1, audit=unlimited)
    with hkv.load(plain, tokenizer=tokenizer(), config=config) as llm:
        conversation = [llm.generate(IDS * 3, max_new_tokens=NEW) for _ in range(2)]
        assert llm.generate(IDS, max_new_tokens=1).audit is not None
    for answer in conversation:
        assert answer.audit is not None
        recall = answer.audit.recall()
        assert recall is not None
        assert recall.mean == 1
        assert 1 <= recall.looks < NEW
        head, *_ = answer.audit.heads()
        assert head.target.layer_idx < 3
        assert answer.audit.looks()[head.target] >= 1
        assert head.recall == 1
        assert 0 < head.missed_mass < 1
        assert head.missed_by_index == pytest.approx(0, abs=1e-6)
        assert head.output_error > 0


def test_nobody_audits_unasked(llm: Any) -> None:
    assert llm.generate(IDS, max_new_tokens=2).audit is None
