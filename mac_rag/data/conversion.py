"""Texts of HTML, PDF and DOCX files, read in a separate process within bounds of size, time and memory.

These formats are complicated, and a stranger may have made a file to exploit that. A file can slow, fill or crash only
that process, which runs no code that a file holds, and follows no reference out of a file.
"""

from __future__ import annotations

import atexit
import codecs
import json
import logging
import os
import posixpath
import re
import subprocess
import sys
import zlib
from contextlib import suppress
from html.parser import HTMLParser
from pathlib import Path
from threading import Lock, Timer
from typing import Any, BinaryIO, NamedTuple
from xml.parsers import expat
from zipfile import BadZipFile, ZipFile

from mac_rag.errors import DataError
from mac_rag.untrusted_files import DOCUMENT, METADATA_DEPTH, MalformedError, open_file, parse_json

SUFFIXES = (".html", ".htm", ".xhtml", ".pdf", ".docx")
_SECONDS = 120.0  # most time for one file
# Most bytes of an answer, which is a line of JSON in ASCII: up to six bytes for each character.
_LONGEST_LINE = 6 * DOCUMENT + (1 << 20)
# Most bytes of a file, most of which may be pictures.
LARGEST_FILE = 256 << 20
_MEMORY = 4 << 30  # bytes of address space; the libraries take some of it
# The text, of all formats.
_LONGEST_TITLE = 1_000  # characters
_NO_CHARACTER = re.compile(r"[\x00\ud800-\udfff]")
_SPACES = re.compile(r"[ \u00a0]+")
_AROUND_BREAK = re.compile(r"[ \t]*\n[ \t]*")
_BLANK_LINES = re.compile(r"\n{3,}")
# PDF.
_MOST_PAGES = 10_000
# DOCX.
_LARGEST_PART = 4 * DOCUMENT  # bytes, most of which are markup
_MOST_PARTS = 10_000
_OLE = b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1"  # the beginning of encrypted files, and of files in the format .doc
_WORD = {
    "http://schemas.openxmlformats.org/wordprocessingml/2006/main",
    "http://purl.oclc.org/ooxml/wordprocessingml/main",  # the strict variant
}
_COMPATIBILITY = "http://schemas.openxmlformats.org/markup-compatibility/2006"
_TITLE = "http://purl.org/dc/elements/1.1/ title"
_OFFICE_DOCUMENT, _CORE = "/officeDocument", "/core-properties"
# HTML.
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
# The encodings of the web. Python has others, some of which do not encode texts.
_ENCODINGS = re.compile(
    r"utf-?8|us-ascii|ascii|windows-(125[0-8]|874)|cp125[0-8]|iso-?8859-?(1?\d)|latin-?[1-9]|koi8-[ru]|macintosh|"
    r"shift[_-]jis|sjis|euc-(jp|kr)|iso-2022-jp|gbk?|gb2312|gb18030|big5(-hkscs)?|utf-16(le|be)?",
    re.IGNORECASE,
)
_BOMS = ((codecs.BOM_UTF8, "utf-8-sig"), (codecs.BOM_UTF16_LE, "utf-16"), (codecs.BOM_UTF16_BE, "utf-16"))


class Converted(NamedTuple):
    """The text of a file.

    Attributes:
        text: the text, with one line for each paragraph.
        title: the title that the file gives; None if it gives none.
    """

    text: str
    title: str | None


def is_converted(path: Path) -> bool:
    """True for a file that must be converted, by the ending of its name."""
    return path.suffix.lower() in SUFFIXES


def convert(path: Path) -> Converted:
    """Reads the text of an HTML, PDF or DOCX file. The ending of its name tells the format.

    Raises:
        DataError: if the package that reads the format is not installed; for a file that is missing, malformed,
            encrypted, or without text, or that takes more time, memory or space than one document may. Names the file
            and the remedy.
    """
    answer = _WORKER.ask(path, _SECONDS)
    if "error" in answer:
        raise DataError(f"{path} {answer['error']}")
    return Converted(answer["text"], answer["title"])


