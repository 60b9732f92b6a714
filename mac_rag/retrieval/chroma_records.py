"""What Chroma stores of a document beside text and vector: its content hash, and its metadata as JSON."""

from __future__ import annotations

import json
from typing import Any

from mac_rag.data.characters import shown_id
from mac_rag.data.provenance import Member
from mac_rag.data.types import Document
from mac_rag.errors import BankError
from mac_rag.untrusted_files import METADATA_DEPTH, MalformedError, parse_json

_HASH, _METADATA = "content_hash", "metadata"


def record_of(document: Document) -> dict[str, str]:
    """The record of a document."""
    member = Member.of(document)
    return {_HASH: member.content_hash, _METADATA: json.dumps(member.metadata)}


def hash_in(record: Any, document_id: str, place: str) -> str:
    """The content hash in a record, which another program may have written.

    Args:
        record: what Chroma returns.
        document_id: the document, for the message.
        place: the folder or address, for the message.

    Raises:
        BankError: when it has none.
    """
    return _text(record, _HASH, document_id, place)


def metadata_in(record: Any, document_id: str, place: str) -> dict[str, Any]:
    """The metadata in a record; see `hash_in`.

    Raises:
        BankError: when it has none, or they are no JSON object within the bounds of metadata.
    """
    text = _text(record, _METADATA, document_id, place)
    try:
        metadata = parse_json(text, depth=METADATA_DEPTH)
        if not isinstance(metadata, dict):
            raise MalformedError("no JSON object")
    except MalformedError as error:
        raise _foreign(f"its metadata is {error}", document_id, place) from None
    return metadata


def _text(record: Any, key: str, document_id: str, place: str) -> str:
    value = record.get(key) if isinstance(record, dict) else None
    if not isinstance(value, str):
        raise _foreign(f"it has no {key}", document_id, place)
    return value


def _foreign(fault: str, document_id: str, place: str) -> BankError:
    return BankError(
        f"document {shown_id(document_id)} in {place} was not written by mac_rag: {fault}; delete it there, and add it "
        "again"
    )
