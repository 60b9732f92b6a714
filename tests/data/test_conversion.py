"""Files of other programs: their texts and titles, what is left out by name, and what is refused, with the remedy."""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import sys
import time
import unicodedata
from collections.abc import Callable
from contextlib import suppress
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Thread
from zipfile import ZIP_DEFLATED, ZipFile

import pytest
import webencodings
from hypothesis import given, settings
from hypothesis import strategies as st
from webencodings.labels import LABELS

from mac_rag.data.conversion import converter
from mac_rag.data.conversion.converter import convert, converted
from mac_rag.data.conversion.text import cleaned, raised
from mac_rag.data.readers import read_documents
from mac_rag.data.types import Document
from mac_rag.errors import DataError

WORD = "http://schemas.openxmlformats.org/wordprocessingml/2006/main"
PACKAGE = "http://schemas.openxmlformats.org/package/2006/relationships"
TYPES = "http://schemas.openxmlformats.org/officeDocument/2006/relationships"
SPACES = (
    f'xmlns:w="{WORD}" xmlns:mc="http://schemas.openxmlformats.org/markup-compatibility/2006" '
    f'xmlns:r="{TYPES}" xmlns:wps="http://schemas.microsoft.com/office/word/2010/wordprocessingShape"'
)
RELATIONSHIPS = (
    f'<Relationships xmlns="{PACKAGE}"><Relationship Id="a" Type="{TYPES}/officeDocument" Target="word/document.xml"/>'
    f'<Relationship Id="b" Type="{PACKAGE}/metadata/core-properties" Target="docProps/core.xml"/></Relationships>'
)
CORE = (
    '<c:p xmlns:c="http://schemas.openxmlformats.org/package/2006/metadata/core-properties" '
    'xmlns:dc="http://purl.org/dc/elements/1.1/"><dc:title>The harbour\n of Lund</dc:title></c:p>'
)
OPEN = " ".join(
    f'xmlns:{name}="urn:oasis:names:tc:opendocument:xmlns:{last}:1.0"'
    for name, last in zip("office text style table draw".split(), "office text style table drawing".split())
)


def zipped(parts: dict[str, str | bytes]) -> bytes:
    data = BytesIO()
    with ZipFile(data, "w", ZIP_DEFLATED) as archive:
        for name, content in parts.items():
            archive.writestr(name, content)
    return data.getvalue()


def docx(body: str, parts: dict[str, str] | None = None, *, prolog: str = "") -> bytes:
    """A Word file with this body, and further parts."""
    document = f"{prolog}<w:document {SPACES}><w:body>{body}</w:body></w:document>"
    return zipped(
        {"_rels/.rels": RELATIONSHIPS, "docProps/core.xml": CORE, "word/document.xml": document, **(parts or {})}
    )


def related(kind: str, target: str) -> str:
    """The relationship of a Word file to another part."""
    picture = f'<Relationship Id="i" Type="{TYPES}/image" Target="media/plan.png"/>'
    link = f'<Relationship Id="c" Type="{TYPES}/{kind}" Target="{target}"/>'
    return f'<Relationships xmlns="{PACKAGE}">{link}{picture}</Relationships>'


def run(text: str, properties: str = "") -> str:
    return f'<w:r><w:rPr>{properties}</w:rPr><w:t xml:space="preserve">{text}</w:t></w:r>'


def paragraph(*runs: str) -> str:
    return f"<w:p>{''.join(runs)}</w:p>"


def odt(body: str, styles: str = "") -> bytes:
    content = (
        f"<office:document-content {OPEN}><office:automatic-styles>{styles}</office:automatic-styles><office:body>"
        f"<office:text>{body}</office:text></office:body></office:document-content>"
    )
    return zipped({"mimetype": "application/vnd.oasis.opendocument.text", "content.xml": content})


def epub(*pages: str, nav: str = "", parts: dict[str, str] | None = None) -> bytes:
    items = "".join(f'<item id="p{n}" href="a%20{n}.xhtml" media-type="x"/>' for n in range(len(pages)))
    spine = "".join(f'<itemref idref="p{n}"/>' for n in range(len(pages)))
    container = (
        '<container xmlns="urn:oasis:names:tc:opendocument:xmlns:container"><rootfiles><rootfile full-path="O/b.opf"/>'
    )
    package = (
        '<package xmlns="http://www.idpf.org/2007/opf" xmlns:dc="http://purl.org/dc/elements/1.1/"><metadata><dc:title>'
        f'The harbour\n of Lund</dc:title></metadata><manifest><item id="n" href="n.xhtml" properties="nav"/>{items}'
        f'</manifest><spine><itemref idref="n"/>{spine}</spine></package>'
    )
    written = {f"O/a {n}.xhtml": page for n, page in enumerate(pages)}
    return zipped(
        {
            "META-INF/container.xml": f"{container}</rootfiles></container>",
            "O/b.opf": package,
            "O/n.xhtml": nav,
            **written,
            **(parts or {}),
        }
    )


FONT = "/Subtype /Type1 /BaseFont /Helvetica"


def pdf(
    *pages: str, title: str = "The harbour of Lund", font: str = "", catalog: str = "", annotations: str = ""
) -> bytes:
    """A PDF with these lines, or drawings that begin with BT, on each page; an empty text makes a page without."""
    kids = " ".join(f"{4 + 2 * number} 0 R" for number in range(len(pages)))
    objects = [
        f"<< /Type /Catalog /Pages 2 0 R {catalog} >>",
        f"<< /Type /Pages /Kids [{kids}] /Count {len(pages)} >>",
        f"<< /Type /Font {FONT} /Encoding << /BaseEncoding /WinAnsiEncoding {font} >> >>",
    ]
    for number, text in enumerate(pages):
        lines = "".join(f"({line}) Tj T* " for line in text.split("\n"))
        drawn = text if text[:2] == "BT" else f"BT /F1 12 Tf 14 TL 72 720 Td {lines}ET" if text else "0 0 m 9 9 l S"
        objects.append(
            f"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Contents {5 + 2 * number} 0 R {annotations} "
            "/Resources << /Font << /F1 3 0 R >> >> >>"
        )
        objects.append(f"<< /Length {len(drawn)} >>\nstream\n{drawn}\nendstream")
    objects.append(f"<< /Title ({title}) /CreationDate (D:20240501120000Z) >>")
    data, places = "%PDF-1.4\n", []
    for number, content in enumerate(objects, 1):
        places.append(len(data))
        data += f"{number} 0 obj\n{content}\nendobj\n"
    table = "".join(f"{place:010} 00000 n \n" for place in places)
    trailer = f"<< /Size {len(objects) + 1} /Root 1 0 R /Info {len(objects)} 0 R >>"
    end = f"trailer\n{trailer}\nstartxref\n{len(data)}\n%%EOF"
    return f"{data}xref\n0 {len(objects) + 1}\n0000000000 65535 f \n{table}{end}".encode("latin-1")


