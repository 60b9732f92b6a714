"""The server's page in a real Chromium: what people do with it, with a mouse, with the keyboard and on a phone."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Locator, Page, Route, expect

from mac_rag.model import MACModel
from mac_rag.model.calibration import Calibration, Logistic
from tests.browser.conftest import opened
from tests.server.conftest import BRIDGE, PRESS, QUESTION
from tests.server.helpers import Running, make, serving

pytestmark = pytest.mark.browser
expect.set_options(timeout=30_000)

SCRIPT = "<img src=x onerror=document.title='taken'><script>document.title='taken'</script>"
WAYS = ("memory", "retrieval", "both")
PHONE: dict[str, Any] = {"viewport": {"width": 360, "height": 640}, "has_touch": True, "is_mobile": True}
LONG = "a-name-without-a-space-" * 12
ANSWERS = re.compile("/v1/chat/completions")


def bank(running: Running, name: str, *documents: dict[str, Any], **more: Any) -> str:
    """Makes a bank, and returns the page's address of it."""
    with running.client() as client:
        make(client, name, *documents, **more)
    return f"{running.url}/#bank={name}"


def document(document_id: str, text: str, **metadata: Any) -> dict[str, Any]:
    return {"id": document_id, "text": text, "metadata": metadata}


NEWS = (document("press", PRESS, date="2006-05-01"), document("bridge", BRIDGE, date="2004-05-01"))


def make_bank(page: Page, name: str) -> None:
    page.wait_for_load_state("networkidle")  # without any bank, the page opens their list itself
    if not page.get_by_label("New bank").is_visible():
        page.get_by_text("Banks", exact=True).click()
    page.get_by_label("New bank").fill(name)
    page.get_by_role("button", name="Make").click()
    expect(page.locator("#status")).to_have_text(f"Bank {name} is made.")


def choose_files(page: Page, paths: Sequence[Path]) -> None:
    page.get_by_role("button", name="Add documents").click()
    page.get_by_label(re.compile("^Files")).set_input_files(paths)


def newest(page: Page) -> Locator:
    """The box of the newest question."""
    return page.locator(".entry").first


def ask(page: Page, question: str = QUESTION) -> Locator:
    """Asks, and waits for the answers."""
    before = page.locator(".entry").count()
    page.locator("#question").fill(question)
    page.locator("#question").press("Enter")
    expect(page.locator(".entry")).to_have_count(before + 1)
    expect(newest(page).locator(".answer[aria-busy=true]")).to_have_count(0)
    return newest(page)


def sent(text: str, **more: Any) -> str:
    """A streamed answer."""
    piece = {"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": None}]}
    end = {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}], "sources": [], "notes": [], **more}
    return "".join(f"data: {json.dumps(one)}\n\n" for one in (piece, end)) + "data: [DONE]\n\n"


def test_files_become_memory_and_answer(page: Page, tmp_path: Path) -> None:
    (tmp_path / "bridge.txt").write_text(BRIDGE)
    (tmp_path / "press.md").write_text(PRESS)
    make_bank(page, "files")
    choose_files(page, [tmp_path / "bridge.txt", tmp_path / "press.md"])
    expect(page.locator("#jobs")).to_contain_text("2 added")
    expect(page.locator("#count")).to_have_text("(2)")
    entry = ask(page)
    for way in WAYS:
        expect(entry.locator(f".{way} .answer")).to_have_text("180")
    expect(entry.locator(".asked")).to_contain_text("tiny:files · all dates")
    first = entry.locator(".sources li").first
    expect(first).to_contain_text("press.md")
    expect(first).to_contain_text("% of the attention, retrieved")
    expect(first.locator("blockquote mark")).to_have_text("180")
    assert float(first.locator("meter").get_attribute("value") or 0) > 0.5
    first.get_by_role("button").click()
    expect(page.locator("#reader mark")).to_have_text("The company employs 180 people.")


def test_dropped_files_are_remembered(page: Page) -> None:
    make_bank(page, "dropped")
    page.evaluate(
        """text => {
            const data = new DataTransfer();
            data.items.add(new File([text], "bridge.txt", {type: "text/plain"}));
            document.body.dispatchEvent(new DragEvent("drop", {dataTransfer: data, bubbles: true}));
        }""",
        BRIDGE,
    )
    expect(page.locator("#documents li")).to_have_count(1)