def interrupt() -> None:
    """Ends the conversion that another thread waits for, which gets an error; no effect without one."""
    _WORKER.interrupt()


class _Worker:
    """The process that converts files. It starts with the first file, is reused, and ends with the parent process."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = 0  # id of the process that started it; a fork must not use its parent's

    def ask(self, path: Path, seconds: float) -> dict[str, Any]:
        with self._lock:
            process = self._running()
            assert process.stdin is not None
            assert process.stdout is not None
            late = False

            def end() -> None:
                nonlocal late
                late = True
                process.kill()

            timer = Timer(seconds, end)
            timer.daemon = True
            timer.start()
            answered = False
            try:
                process.stdin.write(json.dumps({"path": os.path.abspath(path)}).encode() + b"\n")
                process.stdin.flush()
                line = process.stdout.readline(_LONGEST_LINE)
                answered = line.endswith(b"\n")
            except BrokenPipeError:
                line = b""
            finally:
                timer.cancel()
                if not answered:  # also after an interrupt: this answer must not be taken for that of the next file
                    self._end()
        if answered:
            try:
                answer: dict[str, Any] = parse_json(line, depth=METADATA_DEPTH)
            except MalformedError as error:
                raise DataError(f"{path} cannot be converted: {error}; convert it to text by other means") from None
            return answer
        if late:
            return {"error": f"takes more than {seconds:g} s to convert; convert it to text by other means"}
        return {"error": "cannot be converted: its reader has crashed; convert it to text by other means"}

    def interrupt(self) -> None:
        process = self._process
        if self._lock.locked() and process is not None and self._owner == os.getpid():
            process.kill()

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._owner != os.getpid() or self._process.poll() is not None:
            # -P: imports no module from the working directory, which may hold somebody else's files.
            paths = [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", "from mac_rag.data.conversion import main; main()"],
                env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C goes to the command only, which ends this process
            )
            self._owner = os.getpid()
        return self._process

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None and self._owner == os.getpid():
            process.kill()
            process.wait()
            for stream in (process.stdin, process.stdout):
                if stream is not None:
                    with suppress(BrokenPipeError):
                        stream.close()


_WORKER = _Worker()
atexit.register(_WORKER._end)


def converted(path: Path) -> dict[str, object]:
    """The answer for one file."""
    try:
        with open_file(path, follow=True) as file:
            if os.fstat(file.fileno()).st_size > LARGEST_FILE:
                raise UnreadableError(f"has more than {LARGEST_FILE:,} bytes; split it into files")
            reader = {".pdf": read_pdf, ".docx": read_docx}.get(path.suffix.lower(), read_html)
            text, title = reader(file)
        text = cleaned(text)
        if len(text.encode()) > DOCUMENT:
            raise UnreadableError(f"has a text of more than {DOCUMENT:,} bytes, the most of one document; split it")
        return {"text": text, "title": one_line(title or "") or None}
    except UnreadableError as error:
        return {"error": str(error)}
    except MalformedError as error:
        return {"error": f"cannot be read: {error}; give a file"}
    except OSError as error:
        return {"error": f"cannot be read: {error.strerror or error}; give a file that exists and is readable"}
    except MemoryError:
        return {"error": "takes too much memory to convert; convert it to text by other means"}


def main() -> None:
    """The process that converts files: reads lines of JSON, `{"path": ...}`, and answers each with a text or an error.

    It ends when its standard input ends.
    """
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # output of libraries must not be taken for an answer
    logging.disable()
    _bound_memory()
    for line in sys.stdin.buffer:
        answer = converted(Path(json.loads(line)["path"]))
        answers.write(json.dumps(answer).encode() + b"\n")
        answers.flush()


def _bound_memory() -> None:
    try:
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    except (ImportError, OSError, ValueError):  # not every system has it; bounds of size and time still hold
        pass


class UnreadableError(ValueError):
    """A file whose text cannot be read; the message continues the file's name."""


