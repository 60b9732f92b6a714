"""The page: nothing of it comes from elsewhere or runs what a document says."""

from __future__ import annotations

import re

import pytest

from mac_rag.server.app import PUBLIC
from tests.helpers import Elements
from tests.server.helpers import Running

ASSETS = sorted(path for path in PUBLIC if path.startswith("/page/"))


@pytest.fixture(scope="module")
def script(running: Running) -> str:
    """All of the page's scripts."""
    return "\n".join(running.client().get(path).text for path in ASSETS if path.endswith(".js"))


def test_it_is_html_that_loads_from_its_server_alone(running: Running) -> None:
    response = running.client().get("/")
    assert response.headers["content-type"].startswith("text/html")
    page = Elements(response.text)
    assert set(page.values("src", "href", "action")) == {
        "/page/app.js",
        "/page/icon.svg",
        "/page/style.css",
        "/page/theme.js",
        "#question",
    }
    names = {name for _, attributes in page.found for name in attributes}
    assert not [name for name in names if name.startswith("on") or name == "style"]
    assert "<style" not in response.text
    assert re.findall(r"<script[^>]*>(.*?)</script>", response.text, re.DOTALL) == ["", ""]
    kinds = {"js": "text/javascript", "css": "text/css", "svg": "image/svg+xml"}
    for path in ASSETS:
        asset = running.client().get(path)
        assert asset.headers["content-type"].startswith(kinds[path.rpartition(".")[2]])
        if path.endswith(".svg"):
            continue  # its name space is an address
        assert "http://" not in asset.text
        assert "https://" not in asset.text
        assert "url(" not in asset.text
        assert "@import" not in asset.text


def test_its_script_never_makes_markup_of_text(script: str) -> None:
    ways = "innerHTML outerHTML insertAdjacentHTML document.write eval( Function( srcdoc setHTML"
    assert not [way for way in ways.split() if way in script]
    assert not re.search(r"setAttribute\(\"(?!aria-)", script)  # only what screen readers say


def test_its_script_finds_what_it_looks_for(running: Running, script: str) -> None:
    page = Elements(running.client().get("/").text)
    ids = page.values("id")
    assert len(ids) == len(set(ids))
    wanted = set(re.findall(r"(?:\$|\bon)\(\"([\w-]+)\"", script))
    assert wanted > {"question", "entries", "documents", "open-add"}
    assert wanted <= set(ids)
    used = set(re.findall(r"[\"`](/v1/[\w/]+)", script))
    known = running.client().get("/openapi.json").json()["paths"]
    assert all(any(path.startswith(one.rstrip("/")) for path in known) for one in used)


def test_every_input_has_a_name_for_screen_readers(running: Running) -> None:
    page = Elements(running.client().get("/").text)
    labelled = page.values("for")
    for (tag, attributes), around in zip(page.found, page.around):
        if tag in ("input", "select", "textarea"):
            assert "label" in around or attributes.get("aria-label") or attributes["id"] in labelled