def test_a_pasted_text_becomes_memory(page: Page) -> None:
    make_bank(page, "pasted")
    page.get_by_role("button", name="Add documents").click()
    page.get_by_label("Name", exact=True).fill("press")
    page.get_by_label("Date", exact=True).fill("2006-05-01")
    page.get_by_label("Text", exact=True).fill(PRESS)
    page.get_by_role("button", name="Add the text").click()
    expect(page.locator("#documents li")).to_contain_text("press2006-05-01")
    expect(ask(page).locator(".both .answer")).to_have_text("180")


def test_a_question_as_of_a_date(browser: Browser, running: Running) -> None:
    older = document("old", PRESS.replace("180", "140"), date="2004-05-01")
    with opened(browser, bank(running, "dated", older, document("new", PRESS, date="2006-05-01"))) as page:
        page.get_by_label("As of").fill("2005-01-01")
        entry = ask(page)
        expect(entry.locator(".both .answer")).to_have_text("140")
        expect(entry.locator(".sources li")).to_have_count(1)
        expect(entry.locator(".asked")).to_contain_text("as of 2005-01-01")


def test_errors_are_red_and_stay(browser: Browser, running: Running) -> None:
    with opened(browser, bank(running, "taken", *NEWS), refusals=True) as page:
        page.clock.install()
        page.get_by_text("Banks", exact=True).click()
        page.get_by_label("New bank").fill("taken")
        page.get_by_role("button", name="Make").click()
        error = page.locator("#errors .failed")
        expect(error).to_contain_text("a bank taken exists already")
        red, green, blue = map(int, re.findall(r"\d+", error.evaluate("box => getComputedStyle(box).color"))[:3])
        assert red > 2 * max(green, blue)
        ask(page)
        page.clock.fast_forward("01:00:00")
        expect(error).to_be_visible()
        error.get_by_role("button", name="Close").click()
        expect(error).to_have_count(0)


def test_after_a_429_the_page_goes_on_by_itself(browser: Browser, mac_tiny: MACModel, tmp_path: Path) -> None:
    with (
        serving(tmp_path, mac_tiny, requests_per_minute=120) as limited,
        opened(browser, bank(limited, "limited", *NEWS), refusals=True) as page,
        limited.client() as client,
    ):
        expect(page.locator("#documents li")).to_have_count(2)
        while client.get("/v1/jobs").status_code != 429:
            pass
        with page.expect_response(lambda response: response.status == 429):
            page.locator("#question").fill(QUESTION)
            page.locator("#question").press("Enter")
        for way in WAYS:
            expect(newest(page).locator(f".{way} .answer")).to_have_text("180")
        expect(page.locator("#errors")).to_be_empty()


def test_a_second_question_does_not_mix_with_the_first(browser: Browser, running: Running) -> None:
    held: list[Route] = []

    def hold(route: Route) -> None:
        first = "the first" in (route.request.post_data or "")
        held.append(route) if first else route.continue_()

    with opened(browser, bank(running, "mixed", *NEWS)) as page:
        expect(page.locator("#documents li")).to_have_count(2)
        page.route(ANSWERS, hold)
        page.locator("#question").fill("Is this the first question?")
        page.locator("#question").press("Enter")
        expect(page.locator(".entry")).to_have_count(1)
        ask(page)
        assert len(held) == len(WAYS)
        for route in held:
            route.fulfill(status=200, content_type="text/event-stream", body=sent("late"))
        first, second = page.locator(".entry").nth(1), newest(page)
        expect(first.locator("summary")).to_have_text("Is this the first question?")
        for way in WAYS:
            assert first.locator(f".{way} .answer").text_content() == " (stopped)"
            assert second.locator(f".{way} .answer").text_content() == "180"


def test_an_empty_answer_says_so(browser: Browser, running: Running) -> None:
    with opened(browser, bank(running, "empty", *NEWS)) as page:
        page.route(ANSWERS, lambda route: route.fulfill(content_type="text/event-stream", body=sent(" ")))
        expect(ask(page).locator(".both .answer")).to_have_text("The answer is empty.")


