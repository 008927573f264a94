"""A window of Chromium with the page at `/ui`. Importing it skips a module where there is none."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import pytest

CHROMIUM = shutil.which("chromium")
if CHROMIUM is None:
    pytest.skip("no chromium on the path: apt-get install chromium", allow_module_level=True)
api = pytest.importorskip("playwright.sync_api")

TIMEOUT = 120_000  # ms


@contextmanager
def launched() -> Iterator[Any]:
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", "--disable-dev-shm-usage"]
        )
        yield browser
        browser.close()


class Window:
    """The page in a window of its own, and what went wrong in it."""

    def __init__(self, browser: Any, url: str) -> None:
        self.context = browser.new_context()
        self.context.set_default_timeout(TIMEOUT)
        api.expect.set_options(timeout=TIMEOUT)
        self.page = self.context.new_page()
        self.errors: list[str] = []
        self.hosts: set[str] = set()
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("console", self._heard)
        self.page.on("request", lambda request: self.hosts.add(urlsplit(request.url).netloc))
        self.url = url

    def _heard(self, message: Any) -> None:
        if message.type == "error":
            self.errors.append(message.text)

    def open(self) -> Any:
        self.page.goto(f"{self.url}/ui")
        return self.page


def ask(page: Any, question: str) -> Any:
    """By the keyboard alone; the answer, once it is there."""
    page.get_by_label("Your message").focus()
    page.keyboard.type(question)
    page.keyboard.press("Enter")
    answer = page.locator("#answers > li").last
    api.expect(answer.locator(".timeline, .bad")).to_be_visible()
    return answer
