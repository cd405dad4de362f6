"""Between text and tokens: messages by a chat template, ids that were given, and decoded text."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from hashlib import sha256
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hybrid_kv.errors import ConfigError, said
from hybrid_kv.models.checkpoint import reason

NO_TEMPLATE: Final = "none"

_MARKS = range(0x10F000, 0x10FFFE)
"""Characters that mean nothing by definition (Unicode's last private plane)."""

_PROBE = "hybrid_kv_probe"
"""Name of a tool that nobody has."""

Message = Mapping[str, Any]
Ids: TypeAlias = Sequence[int] | npt.NDArray[np.int64]


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

    Special tokens that stand in a message's content, or in a tool's description, are text, not
    tokens: nobody ends a turn by typing `<|im_end|>`.

    text: the template. name: the first digits of its SHA-256; for reports.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer, self.text = tokenizer, str(tokenizer.get_chat_template())
        self.name = sha256(self.text.encode()).hexdigest()[:12]

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
        self,
        messages: Sequence[Message],
        check: Callable[[str], None] = lambda _: None,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> list[int]:
        """Token ids of the messages and of what begins the answer.

        A last message of the assistant is left open: the answer continues it.

        Args:
            check: called with the rendered text before it is encoded, to raise what it likes;
                special tokens in contents are one character each there.
            tools: functions that the answer may call, if the template `takes_tools`.

        Raises:
            ConfigError: the template refuses the messages; the message says why.
        """
        marks = self._marks([messages, tools])
        hidden, described = _hide(messages, marks), _hide(tools, marks)
        opened = messages[-1]["role"] == "assistant" and not messages[-1].get("tool_calls")
        how = {"add_generation_prompt": not opened, "continue_final_message": opened}
        text = self._render(hidden, **how, **({"tools": described} if tools else {}))
        check(text)
        return [token for part in self._encoded_parts(text, marks) for token in part]

    def takes_tools(self) -> bool:
        """Whether tools that are given stand in the text."""
        tool = {"name": _PROBE, "description": "", "parameters": {"type": "object"}}
        talk = [{"role": "user", "content": "a"}]
        try:
            return _PROBE in self._render(talk, tools=[{"type": "function", "function": tool}])
        except ConfigError:
            return False

    def end_ids(self) -> list[int]:
        """The special token that ends an answer, if the template writes one: [] or one id.

        Not every model's configuration lists it among the tokens that end generation.
        """
        mark = chr(_MARKS[-1])
        talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": mark}]
        rest = self._render(talk).rpartition(mark)[2].lstrip()
        first = self._encode(rest)[:1]
        return [token for token in first if token in self._special()]

    def _render(self, messages: Sequence[Message], **how: Any) -> str:
        tokenizer: Any = self._tokenizer
        try:
            return str(tokenizer.apply_chat_template(messages, tokenize=False, **how))
        except Exception as error:  # whatever a template does: it is a program
            roles = ", ".join(message["role"] for message in messages)
            raise ConfigError(
                f"the chat template refuses messages of {roles}: {reason(error)}; leave out what "
                "it refuses, or do without the template (raw)"
            ) from error

    def _marks(self, given: Any) -> dict[str, str]:
        """A meaningless character for each special token that stands in a text given."""
        written = "".join(_texts(given))
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


def _texts(given: Any) -> Iterator[str]:
    """All texts in lists and mappings."""
    if isinstance(given, str):
        yield given
    elif isinstance(given, Mapping):
        for name, value in given.items():
            yield from (str(name), *_texts(value))
    elif isinstance(given, Sequence):
        for value in given:
            yield from _texts(value)


def _hide(given: Any, marks: dict[str, str]) -> Any:
    """The same with marks for words in all texts."""
    if isinstance(given, Mapping):
        return {_hide(name, marks): _hide(value, marks) for name, value in given.items()}
    if isinstance(given, str):
        for mark, word in marks.items():
            given = given.replace(word, mark)
        return given
    if isinstance(given, Sequence):
        return [_hide(value, marks) for value in given]
    return given


class AskedMessages:
    """Messages of which the last is to end with a question that is not known yet.

    The question follows the text in the same message: a message of its own would be a second one of
    the user in a row, which many templates refuse and few models know. Behind an answer it is a
    message of its own.
    """

    def __init__(self, template: ChatTemplate, messages: list[Message]) -> None:
        if messages[-1]["role"] not in ("user", "assistant"):
            raise ConfigError(
                "the last message of a context must be the user's, because questions follow in it, "
                f"got one of {messages[-1]['role']}; put the text there"
            )
        self.template, self.messages = template, messages

    def before_question(self) -> list[int]:
        """The tokens that come out the same whatever is asked."""
        # What follows the text may change how its last word is taken apart, so neither this ending
        # nor that one is kept. An answer that nothing follows would be one to be continued.
        is_answer = self.messages[-1]["role"] == "assistant"
        ended = self._followed_by("") if is_answer else self.messages
        asked = self.with_question("a")
        return asked[: common_length(asked, self.template.encode(ended))]

    def with_question(self, question: str) -> list[int]:
        """All tokens up to where the answer begins."""
        return self.template.encode(self._followed_by(f"\n\n{question}", question))

    def with_text(self, text: str) -> AskedMessages:
        """More of the text."""
        return AskedMessages(self.template, self._followed_by(text))

    def with_messages(self, messages: Sequence[Message]) -> AskedMessages:
        """Further messages."""
        return AskedMessages(self.template, [*self.messages, *messages])

    def with_answer(self, question: str, answer: str) -> AskedMessages:
        """A question and what came of it."""
        asked = self._followed_by(f"\n\n{question}", question)
        return AskedMessages(self.template, [*asked, {"role": "assistant", "content": answer}])

    def _followed_by(self, more: str, alone: str | None = None) -> list[Message]:
        """With more in the user's last message, or `alone` in a new one behind an answer."""
        last = self.messages[-1]
        if last["role"] == "user":
            return [*self.messages[:-1], {**last, "content": f"{last['content']}{more}"}]
        return [*self.messages, {"role": "user", "content": more if alone is None else alone}]


# Ids ---------------------------------------------------------------------------------------------


def token_ids(prompt: object, model: PreTrainedModel, what: str = "prompt") -> Tensor:
    """Token ids [1, tokens] of int64, from a sequence of whole numbers or a tensor.

    Raises:
        ConfigError: they are none, or none of the model's.
    """
    ids = _whole_numbers(prompt, what)
    ids = ids[None] if ids.ndim == 1 else ids
    if ids.ndim != 2:
        raise ConfigError(f"{what} must be [tokens] or [1, tokens], got shape {list(ids.shape)}")
    if ids.shape[0] != 1 and ids.numel():
        raise ConfigError(
            f"{what} must be one sequence of token ids, got {ids.shape[0]} rows; for a batch "
            "call model.generate() inside hybrid_kv.attach(model)"
        )
    if ids.numel() == 0:
        raise ConfigError(f"{what} is empty; pass at least one token")
    size: int = model.get_input_embeddings().weight.shape[0]  # type: ignore[assignment, index]
    if int(ids.min()) < 0 or int(ids.max()) >= size:
        raise ConfigError(
            f"token ids must be 0..{size - 1}, got {int(ids.min())}..{int(ids.max())}; take the "
            "model's own tokenizer"
        )
    return ids.long()


def _whole_numbers(prompt: object, what: str) -> Tensor:
    expected = f"{what} must be text, token ids or a tensor of them, got"
    if isinstance(prompt, Mapping) or hasattr(prompt, "input_ids"):
        raise ConfigError(f"{expected} {said(prompt)}; pass its 'input_ids'")
    if isinstance(prompt, (bytes, bytearray)):
        raise ConfigError(f"{expected} {said(prompt)}; decode it")
    if prompt is None or isinstance(prompt, (bool, int, float)):
        raise ConfigError(f"{expected} {said(prompt)}; pass a list of whole numbers")
    try:
        ids = torch.as_tensor(prompt)
    except (TypeError, ValueError, RuntimeError):
        raise ConfigError(
            f"{expected} {said(prompt)} of something else; pass one prompt at a time"
        ) from None
    whole = not (ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool)
    if ids.numel() and not whole:
        raise ConfigError(f"{expected} {ids.dtype}; pass whole numbers")
    return ids


def decode_text(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> str:
    """Text of one sequence, without special tokens."""
    return str(tokenizer.decode(ids, skip_special_tokens=True))


def common_length(first: Ids, second: Ids) -> int:
    """Number of tokens with which two sequences begin alike."""
    count = min(len(first), len(second))
    differ = np.flatnonzero(np.asarray(first[:count]) != np.asarray(second[:count]))
    return int(differ[0]) if len(differ) else count
