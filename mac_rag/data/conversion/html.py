"""Texts of web pages: decoded as browsers do, and without what these do not show."""

from __future__ import annotations

import codecs
import re
from contextlib import suppress
from html import escape
from typing import BinaryIO

import webencodings
from selectolax.lexbor import LexborHTMLParser, LexborNode, SelectolaxError

from mac_rag.data.conversion.text import Notices, UnreadableError, lowered, raised
from mac_rag.untrusted_files import DOCUMENT

_PRESCAN = 1 << 16  # bytes of a page in which its encoding is looked for
_BOMS = (
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF16_LE, "utf-16le"),
    (codecs.BOM_UTF16_BE, "utf-16be"),
    (b"<\0", "utf-16le"),
    (b"\0<", "utf-16be"),
)
_XML_ENCODING = re.compile(rb"""^\s*<\?xml[^>]{0,200}?encoding\s*=\s*["']([^"'>]{1,40})""")
_CHARSET = re.compile(r"""charset\s*=\s*["']?\s*([^\s"';]+)""", re.IGNORECASE)
# The encodings of which browsers know more characters than Python's codec of the name: the codec instead.
_LARGER = {"gbk": "gb18030", "euc-jp": "euc-jp", "iso-2022-jp": "euc-jp"}
_JIS = re.compile(rb"\x1b\$[@B]([\x21-\x7e]*)|\x1b\([BJ]")

# XHTML, for an HTML parser.
_EMPTY_ELEMENT = re.compile(r"<([A-Za-z][\w.:-]*+)([^<>]*+)(?<=/)>")
_VOID = frozenset("area base br col embed hr img input link meta param source track wbr".split())
_CDATA = re.compile(r"<!\[CDATA\[(.*?)\]\]>", re.DOTALL)

# Elements that browsers do not show, readings of characters, and the way back from a note.
_HIDDEN = (
    "annotation, annotation-xml, area, datalist, desc, defs, head, metadata, meter, noembed, noframes, noscript, "
    "progress, rp, rt, rtc, script, style, template, title, dialog:not([open]), [hidden], [popover], "
    "[role=doc-backlink]"
)
# Elements whose content they load, and those that take text back.
_LOADED = frozenset("applet audio canvas embed frame iframe object video".split())
_STRUCK = frozenset(("del", "s", "strike"))
_BLOCKS = frozenset(
    "address article aside blockquote body br caption center dd details dialog dir div dl dt fieldset figcaption "
    "figure footer form h1 h2 h3 h4 h5 h6 header hr html legend li listing main menu mtr nav ol option p pre section "
    "select summary table tbody text textarea tfoot thead tr ul".split()
)
_SPACED = frozenset("blockquote dl h1 h2 h3 h4 h5 h6 ol p pre table ul".split())
_CELLS = frozenset(("td", "th", "mtd"))
_PREFORMATTED = frozenset(("pre", "textarea", "listing"))
_LONGEST_CELL = 1_000  # characters; a longer one is a part of a layout, and keeps its lines
# What stands before, between and after the children of formulas.
_FORMULAS = {
    "mfrac": ("(", ")/(", ")"),
    "msup": ("", "^(", ")"),
    "msub": ("", "_(", ")"),
    "mroot": ("√(", ",", ")"),
    "msqrt": ("√(", "", ")"),
    "math": ("", "", ""),
    "mrow": ("", "", ""),
    "q": ("“", "", "”"),
}
_SHOWN_VALUES = frozenset(
    "button date datetime-local email month number reset search submit tel text time url week".split()
)
_SPACE = re.compile(r"[ \t\n\f\r]+")
# Styles.
_NOT_SHOWN = re.compile(
    r"(?<![-\w])(?:display\s*:\s*none(?![^}]*display\s*:)|visibility\s*:\s*(?:hidden|collapse)|"
    r"(?:font-size|opacity)\s*:\s*0+(?![.\d])|clip\s*:\s*rect\(\s*[01](?![.\d])|clip-path\s*:\s*inset\(\s*50%|"
    r"(?:text-indent|left|top)\s*:\s*-\d{4})",
    re.IGNORECASE,
)
_SHOWN = re.compile(r"(?:display|visibility|font-size|opacity|clip|clip-path|text-indent|left|top)\s*:", re.IGNORECASE)
_RAISED_STYLE = re.compile(r"vertical-align\s*:\s*(super|sub)\b", re.IGNORECASE)
_STRUCK_STYLE = re.compile(r"text-decoration(?:-line)?\s*:[^;]*line-through", re.IGNORECASE)
_COMMENT = re.compile(r"/\*.*?\*/", re.DOTALL)
_AT_RULE = re.compile(r"@[^{};]*+(?:;|\{(?:[^{}]++|\{[^{}]*+\})*+\})")
_RULE = re.compile(r"([^{}]++)\{([^{}]*+)\}")


