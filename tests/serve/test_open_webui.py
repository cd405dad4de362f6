"""The requests of Open WebUI, as its public source (0.10 to 0.12) builds them."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.serve.test_http import CHAT, MESSAGES, events, refusal

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


def test_tools_of_its_own_are_refused_by_name(client: httpx.Client) -> None:
    """They cannot be served; docs/serve.md says how to switch them off."""
    about = {"name": "get_current_timestamp", "parameters": {"type": "object", "properties": {}}}
    answer = client.post(CHAT, json={**TASK, "tools": [{"type": "function", "function": about}]})
    assert answer.status_code == 400
    assert refusal(answer)["param"] == "tools"
    assert "'tools' is not served here" in refusal(answer)["message"]
