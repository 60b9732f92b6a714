"""What a bank knows of an entry apart from its memory tokens."""

from __future__ import annotations

from dataclasses import dataclass

from mac_rag.data.provenance import Member


@dataclass(frozen=True, slots=True)
class Record:
    """An entry of the bank without its memory tokens.

    Attributes:
        sequence: the entry's number in the order of arrival; never used for another entry.
        rows: number of rows of memory tokens.
        members: the documents that the entry stands for: one, or several that were merged.
    """

    sequence: int
    rows: int
    members: tuple[Member, ...]

    @property
    def document_ids(self) -> tuple[str, ...]:
        """Ids of the members."""
        return tuple(member.document_id for member in self.members)
