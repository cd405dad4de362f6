"""What the interface takes, refuses and answers, with an engine that counts."""

from __future__ import annotations

import json
import re
import threading
from itertools import chain
from typing import Any

import httpx
import openai
import pytest

from hybrid_kv.api import LLM
from hybrid_kv.errors import CapacityError, HybridKVError
from hybrid_kv.serve import Limits
from hybrid_kv.serve.http.app import Rules
from tests.serve.asking import until
from tests.serve.fake_engine import FakeEngine
from tests.serve.running import Running, serving

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
TEXT = "the river. key 3f a0: 11"
MESSAGES = [{"role": "user", "content": "the river"}]


def completion(**more: Any) -> dict[str, Any]:
    return {"model": "tiny", "prompt": TEXT, "max_tokens": 4, **more}


def chat(**more: Any) -> dict[str, Any]:
    return {"model": "tiny", "messages": MESSAGES, "max_tokens": 4, **more}


def named(name: str) -> dict[str, Any]:
    """Choice of a tool."""
    return {"type": "function", "function": {"name": name}}


def calling(arguments: str) -> dict[str, Any]:
    """Message with a call."""
    function = {"name": "f", "arguments": arguments}
    calls = [{"id": "1", "type": "function", "function": function}]
    return {"role": "assistant", "content": None, "tool_calls": calls}


TOOL, CALLING = named("f"), calling("{}")
TWO = {"regex": "a", "choice": ["b"]}


def events(text: str) -> list[Any]:
    """The data of a stream of events, comments left out."""
    found = (re.search("^data: (.*)$", block, re.MULTILINE) for block in text.split("\n\n"))
    lines = [line[1] for line in found if line is not None]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


def refusal(answer: httpx.Response) -> dict[str, Any]:
    """The error of an answer in OpenAI's form."""
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert "\n" not in error["message"]
    return error


# Answers -----------------------------------------------------------------------------------------


def test_a_completion_has_text_reason_and_usage(client: httpx.Client) -> None:
    got = client.post(COMPLETIONS, json=completion()).json()
    assert got["object"] == "text_completion"
    assert got["model"] == "tiny"
    assert got["choices"] == [
        {"index": 0, "text": "theriver.key", "logprobs": None, "finish_reason": "length"}
    ]
    assert got["usage"] == {
        "prompt_tokens": 7,
        "completion_tokens": 4,
        "total_tokens": 11,
        "prompt_tokens_details": {"cached_tokens": 2},
    }


def test_a_chat_is_rendered_by_the_template(client: httpx.Client, engine: FakeEngine) -> None:
    got = client.post(CHAT, json=chat()).json()
    assert got["object"] == "chat.completion"
    assert got["choices"][0]["message"]["role"] == "assistant"
    parts = [{"type": "text", "text": "the "}, {"type": "text", "text": "river"}]
    messages = [{"role": "user", "content": parts}]
    assert client.post(CHAT, json=chat(messages=messages)).json()["usage"] == got["usage"]
    assert engine.seen[0].ids == engine.seen[1].ids


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_a_stream_says_what_the_whole_answer_says(client: httpx.Client, path: str) -> None:
    asked = chat() if path == CHAT else completion()
    whole = client.post(path, json=asked).json()
    options = {"stream": True, "stream_options": {"include_usage": True}}
    answer = client.post(path, json={**asked, **options})
    assert answer.headers["content-type"].startswith("text/event-stream")
    *chunks, usage, done = events(answer.text)
    assert done == "[DONE]"
    assert usage["usage"] == whole["usage"]
    assert usage["choices"] == []
    assert all(chunk["usage"] is None for chunk in chunks)
    choices = [chunk["choices"][0] for chunk in chunks]
    assert [each["finish_reason"] for each in choices if each["finish_reason"]] == ["length"]
    if path == CHAT:
        assert choices[0]["delta"]["role"] == "assistant"
        text = "".join(each["delta"].get("content", "") for each in choices)
        assert text == whole["choices"][0]["message"]["content"]
    else:
        assert "".join(each["text"] for each in choices) == whole["choices"][0]["text"]
    assert len({chunk["id"] for chunk in chunks}) == 1


def test_prefill_shows_as_comments_in_a_stream(client: httpx.Client) -> None:
    text = client.post(COMPLETIONS, json=completion(stream=True)).text
    assert ": prefill 3/7\n\n: prefill 7/7\n\n" in text


