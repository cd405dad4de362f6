"""`max_error`: tokens whose estimated error is larger are verified by full attention."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import hybrid_kv as hkv
from hybrid_kv.api.token_errors import TokenErrorLimit
from hybrid_kv.errors import ConfigError
from tests.api.test_token_errors import CONFIG, IDS
from tests.cli.support import TINY, call, refused
from tests.contracts.architectures import build
from tests.kit import cache_of
from tests.models.folder import model, tokenizer

NEVER, ALWAYS = 1e-12, 1e9
"""Limits that no step of these keeps to, and that all do."""


@pytest.fixture(scope="module")
def plain() -> PreTrainedModel:
    return model()


@pytest.fixture
def llm(plain: PreTrainedModel) -> Iterator[Any]:
    with hkv.load(plain, config=CONFIG, tokenizer=tokenizer()) as loaded:
        yield loaded


@pytest.mark.parametrize("new_tokens", [1, 2, 9, 40])
@pytest.mark.parametrize("how", [{}, {"do_sample": True, "temperature": 2.0, "seed": 5}])
def test_where_every_token_is_verified_they_are_those_of_full_attention(
    llm: Any, how: dict[str, Any], new_tokens: int
) -> None:
    want = llm.generate(IDS, max_new_tokens=new_tokens, exact=True, **how)
    got = llm.generate(IDS, max_new_tokens=new_tokens, max_error=NEVER, **how)
    assert got.token_ids == want.token_ids
    assert got.exact.trusted == 0
    assert {(one.kl, one.half) for one in got.token_errors} == {(0.0, 0.0)}
    assert len(got.token_errors) == new_tokens


@pytest.mark.parametrize("seed", [None, 5])
def test_where_all_are_trusted_no_pass_is_made(llm: Any, seed: int | None) -> None:
    how: dict[str, Any] = {"max_new_tokens": 40}
    if seed is not None:
        how |= {"do_sample": True, "temperature": 2.0, "seed": seed}
    got = llm.generate(IDS, max_error=ALWAYS, **how)
    assert (got.exact.passes, got.exact.trusted) == (0, 39)  # the first is the prompt's
    first, *later = got.token_errors
    assert first.kl == 0
    assert all(one.kl > 0 for one in later)


@pytest.mark.parametrize("most", [3e-3, 1e-2, 1.5e-2, 3e-2])
def test_no_token_that_comes_out_has_a_larger_error(llm: Any, most: float) -> None:
    got = llm.generate(IDS, max_new_tokens=60, max_error=most)
    assert len(got.token_errors) == 60
    assert max(one.kl for one in got.token_errors) <= most
    assert sum(one.half > 0 for one in got.token_errors) == got.exact.trusted
    assert got.exact.passes > 0
    if most > 3e-3:
        assert got.exact.trusted > 0


@pytest.fixture
def one_layer() -> Iterator[Any]:
    """A model whose keys and values are those of full attention whatever was attended before."""
    shallow = model()
    shallow.model.layers, shallow.config.num_hidden_layers = shallow.model.layers[:1], 1
    with hkv.load(shallow, config=CONFIG, tokenizer=tokenizer()) as loaded:
        yield loaded


@pytest.mark.parametrize("wrong", [{1}, {5}, {2, 9}, {3, 4, 30}])
def test_a_pass_begins_at_the_first_token_that_is_too_far(
    one_layer: Any, wrong: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens before it stay the method's; it and those behind it are full attention's own."""
    place, drafted, judged = 0, list[Tensor](), 0
    rows: tuple[int, Tensor] = 0, torch.zeros(0)
    own, verified = dict[int, Tensor](), dict[int, Tensor]()

    def allows(limit: TokenErrorLimit, logits: Tensor) -> list[bool]:
        begin = place + len(drafted)
        drafted.extend(logits)
        return [begin + number not in wrong for number in range(len(logits))]

    def chosen_from(limit: TokenErrorLimit, trusted: int, logits: Tensor) -> None:
        nonlocal rows, judged
        rows = trusted, logits
        if trusted < len(logits):  # a pass, whose last row is of the place behind the drafts
            judged += len(logits) - 1 - trusted

    def came_out(limit: TokenErrorLimit, count: int) -> None:
        nonlocal place
        trusted, logits = rows[0], rows[1][:count]
        for number, row in enumerate(logits):
            if number < trusted:
                assert torch.equal(row, drafted[number])
            (own if number < trusted else verified)[place + number] = row
        place += len(logits)
        drafted.clear()

    monkeypatch.setattr(TokenErrorLimit, "allows", allows)
    monkeypatch.setattr(TokenErrorLimit, "chosen_from", chosen_from)
    monkeypatch.setattr(TokenErrorLimit, "came_out", came_out)
    got = one_layer.generate(IDS, max_new_tokens=40, max_error=1.0)
    assert {*own, *verified} == set(range(40))
    assert wrong <= {*verified}
    assert len(own) == got.exact.trusted
    assert 0 < got.exact.passes <= len(wrong)
    assert got.exact.accepted <= got.exact.drafted == judged
    with torch.inference_mode():
        exact = one_layer.model(torch.tensor([[*IDS, *got.token_ids]])).logits[0, len(IDS) - 1 :]
    for number, row in verified.items():
        torch.testing.assert_close(row, exact[number], rtol=0, atol=1e-4)
    assert any((row - exact[number]).abs().max() > 1e-2 for number, row in own.items())


