"""HTML, PDF and DOCX files: their texts and titles, and what is refused, by name and remedy."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from zipfile import ZIP_DEFLATED, ZipFile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mac_rag.data import conversion
from mac_rag.data.conversion import UnreadableError, cleaned, convert, read_docx, read_html, read_pdf
from mac_rag.data.readers import read_documents
from mac_rag.data.types import Document
from mac_rag.errors import DataError

WORD = "http://schemas.openxmlformats.org/wordprocessingml/2006/main"
PACKAGE = "http://schemas.openxmlformats.org/package/2006/relationships"
TYPES = "http://schemas.openxmlformats.org/officeDocument/2006/relationships"
MARKUP = "http://schemas.openxmlformats.org/markup-compatibility/2006"
RELATIONSHIPS = (
    f'<Relationships xmlns="{PACKAGE}"><Relationship Id="a" Type="{TYPES}/officeDocument" Target="word/document.xml"/>'
    f'<Relationship Id="b" Type="{PACKAGE}/metadata/core-properties" Target="docProps/core.xml"/></Relationships>'
)
CORE = (
    '<c:p xmlns:c="http://schemas.openxmlformats.org/package/2006/metadata/core-properties" '
    'xmlns:dc="http://purl.org/dc/elements/1.1/"><dc:title>The harbour\n of Lund</dc:title></c:p>'
)


def docx(body: str, *, prolog: str = "") -> bytes:
    """A Word file with this body."""
    data = BytesIO()
    with ZipFile(data, "w", ZIP_DEFLATED) as archive:
        archive.writestr("_rels/.rels", RELATIONSHIPS)
        archive.writestr("docProps/core.xml", CORE)
        archive.writestr(
            "word/document.xml",
            f'{prolog}<w:document xmlns:w="{WORD}" xmlns:mc="{MARKUP}"><w:body>{body}</w:body></w:document>',
        )
    return data.getvalue()


def pdf(*pages: str, title: str = "The harbour of Lund") -> bytes:
    """A PDF with a line of text on each page; an empty text makes a page without."""
    kids = " ".join(f"{4 + 2 * number} 0 R" for number in range(len(pages)))
    objects = [
        "<< /Type /Catalog /Pages 2 0 R >>",
        f"<< /Type /Pages /Kids [{kids}] /Count {len(pages)} >>",
        "<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica /Encoding /WinAnsiEncoding >>",
    ]
    for number, text in enumerate(pages):
        drawn = f"BT /F1 12 Tf 72 720 Td ({text}) Tj ET" if text else "0 0 m 9 9 l S"
        objects.append(
            f"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Contents {5 + 2 * number} 0 R "
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
    return f"{data}xref\n0 {len(objects) + 1}\n0000000000 65535 f \n{table}{end}".encode()


PAGE = (
    "<!DOCTYPE html><html><head><meta charset=utf-8><title>The harbour\n of Lund</title><style>p {color: red}</style>"
    "<script>if (a < b) document.write('<p>written</p>')</script></head><body><h1>Harbours</h1><p>Ada&nbsp;Voss\n "
    "opened it in&#x20;<b>May</b>.<br>It &lt;grows&gt;.<ul><li>one<li>two</ul><table><tr><td>a<td>b"
    "<tr><td>c<td>d</table>"
    "<noscript>Turn scripts on.</noscript><svg><svg></svg><text>drawn</text></svg></body></html>"
)


def test_the_files_are_read_with_their_titles_and_without_dates(tmp_path: Path) -> None:
    body = "<w:p><w:r><w:t>Ada Voss opened it in May.</w:t></w:r></w:p>"
    (tmp_path / "a.HTML").write_text(PAGE)
    (tmp_path / "b.docx").write_bytes(docx(body))
    (tmp_path / "c.pdf").write_bytes(pdf("Ada Voss opened it.", "The bridge was closed."))
    (tmp_path / "d.htm").write_text("<p>No title.")
    read = read_documents([tmp_path / name for name in ("a.HTML", "b.docx", "c.pdf", "d.htm")])
    title = {"title": "The harbour of Lund"}
    assert [(document.text, document.metadata) for document in read] == [
        ("Harbours\n\nAda Voss opened it in May.\nIt <grows>.\n\none\ntwo\n\na\tb\nc\td", title),
        ("Ada Voss opened it in May.", title),
        ("Ada Voss opened it.\n\nThe bridge was closed.", title),
        ("No title.", {}),
    ]
    assert read[0].id == str(tmp_path / "a.HTML")
    os.utime(tmp_path / "c.pdf", (0, 0))
    assert read_documents([tmp_path / "c.pdf"]) == [read[2]]


def test_a_word_file_has_paragraphs_tables_tabs_and_no_deletions() -> None:
    body = (
        "<w:p><w:pPr><w:tabs><w:tab/></w:tabs></w:pPr><w:r><w:t>One</w:t><w:tab/><w:t>two</w:t><w:br/><w:t>three</w:t>"
        "</w:r></w:p><w:p><w:del><w:r><w:delText>gone</w:delText></w:r></w:del><w:ins><w:r><w:t>new</w:t></w:r></w:ins>"
        "<w:moveFrom><w:r><w:t>moved</w:t></w:r></w:moveFrom></w:p><w:tbl><w:tr><w:tc><w:p><w:r><w:t>a</w:t></w:r></w:p>"
        "<w:p><w:r><w:t>b</w:t></w:r></w:p></w:tc><w:tc><w:p><w:r><w:t>c</w:t></w:r></w:p></w:tc></w:tr></w:tbl>"
        "<mc:AlternateContent><mc:Choice><w:p><w:r><w:t>box</w:t></w:r></w:p></mc:Choice><mc:Fallback><w:p><w:r>"
        "<w:t>box</w:t></w:r></w:p></mc:Fallback></mc:AlternateContent>"
    )
    text, title = read_docx(BytesIO(docx(body)))
    assert cleaned(text) == "One\ttwo\nthree\nnew\na b \tc\n\nbox"
    assert title == "The harbour\n of Lund"


@pytest.mark.parametrize(
    ("data", "text"),
    [
        ("<p>Orsé".encode(), "Orsé"),
        ("<meta charset='windows-1252'><p>Orsé".encode("cp1252"), "Orsé"),
        ('<meta http-equiv=Content-Type content="text/html; charset=shift_jis"><p>河'.encode("shift_jis"), "河"),
        ('<?xml version="1.0" encoding="iso-8859-1"?><p>Orsé’'.encode("cp1252"), "Orsé’"),
        ("<p>Orsé".encode("utf-16"), "Orsé"),
    ],
)
def test_the_encoding_of_a_page(data: bytes, text: str) -> None:
    assert cleaned(read_html(BytesIO(data))[0]) == text


def zipped(**parts: bytes) -> bytes:
    data = BytesIO()
    with ZipFile(data, "w", ZIP_DEFLATED) as archive:
        for name, content in parts.items():
            archive.writestr(name, content)
    return data.getvalue()


ENTITIES = '<!DOCTYPE w [<!ENTITY a "aaaaaaaaaa"><!ENTITY b SYSTEM "file:///etc/passwd">]>'


@pytest.mark.parametrize(
    ("read", "data", "message"),
    [
        (read_html, b"<meta charset=zlib_codec><p>a", "is in the encoding 'zlib_codec', which is not supported"),
        (read_html, b"<meta charset=punycode><p>a", "'punycode'"),
        (read_html, b"<p>Ors\xe9", "is not in the encoding utf-8: see byte 6; save it in UTF-8"),
        (read_html, b"<script>write()</script>", "has no text; .*save it from a browser"),
        (read_html, b"", "has no text"),
        (read_docx, b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + bytes(600), "is encrypted, or in the format .doc"),
        (read_docx, b"Plain text.", "is not a Word file, or damaged: File is not a zip file"),
        (read_docx, zipped(a=b"b"), "is not a Word file: .*_rels/.rels"),
        (read_docx, docx("<w:p>&b;</w:p>", prolog=ENTITIES), "has XML with a DTD"),
        (read_docx, docx("<w:p>"), "its XML is not well-formed"),
        (read_docx, docx("<w:p/>"), "has no text"),
        (read_docx, docx("<w:p/>")[:-40], "is not a Word file, or damaged"),
        (read_pdf, pdf("", ""), "has no text, like a scan; .*ocrmypdf IN OUT"),
        (read_pdf, b"Plain text.", "is not a PDF, or damaged"),
        (read_pdf, b"", "is not a PDF, or damaged"),
        (read_pdf, pdf("a")[:-300], "is not a PDF, or damaged|has no text"),
    ],
    ids="codec punycode bytes script nothing ole text zip entities broken empty cut scan no-pdf no-bytes half".split(),
)
def test_files_that_are_refused(read: Callable[[BytesIO], object], data: bytes, message: str) -> None:
    with pytest.raises(UnreadableError, match=message):
        read(BytesIO(data))


def test_a_zip_bomb_is_not_unpacked(monkeypatch: pytest.MonkeyPatch) -> None:
    data = docx("<w:p><w:r><w:t>" + "x" * (1 << 22) + "</w:t></w:r></w:p>")
    assert len(data) < 1 << 14
    monkeypatch.setattr("mac_rag.data.conversion._LARGEST_PART", 1 << 20)
    with pytest.raises(UnreadableError, match=r"has a part 'word/document\.xml' of more than 1,048,576 bytes"):
        read_docx(BytesIO(data))


def test_an_encrypted_pdf_is_refused_and_one_with_a_password_for_changes_only_is_read() -> None:
    from pypdf import PdfReader, PdfWriter

    def encrypted(password: str) -> BytesIO:
        writer = PdfWriter(clone_from=PdfReader(BytesIO(pdf("Ada Voss opened it."))))
        writer.encrypt(password, "the owner's", algorithm="RC4-128")
        data = BytesIO()
        writer.write(data)
        return data

    with pytest.raises(UnreadableError, match="is encrypted; save it without a password: qpdf --decrypt IN OUT"):
        read_pdf(encrypted("secret"))
    assert read_pdf(encrypted(""))[0].strip() == "Ada Voss opened it."


def test_a_pdf_of_too_many_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mac_rag.data.conversion._MOST_PAGES", 2)
    with pytest.raises(UnreadableError, match="has 3 pages, and 2 are the most"):
        read_pdf(BytesIO(pdf("a", "b", "c")))


def test_without_the_extra_the_error_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pypdf", None)
    with pytest.raises(UnreadableError, match=r"is PDF, which needs pypdf: pip install 'mac-rag\[files\]'"):
        read_pdf(BytesIO(pdf("a")))


def test_errors_name_the_file_and_the_next_one_is_read(tmp_path: Path) -> None:
    (tmp_path / "bad.docx").write_bytes(b"PK")
    (tmp_path / "good.html").write_text("<p>Fine.")
    os.mkfifo(tmp_path / "pipe.pdf")
    for name, message in (
        ("bad.docx", "bad.docx is not a Word file, or damaged"),
        ("missing.pdf", "missing.pdf cannot be read: No such file"),
        ("pipe.pdf", "pipe.pdf cannot be read: it is a named pipe"),
    ):
        with pytest.raises(DataError, match=message):
            read_documents([tmp_path / name])
        assert convert(tmp_path / "good.html") == ("Fine.", None)


def test_a_file_that_takes_too_long_or_ends_the_process_is_refused(tmp_path: Path) -> None:
    (tmp_path / "good.html").write_text("<p>Fine.")
    slow = "import time; time.sleep(60)"
    for code, message in ((slow, "takes more than 0.5 s to convert"), ("raise SystemExit", "has crashed")):
        worker = conversion._Worker()
        worker._process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        worker._owner = os.getpid()
        began = time.monotonic()
        assert message in worker.ask(tmp_path / "good.html", 0.5)["error"]
        assert time.monotonic() - began < 10
        assert worker.ask(tmp_path / "good.html", 60) == {"text": "Fine.", "title": None}
        worker._end()


def test_modules_in_the_working_directory_are_not_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("json", "zipfile", "pypdf", "mac_rag"):
        (tmp_path / f"{module}.py").write_text("raise SystemExit")
    (tmp_path / "good.html").write_text("<p>Fine.")
    monkeypatch.chdir(tmp_path)
    worker = conversion._Worker()
    assert worker.ask(Path("good.html"), 60)["text"] == "Fine."
    worker._end()


@given(st.binary(max_size=400))
@settings(max_examples=60, deadline=None)
def test_whatever_bytes_are_read_or_refused(data: bytes) -> None:
    for read, whole in ((read_html, PAGE.encode()), (read_docx, docx("<w:p><w:r><w:t>a</w:t></w:r></w:p>"))):
        for given_bytes in (data, whole[: len(data) * 3] + data + whole[len(data) * 3 :]):
            try:
                text, _ = read(BytesIO(given_bytes))
            except UnreadableError:
                continue
            assert cleaned(text) == cleaned(cleaned(text))


def test_a_list_in_json_is_refused_with_the_remedy_and_an_object_is_a_text(tmp_path: Path) -> None:
    path = tmp_path / "my rows.json"
    path.write_text(' \n[{"id": "1", "text": "a"}]')
    with pytest.raises(DataError, match=r"is a list in JSON, .*: jq -c '.\[\]' '.*my rows.json' > '.*my rows.jsonl'"):
        read_documents([path])
    path.write_text('{"a": 1}')
    assert read_documents([path]) == [Document(str(path), '{"a": 1}')]
