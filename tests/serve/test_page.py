"""The page, in a real browser without a window, with an engine that counts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from hybrid_kv.api import LLM
from hybrid_kv.serve.http.app import Rules
from hybrid_kv.watch.token_errors import TokenError
from tests.serve.browsing import DOCUMENT, ask, read
from tests.serve.fake_engine import FakeEngine
from tests.serve.running import Running, serving

pytestmark = pytest.mark.usefixtures("emptied")

NASTY = "<img src=x onerror=document.title='broken'><script>document.title='broken'</script>"


def test_a_document_is_read_and_asked_about(page: Any, engine: FakeEngine) -> None:
    engine.places = [(2, 0.3), (3, 0.2), (30, 0.1)]
    read(page)
    assert "112 tokens, 360 characters" in page.inner_text("#facts")
    assert page.evaluate("document.activeElement.id") == "question"
    card = ask(page, "? key 3f a0")
    assert card.locator("h3").inner_text() == "? key 3f a0"
    assert card.locator(".answer").inner_text().startswith("<unk>theriver.key")  # "user:"
    facts = card.locator("dl").inner_text()
    assert "13 100.0% of the context" in facts
    assert "2.0 ms" in facts
    assert "recall\n99.0%" in facts
    assert page.locator("#text mark").all_inner_texts() == ["river", ".", "river"]
    assert page.inner_text("#text") == DOCUMENT
    places = card.locator(".places button")
    assert places.count() == 2
    assert places.first.inner_text().startswith("the river. key 3f a0")
    places.last.press("Enter")
    assert page.locator("mark.here").count() == 1
    first, second = engine.seen[:2]
    assert second.ids[: len(first.ids) - 8] == first.ids[:-8]  # the prompt begins as it was read
    assert second.places
    assert second.audit_every == 4


def test_turns_are_kept_where_the_model_has_a_template(page: Any, engine: FakeEngine) -> None:
    page.fill("#max-tokens", "2") if page.is_visible("#max-tokens") else None
    page.click("#settings summary")
    page.fill("#max-tokens", "2")
    ask(page, "the river")
    ask(page, "the hill")
    first, second = engine.seen
    assert second.ids[: len(first.ids)] == first.ids
    assert len(second.ids) > len(first.ids) + 2
    page.click("#clear")
    page.wait_for_selector("article", state="detached")
    page.reload()
    page.wait_for_selector("#hint:visible")
    assert page.locator("article").count() == 0


def test_settings_reach_the_engine(page: Any, engine: FakeEngine) -> None:
    page.click("#settings summary")
    page.select_option("#method", "flat")
    page.fill("#max-tokens", "3")
    page.fill("#temperature", "0.5")
    page.uncheck("#audit")
    ask(page, "the river")
    request = engine.seen[0]
    assert request.config is not None
    assert request.config.method == "flat"
    assert (request.max_new_tokens, request.sampling.temperature) == (3, 0.5)
    assert request.audit_every is None


CALM, FAR, RISKY = (
    TokenError(kl, kl_bar, flip, half=0.1, entropy=1.0, margin=1.0)
    for kl, kl_bar, flip in ((0.0004, 0.001, 0.02), (0.023, 0.067, 0.04), (0.002, 0.006, 0.35))
)


def underline(page: Any) -> str:
    return str(
        page.evaluate("getComputedStyle(document.querySelector('.doubt')).textDecorationLine")
    )


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_doubtful_tokens_are_marked_where_that_is_asked_for(
    browser: Any, server: Running, engine: FakeEngine, scheme: str
) -> None:
    engine.errors = [CALM, FAR, RISKY, CALM]
    context = browser.new_context(color_scheme=scheme, viewport={"width": 1280, "height": 800})
    page = context.new_page()
    page.goto(server.url)
    page.wait_for_selector("#served:has-text('tiny')")
    page.click("#settings summary")
    page.fill("#max-tokens", "8")
    plain = ask(page, "the river and the hill")
    assert not engine.seen[0].errors
    assert "doubtful" not in plain.inner_text()
    page.check("#doubts")
    card = ask(page, "the river and the hill")
    assert engine.seen[1].errors
    words = [engine.tokenizer.decode([idx]) for idx in engine.seen[1].ids[:8]]
    answer = card.locator(".answer")
    assert answer.inner_text() == "".join(words)
    marks = card.locator(".doubt")
    assert marks.all_text_contents() == [words[place] for place in (1, 2, 5, 6)]
    assert marks.nth(0).get_attribute("title") == (
        "4.0% risk that full attention says something else here; expected distance from it 0.023 "
        "nats, 9 of 10 such tokens stay below 0.067"
    )
    assert str(marks.nth(1).get_attribute("title")).startswith("35% risk that full attention")
    assert "doubtful tokens\n4 of 8" in card.locator("dl").inner_text()
    colours = page.evaluate(
        "[getComputedStyle(document.querySelector('.doubt')).textDecorationColor,"
        " getComputedStyle(document.body).backgroundColor]"
    )
    assert contrast(*colours) >= 3, colours
    assert underline(page) == "underline"
    page.uncheck("#doubts")
    assert underline(page) == "none"
    page.check("#doubts")
    assert underline(page) == "underline"
    context.close()


def test_a_token_without_text_is_marked_with_the_next(
    page: Any, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that is the first half of a character."""
    whole = engine.tokenizer.decode
    told: list[int] = []

    def decode(ids: list[int]) -> str:
        told.extend(ids)
        return "" if len(told) == 1 else str(whole(ids))

    monkeypatch.setattr(engine.tokenizer, "decode", decode)
    engine.errors = [FAR, CALM]
    page.click("#settings summary")
    page.fill("#max-tokens", "2")
    page.check("#doubts")
    card = ask(page, "the river")
    assert card.locator(".doubt").count() == 1
    assert "1 of 2" in card.locator("dl").inner_text()