def cleaned(text: str) -> str:
    r"""A text without superfluous spaces and blank lines, and with U+FFFD in place of invalid characters.

    Examples:
        >>> cleaned("  Harbours \r\n\n\n\n of   Lund\x00 ")
        'Harbours\n\nof Lund�'
    """
    text = _NO_CHARACTER.sub("�", text.replace("\r\n", "\n").replace("\r", "\n"))
    return _BLANK_LINES.sub("\n\n", _AROUND_BREAK.sub("\n", _SPACES.sub(" ", text))).strip()


def one_line(text: str) -> str:
    """A title as one line of bounded length."""
    return " ".join(_NO_CHARACTER.sub("�", text).split())[:_LONGEST_TITLE]


def read_pdf(file: BinaryIO) -> tuple[str, str | None]:
    """Reads the text of a PDF, page by page, and the title in its properties.

    The characters come from the PDF's fonts; text in pictures is not recognized.

    Raises:
        UnreadableError: if pypdf is missing; for a file that is not a PDF, encrypted, damaged, too long, or without
            text.
    """
    try:
        from pypdf import PdfReader
        from pypdf.errors import DependencyError, FileNotDecryptedError
    except ModuleNotFoundError:
        raise UnreadableError("is PDF, which needs pypdf: pip install 'mac-rag[files]'") from None
    try:
        reader = PdfReader(file, strict=False)
        if reader.is_encrypted and not reader.decrypt(""):  # many files have a password only for changes
            raise FileNotDecryptedError("encrypted")
        count = len(reader.pages)
        if count > _MOST_PAGES:
            raise UnreadableError(f"has {count:,} pages, and {_MOST_PAGES:,} are the most; split it")
        pages, size = [], 0
        for page in reader.pages:
            pages.append(page.extract_text())
            size += len(pages[-1])
            if size > DOCUMENT:
                raise UnreadableError(f"has a text of more than {DOCUMENT:,} bytes, the most of one document; split it")
        title = None if reader.metadata is None else reader.metadata.title
    except (FileNotDecryptedError, DependencyError):  # DependencyError if a cipher is not installed
        raise UnreadableError("is encrypted; save it without a password: qpdf --decrypt IN OUT") from None
    except (UnreadableError, MemoryError):
        raise
    except Exception as error:  # pypdf raises errors of many classes for malformed files
        raise UnreadableError(
            f"is not a PDF, or damaged ({type(error).__name__}: {error!s:.200}); save it again, or as text"
        ) from None
    text = "\n\n".join(pages)
    if not text.strip():
        raise UnreadableError("has no text, like a scan; recognize its text first: ocrmypdf IN OUT")
    return text, title if isinstance(title, str) else None


def read_docx(file: BinaryIO) -> tuple[str, str | None]:
    """Reads the text of a Word file, its paragraphs and tables in order, and the title in its properties.

    Footnotes, headers, comments and deletions are left out. A DOCX is a zip of XML. A part is unpacked up to a bound,
    whatever size the zip claims. XML with a DTD is refused, because a DTD can define entities.

    Raises:
        UnreadableError: for a file that is not a DOCX, encrypted, damaged, too large, or without text.
    """
    start = file.read(len(_OLE))
    file.seek(0)
    if start == _OLE:
        raise UnreadableError("is encrypted, or in the format .doc; save it as .docx without a password")
    try:
        with ZipFile(file) as archive:
            if len(archive.infolist()) > _MOST_PARTS:
                raise UnreadableError(f"has more than {_MOST_PARTS:,} parts, which no Word file has; save it again")
            places = _Places()
            _parse(_part(archive, "_rels/.rels"), places)
            text = _Text()
            _parse(_part(archive, places.found.get(_OFFICE_DOCUMENT, "word/document.xml")), text)
            title = _Title()
            if _CORE in places.found:
                _parse(_part(archive, places.found[_CORE]), title)
    except KeyError as error:
        raise UnreadableError(f"is not a Word file: {error.args[0]}; save it again, or as text") from None
    except (BadZipFile, zlib.error, EOFError, RuntimeError, NotImplementedError, ValueError) as error:
        if isinstance(error, UnreadableError):
            raise
        raise UnreadableError(f"is not a Word file, or damaged: {error}; save it again, or as text") from None
    content = "".join(text.pieces)
    if not content.strip():
        raise UnreadableError("has no text; if it has pictures of texts, recognize them first")
    return content, "".join(title.pieces)


