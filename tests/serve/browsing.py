"""The page as a user has it: a browser without a window that reads documents and asks."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
DOCUMENT = "the river. key 3f a0: 11 5c 9e 07. the hill. " * 8
DOCUMENTS = "/hybrid_kv/documents"
READY = "#served:has-text('tiny')"


@contextmanager
def browsing() -> Iterator[Any]:
    """A browser; without one the test is skipped."""
    if CHROMIUM is None:
        pytest.skip("needs chromium")
    api = pytest.importorskip("playwright.sync_api")
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


def opened(context: Any, url: str) -> Any:
    """A tab with the page, connected."""
    page = context.new_page()
    page.set_default_timeout(20_000)
    page.goto(url)
    page.wait_for_selector(READY)
    page.wait_for_selector("#documents button[aria-current]")
    return page


def read(page: Any, text: str = DOCUMENT) -> None:
    """Pastes a text, until it is read."""
    page.click("#documents button:has-text('New document')")
    page.fill("#paste", text)
    page.press("#paste", "Control+Enter")
    page.wait_for_selector("#prefill-label:has-text('Read in')")


def ask(page: Any, question: str) -> Any:
    """The card of the answer."""
    page.fill("#question", question)
    page.press("#question", "Enter")
    page.wait_for_selector("article:last-child dl")
    return page.locator("article").last


def empty(url: str) -> None:
    """Removes all documents and answers of a server."""
    for document in httpx.get(url + DOCUMENTS, timeout=60).json()["documents"]:
        gone = {"document": document["document"]}
        httpx.post(f"{url}/hybrid_kv/remove", json=gone, timeout=60)
    httpx.post(f"{url}/hybrid_kv/clear", json={"document": "none"}, timeout=60)