def answer(suffix: str, data: bytes | str) -> dict[str, object]:
    with TemporaryDirectory() as folder:
        path = Path(folder) / f"file{suffix}"
        path.write_bytes(data.encode() if isinstance(data, str) else data)
        return converted(path)


def text_of(suffix: str, data: bytes | str) -> str:
    found = answer(suffix, data)
    assert "error" not in found, found
    return str(found["text"])


def notices_of(suffix: str, data: bytes | str) -> str:
    found = answer(suffix, data)
    return "\n".join(found["notices"]) if "notices" in found else str(found["error"])  # type: ignore[arg-type]


PAGE = (
    "<!DOCTYPE html><html><head><meta charset=utf-8><title>The harbour\n of Lund</title><style>p {color: red}</style>"
    "<script>if (a < b) document.write('<p>written</p>')</script></head><body><h1>Harbours</h1><p>Ada&nbsp;Voss\n "
    "opened it in&#x20;<b>May</b>.<br>It &lt;grows&gt;.<ul><li>one<li>two</ul><table><tr><td>a<td>b"
    "<tr><td>c<td>d</table>"
    "<noscript>Turn scripts on.</noscript></body></html>"
)


def test_the_files_are_read_with_their_titles_and_without_dates(tmp_path: Path) -> None:
    (tmp_path / "a.HTML").write_text(PAGE)
    (tmp_path / "b.docx").write_bytes(docx(paragraph(run("Ada Voss opened it in May."))))
    (tmp_path / "c.pdf").write_bytes(pdf("Ada Voss opened it.", "The bridge was closed."))
    (tmp_path / "d.htm").write_text("<p>No title.")
    (tmp_path / "e.EPUB").write_bytes(epub("<p>One.", "<p>Two.", nav="<p>Contents"))
    read = read_documents([tmp_path / name for name in ("a.HTML", "b.docx", "c.pdf", "d.htm", "e.EPUB")])
    title = {"title": "The harbour of Lund"}
    assert [(document.text, document.metadata) for document in read] == [
        ("Harbours\n\nAda Voss opened it in May.\nIt <grows>.\n\none\ntwo\n\na\tb\nc\td", title),
        ("Ada Voss opened it in May.", title),
        ("Ada Voss opened it.\n\nThe bridge was closed.", title),
        ("No title.", {}),
        ("One.\n\nTwo.", title),
    ]
    assert read[0].id == str(tmp_path / "a.HTML")
    os.utime(tmp_path / "c.pdf", (0, 0))
    assert read_documents([tmp_path / "c.pdf"]) == [read[2]]


def test_what_a_text_lacks_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "a.html").write_text("<p>A plan: <img src=plan.png>")
    with caplog.at_level(logging.WARNING):
        read_documents([tmp_path / "a.html"])
    [record] = caplog.messages
    assert record == f"{tmp_path / 'a.html'}: pictures without a description are left out: plan.png"


# Word: one file with a paragraph for each case, because pandoc takes a while to start.

SUPER, SUB = '<w:vertAlign w:val="superscript"/>', '<w:vertAlign w:val="subscript"/>'
STYLES = (
    f'<w:styles {SPACES}><w:style w:type="paragraph" w:default="1" w:styleId="Normal"/><w:style w:type="character" '
    'w:styleId="Hid"><w:rPr><w:vanish/></w:rPr></w:style><w:style w:type="character" w:styleId="Heir"><w:basedOn '
    'w:val="Hid"/></w:style><w:style w:type="character" w:styleId="Shown"><w:basedOn w:val="Hid"/><w:rPr><w:vanish '
    'w:val="0"/></w:rPr></w:style><w:style w:type="paragraph" w:styleId="Note"><w:rPr><w:vanish/></w:rPr></w:style>'
    "</w:styles>"
)
HIDDEN_BY = '<w:rStyle w:val="{}"/>'.format


def symbol(font: str, code: str) -> str:
    return f'<w:r><w:sym w:font="{font}" w:char="{code}"/></w:r>'


def picture(description: str) -> str:
    base = "http://schemas.openxmlformats.org/drawingml/2006"
    return (
        f'<w:r><w:drawing><p:inline xmlns:p="{base}/wordprocessingDrawing"><p:docPr id="1" name="P" {description}/>'
        f'<a:graphic xmlns:a="{base}/main"><a:graphicData uri="{base}/picture"><c:pic xmlns:c="{base}/picture">'
        '<c:blipFill><a:blip r:embed="i"/></c:blipFill></c:pic></a:graphicData></a:graphic></p:inline></w:drawing>'
        "</w:r>"
    )


def ruby(base: str, reading: str) -> str:
    return f"<w:r><w:ruby><w:rt>{run(reading)}</w:rt><w:rubyBase>{run(base)}</w:rubyBase></w:ruby></w:r>"


def field(data: str, result: str = "") -> str:
    begin = f'<w:r><w:fldChar w:fldCharType="begin"><w:ffData>{data}</w:ffData></w:fldChar></w:r>'
    return f'{begin}<w:r><w:instrText> FORM </w:instrText></w:r>{result}<w:r><w:fldChar w:fldCharType="end"/></w:r>'


