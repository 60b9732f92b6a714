"""The documentation site: it builds strictly, needs nothing from elsewhere, and every link in it leads somewhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
import yaml

from tests.helpers import Elements

ROOT = Path(__file__).parents[1]
# Attributes by which a browser fetches something as soon as it shows the page; an `a` waits for a click.
FETCHED = ("src", "srcset", "poster", "data", "action")
# Pages that name files of the repository.
NAMING_FILES = [
    *(ROOT / "docs" / name for name in ("glossary.md", "architecture.md", "how-it-works.md", "results.md")),
    ROOT / "CONTRIBUTING.md",
]
SOURCE_PATH = re.compile(r"`((?:mac_rag|pipelines|eval|benchmarks|tests|examples|docs)/[\w./-]*)`")


class Page(Elements):
    """What one page holds.

    Attributes:
        source: the page.
        fetched: addresses that a browser fetches with the page.
        links: addresses of its links.
        ids: places that a link can lead to.
    """

    def __init__(self, source: str) -> None:
        super().__init__(source)
        self.source = source
        self.ids = set(self.values("id", "name"))
        leading = [(tag, attrs[name]) for tag, attrs in self.found for name in ("href", "xlink:href") if name in attrs]
        self.links = [address for tag, address in leading if tag == "a"]
        self.fetched = [address for tag, address in leading if tag != "a"] + [a for a in self.values(*FETCHED) if a]
        self.fetched += re.findall(r"url\(['\"]?([^'\")]+)", " ".join(self.values("style")))


@dataclass(frozen=True)
class Site:
    """A built site: where it is, what the build said, and its pages."""

    folder: Path
    output: str
    pages: dict[Path, Page]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Site:
    folder = tmp_path_factory.mktemp("site")
    finished = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1", "HF_HUB_OFFLINE": "1"},
    )
    output = finished.stdout + finished.stderr
    assert finished.returncode == 0, output
    pages = {path: Page(path.read_text()) for path in sorted(folder.rglob("*.html"))}
    return Site(folder, output, pages)


def is_external(address: str) -> bool:
    parts = urlsplit(address)
    return bool(parts.netloc) or parts.scheme not in ("", "data")


def test_the_build_has_no_warnings(site: Site) -> None:
    assert "WARNING" not in site.output
    assert len(site.pages) > 20


def test_no_page_fetches_anything_from_elsewhere(site: Site) -> None:
    external = {
        (page.name, address)
        for page, content in site.pages.items()
        for address in content.fetched
        if is_external(address)
    }
    assert external == set()


def test_no_style_sheet_fetches_anything_from_elsewhere(site: Site) -> None:
    sheets = [path.read_text() for path in site.folder.rglob("*.css")]
    sheets += [style for page in site.pages.values() for style in re.findall(r"(?s)<style.*?</style>", page.source)]
    addresses = [address for text in sheets for address in re.findall(r"url\(\s*['\"]?([^'\")\s]+)", text)]
    imports = [address for text in sheets for address in re.findall(r"@import\s+['\"]([^'\"]+)", text)]
    assert [address for address in [*addresses, *imports] if is_external(address)] == []


def test_no_page_makes_the_theme_load_a_script_from_elsewhere(site: Site) -> None:
    """The theme's own script loads Mermaid and MathJax over the network for elements of these classes."""
    assert [
        page.name for page, content in site.pages.items() if re.search(r'class="(mermaid|arithmatex)', content.source)
    ] == []


def test_every_internal_link_leads_to_a_page_and_a_place_in_it(site: Site) -> None:
    broken = []
    for page, content in site.pages.items():
        for address in [*content.links, *content.fetched]:
            parts = urlsplit(address)
            if parts.scheme or parts.netloc:
                continue
            path = unquote(parts.path)
            base = site.folder if path.startswith("/") else page.parent
            target = (base / path.lstrip("/")).resolve() if path else page
            target = target / "index.html" if target.is_dir() else target
            place = unquote(parts.fragment)
            if not target.is_file() or (place and target in site.pages and place not in site.pages[target].ids):
                broken.append((page.name, address))
    assert broken == []


@pytest.mark.parametrize("command", ["mac-rag-bank-compact", "pipelines-train", "eval-squad", "benchmarks-throughput"])
def test_the_reference_has_the_help_text_of_every_kind_of_command(site: Site, command: str) -> None:
    found = [content.source for content in site.pages.values() if command in content.ids]
    assert len(found) == 1
    assert "Usage: " in found[0]


@pytest.mark.parametrize("page", NAMING_FILES, ids=lambda page: page.name)
def test_every_file_that_the_documentation_names_exists(page: Path) -> None:
    named = SOURCE_PATH.findall(page.read_text())
    assert [path for path in named if not (ROOT / path).exists()] == []


WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_a_workflow_may_only_read_and_pins_its_actions(path: Path) -> None:
    workflow = yaml.safe_load(path.read_text())
    assert workflow["permissions"] == {"contents": "read"}
    steps = [step for job in workflow["jobs"].values() for step in job["steps"]]
    actions = [step["uses"] for step in steps if "uses" in step]
    assert [action for action in actions if not re.fullmatch(r"actions/[\w-]+@v\d+", action)] == []
    assert "secrets." not in path.read_text()


def test_the_documentation_is_short() -> None:
    """A page answers one question; what was tried is in the history."""
    pages = [*(ROOT / "docs").rglob("*.md"), ROOT / "CHANGELOG.md"]
    assert sum(len(page.read_text().split()) for page in pages) <= 32_000
