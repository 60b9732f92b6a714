"""Groups of documents that are amortized and committed together, as every process of a cluster finds them in the files.

A document travels between processes as its digest alone. Each process reads the text where it needs it, so no text is
in the driver's memory for long, and none in Ray's storage.
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
        file: number of its file.
        place: its place there, as a `Place`.
        id: its id.
        content_hash: hash of its text and metadata.
    """

    file: int
    place: Sequence[int]
    id: str
    content_hash: str

    @property
    def digest(self) -> str:
        """A hex digest that tells the document from all others."""
        return _digest(self.id, self.content_hash)


class Group(NamedTuple):
    """Documents that follow each other in the files; others, which need nothing, may stand between them.

    Attributes:
        file, place: where the first of them is.
        digests: the hex digest of each.
        lacking: for each, whether the bank lacks it; otherwise only the retriever does.
    """

    file: int
    place: Sequence[int]
    digests: Sequence[str]
    lacking: Sequence[bool]

    @classmethod
    def of(cls, found: Sequence[Found], lacking: Sequence[bool]) -> Group:
        """Makes the group of some documents."""
        return cls(found[0].file, found[0].place, [each.digest for each in found], lacking)

    def key(self, *made_by: str) -> str:
        """What the memory tokens of the group depend on, as a hex digest.

        Args:
            made_by: model and settings that they are made with.
        """
        digests = [digest for digest, lacking in zip(self.digests, self.lacking) if lacking]
        return hashlib.sha256(json.dumps([*made_by, *digests]).encode()).hexdigest()

    def read(self, files: Sequence[Path]) -> list[Document]:
        """Reads the documents.

        Raises:
            DataError: when they are not there any more, and for files that cannot be read.
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
            f"{files[self.file]}, or a file behind it, has changed since it was read first; run the command again"
        )

    def new(self, documents: Sequence[Document]) -> list[Document]:
        """Those of its documents that the bank lacks."""
        return [document for document, lacking in zip(documents, self.lacking) if lacking]


def _digest(document_id: str, content: str) -> str:
    return hashlib.sha256(json.dumps([document_id, content]).encode()).hexdigest()