WORD_CASES: dict[str, tuple[str, str]] = {
    "raised number": (paragraph(run("Staff of 210"), run("3", SUPER), run(" people")), "Staff of 210³ people"),
    "raised after a stop": (paragraph(run("cost 4.5."), run("17", SUPER)), "cost 4.5.¹⁷"),
    "power": (paragraph(run("10"), run("-9", SUPER), run(" m")), "10⁻⁹ m"),
    "ordinal": (paragraph(run("the 21"), run("st", SUPER), run(" of May")), "the 21st of May"),
    "area": (paragraph(run("40 m"), run("2", SUPER)), "40 m²"),
    "base": (paragraph(run("1101"), run("2", SUB)), "1101₂"),
    "molecule": (paragraph(run("H"), run("2", SUB), run("O")), "H2O"),
    "raised by position": (paragraph(run("77"), run("4", '<w:position w:val="6"/><w:sz w:val="12"/>')), "77⁴"),
    "hidden": (paragraph(run("Price 9. "), run("Limit 7.", '<w:vanish w:val="1"/>')), "Price 9."),
    "hidden by a style": (paragraph(run("Seen"), run(" not", HIDDEN_BY("Hid"))), "Seen"),
    "hidden by inheritance": (paragraph(run("Seen"), run(" not", HIDDEN_BY("Heir"))), "Seen"),
    "shown by a heir": (paragraph(run("Seen"), run(" too", HIDDEN_BY("Shown"))), "Seen too"),
    "shown in spite of a style": (paragraph(run("Seen too", HIDDEN_BY("Hid") + '<w:vanish w:val="off"/>')), "Seen too"),
    "hidden paragraph": (
        '<w:p><w:pPr><w:pStyle w:val="Note"/></w:pPr>'
        + run("not")
        + run("Twice is shown", HIDDEN_BY("Hid"))
        + "</w:p>",
        "Twice is shown",
    ),
    "hidden link": (paragraph(run("Seen"), f"<w:hyperlink>{run(' not', '<w:vanish/>')}</w:hyperlink>"), "Seen"),
    "hidden row": (
        f"<w:tbl><w:tr><w:trPr><w:hidden/></w:trPr><w:tc>{paragraph(run('not'))}</w:tc></w:tr>"
        f"<w:tr><w:tc>{paragraph(run('a'))}{paragraph(run('b'))}</w:tc><w:tc>{paragraph(run('c'))}</w:tc></w:tr></w:tbl>",
        "a b\tc",
    ),
    "symbol": (paragraph(run("30 "), symbol("Symbol", "F0B0"), run("C")), "30 °C"),
    "plain symbol": (paragraph(run("x "), symbol("Symbol", "00A3"), run(" 2")), "x ≤ 2"),
    "wingding": (paragraph(symbol("Wingdings", "F0FC"), run(" done")), "✔ done"),
    "letter of a font": (paragraph(run("5 k"), symbol("Arial", "03A9")), "5 kΩ"),
    "unknown symbol": (paragraph(run("7 "), symbol("MT Extra", "F061"), run("m")), "7 �m"),
    "unknown code": (paragraph(run("8 "), symbol("Symbol", "F0F0"), run("m")), "8 �m"),
    "text in a font of symbols": (paragraph(run("m", '<w:rFonts w:ascii="Symbol" w:hAnsi="Symbol"/>'), run("g")), "μg"),
    "hyphens": (
        paragraph("<w:r><w:t>020</w:t><w:noBreakHyphen/><w:t>7</w:t><w:softHyphen/><w:t>8</w:t></w:r>"),
        "020-78",
    ),
    "breaks": (
        paragraph("<w:r><w:t>a</w:t><w:br/><w:t>b</w:t><w:cr/><w:t>c</w:t><w:ptab/><w:t>d</w:t></w:r>"),
        "a\nb\nc d",
    ),
    "pictures": (paragraph(picture('descr="A map"'), run("and"), picture("")), "A map and"),
    "ruby": (paragraph(ruby("大阪", "おおさか"), run("の"), ruby("港", "みなと")), "大阪の港"),
    "changes": (
        "<w:p><w:del><w:r><w:delText>gone</w:delText></w:r></w:del><w:ins>" + run("new") + "</w:ins><w:moveFrom>"
        f"{run('away')}</w:moveFrom><w:moveTo>{run(' here')}</w:moveTo></w:p>",
        "new here",
    ),
    "fields": (
        f'<w:p><w:fldSimple w:instr="AUTHOR">{run("Ada")}</w:fldSimple><w:smartTag>{run(" of ")}</w:smartTag><w:sdt>'
        f"<w:sdtPr><w:alias/></w:sdtPr><w:sdtContent>{run('Lund')}</w:sdtContent></w:sdt><w:bdo>{run(' now')}</w:bdo>"
        "</w:p>",
        "Ada of Lund now",
    ),
    "form": (
        paragraph(
            run("Member "),
            field("<w:checkBox><w:checked/></w:checkBox>"),
            run("yes "),
            field('<w:checkBox><w:default w:val="0"/></w:checkBox>'),
            run("no, "),
            field('<w:ddList><w:result w:val="1"/><w:listEntry w:val="red"/><w:listEntry w:val="blue"/></w:ddList>'),
        ),
        "Member ☑ yes ☐ no, blue",
    ),
    "box": (
        paragraph(
            run("Around."),
            "<w:r><mc:AlternateContent><mc:Choice><w:drawing><wps:txbx><w:txbxContent>"
            + paragraph(run("Boxed."))
            + "</w:txbxContent></wps:txbx></w:drawing></mc:Choice><mc:Fallback>"
            + paragraph(run("Boxed."))
            + "</mc:Fallback></mc:AlternateContent></w:r>",
        ),
        "Around.\n\nBoxed.",
    ),
}
PARTS = {
    "word/styles.xml": STYLES,
    "word/header1.xml": f"<w:hdr {SPACES}>{paragraph(run('For the board alone'))}</w:hdr>",
    "word/comments.xml": f"<w:comments {SPACES}><w:comment>{paragraph(run('Too dear?'))}</w:comment></w:comments>",
    "word/charts/chart1.xml": '<c xmlns="http://schemas.openxmlformats.org/drawingml/2006/chart"><v>Exports</v></c>',
    "word/glossary/document.xml": f"<w:document {SPACES}>{paragraph(run('Building block'))}</w:document>",
    "word/_rels/document.xml.rels": related("aFChunk", "chunk.htm"),
    "word/chunk.htm": "<p>Inserted.",
    "word/media/plan.png": "PNG",
}


@pytest.fixture(scope="module")
def word() -> tuple[dict[str, str], str]:
    """The texts of the cases, which numbered lines part, and the notices."""
    body = "".join(paragraph(run(f"=={name}==")) + case for name, (case, _) in WORD_CASES.items())
    found = answer(
        ".docx", docx(body + "<w:altChunk r:id='c'/>" + paragraph(run("a"), run("bad deal", "<w:strike/>")), PARTS)
    )
    pieces = str(found["text"]).split("==")[1:]
    return {name: text.strip() for name, text in zip(pieces[::2], pieces[1::2])}, "\n".join(found["notices"])  # type: ignore[arg-type]


