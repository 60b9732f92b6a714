"""The page: nothing of it comes from elsewhere or runs what a document says."""

from __future__ import annotations

import re
from html.parser import HTMLParser

from tests.server.helpers import Running


class Read(HTMLParser):
    """Tags, ids, references and attributes of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.references: list[str] = []
        self.attributes: list[str] = []
        self.labelled: set[str] = set()
        self.inputs: list[str] = []
        self.inside: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.inside.append(tag)
        self.attributes += values
        self.ids += [value for name, value in attrs if name == "id" and value]
        self.references += [value for name, value in attrs if name in ("src", "href", "action") and value]
        if tag == "label" and values.get("for"):
            self.labelled.add(values["for"] or "")
        if tag in ("input", "select"):
            named = "label" in self.inside or values.get("aria-label")
            self.inputs += [] if named else [values["id"] or ""]
        if tag in ("input", "meta", "link", "br"):
            self.inside.pop()

    def handle_endtag(self, tag: str) -> None:
        while self.inside and self.inside.pop() != tag:
            pass


def test_it_is_html_that_loads_from_its_server_alone(running: Running) -> None:
    response = running.client().get("/")
    assert response.headers["content-type"].startswith("text/html")
    page = Read(response.text)
    assert set(page.references) == {"/page/app.js", "/page/icon.svg", "/page/style.css", "#question"}
    assert not [name for name in page.attributes if name.startswith("on") or name == "style"]
    assert "<style" not in response.text
    assert re.findall(r"<script[^>]*>(.*?)</script>", response.text, re.DOTALL) == [""]
    for path, kind in (("/page/app.js", "text/javascript"), ("/page/style.css", "text/css")):
        asset = running.client().get(path)
        assert asset.headers["content-type"].startswith(kind)
        assert "http://" not in asset.text
        assert "https://" not in asset.text
        assert "url(" not in asset.text
        assert "@import" not in asset.text


def test_its_script_never_makes_markup_of_text(running: Running) -> None:
    script = running.client().get("/page/app.js").text
    ways = "innerHTML outerHTML insertAdjacentHTML document.write eval( Function( srcdoc setHTML"
    assert not [way for way in ways.split() if way in script]
    assert not re.search(r"setAttribute\(\"(?!aria-)", script)  # only what screen readers say


def test_its_script_finds_what_it_looks_for(running: Running) -> None:
    page, script = Read(running.client().get("/").text), running.client().get("/page/app.js").text
    assert len(page.ids) == len(set(page.ids))
    wanted = set(re.findall(r"\$\(\"([\w-]+)\"\)", script))
    assert wanted > {"question", "sources", "documents"}
    assert wanted <= set(page.ids)
    assert {"a-memory", "a-retrieval", "a-both"} <= set(page.ids)
    used = set(re.findall(r"[\"`](/v1/[\w/]+)", script))
    known = running.client().get("/openapi.json").json()["paths"]
    assert all(any(path.startswith(one.rstrip("/")) for path in known) for one in used)


def test_every_input_has_a_name_for_screen_readers(running: Running) -> None:
    page = Read(running.client().get("/").text)
    assert set(page.inputs) <= page.labelled
