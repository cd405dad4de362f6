"""Answers that keep to a schema, a grammar or a call, and draws with penalties and biases.

The model is random and its tokens are bytes: what fits does so by the grammar alone.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import httpx
import openai
import pytest
import torch
from pydantic import BaseModel
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as Decoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from hybrid_kv.api import LLM
from hybrid_kv.config import HybridConfig
from hybrid_kv.errors import ConfigError
from hybrid_kv.serve import Engine, Request, Sampling
from hybrid_kv.serve.grammars import GrammarReader, GrammarText
from hybrid_kv.serve.http.chat import CallForm
from hybrid_kv.serve.output import Sampler
from tests.serve.running import Running, serving
from tests.serve.test_http import CHAT, COMPLETIONS, events

END, TOOL_CALL = "<|end|>", "<tool_call>"
HERMES = (
    "{% if tools %}<tools>{% for t in tools %}{{ t | tojson }}{% endfor %}</tools> "
    '<tool_call>{"name"}</tool_call>{% endif %}'
    "{% for m in messages %}{{ m.role }}: {{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
LLAMA = HERMES.replace('<tool_call>{"name"}</tool_call>', '{"name", "parameters": dictionary}')
MISTRAL = HERMES.replace('<tool_call>{"name"}</tool_call>', "[TOOL_CALLS]")
NO_TOOLS = re.sub(r"{% if tools %}.*?{% endif %}", "", HERMES, count=1)

SCHEMA = {
    "type": "object",
    "properties": {
        "size": {"enum": ["small", "large"]},
        "count": {"type": "integer", "minimum": 0, "maximum": 99},
        "near": {"type": "array", "items": {"$ref": "#/$defs/place"}, "minItems": 1, "maxItems": 2},
    },
    "required": ["size", "count", "near"],
    "additionalProperties": False,
    "$defs": {"place": {"enum": ["hill", "river"]}},
}
ORDER = {"type": "function", "function": {"name": "order", "parameters": SCHEMA}}
STOP = {"type": "function", "function": {"name": "stop"}}


def byte_tokenizer(*added: str) -> PreTrainedTokenizerFast:
    """A token for each byte, for `:` with a space, for an end and for what is added."""
    letters = sorted(ByteLevel.alphabet())
    vocab = {letter: number for number, letter in enumerate([*letters, ":Ġ"])}
    tokenizer = Tokenizer(BPE(vocab, [(":", "Ġ")]))
    tokenizer.pre_tokenizer, tokenizer.decoder = ByteLevel(add_prefix_space=False), Decoder()
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END)
    made.add_tokens(list(added))
    return made


def byte_llm(template: str = HERMES, *added: str) -> LLM:
    tokenizer = byte_tokenizer(*added)
    tokenizer.chat_template = template
    config = LlamaConfig(
        **{"vocab_size": len(tokenizer) + 3, "hidden_size": 48, "intermediate_size": 64},
        **{"num_hidden_layers": 2, "num_attention_heads": 6, "num_key_value_heads": 2},
        **{"max_position_embeddings": 2048, "initializer_range": 0.3},
        **{"eos_token_id": tokenizer.eos_token_id, "bos_token_id": None},
    )
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = LlamaForCausalLM(config).eval()
    return LLM(model, tokenizer, config=HybridConfig(index_build="wait"))


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with byte_llm() as llm, Engine(llm) as engine, serving(llm, engine) as running:
        yield running


@pytest.fixture(scope="module")
def fast() -> PreTrainedTokenizerFast:
    return byte_tokenizer()


def post(server: Running, path: str = CHAT, **more: Any) -> Any:
    """A choice of the answer, streamed or not."""
    asked: dict[str, Any] = {"model": "tiny", "max_tokens": 200, "temperature": 1, "seed": 1}
    about = {"messages": [{"role": "user", "content": "Go."}]} if path == CHAT else {"prompt": "Go"}
    answer = httpx.post(server.url + path, json={**asked, **about, **more}, timeout=120)
    assert answer.status_code == 200, answer.text
    if not more.get("stream"):
        return answer.json()["choices"][0]
    choices = [each["choices"][0] for each in events(answer.text)[:-1]]
    message: dict[str, Any] = {"content": "", "tool_calls": []}
    for delta in (each["delta"] for each in choices):
        message["content"] += delta.get("content") or ""
        message["tool_calls"] += delta.get("tool_calls", [])
    return {"message": message, "finish_reason": choices[-1]["finish_reason"]}


def refused(server: Running, **more: Any) -> str:
    asked = {"model": "tiny", "messages": [{"role": "user", "content": "Go."}], **more}
    answer = httpx.post(server.url + CHAT, json=asked, timeout=120)
    assert answer.status_code == 400, answer.text
    return str(answer.json()["error"]["message"])


def fits(text: str) -> bool:
    """Whether a text is an object of SCHEMA, in its order."""
    got = json.loads(text)
    return (
        list(got) == ["size", "count", "near"]
        and got["size"] in ("small", "large")
        and got["count"] in range(100)
        and len(got["near"]) in (1, 2)
        and set(got["near"]) <= {"hill", "river"}
    )


BY_SCHEMA = {"type": "json_schema", "json_schema": {"name": "order", "schema": SCHEMA}}


@pytest.mark.parametrize("more", [{}, {"stream": True}, {"temperature": 0}])
def test_an_answer_keeps_to_a_schema(server: Running, more: dict[str, Any]) -> None:
    choice = post(server, response_format=BY_SCHEMA, **more)
    assert fits(choice["message"]["content"])
    assert choice["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("structure", "pattern"),
    [
        ({"regex": r"[a-f]{3}-\d"}, r"[a-f]{3}-\d"),
        ({"choice": ["oak", 'el"m', "ash\n"]}, 'oak|el"m|ash\n'),
        ({"grammar": 'start: "<" w ">"\nw: /[xyz]{1,5}/'}, "<[xyz]{1,5}>"),
        ({"json": json.dumps({"enum": ["é", 2]})}, '"é"|2'),
    ],
)
def test_an_answer_keeps_to_what_vllm_has_words_for(
    server: Running, structure: dict[str, Any], pattern: str
) -> None:
    for seed in range(3):
        choice = post(server, COMPLETIONS, structured_outputs=structure, seed=seed)
        assert re.fullmatch(pattern, choice["text"]), choice
        assert choice["finish_reason"] == "stop"


def test_any_object_is_one(server: Running) -> None:
    choice = post(server, response_format={"type": "json_object"}, max_tokens=900)
    text = choice["message"]["content"]
    assert text.startswith("{")
    if choice["finish_reason"] == "stop":
        assert isinstance(json.loads(text), dict)


def test_an_answer_that_is_cut_off_says_so(server: Running) -> None:
    choice = post(server, response_format=BY_SCHEMA, max_tokens=9)
    assert choice["finish_reason"] == "length"
    assert choice["message"]["content"].startswith('{"size": ')


def test_answers_that_share_steps_keep_to_their_own(server: Running) -> None:
    patterns = [r"a{20}\d", r"[bc]{25}", r"x(yz){11}"]
    with ThreadPoolExecutor(4) as threads:
        asked = [
            threads.submit(post, server, COMPLETIONS, structured_outputs={"regex": each}, n=2)
            for each in patterns
        ]
        free = threads.submit(post, server, COMPLETIONS, max_tokens=30)
        for pattern, answer in zip(patterns, asked, strict=True):
            assert re.fullmatch(pattern, answer.result()["text"])
        assert free.result()["finish_reason"] in ("stop", "length")


@pytest.mark.parametrize("temperature", [0, 1])
def test_an_exact_answer_is_that_of_full_attention(server: Running, temperature: float) -> None:
    kept = {"response_format": BY_SCHEMA, "temperature": temperature, "frequency_penalty": 0.5}
    small = {"method": "hybrid", "set": {"window_tokens": 16, "sink_tokens": 16, "top_k": 1}}
    ask = {"messages": [{"role": "user", "content": "The river and the hill. " * 30}]}
    exact = post(server, hybrid_kv={"exact": True, **small}, **kept, **ask)
    full = post(server, hybrid_kv={"method": "full"}, **kept, **ask)
    assert fits(exact["message"]["content"])
    assert exact["message"] == full["message"]
    assert exact["hybrid_kv"]["exact"]["passes"] > 0


# Calls ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("template", "added"),
    [
        (HERMES, ()),
        (HERMES, (TOOL_CALL, "</tool_call>")),
        (LLAMA, ()),
        (MISTRAL, ()),
        (NO_TOOLS, ()),
        (NO_TOOLS, (TOOL_CALL,)),
    ],
)
def test_a_call_that_must_come_keeps_to_the_schema(template: str, added: tuple[str, ...]) -> None:
    with byte_llm(template, *added) as llm, Engine(llm) as engine, serving(llm, engine) as server:
        for more in (
            {"tool_choice": {"type": "function", "function": {"name": "order"}}},
            {"tool_choice": "required", "parallel_tool_calls": False},
            {"tool_choice": "required", "stream": True, "parallel_tool_calls": False},
        ):
            choice = post(server, tools=[ORDER, STOP], **more)
            (call,) = choice["message"]["tool_calls"]
            assert choice["finish_reason"] == "tool_calls"
            assert not choice["message"]["content"]
            assert call["type"] == "function"
            arguments, name = call["function"]["arguments"], call["function"]["name"]
            assert fits(arguments) if name == "order" else name == "stop"


def test_several_calls_may_come(server: Running) -> None:
    found = [
        post(server, tools=[STOP], tool_choice="required", seed=seed)["message"]["tool_calls"]
        for seed in range(4)
    ]
    assert max(map(len, found)) > 1
    assert {call["function"]["name"] for calls in found for call in calls} == {"stop"}


@pytest.mark.parametrize("added", [(TOOL_CALL,), (TOOL_CALL, "</tool_call>"), ()])
def test_strict_calls_keep_to_their_schema_where_they_come(added: tuple[str, ...]) -> None:
    strict = {"type": "function", "function": {**ORDER["function"], "strict": True}}
    first = byte_tokenizer(*added)(TOOL_CALL)["input_ids"]
    # Where the beginning is several tokens, biases lead through it.
    bias = {str(token): 100 - 2 * place for place, token in enumerate(dict.fromkeys(first))}
    asked = {"tools": [strict], "logit_bias": bias, "frequency_penalty": 2, "temperature": 0}
    with byte_llm(HERMES, *added) as llm, Engine(llm) as engine, serving(llm, engine) as server:
        choice = post(server, **asked, max_tokens=300)
        if added:
            assert choice["message"]["tool_calls"]
        for call in choice["message"].get("tool_calls", []):
            assert fits(call["function"]["arguments"])
        assert post(server, tools=[strict], max_tokens=20)["message"]["content"]
    with byte_llm(LLAMA) as llm, Engine(llm) as engine, serving(llm, engine) as other:
        assert "'tool_choice': 'required'" in refused(other, tools=[strict])


def first_id(text: str) -> int:
    return int(byte_tokenizer()(text)["input_ids"][0])


def test_without_a_call_the_answer_is_text(server: Running) -> None:
    choice = post(server, tools=[ORDER], max_tokens=20)
    assert choice["message"]["content"]
    assert "tool_calls" not in choice["message"]
    none = post(server, tools=[ORDER], tool_choice="none", max_tokens=20)
    assert none["message"] == post(server, max_tokens=20)["message"]


def test_a_description_ends_no_turn(server: Running) -> None:
    """Special tokens in what tools are told to be, and in what they answer, are text."""
    texts = server.service.texts
    described = [{**STOP, "function": {**STOP["function"], "description": END}}]
    call = {"id": "1", "type": "function", "function": {"name": "stop", "arguments": {"a": END}}}
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": END, "tool_call_id": "1"},
    ]

    async def ids() -> tuple[int, ...]:
        return await texts.encode_chat(messages, None, described)

    with ThreadPoolExecutor(1) as thread:
        found = thread.submit(asyncio.run, ids()).result()
    assert list(found).count(first_id(END)) == len(messages)


class Order(BaseModel):
    """What OpenAI's client asks for by a class."""

    size: Literal["small", "large"]
    near: Literal["hill", "river"] | None


