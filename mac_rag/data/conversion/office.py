"""Texts of word processors' files, by pandoc, which writes a page; and of books, which are made of pages.

pandoc leaves some of a Word or OpenDocument file out and shows what is hidden. So the file is first written in elements
that pandoc reads right, and afterwards what is not in the text is noted.
"""

from __future__ import annotations

import codecs
import posixpath
import re
import subprocess
import unicodedata
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from html import unescape
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryFile
from typing import BinaryIO
from urllib.parse import unquote
from xml.etree import ElementTree
from xml.etree.ElementTree import Element
from zipfile import BadZipFile, ZipFile

from mac_rag.data.conversion.html import decoded, page_text
from mac_rag.data.conversion.text import Notices, UnreadableError, check_size
from mac_rag.untrusted_files import DOCUMENT

_SECONDS = 120  # of a processor
_HEAP = "-M3g"
_LARGEST_PAGE = 4 * DOCUMENT  # bytes, of pandoc's output
_MOST_SAID = 16 << 20  # bytes, of its messages
# Zipped files.
_LARGEST_PART = 4 * DOCUMENT  # bytes; also of all parts together
_MOST_PARTS = 10_000
_OLE = b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1"  # the beginning of encrypted files, and of files in the format .doc
_TITLE = "{http://purl.org/dc/elements/1.1/}title"
_STRICT = re.compile(rb"http://purl\.oclc\.org/ooxml/(\w+)/")  # the names of a variant that pandoc does not read
_TRANSITIONAL = rb"http://schemas.openxmlformats.org/\1/2006/"
_PACKAGE = "http://www.idpf.org/2007/opf"
_CONTAINER = "urn:oasis:names:tc:opendocument:xmlns:container"
# What surrounds a symbol of Word, so that a symbol which pandoc does not know leaves a gap.
_EDGE = "\ufdd0"
_SYMBOL = re.compile(f"{_EDGE}([^{_EDGE}]*){_EDGE}")
_PRIVATE = re.compile(r"[\ue000-\uf8ff]")
_MOST_SEARCHES = 1_000
# What pandoc says of a text that is lost. Formulas remain in TeX's notation, and a page needs no title.
_SAID = re.compile(r"\[WARNING\] (?!Could not convert TeX math|This document format)|\[INFO\] Skipped .*\{")

_NAMESPACES = {
    "w": "http://schemas.openxmlformats.org/wordprocessingml/2006/main",
    "m": "http://schemas.openxmlformats.org/officeDocument/2006/math",
    "r": "http://schemas.openxmlformats.org/officeDocument/2006/relationships",
    "mc": "http://schemas.openxmlformats.org/markup-compatibility/2006",
    "a": "http://schemas.openxmlformats.org/drawingml/2006/main",
    "c": "http://schemas.openxmlformats.org/drawingml/2006/chart",
    "pic": "http://schemas.openxmlformats.org/drawingml/2006/picture",
    "wp": "http://schemas.openxmlformats.org/drawingml/2006/wordprocessingDrawing",
    "v": "urn:schemas-microsoft-com:vml",
    "office": "urn:oasis:names:tc:opendocument:xmlns:office:1.0",
    "text": "urn:oasis:names:tc:opendocument:xmlns:text:1.0",
    "table": "urn:oasis:names:tc:opendocument:xmlns:table:1.0",
    "draw": "urn:oasis:names:tc:opendocument:xmlns:drawing:1.0",
    "style": "urn:oasis:names:tc:opendocument:xmlns:style:1.0",
}
for _prefix, _uri in _NAMESPACES.items():  # pandoc knows Word's elements by their prefixes
    ElementTree.register_namespace(_prefix, _uri)


def _names(prefix: str, names: str) -> frozenset[str]:
    return frozenset(f"{{{_NAMESPACES[prefix]}}}{name}" for name in names.split())


def _name(prefixed: str) -> str:
    prefix, _, name = prefixed.partition(":")
    return f"{{{_NAMESPACES[prefix]}}}{name}"


