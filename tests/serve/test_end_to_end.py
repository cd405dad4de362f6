"""A server process with the shipped model: OpenAI's own client and the documentation ask it."""

from __future__ import annotations

import asyncio
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from hybrid_kv.api import LLM, load
from hybrid_kv.saved.registry import ContextRegistry
from tests.serve.processes import ServeProcess, needle_that_chats, serve_process

ROOT = Path(__file__).parents[2]
RECORDS = "the river. key 3f a0: 11 5c 9e 07. the hill. key 22 b1: 45 99 0a 3c. the snow. "
QUESTION = "? key 3f a0"
ANSWER = "11 5c 9e 07"
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 4}
BEFORE = {"model": "smollm2", "prompt": RECORDS * 40 + QUESTION, **GREEDY}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return needle_that_chats(tmp_path_factory.mktemp("needle"))


@dataclass(frozen=True)
class Before:
    """What a server that was killed had answered, and how it had been started."""

    words: tuple[object, ...]
    answer: dict[str, Any]


@pytest.fixture(scope="module")
def before(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Before:
    contexts = tmp_path_factory.mktemp("contexts")
    words: tuple[object, ...] = (folder, "--name", "smollm2", "--cache-dir", contexts)
    words += ("--set", "index_build=wait", "--max-prompt-tokens", "20k")
    with serve_process(*words) as killed:
        answer = httpx.post(killed.url + "/v1/completions", json=BEFORE, timeout=120).json()
        end = time.monotonic() + 60
        while not ContextRegistry(contexts).counters.added and time.monotonic() < end:
            time.sleep(0.05)
    return Before(words, answer)


@pytest.fixture(scope="module")
def running(before: Before) -> Iterator[ServeProcess]:
    """Goes on where one was killed."""
    with serve_process(*before.words) as running:
        yield running
        assert running.interrupt() == 130
        assert not any("Traceback" in line for line in running.lines), running.lines


@pytest.fixture(scope="module")
def alone(folder: Path) -> Iterator[LLM]:
    with load(folder, config={"index_build": "wait"}) as llm:
        yield llm


@pytest.fixture
def client(running: ServeProcess) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0, timeout=60)


def ended(running: ServeProcess) -> bool:
    """Whether nothing is in work."""
    end = time.monotonic() + 60
    while time.monotonic() < end:
        figures = httpx.get(running.url + "/metrics").text
        states = re.findall(r'hybrid_kv_requests\{state="\w+"\} (\S+)', figures)
        if set(states) == {"0.0"}:
            return True
        time.sleep(0.2)
    return False


# A server that was killed ------------------------------------------------------------------------


def test_a_killed_server_knows_its_contexts_again(before: Before, running: ServeProcess) -> None:
    again = httpx.post(running.url + "/v1/completions", json=BEFORE, timeout=120).json()
    usage = again["usage"]
    assert before.answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert usage["prompt_tokens_details"]["cached_tokens"] > 0.95 * usage["prompt_tokens"]
    assert again["choices"][0]["text"] == before.answer["choices"][0]["text"] == ANSWER


# With OpenAI's client ----------------------------------------------------------------------------


def test_chat(client: openai.OpenAI) -> None:
    messages: Any = [{"role": "user", "content": RECORDS + QUESTION}]
    answer = client.chat.completions.create(model="smollm2", messages=messages, **GREEDY)
    assert answer.choices[0].message.content == ANSWER
    assert answer.choices[0].finish_reason in ("length", "stop")
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 4


def test_streamed_chat_is_the_chat(client: openai.OpenAI) -> None:
    messages: Any = [{"role": "user", "content": RECORDS + QUESTION}]
    stream = client.chat.completions.create(
        model="smollm2",
        messages=messages,
        stream=True,
        stream_options={"include_usage": True},
        **GREEDY,
    )
    chunks = list(stream)
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 4
    texts = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(texts) == ANSWER
    assert len([text for text in texts if text]) >= 2


def test_completions_are_those_of_the_model_alone(client: openai.OpenAI, alone: LLM) -> None:
    prompt = RECORDS * 20 + QUESTION
    got = client.completions.create(model="smollm2", prompt=prompt, temperature=0, max_tokens=12)
    own = alone.generate(prompt, max_new_tokens=12, do_sample=False)
    assert got.choices[0].text == own.text
    again = client.completions.create(model="smollm2", prompt=prompt, temperature=0, max_tokens=12)
    assert again.choices[0].text == own.text
    assert again.usage is not None
    assert again.usage.prompt_tokens_details is not None
    assert (again.usage.prompt_tokens_details.cached_tokens or 0) > 100  # read once


def test_choices_seeds_and_log_probabilities(client: openai.OpenAI) -> None:
    asked: Any = {"model": "smollm2", "prompt": RECORDS, "max_tokens": 6, "seed": 3, "n": 3}
    one, other = (client.completions.create(**asked, temperature=1.5) for _ in range(2))
    assert [each.text for each in one.choices] == [each.text for each in other.choices]
    assert len({each.text for each in one.choices}) > 1
    got = client.completions.create(
        model="smollm2", prompt=RECORDS + QUESTION, logprobs=2, **GREEDY
    )
    logprobs = got.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens == ANSWER.split()
    assert logprobs.token_logprobs is not None
    assert all(value is not None and -1 < value <= 0 for value in logprobs.token_logprobs)
    assert logprobs.top_logprobs is not None
    assert all(len(top) == 2 for top in logprobs.top_logprobs)


