"""A real Chromium, and a server whose page it shows."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, Request, sync_playwright

from mac_rag.model import MACModel
from tests.server.helpers import Running, serving

CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")


# Playwright has an event loop in this thread, so that no other module may find it there.
@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    assert CHROMIUM, "no Chromium here: install it (apt-get install chromium), or name it in the variable CHROMIUM"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def mac_tiny() -> MACModel:
    return MACModel.from_pretrained("mac-tiny", device="cpu")


@pytest.fixture(scope="session")
def running(tmp_path_factory: pytest.TempPathFactory, mac_tiny: MACModel) -> Iterator[Running]:
    """A server without keys. Each test makes banks of its own."""
    with serving(tmp_path_factory.mktemp("served"), mac_tiny) as running:
        yield running


@contextmanager
def opened(browser: Browser, url: str, *, refusals: bool = False, **options: Any) -> Iterator[Page]:
    """The page of a server, on a wide screen. Whatever it complains of, or loads from elsewhere, fails the test.

    Args:
        browser: the browser.
        url: the server's address, and what follows it.
        refusals: True if the server will refuse requests, which Chromium tells on the console.
        options: of the browser's context.
    """
    context = browser.new_context(**{"viewport": {"width": 1200, "height": 800}, **options})
    context.set_default_timeout(60_000)
    page = context.new_page()
    complaints: list[str] = []

    def local(request: Request) -> None:
        if not request.url.startswith((url.partition("#")[0], "data:", "blob:")):
            complaints.append(f"loads {request.url}")

    page.on("request", local)
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("console", lambda message: complaints.append(message.text) if message.type == "error" else None)
    try:
        page.goto(url)
        yield page
    finally:
        context.close()
    told = "Failed to load resource: the server responded with a status"
    assert [text for text in complaints if not (refusals and text.startswith(told))] == []


@pytest.fixture
def page(browser: Browser, running: Running) -> Iterator[Page]:
    with opened(browser, running.url) as page:
        yield page
