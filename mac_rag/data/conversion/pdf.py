"""The text of a PDF, page by page, as its fonts say it; nothing is recognized in pictures."""

from __future__ import annotations

from typing import BinaryIO

from mac_rag.data.conversion.texts import UnreadableError
from mac_rag.untrusted_files import DOCUMENT

_MOST_PAGES = 10_000


def read_pdf(file: BinaryIO) -> tuple[str, str | None]:
    """The text of a PDF, and the title in its properties.

    Raises:
        UnreadableError: when pypdf is missing; for a file that is no PDF, encrypted, damaged, longer than is read, or
            without text.
    """
    try:
        from pypdf import PdfReader
        from pypdf.errors import DependencyError, FileNotDecryptedError
    except ModuleNotFoundError:
        raise UnreadableError("is PDF, which needs pypdf: pip install 'mac-rag[files]'") from None
    try:
        reader = PdfReader(file, strict=False)
        if reader.is_encrypted and not reader.decrypt(""):  # many have a password for changes only
            raise FileNotDecryptedError("encrypted")
        count = len(reader.pages)
        if count > _MOST_PAGES:
            raise UnreadableError(f"has {count:,} pages, and {_MOST_PAGES:,} are the most that are read; split it")
        pages, size = [], 0
        for page in reader.pages:
            pages.append(page.extract_text())
            size += len(pages[-1])
            if size > DOCUMENT:
                raise UnreadableError(f"has a text of more than {DOCUMENT:,} bytes, the most of one document; split it")
        title = None if reader.metadata is None else reader.metadata.title
    except (FileNotDecryptedError, DependencyError):  # DependencyError where a cipher is not installed
        raise UnreadableError("is encrypted; save it without a password, as by qpdf --decrypt IN OUT") from None
    except (UnreadableError, MemoryError):
        raise
    except Exception as error:  # of a malformed file, pypdf raises errors of many classes
        raise UnreadableError(
            f"is no PDF, or damaged ({type(error).__name__}: {error!s:.200}); save it again, or as text"
        ) from None
    text = "\n\n".join(pages)
    if not text.strip():
        raise UnreadableError("has no text, as a scan; let a program recognize it first, as ocrmypdf IN OUT does")
    return text, title if isinstance(title, str) else None
