"""What the bank knows about a document apart from its text: id, content hash, metadata and time of addition."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from mac_rag.data.types import Document
from mac_rag.errors import BankError
from mac_rag.untrusted_files import METADATA_DEPTH, parse_json


@dataclass(frozen=True, slots=True)
class Member:
    """A document that an entry of the bank stands for.

    Attributes:
        document_id: id of the document.
        content_hash: hash of its text and metadata, by which an unchanged document is recognized.
        metadata: its metadata, after a round trip through JSON.
        added: time at which it was put into the bank, ISO 8601 in UTC.
    """

    document_id: str
    content_hash: str
    metadata: Mapping[str, Any]
    added: str

    @classmethod
    def of(cls, document: Document) -> Member:
        """Makes the member for a document that is added now.

        Raises:
            BankError: for an id that is not a text, or metadata that cannot be stored as JSON.
        """
        if not isinstance(document.id, str):
            raise BankError(f"ids of documents must be texts, got {document.id!r}")
        added = datetime.now(UTC).isoformat(timespec="seconds")
        return cls(document.id, content_hash(document), _as_json(document), added)

    def matches(self, text: str) -> bool:
        """True if this is the text that the content hash was made of."""
        return content_hash(Document(self.document_id, text, self.metadata)) == self.content_hash


def content_hash(document: Document) -> str:
    """Hex sha256 of a document's text and metadata.

    Metadata count because filters read them: a document that now belongs to another tenant has changed.

    Raises:
        BankError: for metadata that cannot be stored as JSON.
    """
    return hashlib.sha256(json.dumps([document.text, _as_json(document)], sort_keys=True).encode()).hexdigest()


def _as_json(document: Document) -> dict[str, Any]:
    try:
        text = json.dumps(dict(document.metadata), allow_nan=False)
        metadata: dict[str, Any] = parse_json(text, depth=METADATA_DEPTH)
    except (TypeError, ValueError, RecursionError) as error:
        raise BankError(f"metadata of document {document.id!r} cannot be kept as JSON: {error}") from error
    return metadata