def test_openais_client_parses_answers_and_calls(server: Running) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120)
    messages: Any = [{"role": "user", "content": "Go."}]
    asked: Any = {"model": "tiny", "messages": messages, "max_tokens": 200, "seed": 5}
    parsed = client.chat.completions.parse(**asked, response_format=Order).choices[0].message
    assert isinstance(parsed.parsed, Order)
    tools: Any = [openai.pydantic_function_tool(Order, name="order")]
    must: Any = {"tool_choice": "required", "parallel_tool_calls": False}
    called = client.chat.completions.parse(**asked, tools=tools, **must)
    calls = called.choices[0].message.tool_calls or []
    assert all(isinstance(call.function.parsed_arguments, Order) for call in calls)
    assert calls
    answered = {"role": "tool", "tool_call_id": calls[0].id, "content": "done"}
    later: Any = {**asked, "messages": [*messages, called.choices[0].message, answered]}
    with client.chat.completions.stream(**later, tools=tools) as stream:
        assert stream.get_final_completion().choices[0].finish_reason in ("stop", "length")


def test_responses_are_those_of_a_chat(server: Running) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120)
    greedy: Any = {"model": "tiny", "temperature": 0}
    messages: Any = [{"role": "system", "content": "Be."}, {"role": "user", "content": "Go."}]
    chat = client.chat.completions.create(**greedy, messages=messages, max_tokens=30)
    asked: Any = {**greedy, "instructions": "Be.", "input": "Go.", "max_output_tokens": 30}
    response = client.responses.create(**asked)
    assert response.output_text == chat.choices[0].message.content
    assert response.status == "incomplete"
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.usage is not None
    assert response.usage.total_tokens == (chat.usage and chat.usage.total_tokens)
    streamed: Any = list(client.responses.create(**asked, stream=True))
    kinds = [event.type for event in streamed]
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert kinds[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ]
    assert streamed[-1].response.output_text == response.output_text
    later = client.responses.create(**{**asked, "input": [*messages, *response.output]})
    assert later.status in ("incomplete", "completed")