def test_what_a_document_says_is_text(page: Any) -> None:
    read(page, f"the river. {NASTY} the hill.")
    card = ask(page, NASTY)
    assert NASTY in page.inner_text("#text")
    assert NASTY in card.inner_text()
    assert page.locator("#text img, #text script, article img, article script").count() == 0
    assert "broken" not in page.title()


def test_a_file_is_dropped_or_chosen(page: Any, tmp_path: Path) -> None:
    file = tmp_path / "book.txt"
    file.write_text(DOCUMENT)
    page.set_input_files("#file", str(file))
    page.wait_for_selector("#prefill-label:has-text('Read in')")
    assert page.inner_text("#facts").startswith("book.txt")
    page.click("#documents button:has-text('New document')")
    file.write_bytes(b"\xff\xfe\x00\x01")
    page.set_input_files("#file", str(file))
    page.wait_for_selector("#document-problem:not([hidden])")
    assert page.inner_text("#document-problem").startswith("document must be text in UTF-8 or PDF")


def test_an_answer_is_stopped_with_escape(page: Any, engine: FakeEngine) -> None:
    engine.pace_s = 0.05
    page.fill("#question", "the river")
    page.press("#question", "Enter")
    page.wait_for_selector("article .answer:not(.waiting)")
    page.keyboard.press("Escape")
    page.wait_for_selector("article .problem:has-text('stopped')")
    engine.drain(0.5)
    assert engine.ended["cancelled"] == 1


def test_the_page_is_done_without_a_mouse(page: Any) -> None:
    page.keyboard.press("/")
    assert page.evaluate("document.activeElement.id") == "question"
    unnamed = page.evaluate(
        "[...document.querySelectorAll('input, textarea, select, button, progress')].filter("
        "e => !e.labels?.length && !e.textContent.trim() && !e.ariaLabel).map(e => e.id)"
    )
    assert unnamed == []
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.id") == "send"
    outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
    assert outline == "solid"


@pytest.mark.parametrize("width", [320, 390, 800, 1280])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_and_can_be_read(browser: Any, server: Running, width: int, scheme: str) -> None:
    view = {"width": width, "height": 800}
    context = browser.new_context(color_scheme=scheme, viewport=view)
    page = context.new_page()
    page.goto(server.url)
    page.wait_for_selector("#served:has-text('tiny')")
    read(page)
    ask(page, "? key 3f a0")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    for place in ("body", "mark", ".hint", "dt", "#send"):
        colours = page.evaluate(
            "name => { const found = document.querySelector(name), own = getComputedStyle(found);"
            "let under = found; while (getComputedStyle(under).backgroundColor === "
            "'rgba(0, 0, 0, 0)') under = under.parentElement;"
            "return [own.color, getComputedStyle(under).backgroundColor] }",
            place,
        )
        assert contrast(*colours) >= 4.5, (place, colours)
    context.close()


def contrast(one: str, other: str) -> float:
    """Of two colours such as 'rgb(1, 2, 3)', as WCAG counts it."""

    def luminance(colour: str) -> float:
        parts = [int(part) / 255 for part in colour[4:-1].split(",")]
        red, green, blue = (
            part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts
        )
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_the_page_asks_for_the_key(browser: Any, tiny: LLM) -> None:
    rules = Rules(api_key="geheim")
    with serving(tiny, FakeEngine(tiny.require_tokenizer()), rules) as running:
        page = browser.new_page()
        page.goto(running.url)
        page.fill("#key", "geheim")
        page.press("#key", "Enter")
        page.wait_for_selector("#served:has-text('tiny')")
        assert not page.is_visible("#key")
        ask(page, "the river")
        page.close()


# Without a browser -------------------------------------------------------------------------------


def test_the_page_lets_nothing_else_in(client: httpx.Client) -> None:
    answer = client.get("/")
    policy = answer.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'; ")
    assert "unsafe" not in policy
    for path in ("/", "/hybrid_kv/page.css", "/hybrid_kv/page.js"):
        text = client.get(path).text
        assert "http://" not in text
        assert "https://" not in text
    assert "innerHTML" not in client.get("/hybrid_kv/page.js").text


@pytest.mark.parametrize(
    ("content", "code"),
    [
        (b"\xff\xfe", "unreadable_document"),
        (b"a\0b", "unreadable_document"),
        (b" \n", "empty_document"),
    ],
)
def test_an_unreadable_upload_is_refused(client: httpx.Client, content: bytes, code: str) -> None:
    kind = {"content-type": "application/octet-stream"}
    answer = client.post("/hybrid_kv/documents", content=content, headers=kind)
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == code


def test_documents_give_way_to_later_ones(client: httpx.Client) -> None:
    kind = {"content-type": "application/octet-stream"}
    names = [
        client.post("/hybrid_kv/documents", content=f"the {number}".encode(), headers=kind).json()
        for number in range(17)
    ]
    for name, status in ((names[0], 404), (names[-1], 200)):
        answer = client.post("/hybrid_kv/read", json={"document": name["document"]})
        assert answer.status_code == status