@pytest.mark.parametrize("name", [name for name in WORD_CASES if name != "box"])
def test_a_paragraph_of_word(word: tuple[dict[str, str], str], name: str) -> None:
    assert word[0][name] == WORD_CASES[name][1]


def test_texts_in_boxes_of_word_stand_after_their_paragraph(word: tuple[dict[str, str], str]) -> None:
    assert word[0]["box"].startswith("Around.\n\nBoxed.")


@pytest.mark.parametrize(
    "notice",
    [
        "text of word/header1.xml is left out: For the board alone",
        "text of word/comments.xml is left out: Too dear?",
        "text of word/charts/chart1.xml is left out: Exports",
        "inserted files are left out: word/chunk.htm",
        "pictures without a description are left out: media/plan.png",
        "unknown symbols are shown as �: 7, 8",
        "struck-out text is left out: bad deal",
    ],
)
def test_what_pandoc_does_not_carry_is_named_with_its_place(word: tuple[dict[str, str], str], notice: str) -> None:
    assert notice in word[1]
    assert len(word[1].splitlines()) == 7  # and what is hidden or deleted is not named


@pytest.mark.parametrize(
    "change",
    [
        lambda data: data.replace(WORD, "http://purl.oclc.org/ooxml/wordprocessingml/main"),
        lambda data: data.replace("w:", "ns0:").replace("xmlns:w=", "xmlns:ns0="),
    ],
    ids=["strict", "prefix"],
)
def test_word_files_of_other_programs(change: Callable[[str], str]) -> None:
    document = (
        f"<w:document {SPACES}><w:body>{paragraph(run('Seen.'), run(' Not.', '<w:vanish/>'))}</w:body></w:document>"
    )
    relationships = RELATIONSHIPS.replace(
        "schemas.openxmlformats.org/officeDocument/2006", "purl.oclc.org/ooxml/officeDocument"
    )
    assert text_of(".docx", zipped({"_rels/.rels": relationships, "word/document.xml": change(document)})) == "Seen."


def test_formulas_and_notes_of_word() -> None:
    body = paragraph(
        run("Area "),
        '<m:oMath xmlns:m="http://schemas.openxmlformats.org/officeDocument/2006/math"><m:sSup><m:e><m:r><m:t>r</m:t></m:r>'
        "</m:e><m:sup><m:r><m:t>2</m:t></m:r></m:sup></m:sSup></m:oMath>",
        run(" of 40"),
        '<w:r><w:footnoteReference w:id="1"/></w:r>',
    )
    note = paragraph(run("Measured."), run("Secret.", "<w:vanish/>"))
    notes = f'<w:footnotes {SPACES}><w:footnote w:id="1">{note}</w:footnote></w:footnotes>'
    parts = {"word/footnotes.xml": notes, "word/_rels/document.xml.rels": related("footnotes", "footnotes.xml")}
    assert text_of(".docx", docx(body, parts)) == "Area r² of 40[1]\n\n1. Measured."


OPEN_STYLES = (
    '<style:style style:name="H" style:family="text"><style:text-properties text:display="none"/></style:style>'
    '<style:style style:name="I" style:family="text" style:parent-style-name="H"/>'
    '<style:style style:name="P" style:family="paragraph"><style:text-properties text:display="none"/></style:style>'
    '<style:style style:name="S" style:family="text"><style:text-properties style:text-position="super"/></style:style>'
)


def test_an_open_document() -> None:
    paragraphs = [
        '310<text:span text:style-name="S">4</text:span> seats',
        'Seen<text:span text:style-name="H"> not</text:span><text:span text:style-name="I"> nor</text:span>.',
        '<text:hidden-paragraph text:is-hidden="true"/>not',
        'Open<text:hidden-text text:is-hidden="true" text:string-value="x">not</text:hidden-text>!',
        "By <text:author-name>Ada</text:author-name> on <text:date>5 May</text:date>",
        "<text:ruby><text:ruby-base>大阪</text:ruby-base><text:ruby-text>おおさか</text:ruby-text></text:ruby>の港",
        "Around<draw:frame><draw:text-box><text:p>Boxed</text:p></draw:text-box></draw:frame>.",
        "Kept<text:change/><office:annotation><text:p>Too dear?</text:p></office:annotation>",
    ]
    body = (
        "<text:tracked-changes><text:changed-region><text:deletion><text:p>gone</text:p></text:deletion>"
        "</text:changed-region></text:tracked-changes>"
        + "".join(f"<text:p>{one}</text:p>" for one in paragraphs)
        + '<text:p text:style-name="P">not</text:p>'
        + '<text:section text:display="none"><text:p>not</text:p></text:section>'
    )
    found = answer(".odt", odt(body, OPEN_STYLES))
    lines = ["310⁴ seats", "Seen.", "Open!", "By Ada on 5 May", "大阪の港", "Around.", "Boxed", "Kept"]
    assert str(found["text"]).split("\n\n") == lines
    assert found["notices"] == ["text of content.xml is left out: Too dear?"]


@pytest.mark.parametrize(
    ("suffix", "data", "text"),
    [
        (".rtf", rb"{\rtf1\ansi\ansicpg1251 \'cf\'f0\'e8 180{\super 12}{\v not}}", "При 180¹²"),
        (
            ".rtf",
            rb"{\rtf1\ansi\ansicpg1252{\fonttbl{\f1\fcharset204 A;}{\f2\fcharset128 B;}}caf\'e9 "
            rb"{\f1\'cf\u1088\'f0} caf\'e9 {\f2\'93\'fa\'96\'7b} \uc2\u26085\'93\'fa!}",
            "café Пр café 日本 日!",
        ),
        (
            ".tex",
            r"\begin{document}Mass $m^2$ of 10\textsuperscript{6}, \emph{so}\footnote{Or not.}.\end{document}",
            "so[1]",
        ),
        (
            ".ipynb",
            json.dumps(
                {
                    "nbformat": 4,
                    "nbformat_minor": 5,
                    "metadata": {},
                    "cells": [
                        {"cell_type": "markdown", "id": "a", "metadata": {}, "source": "# Sea\n\n10<sup>6</sup> t"}
                    ],
                }
            ),
            "Sea\n\n10⁶ t",
        ),
    ],
    ids="page fonts tex notebook".split(),
)
def test_other_formats_of_pandoc(suffix: str, data: bytes | str, text: str) -> None:
    assert text in text_of(suffix, data)


