"""Chats whose last message waits for a question."""

from __future__ import annotations

from collections.abc import Sequence

from hybrid_kv.api.template import ChatTemplate, Message, common_length
from hybrid_kv.errors import ConfigError


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
