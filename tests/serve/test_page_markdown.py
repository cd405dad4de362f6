"""Answers in Markdown: shown as it is meant, and nothing of a model becomes HTML or leads away."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from hybrid_kv.watch.token_errors import TokenError
from tests.serve.browsing import ask, opened
from tests.serve.fake_engine import FakeEngine
from tests.serve.running import Running

RENDER = """async ([source, marks]) => {
  const { markdown } = await import("/hybrid_kv/markdown.js");
  const place = document.createElement("div");
  place.append(...markdown(source, marks));
  return place.innerHTML;
}"""


@pytest.fixture(scope="module")
def blank(browser: Any, counting_server: Running) -> Iterator[Any]:
    """One page for all tests that leave nothing on it."""
    context = browser.new_context()
    yield opened(context, counting_server.url)
    context.close()


def rendered(page: Any, source: str, *marks: dict[str, Any]) -> str:
    return str(page.evaluate(RENDER, [source, list(marks)]))


@pytest.mark.parametrize(
    ("source", "html"),
    [
        ("the *river* and **the hill**", "<p>the <em>river</em> and <strong>the hill</strong></p>"),
        ("one\ntwo\n\nthree", "<p>one\ntwo</p><p>three</p>"),
        ("# A *b*\ntext", "<h4>A <em>b</em></h4><p>text</p>"),
        (
            "- a\n- b\n  - c\n\nd",
            "<ul><li><p>a</p></li><li><p>b</p><ul><li><p>c</p></li></ul></li></ul><p>d</p>",
        ),
        ("3. a\n4. b", '<ol start="3"><li><p>a</p></li><li><p>b</p></li></ol>'),
        ("1. a\n\n   more\n2. b", "<ol><li><p>a</p><p>more</p></li><li><p>b</p></li></ol>"),
        ("> a\n> b", "<blockquote><p>a\nb</p></blockquote>"),
        ("```python\nx < 1 and *y*\n```\nz", "<pre><code>x &lt; 1 and *y*</code></pre><p>z</p>"),
        ("```\nhalf", "<pre><code>half</code></pre>"),
        ("a `b *c*` d", "<p>a <code>b *c*</code> d</p>"),
        (
            "| a | b |\n|---|:-:|\n| 1 | **2** |",
            '<div class="table"><table><tbody><tr><th>a</th>'
            "<th>b</th></tr><tr><td>1</td><td><strong>2</strong></td></tr></tbody></table></div>",
        ),
        ("a\n\n---\n\nb", "<p>a</p><hr><p>b</p>"),
        ("2 * 3 * 4 and snake_case_name", "<p>2 * 3 * 4 and snake_case_name</p>"),
        (r"\*not\* this", "<p>*not* this</p>"),
        ("~~a~~", "<p><del>a</del></p>"),
        ("[here](https://a.b/c)", '<p>here <span class="url">https://a.b/c</span></p>'),
        (
            "![a picture](https://a.b/x.png)",
            '<p>a picture <span class="url">https://a.b/x.png</span></p>',
        ),
    ],
)
def test_markdown_is_shown_as_it_is_meant(blank: Any, source: str, html: str) -> None:
    assert rendered(blank, source) == html


ATTACKS = [
    "<img src=x onerror=alert(1)>",
    "<script>alert(1)</script>",
    "[a](javascript:alert(1))",
    '![a](x" onerror="alert(1))',
    "[<b onclick=alert(1)>a</b>](data:text/html,<script>alert(1)</script>)",
    "`<svg onload=alert(1)>`",
    "```<iframe src=//evil>\n<iframe>\n```",
    "| <b> | <i> |\n|--|--|\n| <a href=javascript:alert(1)> | **<u>** |",
    "# <style>*{display:none}</style>",
    "- <form action=//evil><input>\n> <base href=//evil>",
    "<a href='https://evil/?q=secret'>click</a>",
    "<https://evil/?q=secret>",
]


def test_nothing_of_a_model_becomes_html(
    page: Any, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.on("dialog", lambda dialog: asked.append(f"dialog {dialog.message}"))
    parts = iter("\n\n".join(ATTACKS))
    monkeypatch.setattr(engine.tokenizer, "decode", lambda ids: next(parts, ""))
    page.click("#settings summary")
    page.fill("#max-tokens", str(len("\n\n".join(ATTACKS))))
    card = ask(page, ATTACKS[0])
    for attempt in ("at once", "after a reload"):
        names = card.evaluate(
            "card => [...new Set([...card.querySelectorAll('.answer *')].map("
            "one => one.tagName.toLowerCase()))].sort()"
        )
        assert set(names) <= {
            *("p", "code", "pre", "h4", "ul", "li", "blockquote", "span", "strong"),
            *("div", "table", "tbody", "tr", "th", "td"),
        }, (attempt, names)
        attributes = card.evaluate(
            "card => [...card.querySelectorAll('.answer *')].flatMap(one => "
            "[...one.attributes].map(own => own.name))"
        )
        assert set(attributes) <= {"class"}, (attempt, attributes)
        for shown in ("<img src=x onerror=alert(1)>", "<script>alert(1)</script>", "<svg onload"):
            assert shown in card.inner_text()
        page.reload()
        page.wait_for_selector("article dl")
        card = page.locator("article").last
    own = page.evaluate("location.origin")
    assert [url for url in asked if not url.startswith(own)] == []


@pytest.mark.parametrize(
    "source",
    [
        *("> " * 5000 + "a", "- " * 5000 + "a", "*" * 20000, "**a " * 5000, "[" * 20000),
        *("`" * 10001 + "a", "_a " * 7000, "|" * 9000 + "\n" + "|-" * 4000, "\\" * 20001),
        *(
            "[a](" * 5000,
            "#" * 20000,
            "~~a" * 7000,
            "\n".join("  " * n + "- a" for n in range(300)),
        ),
    ],
)
def test_a_text_of_nothing_but_signs_is_shown_in_a_moment(blank: Any, source: str) -> None:
    seconds = blank.evaluate(
        f"async given => {{ const begin = performance.now(); await ({RENDER})(given);"
        "return (performance.now() - begin) / 1000 }",
        [source, []],
    )
    assert seconds < 2


def test_marks_keep_their_place_in_markdown(blank: Any) -> None:
    source = "the **river** and `hill`"
    begin = source.index("river")
    marks = [
        {"begin": begin, "end": begin + 5, "title": "one"},
        {"begin": source.index("hill") - 3, "end": len(source), "title": "two"},
    ]
    assert rendered(blank, source, *marks) == (
        '<p>the <strong><span class="doubt" title="one">river</span></strong> an'
        '<span class="doubt" title="two">d </span><code>'
        '<span class="doubt" title="two">hill</span></code></p>'
    )


def test_doubtful_tokens_of_markdown_are_marked_again_after_a_reload(
    page: Any, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = iter(("**the ", "river**", " \U0001d11e ", "hill"))
    monkeypatch.setattr(engine.tokenizer, "decode", lambda ids: next(parts))
    calm = TokenError(0.0004, 0.001, 0.02, half=0.1, entropy=1.0, margin=1.0)
    far = TokenError(0.023, 0.067, 0.04, half=0.1, entropy=1.0, margin=1.0)
    engine.errors = [calm, far, calm, far]
    page.click("#settings summary")
    page.fill("#max-tokens", "4")
    page.check("#doubts")
    ask(page, "the river")
    for _ in range(2):
        assert page.locator("article .doubt").all_text_contents() == ["river", "hill"]
        assert page.locator("article strong").inner_text() == "the river"
        page.reload()
        page.wait_for_selector("article dl")