@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities_of_a_chat(client: httpx.Client, stream: bool) -> None:
    asked = chat(logprobs=True, top_logprobs=2, max_tokens=2, stream=stream)
    answer = client.post(CHAT, json=asked)
    chunks = events(answer.text)[:-1] if stream else [answer.json()]
    entries = [
        entry
        for chunk in chunks
        for entry in (chunk["choices"][0].get("logprobs") or {}).get("content", [])
    ]
    assert [entry["token"] for entry in entries] == ["<unk>", "the"]
    assert entries[1]["bytes"] == list(b"the")
    assert [top["logprob"] for top in entries[1]["top_logprobs"]] == [-1.0, -2.0]


@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities_of_a_completion(client: httpx.Client, stream: bool) -> None:
    answer = client.post(COMPLETIONS, json=completion(logprobs=1, stream=stream))
    chunks = events(answer.text)[:-1] if stream else [answer.json()]
    found = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    found = [each for each in found if each]
    assert [*chain.from_iterable(each["tokens"] for each in found)] == ["the", "river", ".", "key"]
    assert [*chain.from_iterable(each["text_offset"] for each in found)] == [0, 3, 8, 9]
    assert [*chain.from_iterable(each["token_logprobs"] for each in found)] == [-1.0] * 4
    assert found[0]["top_logprobs"][0] == {"the": -1.0}