# Word. Dropped: what is deleted, moved away, a reading of characters, or a substitute for programs that lack a feature.
_DROPPED = _names("w", "del moveFrom rt rubyPr sdtPr sdtEndPr softHyphen") | _names("mc", "Fallback")
_UNWRAPPED = _names("w", "ins moveTo fldSimple customXml bdo dir smartTag sdt sdtContent ruby rubyBase")
_UNWRAPPED |= _names("mc", "AlternateContent Choice")
_VAL, _R, _T, _RPR, _BOX = map(_name, ("w:val", "w:r", "w:t", "w:rPr", "w:txbxContent"))
_RENAMED = {_name("w:cr"): _name("w:br"), _name("w:ptab"): _name("w:tab")}
_WORD_TEXTS = _names("w", "t") | _names("a", "t") | _names("c", "v")
_WITH_TEXTS = re.compile(r"/(?:(?:foot|end)notes|comments|header|footer|charts/|diagrams/data)[^/]*\.xml")
_SYMBOL_FONTS = ("symbol", "wingdings", "webdings")
# OpenDocument.
_BLOCKS = _names("text", "p h list section") | _names("table", "table")
_INSIDE = _names("text", "p h span a meta ruby ruby-base")
_INLINE = _names(
    "text",
    "p h list span a s tab line-break note bookmark bookmark-start bookmark-end bookmark-ref reference-mark "
    "reference-mark-start reference-mark-end reference-ref sequence soft-page-break change change-start change-end "
    "hidden-paragraph",
)
# RTF: a font's set of characters -> Python's codec.
_CHARSETS = {
    77: "mac_roman", 128: "cp932", 129: "cp949", 134: "gb18030", 136: "cp950", 161: "cp1253", 162: "cp1254",
    163: "cp1258", 177: "cp1255", 178: "cp1256", 186: "cp1257", 204: "cp1251", 222: "cp874", 238: "cp1250",
}  # fmt: skip
_RTF = re.compile(rb"([{}])|\\uc(\d)|\\f(\d{1,5})(?!\d)|(\\u-?\d{1,6} ?)?((?:\\'[0-9a-fA-F]{2})+)")
_RTF_FONT = re.compile(rb"\\f(\d{1,5})(?![0-9])[^{};]{0,200}?\\fcharset(\d{1,3})")
_RTF_PAGE = re.compile(rb"\\ansicpg(\d{1,5})")

Change = Callable[[Element, Element], "list[Element] | None"]
Texts = list[tuple[str, str]]  # part and text, in the order of the file


def read_office(file: BinaryIO, kind: str, notices: Notices) -> tuple[str, str | None]:
    """Reads the text of a Word, OpenDocument, RTF, LaTeX or notebook file, and its title.

    Args:
        file: the file.
        kind: pandoc's name of the format.
        notices: gets what is left out though a reader of the file sees it.

    Raises:
        UnreadableError: if pandoc is missing; for a file of another format, encrypted, damaged, too large, or without
            text.
    """
    data, title = file.read(), None
    texts: Texts = []
    if data.startswith(_OLE):
        raise UnreadableError("is encrypted, or in the format .doc; save it as .docx without a password")
    if kind in ("docx", "odt"):
        with _opened(data, "Word" if kind == "docx" else "OpenDocument") as parts:
            data, texts = (_word if kind == "docx" else _open_document)(parts, notices)
            title = next((parts.title(name) for name in ("docProps/core.xml", "meta.xml") if name in parts.names), None)
    elif kind == "rtf":
        data = _in_unicode(data)
    page = _pandoc(kind, data, notices)
    _note_missing(texts, page, notices)
    text, shown = page_text(_with_symbols(page, notices), notices)
    if not text.strip():
        raise UnreadableError("has no text; if it has pictures of texts, recognize them first")
    return text, title or (None if shown in (None, "-", "") else shown)  # pandoc's title of what has none is -


