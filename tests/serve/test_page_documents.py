"""Several documents on the page, several tabs, and a server that is busy, lost or comes back."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import httpx
import pytest

from hybrid_kv.api import LLM
from hybrid_kv.serve import Limits
from tests.cli.test_context import pdf_of
from tests.serve.asking import until
from tests.serve.browsing import DOCUMENT, ask, opened, read
from tests.serve.fake_engine import FakeEngine
from tests.serve.running import Running, serving

OTHER = "the lake. key 4b c1: 22. the sea. " * 4


def listed(page: Any) -> list[str]:
    """Names of the documents, the latest used first."""
    names: list[str] = page.locator("#documents b").all_inner_texts()
    assert names[0] == "New document…"
    return names[1:]


def switch(page: Any, name: str) -> None:
    page.click(f"#documents button:has-text('{name}')")
    page.wait_for_selector(f"#documents [aria-current]:has-text('{name}')")


def questions(page: Any) -> list[str]:
    found: list[str] = page.locator("article h3").all_inner_texts()
    return found


def test_each_document_has_its_own_conversation(page: Any, engine: FakeEngine) -> None:
    read(page)
    ask(page, "? key 3f a0")
    read(page, OTHER)
    assert questions(page) == []
    ask(page, "? key 4b c1")
    names = listed(page)
    assert [name[:8] for name in names] == ["the lake", "the rive"]
    assert "key 3f" not in page.inner_text("article")
    switch(page, names[1])
    assert questions(page) == ["? key 3f a0"]
    assert page.inner_text("#text") == DOCUMENT
    page.wait_for_selector("#documents [aria-current]:has-text('1 question')")
    facts = page.inner_text("#documents [aria-current] small").split(" · ")
    assert (facts[0], facts[2]) == ("112 tokens", "1 question")
    ask(page, "and then")
    first, _, last = [request for request in engine.seen if request.places]
    assert last.ids[: len(first.ids)] == first.ids
    page.click("#documents button:has-text('New document')")
    ask(page, "the river")
    assert len(engine.seen[-1].ids) < 20, "no document stands before it"
    page.wait_for_selector("#documents [aria-current]:has-text('1 question')")


def test_a_question_waits_for_the_document_that_was_chosen(page: Any, engine: FakeEngine) -> None:
    read(page)
    ask(page, "? key 3f a0")
    held: list[Any] = []

    def hold(route: Any) -> None:
        held.append(route)

    page.route("**/hybrid_kv/documents/none**", hold)
    page.click("#documents button:has-text('New document')")
    page.fill("#question", "the river")
    page.press("#question", "Enter")
    while not held:
        page.wait_for_timeout(10)
    seen = len(engine.seen)
    page.wait_for_timeout(100)
    assert len(engine.seen) == seen, "it is not asked yet"
    held[0].continue_()
    page.wait_for_selector("article:has(h3:text-is('the river')) dl")
    assert questions(page) == ["the river"]
    assert len(engine.seen[-1].ids) < 20, "no document stands before it"


def test_a_reload_and_a_second_tab_find_document_and_answers(page: Any, server: Running) -> None:
    read(page, OTHER)
    read(page)
    ask(page, "? key 3f a0")
    card = page.inner_html("article")
    page.reload()
    page.wait_for_selector("article dl")
    assert page.inner_html("article") == card, "with its places and what it took"
    switch(page, "the lake")
    second = opened(page.context, server.url)
    until(lambda: len(listed(second)) == 2)
    switch(second, "the river")
    assert second.inner_html("article") == card
    third = opened(page.context, page.url)
    assert third.inner_text("#text") == OTHER, "the address names it"


def test_two_tabs_lose_no_answer_of_each_other(
    page: Any, server: Running, engine: FakeEngine
) -> None:
    read(page)
    second = opened(page.context, server.url)
    engine.pace_s = 0.02
    for tab, question in ((page, "of the first"), (second, "of the second")):
        tab.fill("#question", question)
        tab.press("#question", "Enter")
    for tab in (page, second):
        tab.wait_for_selector("article:nth-child(2) dl")
        assert sorted(questions(tab)) == ["of the first", "of the second"]
    second.click("#clear")
    page.wait_for_selector("article", state="detached")


def test_a_document_is_removed_in_all_tabs(page: Any, server: Running) -> None:
    read(page)
    ask(page, "? key 3f a0")
    second = opened(page.context, server.url)
    asked: list[str] = []
    page.on("dialog", lambda dialog: (asked.append(dialog.message), dialog.accept()))
    page.wait_for_selector("#documents [aria-current]:has-text('1 question')")
    page.click("#remove")
    page.wait_for_selector("#give:visible")
    assert asked == ["Remove the document and 1 question with their answers?"]
    until(lambda: listed(page) == [])
    second.wait_for_selector("#document-problem:has-text('The document was removed.')")
    assert second.is_visible("#give")


def test_several_files_are_chosen_together(page: Any, tmp_path: Path) -> None:
    files = {"notes.md": b"# the hill", "lake.pdf": pdf_of("the lake."), "scan.pdf": pdf_of("")}
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    page.set_input_files("#file", [tmp_path / name for name in files])
    page.wait_for_selector("#document-problem:visible")
    assert page.inner_text("#document-problem") == (
        "document has no text, as scanned pages have none; have its text recognised (OCR) and send "
        "that"
    )
    until(lambda: listed(page) == ["lake.pdf", "notes.md"])
    assert page.inner_text("#text").strip() == "the lake."
    assert page.is_visible("#given")


def test_a_file_is_dropped_on_the_page(page: Any) -> None:
    page.evaluate(
        """() => {
          const data = new DataTransfer();
          data.items.add(new File(["the river. the hill."], "dropped.txt"));
          document.body.dispatchEvent(new DragEvent("drop", { dataTransfer: data, bubbles: true }));
        }"""
    )
    page.wait_for_selector("#prefill-label:has-text('Read in')")
    until(lambda: listed(page) == ["dropped.txt"])


def test_a_document_that_is_too_long_is_told(page: Any, tiny: LLM) -> None:
    longest = tiny.model.config.max_position_embeddings
    page.fill("#paste", "the river. " * longest)
    page.press("#paste", "Control+Enter")
    page.wait_for_selector("#document-problem:visible")
    told = page.inner_text("#document-problem")
    assert told.startswith(f"a document must be at most {longest - 1:,} tokens here, got ")
    until(lambda: listed(page) == [])


def test_a_conversation_that_is_too_long_says_what_to_do(
    page: Any, tiny: LLM, engine: FakeEngine
) -> None:
    longest = tiny.model.config.max_position_embeddings
    read(page, "the river. " * (longest // 4))
    ask(page, "the hill")
    page.fill("#question", "the river. " * (longest // 4))
    page.press("#question", "Enter")
    page.wait_for_selector("article .problem:has-text('“Clear answers” takes the earlier ones')")
    assert page.input_value("#question").startswith("the river."), "nothing is lost"


def test_a_full_queue_is_told(browser: Any, tiny: LLM) -> None:
    engine = FakeEngine(tiny.require_tokenizer(), Limits(max_running=1, max_queue=0))
    with serving(tiny, engine) as running:
        engine.holds = True
        page = opened(browser.new_context(), running.url)
        url, body = f"{running.url}/hybrid_kv/ask", {"question": "the hill", "max_tokens": 60}
        other = threading.Thread(target=lambda: httpx.post(url, json=body, timeout=60))
        other.start()
        until(lambda: engine.running)
        page.fill("#question", "the river")
        page.press("#question", "Enter")
        page.wait_for_selector("article .problem")
        assert page.inner_text("article .problem") == (
            "The server is busy with others; ask again in about 2 s."
        )
        assert page.input_value("#question") == "the river"
        engine.holds = False
        other.join()
        page.context.close()


def test_a_server_that_is_lost_is_told_and_found_again(
    browser: Any, tiny: LLM, tmp_path: Path
) -> None:
    engine = FakeEngine(tiny.require_tokenizer())
    with serving(tiny, engine, documents_folder=tmp_path) as running:
        page, port = opened(browser.new_context(), running.url), int(running.url.rpartition(":")[2])
        read(page)
        ask(page, "? key 3f a0")
    page.fill("#question", "are you there")
    page.press("#question", "Enter")
    page.wait_for_selector("article .problem:has-text('The server does not answer.')")
    assert "no connection to the server" in page.inner_text("#served")
    assert page.input_value("#question") == "are you there"
    with serving(tiny, engine, documents_folder=tmp_path, port=port):
        page.wait_for_selector("#served:has-text('tiny')")
        ask(page, "are you there")
        assert questions(page)[0] == "? key 3f a0"
        assert questions(page)[-1] == "are you there"
        page.context.close()


def test_time_that_is_left_is_told(page: Any) -> None:
    told = page.evaluate(
        """async () => {
          const { timeLeft } = await import("/hybrid_kv/words.js");
          let now = 0;
          const short = timeLeft(() => now), long = timeLeft(() => now), said = [];
          for (const [at, done] of [[0, 100], [500, 150], [2000, 300], [3000, 900], [4000, 1000]]) {
            now = at;
            said.push(short({ done, total: 1000, reused: 100 }));
          }
          now = 0;
          long({ done: 0, total: 65536, reused: 0 });
          now = 10000;
          said.push(long({ done: 1024, total: 65536, reused: 0 }));
          return said;
        }"""
    )
    assert told == ["", "", ", about 7 s left", ", about 1 s left", "", ", about 11 min left"]


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [400, 1400])
def test_the_strip_shows_where_and_the_rest_is_in_words(
    browser: Any, server: Running, engine: FakeEngine, emptied: None, scheme: str, width: int
) -> None:
    engine.places = [(4, 0.2), (60, 0.1), (100, 0.05)]
    view = {"width": width, "height": 900}
    page = opened(browser.new_context(color_scheme=scheme, viewport=view), server.url)
    read(page)
    card = ask(page, "? key 3f a0")
    strip = card.locator(".strip")
    bars = strip.locator("rect")
    assert bars.count() == 3
    heights = [float(bar.get_attribute("height") or 0) for bar in bars.all()]
    assert heights == pytest.approx([20, 10, 5])
    places = [float(bar.get_attribute("x") or 0) / 120 for bar in bars.all()]
    assert places == sorted(places)
    assert places[-1] > 0.7
    assert str(strip.get_attribute("aria-label")).startswith("Where in the document it looked")
    assert card.locator(".remaining").inner_text() == (
        "35% of the attention went to the marked words, in 3 places of the document. The remaining "
        "65% went to the question and the answer, to the beginning and the end of the prompt, "
        "which every step reads, and to words that weigh less each."
    )
    box = strip.bounding_box()
    assert box is not None
    page.mouse.click(box["x"] + 0.99 * box["width"], box["y"] + 5)
    assert page.locator("mark.here").count() == 1
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    page.context.close()
