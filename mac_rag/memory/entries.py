"""The entries of a bank: a document, what is known of it, and its memory tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from mac_rag.data.characters import shown_id
from mac_rag.data.provenance import Member
from mac_rag.errors import BankError
from mac_rag.memory.parts import Texts


@dataclass(frozen=True)
class Described:
    """What is known of an entry beside its memory tokens: one document, or several that were merged.

    Attributes:
        members: the documents of the entry, in the order of arrival.
        sequence: the entry's number in the order of arrival; never used for another entry.
        rows: number of its rows.
    """

    members: tuple[Member, ...]
    sequence: int
    rows: int

    @property
    def document_id(self) -> str:
        """Id of the first document."""
        return self.members[0].document_id

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


@dataclass(frozen=True)
class BankEntry(Described):
    """An entry of the bank: one document, or several that were merged.

    Examples:
        >>> import torch
        >>> from mac_rag import Document, MemoryBank
        >>> bank = MemoryBank("fingerprint of the model")
        >>> documents = [Document("may", "The bridge opened.", {"year": 2004}), Document("june", "The bridge closed.")]
        >>> forgotten = bank.put(documents, torch.zeros(2, 4, 8))
        >>> bank["may"].metadata["year"], bank["may"].phi.shape
        (2004, torch.Size([1, 4, 8]))
        >>> bank.merge(["may", "june"], torch.zeros(1, 4, 8))
        >>> [member.document_id for member in bank["june"].members]
        ['may', 'june']
    """

    _phi: Callable[[], Tensor] = field(repr=False, compare=False)
    _texts: Callable[[], Texts] = field(repr=False, compare=False)

    @property
    def phi(self) -> Tensor:
        """Memory tokens `[rows, T, D]` of the entry, read at each access.

        Raises:
            DamageError: when the bank is on disk, and they are not what was written.
        """
        return self._phi()

    @property
    def texts(self) -> Texts:
        """The kept text of each member, read at each access; None where the bank keeps none, or a repair lost it.

        Raises:
            DamageError: when the file of the texts is damaged.
        """
        return self._texts()