def read_html(file: BinaryIO, notices: Notices, *, xhtml: bool = False) -> tuple[str, str | None]:
    """Reads the text of a page, with a line for each block, and its title.

    Args:
        file: the page.
        notices: gets what is left out though a browser shows it.
        xhtml: True if the name of the file says that it is XHTML.

    Raises:
        UnreadableError: for a page that is too long, in an unknown encoding, or without text.
    """
    data = file.read(DOCUMENT + 1)
    if len(data) > DOCUMENT:
        raise UnreadableError(f"has more than {DOCUMENT:,} bytes, the most of one document; split it into files")
    text, title = page_text(decoded(data, notices), notices, xhtml=xhtml)
    if not text.strip():
        raise UnreadableError("has no text; if a script fills the page, save it from a browser")
    return text, title


def decoded(data: bytes, notices: Notices) -> str:
    """The characters of a page: in the encoding of its byte order mark, XML declaration or `meta`, or else in UTF-8.

    Raises:
        UnreadableError: for an encoding that browsers do not read, and for a page that names none and is not UTF-8.
    """
    known = next((name for mark, name in _BOMS if data.startswith(mark)), None)
    label = known or _label(data)
    encoding = webencodings.lookup(label or "")
    if label and (_is_foreign(label) if encoding is None else encoding.name == "replacement"):
        raise UnreadableError(f"is in the encoding {label!r}, which browsers do not read; save it in UTF-8")
    if encoding is None:
        try:
            return data.decode()
        except UnicodeDecodeError as error:
            named = f"names the encoding {label!r}, which is unknown" if label else "names no encoding"
            raise UnreadableError(f"{named}, and is not UTF-8: see byte {error.start:,}; save it in UTF-8") from None
    if encoding.name.startswith("utf-16") and known is None:  # a page in UTF-16 could not have named it in ASCII
        encoding = webencodings.UTF8
    name = encoding.name
    if name == "iso-2022-jp":
        data = _JIS.sub(lambda match: bytes(byte | 0x80 for byte in match[1] or b""), data)
    if name in _LARGER:
        text = data.decode(_LARGER[name], "mac_rag.vendors")
    else:
        text = str(encoding.codec_info.decode(data, "replace")[0])
    if "\ufffd" in text:
        where = text[max(0, text.index("\ufffd") - 20) : text.index("\ufffd")]
        notices.add(f"bytes that are not in the encoding {name} are shown as �", f"after {where!r}")
    return text.removeprefix("\ufeff")


def _label(data: bytes) -> str | None:
    """The name that the page gives its encoding. An HTML parser skips what only looks so, in comments and scripts."""
    if named := _XML_ENCODING.search(data[:1024]):
        return named[1].decode("latin-1")
    for meta in LexborHTMLParser(data[:_PRESCAN].decode("latin-1"), scripting=True).css("meta"):
        attributes = meta.attributes
        label = attributes.get("charset")
        if label is None and (attributes.get("http-equiv") or "").lower() == "content-type":
            found = _CHARSET.search(attributes.get("content") or "")
            label = found and found[1]
        if label and label.strip():
            return "windows-1252" if label.strip().lower() == "x-user-defined" else label.strip()
    return None


def _is_foreign(label: str) -> bool:
    """True for an encoding that Python knows and browsers do not: ignoring its name would garble the page."""
    try:
        codecs.lookup(label)
    except (LookupError, ValueError):
        return False
    return True


def _of_vendors(error: UnicodeError) -> tuple[str, int]:
    """A character of Windows in EUC-JP, such as ① and ㈱, which only Python's codec of Shift JIS knows; or U+FFFD."""
    assert isinstance(error, UnicodeDecodeError)
    row, cell = (error.object[error.start : error.start + 2] + b"\0\0")[:2]
    if error.encoding == "euc_jp" and row > 0xA0 and cell > 0xA0:
        pair, odd = divmod(row - 0xA1, 2)  # two rows of EUC are one of Shift JIS
        trail = cell - 0xA1 + (0x9F if odd else 0x40)
        sjis = bytes((pair + (0x81 if pair < 0x1F else 0xC1), trail + (not odd and trail >= 0x7F)))
        with suppress(UnicodeDecodeError):
            return sjis.decode("cp932"), error.start + 2
    return ("€" if error.encoding == "gb18030" and row == 0x80 else "�"), error.start + 1