def test_a_stop_ends_and_is_cut_off(client: openai.OpenAI) -> None:
    got = client.completions.create(
        model="smollm2", prompt=RECORDS + QUESTION, stop=["9e"], temperature=0, max_tokens=8
    )
    assert got.choices[0].finish_reason == "stop"
    assert got.choices[0].text.strip() == "11 5c"


def test_several_at_once_say_what_each_says_alone(running: ServeProcess, alone: LLM) -> None:
    prompts = [f"{RECORDS * (3 * number + 1)}{QUESTION}" for number in range(8)]

    async def everyone() -> list[str]:
        own = openai.AsyncOpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0)
        asked = (
            own.completions.create(model="smollm2", prompt=prompt, temperature=0, max_tokens=8)
            for prompt in prompts
        )
        answers = await asyncio.gather(*asked)
        await own.close()
        return [answer.choices[0].text for answer in answers]

    texts = asyncio.run(everyone())
    own = [alone.generate(prompt, max_new_tokens=8, do_sample=False).text for prompt in prompts]
    assert texts == own
    assert ended(running)


def test_extensions_report_what_was_read(client: openai.OpenAI) -> None:
    extra = {"hybrid_kv": {"method": "hybrid", "budget": "50%", "audit": 1, "places": True}}
    got: Any = client.completions.create(
        model="smollm2", prompt=RECORDS * 30 + QUESTION, extra_body=extra, **GREEDY
    )
    report = got.choices[0].hybrid_kv
    assert got.choices[0].text == ANSWER
    assert report["attended_per_token"] > 0
    assert report["ended_by"] == "length"
    assert report["places"]
    assert all(0 <= place["position"] < got.usage.prompt_tokens for place in report["places"])


def test_errors_are_those_of_the_client(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="model must be 'smollm2'"):
        client.completions.create(model="gpt-4", prompt="the")
    with pytest.raises(openai.BadRequestError, match="'best_of' is not served") as caught:
        client.completions.create(model="smollm2", prompt="the", best_of=2)
    assert caught.value.param == "best_of"
    with pytest.raises(openai.BadRequestError, match="a prompt must be at most 20,480") as caught:
        client.completions.create(model="smollm2", prompt="the " * 20_481)
    assert caught.value.code == "context_length_exceeded"


def test_a_client_that_leaves_ends_its_request(
    client: openai.OpenAI, running: ServeProcess
) -> None:
    stream = client.completions.create(
        model="smollm2", prompt=RECORDS, max_tokens=8000, temperature=1.0, stream=True
    )
    next(iter(stream))
    stream.close()
    assert ended(running)


# The documentation -------------------------------------------------------------------------------


def blocks() -> list[tuple[str, str]]:
    """Language and code of each block of docs/serve.md that this model can answer."""
    text = (ROOT / "docs/serve.md").read_text()
    found = re.findall(r"^```(\w+)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [
        block for block in found if "tools=" not in block[1]
    ]  # by tests/serve/test_structure.py


def test_the_documentation_has_examples() -> None:
    assert [language for language, _ in blocks()] == [*["bash"] * 3, *["python"] * 2, "bash"]


@pytest.mark.parametrize("number", range(6))
def test_an_example_of_the_documentation_runs(running: ServeProcess, number: int) -> None:
    language, code = blocks()[number]
    assert "http://127.0.0.1:8000" in code
    code = code.replace("http://127.0.0.1:8000", running.url)
    command = ["bash", "-ec", code] if language == "bash" else [sys.executable, "-c", code]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip()
    assert '"error"' not in run.stdout


# The process -------------------------------------------------------------------------------------


def test_ctrl_c_ends_within_five_seconds_and_says_which(running: ServeProcess) -> None:
    """The last one: the server is gone then."""
    # So long that it goes on when the signal comes, on a fast machine too.
    body = {"model": "smollm2", "stream": True, "prompt": RECORDS * 200, "max_tokens": 8000}
    body["temperature"] = 1.5
    began = threading.Event()

    def ask() -> None:
        url = running.url + "/v1/completions"
        with httpx.stream("POST", url, json=body, timeout=60) as stream:
            for _ in stream.iter_lines():
                began.set()

    thread = threading.Thread(target=ask)
    thread.start()
    assert began.wait(60)
    begin = time.monotonic()
    running.process.send_signal(signal.SIGINT)

    def ended() -> list[str]:  # the line of the request's log may stand behind it
        return [line for line in running.lines if line.startswith("ended")]

    while not ended() and time.monotonic() - begin < 60:
        time.sleep(0.05)
    assert running.process.wait(60) == 130
    thread.join(60)
    said = r"ended; of the requests in work (finished|cancelled) 1 \(cmpl-\w+\)"
    assert [line for line in ended() if re.fullmatch(said, line)], running.lines
