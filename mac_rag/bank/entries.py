"""The entries of a bank: a document, what is known of it, and its memory tokens; and new ones, checked first."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeAlias

from torch import Tensor

from mac_rag.bank.database import PART_BITS
from mac_rag.data.characters import shown_id
from mac_rag.data.provenance import Member
from mac_rag.data.types import Document
from mac_rag.errors import BankError

Texts: TypeAlias = tuple[str | None, ...]  # the text of each document of an entry; None where none is kept


@dataclass(frozen=True)
class Entry:
    """An entry of a bank, wherever its memory tokens lie: one document, or several that were merged.

    Attributes:
        members: the documents of the entry, in the order of arrival.
        sequence: the entry's number in the order of arrival; never used for another entry.
        rows: number of its rows.
    """

    members: tuple[Member, ...]
    sequence: int
    rows: int

    @property
    def phi(self) -> Tensor:
        """Memory tokens `[rows, T, D]` of the entry, read at each access."""
        raise NotImplementedError

    @property
    def texts(self) -> Texts:
        """The kept text of each member, read at each access; None where the bank keeps none."""
        raise NotImplementedError

    @property
    def document_id(self) -> str:
        """Id of the first document."""
        return self.members[0].document_id

    @property
    def document_ids(self) -> tuple[str, ...]:
        """Ids of all its documents."""
        return tuple(member.document_id for member in self.members)

    @property
    def metadata(self) -> Mapping[str, Any]:
        """Metadata of the first document."""
        return self.members[0].metadata

    @property
    def content_hash(self) -> str:
        """Content hash of the first document."""
        return self.members[0].content_hash

    def place(self, document_id: str) -> int:
        """The place of a document among `members`, and of its text among `texts`.

        Raises:
            BankError: for a document that is not of this entry.
        """
        for place, member in enumerate(self.members):
            if member.document_id == document_id:
                return place
        raise BankError(f"{shown_id(document_id)} is none of the documents of this entry")


class NewEntry(NamedTuple):
    """An entry without its memory tokens and without a sequence number.

    Attributes:
        rows: number of its rows.
        members: the documents that it stands for.
        texts: the text of each document, in a bank that keeps texts.
    """

    rows: int
    members: tuple[Member, ...]
    texts: Texts


def new_entries(
    documents: Sequence[Document], rows: Sequence[int] | None, count: int, *, keep_texts: bool
) -> list[NewEntry]:
    """One entry for each document.

    Args:
        documents: documents with distinct ids.
        rows: number of rows of each document; None for one row each.
        count: number of rows that there are.
        keep_texts: True for a bank that keeps texts.

    Raises:
        BankError: for an id that occurs twice, metadata that are not JSON, or rows that do not fit the documents.
        DocumentError: for a text that is none.
    """
    counts = [1] * len(documents) if rows is None else list(rows)
    if len(counts) != len(documents) or sum(counts) != count or min(counts, default=1) < 1:
        raise BankError(
            f"{len(documents)} documents with {sum(counts)} rows, but {count} rows of memory tokens or codes"
        )
    if max(counts, default=1) >> PART_BITS:
        raise BankError(f"a document of {max(counts):,} rows is too long; split it below {1 << PART_BITS:,} rows")
    entries: dict[str, NewEntry] = {}
    for document, own in zip(documents, counts):
        if document.id in entries:
            raise BankError(f"document id {document.id!r} occurs twice; ids must be unique")
        entries[document.id] = NewEntry(own, (Member.of(document),), (document.text if keep_texts else None,))
    return list(entries.values())


def described_members(documents: Sequence[Document], held: Callable[[str], Sequence[Member]]) -> dict[str, Member]:
    """Documents that a bank holds, with the metadata that they get; the time at which they were added stays.

    Args:
        documents: the documents.
        held: the documents of the entry of a document, by its id; raises BankError if there is none.

    Raises:
        BankError: for an id that occurs twice, that the bank does not hold or holds with another text; and as
            `Member.of`.
    """
    members: dict[str, Member] = {}
    for document in documents:
        if document.id in members:
            raise BankError(f"document id {document.id!r} occurs twice; ids must be unique")
        member = next(one for one in held(document.id) if one.document_id == document.id)
        if not member.matches(document.text):
            raise BankError(f"the bank holds document {document.id!r} with another text; put it with memory tokens")
        members[document.id] = replace(Member.of(document), added=member.added)
    return members
