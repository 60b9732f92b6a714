"""Documents of a bank that pass a framework's filters, for `allowed` of an engine."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Container, Iterator, Mapping
from typing import Any, Generic, TypeVar
from uuid import uuid4
from weakref import WeakKeyDictionary

from mac_rag.data.dates import AsOf, moment_of_question
from mac_rag.engine import MACEngine
from mac_rag.memory.interface import Bank, BankContents, Entry
from mac_rag.memory.known_documents import KnownDocuments

_Filters = TypeVar("_Filters")


class PassingDocuments(Container[str], ABC, Generic[_Filters]):
    """The ids of the documents in an engine's bank that pass; it follows changes of the bank.

    A document that the bank does not hold never passes.

    Args:
        engine: the engine of the bank.
        filters: what tells; objects with equal filters are equal.
    """

    def __init__(self, engine: MACEngine, filters: _Filters) -> None:
        self._engine = engine
        self.filters = filters
        self._passing: tuple[BankContents, frozenset[str]] | None = None

    @property
    def key(self) -> object:
        """Equal for filters that let the same documents pass."""
        return self.filters

    @abstractmethod
    def passes(self, document_id: str, metadata: Mapping[str, Any]) -> bool:
        """True if a document passes."""

    def __contains__(self, document_id: object) -> bool:
        return document_id in self._current()

    def __len__(self) -> int:
        return len(self._current())

    # Requests that are filtered alike are answered in one batch, though each has an object of its own.
    def __eq__(self, other: object) -> bool:
        if not isinstance(other, PassingDocuments):
            return NotImplemented
        return type(self) is type(other) and self._engine is other._engine and self.key == other.key

    def __hash__(self) -> int:
        return hash(id(self._engine))

    def _current(self) -> frozenset[str]:
        snapshot = self._engine.snapshot
        passing = self._passing
        if passing is None or passing[0] is not snapshot:
            names = (name for entry in snapshot for name in self._passing_members(entry))
            self._passing = passing = (snapshot, frozenset(names))
        return passing[1]

    def _passing_members(self, entry: Entry) -> Iterator[str]:
        return (member.document_id for member in entry.members if self.passes(member.document_id, member.metadata))


def remembers(engine: MACEngine, allowed: PassingDocuments[Any] | None, as_of: AsOf) -> bool:
    """True if a bank holds a document that may have influence.

    Args:
        engine: the engine of the bank.
        allowed: documents that may; None for all.
        as_of: the moment of the question, as `MACEngine.answer` takes it.

    Raises:
        DataError: for an `as_of` that is no date.
    """
    snapshot, moment = engine.snapshot, moment_of_question(as_of)
    if moment is None and not snapshot.supersedes:
        return bool(len(snapshot) if allowed is None else len(allowed))
    return bool(KnownDocuments(snapshot, moment, allowed).rows_of(snapshot).any())


# Names of banks that are unique beyond this process.
_names: WeakKeyDictionary[Bank, str] = WeakKeyDictionary()


def bank_state(bank: Bank) -> str:
    """Name and version of a bank: equal for equal contents of one object, and unique beyond this process."""
    return f"{_names.setdefault(bank, uuid4().hex)}/{bank.version}"