codecs.register_error("mac_rag.vendors", _of_vendors)


def page_text(markup: str, notices: Notices, *, xhtml: bool = False, sheet: str = "") -> tuple[str, str | None]:
    """The text of a page, with a line for each block and tabs between the cells of a row; and its title.

    Args:
        markup, notices: the page; gets what is left out though a browser shows it.
        xhtml: True to read it as XHTML even if it does not begin as XML.
        sheet: a style sheet besides those in the page.
    """
    if xhtml or markup.lstrip().startswith("<?xml"):
        markup = _CDATA.sub(lambda match: escape(match[1]), markup)
        markup = _EMPTY_ELEMENT.sub(_opened, markup)
    tree = LexborHTMLParser(markup, scripting=True)
    title = tree.css_first("head title")
    sheet += "".join(node.text() for node in tree.css("style"))
    hidden = {node.mem_id for node in tree.css(_HIDDEN)} | _hidden_by(sheet, tree, notices)
    for menu in tree.css("select:not([multiple]):not([size])"):
        options = menu.css("option")
        chosen = {option.mem_id for option in menu.css("option[selected]") or options[:1]}
        hidden |= {option.mem_id for option in options} - chosen
    walk = _Walk(hidden, notices)
    root = tree.body or tree.root
    if root is not None:
        walk.over(root)
    return "".join(walk.pieces), None if title is None else title.text()


def _opened(match: re.Match[str]) -> str:
    """An empty element of XML, as a start and an end, because HTML takes it for a start alone."""
    return match[0] if match[1].lower() in _VOID else f"<{match[1]}{match[2][:-1]}></{match[1]}>"


def _hidden_by(sheet: str, tree: LexborHTMLParser, notices: Notices) -> set[int]:
    """The elements that the rules of a style sheet hide, of which the most specific and last one counts."""
    if not _NOT_SHOWN.search(sheet):
        return set()
    rules = [
        (selector.strip(), styles)
        for selectors, styles in _RULE.findall(_AT_RULE.sub("", _COMMENT.sub("", sheet)))
        if _SHOWN.search(styles)
        for selector in selectors.split(",")
        if ":" not in selector  # what a state or an unseen element shows
    ]
    rules.sort(key=lambda rule: ("!important" in rule[1], rule[0].count("#"), len(re.findall(r"[.\[]", rule[0]))))
    hidden: dict[int, str] = {}
    for selector, styles in rules:
        with suppress(SelectolaxError, ValueError):
            found = {node.mem_id for node in tree.css(selector) if node.tag not in ("html", "body")}
            if _NOT_SHOWN.search(styles):
                hidden |= dict.fromkeys(found, selector)
            else:
                hidden = {node: by for node, by in hidden.items() if node not in found}
    for selector in dict.fromkeys(hidden.values()):
        notices.add("text that a style sheet hides is left out", selector)
    return set(hidden)


