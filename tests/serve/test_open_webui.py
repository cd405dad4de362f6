"""The requests of Open WebUI, as its public source (0.10 to 0.12) builds them."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.serve.fake_engine import FakeEngine
from tests.serve.test_http import CHAT, MESSAGES, events

LATER = [*MESSAGES, {"role": "assistant", "content": "the hill"}, *MESSAGES]
TASK: dict[str, Any] = {"model": "tiny", "messages": MESSAGES, "stream": False}


def test_the_model_is_found(client: httpx.Client) -> None:
    listed = client.get("/v1/models", headers={"authorization": "Bearer secret"}).json()["data"]
    assert [model["id"] for model in listed] == ["tiny"]


@pytest.mark.parametrize("more", [{}, {"tools": []}, {"messages": LATER}])
def test_a_chat_is_streamed(client: httpx.Client, more: dict[str, Any]) -> None:
    asked = {"model": "tiny", "messages": MESSAGES, "stream": True, **more}
    options = {"stream_options": {"include_usage": True}}
    answer = client.post(CHAT, json={**asked, **options})
    assert answer.status_code == 200, answer.text
    *chunks, usage, done = events(answer.text)
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
    assert usage["usage"]["completion_tokens"] > 0
    assert done == "[DONE]"


@pytest.mark.parametrize("more", [{"max_completion_tokens": 1000}, {}])
def test_titles_tags_and_follow_ups_come_whole(client: httpx.Client, more: dict[str, Any]) -> None:
    answer = client.post(CHAT, json={**TASK, **more})
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["message"]["content"]


@pytest.mark.parametrize("stream", [False, True])
def test_tools_of_its_own_are_told_to_the_model(
    client: httpx.Client, engine: FakeEngine, stream: bool
) -> None:
    about = {"name": "get_current_timestamp", "parameters": {"type": "object", "properties": {}}}
    asked = {**TASK, "tools": [{"type": "function", "function": about}], "stream": stream}
    answer = client.post(CHAT, json=asked)
    assert answer.status_code == 200, answer.text
    plain = client.post(CHAT, json=TASK)
    assert plain.status_code == 200
    assert len(engine.seen[0].ids) > len(engine.seen[1].ids)


def test_what_a_tool_has_answered_is_taken(client: httpx.Client, engine: FakeEngine) -> None:
    call = {"id": "call_1", "index": 0, "type": "function"}
    call["function"] = {"name": "get_current_timestamp", "arguments": "{}"}
    later = [
        *MESSAGES,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "the hill"},
    ]
    assert client.post(CHAT, json={**TASK, "messages": later}).status_code == 200
    assert len(engine.seen[0].ids) > 10
