"""The documents of the page with what was asked about them, in memory or in a folder.

All who may ask share them. In a folder they outlive the server, and several servers may use it:

    FOLDER/
      <32 hex digits>.txt      the text
      <32 hex digits>.jsonl    facts, then a line for each question with its answer

A line is added in a single write, so that two who ask at once lose nothing, and one that a killed
server has left half is passed over.
"""

from __future__ import annotations

import json
import logging
import os
import re
import time
from collections import OrderedDict
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any, TypeAlias

from hybrid_kv.errors import ConfigError
from hybrid_kv.serve.http.schemas import ApiError

MAX_DOCUMENTS = 16
MAX_CHARACTERS = 64 * 2**20
"""Of all documents together; those that were used least recently give way."""

NO_DOCUMENT = "none"
"""Ident of the conversation without one."""

Json: TypeAlias = dict[str, Any]

_NAME = re.compile(r"[0-9a-f]{32}\.jsonl")

log = logging.getLogger("hybrid_kv.serve")


@dataclass(slots=True)
class KeptDocument:
    """A document, and its conversation.

    tokens: by model. added: seconds since 1970. turns: question, answer and what the page shows
    beside it, oldest first. stamp: of the file that was read; None in memory.
    """

    ident: str
    name: str
    text: str
    tokens: dict[str, int] = field(default_factory=dict)
    added: float = field(default_factory=time.time)
    turns: list[Json] = field(default_factory=list)
    stamp: tuple[int, int] | None = None

    @property
    def answered(self) -> list[tuple[str, str]]:
        """Questions with answers that came to their end."""
        return [(turn["question"], turn["answer"]) for turn in self.turns if turn.get("done")]

    def facts(self, model: str) -> Json:
        """As the list of the page has it; tokens are null until this model has read it."""
        return {
            "document": self.ident,
            "name": self.name,
            "tokens": self.tokens.get(model),
            "characters": len(self.text),
            "added": self.added,
            "questions": len(self.turns),
        }


