"""Texts of PDF files, by PDFium."""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Iterator
from ctypes import POINTER, c_double, c_ushort, cast, create_string_buffer
from typing import Any, BinaryIO

import pypdfium2
import pypdfium2.raw as pdfium

from mac_rag.data.conversion.text import Notices, UnreadableError, check_size, lowered, raised
from mac_rag.untrusted_files import DOCUMENT

_MOST_PAGES = 10_000
_LONGEST_VALUE = DOCUMENT  # bytes
_ENCRYPTED = (pdfium.FPDF_ERR_PASSWORD, pdfium.FPDF_ERR_SECURITY)
_XFA = (pdfium.FORMTYPE_XFA_FULL, pdfium.FORMTYPE_XFA_FOREGROUND)
_UNSEEN = pdfium.FPDF_ANNOT_FLAG_HIDDEN | pdfium.FPDF_ANNOT_FLAG_NOVIEW
_TYPED = (pdfium.FPDF_FORMFIELD_TEXTFIELD, pdfium.FPDF_FORMFIELD_COMBOBOX, pdfium.FPDF_FORMFIELD_LISTBOX)
_TICKED = (pdfium.FPDF_FORMFIELD_CHECKBOX, pdfium.FPDF_FORMFIELD_RADIOBUTTON)
_PASSWORD = 1 << 13  # flag of a field
# PDFium's mark of a hyphen at the end of a line, and a hyphen there that it does not mark, in a span of numbers.
_HYPHEN = re.compile(r"(?:\ufffe|\xad\r?\n|(?<=\d)-\r?\n(?=\d))")
_LIGATURES = re.compile(r"[\ufb00-\ufb06]")
_ASTRAL = re.compile(r"[\U00010000-\U0010ffff]")
# Where a number begins or ends within a word: there it matters whether what follows is raised or lowered. PDFium breaks
# some lines there.
_JOINT = re.compile(r"(?:(?<=[^\W_])(?:\r\n ?)?[+\-−]|(?<=\S)(?:\r\n ?)?[\d(]|(?<=\d)(?:\r\n ?)?[^\W_])")


def read_pdf(file: BinaryIO, notices: Notices) -> tuple[str, str | None]:
    """Reads the text of a PDF, page by page, with what is typed into its forms, and the title in its properties.

    The characters come from the PDF's fonts; text in pictures is not recognized.

    Args:
        file: the PDF.
        notices: gets the pages that cannot be read or have no text, and what is left out.

    Raises:
        UnreadableError: for a file that is not a PDF, encrypted, damaged, too long, or without text.
    """
    try:
        document = pypdfium2.PdfDocument(file.read())
        count = len(document)
    except pypdfium2.PdfiumError as error:
        if error.err_code in _ENCRYPTED:
            raise UnreadableError("is encrypted; save it without a password: qpdf --decrypt IN OUT") from None
        raise UnreadableError(f"is not a PDF, or damaged ({error}); save it again, or as text") from None
    if count > _MOST_PAGES:
        raise UnreadableError(f"has {count:,} pages, and {_MOST_PAGES:,} are the most; split it")
    kind = document.get_formtype()
    if kind in _XFA:
        notices.add("the XFA form is left out, of which other programs show little", "print it to PDF")
    if kind != pdfium.FORMTYPE_NONE:
        document.init_forms()
    for number in range(document.count_attachments()):
        notices.add("attached files are left out", document.get_attachment(number).get_name())
    pages, size = [], 0
    for number in range(count):
        pages.append(_page_text(document, number, notices))
        size += len(pages[-1])
        check_size(size)
    text = "\n\n".join(pages)
    if not text.strip():
        raise UnreadableError("has no text, like a scan; recognize its text first: ocrmypdf IN OUT")
    return text, document.get_metadata_value("Title") or None


def _page_text(document: Any, number: int, notices: Notices) -> str:
    where = f"page {number + 1}"
    try:
        page = document[number]
        characters = page.get_textpage()
    except pypdfium2.PdfiumError:
        notices.add("pages that cannot be read are left out", where)
        return ""
    text = _joined(_set_apart(characters))
    if any(True for _ in page.get_objects([pdfium.FPDF_PAGEOBJ_IMAGE])):
        notices.add("pictures are left out, and text in them", where)
    elif not text.strip():
        notices.add("pages have no text", where)
    typed = list(_typed(document, page, notices, where))
    characters.close()
    page.close()
    return "\n".join(filter(None, [text, *typed]))


def _joined(text: str) -> str:
    r"""A text whose words are not divided at the ends of lines, and without ligatures.

    Examples:
        >>> _joined("docu\ufffement, Anglo\ufffeSaxon, 2019-\r\n2020")
        'document, Anglo-Saxon, 2019-2020'
    """

    def hyphen(match: re.Match[str]) -> str:
        after = text[match.end() : match.end() + 1]
        return "" if after.islower() and match[0][0] != "-" else "-"

    joined = _HYPHEN.sub(hyphen, text)
    return _LIGATURES.sub(lambda match: unicodedata.normalize("NFKC", match[0]), joined)


