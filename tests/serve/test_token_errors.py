"""Errors of tokens, and a limit to them, by request: of the engine and through OpenAI's client."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any

import httpx
import openai
import pytest
import torch
from transformers import PreTrainedModel

import hybrid_kv as hkv
from hybrid_kv.errors import ConfigError
from hybrid_kv.serve import Engine, Limits, Request, Token
from tests.serve.asking import asked, read, small_model, tiered
from tests.serve.running import Running, serving
from tests.serve.test_structure import byte_llm

NEW = 40
NEVER, ALWAYS = 1e-12, 1e9
"""Limits that no step of these keeps to, and that all do."""
FRESH = Limits(reproducible=512)
"""Windows begin where those of `generate` do: no answer goes on from what another one has left."""


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return small_model()


@pytest.fixture
def llm(model: PreTrainedModel) -> Iterator[hkv.LLM]:
    """Steps see 4 of some hundred cold entries."""
    with hkv.LLM(model, None, tiered(8, method="flat", top_k=4)) as llm:
        yield llm


def request(length: int, seed: int = 0, **changes: Any) -> Request:
    return replace(asked(length, seed, max_new_tokens=NEW), **changes)


def told(ticket: Any) -> list[dict[str, float]]:
    """The error of each token of an answer."""
    read(ticket)
    found = [event.error for event in ticket.happened if isinstance(event, Token)]
    assert None not in found
    return [asdict(one) for one in found]


def close(got: list[dict[str, float]], want: list[dict[str, float]]) -> bool:
    values = [[list(one.values()) for one in some] for some in (got, want)]
    return torch.allclose(torch.tensor(values[0]), torch.tensor(values[1]), rtol=1e-3, atol=1e-5)


# The engine --------------------------------------------------------------------------------------


def test_errors_are_those_that_generate_says(llm: hkv.LLM) -> None:
    ids = list(asked(300, 3).ids)
    alone = llm.generate(ids, max_new_tokens=NEW, do_sample=False, token_errors=True)
    want = [asdict(one) for one in alone.token_errors or ()]
    assert want[0]["kl"] == 0 < min(one["kl"] for one in want[1:])
    with Engine(llm, FRESH) as engine:
        ticket = engine.submit(request(300, 3, errors=True))
        assert close(told(ticket), want)
        plain = engine.submit(request(300, 3))
        assert read(plain)[0] == read(ticket)[0] == alone.token_ids
        assert {event.error for event in plain.happened if isinstance(event, Token)} == {None}
        many = [request(300, 3, errors=True), request(210, 1), request(300, 3, errors=True)]
        tickets = [engine.submit(one) for one in many]
        for number in (0, 2):
            assert close(told(tickets[number]), want)
        read(tickets[1])


def test_of_one_prompt_that_is_computed_once(llm: hkv.LLM) -> None:
    with Engine(llm) as engine:
        tickets = [engine.submit(request(300, 3, errors=True)) for _ in range(3)]
        for errors in map(told, tickets):
            assert errors[0]["kl"] == 0 < min(one["kl"] for one in errors[1:])


def test_a_step_that_failed_leaves_no_error_behind(
    llm: hkv.LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A joined step that fails in its second layer has already been watched in its first."""
    wanted = [request(300, 3, errors=True), request(210, 1, errors=True)]
    with Engine(llm, FRESH) as engine:
        want = [told(engine.submit(one)) for one in wanted]
        whole = type(llm.model.model.layers[1]).forward
        calls = 0

        def failing(layer: Any, *args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            second = layer is llm.model.model.layers[1]
            joined = second and args[0].shape[0] > 1 and args[0].shape[1] == 1
            calls += joined
            if joined and calls == 3:
                raise RuntimeError("as a test")
            return whole(layer, *args, **kwargs)

        monkeypatch.setattr(type(llm.model.model.layers[1]), "forward", failing)
        tickets = [engine.submit(one) for one in wanted]
        assert all(close(told(one), right) for one, right in zip(tickets, want, strict=True))
        assert calls > 3


def test_where_every_token_is_verified_they_are_full_attentions(llm: hkv.LLM) -> None:
    with Engine(llm) as engine:
        for seed in range(3):
            given = request(301 + seed, seed)
            want, _ = read(engine.submit(replace(given, exact=True)))
            ticket = engine.submit(replace(given, max_error=NEVER, errors=True))
            tokens, end = read(ticket)
            assert tokens == want
            assert end.report.exact is not None
            assert end.report.exact.trusted == 0 < end.report.exact.passes
            assert {one["kl"] for one in told(ticket)} == {0.0}


def test_where_all_are_trusted_they_are_the_methods(llm: hkv.LLM) -> None:
    with Engine(llm) as engine:
        ticket = engine.submit(request(300, 3, max_error=ALWAYS, errors=True))
        _, end = read(ticket)
        assert end.report.exact is not None
        assert (end.report.exact.passes, end.report.exact.trusted) == (0, NEW - 1)
        first, *later = [one["kl"] for one in told(ticket)]
        assert first == 0 < min(later)


@pytest.mark.parametrize("most", [0.06, 0.12])
def test_no_token_has_a_larger_error(llm: hkv.LLM, most: float) -> None:
    ids = list(asked(300, 3).ids)
    alone = llm.generate(ids, max_new_tokens=NEW, do_sample=False, max_error=most)
    with Engine(llm) as engine:
        ticket = engine.submit(request(300, 3, max_error=most, errors=True))
        tokens, end = read(ticket)
    errors = told(ticket)
    assert tokens == alone.token_ids
    assert len(errors) == NEW
    assert max(one["kl"] for one in errors) <= most
    assert end.report.exact == alone.exact
    assert end.report.exact is not None
    assert end.report.exact.trusted == sum(one["kl"] > 0 for one in errors) > 0
    assert end.report.exact.passes > 0


@pytest.mark.parametrize("method", ["streaming_llm", "snapkv"])
@pytest.mark.parametrize("wish", [{"errors": True}, {"max_error": 0.1}])
def test_methods_that_cannot_tell_are_refused(
    llm: hkv.LLM, method: str, wish: dict[str, Any]
) -> None:
    config = hkv.HybridConfig.model_validate({"method": method})
    with Engine(llm) as engine, pytest.raises(ConfigError, match=method) as refusal:
        engine.submit(request(50, config=config, **wish))
    assert str(refusal.value).startswith(next(iter(wish)))


def test_less_than_rounding_is_refused() -> None:
    with (
        hkv.load("random:tiny", dtype="bfloat16", config=tiered(8)) as llm,
        Engine(llm) as engine,
        pytest.raises(ConfigError, match=r"max_error must be at least 0\.0015 for a model in bfl"),
    ):
        engine.submit(Request((1, 2, 3), 1, max_error=1e-4))


# Through OpenAI's client -------------------------------------------------------------------------

SMALL = {"method": "hybrid", "set": {"window_tokens": 16, "sink_tokens": 16, "top_k": 1}}
TEXT = "The river and the hill. " * 30
TALK: Any = [{"role": "user", "content": TEXT}]


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with byte_llm() as llm, Engine(llm) as engine, serving(llm, engine) as running:
        yield running


@pytest.fixture
def client(server: Running) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60)