@pytest.mark.parametrize("stream", [False, True])
def test_responses_hold_calls_and_schemas(server: Running, stream: bool) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120)
    asked: Any = {"model": "tiny", "input": "Go.", "max_output_tokens": 300}
    with client.responses.stream(**asked, text_format=Order) as parsing:
        assert isinstance(parsing.get_final_response().output_parsed, Order)
    order: Any = {"type": "function", "name": "order", "parameters": SCHEMA}
    must: Any = {"tool_choice": {"type": "function", "name": "order"}, "tools": [order]}

    def response(**more: Any) -> Any:
        if not stream:
            return client.responses.create(**more)
        events = list(client.responses.create(**more, stream=True))
        assert [event.sequence_number for event in events] == list(range(len(events)))
        return events[-1].response  # type: ignore[union-attr]

    called = response(**asked, **must)
    (call,) = called.output
    assert (call.type, call.name, called.status) == ("function_call", "order", "completed")
    assert fits(call.arguments)
    done = {"type": "function_call_output", "call_id": call.call_id, "output": "done"}
    answered = response(**{**asked, "input": [{"role": "user", "content": "Go."}, call, done]})
    assert answered.output[0].type == "message"
    form: Any = {"format": {"type": "json_schema", "name": "order", "schema": SCHEMA}}
    assert fits(response(**asked, text=form).output_text)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"previous_response_id": "resp_1"}, "'previous_response_id' is not served"),
        ({"input": [{"role": "robot", "content": "x"}]}, "input"),
        ({"tool_choice": "required"}, "tool_choice 'required' needs tools"),
        ({"text": {"format": {"type": "json_schema"}}}, "json_schema belongs to type"),
        ({"max_output_tokens": 0}, "max_output_tokens: input should be"),
        ({"tols": []}, "did you mean 'tools'"),
    ],
)
def test_a_wrong_response_is_refused(server: Running, more: dict[str, Any], said: str) -> None:
    asked = {"model": "tiny", "input": "Go.", **more}
    answer = httpx.post(f"{server.url}/v1/responses", json=asked, timeout=60)
    assert answer.status_code == 400, answer.text
    assert said in answer.json()["error"]["message"]


