"""The server's page in a real Chromium: files become memory, questions are answered, and no text becomes code."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, Request, expect

from mac_rag.model import MACModel
from tests.server.conftest import BRIDGE, PRESS, QUESTION
from tests.server.helpers import Running, serving

pytestmark = pytest.mark.browser

SCRIPT = "<img src=x onerror=document.title='taken'><script>document.title='taken'</script>"


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with serving(tmp_path_factory.mktemp("served"), MACModel.from_pretrained("mac-tiny", device="cpu")) as running:
        yield running


@pytest.fixture
def page(browser: Browser, running: Running) -> Iterator[Page]:
    """The page; whatever it complains of, or loads from elsewhere, fails the test."""
    context = browser.new_context(viewport={"width": 1200, "height": 800})
    page = context.new_page()
    complaints: list[str] = []
    page.on("console", lambda message: complaints.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: complaints.append(str(error)))

    def local(request: Request) -> None:
        if not request.url.startswith((running.url, "data:", "blob:")):
            complaints.append(f"loads {request.url}")

    page.on("request", local)
    page.goto(running.url)
    yield page
    context.close()
    assert complaints == []


def make_bank(page: Page, name: str) -> None:
    page.get_by_label("New bank").fill(name)
    page.get_by_role("button", name="Make").click()
    expect(page.locator("#status")).to_have_text(f"Bank {name} is made.")


def remember(page: Page, folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).write_text(text)
    page.locator("#files").set_input_files([folder / name for name in files])
    expect(page.locator("#status")).to_contain_text(f"{len(files)} added", timeout=20_000)


def ask(page: Page, question: str) -> None:
    page.locator("#question").fill(question)
    page.locator("#question").press("Enter")
    for way in ("memory", "retrieval", "both"):
        expect(page.locator(f"#a-{way}")).to_have_attribute("aria-busy", "false", timeout=20_000)


def test_files_become_memory_and_answer(page: Page, tmp_path: Path) -> None:
    make_bank(page, "news")
    remember(page, tmp_path, {"bridge.txt": BRIDGE, "press.md": PRESS})
    expect(page.locator("#count")).to_have_text("(2)")
    expect(page.locator("#documents li")).to_have_count(2)
    ask(page, QUESTION)
    for way in ("memory", "retrieval", "both"):
        expect(page.locator(f"#a-{way}")).to_have_text("180")
    first = page.locator("#sources li").first
    expect(first).to_contain_text("press.md")
    expect(first).to_contain_text("% of the attention, retrieved")
    expect(first.locator("blockquote")).to_have_text("The company employs 180 people.")
    expect(first.locator("blockquote mark")).to_have_text("180")
    assert float(first.locator("meter").get_attribute("value") or 0) > 0.5
    first.get_by_role("button").click()
    expect(page.locator("#reader mark")).to_have_text("The company employs 180 people.")
    page.get_by_role("button", name="Close").click()
    page.once("dialog", lambda dialog: dialog.accept())
    page.get_by_role("button", name=re.compile("Delete .*bridge")).click()
    expect(page.locator("#count")).to_have_text("(1)")


def test_dropped_files_are_remembered(page: Page) -> None:
    make_bank(page, "dropped")
    page.evaluate(
        """text => {
            const data = new DataTransfer();
            data.items.add(new File([text], "bridge.txt", {type: "text/plain"}));
            document.getElementById("drop").dispatchEvent(new DragEvent("drop", {dataTransfer: data, bubbles: true}));
        }""",
        BRIDGE,
    )
    expect(page.locator("#documents li")).to_have_count(1, timeout=20_000)


def test_as_of_takes_later_documents_away(page: Page, running: Running) -> None:
    documents = [
        {"id": "old", "text": PRESS.replace("180", "140"), "metadata": {"date": "2004-05-01"}},
        {"id": "new", "text": PRESS, "metadata": {"date": "2006-05-01"}},
    ]
    client = running.client()
    client.post("/v1/banks", json={"name": "dated"}).raise_for_status()
    client.post("/v1/banks/dated/documents", json={"documents": documents}).raise_for_status()
    page.reload()
    page.locator("#bank").select_option("dated")
    expect(page.locator("#documents li")).to_have_count(2)
    page.get_by_label("As of").check()
    slider = page.get_by_label("Date of the question")
    slider.focus()
    slider.press("Home")
    expect(page.locator("#as-of-date")).to_have_text("2004-05-01")
    ask(page, QUESTION)
    expect(page.locator("#a-both")).to_have_text("140")
    expect(page.locator("#sources li")).to_have_count(1)


def test_nothing_becomes_code(page: Page, running: Running) -> None:
    client = running.client()
    client.post("/v1/banks", json={"name": "hostile"}).raise_for_status()
    document = {"id": SCRIPT, "text": f"{PRESS} {SCRIPT}", "metadata": {"title": SCRIPT, "date": "2004-05-01"}}
    client.post("/v1/banks/hostile/documents", json={"documents": [document]}).raise_for_status()
    page.reload()
    page.locator("#bank").select_option("hostile")
    expect(page.locator("#count")).to_have_text("(1)")
    expect(page.locator("#documents li")).to_contain_text(SCRIPT)
    ask(page, f"{SCRIPT} {QUESTION}")
    quote = page.locator("#sources blockquote").first
    expect(quote).to_contain_text("The company")
    page.locator("#sources button").first.click()
    expect(page.locator("#reader-text")).to_contain_text(SCRIPT)
    assert page.locator("#documents img, #sources img, #reader img, #answers img").count() == 0
    assert page.title() == "mac_rag"


def test_the_keyboard_is_enough(page: Page) -> None:
    page.keyboard.press("Tab")
    expect(page.get_by_role("link", name="Skip to the question")).to_be_focused()
    page.keyboard.press("Enter")
    page.keyboard.type("Who?")
    assert page.locator("#question").input_value() in ("Who?", "")  # some browsers move the view alone
    named = page.locator("body").aria_snapshot()
    for name in ("Bank", "New bank", "Question", "Ask", "Memory", "Retrieval", "Both", "Sources", "Documents"):
        assert f'"{name}' in named


def test_a_phone_and_the_dark(browser: Browser, running: Running) -> None:
    colours = set()
    for scheme in ("light", "dark"):
        context = browser.new_context(viewport={"width": 360, "height": 640}, color_scheme=scheme)  # type: ignore[arg-type]
        page = context.new_page()
        page.goto(running.url)
        assert page.evaluate("document.documentElement.scrollWidth") <= 360
        colours.add(page.evaluate("getComputedStyle(document.body).backgroundColor"))
        context.close()
    assert len(colours) == 2
