"""The text of a Word file (DOCX): its paragraphs and tables in order.

Footnotes, headers, comments and deletions are left out. A DOCX is a zip of XML. A part is unpacked up to a bound,
whatever the zip says about its size. XML with a DTD, which alone can have entities, is refused.
"""

from __future__ import annotations

import posixpath
import zlib
from typing import BinaryIO
from xml.parsers import expat
from zipfile import BadZipFile, ZipFile

from mac_rag.data.conversion.texts import UnreadableError
from mac_rag.untrusted_files import DOCUMENT

_LARGEST_PART = 4 * DOCUMENT  # bytes; most of them are marks
_MOST_PARTS = 10_000
_OLE = b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1"  # how encrypted files begin, and those of the format .doc
_WORD = {
    "http://schemas.openxmlformats.org/wordprocessingml/2006/main",
    "http://purl.oclc.org/ooxml/wordprocessingml/main",  # the strict variant
}
_COMPATIBILITY = "http://schemas.openxmlformats.org/markup-compatibility/2006"
_TITLE = "http://purl.org/dc/elements/1.1/ title"
_OFFICE_DOCUMENT, _CORE = "/officeDocument", "/core-properties"


def read_docx(file: BinaryIO) -> tuple[str, str | None]:
    """The text of a Word file, and the title in its properties.

    Raises:
        UnreadableError: for a file that is no DOCX, encrypted, damaged, larger than is read, or without text.
    """
    start = file.read(len(_OLE))
    file.seek(0)
    if start == _OLE:
        raise UnreadableError("is encrypted, or in the format .doc; save it as .docx without a password")
    try:
        with ZipFile(file) as archive:
            if len(archive.infolist()) > _MOST_PARTS:
                raise UnreadableError(f"has more than {_MOST_PARTS:,} parts, which no Word file has")
            places = _Places()
            _parse(_part(archive, "_rels/.rels"), places)
            text = _Text()
            _parse(_part(archive, places.found.get(_OFFICE_DOCUMENT, "word/document.xml")), text)
            title = _Title()
            if _CORE in places.found:
                _parse(_part(archive, places.found[_CORE]), title)
    except KeyError as error:
        raise UnreadableError(f"is no Word file: {error.args[0]}") from None
    except (BadZipFile, zlib.error, EOFError, RuntimeError, NotImplementedError, ValueError) as error:
        if isinstance(error, UnreadableError):
            raise
        raise UnreadableError(f"is no Word file, or damaged: {error}; save it again, or as text") from None
    found = "".join(text.pieces)
    if not found.strip():
        raise UnreadableError("has no text; pictures of texts have to be converted to text first")
    return found, "".join(title.pieces)


def _part(archive: ZipFile, name: str) -> bytes:
    with archive.open(name) as part:
        data = part.read(_LARGEST_PART + 1)
    if len(data) > _LARGEST_PART:
        raise UnreadableError(f"has a part {name!r} of more than {_LARGEST_PART:,} bytes; split it into files")
    return data


class _Handler:
    """Takes the elements of a part; their names are `NAMESPACE NAME`."""

    def start(self, name: str, attributes: dict[str, str]) -> None:
        """Takes the start of an element."""

    def end(self, name: str) -> None:
        """Takes its end."""

    def characters(self, data: str) -> None:
        """Takes characters."""


def _parse(data: bytes, handler: _Handler) -> None:
    def refuse(*_: object) -> None:
        raise UnreadableError("has XML with a DTD, which no Word file has")

    parser = expat.ParserCreate(namespace_separator=" ")
    parser.StartDoctypeDeclHandler = refuse
    parser.buffer_text = True
    parser.StartElementHandler = handler.start
    parser.EndElementHandler = handler.end
    parser.CharacterDataHandler = handler.characters
    try:
        parser.Parse(data, True)
    except expat.ExpatError as error:
        raise UnreadableError(f"is damaged: its XML is not well-formed ({error}); save it again, or as text") from None


class _Places(_Handler):
    """The parts that the file's relationships name, by the ends of their types."""

    def __init__(self) -> None:
        self.found: dict[str, str] = {}

    def start(self, name: str, attributes: dict[str, str]) -> None:
        kind, target = attributes.get("Type", ""), attributes.get("Target", "")
        for end in (_OFFICE_DOCUMENT, _CORE):
            if kind.endswith(end) and attributes.get("TargetMode") != "External":
                self.found.setdefault(end, posixpath.normpath(target.lstrip("/")))


class _Title(_Handler):
    def __init__(self) -> None:
        self.pieces: list[str] = []
        self._inside = False

    def start(self, name: str, attributes: dict[str, str]) -> None:
        self._inside = name == _TITLE

    def end(self, name: str) -> None:
        self._inside = False

    def characters(self, data: str) -> None:
        if self._inside:
            self.pieces.append(data)


class _Text(_Handler):
    """The texts of runs, with a line for each paragraph, and tabs between the cells of a row."""

    def __init__(self) -> None:
        self.pieces: list[str] = []
        self._above: list[str] = []
        self._skipped = 0  # how deep in what is left out
        self._tables = 0

    def start(self, name: str, attributes: dict[str, str]) -> None:
        tag = _tag(name)
        # What has been moved away, and what older programs show in place of something.
        if self._skipped or tag in ("moveFrom", "Fallback"):
            self._skipped += 1
            return
        self._tables += tag == "tbl"
        if self._above and self._above[-1] == "r":  # a tab elsewhere is a tab stop
            self.pieces += {"tab": "\t", "br": "\n", "cr": "\n", "noBreakHyphen": "-"}.get(tag, "")
        self._above.append(tag)

    def end(self, name: str) -> None:
        if self._skipped:
            self._skipped -= 1
            return
        tag = self._above.pop()
        self._tables -= tag == "tbl"
        if tag == "p":
            self.pieces.append(" " if self._tables else "\n")
        elif tag == "tc":
            self.pieces.append("\t")
        elif tag in ("tr", "tbl"):
            self.pieces.append("\n")

    def characters(self, data: str) -> None:
        if not self._skipped and self._above and self._above[-1] == "t":
            self.pieces.append(data)


def _tag(name: str) -> str:
    """The name of an element of Word, or of a choice among elements; an empty text for others."""
    namespace, _, tag = name.rpartition(" ")
    return tag if namespace in _WORD or (namespace == _COMPATIBILITY and tag == "Fallback") else ""