def test_the_example_of_the_documentation_runs(
    server: Running, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (Path(__file__).parents[2] / "docs/serve.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    (code,) = [block for block in blocks if "tools=" in block]
    code = code.replace("http://127.0.0.1:8000", server.url).replace("smollm2", "tiny")
    exec(code.replace("temperature=0", "seed=1, max_tokens=900"), {})
    assert "name='weather'" in capsys.readouterr().out


# Refusals ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"response_format": {**BY_SCHEMA, "json_schema": {"schema": {"type": "no"}}}}, "JSON sch"),
        ({"structured_outputs": {"json": "{"}}, "JSON schema cannot be kept to"),
        ({"structured_outputs": {"regex": "(("}}, "regular expression cannot be kept to"),
        ({"structured_outputs": {"grammar": "start: foo"}}, 'unknown name: "foo"'),
        ({"structured_outputs": {"choice": []}}, "at least 1, got 0"),
        ({"response_format": BY_SCHEMA, "min_tokens": 5}, "min_tokens must be 0 beside a schema"),
        ({"tools": [{**ORDER, "function": {"name": "x", "parameters": {"type": 3}}}],
          "tool_choice": "required"}, "cannot be kept to"),
    ],
)  # fmt: skip
def test_what_cannot_be_kept_to_is_refused(
    server: Running, more: dict[str, Any], said: str
) -> None:
    message = refused(server, **more)
    assert said in message
    assert "\n" not in message