def test_a_command_that_pandoc_does_not_know_is_named() -> None:
    assert r"Skipped '\secret{Ada}'" in notices_of(".tex", r"\begin{document}By \secret{Ada}.\end{document}")


def test_pages_of_a_book_hide_what_their_style_sheets_hide() -> None:
    page = (
        '<html xmlns="http://www.w3.org/1999/xhtml"><head><title/><script src="a"/></head><body><p>Seen<a id="x"/>.</p>'
        '<p class="aside">not</p><p><ruby>港<rt>みなと</rt></ruby>210<sup>3</sup><![CDATA[ a < b]]></p></body></html>'
    )
    found = answer(".epub", epub(page, parts={"O/style.css": ".aside { display: none }"}))
    assert found["text"] == "Seen.\n\n港210³ a < b"
    assert found["notices"] == ["text that a style sheet hides is left out: .aside"]


# Pages of the web.


@pytest.mark.parametrize(
    ("page", "text"),
    [
        ("210<sup>3</sup> people", "210³ people"),
        ("a tax of 4.5.<sup>17</sup>", "a tax of 4.5.¹⁷"),
        ("10<sup><b>-9</b></sup> m", "10⁻⁹ m"),
        ("2<sup>n+1</sup>, x<sup>2k</sup>", "2ⁿ⁺¹, x^(2k)"),
        ("the 21<sup>st</sup>, 3<sup>e</sup>, M<sup>me</sup>", "the 21st, 3e, Mme"),
        ("Lund<sup>[4]</sup>, Acme<sup>TM</sup>", "Lund[4], Acme™"),
        ("1101<sub>2</sub>, H<sub>2</sub>O, log<sub>2</sub>64", "1101₂, H2O, log₂64"),
        ("<math><mfrac> <mn>1</mn> <mn>2</mn> </mfrac><msup><mi>x</mi><mn>2</mn></msup></math>", "(1)/(2)x^(2)"),
        ("210<span style='font-size:8pt;vertical-align: super'>3</span> people", "210³ people"),
        ("<math alttext='x^2'><mi>x</mi><mn>2</mn></math>", "x^2"),
        ("<ruby>大<rp>(</rp><rt>おお</rt><rp>)</rp>阪<rt>さか</rt></ruby>港", "大阪港"),
        ("<ruby><rb>Lund</rb><rtc><rt>a</rt></rtc></ruby>!", "Lund!"),
        ("Sold for <del>150</del><ins>180</ins> crowns", "Sold for 180 crowns"),
        ("Now<s>$90</s>$70, <span style='text-decoration:line-through'>60</span>", "Now $70,"),
        ("a<div>b</div>c<br>d<p>e<p>f", "a\nb\nc\nd\n\ne\n\nf"),
        ("<ol start=3><li><p>c<li>d<ul><li>e</ul></ol>f", "3. c\n4. d\ne\n\nf"),
        ("<table><tr><td><p>a<p>b<td>c<br>d<tr><td>e<td>f</table>g", "a b\tc d\ne\tf\n\ng"),
        ("<pre>a\n  b</pre>c", "a\nb\n\nc"),
        ("Say <q>no</q> to fi&shy;sh", "Say “no” to fish"),
        ("<input type=text value=Ada> <input type=checkbox checked>yes<input type=radio>no", "Ada ☑ yes☐ no"),
        ("<select><option>a<option selected>b</select><textarea>c</textarea>", "b\nc"),
        ("<select><option>a<option>b</select>", "a"),
        ("<select multiple><option>a<option>b</select>", "a\nb"),
        ("<svg><title>t</title><text>drawn</text></svg><img alt='A map'>", "drawn\nA map"),
    ],
)
def test_what_a_page_shows(page: str, text: str) -> None:
    assert text_of(".html", page) == text


@pytest.mark.parametrize(
    "hidden",
    [
        "<p hidden=until-found>KELL</p>",
        "<p style='color: red; DISPLAY : none'>KELL</p>",
        "<p style='visibility:hidden'>KELL</p>",
        "<p style='font-size:0px'>KELL</p>",
        "<style>.x { display: none }</style><p class='x y'>KELL</p>",
        "<style>/* } */ @media print { p { color: red } } div > .x, b { display:none!important }</style>"
        "<div><i class=x>KELL</i></div>",
        "<style>.sr{position:absolute; clip:rect(0,0,0,0)}</style><p class=sr>KELL</p>",
        "<p style='position:absolute; left:-9999px'>KELL</p>",
        "<template><p>KELL</p></template>",
        "<noscript><p>KELL</p></noscript>",
        "<dialog>KELL</dialog>",
        "<div popover>KELL</div>",
        "<datalist><option>KELL</datalist>",
        "<script type=text/template><p>KELL</p></script>",
        "<!-- <p>KELL</p> -->",
        "<svg><desc>KELL</desc></svg>",
        "<progress>KELL</progress>",
        "<select><option>a<option>KELL</select>",
        "<input type=hidden value=KELL><input type=password value=KELL>",
    ],
)
def test_what_a_page_does_not_show_is_left_out(hidden: str) -> None:
    assert "KELL" not in text_of(".html", f"<p>Seen.</p><div>{hidden}</div><p>Too.</p>")


@pytest.mark.parametrize(
    "shown",
    [
        "<style>.x { display: none } .x.y { display: block }</style><p class='x y'>KELL</p>",
        "<style>.x { display: none } #z { display: block } .x { display: none }</style><p class=x id=z>KELL</p>",
        "<style>@media print { p { display: none } } p:empty { display: none }</style><p>KELL</p>",
        "<dialog open>KELL</dialog>",
        "<details><summary>S</summary>KELL</details>",
        "<p style='font-size:0.8em; opacity: 0.5'>KELL</p>",
        "<p aria-hidden=true>KELL</p>",
        "<style>p { backface-visibility: hidden; margin-left: -1000px }</style><p>KELL</p>",
        "<p style='display: none; display: block'>KELL</p>",
    ],
)
def test_what_a_page_does_show_is_kept(shown: str) -> None:
    assert "KELL" in text_of(".html", shown)