@pytest.mark.parametrize("stream", [False, True])
def test_several_prompts_and_choices(client: httpx.Client, stream: bool) -> None:
    asked = completion(prompt=["the river", "key 3f"], n=2, max_tokens=2, stream=stream)
    asked |= {"stream_options": {"include_usage": True}} if stream else {}
    answer = client.post(COMPLETIONS, json=asked)
    texts = dict.fromkeys(range(4), "")
    chunks = events(answer.text)[:-1] if stream else [answer.json()]
    for chunk in chunks:
        for choice in chunk["choices"]:
            texts[choice["index"]] += choice["text"]
    assert texts == {0: "theriver", 1: "theriver", 2: "key3f", 3: "key3f"}
    usage = chunks[-1]["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (4, 8)


def test_choices_draw_with_seeds_of_their_own(client: httpx.Client, engine: FakeEngine) -> None:
    client.post(COMPLETIONS, json=completion(n=3, seed=7, temperature=0.5, top_p=0.9, top_k=-1))
    assert [request.sampling.seed for request in engine.seen] == [7, 8, 9]
    assert engine.seen[0].sampling.temperature == 0.5
    assert engine.seen[0].sampling.top_p == 0.9
    assert engine.seen[0].sampling.top_k == 0


def test_what_is_not_said_is_what_the_interface_says(
    client: httpx.Client, engine: FakeEngine
) -> None:
    client.post(COMPLETIONS, json={"model": "tiny", "prompt": TEXT, "stop": None, "n": None})
    client.post(CHAT, json={"model": "tiny", "messages": MESSAGES})
    first, second = engine.seen
    assert (first.max_new_tokens, first.sampling.temperature, first.stop) == (16, 1.0, ())
    assert second.max_new_tokens == 1024 - len(second.ids)


@pytest.mark.parametrize("stop", ["snow", ["snow", "hill"]])
def test_stops_reach_the_engine(client: httpx.Client, engine: FakeEngine, stop: Any) -> None:
    assert client.post(COMPLETIONS, json=completion(stop=stop)).status_code == 200
    assert engine.seen[0].stop == ("snow", "hill")[: 1 if stop == "snow" else 2]


def test_token_ids_are_a_prompt(client: httpx.Client, engine: FakeEngine) -> None:
    ids = client.post("/tokenize", json={"prompt": TEXT}).json()["tokens"]
    client.post(COMPLETIONS, json=completion(prompt=ids))
    client.post(COMPLETIONS, json=completion())
    assert engine.seen[0].ids == engine.seen[1].ids == tuple(ids)


def test_extensions_choose_method_budget_and_audit(
    client: httpx.Client, engine: FakeEngine
) -> None:
    own = {"method": "flat", "set": {"window_tokens": 64}, "audit": 4, "places": True}
    got = client.post(COMPLETIONS, json=completion(hybrid_kv=own)).json()
    request = engine.seen[0]
    assert request.config is not None
    assert (request.config.method, request.config.params.window_tokens) == ("flat", 64)
    assert request.config.index_build == "wait"  # the server's own settings stay
    assert request.audit_every == 4
    report = got["choices"][0]["hybrid_kv"]
    assert report["recall"] == 0.99
    assert report["places"] == [{"position": 1, "weight": 0.5}, {"position": 3, "weight": 0.25}]
    assert report["tpot_ms"] == 2.0
    client.post(
        COMPLETIONS,
        json=completion(prompt="the " * 400, hybrid_kv={"budget": "50%", "method": "flat"}),
    )
    assert engine.seen[1].config != request.config
    assert engine.seen[1].config is not None


@pytest.mark.parametrize(
    ("budget", "keys"), [("1%", range(128, 140)), ("50%", range(280, 320)), (64, range(20, 64))]
)
def test_a_share_leaves_at_least_128_keys_to_choose(
    client: httpx.Client, engine: FakeEngine, budget: str | int, keys: range
) -> None:
    own = {"budget": budget, "method": "flat", "set": {"page_size": 8}}
    client.post(COMPLETIONS, json=completion(prompt="the " * 800, hybrid_kv=own))
    assert engine.seen[0].config is not None
    assert engine.seen[0].config.params.cold.top_k in keys


def test_without_extensions_the_configuration_is_the_servers(
    client: httpx.Client, engine: FakeEngine
) -> None:
    got = client.post(COMPLETIONS, json=completion()).json()
    assert engine.seen[0].config is None
    assert "hybrid_kv" not in got["choices"][0]


def number(client: httpx.Client, name: str) -> float:
    """A figure of /metrics."""
    lines = client.get("/metrics").text.splitlines()
    return float(next(line for line in lines if line.startswith(f"{name} ")).split()[1])


def test_models_health_and_metrics(client: httpx.Client) -> None:
    names = ("hybrid_kv_ttft_seconds_count", "hybrid_kv_itl_seconds_count")
    counted = {name: number(client, name) for name in names}
    client.post(COMPLETIONS, json=completion())
    figures = client.get("/metrics").text
    assert client.get("/v1/models").json()["data"][0]["id"] == "tiny"
    assert client.get("/v1/models/tiny").json()["max_model_len"] == 1024
    assert client.get("/health").json() == {"status": "ok"}
    new = {name: number(client, name) - before for name, before in counted.items()}
    assert new == {"hybrid_kv_ttft_seconds_count": 1, "hybrid_kv_itl_seconds_count": 3}
    assert 'hybrid_kv_requests_ended_total{reason="length"} 1.0' in figures
    assert "hybrid_kv_recall_mean 0.99" in figures
    assert 'hybrid_kv_http_responses_total{status="200"}' in figures


# Refusals ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "asked", "said", "param"),
    [
        (COMPLETIONS, completion(echo=True), "'echo' is not served here, got True", "echo"),
        (COMPLETIONS, completion(best_of=2), "'best_of' is not served", "best_of"),
        (COMPLETIONS, completion(suffix="x"), "'suffix' is not served", "suffix"),
        (COMPLETIONS, completion(logit_bias={"a": 1}), "token ids as names", "logit_bias"),
        (COMPLETIONS, completion(logit_bias={"512": 1}), "token ids 0..511, got 512", "logit_bias"),
        (COMPLETIONS, completion(logit_bias={"5": 101}), "less than or equal to 100", "logit_bias"),
        (COMPLETIONS, completion(stop_token_ids=[512]), "ids 0..511", "stop_token_ids"),
        (COMPLETIONS, completion(tools=[{}]), "'tools' is not served", "tools"),
        (COMPLETIONS, completion(guided_json={}), "'guided_json' is not served", "guided_json"),
        (COMPLETIONS, completion(min_p=1.5), "less than or equal to 1", "min_p"),
        (COMPLETIONS, completion(repetition_penalty=0), "greater than or", "repetition_penalty"),
        (CHAT, chat(tools=[{"type": "function"}]), "tools: field required", None),
        (CHAT, chat(tools=[{"type": "code"}]), "tools: input should be 'function'", None),
        (CHAT, chat(tool_choice="required"), "needs tools, got none", "tool_choice"),
        (CHAT, chat(tool_choice=named("g")), "must name one of tools (none)", "tool_choice"),
        (CHAT, chat(tools=[TOOL, TOOL]), "names of their own, got f, f", "tools"),
        (CHAT, chat(tools=[TOOL], response_format={"type": "json_object"}), "no call", "tools"),
        (CHAT, chat(response_format={"type": "json_schema"}), "got none", None),
        (CHAT, chat(response_format={"type": "xml"}), "response_format: input", None),
        (CHAT, chat(structured_outputs=TWO), "one schema or grammar, got 2", None),
        (CHAT, chat(frequency_penalty=2.5), "less than or equal to 2", "frequency_penalty"),
        (CHAT, chat(store=True), "'store' is not served", "store"),
        (COMPLETIONS, completion(topp=0.5), "did you mean 'top_p'", "topp"),
        (COMPLETIONS, completion(temperature="1"), "temperature: input should be", "temperature"),
        (COMPLETIONS, completion(temperature=-1), "greater than or equal to 0", "temperature"),
        (COMPLETIONS, completion(temperature=True), "temperature: input should", "temperature"),
        (COMPLETIONS, completion(top_p=0), "greater than 0", "top_p"),
        (COMPLETIONS, completion(max_tokens=0), "greater than or equal to 1", "max_tokens"),
        (COMPLETIONS, completion(max_tokens=1.5), "max_tokens: input should be", "max_tokens"),
        (COMPLETIONS, completion(seed=2**64), "less than", "seed"),
        (COMPLETIONS, completion(n=17), "less than or equal to 16", "n"),
        (COMPLETIONS, completion(n=9, prompt=["a", "b"]), "1 to 16 answers", "prompt"),
        (COMPLETIONS, completion(prompt=[]), "1 to 16 answers", "prompt"),
        (COMPLETIONS, completion(prompt=""), "prompt is empty", None),
        (COMPLETIONS, completion(prompt=5), "prompt: input should be", "prompt"),
        (COMPLETIONS, completion(prompt=[1, "a"]), "prompt: input should be", "prompt"),
        (COMPLETIONS, completion(prompt=[10**6]), "token ids must be 0..", None),
        (COMPLETIONS, completion(prompt="the " * 2000), "model's context of 1,024", "prompt"),
        (COMPLETIONS, completion(max_tokens=1020), "model's context of 1,024", "prompt"),
        (COMPLETIONS, completion(stop=[""]), "stop must not hold an empty text", "stop"),
        (COMPLETIONS, completion(stream_options={}), "stream_options needs stream", None),
        (COMPLETIONS, completion(hybrid_kv={"method": "magic"}), "unknown method 'magic'", None),
        (COMPLETIONS, completion(hybrid_kv={"set": {"top_kk": 1}}), "unknown hybrid setting", None),
        (COMPLETIONS, completion(hybrid_kv={"budgt": 1}), "did you mean 'budget'", None),
        (COMPLETIONS, completion(hybrid_kv={"budget": "200%"}), "a budget must be", None),
        (CHAT, chat(messages=[]), "messages must have a length of at least 1, got 0", "messages"),
        (CHAT, chat(messages="hello"), "messages: input should be a valid list", "messages"),
        (CHAT, chat(messages=[{"role": "tool", "content": "x"}]), "got role 'tool'", None),
        (CHAT, chat(messages=[{"role": "user"}]), "content must be text", None),
        (CHAT, chat(messages=[{"role": "user", "content": None}]), "content must be text", None),
        (CHAT, chat(messages=[{**CALLING, "role": "user"}]), "tool_calls are the assis", None),
        (
            CHAT,
            chat(messages=[{"role": "user", "content": "", "name": "a"}]),
            "'name' is not",
            None,
        ),
        (CHAT, chat(messages=[calling("[1]")]), "must be a JSON object in a text, got '[1]'", None),
        (CHAT, chat(messages=[calling("[" * 99_999)]), "must be a JSON object in a text", None),
        (CHAT, chat(top_logprobs=2), "top_logprobs needs logprobs", "top_logprobs"),
        (CHAT, chat(max_completion_tokens=5), "must agree, got 4 and 5", "max_tokens"),
        ("/tokenize", {}, "one of prompt and messages", "prompt"),
    ],
)
def test_a_wrong_setting_is_refused_by_name(
    client: httpx.Client, path: str, asked: dict[str, Any], said: str, param: str | None
) -> None:
    answer = client.post(path, json=asked)
    assert answer.status_code == 400, answer.text
    error = refusal(answer)
    assert said in error["message"]
    assert error["type"] == "invalid_request_error"
    if param is not None:
        assert error["param"] == param


