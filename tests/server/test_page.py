"""The page: nothing of it comes from elsewhere or runs what a document says."""

from __future__ import annotations

import re

from tests.helpers import Elements
from tests.server.helpers import Running


def test_it_is_html_that_loads_from_its_server_alone(running: Running) -> None:
    response = running.client().get("/")
    assert response.headers["content-type"].startswith("text/html")
    page = Elements(response.text)
    assert set(page.values("src", "href", "action")) == {
        "/page/app.js",
        "/page/icon.svg",
        "/page/style.css",
        "#question",
    }
    names = {name for _, attributes in page.found for name in attributes}
    assert not [name for name in names if name.startswith("on") or name == "style"]
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
    page, script = Elements(running.client().get("/").text), running.client().get("/page/app.js").text
    ids = page.values("id")
    assert len(ids) == len(set(ids))
    wanted = set(re.findall(r"\$\(\"([\w-]+)\"\)", script))
    assert wanted > {"question", "sources", "documents"}
    assert wanted <= set(ids)
    assert {"a-memory", "a-retrieval", "a-both"} <= set(ids)
    used = set(re.findall(r"[\"`](/v1/[\w/]+)", script))
    known = running.client().get("/openapi.json").json()["paths"]
    assert all(any(path.startswith(one.rstrip("/")) for path in known) for one in used)


def test_every_input_has_a_name_for_screen_readers(running: Running) -> None:
    page = Elements(running.client().get("/").text)
    labelled = page.values("for")
    for (tag, attributes), around in zip(page.found, page.around):
        if tag in ("input", "select"):
            assert "label" in around or attributes.get("aria-label") or attributes["id"] in labelled