def _part(archive: ZipFile, name: str) -> bytes:
    with archive.open(name) as part:
        data = part.read(_LARGEST_PART + 1)
    if len(data) > _LARGEST_PART:
        raise UnreadableError(f"has a part {name!r} of more than {_LARGEST_PART:,} bytes; split it into files")
    return data


class _Handler:
    """Receives the XML elements of a part; their names are `NAMESPACE NAME`."""

    def start(self, name: str, attributes: dict[str, str]) -> None:
        """Receives the start of an element."""

    def end(self, name: str) -> None:
        """Receives the end of an element."""

    def characters(self, data: str) -> None:
        """Receives characters."""


def _parse(data: bytes, handler: _Handler) -> None:
    def refuse(*_: object) -> None:
        raise UnreadableError("has XML with a DTD, which no Word file has; save it again, or as text")

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
    """The parts that the file's relationships name, by the endings of their types."""

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
    """The texts of runs, with one line for each paragraph, and tabs between the cells of a row."""

    def __init__(self) -> None:
        self.pieces: list[str] = []
        self._above: list[str] = []
        self._skipped = 0  # depth inside an element that is left out
        self._tables = 0

    def start(self, name: str, attributes: dict[str, str]) -> None:
        tag = _tag(name)
        # Text that has been moved away, and the substitutes for programs that lack a feature.
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
    """The name of an element of Word, or `Fallback`; an empty text for other elements."""
    namespace, _, tag = name.rpartition(" ")
    return tag if namespace in _WORD or (namespace == _COMPATIBILITY and tag == "Fallback") else ""


def read_html(file: BinaryIO) -> tuple[str, str | None]:
    """Reads the text of a page, as a browser without scripts and styles shows it, with a line per block; and its title.

    Raises:
        UnreadableError: for a page that is too long, in an unknown encoding, or without text.
    """
    data = file.read(DOCUMENT + 1)
    if len(data) > DOCUMENT:
        raise UnreadableError(f"has more than {DOCUMENT:,} bytes, the most of one document; split it into files")
    parser = _TextParser()
    parser.feed(_page(data))
    parser.close()
    text = "".join(parser.pieces)
    if not text.strip():
        raise UnreadableError("has no text; if a script fills the page, save it from a browser")
    return text, "".join(parser.title)


def _page(data: bytes) -> str:
    encoding = next((name for mark, name in _BOMS if data.startswith(mark)), None)
    if encoding is None:
        named = _XML_ENCODING.search(data[:1024]) or _CHARSET.search(data[:4096])
        encoding = named[1].decode() if named else "utf-8"
        if not _ENCODINGS.fullmatch(encoding):
            raise UnreadableError(f"is in the encoding {encoding!r}, which is not supported; save it in UTF-8")
        # As browsers do: iso-8859-1 means windows-1252, and a page in UTF-16 would have a byte order mark.
        encoding = {"iso-8859-1": "windows-1252", "latin1": "windows-1252"}.get(encoding.lower(), encoding)
        encoding = "utf-8" if encoding.lower().startswith("utf-16") else encoding
    try:
        return data.decode(encoding)
    except (UnicodeDecodeError, LookupError) as error:
        place = f": see byte {error.start:,}" if isinstance(error, UnicodeDecodeError) else ""
        raise UnreadableError(f"is not in the encoding {encoding}{place}; save it in UTF-8") from None


class _TextParser(HTMLParser):
    """Collects texts and line breaks, without recursion, so that deep nesting is harmless."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.pieces: list[str] = []
        self.title: list[str] = []
        self._in_title = False
        self._titled = False
        self._hidden: str | None = None  # name of the element that is being left out
        self._depth = 0  # how deep it is nested in elements of its own name
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
        # In HTML, the slash of <script/> has no meaning; in XHTML, which looks the same, it ends the element.
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
