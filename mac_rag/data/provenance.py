"""The bank's record of a document apart from its text: id, content hash, metadata and time of addition."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from mac_rag.data.characters import check_characters, fault_of, is_blank, shown, shown_id
from mac_rag.data.dates import ALWAYS, date_in, moment_of, superseded_in
from mac_rag.data.types import Document
from mac_rag.errors import BankError, DataError, DocumentError
from mac_rag.untrusted_files import METADATA_DEPTH, NUMBER, parse_json


@dataclass(frozen=True, slots=True)
class Member:
    """A document in an entry of the bank.

    Attributes:
        content_hash: hash of its text and metadata, by which an unchanged document is recognized.
        metadata: its metadata, after a round trip through JSON.
        added: time at which it was put into the bank, in ISO 8601 and UTC.
    """

    document_id: str
    content_hash: str
    metadata: Mapping[str, Any]
    added: str

    @classmethod
    def of(cls, document: Document) -> Member:
        """Makes the member for a document that is added now. Everything that a bank or retriever refuses fails here.

        Raises:
            DocumentError: for a text that is not a text, or has half of a surrogate pair or NUL; names the document.
            BankError: for an id that is blank or not a text; for metadata that JSON does not keep exactly, with the
                place in the metadata; for a `date` that is not a date or can be read in two ways; for a `supersedes`
                that names no ids. Names the document.
        """
        check_document(document)
        try:
            date_in(document.metadata)
            superseded_in(document.metadata)
        except DataError as error:
            raise BankError(f"metadata of document {shown_id(document.id)}: {error}") from None
        added = datetime.now(UTC).isoformat(timespec="seconds")
        return cls(document.id, content_hash(document), _as_json(document), added)

    @property
    def moment(self) -> int:
        """The moment from which the document counts, in microseconds since 1970.

        It is the date of its metadata, or else the time at which it was added. A bank from elsewhere may hold values
        there that are not dates; they are ignored.
        """
        with suppress(DataError):
            date = date_in(self.metadata)
            return moment_of(self.added if date is None else date)
        with suppress(DataError):
            return moment_of(self.added)
        return ALWAYS

    @property
    def supersedes(self) -> tuple[str, ...]:
        """Ids of the documents that stop counting when this one counts; none if the metadata hold no ids there."""
        with suppress(DataError):
            return superseded_in(self.metadata)
        return ()

    def matches(self, text: str) -> bool:
        """True if the content hash is that of this text."""
        return content_hash(Document(self.document_id, text, self.metadata)) == self.content_hash


def check_document(document: Document) -> None:
    """Checks id, text and metadata of a document. Its text may be blank.

    Raises:
        DocumentError, BankError: as `Member.of`.
    """
    if not isinstance(document.id, str):
        raise BankError(f"a document's id is {document.id!r:.80}; give a text")
    fault = fault_of(document.id)
    if fault is None and is_blank(document.id):
        fault = "it has no visible character; give the document a name"
    if fault is not None:
        raise BankError(f"id {shown_id(document.id)} of a document: {fault}")
    try:
        if not isinstance(document.text, str):
            raise DocumentError(f"expected a text, got {type(document.text).__name__}: {document.text!r:.80}")
        check_characters(document.text)
    except DocumentError as error:
        raise DocumentError(f"document {shown_id(document.id)}: {error}") from None
    _as_json(document)


def content_hash(document: Document) -> str:
    """Hex sha256 of a document's text and metadata.

    The hash covers metadata because filters read them: a document that now belongs to another tenant has changed.

    Raises:
        BankError: for metadata that cannot be stored as JSON.
    """
    return hashlib.sha256(json.dumps([document.text, _as_json(document)], sort_keys=True).encode()).hexdigest()


def _as_json(document: Document) -> dict[str, Any]:
    try:
        text = json.dumps(dict(document.metadata), allow_nan=False)
        _check_values(document.metadata, "metadata")
        metadata: dict[str, Any] = parse_json(text, depth=METADATA_DEPTH)
    except (TypeError, ValueError, RecursionError) as error:
        raise BankError(f"metadata of document {shown_id(document.id)} cannot be kept as JSON: {error}") from error
    return metadata


def _check_values(value: Any, place: str) -> None:
    """Refuses values that JSON would store as another value, or as one that cannot be read again."""
    if isinstance(value, str):
        fault = fault_of(value)
        if fault is not None:
            raise ValueError(f"in {place}, {fault}")
    elif isinstance(value, int) and abs(value) >= 10**NUMBER:
        raise ValueError(f"{place} is a number of more than {NUMBER} digits; store it as a text")
    elif isinstance(value, Mapping):
        for key, item in value.items():
            if not isinstance(key, str):
                raise TypeError(f"the keys of {place} must be texts, got {key!r:.80}")
            _check_values(key, f"the key {shown(key)} of {place}")
            _check_values(item, f"{place}[{shown(key)}]")
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            _check_values(item, f"{place}[{index}]")
