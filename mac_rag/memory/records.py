"""An entry of a bank without its memory tokens: its place in the order of arrival, its rows, its documents."""

from __future__ import annotations

from dataclasses import dataclass

from mac_rag.data.provenance import Member


@dataclass(frozen=True, slots=True)
class Record:
    """An entry of the bank without its memory tokens.

    Attributes:
        sequence: its place in the order of arrival; never used for another entry.
        rows: rows of memory tokens.
        members: the documents it stands for: one, or several that were merged.
    """

    sequence: int
    rows: int
    members: tuple[Member, ...]

    @property
    def document_ids(self) -> tuple[str, ...]:
        return tuple(member.document_id for member in self.members)