def test_a_tokenizer_of_words_is_refused(tiny: LLM) -> None:
    with pytest.raises(ConfigError, match=r"need a tokenizer of bytes .* ask without$"):
        GrammarReader(tiny.require_tokenizer(), 512, [2])
    endless = byte_tokenizer()
    endless.eos_token = None
    with pytest.raises(ConfigError, match=r"need a token that ends them"):
        GrammarReader(endless, 300, [])


# Grammars ---------------------------------------------------------------------------------------


def test_tokens_may_be_taken_back(fast: PreTrainedTokenizerFast) -> None:
    reader = GrammarReader(fast, len(fast), [int(fast.eos_token_id)])
    text = GrammarText("regex", "(ab|ac)d{0,2}")
    kept = reader.read(text)
    ids = {letter: first_id(letter) for letter in "abcd"}
    for answer in ("", "a", "ac", "ab", "abd", "a", "acdd", "", "abd"):
        fresh, tokens = reader.read(text), [ids[letter] for letter in answer]
        assert torch.equal(kept.allowed(tokens), fresh.allowed(tokens)), answer
        assert kept.is_complete(tokens) == fresh.is_complete(tokens) == (answer == "acdd")
    other = kept.copy()
    assert other.allowed([]).nonzero().flatten().tolist() == [ids["a"]]


# Draws ------------------------------------------------------------------------------------------


def drawn(logits: torch.Tensor, ids: list[int], prompt: int, **sampling: Any) -> int:
    """The likeliest token after a prompt and an answer."""
    request = Request(
        tuple(ids[:prompt]), 9, Sampling(temperature=0, **sampling), end_ids=(int(logits.argmax()),)
    )
    return Sampler(request, logits.device).choose(logits, ids).id


