"""Groups of documents that are amortized and committed together, described so that every process can read them.

Only a document's digest travels between processes. Each process reads the text itself from the files, so no text is in
the driver's memory for long, and none in Ray's storage.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from mac_rag.data.provenance import content_hash
from mac_rag.data.readers import placed_documents
from mac_rag.data.table import Place
from mac_rag.data.types import Document
from mac_rag.errors import DataError


class Found(NamedTuple):
    """A document that was found in the files.

    Attributes:
        file: index of its file.
        place: its place in the file, fields of a `Place`.
        id: its id.
        content_hash: hash of its text and metadata.
    """

    file: int
    place: Sequence[int]
    id: str
    content_hash: str

    @property
    def digest(self) -> str:
        """A hex digest that identifies the document."""
        return _digest(self.id, self.content_hash)


class Group(NamedTuple):
    """Documents in the order of the files; documents that need no work may lie between them.

    Attributes:
        file, place: file and place of the first document.
        digests: hex digest of each document.
        lacking: for each, True if the bank lacks it; False if only the retriever does.
    """

    file: int
    place: Sequence[int]
    digests: Sequence[str]
    lacking: Sequence[bool]

    @classmethod
    def of(cls, found: Sequence[Found], lacking: Sequence[bool]) -> Group:
        """The group of some documents."""
        return cls(found[0].file, found[0].place, [each.digest for each in found], lacking)

    def key(self, *made_by: str) -> str:
        """A hex digest of everything that the group's memory tokens depend on.

        Args:
            made_by: version, model and settings that make them.
        """
        digests = [digest for digest, lacking in zip(self.digests, self.lacking) if lacking]
        return hashlib.sha256(json.dumps([*made_by, *digests]).encode()).hexdigest()

    def read(self, files: Sequence[Path]) -> list[Document]:
        """Reads the documents.

        Raises:
            DataError: if a document is no longer there, and for files that cannot be read.
        """
        documents: list[Document] = []
        for number in range(self.file, len(files)):
            start = Place(*self.place) if number == self.file else Place()
            for _, document in placed_documents(files[number], start):
                if _digest(document.id, content_hash(document)) == self.digests[len(documents)]:
                    documents.append(document)
                    if len(documents) == len(self.digests):
                        return documents
        raise DataError(
            f"{files[self.file]}, or a file after it, has changed since it was first read; run the command again"
        )

    def new(self, documents: Sequence[Document]) -> list[Document]:
        """The documents of the group that the bank lacks. `documents`: all of its documents."""
        return [document for document, lacking in zip(documents, self.lacking) if lacking]


def _digest(document_id: str, content: str) -> str:
    return hashlib.sha256(json.dumps([document_id, content]).encode()).hexdigest()
