"""A memory bank and a retriever that are changed together and agree, through crashes too. Knows no model.

The retriever holds the texts and is the truth; the bank follows. So whatever changes both changes the retriever first
and then the bank: the bank commits an intent that names the documents, the retriever changes, the bank changes, and its
next commit ends the intent. A crash in between leaves a bank that is behind, the intent tells where to look, and the
retriever has all it takes to catch up.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from typing import TypeVar

from mac_rag.data.provenance import content_hash
from mac_rag.data.types import Document
from mac_rag.errors import BankError, ConfigError
from mac_rag.memory.bank import MemoryBank
from mac_rag.memory.storage.manifest import Intent
from mac_rag.retrieval.base import Retriever

T = TypeVar("T")

_COMPARED = 10_000  # documents whose hashes are read in passing; of more than that, only the numbers are compared


@dataclass(frozen=True)
class Difference:
    """Where a bank is not what its retriever says, by document ids.

    Attributes:
        missing: in the retriever alone.
        outdated: in both, with another text or other metadata.
        surplus: in the bank alone.
    """

    missing: tuple[str, ...]
    outdated: tuple[str, ...]
    surplus: tuple[str, ...]

    def __bool__(self) -> bool:
        return bool(self.missing or self.outdated or self.surplus)


@dataclass(frozen=True)
class Reconciliation:
    """What was done to a bank so that it agrees with its retriever, by document ids.

    Attributes:
        added: adapted, for the bank had forgotten them or never known.
        updated: adapted again, for the bank knew another text or other metadata.
        deleted: forgotten, for the retriever does not hold them.
    """

    added: tuple[str, ...]
    updated: tuple[str, ...]
    deleted: tuple[str, ...]


@dataclass(frozen=True)
class Deletion:
    """What a deletion removed, by document ids.

    Attributes:
        forgotten: from the bank: the documents asked for, and those that they were merged with.
        unfiled: from the retriever.
    """

    forgotten: tuple[str, ...]
    unfiled: tuple[str, ...]


def difference(bank: MemoryBank, retriever: Retriever) -> Difference:
    """Compares the documents of both by id and content hash.

    Raises:
        ConfigError: for a retriever that does not tell what it holds.
    """
    filed = retriever.content_hashes()
    known = {member.document_id: member.content_hash for entry in bank for member in entry.members}
    return Difference(
        missing=tuple(name for name in filed if name not in known),
        outdated=tuple(name for name, value in filed.items() if known.get(name, value) != value),
        surplus=tuple(name for name in known if name not in filed),
    )


def disagreement(bank: MemoryBank, retriever: Retriever) -> str | None:
    """Where a bank is not what its retriever says, in a few words; cheap enough to be asked whenever both are opened.

    None where they agree, as far as they are compared, or where the retriever does not tell what it holds.
    """
    try:
        held = len(retriever)
        if max(held, len(bank)) > _COMPARED:
            return None if held == len(bank) else f"{len(bank)} documents against {held}"
        found = difference(bank, retriever)
    except ConfigError:
        return None
    parts = {"missing from the bank": found.missing, "outdated in it": found.outdated, "only in it": found.surplus}
    return ", ".join(f"{len(names)} {what}" for what, names in parts.items() if names) or None


Remember = Callable[[list[Document]], object]  # writes documents to the bank, without committing


class SyncedBank:
    """A memory bank and the retriever that it follows.

    Examples:
        >>> import torch
        >>> from mac_rag.retrieval import BM25Retriever
        >>> synced = SyncedBank(MemoryBank("fingerprint of the model"), BM25Retriever())
        >>> documents = [Document("bridge", "The bridge opened."), Document("museum", "The museum closed.")]
        >>> forgotten = synced.put(documents, lambda: synced.bank.put(documents, torch.zeros(2, 4, 8)))
        >>> synced.delete(["bridge"])
        Deletion(forgotten=('bridge',), unfiled=('bridge',))
        >>> "bridge" in synced.bank, "bridge" in synced.retriever
        (False, False)

    Args:
        bank: open for writing, or in memory.
        retriever: None for a bank alone.
    """

    def __init__(self, bank: MemoryBank, retriever: Retriever | None) -> None:
        self.bank = bank
        self.retriever = retriever

    def unfiled(self, documents: Sequence[Document], fresh: Container[str]) -> set[str]:
        """The ids of those documents that the retriever lacks, or holds with another text or other metadata.

        Args:
            documents: the documents to look up.
            fresh: ids of those that are new or changed to the bank. Where the retriever does not tell which texts it
                holds, all of them count as changed.
        """
        if self.retriever is None:
            return set()
        try:
            filed = self.retriever.content_hashes([document.id for document in documents])
        except ConfigError:
            retriever = self.retriever
            return {document.id for document in documents if document.id in fresh or document.id not in retriever}
        return {document.id for document in documents if filed.get(document.id) != content_hash(document)}

    def put(self, filing: Sequence[Document], write_to_bank: Callable[[], T]) -> T:
        """Writes documents to the retriever, then to the bank, and commits.

        Args:
            filing: the documents that the retriever lacks.
            write_to_bank: writes to the bank what it lacks.

        Returns:
            What `write_to_bank` returns.
        """
        if self.retriever is not None and filing:
            self.bank.commit(Intent(puts=tuple(document.id for document in filing)))
            self.retriever.put(filing)
        written = write_to_bank()
        self.bank.commit(None if self.retriever is None else Intent())
        return written

    def delete(self, document_ids: Sequence[str], *, persist: Callable[[], object] = lambda: None) -> Deletion:
        """Removes documents from the retriever and the bank, each from those that hold it, and commits.

        An intent that stands already stays: finishing it takes a model.

        Args:
            document_ids: which documents.
            persist: writes the retriever to where it lasts; called after its change and before the bank's.

        Raises:
            BankError: for an id that neither holds, before anything is changed.
        """
        ids = list(dict.fromkeys(document_ids))
        filed = [] if self.retriever is None else [name for name in ids if name in self.retriever]
        for name in ids:
            if name not in self.bank and name not in filed:
                place = self.bank.folder or "the bank"
                raise BankError(
                    f"no document {name!r} in {place}" + ("" if self.retriever is None else " or its retriever")
                )
        pending = self.bank.intent
        if self.retriever is not None and filed:
            self.bank.commit(Intent(puts=pending.puts, deletes=(*pending.deletes, *ids)))
            for name in filed:
                self.retriever.delete(name)
            persist()
        gone = self._forget(ids)
        self.bank.commit(pending)
        return Deletion(gone, tuple(filed))

    def finish(self, remember: Remember) -> int:
        """Does the rest of a change that was interrupted between retriever and bank, as the bank's intent says.

        Where the retriever does not tell what it holds, nothing is done.

        Returns:
            How many documents were adapted or forgotten.
        """
        intent = self.bank.intent
        if self.retriever is None or not intent:
            return 0
        try:
            filed = self.retriever.content_hashes([*intent.puts, *intent.deletes])
        except ConfigError:
            return 0
        changed = [name for name in intent.puts if name in filed and not is_held(self.bank, name, filed[name])]
        gone = [name for name in intent.deletes if name not in filed and name in self.bank]
        self._forget(gone)
        remember(self.retriever.documents(changed))
        self.bank.commit(Intent())
        return len(changed) + len(gone)

    def reconcile(self, remember: Remember, *, group: int, allow_emptying: bool = False) -> Reconciliation:
        """Makes the bank agree with the retriever: adapts what it lacks from the stored texts, deletes the surplus.

        Interrupted, it has done a part, and the same call does the rest.

        Args:
            remember: writes documents to the bank.
            group: documents that are remembered and committed at a time.
            allow_emptying: lets all documents of the bank go.

        Raises:
            BankError: for a retriever that holds none of the bank's documents, unless that is allowed.
            ConfigError: without a retriever, or for one that does not tell what it holds.
        """
        bank, retriever = self.bank, self.retriever
        if retriever is None:
            raise ConfigError("there is no retriever to reconcile the bank with; give the engine one")
        found = difference(bank, retriever)
        if len(found.surplus) == len(bank) > 0 and not allow_emptying:
            raise BankError(
                f"the retriever holds none of the bank's {len(bank)} documents, so that all of them would go; name the "
                "retriever that the bank was adapted with, adapt the documents again, or allow the bank to be emptied"
            )
        self._forget([*found.surplus, *found.outdated])
        bank.commit()
        lacking = difference(bank, retriever).missing
        for first in range(0, len(lacking), group):
            remember(retriever.documents(lacking[first : first + group]))
            bank.commit()
        outdated = set(found.outdated)
        return Reconciliation(tuple(name for name in lacking if name not in outdated), found.outdated, found.surplus)

    def _forget(self, document_ids: Sequence[str]) -> tuple[str, ...]:
        """Deletes from the bank what it holds of these; some may have gone with one that they were merged with."""
        gone: dict[str, None] = {}
        for name in document_ids:
            if name in self.bank:
                gone |= dict.fromkeys(self.bank.delete(name))
        return tuple(gone)


def is_held(bank: MemoryBank, document_id: str, content: str) -> bool:
    """True if the bank holds a document with this content hash."""
    if document_id not in bank:
        return False
    members = bank[document_id].members
    return any(member.document_id == document_id and member.content_hash == content for member in members)