def _pandoc(kind: str, data: bytes, notices: Notices) -> str:
    """Pandoc's page of a file. It reads and writes nothing else, within bounds of time and memory."""
    spec = find_spec("pypandoc")
    program = Path(spec.origin or "").parent / "files" / "pandoc" if spec is not None else Path()
    if not program.is_file():
        raise UnreadableError("needs pandoc: pip install 'mac-rag[files]'")
    command = [str(program), "+RTS", _HEAP, "-RTS", "--sandbox", "--verbose", "-f", kind, "-t", "html", "-s"]
    with TemporaryFile() as given, TemporaryFile() as said:
        given.write(data)
        given.seek(0)
        with subprocess.Popen(
            [*command, "--wrap=none", "--syntax-highlighting=none"],
            stdin=given,
            stdout=subprocess.PIPE,
            stderr=said,
            preexec_fn=_bound,
        ) as process:
            assert process.stdout is not None
            page = process.stdout.read(_LARGEST_PAGE + 1)
            if len(page) > _LARGEST_PAGE:
                process.kill()
                check_size(len(page))
        said.seek(0)
        lines = said.read(_MOST_SAID).decode(errors="replace").splitlines()
    if process.returncode:
        if process.returncode == 251:
            raise MemoryError
        reason = " ".join(line for line in lines if not line.startswith("[")) or f"signal {-process.returncode}"
        raise UnreadableError(f"is not {kind}, or damaged ({reason:.200}); save it again, or as text")
    for line in lines:
        if _SAID.match(line):
            notices.add("pandoc says", line.partition("] ")[2])
    return page.decode(errors="replace")


def _bound() -> None:
    """Bounds pandoc's time, so that it ends even if nobody is there to end it, and what it says."""
    try:
        import resource

        resource.setrlimit(resource.RLIMIT_CPU, (_SECONDS, _SECONDS))
        resource.setrlimit(resource.RLIMIT_FSIZE, (_MOST_SAID, _MOST_SAID))
    except (ImportError, OSError, ValueError):
        pass


class _Parts:
    """The parts of a zipped file, each unpacked up to a bound, whatever size the zip claims."""

    def __init__(self, archive: ZipFile) -> None:
        self._archive = archive
        self._left = _LARGEST_PART
        self.names = dict.fromkeys(archive.namelist())
        if len(self.names) > _MOST_PARTS:
            raise UnreadableError(f"has more than {_MOST_PARTS:,} parts, which no text has; save it again")

    def read(self, name: str) -> bytes:
        """A part.

        Raises:
            KeyError: if there is none of the name.
            UnreadableError: if the parts are too large.
        """
        with self._archive.open(name) as part:
            data = part.read(self._left + 1)
        self._left -= len(data)
        if self._left < 0:
            raise UnreadableError(f"has parts of more than {_LARGEST_PART:,} bytes; split it into files")
        return data

    def xml(self, name: str) -> Element:
        """The root of a part, which has no DTD, because that can define entities."""
        data = _STRICT.sub(_TRANSITIONAL, self.read(name))
        try:
            return ElementTree.fromstring(data, ElementTree.XMLParser(target=_Tree()))
        except ElementTree.ParseError as error:
            raise UnreadableError(f"is damaged: {name} is not XML ({error}); save it again, or as text") from None

    def title(self, name: str) -> str | None:
        """The title in a part of properties."""
        return self.xml(name).findtext(f".//{_TITLE}")

    def targets(self, name: str, *kinds: str) -> list[str]:
        """The parts to which a part of relationships points, by the ends of the relations' types."""
        if name not in self.names:
            return []
        folder = posixpath.dirname(posixpath.dirname(name))
        return [
            posixpath.normpath(posixpath.join("/" + folder, one.get("Target", ""))).lstrip("/")
            for one in self.xml(name)
            if one.get("Type", "").endswith(kinds) and one.get("TargetMode") != "External"
        ]


class _Tree(ElementTree.TreeBuilder):
    def doctype(self, *_: object) -> None:
        raise UnreadableError("has XML with a DTD, which no such file has; save it again, or as text")