@given(
    st.lists(
        st.tuples(
            st.sampled_from("p div b td li h2 span".split()), st.sampled_from(["", "hidden", "style=display:none"])
        ),
        max_size=30,
    )
)
@settings(max_examples=50)
def test_a_word_is_in_the_text_if_no_element_around_it_is_hidden(elements: list[tuple[str, str]]) -> None:
    page, shown, seen = "", [], True
    for number, (tag, attribute) in enumerate(elements):
        page += f"<div {attribute}><{tag}>w{number} </{tag}>" + "</div>" * (number % 3 == 0)
        seen_here = seen and not attribute
        shown += [f"w{number}"] * seen_here
        seen = seen_here if number % 3 else seen
    assert text_of(".html", f"<p>start</p>{page}").split() == ["start", *shown]


@pytest.mark.parametrize(
    ("page", "notice"),
    [
        ("<p>a<img src=plan.png>", "pictures without a description are left out: plan.png"),
        ("<p>a<iframe src=b.html></iframe>", "what <iframe> loads is left out: b.html"),
        ("<p>a<object data=b.swf>c</object>", "what <object> loads is left out: b.swf"),
        ("<p>a <s>b c</s>", "struck-out text is left out: b c"),
        ("<meta charset=utf-8><p>Lund\ufffd".encode().replace(b"\xef\xbf\xbd", b"\xe9"), "after .*Lund"),
        ("<p>a \ue123", "characters that have a meaning in their font alone are kept"),
    ],
)
def test_what_a_page_loads_or_takes_back_is_named(page: str | bytes, notice: str) -> None:
    assert re.search(notice, notices_of(".html", page))


def meta(label: str, body: bytes) -> bytes:
    return b"<meta charset=" + label.encode() + b"><p>" + body


@pytest.mark.parametrize(
    ("data", "text"),
    [
        ("<p>Orsé".encode(), "Orsé"),
        ('<meta http-equiv=Content-Type content="text/html; charset=shift_jis"><p>河'.encode("shift_jis"), "河"),
        ('<?xml version="1.0" encoding="iso-8859-1"?><p>Orsé’'.encode("cp1252"), "Orsé’"),
        ("<p>Orsé".encode("utf-16"), "Orsé"),
        ("<p>Orsé".encode("utf-16-be"), "Orsé"),
        (b"\xef\xbb\xbf" + meta("latin1", "Orsé".encode()), "Orsé"),
        (b"<!-- <meta charset=koi8-r> --><script>'<meta charset=big5>'</script>" + meta("cp1251", b"\xcf"), "П"),
        (b"<p>" + b"x" * 5_000 + meta("windows-1251", b"\xcf"), "x" * 5_000 + "\n\nП"),
        (meta("utf-16", "Orsé".encode()), "Orsé"),
        (meta("made-up", "Orsé".encode()), "Orsé"),
        (meta("x-user-defined", b"Ors\xe9"), "Orsé"),
        (meta("iso-8859-1", b"\x8420\x94 \x80"), "„20” €"),
        (meta("tis-620", b"\xa1\x85"), "ก…"),
        (meta("x-gbk", "镕基".encode("gbk") + b"\x80"), "镕基€"),
        (meta("euc-jp", b"\xad\xa1 \xad\xea \xfc\xe2"), "① ㈱ 髙"),
        (meta("iso-2022-jp", b"\x1b$B\x2d\x21\x2d\x6a\x1b(B."), "①㈱."),
        (meta("dos-874", b"\xa1"), "ก"),
    ],
)
def test_the_encoding_of_a_page(data: bytes, text: str) -> None:
    assert text_of(".html", data) == text


LETTERS = "Aé ßŁąőŧğ Жы Γώ שם مر ขา 東京の㈱ 东 서울 “—”"


@pytest.mark.parametrize(
    "label", sorted(set(LABELS.values()) - {"replacement", "utf-16be", "utf-16le", "x-user-defined"})
)
def test_each_encoding_of_the_web(label: str) -> None:
    encoding = webencodings.lookup(label)
    assert encoding is not None
    body = " ".join(letter for letter in LETTERS if letter.isspace() or encoding.codec_info.encode(letter, "ignore")[0])
    body = " ".join(body.split())
    assert len(body) > 3
    assert text_of(".html", meta(label, encoding.codec_info.encode(body)[0])) == body


# PDF.

LIGATURES = "/Differences [1 /fi /fl /ff /ffi /ffl]"


def raise_by(points: int, text: str, size: int = 7) -> str:
    return f"{points} Ts /F1 {size} Tf ({text}) Tj 0 Ts /F1 12 Tf "


@pytest.mark.parametrize(
    ("page", "text"),
    [
        ("The \\001rst o\\004cer \\002ew o\\003.", "The first officer flew off."),
        ("A ba\\005ing docu-\nment", "A baffling document"),
        ("in Anglo-\nSaxon", "in Anglo-Saxon"),
        ("from 2019-\n2021", "from 2019-2021"),
        ("re-elected", "re-elected"),
        ("BT /F1 12 Tf 72 700 Td (Staff of 210) Tj " + raise_by(6, "3") + "( people) Tj ET", "Staff of 210³ people"),
        ("BT /F1 12 Tf 72 700 Td (10) Tj " + raise_by(5, "-9") + "( m) Tj ET", "10⁻⁹ m"),
        ("BT /F1 12 Tf 72 700 Td (the 21) Tj " + raise_by(5, "st") + "( of May) Tj ET", "the 21st of May"),
        ("BT /F1 12 Tf 72 700 Td (tax of 4.) Tj " + raise_by(5, "17") + "ET", "tax of 4.¹⁷"),
        ("BT /F1 12 Tf 72 700 Td (1101) Tj " + raise_by(-3, "2") + "ET", "1101₂"),
        ("BT /F1 12 Tf 72 700 Td (log) Tj " + raise_by(-3, "2") + "(64) Tj ET", "log₂64"),
        ("BT /F1 12 Tf 0 1 -1 0 300 300 Tm (Turned 210) Tj " + raise_by(6, "3") + "ET", "Turned 210³"),
        ("BT /F1 12 Tf 72 700 Td (Room 12) Tj " + raise_by(0, "34", 8) + "ET", "Room 1234"),
    ],
)
def test_what_a_pdf_shows(page: str, text: str) -> None:
    assert text_of(".pdf", pdf(page, font=LIGATURES)) == text


def form(*fields: str, page: str = "Form:") -> bytes:
    """A PDF with a form, whose fields are annotations."""
    widgets = " ".join(f"<< /Subtype /Widget /Rect [9 9 99 99] {one} >>" for one in fields)
    return pdf(page, catalog=f"/AcroForm << /Fields [{widgets}] >>", annotations=f"/Annots [{widgets}]")


