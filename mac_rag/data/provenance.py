"""What is known of a document apart from its text: its id, content hash, metadata and when it was added."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from mac_rag.data.types import Document
from mac_rag.errors import BankError


@dataclass(frozen=True, slots=True)
class Member:
    """A document that an entry of the bank stands for.

    Attributes:
        document_id: the document's id.
        content_hash: of its text and metadata, so that an unchanged document is known again.
        metadata: its metadata, as JSON gives them back.
        added: when it was put into the bank, ISO 8601 in UTC.
    """

    document_id: str
    content_hash: str
    metadata: Mapping[str, Any]
    added: str

    @classmethod
    def of(cls, document: Document) -> Member:
        """What the bank will know of a document.

        Raises:
            BankError: for an id that is no text, or metadata that cannot be kept as JSON.
        """
        if not isinstance(document.id, str):
            raise BankError(f"ids of documents must be texts, got {document.id!r}")
        added = datetime.now(UTC).isoformat(timespec="seconds")
        return cls(document.id, content_hash(document), _as_json(document), added)


def content_hash(document: Document) -> str:
    """What an unchanged document is known by: the sha256 of its text and metadata.

    Metadata count because filters go by them: a document that now belongs to another tenant has changed.

    Raises:
        BankError: for metadata that cannot be kept as JSON.
    """
    return hashlib.sha256(json.dumps([document.text, _as_json(document)], sort_keys=True).encode()).hexdigest()


def _as_json(document: Document) -> dict[str, Any]:
    try:
        metadata: dict[str, Any] = json.loads(json.dumps(dict(document.metadata), allow_nan=False))
    except (TypeError, ValueError) as error:
        raise BankError(f"metadata of document {document.id!r} cannot be kept as JSON: {error}") from error
    return metadata