@contextmanager
def _opened(data: bytes, kind: str) -> Iterator[_Parts]:
    """The parts of a zipped file. Whatever is wrong with it becomes an error that says so."""
    try:
        with ZipFile(BytesIO(data)) as archive:
            yield _Parts(archive)
    except UnreadableError:
        raise
    except (BadZipFile, zlib.error, EOFError, RuntimeError, NotImplementedError, KeyError, ValueError) as error:
        reason = error.args[0] if error.args else error
        raise UnreadableError(f"is not a file of {kind}, or damaged: {reason}; save it again, or as text") from None


def _rewritten(root: Element, change: Change) -> Element:
    """Replaces elements below the root, the inner ones first. What follows a replaced element stays.

    Args:
        root: the element, which is changed in place.
        change: from a parent and a child, what replaces the child; None to keep it.
    """
    for parent in reversed(list(root.iter())):
        replaced = [(child, change(parent, child)) for child in parent]
        if all(new is None for _, new in replaced):
            continue
        children: list[Element] = []
        for child, new in replaced:
            tail = child.tail
            children += [child] if new is None else new
            if new is None or not tail:
                continue
            if child in new:
                child.tail = None
            if children:
                children[-1].tail = (children[-1].tail or "") + tail
            else:
                parent.text = (parent.text or "") + tail
        parent[:] = children
    return root


def _zipped(parts: Mapping[str, bytes]) -> bytes:
    data = BytesIO()
    with ZipFile(data, "w") as archive:
        for name, content in parts.items():
            archive.writestr(name, content)
    return data.getvalue()


def _word(parts: _Parts, notices: Notices) -> tuple[bytes, Texts]:
    """A Word file in elements that pandoc reads, and its texts. Raises KeyError if a part is missing."""
    main = next(iter(parts.targets("_rels/.rels", "/officeDocument")), "word/document.xml")
    folder = posixpath.dirname(main)
    styles = parts.xml(f"{folder}/styles.xml") if f"{folder}/styles.xml" in parts.names else Element("none")
    written, texts = {}, []
    for name in [main, *(name for name in parts.names if name != main)]:
        if name.endswith(".rels"):
            written[name] = _STRICT.sub(_TRANSITIONAL, parts.read(name))
            for target in parts.targets(name, "/aFChunk", "/oleObject", "/package"):
                notices.add("inserted files are left out", target)
        elif name == main or _WITH_TEXTS.match(name.removeprefix(folder)):
            root = parts.xml(name)
            for run in _hidden_runs(root, styles):
                run.clear()
            written[name] = ElementTree.tostring(_rewritten(root, _in_word), "utf-8")
            texts += [(name, one.text or "") for one in root.iter() if one.tag in _WORD_TEXTS]
        elif name.startswith(f"{folder}/media/"):
            written[name] = b""  # so that pandoc writes where a picture is
        elif name in (f"{folder}/styles.xml", f"{folder}/numbering.xml"):
            written[name] = _STRICT.sub(_TRANSITIONAL, parts.read(name))
    return _zipped(written), texts


def _hidden_runs(root: Element, styles: Element) -> set[Element]:
    """The runs of text that are hidden: by themselves, or by the style of their characters or of their paragraph."""
    hides: dict[str | None, tuple[str | None, bool | None]] = {}
    for style in styles.iter(_name("w:style")):
        based = style.find(_name("w:basedOn"))
        hidden = _switch(style.find(f"{_RPR}/{_name('w:vanish')}"))
        hides[style.get(_name("w:styleId"))] = (None if based is None else based.get(_VAL), hidden)
        if style.get(_name("w:default")) in ("1", "true") and style.get(_name("w:type")) == "paragraph":
            hides[None] = (style.get(_name("w:styleId")), None)

    def hiding(element: Element, path: str) -> bool:
        found = element.find(path)
        name = None if found is None else found.get(_VAL)
        for _ in hides:
            above, hidden = hides.get(name, (None, None))
            if hidden is not None or above is None:
                return bool(hidden)
            name = above
        return False

    runs = {}
    for paragraph in root.iter(_name("w:p")):  # an inner one comes after the outer one, and counts
        by_paragraph = hiding(paragraph, f"{_name('w:pPr')}/{_name('w:pStyle')}")
        for run in paragraph.iter(_R):
            itself = _switch(run.find(f"{_RPR}/{_name('w:vanish')}"))
            styled = run.find(f"{_RPR}/{_name('w:rStyle')}") is not None
            by_style = by_paragraph != (styled and hiding(run, f"{_RPR}/{_name('w:rStyle')}"))
            runs[run] = by_style if itself is None else itself
    return {run for run, hidden in runs.items() if hidden}