def test_what_changes_nothing_is_taken(client: httpx.Client) -> None:
    harmless = {
        "frequency_penalty": 0,
        "presence_penalty": 0.0,
        "logit_bias": {},
        "n": 1,
        "user": "ada",
        "store": False,
        "metadata": {"a": "b"},
        "tools": None,
        "tool_choice": "none",
        "response_format": {"type": "text"},
        "min_p": 0,
        "repetition_penalty": 1,
        "ignore_eos": False,
    }
    assert client.post(CHAT, json=chat(**harmless)).status_code == 200
    more = {"best_of": 1, "echo": False, "suffix": None}
    assert client.post(COMPLETIONS, json=completion(**harmless, **more)).status_code == 200


def test_a_lenient_server_ignores_what_it_does_not_serve_and_says_so_once(
    tiny: LLM, caplog: pytest.LogCaptureFixture
) -> None:
    engine = FakeEngine(tiny.require_tokenizer())
    with serving(tiny, engine, Rules(lenient=True)) as server:
        for _ in range(2):
            asked = chat(audio={"voice": "a"}, verbosity="high", topp=0.5)
            asked["messages"] = [{**MESSAGES[0], "refusal": "no"}]
            assert httpx.post(server.url + CHAT, json=asked).status_code == 200
        wrong = httpx.post(server.url + CHAT, json=chat(temperature="warm", audio={}))
        assert "temperature: input should be" in refusal(wrong)["message"]
    said = [each.getMessage() for each in caplog.records if "is ignored" in each.getMessage()]
    assert sorted(line.split("'")[1] for line in said) == ["audio", "refusal", "topp", "verbosity"]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "body: field required"),
        (b'{"model"', "body must be JSON"),
        (b"\xff\xfe{}", "body"),
        (b"[]", "body: input should be"),
        (b"[" * 100_000, "body"),
        (b'{"model": "tiny", "prompt": ' + b"1" * 5000 + b"}", "body"),
        (b'{"model": "tiny", "prompt": "\\ud800"}', "half of a surrogate pair"),
        (b'{"model": "tiny", "prompt": "a", "\\ud800": 1}', "unknown setting"),
        (b'{"model": "tiny", "prompt": "a", "temperature": NaN}', "temperature"),
    ],
)
def test_a_body_that_is_no_request_is_refused(
    client: httpx.Client, content: bytes, said: str
) -> None:
    kind = {"content-type": "application/json"}
    answer = client.post(COMPLETIONS, content=content, headers=kind)
    assert answer.status_code == 400
    assert said in refusal(answer)["message"]