def chat(client: openai.OpenAI, stream: bool, **wish: Any) -> tuple[str, dict[str, Any]]:
    """Text and `hybrid_kv` object of an answer, with the errors of all chunks."""
    how: Any = {"model": "tiny", "messages": TALK, "max_tokens": 24, "temperature": 0}
    how["extra_body"] = {"hybrid_kv": {**SMALL, **wish}}
    if not stream:
        choice = client.chat.completions.create(**how).choices[0]
        return choice.message.content or "", choice.hybrid_kv
    choices = [one.choices[0] for one in client.chat.completions.create(stream=True, **how)]
    return "".join(one.delta.content or "" for one in choices), _gathered(choices)


def completion(client: openai.OpenAI, stream: bool, **wish: Any) -> tuple[str, dict[str, Any]]:
    how: Any = {"model": "tiny", "prompt": TEXT, "max_tokens": 24, "temperature": 0}
    how["extra_body"] = {"hybrid_kv": {**SMALL, **wish}}
    if not stream:
        choice = client.completions.create(**how).choices[0]
        return choice.text, choice.hybrid_kv
    choices = [one.choices[0] for one in client.completions.create(stream=True, **how)]
    return "".join(one.text for one in choices), _gathered(choices)


def response(client: openai.OpenAI, stream: bool, **wish: Any) -> tuple[str, dict[str, Any]]:
    how: Any = {"model": "tiny", "input": TALK, "max_output_tokens": 24, "temperature": 0}
    how["extra_body"] = {"hybrid_kv": {**SMALL, **wish}}
    if not stream:
        whole = client.responses.create(**how)
        return whole.output_text, whole.hybrid_kv
    text, errors, report = "", [], {}
    for one in client.responses.create(stream=True, **how):
        if one.type == "response.output_text.delta":
            text += one.delta
            errors += getattr(one, "hybrid_kv", {"errors": []})["errors"]
        elif one.type in ("response.completed", "response.incomplete"):
            report = one.response.hybrid_kv
    assert errors == report.get("errors", [])
    return text, report