def _switch(element: Element | None) -> bool | None:
    return None if element is None else element.get(_VAL) not in ("0", "false", "off")


def _in_word(_: Element, element: Element) -> list[Element] | None:
    """What replaces an element of Word."""
    tag = element.tag
    if tag in _DROPPED or (tag == _name("w:tr") and element.find(f"{_name('w:trPr')}/{_name('w:hidden')}") is not None):
        return []
    if tag in _UNWRAPPED:
        return list(element)
    element.tag = _RENAMED.get(tag, tag)
    if tag == _name("w:noBreakHyphen"):
        return [_text("-")]
    if tag == _name("w:sym"):
        return _symbol(element)
    if tag == _RPR and element.find(_name("w:vertAlign")) is None:
        position = element.find(_name("w:position"))
        if position is not None and re.match(r"[1-9]", position.get(_VAL, "")):
            ElementTree.SubElement(element, _name("w:vertAlign"), {_VAL: "superscript"})
    if tag == _R and any(child.tag == _R for child in element):  # the base of a ruby
        return [child if child.tag == _R else _run(child, element.find(_RPR)) for child in element if child.tag != _RPR]
    if tag == _R and (state := _state(element)):
        return [_run(_text(state)), element]
    if tag == _name("w:p"):
        boxed = []
        for box in element.iter(_BOX):
            boxed += list(box)
            box[:] = []
        return [element, *boxed] if boxed else None
    return None


def _text(text: str) -> Element:
    element = Element(_T, {"{http://www.w3.org/XML/1998/namespace}space": "preserve"})
    element.text = text
    return element


def _run(child: Element, properties: Element | None = None) -> Element:
    run = Element(_R)
    run.extend([child] if properties is None else [properties, child])
    return run


def _symbol(element: Element) -> list[Element]:
    """A character of a font of symbols, between marks; of another font, as a text."""
    font, code = element.get(_name("w:font"), ""), element.get(_name("w:char"), "")
    character = chr(int(code, 16)) if re.fullmatch("[0-9A-Fa-f]{2,4}", code) else ""
    if font.lower().startswith(_SYMBOL_FONTS):
        return [_text(_EDGE), element, _text(_EDGE)]
    return [_text(character if character.isprintable() and character else _EDGE + _EDGE)]


def _state(run: Element) -> str:
    """The state of a box to tick or of a menu that begins in a run, which is no text in a Word file."""
    box, menu = run.find(f".//{_name('w:checkBox')}"), run.find(f".//{_name('w:ddList')}")
    if box is not None:
        state = box.find(_name("w:checked"))
        return "☑ " if _switch(box.find(_name("w:default")) if state is None else state) else "☐ "
    if menu is not None:
        chosen = menu.find(_name("w:result"))
        number = "0" if chosen is None else chosen.get(_VAL, "0")
        entries = [entry.get(_VAL, "") for entry in menu.findall(_name("w:listEntry"))]
        return next((entry for place, entry in enumerate(entries) if str(place) == number), "")
    return ""


