"""The text of an HTML page: what a browser without scripts and styles would show, a line for each block."""

from __future__ import annotations

import codecs
import re
from html.parser import HTMLParser
from typing import BinaryIO

from mac_rag.data.conversion.texts import UnreadableError
from mac_rag.untrusted_files import DOCUMENT

_HIDDEN = {"script", "style", "template", "noscript", "svg", "math", "iframe", "object"}
_BLOCKS = set(
    "address article aside blockquote body br caption center dd details dialog dir div dl dt fieldset figcaption "
    "figure footer form h1 h2 h3 h4 h5 h6 head header hr html legend li main menu nav ol option p section select "
    "summary table tbody tfoot thead title tr ul".split()
)
_SPACED = {"p", "h1", "h2", "h3", "h4", "h5", "h6", "blockquote", "table", "ul", "ol", "dl", "pre"}
_CELLS = {"td", "th"}
_CHARSET = re.compile(rb"""<meta[^>]{0,200}?charset\s*=\s*["']?\s*([A-Za-z0-9_:.-]{1,40})""", re.IGNORECASE)
_XML_ENCODING = re.compile(rb"""^\s*<\?xml[^>]{0,200}?encoding\s*=\s*["']([A-Za-z0-9_:.-]{1,40})""")
# The encodings of the web; Python has others, some of which are no encodings of texts.
_ENCODINGS = re.compile(
    r"utf-?8|us-ascii|ascii|windows-(125[0-8]|874)|cp125[0-8]|iso-?8859-?(1?\d)|latin-?[1-9]|koi8-[ru]|macintosh|"
    r"shift[_-]jis|sjis|euc-(jp|kr)|iso-2022-jp|gbk?|gb2312|gb18030|big5(-hkscs)?|utf-16(le|be)?",
    re.IGNORECASE,
)
_BOMS = ((codecs.BOM_UTF8, "utf-8-sig"), (codecs.BOM_UTF16_LE, "utf-16"), (codecs.BOM_UTF16_BE, "utf-16"))


def read_html(file: BinaryIO) -> tuple[str, str | None]:
    """The text of a page, and its title.

    Raises:
        UnreadableError: for a page that is too long, in an encoding that is not known, or without text.
    """
    data = file.read(DOCUMENT + 1)
    if len(data) > DOCUMENT:
        raise UnreadableError(f"has more than {DOCUMENT:,} bytes, the most of one document; split it into files")
    parser = _TextParser()
    parser.feed(_decoded(data))
    parser.close()
    text = "".join(parser.pieces)
    if not text.strip():
        raise UnreadableError("has no text; a page that a script fills has to be saved from a browser")
    return text, "".join(parser.title)


def _decoded(data: bytes) -> str:
    encoding = next((name for mark, name in _BOMS if data.startswith(mark)), None)
    if encoding is None:
        named = _XML_ENCODING.search(data[:1024]) or _CHARSET.search(data[:4096])
        encoding = named[1].decode() if named else "utf-8"
        if not _ENCODINGS.fullmatch(encoding):
            raise UnreadableError(f"is in the encoding {encoding!r}, which is not read; save it in UTF-8")
        # As browsers do: pages that call themselves so are in Windows' encoding, and a page in UTF-16 has a mark.
        encoding = {"iso-8859-1": "windows-1252", "latin1": "windows-1252"}.get(encoding.lower(), encoding)
        encoding = "utf-8" if encoding.lower().startswith("utf-16") else encoding
    try:
        return data.decode(encoding)
    except (UnicodeDecodeError, LookupError) as error:
        place = f": see byte {error.start:,}" if isinstance(error, UnicodeDecodeError) else ""
        raise UnreadableError(f"is not in the encoding {encoding}{place}; save it in UTF-8") from None


class _TextParser(HTMLParser):
    """Collects texts and line breaks. Nesting costs no stack."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.pieces: list[str] = []
        self.title: list[str] = []
        self._in_title = False
        self._titled = False
        self._hidden: str | None = None  # the element that is left out, and how deep it is nested in itself
        self._depth = 0
        self._preformatted = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if self._hidden is not None:
            self._depth += tag == self._hidden
        elif tag in _HIDDEN:
            self._hidden, self._depth = tag, 1
        elif tag == "title" and not self._titled:
            self._in_title = True
        else:
            self._preformatted += tag == "pre"
            self._break(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        # In HTML, the stroke of <script/> says nothing; in XHTML, which we cannot tell apart, it says that all is over.
        if self._hidden is None and tag not in _HIDDEN and tag != "title":
            self._break(tag)

    def handle_endtag(self, tag: str) -> None:
        if self._hidden is not None:
            self._depth -= tag == self._hidden
            self._hidden = self._hidden if self._depth else None
        elif tag == "title":
            self._in_title, self._titled = False, True
        else:
            self._preformatted -= tag == "pre" and self._preformatted > 0
            self._break(tag)

    def handle_data(self, data: str) -> None:
        if self._hidden is not None:
            return
        if self._in_title:
            self.title.append(data)
        elif self._preformatted:
            self.pieces.append(data)
        else:
            self.pieces.append(re.sub(r"\s+", " ", data))

    def _break(self, tag: str) -> None:
        if tag in _CELLS:
            self.pieces.append("\t")
        elif tag in _SPACED:
            self.pieces.append("\n\n")
        elif tag in _BLOCKS:
            self.pieces.append("\n")