class Library:
    """The documents that were used latest.

    Args:
        folder: made where it is not there; None keeps all in memory.

    Raises:
        ConfigError: the folder cannot be used.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder
        self._kept: OrderedDict[str, KeptDocument] = OrderedDict()
        self._free = KeptDocument(NO_DOCUMENT, "Without a document", "")
        if folder is not None:
            try:
                folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            except OSError as error:
                raise ConfigError(
                    f"folder '{folder}' of documents cannot be made: {error.strerror}; choose "
                    "another --cache-dir"
                ) from None
            self._refresh()

    # What is there ------------------------------------------------------------------------------

    def all(self) -> list[KeptDocument]:
        """The latest used first."""
        self._refresh()
        return list(reversed(self._kept.values()))

    def get(self, ident: str | None) -> KeptDocument:
        """A document that was added, or the conversation without one.

        Raises:
            ApiError: it is not here, or no longer.
        """
        self._refresh()
        if ident is None or ident == NO_DOCUMENT:
            return self._free
        if ident not in self._kept:
            raise ApiError(
                404,
                "document is not on the server, or no longer; send it again",
                "document",
                "document_not_found",
            )
        self._kept.move_to_end(ident)
        return self._kept[ident]

    def _refresh(self) -> None:
        """Takes in what other servers have left in the folder, and lets go what they removed."""
        if self._folder is None:
            return
        found: dict[str, tuple[int, int]] = {}
        for path in self._folder.iterdir():
            if _NAME.fullmatch(path.name) or path.name == f"{NO_DOCUMENT}.jsonl":
                try:
                    stat = path.stat()
                except FileNotFoundError:
                    continue
                found[path.stem] = (stat.st_mtime_ns, stat.st_size)
        for ident in self._kept.keys() - found.keys():
            del self._kept[ident]
        if NO_DOCUMENT not in found:
            self._free.turns.clear()
        for ident, stamp in sorted(found.items(), key=lambda one: one[1]):
            known = self._free if ident == NO_DOCUMENT else self._kept.get(ident)
            if known is None or known.stamp != stamp:
                self._take(ident, stamp)

    def _take(self, ident: str, stamp: tuple[int, int]) -> None:
        try:
            lines = _lines(self._path(ident, "jsonl").read_text("utf-8", errors="replace"))
            if ident == NO_DOCUMENT:
                self._free.turns, self._free.stamp = lines[1:], stamp
                return
            text = self._path(ident, "txt").read_bytes().decode()  # line ends as they are
            name, added = str(lines[0]["name"]), float(lines[0]["added"])
            tokens = {str(model): int(count) for model, count in lines[0]["tokens"].items()}
        except FileNotFoundError:
            return  # another server removes it just now
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            if ident not in self._kept:
                log.warning("document '%s' cannot be read and is left out: %s", ident, error)
            return
        self._kept[ident] = KeptDocument(ident, name, text, tokens, added, lines[1:], stamp)

    # What changes -------------------------------------------------------------------------------

    def add(self, text: str, name: str) -> KeptDocument:
        """Keeps a text; one that is there already stays as it is, with its conversation.

        Raises:
            ApiError: the folder takes it not.
        """
        self._refresh()
        ident = ident_of(text)
        if ident not in self._kept:
            document = KeptDocument(ident, name, text)
            if self._folder is not None:
                self._written(document, with_text=True)
            self._kept[ident] = document
        self._kept.move_to_end(ident)
        while len(self._kept) > 1 and (
            len(self._kept) > MAX_DOCUMENTS
            or sum(len(one.text) for one in self._kept.values()) > MAX_CHARACTERS
        ):
            self.remove(next(iter(self._kept.values())))
        return self._kept[ident]

    def counted(self, document: KeptDocument, model: str, tokens: int) -> None:
        """Notes how many tokens a document is to a model.

        Raises:
            ApiError: the folder takes it not.
        """
        if document.tokens.get(model) != tokens:
            document.tokens[model] = tokens
            if self._folder is not None:
                self._written(document)

    def answer(self, ident: str, turn: Json) -> str | None:
        """Adds a question with its answer to a conversation; a sentence where it is not kept."""
        self._refresh()
        document = self._free if ident == NO_DOCUMENT else self._kept.get(ident)
        if document is None:
            return "the document was removed meanwhile, and this answer is not kept"
        document.turns.append(turn)
        if self._folder is None:
            return None
        path = self._path(ident, "jsonl")
        try:
            if path.exists():  # it grows: the next look reads it again, with answers of others
                with path.open("ab", buffering=0) as file:
                    file.write(_line(turn))
            else:
                self._written(document)
        except (OSError, ApiError) as error:
            log.warning("an answer cannot be kept in '%s': %s", path, error)
            return "this answer is not kept: the server's folder cannot be written to"
        return None

    def clear(self, document: KeptDocument) -> None:
        """Forgets what was asked about a document.

        Raises:
            ApiError: the folder takes it not.
        """
        document.turns.clear()
        if self._folder is not None:
            self._written(document)

    def remove(self, document: KeptDocument) -> None:
        """Forgets a document and what was asked about it."""
        self._kept.pop(document.ident, None)
        if self._folder is not None:
            for kind in ("jsonl", "txt"):
                self._path(document.ident, kind).unlink(missing_ok=True)

    def _written(self, document: KeptDocument, *, with_text: bool = False) -> None:
        """Writes the files of a document, each of which is whole or as it was before."""
        head = {"name": document.name, "added": document.added, "tokens": document.tokens}
        lines = b"".join(map(_line, [head, *document.turns]))
        try:
            if with_text:
                self._put(document.ident, "txt", document.text.encode())
            self._put(document.ident, "jsonl", lines)
            self._stamp(document)
        except OSError as error:
            raise ApiError(
                507,
                f"document cannot be kept in the server's folder: {error.strerror}; free space or "
                "remove others",
                "document",
                "no_space",
            ) from None

    def _put(self, ident: str, kind: str, content: bytes) -> None:
        path = self._path(ident, kind)
        beside = path.with_suffix(f".{os.getpid()}.part")
        with open(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(content)
        os.replace(beside, path)

    def _stamp(self, document: KeptDocument) -> None:
        stat = self._path(document.ident, "jsonl").stat()
        document.stamp = (stat.st_mtime_ns, stat.st_size)

    def _path(self, ident: str, kind: str) -> Path:
        assert self._folder is not None
        return self._folder / f"{ident}.{kind}"


def ident_of(text: str) -> str:
    """32 hex digits, the same for the same text."""
    return sha256(text.encode()).hexdigest()[:32]


def _line(content: Json) -> bytes:
    """One of a file; it begins on a new one whatever was left half before it."""
    return f"\n{json.dumps(content, ensure_ascii=False, allow_nan=False)}\n".encode()


def _lines(text: str) -> list[Json]:
    """All that are whole; the first has the facts."""
    found = []
    for line in text.split("\n"):
        try:
            content = json.loads(line)
        except ValueError:
            continue  # empty, or half of one
        if isinstance(content, dict):
            found.append(content)
    return found