def _open_document(parts: _Parts, _: Notices) -> tuple[bytes, Texts]:
    """An OpenDocument text in elements that pandoc reads, and its texts. Raises KeyError if a part is missing."""
    if "META-INF/manifest.xml" in parts.names and b"encryption-data" in parts.read("META-INF/manifest.xml"):
        raise UnreadableError("is encrypted; save it without a password")
    roots = {name: parts.xml(name) for name in parts.names if re.search(r"(^|/)(content|styles)\.xml$", name)}
    hides: dict[tuple[str | None, str | None], tuple[str | None, str | None]] = {}
    for root in roots.values():
        for style in root.iter(_name("style:style")):
            properties = style.find(_name("style:text-properties"))
            display = None if properties is None else properties.get(_name("text:display"))
            hides[style.get(_name("style:family")), style.get(_name("style:name"))] = (
                style.get(_name("style:parent-style-name")),
                display,
            )

    def is_hidden(element: Element) -> bool:
        family = {"span": "text", "p": "paragraph", "h": "paragraph"}.get(element.tag.rpartition("}")[2])
        name = element.get(_name("text:style-name"))
        for _ in hides:
            name, display = hides.get((family, name), (None, None))
            if display or name is None:
                return display == "none"
        return False

    def change(parent: Element, child: Element) -> list[Element] | None:
        return [] if is_hidden(child) else _in_open_document(parent, child)

    texts = []
    for name, root in roots.items():
        _rewritten(root, change)
        for element in root.iter():
            if element.tag.startswith(_name("text:")):
                pieces = [element.text, *(child.tail for child in element)]
                texts += [(name, piece) for piece in pieces if piece and piece.strip()]
    if "content.xml" not in roots:
        raise KeyError("it has no content.xml")
    roots.setdefault("styles.xml", Element(_name("office:document-styles")))  # which pandoc needs
    texts.sort(key=lambda text: text[0] != "content.xml")
    return _zipped({name: ElementTree.tostring(root, "utf-8") for name, root in roots.items()}), texts


def _in_open_document(parent: Element, element: Element) -> list[Element] | None:
    """What replaces an element of OpenDocument."""
    tag, inside = element.tag, parent.tag in _INSIDE
    hidden = element.get(_name("text:is-hidden"))
    if tag in _names("text", "tracked-changes ruby-text"):
        return []
    if tag == _name("text:section"):
        shown = element.get(_name("text:display"), "true")
        return [] if shown == "none" or (shown == "condition" and hidden == "true") else None
    if tag == _name("text:hidden-text") and hidden != "false":
        return []
    if tag in _names("text", "p h"):
        if any(one.get(_name("text:is-hidden")) != "false" for one in element.iter(_name("text:hidden-paragraph"))):
            return []
        boxed = _boxed(element)
        return [element, *boxed] if boxed else None
    if tag.startswith(_name("draw:")) and not inside:
        return _boxed(element) or None
    if inside and tag.startswith(_name("text:")) and tag not in _INLINE:
        element.tag = _name("text:span")  # a field; pandoc knows few of them
        element.attrib.clear()
    return None


def _boxed(element: Element) -> list[Element]:
    """Takes paragraphs and tables out of the frames and shapes in an element."""
    boxed: list[Element] = []
    for shape in element.iter():
        if shape.tag.startswith(_name("draw:")):
            blocks = [child for child in shape if child.tag in _BLOCKS]
            boxed += blocks
            shape[:] = [child for child in shape if child not in blocks]
    return boxed


def _in_unicode(data: bytes) -> bytes:
    """An RTF file whose bytes of other code pages than 1252, the one that pandoc knows, are characters of Unicode.

    Raises:
        UnreadableError: if it is not RTF.
    """
    if not data.lstrip().startswith(b"{\\rtf"):
        raise UnreadableError("is not RTF; save it again, or as text")
    page = _RTF_PAGE.search(data)
    codec = f"cp{page[1].decode()}" if page else "cp1252"
    try:
        codecs.lookup(codec)
    except LookupError:
        raise UnreadableError(f"is in the code page {codec}, which is unknown; save it again, or as text") from None
    fonts = {int(number): _CHARSETS.get(int(charset), codec) for number, charset in _RTF_FONT.findall(data)}
    now, above = (codec, 1), [(codec, 1)]  # codec, and number of characters that stand for one of Unicode

    def change(match: re.Match[bytes]) -> bytes:
        nonlocal now
        bracket, skipped, font, character, codes = match.groups()
        if bracket == b"{":
            above.append(now)
        elif bracket == b"}":
            now = above.pop() if above else now
        elif skipped:
            now = (now[0], int(skipped))
        elif font:
            now = (fonts.get(int(font), codec), now[1])
        elif codes:
            kept = 4 * now[1] if character else 0
            letters = bytes.fromhex(codes[kept:].replace(b"\\'", b"").decode()).decode(now[0], "replace")
            units = memoryview(letters.encode("utf-16-le")).cast("h")
            return (character or b"") + codes[:kept] + b"".join(b"\\u%d " % unit + b"?" * now[1] for unit in units)
        return match[0]

    return _RTF_PAGE.sub(rb"\\ansicpg1252", _RTF.sub(change, data))


