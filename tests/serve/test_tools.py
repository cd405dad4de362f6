"""Calls of tools read out of an answer's text, and tools put into words."""

from __future__ import annotations

import json
from typing import Any

import pytest

from hybrid_kv.serve.http.chat import CallReader, in_plain_words

WEATHER: dict[str, Any] = {
    "name": "weather",
    "parameters": {
        "type": "object",
        "properties": {"place": {"type": "string"}, "days": {"type": "integer"}},
    },
}
TIME: dict[str, Any] = {"name": "time", "parameters": {"type": "object", "properties": {}}}
JSON_CALL = '{"name": "weather", "arguments": {"place": "Rome {it}", "days": 2}}'
TAGGED = (
    "<function=weather>\n<parameter=place>\n42\n</parameter>\n<parameter=days>\n2\n</parameter>\n"
    "</function>"
)


def read(text: str, size: int) -> tuple[str, list[tuple[str, Any]]]:
    """What is shown of a text that comes in pieces, and the calls."""
    reader, shown = CallReader([WEATHER, TIME]), ""
    for begin in range(0, len(text), size):
        shown += reader.add(text[begin : begin + size])
    shown += reader.close()
    functions = [call["function"] for call in reader.calls]
    assert len({call["id"] for call in reader.calls}) == len(functions)
    return shown, [(each["name"], json.loads(each["arguments"])) for each in functions]


ROME = ("weather", {"place": "Rome {it}", "days": 2})
NOW: tuple[str, Any] = ("time", {})


@pytest.mark.parametrize("size", [1, 3, 7, 1000])
@pytest.mark.parametrize(
    ("text", "shown", "calls"),
    [
        ("Hello, 3 < 4.", "Hello, 3 < 4.", []),
        (f"<tool_call>\n{JSON_CALL}\n</tool_call>", "", [ROME]),
        (f"Let me look. \n<tool_call>{JSON_CALL}</tool_call>\n", "Let me look.", [ROME]),
        (
            f'<tool_call>\n{JSON_CALL}\n</tool_call>\n<tool_call>{{"name": "time"}}</tool_call>',
            "",
            [ROME, NOW],
        ),
        (f"<tool_call>{JSON_CALL}", "", [ROME]),  # a special token ended it
        (f"\n{JSON_CALL}", "", [ROME]),
        (f'[{JSON_CALL}, {{"name": "time", "arguments": {{}}}}]', "", [ROME, NOW]),
        (JSON_CALL.replace("arguments", "parameters"), "", [ROME]),
        (f'{JSON_CALL}; {{"name": "time", "parameters": {{}}}}', "", [ROME, NOW]),
        ('{"name": "time", "arguments": "{}"}', "", [NOW]),
        (f"<tool_call>\n{TAGGED}\n</tool_call>", "", [("weather", {"place": "42", "days": 2})]),
        # What is no call is shown.
        ('{"name": "fly", "arguments": {}}', '{"name": "fly", "arguments": {}}', []),
        ('{"days": 2}', '{"days": 2}', []),
        ("[1] says", "[1] says", []),
        ("<tool_call>nonsense</tool_call> so", "<tool_call>nonsense</tool_call> so", []),
        ("<tool_call>", "<tool_call>", []),
        ("a <tool", "a <tool", []),
        ('{"name": "time", "arguments": NaN}', '{"name": "time", "arguments": NaN}', []),
        ('{"name": "time", "arguments": [1]}', '{"name": "time", "arguments": [1]}', []),
        ("[" * 5000, "[" * 5000, []),
        ("", "", []),
        ("  \n", "  \n", []),
    ],
)
def test_calls_are_read_however_the_text_comes(
    text: str, shown: str, calls: list[tuple[str, Any]], size: int
) -> None:
    assert read(text, size) == (shown, calls)


def test_text_that_is_no_call_is_not_held_back() -> None:
    reader = CallReader([TIME])
    assert [reader.add(piece) for piece in ("Well", ", it", " is <", "b> late")] == [
        "Well",
        ", it",
        " is",
        " <b> late",
    ]


def test_a_template_without_tools_gets_them_as_text() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "time", "arguments": {}}}
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "When?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "noon", "tool_call_id": "1"},
    ]
    system, asked, called, answered = in_plain_words(messages, [TIME])
    assert system["content"].startswith("Be brief.\n\n")
    assert json.dumps(TIME) in system["content"]
    assert '{"name": "NAME", "arguments": {}}' in system["content"]
    assert asked == messages[1]
    assert called["content"].startswith('<tool_call>\n{"name": "time"')
    assert answered == {"role": "user", "content": "<tool_response>\nnoon\n</tool_response>"}
    assert [each["role"] for each in in_plain_words(messages[1:2], [TIME])] == ["system", "user"]
    assert in_plain_words(messages[1:2], []) == messages[1:2]
