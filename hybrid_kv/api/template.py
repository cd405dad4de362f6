"""A model's chat template: from messages to the tokens that the model was trained to answer."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from hashlib import sha256
from typing import Any, Final

from transformers import PreTrainedTokenizerBase

from hybrid_kv.errors import ConfigError, said
from hybrid_kv.models.checkpoint import reason

NO_TEMPLATE: Final = "none"

_MARKS = range(0x10F000, 0x10FFFE)
"""Characters that mean nothing by definition (Unicode's last private plane)."""

Message = Mapping[str, Any]


def is_chat(prompt: Any) -> bool:
    """Whether a prompt is a list of messages (or a single one, which `checked` refuses)."""
    if isinstance(prompt, Mapping):
        return "input_ids" not in prompt
    listed = isinstance(prompt, Sequence) and not isinstance(prompt, str)
    return listed and len(prompt) > 0 and isinstance(prompt[0], Mapping)


def checked(messages: object) -> list[Message]:
    """The messages as a list.

    Raises:
        ConfigError: they are no list of mappings with text under "role" and "content".
    """
    if not isinstance(messages, Sequence):
        raise ConfigError(
            'messages must be a list like [{"role": "user", "content": "..."}], got '
            f"{said(messages)}; put it into a list"
        )
    for number, message in enumerate(messages, 1):
        for key in ("role", "content"):
            value = message.get(key) if isinstance(message, Mapping) else None
            if not isinstance(value, str):
                raise ConfigError(
                    f'message {number} must have text under "role" and "content", got '
                    f'{said(value)} under "{key}"; write it like '
                    '{"role": "user", "content": "..."}'
                )
    return list(messages)


class ChatTemplate:
    """Renders messages as the tokenizer says.

    Special tokens that stand in a message's content are text, not tokens: nobody ends a turn by
    typing `<|im_end|>`.

    name: the first digits of the template's SHA-256; for reports.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self.name = sha256(str(tokenizer.get_chat_template()).encode()).hexdigest()[:12]

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase | None) -> ChatTemplate | None:
        """The tokenizer's template; None where there is none.

        Raises:
            ConfigError: it has several, and none of them is the default.
        """
        if tokenizer is None or not tokenizer.chat_template:
            return None
        try:
            return cls(tokenizer)
        except ValueError as error:
            raise ConfigError(
                f"the tokenizer's chat template cannot be chosen: {reason(error)}; set "
                "tokenizer.chat_template to one of them"
            ) from error

    def encode(
        self, messages: Sequence[Message], check: Callable[[str], None] = lambda _: None
    ) -> list[int]:
        """Token ids of the messages and of what begins the answer.

        A last message of the assistant is left open: the answer continues it.

        Args:
            check: called with the rendered text before it is encoded, to raise what it likes;
                special tokens in contents are one character each there.

        Raises:
            ConfigError: the template refuses the messages; the message says why.
        """
        marks = self._marks(messages)
        hidden = [{**message, "content": _hide(message["content"], marks)} for message in messages]
        opened = messages[-1]["role"] == "assistant"
        text = self._render(hidden, add_generation_prompt=not opened, continue_final_message=opened)
        check(text)
        return [token for part in self._encoded_parts(text, marks) for token in part]

    def end_ids(self) -> list[int]:
        """The special token that ends an answer, if the template writes one: [] or one id.

        Not every model's configuration lists it among the tokens that end generation.
        """
        mark = chr(_MARKS[-1])
        talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": mark}]
        rest = self._render(talk).rpartition(mark)[2].lstrip()
        first = self._encode(rest)[:1]
        return [token for token in first if token in self._special()]

    def _render(self, messages: Sequence[Message], **how: bool) -> str:
        tokenizer: Any = self._tokenizer
        try:
            return str(tokenizer.apply_chat_template(messages, tokenize=False, **how))
        except Exception as error:  # whatever a template does: it is a program
            roles = ", ".join(message["role"] for message in messages)
            raise ConfigError(
                f"the chat template refuses messages of {roles}: {reason(error)}; leave out what "
                "it refuses, or do without the template (raw)"
            ) from error

    def _marks(self, messages: Sequence[Message]) -> dict[str, str]:
        """A meaningless character for each special token that stands in a content."""
        written = "".join(message["content"] for message in messages)
        free = (chr(code) for code in _MARKS if chr(code) not in written)
        words = [str(token) for token in self._special().values()]
        # The longest first, or "<s>" would be found inside "<<s>>".
        typed = sorted({word for word in words if word in written}, key=len, reverse=True)
        return dict(zip(free, typed, strict=False))

    def _special(self) -> dict[int, str]:
        added = self._tokenizer.added_tokens_decoder
        named = zip(
            self._tokenizer.all_special_ids, self._tokenizer.all_special_tokens, strict=True
        )
        return {**{idx: str(t) for idx, t in added.items() if t.special}, **dict(named)}

    def _encoded_parts(self, text: str, marks: dict[str, str]) -> Iterator[list[int]]:
        pieces = re.split(f"([{''.join(marks)}])", text) if marks else [text]
        for piece in filter(None, pieces):
            if piece in marks:
                yield self._encode(marks[piece], split_special_tokens=True)
            else:
                yield self._encode(piece)

    def _encode(self, text: str, **how: bool) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False, **how)["input_ids"])


def _hide(content: str, marks: dict[str, str]) -> str:
    for mark, word in marks.items():
        content = content.replace(word, mark)
    return content


def common_length(first: Sequence[int], second: Sequence[int]) -> int:
    """Number of tokens with which two sequences begin alike."""
    pairs = zip(first, second, strict=False)
    shorter = min(len(first), len(second))
    return next((idx for idx, (one, other) in enumerate(pairs) if one != other), shorter)