@pytest.mark.parametrize(
    ("field", "text"),
    [
        ("/FT /Tx /T (name) /V (Ada)", "name: Ada"),
        ("/FT /Tx /T (a1) /TU (Full name) /V (Ada\\nVoss)", "Full name: Ada\nVoss"),
        ("/FT /Tx /T (name) /V <FEFF00C500E5D83DDE00>", "name: Åå😀"),
        ("/FT /Ch /Ff 131072 /T (colour) /Opt [(red) (blue)] /V (blue)", "colour: blue"),
        ("/FT /Btn /T (member) /V /Yes /AS /Yes", "☑ member"),
        ("/FT /Btn /T (size) /V /Large /AS /Large /AP << /N << /Large << >> /Off << >> >> >>", "☑ size: Large"),
        ("/FT /Btn /T (member) /V /Off /AS /Off", ""),
        ("/FT /Tx /T (word) /Ff 8192 /V (secret)", ""),
        ("/FT /Tx /T (name) /F 2 /V (hidden)", ""),
    ],
)
def test_what_is_typed_into_a_form(field: str, text: str) -> None:
    assert text_of(".pdf", form(field)) == f"Form:\n{text}".strip()


def test_a_field_without_a_form_is_a_text() -> None:
    assert text_of(".pdf", pdf("Form:", annotations="/Annots [<< /Subtype /Widget /V (Ada) >>]")) == "Form:\nAda"


def test_a_form_on_an_empty_page_is_a_text() -> None:
    assert text_of(".pdf", form("/FT /Tx /T (name) /V (Ada)", page="")) == "name: Ada"


def test_bad_and_empty_pages_do_not_lose_the_good_ones() -> None:
    data = pdf("One.", "Two.", "", "Four.").replace(b"6 0 obj\n<< /Type /Page ", b"6 0 obj\n<< /Typo /Page ")
    damaged = data.replace(b"/MediaBox [0 0 612 792] /Contents 7 0 R", b"/MediaBix [0 0 612 792] /Cantents 7 0 R")
    damaged = damaged.replace(b"6 0 obj\n<<", b"6 0 obj\n[[", 1)
    found = answer(".pdf", damaged)
    assert found["text"] == "One.\n\nFour."
    assert found["notices"] == ["pages that cannot be read are left out: page 2", "pages have no text: page 3"]


def test_what_is_typed_onto_a_page_is_text_and_notes_beside_it_are_named() -> None:
    typed = "<< /Subtype /FreeText /Contents (Paid.) /Rect [0 0 9 9] >>"
    note = "<< /Subtype /Text /Contents (Check) /Rect [0 0 9 9] >>"
    found = answer(".pdf", pdf("Bill.", annotations=f"/Annots [{typed} {note}]"))
    assert (found["text"], found["notices"]) == ("Bill.\nPaid.", ["notes are left out: page 1"])


# What all share.


@given(st.text("0123456789", min_size=1), st.sampled_from("0a.) "))
def test_a_raised_number_keeps_its_value_and_does_not_become_part_of_another(number: str, before: str) -> None:
    assert unicodedata.normalize("NFKC", raised(number, before)) == number
    assert not set(raised(number, before)) & set("0123456789")


@given(st.text("ab \t\n\r\v\u0085\u00a0\u00ad\0\ufdd0\ud83d", max_size=20))
def test_a_cleaned_text_is_clean(text: str) -> None:
    assert cleaned(cleaned(text)) == cleaned(text)


ENTITIES = '<!DOCTYPE w [<!ENTITY a "aaaaaaaaaa"><!ENTITY b SYSTEM "file:///etc/passwd">]>'