def _set_apart(characters: Any) -> str:
    """The text of a page, whose raised and lowered numbers do not run into what is before them."""
    # PDFium counts in units of UTF-16.
    text = _ASTRAL.sub(_halves, characters.get_text_range())
    pieces, done = [], 0
    for match in _JOINT.finditer(text):
        start, place = match.start(), match.end() - 1
        if start < done:
            continue
        (before, x_before, y_before), (size, x, y) = _place(characters, start - 1), _place(characters, place)
        along, rise = _way(characters, place, x - x_before, y - y_before)
        if abs(size - before) < 0.1 * max(size, before) or abs(rise) > 0.7 * max(size, before):
            continue
        if place > start:
            if not 0 < along < 3 * max(size, before):
                continue
            pieces += [text[done:start], " " if along > 0.75 * before else ""]
            done = place
        if size > before or abs(rise) < 0.08 * before:
            continue
        end = place + 1
        while end < len(text) and not text[end].isspace() and _continues(characters, place, end):
            end += 1
        if rise > 0:
            moved = raised(text[place:end], text[start - 1])
        else:
            moved = lowered(text[place:end], "" if text[end : end + 1].isdigit() else text[start - 1])
        pieces += [text[done:place], moved]
        done = end
    pieces.append(text[done:])
    return "".join(pieces).encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def _halves(match: re.Match[str]) -> str:
    high, low = divmod(ord(match[0]) - 0x10000, 0x400)
    return chr(0xD800 + high) + chr(0xDC00 + low)


def _place(characters: Any, place: int) -> tuple[float, float, float]:
    """Size, x and y of a character, in points. `place`: its number in the text."""
    index = pdfium.FPDFText_GetCharIndexFromTextIndex(characters, place)
    x, y, matrix = c_double(), c_double(), pdfium.FS_MATRIX()
    pdfium.FPDFText_GetCharOrigin(characters, index, x, y)
    pdfium.FPDFText_GetMatrix(characters, index, matrix)
    return pdfium.FPDFText_GetFontSize(characters, index) * math.hypot(matrix.c, matrix.d), x.value, y.value


def _way(characters: Any, place: int, x: float, y: float) -> tuple[float, float]:
    """How far a way leads along the line and up from it, as seen by a character, whose text may be turned."""
    index, matrix = pdfium.FPDFText_GetCharIndexFromTextIndex(characters, place), pdfium.FS_MATRIX()
    pdfium.FPDFText_GetMatrix(characters, index, matrix)
    size = math.hypot(matrix.c, matrix.d) or 1.0
    return (x * matrix.d - y * matrix.c) / size, (x * matrix.c + y * matrix.d) / size


def _continues(characters: Any, place: int, end: int) -> bool:
    """True if two characters have one size and stand on one line."""
    (size, x, y), (other, x_other, y_other) = _place(characters, place), _place(characters, end)
    return abs(size - other) < 0.05 * size and abs(_way(characters, place, x_other - x, y_other - y)[1]) < 0.05 * size


def _typed(document: Any, page: Any, notices: Notices, where: str) -> Iterator[str]:
    """What is typed into the fields of a page's form, `name: value`, and typed onto the page."""
    for number in range(pdfium.FPDFPage_GetAnnotCount(page)):
        annotation = pdfium.FPDFPage_GetAnnot(page, number)
        if not annotation:
            continue
        kind = pdfium.FPDFAnnot_GetSubtype(annotation)
        if not pdfium.FPDFAnnot_GetFlags(annotation) & _UNSEEN:
            if kind == pdfium.FPDF_ANNOT_WIDGET and document.formenv is not None:
                yield from _value(document.formenv, annotation)
            elif kind == pdfium.FPDF_ANNOT_WIDGET:  # of no form
                yield _string(pdfium.FPDFAnnot_GetStringValue, annotation, b"V")
            elif kind == pdfium.FPDF_ANNOT_FREETEXT:
                yield _string(pdfium.FPDFAnnot_GetStringValue, annotation, b"Contents")
            elif kind == pdfium.FPDF_ANNOT_TEXT:
                notices.add("notes are left out", where)
        pdfium.FPDFPage_CloseAnnot(annotation)


def _value(form: Any, annotation: Any) -> Iterator[str]:
    kind = pdfium.FPDFAnnot_GetFormFieldType(form, annotation)
    name = _string(pdfium.FPDFAnnot_GetFormFieldAlternateName, form, annotation)
    name = name or _string(pdfium.FPDFAnnot_GetFormFieldName, form, annotation)
    if kind in _TYPED and not pdfium.FPDFAnnot_GetFormFieldFlags(form, annotation) & _PASSWORD:
        value = _string(pdfium.FPDFAnnot_GetFormFieldValue, form, annotation)
        if value.strip():
            yield f"{name}: {value}" if name else value
    elif kind in _TICKED and pdfium.FPDFAnnot_IsChecked(form, annotation):
        value = _string(pdfium.FPDFAnnot_GetFormFieldExportValue, form, annotation)
        yield f"☑ {name}" if value.casefold() in ("", "yes", "on", "true", "1") else f"☑ {name}: {value}"


def _string(read: Any, *what: Any) -> str:
    """What a function of PDFium writes into a buffer, in UTF-16 with a NUL at the end."""
    size = read(*what, None, 0)
    if not 2 < size <= _LONGEST_VALUE:
        return ""
    buffer = create_string_buffer(size)
    read(*what, cast(buffer, POINTER(c_ushort)), size)
    return buffer.raw[: size - 2].decode("utf-16-le", "replace")