class _Walk:
    """Collects the texts below an element, without recursion, so that deep nesting is harmless.

    Args:
        hidden: the ids of elements that are left out.
        notices: gets what is left out though a browser shows it.
    """

    def __init__(self, hidden: set[int], notices: Notices) -> None:
        self.pieces: list[str] = []
        self._hidden = hidden
        self._notices = notices
        self._preformatted = 0
        self._breaks = 0  # lines to end before the next text
        self._number = False  # True after the number of a list's item, whose text follows on its line
        self._lowered = ""  # a subscript that has just been written as it is, because a letter is before it
        self._starts: list[int] = []  # numbers of pieces, at the beginnings of what is rewritten at its end
        self._items: list[int | None] = []  # number of the last item of each open list

    def over(self, root: LexborNode) -> None:
        """Walks over an element and all below it."""
        above: list[tuple[int, str]] = []  # ids and tags of the elements around a node; no tag for what is left out
        last = ""  # tag of the element that has just ended
        for node in root.traverse(include_text=True):
            tag, parent = node.tag or "", node.parent
            while above and parent is not None and above[-1][0] != parent.mem_id:
                last = above.pop()[1]
                self._leave(last)
            around = above[-1][1] if above else "html"
            if tag == "-text":
                if around:
                    data = node.text_content or ""
                    if around not in _FORMULAS or data.strip():
                        self._write(data if self._preformatted else _SPACE.sub(" ", data))
            elif tag[:1] not in "-!":
                if around in _FORMULAS and last:
                    self._write(_FORMULAS[around][1])
                above.append((node.mem_id, self._enter(node, tag) if around else ""))
                last = ""
        for _, tag in reversed(above):
            self._leave(tag)

    def _enter(self, node: LexborNode, tag: str) -> str:
        """Writes the beginning of an element. Returns its tag, or that of which it has the style, or "" if left out."""
        if node.mem_id in self._hidden:
            return ""
        attributes = node.attributes
        style = attributes.get("style") or ""
        if _NOT_SHOWN.search(style):
            return ""
        if attributes.get("role") == "doc-noteref":
            self._write(f"[{node.text().strip()}]")
            return ""
        if tag in _STRUCK or _STRUCK_STYLE.search(style):
            if struck := node.text().strip():
                self._notices.add("struck-out text is left out", struck)
            self._write("" if tag == "del" else " ")  # what replaces a deletion may be a part of a word
            return ""
        if tag in _LOADED:
            self._notices.add(f"what <{tag}> loads is left out", attributes.get("src") or attributes.get("data") or "")
            return ""
        if tag in ("img", "input", "math") and (text := self._replaced(tag, attributes)) is not None:
            self._write(text)
            return ""
        if tag == "span" and (moved := _RAISED_STYLE.search(style)):
            tag = {"super": "sup", "sub": "sub"}[moved[1].lower()]
        self._begin(tag, attributes)
        return tag

    def _replaced(self, tag: str, attributes: dict[str, str | None]) -> str | None:
        """What stands for an element without content; None if its content does."""
        if tag == "math":
            return attributes.get("alttext")
        if tag == "img":
            text = attributes.get("alt")
            if text is None or text == "image":  # pandoc's word for a picture without description
                self._notices.add("pictures without a description are left out", attributes.get("src") or "")
            return f" {text} " if text and text != "image" else ""
        kind = (attributes.get("type") or "text").lower()
        if kind in ("checkbox", "radio"):
            return "☑ " if "checked" in attributes else "☐ "
        value = attributes.get("value")
        return f" {value} " if value and kind in _SHOWN_VALUES else ""

    def _begin(self, tag: str, attributes: dict[str, str | None]) -> None:
        self._preformatted += tag in _PREFORMATTED
        self._break(tag)
        if tag == "ol":
            counted = attributes.get("type") in (None, "1") and "list-style" not in (attributes.get("style") or "")
            start = attributes.get("start") or "1"
            self._items.append(int(start) - 1 if counted and re.fullmatch(r"-?\d{1,9}", start) else None)
        elif tag in ("ul", "menu", "dir"):
            self._items.append(None)
        if tag in ("sup", "sub") or tag in _CELLS:
            self._end_lines()
            self.pieces.append("\t" if tag in _CELLS else "")
            self._starts.append(len(self.pieces))
        elif tag == "li" and self._items and (number := self._items[-1]) is not None:
            self._items[-1] = number + 1
            self._write(f"{number + 1}. ")
            self._number = True
        elif tag in _FORMULAS:
            self._write(_FORMULAS[tag][0])

    def _leave(self, tag: str) -> None:
        """Writes the end of an element."""
        if tag in ("sup", "sub") or tag in _CELLS:
            start = self._starts.pop()
            text = "".join(self.pieces[start:])
            del self.pieces[start:]
            if tag in _CELLS:
                text = text.strip() if len(text) > _LONGEST_CELL else " ".join(text.split())
                self._breaks = 0
            else:
                before = next((piece[-1] for piece in reversed(self.pieces) if piece), "")
                text = (raised if tag == "sup" else lowered)(text.strip(), before)
            self.pieces.append(text)
            self._lowered = text if tag == "sub" else ""
        elif tag in _FORMULAS:
            self._write(_FORMULAS[tag][2])
        elif tag in ("ol", "ul", "menu", "dir"):
            self._items.pop()
        self._preformatted -= tag in _PREFORMATTED
        self._number = self._number and tag != "li"
        if tag != "br":
            self._break(tag)

    def _break(self, tag: str) -> None:
        if tag == "br":
            self._breaks = min(self._breaks + 1, 2)
        elif tag in _BLOCKS and not self._number:
            self._breaks = max(self._breaks, 2 if tag in _SPACED and not self._items else 1)

    def _write(self, text: str) -> None:
        """Writes a text, and before it the breaks that are due. A blank one is left out after a break."""
        if self._lowered and text[:1].isdigit():
            self.pieces[-1] = lowered(self._lowered, "")
        self._lowered = ""
        if text and not text.isspace():
            self._end_lines()
            self._number = False
        if not self._breaks:
            self.pieces.append(text)

    def _end_lines(self) -> None:
        self.pieces.append("\n" * self._breaks)
        self._breaks = 0