def _gathered(choices: list[Any]) -> dict[str, Any]:
    *before, last = choices
    errors = [error for one in before for error in getattr(one, "hybrid_kv", {}).get("errors", [])]
    assert not errors or sum(hasattr(one, "hybrid_kv") for one in before) > 3  # as they come
    report = {**last.hybrid_kv}
    all_errors = errors + report.pop("errors", [])
    return report | ({"errors": all_errors} if all_errors else {})


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("ask", [chat, completion, response])
def test_a_limit_and_errors_by_request(client: openai.OpenAI, ask: Any, stream: bool) -> None:
    plain, report = ask(client, stream)
    assert "errors" not in report
    assert report["exact"] is None
    text, report = ask(client, stream, errors=True)
    assert text == plain
    assert len(report["errors"]) == 24
    first, *later = report["errors"]
    assert {*first} == {"token", "kl", "kl_bar", "flip"}
    assert (first["kl"], first["flip"]) == (0, 0)
    assert all(0 < one["kl"] < one["kl_bar"] for one in later)
    assert all(0 < one["flip"] < 1 for one in later)
    want, _ = ask(client, stream, exact=True)
    text, report = ask(client, stream, max_error=NEVER)
    assert text == want
    assert report["exact"]["passes"] > report["exact"]["trusted"] == 0
    assert "errors" not in report
    most = sorted(one["kl"] for one in later)[len(later) // 2]
    _, report = ask(client, stream, max_error=most, errors=True)
    assert max(one["kl"] for one in report["errors"]) <= most
    assert report["exact"]["trusted"] > 0
    assert report["exact"]["passes"] > 0


@pytest.mark.parametrize(
    ("wish", "said"),
    [
        ({"max_error": 0}, "max_error must be the largest expected KL of a token, a number above"),
        ({"max_error": -1.5}, "max_error must be the largest expected KL of a token, a number ab"),
        ({"max_error": True}, "hybrid_kv: input should be a valid number, got True"),
        ({"max_error": "0.1"}, "hybrid_kv: input should be a valid number, got '0.1'"),
        ({"errors": 1}, "hybrid_kv: input should be a valid boolean, got 1"),
        ({"max_errors": 0.1}, "did you mean 'max_error'?"),
        ({"max_error": 0.1, "exact": True}, "max_error must go with tokens that may come out unv"),
        ({"errors": True, "exact": True}, "errors must go with steps that leave entries unread,"),
        ({"errors": True, "method": "streaming_llm", "set": {}}, "errors must go with a method w"),
        ({"max_error": 0.1, "method": "kivi", "set": {}}, "max_error must have a method that kee"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("ask", [chat, completion, response])
def test_what_cannot_be_asked_is_400_in_a_sentence(
    client: openai.OpenAI, ask: Any, stream: bool, wish: dict[str, Any], said: str
) -> None:
    with pytest.raises(openai.BadRequestError) as refusal:
        ask(client, stream, **wish)
    body: Any = refusal.value.body
    assert said in body["message"]
    assert "\n" not in body["message"]


@pytest.mark.parametrize("number", ["NaN", "Infinity", "1e999"])
def test_a_limit_that_is_no_number_is_refused(server: Running, number: str) -> None:
    body = f'{{"model": "tiny", "prompt": "a", "hybrid_kv": {{"max_error": {number}}}}}'
    head = {"content-type": "application/json"}
    answer = httpx.post(f"{server.url}/v1/completions", content=body, headers=head, timeout=60)
    assert answer.status_code == 400, answer.text
    assert "hybrid_kv: input should be a finite number" in answer.json()["error"]["message"]