def _with_symbols(page: str, notices: Notices) -> str:
    """A page in which U+FFFD stands for the symbols that pandoc does not know."""

    def symbol(match: re.Match[str]) -> str:
        if match[1] and not _PRIVATE.search(match[1]):
            return match[1]
        notices.add("unknown symbols are shown as �", page[: match.start()].rpartition(">")[2][-20:])
        return "�"

    return _SYMBOL.sub(symbol, page)


def _note_missing(texts: Texts, page: str, notices: Notices) -> None:
    """Notes which texts of a file are not on its page: of headers, comments, charts and whatever else pandoc drops."""
    whole, place, searches = _letters(_shown(page)), 0, 0
    for part, piece in texts:
        letters = _letters(piece)
        found = whole.find(letters, place)
        if found < 0 and len(letters) > 1:
            searches += 1
            found = whole.find(letters)
            if found < 0:
                notices.add(f"text of {part} is left out", piece)
        if searches > _MOST_SEARCHES:  # each may take long
            notices.add("the rest of the file was not compared with its text", f"from {part} on")
            return
        place = found if found >= 0 else place


def _shown(page: str) -> str:
    return unescape(re.sub(r"<style.*?</style>|<[^>]*>", "", page, flags=re.DOTALL)).replace(_EDGE, "")


def _letters(text: str) -> str:
    return re.sub(r"[\W_]+", "", unicodedata.normalize("NFKC", text).casefold())


def read_book(file: BinaryIO, notices: Notices) -> tuple[str, str | None]:
    """Reads the texts of an EPUB's pages in order, and its title.

    Args:
        file: the book.
        notices: gets what is left out though a reader of the book sees it.

    Raises:
        UnreadableError: for a file that is no EPUB, encrypted, damaged, too large, or without text.
    """
    with _opened(file.read(), "EPUB") as parts:
        locks = "META-INF/encryption.xml"  # which may also name fonts alone
        if locks in parts.names and re.search(rb"""\.x?html?["']""", parts.read(locks)):
            raise UnreadableError("is encrypted; give a copy without protection")
        root = next(parts.xml("META-INF/container.xml").iter(f"{{{_CONTAINER}}}rootfile"), Element("none"))
        package = root.get("full-path", "")
        book = parts.xml(package)
        items = {one.get("id"): one for one in book.iter(f"{{{_PACKAGE}}}item")}
        sheet = "".join(parts.read(name).decode(errors="replace") for name in parts.names if name.endswith(".css"))
        texts, size = [], 0
        for reference in book.iter(f"{{{_PACKAGE}}}itemref"):
            item = items.get(reference.get("idref"), Element("none"))
            if "nav" in item.get("properties", "").split():
                continue  # the table of contents
            name = posixpath.normpath(posixpath.join(posixpath.dirname(package), unquote(item.get("href", ""))))
            if name not in parts.names:
                notices.add("pages that are not in the file are left out", name)
                continue
            texts.append(page_text(decoded(parts.read(name), notices), notices, xhtml=True, sheet=sheet)[0])
            size += len(texts[-1])
            check_size(size)
        title = book.findtext(f".//{_TITLE}")
    text = "\n\n".join(texts)
    if not text.strip():
        raise UnreadableError("has no text; if it has pictures of texts, recognize them first")
    return text, title