def test_sources_without_attention_are_counted_not_shown(browser: Browser, running: Running) -> None:
    def source(name: str, share: float, retrieved: bool, marks: list[list[int]]) -> dict[str, Any]:
        told = {"document_id": name, "attention": share, "retrieved": retrieved, "date": None}
        return {**told, "sentence": "It has 180.", "highlights": marks}

    sources = [
        source("much", 0.9, False, []),
        source("quoted", 0.004, True, [[7, 10]]),
        source("read", 0.004, True, []),
        source("other", 0.001, False, []),
    ]
    with opened(browser, bank(running, "shares", *NEWS)) as page:
        body = sent("180", sources=sources)
        page.route(ANSWERS, lambda route: route.fulfill(content_type="text/event-stream", body=body))
        entry = ask(page)
        expect(entry.locator(".sources li button")).to_have_text(["much", "quoted"])
        expect(entry.locator(".sources")).not_to_contain_text(re.compile(r"\b0 %"))
        expect(entry.locator(".others")).to_have_text("2 more with less than 1 % of the attention")


def test_confidence_is_shown_and_can_be_asked_for(
    browser: Browser, running: Running, mac_tiny: MACModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    always = Logistic(weights={}, bias=0.85, questions=2, data="test")
    fits = Calibration(fingerprint=mac_tiny.fingerprint, modes={"memory": always, "documents": always})
    monkeypatch.setattr(mac_tiny, "calibration", fits)
    with opened(browser, bank(running, "sure", *NEWS)) as page:
        entry = ask(page)
        for way in WAYS:
            expect(entry.locator(f".{way} .about")).to_contain_text("Confidence 70 %")
        page.get_by_label("“I don’t know” below").fill("90")
        entry = ask(page)
        expect(entry.locator(".memory .answer")).to_have_text("I don't know")
        expect(entry.locator(".memory .about")).to_contain_text("withheld: 180")
        expect(entry.locator(".asked")).to_contain_text("below 90 %")


def test_a_bank_without_a_retriever_is_asked_from_memory(browser: Browser, running: Running) -> None:
    with opened(browser, bank(running, "memory-alone", *NEWS, retriever="none")) as page:
        entry = ask(page)
        expect(entry.locator("article h3")).to_have_text(["Memory"])
        expect(entry.locator(".sources li").first).to_contain_text("press")
        expect(page.locator("#search")).to_be_hidden()


def test_history_stays_for_each_bank_until_it_is_cleared(browser: Browser, running: Running) -> None:
    bank(running, "other", *NEWS)
    with opened(browser, bank(running, "history", *NEWS)) as page:
        ask(page)
        ask(page, "Who opened Basalt Bridge?")
        page.reload()
        summaries = page.locator(".entry summary")
        expect(summaries).to_have_text(["Who opened Basalt Bridge?", QUESTION])
        summaries.nth(1).click()
        expect(page.locator(".entry").nth(1).locator(".both .answer")).to_have_text("180")
        expect(page.locator(".entry").nth(1).locator("blockquote mark").first).to_have_text("180")
        page.locator("#bank").select_option("other")
        expect(summaries).to_have_count(0)
        page.locator("#bank").select_option("history")
        expect(summaries).to_have_count(2)
        page.evaluate(
            """() => {
                const [record] = JSON.parse(localStorage.getItem("history:history"));
                localStorage.setItem("history:history", JSON.stringify(Array(200).fill(record)));
            }"""
        )
        page.reload()
        expect(summaries).to_have_count(200)
        ask(page)
        page.reload()
        expect(summaries).to_have_count(50)
        page.get_by_role("button", name="Clear the history").click()
        page.get_by_role("button", name="Clear", exact=True).click()
        expect(summaries).to_have_count(0)
        assert page.evaluate("localStorage.getItem('history:history')") is None


def test_a_link_leads_to_a_bank_and_a_question(browser: Browser, running: Running) -> None:
    bank(running, "aside")
    link = f"{bank(running, 'linked', *NEWS)}&{urlencode({'q': QUESTION, 'as_of': '2007-01-01'})}"
    with opened(browser, link) as page:
        expect(newest(page).locator(".both .answer")).to_have_text("180")
        expect(page.locator("#question")).to_have_value(QUESTION)
        expect(page.get_by_label("As of")).to_have_value("2007-01-01")
        ask(page, "Who opened Basalt Bridge?")
        page.go_back()
        expect(page.locator(".entry[open] summary")).to_have_text(QUESTION)
        expect(page.locator(".entry")).to_have_count(2)  # it was not asked again
        page.locator("#bank").select_option("aside")
        assert page.url.endswith("#bank=aside")
        page.goto(f"{running.url}/#bank=nowhere")
        expect(page.locator("#errors")).to_contain_text("There is no bank nowhere")


def test_documents_are_searched_and_deleted(browser: Browser, running: Running) -> None:
    with opened(browser, bank(running, "found", *NEWS)) as page:
        ask(page)
        page.get_by_label("Search documents").fill("Which company employs people?")
        page.get_by_role("button", name="Search").click()
        first = page.locator("#documents li").first
        expect(first).to_contain_text("press")
        expect(first).to_contain_text("The company employs 180 people.")
        first.get_by_role("button", name="press", exact=True).click()
        expect(page.locator("#reader-text")).to_have_text(PRESS)
        page.locator("#reader").get_by_role("button", name="Close").click()
        for answer, count in (("Cancel", 2), ("Delete", 1)):
            page.get_by_role("button", name="Delete press").click()
            page.locator("#confirm").get_by_role("button", name=answer).click()
            expect(page.locator("#count")).to_have_text(f"({count})")
        expect(page.locator("#documents li")).to_have_count(1)
        # What is deleted is no longer quoted.
        assert "employs" not in (page.evaluate("localStorage.getItem('history:found')") or "employs")


def test_a_bank_is_renamed_and_deleted(browser: Browser, running: Running) -> None:
    with opened(browser, bank(running, "draft", *NEWS)) as page:
        ask(page)
        page.get_by_text("Banks", exact=True).click()
        page.get_by_label("New name of draft").fill("final")
        page.get_by_role("button", name="Rename").click()
        expect(page.locator("#status")).to_have_text("Bank draft is now final.")
        expect(page.locator("#bank")).to_have_value("final")
        expect(page.locator("#count")).to_have_text("(2)")
        expect(page.locator(".entry summary")).to_have_text([QUESTION])
        for answer in ("Cancel", "Delete the bank"):
            if not page.locator("#delete-bank").is_visible():
                page.get_by_text("Banks", exact=True).click()
            page.get_by_role("button", name="Delete final").click()
            expect(page.locator("#confirm")).to_contain_text("all of its documents (2)")
            page.locator("#confirm").get_by_role("button", name=answer).click()
            expect(page.locator("#confirm")).to_be_hidden()
            assert running.client().get("/v1/banks/final").status_code == (200 if answer == "Cancel" else 404)
        expect(page.locator("#status")).to_have_text("Bank final is deleted.")
        assert page.evaluate("Object.keys(localStorage)").count("history:final") == 0


def test_a_job_shows_its_progress_and_can_be_cancelled(browser: Browser, running: Running, tmp_path: Path) -> None:
    rows = "\n".join(json.dumps(document(str(number), f"Report {number}.")) for number in range(100))
    (tmp_path / "rows.jsonl").write_text(f'{{"id": "no text"}}\n{rows}')
    with opened(browser, bank(running, "jobs")) as page:
        with running.service.catalog.get("jobs")._change():  # the job waits for its turn
            choose_files(page, [tmp_path / "rows.jsonl"])
            job = page.locator(".job")
            expect(job).to_contain_text("Adding documents to jobs: 1 so far")
            page.reload()
            expect(job).to_contain_text("Adding documents to jobs: 1 so far")
            expect(job.locator("progress")).to_be_visible()
            job.get_by_role("button", name="Cancel").click()
            expect(job).to_contain_text("0 added, 0 updated, 0 unchanged (cancelled)")
        expect(job.locator("li")).to_contain_text("rows.jsonl")
        page.reload()
        expect(job).to_contain_text("(cancelled)")
        job.get_by_role("button", name="Close").click()
        with page.expect_response(re.compile("/v1/jobs$")):
            page.reload()
        expect(page.locator("#count")).to_have_text("(0)")
        expect(job).to_have_count(0)


def test_answers_and_links_are_copied(browser: Browser, running: Running) -> None:
    url = bank(running, "copied", *NEWS)
    with opened(browser, url, permissions=["clipboard-read", "clipboard-write"]) as page:
        entry = ask(page)
        entry.locator(".both").get_by_role("button", name="Copy").click()
        expect(page.locator("#status")).to_have_text("The answer is copied.")
        assert page.evaluate("navigator.clipboard.readText()") == "180"
        entry.get_by_role("button", name="Copy link").click()
        expect(page.locator("#status")).to_have_text("The link is copied.")
        assert (
            page.evaluate("navigator.clipboard.readText()")
            == f"{url}&q={QUESTION.replace(' ', '+').replace('?', '%3F')}"
        )


def test_a_key_is_asked_for(browser: Browser, mac_tiny: MACModel, tmp_path: Path) -> None:
    with serving(tmp_path, mac_tiny, keys={"root": ("admin", ["*"]), "reader": ("read", ["*"])}) as guarded:
        reader = guarded.tokens["reader"]
        make(guarded.client("root"), "secret")
        with opened(browser, guarded.url, refusals=True) as page:
            expect(page.locator("#errors")).to_contain_text("This server asks for a key")
            page.get_by_label("Key", exact=True).fill(reader)
            page.keyboard.press("Enter")
            expect(page.locator("#bank")).to_have_value("secret")
            expect(page.locator("#errors")).to_be_empty()
            page.get_by_text("Banks", exact=True).click()
            page.get_by_role("button", name="Delete secret").click()
            page.get_by_role("button", name="Delete the bank").click()
            expect(page.locator("#errors")).to_contain_text("scope admin")
            assert reader not in page.evaluate("JSON.stringify(localStorage) + location.href")


def test_nothing_becomes_code(browser: Browser, running: Running) -> None:
    hostile = document(SCRIPT, f"{PRESS} {SCRIPT}", title=SCRIPT, date="2004-05-01")
    with opened(browser, bank(running, "hostile", hostile)) as page:
        expect(page.locator("#documents li")).to_contain_text(SCRIPT)
        ask(page, f"{SCRIPT} {QUESTION}")
        page.reload()  # its address opens the question
        expect(newest(page).locator("blockquote").first).to_contain_text("The company")
        newest(page).locator(".sources button").first.click()
        expect(page.locator("#reader-text")).to_contain_text(SCRIPT)
        expect(page.locator("#reader-about")).to_contain_text(SCRIPT)
        assert page.locator("body img").count() == 0
        assert page.title() == "mac_rag"


def press_until(page: Page, name: str) -> None:
    """Presses Tab until the control of this name has the focus."""
    for _ in range(40):
        page.keyboard.press("Tab")
        focused = page.evaluate("document.activeElement.textContent.trim() || document.activeElement.id")
        if focused == name:
            return
    raise AssertionError(f"{name} cannot be reached")


def test_the_keyboard_is_enough(browser: Browser, running: Running) -> None:
    with opened(browser, bank(running, "keyboard")) as page:
        press_until(page, "Add documents")
        page.keyboard.press("Enter")
        expect(page.locator("#add")).to_be_visible()
        press_until(page, "paste-name")
        page.keyboard.type("press")
        press_until(page, "paste-text")
        page.keyboard.type(PRESS)
        press_until(page, "Add the text")
        page.keyboard.press("Enter")
        expect(page.locator("#documents li")).to_have_count(1)
        page.reload()
        press_until(page, "Skip to the question")
        page.keyboard.press("Enter")
        expect(page.locator("#question")).to_be_focused()
        assert page.url.endswith("#bank=keyboard")
        page.keyboard.type(QUESTION)
        page.keyboard.press("Enter")
        expect(newest(page).locator(".both .answer")).to_have_text("180")
        press_until(page, "press")
        page.keyboard.press("Enter")
        expect(page.locator("#reader")).to_be_visible()
        page.keyboard.press("Escape")
        expect(page.locator("#reader")).to_be_hidden()
        press_until(page, "Delete")
        page.keyboard.press("Enter")
        press_until(page, "Delete")
        page.keyboard.press("Enter")
        expect(page.locator("#documents li")).to_have_count(0)


def test_a_phone_uploads_and_wraps_long_names(browser: Browser, running: Running, tmp_path: Path) -> None:
    name = "a-bank-" + "x" * 57
    (tmp_path / f"{LONG[:180]}.txt").write_text(BRIDGE)
    with opened(browser, bank(running, name, document(LONG, PRESS, title=LONG)), **PHONE) as page:

        def fits() -> None:
            assert page.evaluate("document.documentElement.scrollWidth") <= 360

        fits()
        page.get_by_role("button", name="Add documents").tap()
        choice = page.get_by_label(re.compile("^Files"))
        expect(choice).to_be_in_viewport()
        choice.set_input_files(tmp_path / f"{LONG[:180]}.txt")
        expect(page.locator(".job")).to_contain_text("1 added")
        expect(page.locator(".job")).to_be_in_viewport()
        fits()
        entry = ask(page, f"{QUESTION} {LONG}")
        fits()
        page.get_by_text("Banks", exact=True).tap()
        fits()
        page.get_by_text("Banks", exact=True).tap()
        entry.locator(".sources button").first.tap()
        fits()
        assert page.locator("#reader").evaluate("dialog => dialog.scrollWidth <= dialog.clientWidth")


def test_dark_by_the_system_and_by_a_switch(browser: Browser, running: Running) -> None:
    def is_dark(page: Page) -> bool:
        colour = page.evaluate("getComputedStyle(document.body).backgroundColor")
        return max(map(int, re.findall(r"\d+", colour)[:3])) < 128

    bank(running, "night")
    for scheme, other in (("light", "dark"), ("dark", "light")):
        with opened(browser, running.url, color_scheme=scheme) as page:
            assert is_dark(page) == (scheme == "dark")
            page.get_by_text("Settings", exact=True).click()
            page.get_by_label("Colours").select_option(other)
            assert is_dark(page) == (other == "dark")
            page.reload()
            assert is_dark(page) == (other == "dark")


@pytest.mark.parametrize("size", [{}, PHONE], ids=["wide", "phone"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing(browser: Browser, running: Running, scheme: str, size: dict[str, Any]) -> None:
    name = f"axe-{scheme}-{len(size)}"
    with opened(browser, bank(running, name, *NEWS), color_scheme=scheme, refusals=True, **size) as page:

        def check(what: str) -> None:
            results = Axe().run(page)
            assert results.violations_count == 0, f"{what}: {results.generate_report()}"

        expect(page.locator("#documents li")).to_have_count(2)
        ask(page)
        make_error = "import('/page/view.js').then(view => view.fail('It failed.'))"
        page.evaluate(make_error)
        with running.service.catalog.get(name)._change():
            page.evaluate(
                """import('/page/documents.js').then(documents => documents.upload([new File(["text"], "a.txt")]))"""
            )
            expect(page.locator(".job progress")).to_be_visible()
            check("answers, an error and a job")
        expect(page.locator(".job")).to_contain_text("1 added")
        page.get_by_label("Search documents").fill("company")
        page.get_by_role("button", name="Search").click()
        expect(page.locator("#found")).to_contain_text("best")
        page.get_by_text("Banks", exact=True).click()
        check("found documents and the banks")
        page.get_by_text("Banks", exact=True).click()
        page.get_by_text("Settings", exact=True).click()
        check("the settings")
        page.get_by_text("Settings", exact=True).click()
        page.get_by_role("button", name="Delete press").click()
        check("a confirmation")
        page.keyboard.press("Escape")
        newest(page).locator(".sources button").first.click()
        expect(page.locator("#reader")).to_be_visible()
        check("a document")
        page.keyboard.press("Escape")
        page.get_by_role("button", name="Add documents").click()
        check("adding documents")
