"""Uploaded files on their way to documents. A client's file name is an id and never a path."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from secrets import token_hex

from mac_rag.atomic_files import make_folder, private
from mac_rag.data.readers import read_good_documents
from mac_rag.data.types import Document
from mac_rag.errors import DataError
from mac_rag.server.jobs import LeftOut

# Endings that `mac_rag.data.readers` looks at; a file with another ending is a text.
_ENDINGS = (".jsonl", ".json", ".csv", ".parquet", ".html", ".htm", ".xhtml", ".pdf", ".docx")
_ROWS = (".jsonl", ".csv", ".parquet")


@dataclass(frozen=True)
class Upload:
    """One file.

    Attributes:
        name: what the client calls it.
        path: where it lies, under a name of the server's.
    """

    name: str
    path: Path


class Uploads:
    """A folder for the files of one request.

    Args:
        root: the server's folder of uploads.
        characters: longest document.
    """

    def __init__(self, root: Path, characters: int) -> None:
        self._characters = characters
        make_folder(root)
        self._folder = root / token_hex(12)
        make_folder(self._folder)
        self._files: list[Upload] = []

    def add(self, name: str, data: Iterator[bytes]) -> None:
        """Keeps a file."""
        shown = PurePosixPath(name.replace("\\", "/")).name or "unnamed"
        ending = PurePosixPath(shown).suffix.lower()
        path = self._folder / f"{len(self._files)}{ending if ending in _ENDINGS else '.txt'}"
        with open(path, "xb", opener=private) as file:
            for piece in data:
                file.write(piece)
        self._files.append(Upload(shown, path))

    def read(self, left_out: LeftOut) -> Iterator[Document]:
        """The documents of all files. What cannot be read is noted under the client's name of the file."""
        for upload in self._files:

            def refuse(error: DataError, upload: Upload = upload) -> None:
                left_out.add(upload.name, str(error).replace(str(upload.path), upload.name))

            for _, document in read_good_documents([upload.path], refuse):
                if upload.path.suffix not in _ROWS:
                    document = Document(upload.name, document.text, document.metadata)
                if len(document.text) > self._characters:
                    left_out.add(document.id, f"it has more than {self._characters:,} characters; split it")
                else:
                    yield document

    def remove(self) -> None:
        """Removes the files."""
        shutil.rmtree(self._folder, ignore_errors=True)