@pytest.mark.parametrize("path", ["/v1/responses", CHAT])
def test_an_answer_that_fails_before_its_first_token_says_so_in_its_stream(
    client: httpx.Client, engine: FakeEngine, path: str
) -> None:
    engine.pace_s = 0.05
    asked = {**chat(stream=True, max_tokens=None), "input": "the river"}
    asked = {
        key: asked[key] for key in ("model", "stream", "input" if path != CHAT else "messages")
    }

    def end_all() -> None:
        until(lambda: engine.running)
        engine.drain(0)

    thread = threading.Thread(target=end_all)
    thread.start()
    said = events(client.post(path, json=asked).text)
    thread.join()
    failure = said[-1] if path != CHAT else said[-1]["error"]
    assert failure["message"] == "the server is shutting down; ask again later"
    assert failure["code"] == "shutting_down"
    assert path == CHAT or failure["type"] == "error"


def test_another_model_is_404(client: httpx.Client) -> None:
    for answer in (
        client.post(COMPLETIONS, json=completion(model="gpt-4")),
        client.get("/v1/models/gpt-4"),
    ):
        assert answer.status_code == 404
        assert refusal(answer)["code"] == "model_not_found"


def test_wrong_paths_methods_and_types_are_refused_in_json(client: httpx.Client) -> None:
    assert refusal(client.get("/v2/nothing"))["code"] == "not_found"
    wrong = client.get(COMPLETIONS)
    assert (wrong.status_code, wrong.headers["allow"]) == (405, "POST")
    assert refusal(wrong)["code"] == "method_not_allowed"
    plain = client.post(COMPLETIONS, content=json.dumps(completion()))
    assert plain.status_code == 415
    assert refusal(plain)["message"].startswith("content-type must be application/json")


