"""`make serve`, and a minute later its page has answered about a PDF that was dropped on it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from base64 import b64encode
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.browser.test_page import WAYS, make_bank, newest

pytestmark = pytest.mark.browser

ROOT = Path(__file__).parents[2]
# Where the pictures of the docs are made anew: SCREENSHOTS=docs/assets make test-browser
PICTURES = Path(os.environ.get("SCREENSHOTS") or ROOT / "build" / "screenshots")
_A_MINUTE = 60
REPORT = """<!doctype html><title>The observatory of Orsena</title>
<h1>The observatory of Orsena</h1>
<p>The Orsena Observatory was founded in 1887 by the astronomer Clara Weiss on a hill above the town. Its first
telescope was paid for by the sale of a vineyard.</p>
<p>In 1932 a fire destroyed the library. The main dome was rebuilt by the engineer Tomas Berg, and the observatory
opened to visitors again in May 1935.</p>"""
QUESTION, ANSWER = "Who rebuilt the main dome?", "Tomas Berg"


def printed(browser: Browser, html: str) -> bytes:
    """A page as Chromium prints it: PDF."""
    page = browser.new_page()
    page.set_content(html)
    data = page.pdf()
    page.close()
    assert data.startswith(b"%PDF-")
    return data


def drop(page: Page, name: str, data: bytes) -> None:
    page.evaluate(
        """async ([name, data]) => {
            const bytes = Uint8Array.from(atob(data), letter => letter.charCodeAt(0));
            const dropped = new DataTransfer();
            dropped.items.add(new File([bytes], name, {type: "application/pdf"}));
            document.body.dispatchEvent(new DragEvent("drop", {dataTransfer: dropped, bubbles: true}));
        }""",
        [name, b64encode(data).decode()],
    )


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[str, float]]:
    """`make serve` as on a machine where the environment is there: its address, and when it began."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = {"MAC_RAG_SERVE_DATA": str(tmp_path / "served"), "MAC_RAG_SERVE_PORT": str(port)}
    # What is installed is that of the tests: make shall not install it again.
    command = ["make", "serve", f"VENV={sys.prefix}", "-o", f"{sys.prefix}/.installed-server"]
    log = tmp_path / "log"
    began = time.monotonic()
    with open(log, "wb") as errors:
        process = subprocess.Popen(
            command, cwd=ROOT, env={**os.environ, **options}, stderr=errors, start_new_session=True
        )
    try:
        while b"ready at " not in log.read_bytes():
            assert process.poll() is None, log.read_text()
            time.sleep(0.05)
        yield f"http://127.0.0.1:{port}", began
    finally:
        os.killpg(process.pid, signal.SIGINT)
        process.wait(60)


def test_a_dropped_pdf_is_answered_about_within_a_minute(browser: Browser, served: tuple[str, float]) -> None:
    url, began = served
    ready = time.monotonic()
    report = printed(browser, REPORT)
    context = browser.new_context(viewport={"width": 1200, "height": 760}, color_scheme="light")
    page = context.new_page()
    page.goto(url)
    make_bank(page, "notes")
    drop(page, "observatory.pdf", report)
    expect(page.locator("#jobs")).to_contain_text("1 added", timeout=30_000)
    page.locator("#question").fill(QUESTION)
    page.locator("#question").press("Enter")
    for way in WAYS:
        expect(newest(page).locator(f".{way} .answer")).to_have_text(ANSWER, timeout=30_000)
    seconds = time.monotonic() - began
    print(f"{ready - began:.1f} s until it was ready, {seconds:.1f} s until the answer")
    expect(newest(page).locator(".both .about")).to_contain_text("Confidence")
    expect(newest(page).locator(".sources li").first).to_contain_text("observatory.pdf")
    PICTURES.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=PICTURES / "page.png")
    phone = browser.new_context(
        viewport={"width": 390, "height": 760}, color_scheme="dark", storage_state=context.storage_state()
    )
    page = phone.new_page()
    page.goto(url)
    page.locator(".entry summary").click()
    page.screenshot(path=PICTURES / "page-phone.png")
    phone.close()
    context.close()
    assert seconds < _A_MINUTE
