"""Documents that the page asks about: kept in memory, found again in a prompt."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

from hybrid_kv.api.asked_messages import AskedMessages
from hybrid_kv.serve.http.errors import ApiError
from hybrid_kv.serve.http.tokenizer import Encoder, Texts

MAX_DOCUMENTS = 16
MAX_CHARACTERS = 64 * 2**20
"""Of all documents together; the oldest give way."""

_ANCHOR = 64
"""Tokens by which a document is found in a prompt."""


@dataclass(frozen=True, slots=True)
class Document:
    """A text and how it is taken apart by itself.

    ids: without special tokens. offsets: [(begin, end)] of each, in characters; empty where the
    tokenizer does not tell.
    """

    ident: str
    text: str
    ids: list[int]
    offsets: list[tuple[int, int]]

    def spans(
        self, prompt: Sequence[int], places: Sequence[tuple[int, float]]
    ) -> list[dict[str, Any]]:
        """Places of a prompt as characters of the text; those outside of it are left out."""
        start = self._start_in(prompt)
        if start is None or not self.offsets:
            return []
        found = []
        for position, weight in places:
            at = position - start
            if 0 <= at < len(self.ids) and prompt[position] == self.ids[at]:
                begin, end = self.offsets[at]
                found.append({"begin": begin, "end": end, "weight": weight})
        return found

    def _start_in(self, prompt: Sequence[int]) -> int | None:
        """Where in a prompt the text begins, in tokens.

        The first tokens may differ, because a word joins with what stands before it.
        """
        for skipped in range(min(4, len(self.ids))):
            anchor = self.ids[skipped : skipped + _ANCHOR]
            last = min(len(prompt) - len(anchor), _MOST_BEFORE) + 1
            for start in range(max(0, last)):
                if prompt[start] == anchor[0] and list(prompt[start:][: len(anchor)]) == anchor:
                    return start - skipped
        return None


_MOST_BEFORE = 4096
"""Tokens that a chat template may write before a document."""


class Documents:
    """The latest documents, by a name that their content gives."""

    def __init__(self, texts: Texts) -> None:
        self._texts = texts
        self._kept: OrderedDict[str, Document] = OrderedDict()

    async def add(self, content: bytes) -> Document:
        """Keeps a text.

        Raises:
            ApiError: it is none, or empty.
        """
        text = _decoded(content)
        ident = sha256(text.encode()).hexdigest()[:32]
        if ident not in self._kept:
            ids, offsets = await self._texts.encode_with_offsets(text)
            self._kept[ident] = Document(ident, text, ids, offsets)
        self._kept.move_to_end(ident)
        while len(self._kept) > MAX_DOCUMENTS or self._characters > MAX_CHARACTERS:
            self._kept.popitem(last=False)
            if len(self._kept) == 1:
                break
        return self._kept[ident]

    def get(self, ident: str) -> Document:
        """A document that was added.

        Raises:
            ApiError: it is not here, or no longer.
        """
        if ident not in self._kept:
            raise ApiError(
                404,
                "document is not on the server, or no longer; send it again",
                "document",
                "document_not_found",
            )
        self._kept.move_to_end(ident)
        return self._kept[ident]

    @property
    def _characters(self) -> int:
        return sum(len(document.text) for document in self._kept.values())

    async def before_question(self, document: Document) -> tuple[int, ...]:
        """The tokens of a prompt that come out the same whatever is asked about a document."""
        if not self._texts.has_template:
            return await self._texts.encode(document.text)

        def encode(own: Encoder) -> tuple[int, ...]:
            assert own.template is not None
            asked = AskedMessages(own.template, [{"role": "user", "content": document.text}])
            return tuple(asked.before_question())

        return await self._texts.in_thread(encode)

    async def prompt(
        self, document: Document | None, turns: Sequence[tuple[str, str]], question: str
    ) -> tuple[int, ...]:
        """A question about a document, after others and their answers.

        Without a chat template the question follows the document as it is, and turns are left out.
        """
        if not self._texts.has_template:
            if document is None:
                return await self._texts.encode(question, "question")
            before = await self._texts.encode(document.text)
            return before + tuple(await self._texts.encode_more(f"\n\n{question}"))
        asked = [*(ask for ask, _ in turns), question]
        if document is not None:
            asked[0] = f"{document.text}\n\n{asked[0]}"
        messages = []
        for ask, answer in zip(asked, [*(answer for _, answer in turns), None], strict=True):
            messages.append({"role": "user", "content": ask})
            if answer is not None:
                messages.append({"role": "assistant", "content": answer})
        return await self._texts.encode_chat(messages, "question")


def _decoded(content: bytes) -> str:
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        kind = "a PDF" if content.startswith(b"%PDF-") else f"byte {error.start} that is none"
        raise ApiError(
            400,
            f"document must be text in UTF-8, got {kind}; convert it to text first",
            "document",
            "unreadable_document",
        ) from None
    if "\0" in text:
        raise ApiError(
            400,
            "document must be text, got bytes of zero in it; convert it to text first",
            "document",
            "unreadable_document",
        )
    if not text.strip():
        raise ApiError(400, "document is empty; send some text", "document", "empty_document")
    return text