@pytest.mark.parametrize(
    ("suffix", "data", "message"),
    [
        (".html", b"<meta charset=zlib_codec><p>a", "is in the encoding 'zlib_codec', which browsers do not read"),
        (".html", b"<meta charset=cp037><p>a", "'cp037'"),
        (".html", b"<meta charset=hz-gb-2312><p>a", "'hz-gb-2312'"),
        (".html", b"<p>Ors\xe9", "names no encoding, and is not UTF-8: see byte 6; save it in UTF-8"),
        (".html", b"<script>write()</script>", "has no text; .*save it from a browser"),
        (".html", b"<frameset><frame src=a>", r"has no text.* \(what <frame> loads is left out: a\)"),
        (".docx", b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + bytes(600), "is encrypted, or in the format .doc"),
        (".docx", b"Plain text.", "is not a file of Word, or damaged: File is not a zip file"),
        (".docx", zipped({"a": "b"}), "is not a file of Word.*word/document.xml"),
        (".docx", docx("<w:p>&b;</w:p>", prolog=ENTITIES), "has XML with a DTD"),
        (".docx", docx("<w:p>"), "word/document.xml is not XML"),
        (".docx", docx("<w:p/>"), "has no text"),
        (".docx", docx("<w:p>" * 3_000 + "</w:p>" * 3_000), "is not a file of Word, or damaged"),
        (".odt", zipped({"META-INF/manifest.xml": "<a:encryption-data/>"}), "is encrypted; save it without a password"),
        (".odt", zipped({"a": "b"}), "is not a file of OpenDocument.*no content.xml"),
        (".epub", zipped({"a": "b"}), "is not a file of EPUB.*container.xml"),
        (
            ".epub",
            epub("", parts={"META-INF/encryption.xml": '<a URI="O/a.xhtml"/>'}),
            "is encrypted; give a copy without",
        ),
        (".rtf", b"Plain text.", "is not RTF"),
        (".tex", r"\begin{document", "is not latex, or damaged"),
        (".ipynb", "{", "is not ipynb, or damaged"),
        (".pdf", pdf("", ""), "has no text, like a scan; .*ocrmypdf IN OUT"),
        (".pdf", b"Plain text.", "is not a PDF, or damaged"),
        (".pdf", b"", "is not a PDF, or damaged"),
    ],
)
def test_files_that_are_refused(suffix: str, data: bytes | str, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        text_of(suffix, data)


@pytest.mark.parametrize("suffix", [".docx", ".odt", ".epub"])
def test_a_zip_bomb_is_not_unpacked(monkeypatch: pytest.MonkeyPatch, suffix: str) -> None:
    text = "x" * (1 << 22)
    word = docx(paragraph(run(text)))
    data = {".docx": word, ".odt": odt(f"<text:p>{text}</text:p>"), ".epub": epub(f"<p>{text}")}[suffix]
    assert len(data) < 1 << 14
    monkeypatch.setattr("mac_rag.data.conversion.office._LARGEST_PART", 1 << 20)
    assert "has parts of more than 1,048,576 bytes" in notices_of(suffix, data)


def test_an_encrypted_pdf_is_refused_and_one_with_a_password_for_changes_only_is_read() -> None:
    from pypdf import PdfReader, PdfWriter

    def encrypted(password: str) -> bytes:
        writer = PdfWriter(clone_from=PdfReader(BytesIO(pdf("Ada Voss opened it."))))
        writer.encrypt(password, "the owner's", algorithm="RC4-128")
        data = BytesIO()
        writer.write(data)
        return data.getvalue()

    assert "is encrypted; save it without a password: qpdf --decrypt IN OUT" in notices_of(".pdf", encrypted("secret"))
    assert text_of(".pdf", encrypted("")) == "Ada Voss opened it."


def test_a_pdf_of_too_many_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mac_rag.data.conversion.pdf._MOST_PAGES", 2)
    assert "has 3 pages, and 2 are the most" in notices_of(".pdf", pdf("a", "b", "c"))


def test_without_the_extra_the_error_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mac_rag.data.conversion.office.find_spec", lambda _: None)
    for suffix, data in ((".docx", docx(paragraph(run("a")))), (".odt", odt("<text:p>a</text:p>")), (".tex", b"a")):
        assert "needs pandoc: pip install 'mac-rag[files]'" in notices_of(suffix, data)


def test_errors_name_the_file_and_the_next_one_is_read(tmp_path: Path) -> None:
    (tmp_path / "bad.docx").write_bytes(b"PK")
    (tmp_path / "good.html").write_text("<p>Fine.")
    os.mkfifo(tmp_path / "pipe.pdf")
    for name, message in (
        ("bad.docx", "bad.docx is not a file of Word, or damaged"),
        ("missing.pdf", "missing.pdf cannot be read: No such file"),
        ("pipe.pdf", "pipe.pdf cannot be read: it is a named pipe"),
    ):
        with pytest.raises(DataError, match=message):
            read_documents([tmp_path / name])
        assert convert(tmp_path / "good.html") == ("Fine.", None, ())


@pytest.mark.parametrize(
    ("code", "bad", "message"),
    [
        ("import time; time.sleep(60)", 1, "takes more than 0.5 s to convert"),
        ("raise SystemExit", 2, "has crashed"),
        ("raise SystemExit", 1, None),  # the file is not to blame for one crash
    ],
)
def test_a_file_that_takes_too_long_or_ends_the_process_twice_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, bad: int, message: str | None
) -> None:
    (tmp_path / "good.html").write_text("<p>Fine.")
    fine = {"text": "Fine.", "title": None, "notices": []}
    worker, running, began = converter._Worker(), converter._Worker._running, time.monotonic()
    left = [code] * bad

    def started(self: converter._Worker) -> subprocess.Popen[bytes]:
        if not left:
            return running(self)
        command, pipe = [sys.executable, "-c", left.pop()], subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, start_new_session=True)
        self._owner = os.getpid()
        return self._process

    monkeypatch.setattr(converter._Worker, "_running", started)
    if message is not None:
        assert message in worker.ask(tmp_path / "good.html", 0.5)["error"]
        assert time.monotonic() - began < 10
    assert worker.ask(tmp_path / "good.html", 60) == fine
    assert not left
    worker._end()


def of_group(group: int) -> list[str]:
    """The commands of the running processes of a group."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            state, _, its_group = (folder / "stat").read_text().rpartition(")")[2].split()[:3]
            if int(its_group) == group and state != "Z":
                found.append((folder / "cmdline").read_text())
    return found


def test_pandoc_ends_with_the_process_that_started_it(tmp_path: Path) -> None:
    (tmp_path / "long.tex").write_text(r"\emph{a} $x^{2}$ " * 3_000_000)  # minutes of work
    (tmp_path / "short.html").write_text("<p>a")
    worker = converter._Worker()
    worker.ask(tmp_path / "short.html", 60)
    group = worker._running().pid
    answers: list[dict[str, object]] = []
    asking = Thread(target=lambda: answers.append(worker.ask(tmp_path / "long.tex", 2)))
    asking.start()
    while asking.is_alive() and not any("pandoc" in command for command in of_group(group)):
        time.sleep(0.05)
    assert asking.is_alive()
    asking.join()
    assert "takes more than 2 s" in str(answers[0]["error"])
    ended = time.monotonic() + 10
    while of_group(group) and time.monotonic() < ended:
        time.sleep(0.05)
    assert of_group(group) == []


def test_modules_in_the_working_directory_are_not_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("json", "zipfile", "pypdfium2", "selectolax", "pypandoc", "mac_rag"):
        (tmp_path / f"{module}.py").write_text("raise SystemExit")
    (tmp_path / "good.html").write_text("<p>Fine.")
    monkeypatch.chdir(tmp_path)
    worker = converter._Worker()
    assert worker.ask(Path("good.html"), 60)["text"] == "Fine."
    worker._end()


@given(st.sampled_from([".html", ".xhtml", ".pdf", ".epub", ".docx", ".odt"]), st.binary(max_size=200), st.integers(0))
@settings(max_examples=60, deadline=None)
def test_whatever_bytes_are_read_or_refused(suffix: str, data: bytes, place: int) -> None:
    whole = {".pdf": pdf("a", title="b"), ".epub": epub(PAGE), ".docx": b"PK", ".odt": b"PK"}.get(suffix, PAGE.encode())
    place %= len(whole)
    for mutated in (data, whole[:place] + data + whole[place:], whole[:place] + data + whole[place + len(data) :]):
        found = answer(suffix, mutated)
        assert found.get("error") or str(found["text"]).strip()


def test_a_list_in_json_is_refused_with_the_remedy_and_an_object_is_a_text(tmp_path: Path) -> None:
    path = tmp_path / "my rows.json"
    path.write_text(' \n[{"id": "1", "text": "a"}]')
    with pytest.raises(DataError, match=r"is a list in JSON, .*: jq -c '.\[\]' '.*my rows.json' > '.*my rows.jsonl'"):
        read_documents([path])
    path.write_text('{"a": 1}')
    assert read_documents([path]) == [Document(str(path), '{"a": 1}')]