def test_no_request_names_a_file(client: httpx.Client, engine: FakeEngine) -> None:
    own = {"method": "duo_attention", "set": {"heads": "/etc/hostname"}}
    answer = client.post(COMPLETIONS, json=completion(hybrid_kv=own))
    assert answer.status_code == 400
    assert refusal(answer)["message"].startswith("heads may name a file")
    assert engine.seen == []
    own["set"] = {"heads": "prompt"}
    assert client.post(COMPLETIONS, json=completion(hybrid_kv=own)).status_code == 200


def test_a_full_queue_says_when_to_come_back(client: httpx.Client, engine: FakeEngine) -> None:
    engine.holds = True
    answer = client.post(COMPLETIONS, json=completion(n=9))  # 8 fit
    assert answer.status_code == 429
    assert answer.headers["retry-after"] == "2"
    assert refusal(answer)["code"] == "queue_full"
    engine.holds = False
    assert client.post(COMPLETIONS, json=completion()).status_code in (200, 429)
    engine.drain(5)
    assert engine.ended["cancelled"] == 8  # those of the refused request did not go on


OUT_OF_TIME = (
    "the request ran out of time after 2 tokens; ask for fewer or raise the server's --timeout"
)


@pytest.mark.parametrize(("path", "body"), [(CHAT, chat()), (COMPLETIONS, completion())])
def test_an_answer_that_time_has_cut_is_an_error_with_what_had_come(
    client: httpx.Client, engine: FakeEngine, path: str, body: dict[str, Any]
) -> None:
    engine.times_out_at = 2
    whole = client.post(path, json=body)
    assert whole.status_code == 504
    assert whole.headers["x-should-retry"] == "false"
    error = whole.json()["error"]
    assert (error["message"], error["code"], error["type"]) == (
        *(OUT_OF_TIME, "timeout"),
        "server_error",
    )
    *chunks, last = events(client.post(path, json={**body, "stream": True}).text)
    assert last["error"] == {name: error[name] for name in error if name != "partial"}
    (said,) = error["partial"]
    given = [chunk["choices"][0] for chunk in chunks]
    assert said == "".join(
        one.get("text", one.get("delta", {}).get("content", "")) for one in given
    )
    assert said
    assert {one["finish_reason"] for one in given} == {None}
    engine.times_out_at = 0
    never = client.post(path, json=body)
    assert never.status_code == 504
    assert "ran out of time before its first token" in refusal(never)["message"]


def test_openais_client_raises_when_time_has_cut_an_answer(
    server: Running, engine: FakeEngine
) -> None:
    engine.times_out_at = 2
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
    asked: dict[str, Any] = {"model": "tiny", "messages": MESSAGES, "max_tokens": 4}
    with pytest.raises(openai.InternalServerError, match="ran out of time after 2 tokens"):
        client.chat.completions.create(**asked)
    assert len(engine.seen) == 1, "it is not asked again"
    texts: list[str] = []
    stream = client.chat.completions.create(**asked, stream=True)
    with pytest.raises(openai.APIError, match="ran out of time after 2 tokens"):
        texts.extend(chunk.choices[0].delta.content or "" for chunk in stream)
    assert "".join(texts)
    response = client.responses.create(model="tiny", input="the river", max_output_tokens=4)
    assert (response.status, response.incomplete_details) == ("failed", None)
    assert response.error is not None
    assert response.error.message == OUT_OF_TIME
    assert response.output_text == "".join(texts)
    *_, end = client.responses.create(model="tiny", input="the river", stream=True)
    assert end.type == "response.failed"


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (CapacityError("never"), 400, "never_fits"),
        (HybridKVError("broken"), 500, "failed"),
        (RuntimeError("secret /etc/path"), 500, "internal_error"),
    ],
)
def test_what_fails_is_said_without_details(
    client: httpx.Client,
    engine: FakeEngine,
    error: Exception,
    status: int,
    code: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine.fails = error
    answer = client.post(COMPLETIONS, json=completion())
    assert (answer.status_code, refusal(answer)["code"]) == (status, code)
    assert "secret" not in answer.text
    until(lambda: status < 500 or "Traceback (" in caplog.text)  # a moment after the answer
    assert status == 500 or not caplog.text


def test_a_model_without_template_refuses_chats(tiny: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiny.tokenizer, "chat_template", None)
    with serving(tiny, FakeEngine(tiny.require_tokenizer())) as running:
        answer = httpx.post(running.url + CHAT, json=chat())
        assert answer.status_code == 400
        assert "messages need a chat template" in refusal(answer)["message"]
        assert httpx.post(running.url + COMPLETIONS, json=completion()).status_code == 200


# Safety ------------------------------------------------------------------------------------------


def test_a_key_is_asked_for_but_by_health(tiny: LLM) -> None:
    rules = Rules(api_key="geheim")
    with (
        serving(tiny, FakeEngine(tiny.require_tokenizer()), rules) as running,
        httpx.Client(base_url=running.url) as client,
    ):
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "geheim"}):
            answer = client.post(COMPLETIONS, json=completion(), headers=headers)
            assert answer.status_code == 401
            assert refusal(answer)["code"] == "invalid_api_key"
            for path in ("/v1/models", "/metrics", "/nothing", "/openapi.json"):
                assert client.get(path, headers=headers).status_code == 401
        right = {"authorization": "Bearer geheim"}
        assert client.post(COMPLETIONS, json=completion(), headers=right).status_code == 200
        assert client.get("/health").status_code == 200