@pytest.mark.parametrize("architecture", ["gemma3", "gpt_oss", "qwen3"])
def test_other_architectures(architecture: str) -> None:
    with hkv.load(build(architecture), config={**CONFIG, "dense_extend_tokens": 1}) as llm:
        want = llm.generate(IDS, max_new_tokens=12, exact=True)
        got = llm.generate(IDS, max_new_tokens=12, max_error=NEVER)
        assert got.token_ids == want.token_ids
        loose = llm.generate(IDS, max_new_tokens=12, max_error=ALWAYS)
        assert (loose.exact.passes, loose.exact.trusted) == (0, 11)
        assert sum(one.half > 0 for one in loose.token_errors) == 11


def test_later_turns_contexts_and_streams(llm: Any) -> None:
    talk, same = llm.conversation(), llm.conversation()
    for text in ("sea sky sun ice oak elm bee fox owl sea oak", "sky sea owl fox"):
        want = same.send(text, exact=True, max_new_tokens=9)
        assert talk.send(text, max_error=NEVER, max_new_tokens=9).token_ids == want.token_ids
    cache_of(talk).check_integrity()
    assert talk.send("owl", max_error=ALWAYS, max_new_tokens=9).exact.trusted == 8
    context = llm.context(IDS)
    for _ in range(2):
        got = context.ask("fox", max_error=NEVER, max_new_tokens=9)
        assert got.token_ids == context.ask("fox", exact=True, max_new_tokens=9).token_ids
    stream = llm.generate(IDS, stream=True, max_error=1e-2, max_new_tokens=20)
    assert "".join(stream) == llm.generate(IDS, max_error=1e-2, max_new_tokens=20).text
    assert len(stream.result.token_errors) == 20


def test_what_reads_everything_is_not_verified(plain: PreTrainedModel) -> None:
    with hkv.load(plain, config={"method": "full"}, tokenizer=tokenizer()) as llm:
        got = llm.generate(IDS, max_new_tokens=9, max_error=NEVER)
        assert (got.exact.passes, got.exact.trusted, got.exact.unverified) == (0, 0, 8)
        assert {one.kl for one in got.token_errors} == {0.0}


def test_steps_that_nobody_has_watched_are_verified(
    llm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a step that some other way of making steps would keep from its watchers."""
    monkeypatch.setattr("hybrid_kv.api.token_errors.HalfWatcher.wants", lambda *_: False)
    got = llm.generate(IDS, max_new_tokens=20, max_error=ALWAYS)
    assert got.exact.trusted == 0
    assert got.token_ids == llm.generate(IDS, max_new_tokens=20, exact=True).token_ids


def test_an_error_in_the_middle_leaves_nobody_watching(llm: Any) -> None:
    talk = llm.conversation()
    want = llm.conversation().send("sea sky sun ice oak elm bee", max_new_tokens=9, exact=True)
    calls = 0

    def fail(module: Any, args: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 4:
            raise RuntimeError("as a test")

    hook = llm.model.model.layers[1].register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="as a test"):
        talk.send("sea sky sun ice oak elm bee", max_new_tokens=9, max_error=NEVER)
    hook.remove()
    assert cache_of(talk).kv.watchers == []
    got = talk.send("sea sky sun ice oak elm bee", max_new_tokens=9, max_error=NEVER)
    assert got.token_ids == want.token_ids


@pytest.mark.parametrize("wrong", [0, -1, True, "0.1", float("nan"), float("inf")])
def test_what_is_no_limit_is_refused(llm: Any, wrong: object) -> None:
    with pytest.raises(ConfigError, match="max_error must be the largest expected KL of a token"):
        llm.generate(IDS, max_error=wrong)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"exact": True}, "max_error must go with tokens that may come out unverified"),
        (
            {"num_beams": 2},
            "max_error works with greedy decoding and plain sampling, got num_beams",
        ),
        ({"guidance_scale": 2.0}, "max_error works with greedy .*, got guidance_scale"),
    ],
)
def test_it_goes_with_single_sequences_alone(llm: Any, options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        llm.generate(IDS, max_error=0.1, **options)


@pytest.mark.parametrize(
    ("method", "text"),
    [
        ("streaming_llm", "max_error must go with a method whose steps can tell their error"),
        ("snapkv", "max_error must go with a method whose steps can tell their error, got snapkv"),
    ],
)
def test_methods_that_cannot_tell_are_refused(
    plain: PreTrainedModel, method: str, text: str
) -> None:
    with hkv.load(plain, config={"method": method}) as llm, pytest.raises(ConfigError) as refusal:
        llm.generate(IDS, max_error=0.1)
    assert str(refusal.value).startswith(text)


def test_less_than_rounding_is_refused() -> None:
    with (
        hkv.load("random:tiny", dtype="bfloat16", config=CONFIG) as llm,
        pytest.raises(ConfigError) as refusal,
    ):
        llm.generate(IDS, max_error=1e-4)
    assert str(refusal.value) == (
        "max_error must be at least 0.0015 for a model in bfloat16, whose rounding alone moves "
        "tokens so far, got 0.0001; take that, load it in float32, or write exact=True"
    )


def test_the_command_says_what_was_verified(tmp_path: Path) -> None:
    words = ("generate", *TINY, "--set", "window_tokens=16", "--set", "sink_tokens=4")
    words += ("--set", "page_size=4", "--set", "top_k=4", "--dtype", "float32")
    done = call(*words, "--max-error", "1e9", "--json", tmp_path / "a.json")
    work = json.loads((tmp_path / "a.json").read_text())["exact"]
    assert work["passes"] == 0
    assert work["trusted"] > 0
    assert f"{work['trusted']} tokens below the largest error, 0 in 0 passes" in done.output
    assert "max_error must be the largest expected KL" in refused(*words, "--max-error", "0")
