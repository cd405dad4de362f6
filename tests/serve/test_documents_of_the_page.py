"""Documents and answers of the page: every tab and the next server find them again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from hybrid_kv import texts
from hybrid_kv.api import LLM
from hybrid_kv.errors import ConfigError
from hybrid_kv.serve.http import library
from hybrid_kv.serve.http.library import NO_DOCUMENT, Library, ident_of
from hybrid_kv.serve.http.schemas import ApiError
from tests.cli.test_context import pdf_of
from tests.serve.fake_engine import FakeEngine
from tests.serve.running import serving

UPLOAD = "/hybrid_kv/documents"
KIND = {"content-type": "application/octet-stream"}
TURN = {"question": "? key", "answer": "11", "asked": 1.5, "done": {"places": []}, "problem": None}
FREE = {**TURN, "question": "free"}


def send(client: httpx.Client, content: str | bytes, name: str = "a book") -> Any:
    content = content.encode() if isinstance(content, str) else content
    return client.post(UPLOAD, content=content, headers=KIND, params={"name": name})


# In memory and in a folder -----------------------------------------------------------------------


@pytest.fixture(params=[True, False], ids=["folder", "memory"])
def books(request: pytest.FixtureRequest, tmp_path: Path) -> Library:
    return Library(tmp_path / "deep" / "documents" if request.param else None)


def test_answers_belong_to_their_document(books: Library) -> None:
    one, other = books.add("the river", "one"), books.add("the hill", "other")
    assert books.answer(one.ident, TURN) is None
    assert books.answer(NO_DOCUMENT, FREE) is None
    assert [document.name for document in books.all()] == ["other", "one"]
    assert books.get(one.ident).turns == [TURN]
    assert books.get(one.ident).answered == [("? key", "11")]
    assert books.get(other.ident).turns == []
    assert books.get(None).turns == books.get(NO_DOCUMENT).turns == [FREE]
    assert books.add("the river", "again").name == "one"
    books.clear(books.get(one.ident))
    assert books.get(one.ident).turns == []
    books.remove(other)
    with pytest.raises(ApiError, match="not on the server"):
        books.get(other.ident)
    assert "removed meanwhile" in str(books.answer(other.ident, TURN))
    assert books.get(None).turns == [FREE]


def test_those_used_least_recently_give_way(
    books: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library, "MAX_CHARACTERS", 25)
    first, second = books.add("0123456789", "first"), books.add("abcdefghij", "second")
    books.get(first.ident)
    books.add("ABCDEFGHIJ", "third")
    assert [document.name for document in books.all()] == ["third", "first"]
    books.add("x" * 30, "alone")
    assert [document.name for document in books.all()] == ["alone"]
    assert second.ident not in {document.ident for document in books.all()}


def test_only_answers_that_ended_are_asked_about_again(books: Library) -> None:
    document = books.add("the river", "one")
    books.answer(document.ident, {**TURN, "done": None, "problem": "stopped"})
    assert len(books.get(document.ident).turns) == 1
    assert books.get(document.ident).answered == []


def test_another_server_finds_all(tmp_path: Path) -> None:
    text = "the river\r\nthe hill \U0001d11e"
    books = Library(tmp_path)
    document = books.add(text, "one")
    books.counted(document, "tiny", 5)
    books.answer(document.ident, TURN)
    books.answer(NO_DOCUMENT, FREE)
    for path in tmp_path.iterdir():
        assert path.stat().st_mode & 0o077 == 0, "for its owner alone"
    (found,) = Library(tmp_path).all()
    assert (found.text, found.turns, found.ident) == (text, [TURN], ident_of(text))
    assert found.facts("tiny") | {"added": 0} == {
        "document": found.ident,
        "name": "one",
        "tokens": 5,
        "characters": len(text),
        "added": 0,
        "questions": 1,
    }
    assert found.facts("another")["tokens"] is None
    assert Library(tmp_path).get(None).turns == [FREE]


def test_two_servers_lose_no_answer_of_each_other(tmp_path: Path) -> None:
    one, other = Library(tmp_path), Library(tmp_path)
    ident = one.add("the river", "one").ident
    assert other.get(ident).turns == []
    for number in range(5):
        for each in (one, other):
            each.answer(ident, {**TURN, "answer": f"{number}"})
    assert len(one.get(ident).turns) == len(other.get(ident).turns) == 10
    other.clear(other.get(ident))
    assert one.get(ident).turns == []
    other.remove(other.get(ident))
    assert one.all() == []


def test_a_line_that_was_left_half_costs_that_answer_alone(tmp_path: Path) -> None:
    books = Library(tmp_path)
    ident = books.add("the river", "one").ident
    books.answer(ident, TURN)
    path = tmp_path / f"{ident}.jsonl"
    path.write_bytes(path.read_bytes() + b'\n{"question": "hal')
    again = Library(tmp_path)
    again.answer(ident, {**TURN, "answer": "later"})
    assert [turn["answer"] for turn in Library(tmp_path).get(ident).turns] == ["11", "later"]


@pytest.mark.parametrize("content", [b"", b"[]", b'{"name": 1}', b'{"name": "a", "added": "x"}'])
def test_what_is_no_document_is_left_out(tmp_path: Path, content: bytes) -> None:
    (tmp_path / f"{'a' * 32}.jsonl").write_bytes(content)
    (tmp_path / f"{'a' * 32}.txt").write_bytes(b"the river")
    (tmp_path / "notes.txt").write_bytes(b"of somebody else")
    assert Library(tmp_path).all() == []


def test_an_answer_that_the_folder_takes_not_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    books = Library(tmp_path)
    ident = books.add("the river", "one").ident

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "open", full)
    assert "cannot be written to" in str(books.answer(ident, TURN))
    monkeypatch.setattr(library.os, "open", full)
    with pytest.raises(ApiError, match="No space left on device; free space") as refused:
        books.add("the hill", "other")
    assert refused.value.status == 507


def test_a_folder_that_is_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="documents cannot be made"):
        Library(tmp_path / "file" / "documents")


# Over HTTP ---------------------------------------------------------------------------------------


def test_a_server_that_comes_after_has_documents_and_answers(tiny: LLM, tmp_path: Path) -> None:
    engine = FakeEngine(tiny.require_tokenizer())
    with serving(tiny, engine, documents_folder=tmp_path) as running:
        first = httpx.Client(base_url=running.url, timeout=30)
        document = send(first, "the river. the hill.", " my \n book ").json()
        asked = {"document": document["document"], "question": "? key", "max_tokens": 3}
        assert first.post("/hybrid_kv/ask", json=asked).status_code == 200
        first.close()
    with serving(tiny, engine, documents_folder=tmp_path) as running:
        later = httpx.Client(base_url=running.url, timeout=30)
        assert later.get("/hybrid_kv/info").json()["kept"] is True
        (listed,) = later.get(UPLOAD).json()["documents"]
        assert listed == {**document, "questions": 1}
        found = later.get(f"{UPLOAD}/{document['document']}").json()
        assert (found["name"], found["text"]) == ("my book", "the river. the hill.")
        (turn,) = found["turns"]
        assert turn["question"] == "? key"
        assert turn["answer"]
        assert turn["done"]["completion_tokens"] == 3
        later.post("/hybrid_kv/ask", json={**asked, "question": "later"})
        before, now = engine.seen
        assert now.ids[: len(before.ids)] == before.ids, "the first question stays in the prompt"
        later.close()


def test_what_was_said_until_its_reader_left_is_kept(
    client: httpx.Client, engine: FakeEngine
) -> None:
    client.post("/hybrid_kv/clear", json={"document": NO_DOCUMENT})
    engine.pace_s = 0.05
    asked = {"question": "the river", "max_tokens": 200}
    with client.stream("POST", "/hybrid_kv/ask", json=asked) as stream:
        for line in stream.iter_lines():
            if line == "event: token":
                break
    engine.drain(5)
    (turn,) = client.get(f"{UPLOAD}/{NO_DOCUMENT}").json()["turns"]
    assert (turn["done"], turn["problem"]) == (None, "stopped")
    assert turn["answer"]


def test_a_pdf_is_its_text(client: httpx.Client) -> None:
    found = send(client, pdf_of("the lake."), "lake.pdf").json()
    assert client.get(f"{UPLOAD}/{found['document']}").json()["text"].strip() == "the lake."


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (pdf_of(""), "document has no text, as scanned pages have none; have its text recognised"),
        (pdf_of("the river")[:200], "document must be PDF, got one that is damaged, locked or of"),
        (b"%PDF-1.7 \xff", "document must be PDF, got one that is damaged, locked or of"),
        (b"\xff\xfe\x00", "document must be text in UTF-8 or PDF, got byte 0 that is none"),
    ],
)
def test_a_file_without_text_is_refused_in_a_sentence(
    client: httpx.Client, content: bytes, sentence: str
) -> None:
    answer = send(client, content)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith(sentence)


@pytest.mark.parametrize(
    ("limit", "value", "sentence"),
    [
        ("PDF_SECONDS", 0.001, "read within 0.001 seconds, got one that takes longer"),
        ("PDF_BYTES", 2**24, "can be read in 16 MiB, got one that ended its reader"),
    ],
)
def test_a_pdf_takes_no_more_than_it_may(
    monkeypatch: pytest.MonkeyPatch, limit: str, value: float, sentence: str
) -> None:
    monkeypatch.setattr(texts, limit, value)
    with pytest.raises(ConfigError, match=sentence):
        texts.text_of_pdf_aside(pdf_of("the lake."), "document")


def test_a_document_that_leaves_no_room_is_refused_and_not_kept(
    client: httpx.Client, tiny: LLM
) -> None:
    longest = tiny.model.config.max_position_embeddings
    answer = send(client, "the river. " * longest)
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "context_length_exceeded"
    assert "a document must be at most" in answer.json()["error"]["message"]
    names = [each["name"] for each in client.get(UPLOAD).json()["documents"]]
    assert "a book" not in names


@pytest.mark.parametrize("path", ["read", "ask", "clear", "remove"])
def test_an_unknown_document_is_404(client: httpx.Client, path: str) -> None:
    asked = {"document": "f" * 32} | ({"question": "?"} if path == "ask" else {})
    answer = client.post(f"/hybrid_kv/{path}", json=asked)
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "document_not_found"
    for ident in ("f" * 32, "..%2F..%2Fetc%2Fpasswd", "%00"):
        assert client.get(f"{UPLOAD}/{ident}").status_code == 404


def test_a_key_is_needed_to_see_them(tiny: LLM) -> None:
    from hybrid_kv.serve.http.app import Rules

    engine = FakeEngine(tiny.require_tokenizer())
    with serving(tiny, engine, Rules(api_key="secret")) as running:
        for path in (UPLOAD, f"{UPLOAD}/{NO_DOCUMENT}", "/hybrid_kv/info"):
            assert httpx.get(running.url + path).status_code == 401
        answer = httpx.post(f"{running.url}/hybrid_kv/remove", json={"document": NO_DOCUMENT})
        assert answer.status_code == 401


def test_errors_of_tokens_are_kept_with_their_text(
    client: httpx.Client, engine: FakeEngine
) -> None:
    client.post("/hybrid_kv/clear", json={"document": NO_DOCUMENT})
    asked = {"question": "the river", "max_tokens": 2, "hybrid_kv": {"errors": True}}
    client.post("/hybrid_kv/ask", json=asked)
    (turn,) = client.get(f"{UPLOAD}/{NO_DOCUMENT}").json()["turns"]
    assert [set(token) for token in turn["tokens"]] == [{"text", "error"}] * 2
    assert "".join(token["text"] for token in turn["tokens"]) == turn["answer"]
    assert json.dumps(turn)