def test_another_name_for_this_machine_is_refused(tiny: LLM) -> None:
    rules = Rules(hosts=("localhost", "127.0.0.1", "::1"))
    with serving(tiny, FakeEngine(tiny.require_tokenizer()), rules) as running:
        answer = httpx.get(running.url + "/v1/models", headers={"host": "evil.example"})
        assert (answer.status_code, refusal(answer)["code"]) == (403, "wrong_host")
        for name in ("localhost:8000", "[::1]:80", "127.0.0.1"):
            answer = httpx.get(running.url + "/v1/models", headers={"host": name})
            assert answer.status_code == 200


def test_other_pages_may_ask_when_they_are_named(tiny: LLM, client: httpx.Client) -> None:
    wanted = {"origin": "http://page.example", "access-control-request-method": "POST"}
    assert client.options(COMPLETIONS, headers=wanted).status_code == 405
    assert "access-control-allow-origin" not in client.get("/v1/models", headers=wanted).headers
    engine = FakeEngine(tiny.require_tokenizer())
    with serving(tiny, engine, cors_origins=("http://page.example",)) as running:
        answer = httpx.options(running.url + COMPLETIONS, headers=wanted)
        assert answer.headers["access-control-allow-origin"] == "http://page.example"
        other = {**wanted, "origin": "http://other.example"}
        answer = httpx.options(running.url + COMPLETIONS, headers=other)
        assert "access-control-allow-origin" not in answer.headers


def test_a_long_body_is_refused_announced_or_not(tiny: LLM) -> None:
    rules = Rules(max_body_bytes=10_000)
    with serving(tiny, FakeEngine(tiny.require_tokenizer()), rules) as running:
        url, kind = running.url + COMPLETIONS, {"content-type": "application/json"}
        for content in (b"x" * 200_000, iter([b"x" * 6000] * 20)):
            answer = httpx.post(url, content=content, headers=kind)
            assert (answer.status_code, refusal(answer)["code"]) == (413, "body_too_long")
        assert httpx.post(url, json=completion()).status_code == 200


def test_a_prompt_is_as_long_as_the_server_allows(tiny: LLM) -> None:
    engine = FakeEngine(tiny.require_tokenizer(), Limits(max_prompt_tokens=10))
    with serving(tiny, engine) as running:
        answer = httpx.post(running.url + COMPLETIONS, json=completion(prompt="the " * 11))
        assert refusal(answer)["code"] == "context_length_exceeded"
        answer = httpx.post(running.url + COMPLETIONS, json=completion(prompt="the " * 10))
        assert answer.status_code == 200


@pytest.mark.parametrize("path", ["/health", "/v1/models", "/metrics", "/nothing"])
def test_head_has_the_status_and_the_headers_of_get_and_no_body(
    client: httpx.Client, path: str
) -> None:
    """Load balancers look with HEAD, which was answered with 405."""
    head, get = client.head(path), client.get(path)
    assert head.status_code == get.status_code
    assert head.headers["content-type"] == get.headers["content-type"]
    assert head.content == b""