def test_penalties_and_biases_move_logits_by_what_they_say() -> None:
    logits = torch.tensor([2.0, 1.9, 1.0, -1.0, 0.0])
    said = [4, 0, 0, 1]  # prompt of one token
    assert drawn(logits, said, 1) == 0
    assert drawn(logits, said, 1, frequency_penalty=0.09) == 0  # 1.82 > 1.81
    assert drawn(logits, said, 1, frequency_penalty=0.11) == 1  # 1.78 < 1.79
    assert drawn(logits, said, 1, presence_penalty=0.5) == 0  # both lose as much
    assert drawn(logits, said, 1, presence_penalty=1.5) == 2
    assert drawn(logits, said, 4, frequency_penalty=2.0) == 0  # a prompt's are not counted
    assert drawn(logits, said, 4, repetition_penalty=2.5) == 2  # a prompt's count here
    below = torch.tensor([-1.0, -2.0])
    assert drawn(below, [0], 1, repetition_penalty=1.9) == 0  # -1.9, for below 0 it multiplies
    assert drawn(below, [0], 1, repetition_penalty=2.1) == 1
    assert drawn(logits, said, 1, logit_bias=((3, 3.5), (0, -0.2))) == 3
    assert drawn(logits, said, 1, min_tokens=3) == 0
    assert drawn(logits, said, 1, min_tokens=4) == 1


def test_log_probabilities_are_those_of_the_model() -> None:
    logits = torch.tensor([2.0, 1.9, 1.0])
    sampling = Sampling(temperature=0, logprobs=1, logit_bias=((2, 50.0),))
    choice = Sampler(Request((0,), 1, sampling), logits.device).choose(logits, [0])
    assert choice.id == 2
    assert choice.logprob == pytest.approx(float(logits.log_softmax(-1)[2]))


def test_unlikely_tokens_are_left_out() -> None:
    logits = torch.tensor([0.5, 0.29, 0.21]).log()
    for min_p, most in ((0.0, 2), (0.5, 1), (0.6, 0)):
        request = Request((0,), 1, Sampling(min_p=min_p, seed=0))
        sampler = Sampler(request, logits.device)
        assert max(sampler.choose(logits, [0]).id for _ in range(200)) == most


def test_stop_tokens_end_an_answer_and_ends_can_be_ignored(server: Running) -> None:
    always = {"logit_bias": {str(first_id(END)): 100}, "max_tokens": 5}
    assert post(server, COMPLETIONS, **always)["finish_reason"] == "stop"
    assert post(server, COMPLETIONS, **always, ignore_eos=True)["finish_reason"] == "length"
    letter = {"logit_bias": {str(first_id("q")): 100}, "max_tokens": 5}
    assert post(server, COMPLETIONS, **letter)["text"] == "qqqqq"
    stopped = post(server, COMPLETIONS, **letter, stop_token_ids=[first_id("q")])
    assert stopped["finish_reason"] == "stop"


@pytest.mark.parametrize("added", [(TOOL_CALL,), (TOOL_CALL, "</tool_call>"), ()])
def test_a_call_within_a_text_keeps_to_its_schema(added: tuple[str, ...]) -> None:
    fast = byte_tokenizer(*added)
    form = CallForm.of(HERMES, takes_tools=True, added=fast.get_added_vocab())
    functions = [ORDER["function"], {**STOP["function"], "parameters": {"type": "object"}}]
    grammar = GrammarReader(fast, len(fast), [int(fast.eos_token_id)]).read(form.offered(functions))

    def allowed(text: str) -> set[str]:
        kept = grammar.allowed(fast(text)["input_ids"]).nonzero().flatten()
        return {str(fast.decode([token])) for token in kept.tolist()}

    assert len(allowed("Well, 3 < 4")) > 100  # any byte
    begun = 'Hm. <tool_call>\n{"name": '
    assert allowed(f'{begun}"') == {"o", "s"}
    sized = f'{begun}"order", "arguments": {{"size": "'
    assert allowed(sized) == {"s", "l"}
    whole = f'{sized}small", "count": 7, "near": ["hill"]}}}}\n</tool_call>'
    assert len(allowed(whole)) > 100
    assert END in allowed(whole)
    assert END not in allowed(sized)
