"""Documents that questions are asked about: how they are tokenized, put into prompts, found there.

A document keeps its tokens in front of every question, so that what was computed of it is used
again; places of a prompt are told as characters of the text.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hybrid_kv.api.tokens import AskedMessages
from hybrid_kv.serve.http.schemas import ApiError
from hybrid_kv.serve.http.tokenizer import Encoder, Texts
from hybrid_kv.texts import PDF_HEAD, text_of_pdf_aside

_ANCHOR = 64
"""Tokens by which a document is found in a prompt."""
_MOST_BEFORE = 4096
"""Tokens that a chat template may write before a document."""
_MOST_ENCODED = 16


@dataclass(frozen=True, slots=True)
class Document:
    """A text and how it is taken apart by itself.

    ids: without special tokens. offsets: [(begin, end)] of each, in characters; empty where the
    tokenizer does not tell.
    """

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
        """Place of the text in a prompt, in tokens.

        The first tokens may differ, because a word joins with what stands before it.
        """
        for skipped in range(min(4, len(self.ids))):
            anchor = self.ids[skipped : skipped + _ANCHOR]
            last = min(len(prompt) - len(anchor), _MOST_BEFORE) + 1
            for start in range(max(0, last)):
                if prompt[start] == anchor[0] and list(prompt[start:][: len(anchor)]) == anchor:
                    return start - skipped
        return None


class DocumentEncoder:
    """Tokens of documents, the latest of which are kept, and of prompts that begin with one."""

    def __init__(self, texts: Texts) -> None:
        self._texts = texts
        self._kept: OrderedDict[str, Document] = OrderedDict()

    async def encode(self, ident: str, text: str) -> Document:
        """A text as a document.

        Args:
            ident: the same for the same text alone.
        """
        if ident not in self._kept:
            ids, offsets = await self._texts.encode_with_offsets(text)
            self._kept[ident] = Document(text, ids, offsets)
            while len(self._kept) > _MOST_ENCODED:
                self._kept.popitem(last=False)
        self._kept.move_to_end(ident)
        return self._kept[ident]

    async def before_question(self, text: str) -> tuple[int, ...]:
        """The tokens of a prompt that come out the same whatever is asked about a document."""
        if not self._texts.has_template:
            return await self._texts.encode(text)

        def encode(own: Encoder) -> tuple[int, ...]:
            assert own.template is not None
            asked = AskedMessages(own.template, [{"role": "user", "content": text}])
            return tuple(asked.before_question())

        return await self._texts.in_thread(encode)

    async def prompt(
        self, text: str, turns: Sequence[tuple[str, str]], question: str
    ) -> tuple[int, ...]:
        """A question about a document, after others and their answers.

        Without a chat template the question follows the document as it is, and turns are left out.

        Args:
            text: of the document; "" for none.
        """
        if not self._texts.has_template:
            if not text:
                return await self._texts.encode(question, "question")
            before = await self._texts.encode(text)
            return before + tuple(await self._texts.encode_more(f"\n\n{question}"))
        asked = [*(ask for ask, _ in turns), question]
        if text:
            asked[0] = f"{text}\n\n{asked[0]}"
        messages = []
        for ask, answer in zip(asked, [*(answer for _, answer in turns), None], strict=True):
            messages.append({"role": "user", "content": ask})
            if answer is not None:
                messages.append({"role": "assistant", "content": answer})
        return await self._texts.encode_chat(messages, "question")


def text_of(content: bytes) -> str:
    """The text of a file: UTF-8, or PDF, which takes another process and up to a minute.

    Raises:
        ApiError: it is neither, or has no text.
        ConfigError: it is a PDF that cannot be read.
    """
    if content.startswith(PDF_HEAD):
        text = text_of_pdf_aside(content, "document").replace("\0", "")
        if not text.strip():
            raise ApiError(
                400,
                "document has no text, as scanned pages have none; have its text recognised (OCR) "
                "and send that",
                "document",
                "empty_document",
            )
        return text
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise _unreadable(f"byte {error.start} that is none") from None
    if "\0" in text:
        raise _unreadable("bytes of zero in it")
    if not text.strip():
        raise ApiError(400, "document is empty; send some text", "document", "empty_document")
    return text


def _unreadable(got: str) -> ApiError:
    return ApiError(
        400,
        f"document must be text in UTF-8 or PDF, got {got}; convert it to text first",
        "document",
        "unreadable_document",
    )
