"""News articles in NITF XML, as the New York Times Annotated Corpus ships them: loose files or in .tgz archives."""

from __future__ import annotations

import datetime
import gzip
import os
import tarfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from xml.etree.ElementTree import Element, TreeBuilder
from xml.parsers import expat

from mac_rag.errors import DataError


@dataclass(frozen=True, slots=True)
class Article:
    """One news article.

    Attributes:
        id: its number in the corpus.
        title: its title; empty if the file gives none.
        date: `YYYY-MM-DD`, or None if the file gives no valid one.
        paragraphs: its text; empty paragraphs are kept, because questions name paragraphs by their position.
    """

    id: str
    title: str
    date: str | None
    paragraphs: tuple[str, ...]


def read_articles(folder: Path) -> Iterator[Article]:
    """Yields every article below a folder, from .xml files and from .xml members of .tgz archives, in order of name.

    XML files without an article's id are skipped. Nothing is unpacked to disk.

    Raises:
        DataError: for a folder without such files, a damaged archive, or XML that is ill-formed or declares entities.
    """
    has_documents = False
    for source, content in _documents(folder):
        has_documents = True
        article = parse_article(content, source)
        if article is not None:
            yield article
    if not has_documents:
        raise DataError(f"{folder} holds no .xml file and no .tgz archive with one; give the folder of the corpus")


def parse_article(content: bytes, source: str) -> Article | None:
    """Reads one NITF document; None if it has no `doc-id`.

    Raises:
        DataError: for ill-formed XML, entity declarations, or references to undeclared entities; names `source`.
    """
    root = _parse_xml(content, source)
    number = root.find(".//doc-id[@id-string]")
    if number is None:
        return None
    title = root.find("head/title")
    block = root.find(".//block[@class='full_text']")
    paragraphs = () if block is None else tuple(_text(paragraph) for paragraph in block.iterfind(".//p"))
    return Article(number.attrib["id-string"], "" if title is None else _text(title), _date(root), paragraphs)


def _documents(folder: Path) -> Iterator[tuple[str, bytes]]:
    for parent, folders, names in os.walk(folder):
        folders.sort()
        for name in sorted(names):
            path = Path(parent, name)
            if name.endswith(".xml"):
                yield str(path), path.read_bytes()
            elif name.endswith((".tgz", ".tar.gz")):
                yield from _members(path)


def _members(path: Path) -> Iterator[tuple[str, bytes]]:
    try:
        with gzip.open(path) as stream:
            with tarfile.open(fileobj=stream, mode="r|") as archive:
                for member in archive:
                    file = archive.extractfile(member) if member.name.endswith(".xml") else None
                    if file is not None:
                        yield f"{path}:{member.name}", file.read()
            # tarfile does not notice a truncated archive; reading on to the gzip trailer does.
            while stream.read(1 << 20):
                pass
    except (tarfile.TarError, OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} is not a whole .tgz archive: {error}") from None


def _parse_xml(content: bytes, source: str) -> Element:
    """Parses XML, but no entity declarations: entities could expand without bound or read other files."""

    def refuse(name: str, *_: object) -> None:
        raise DataError(
            f"{source} is refused: it declares or uses the XML entity {name!r}, as no article of the corpus does"
        )

    builder = TreeBuilder()
    parser = expat.ParserCreate()
    parser.StartElementHandler = builder.start
    parser.EndElementHandler = builder.end
    parser.CharacterDataHandler = builder.data
    parser.EntityDeclHandler = refuse
    parser.SkippedEntityHandler = refuse
    try:
        parser.Parse(content, True)
    except (expat.ExpatError, ValueError, LookupError) as error:
        raise DataError(f"{source} is not well-formed XML: {error}") from None
    return builder.close()


def _text(element: Element) -> str:
    return "".join(element.itertext()).strip()


def _date(root: Element) -> str | None:
    parts = []
    for name in ("year", "month", "day_of_month"):
        meta = root.find(f"head/meta[@name='publication_{name}']")
        parts.append("" if meta is None else meta.get("content", ""))
    try:
        return datetime.date(*map(int, parts)).isoformat()
    except ValueError:
        return None
