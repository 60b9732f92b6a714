"""Keeps a memory bank and a retriever in agreement, through crashes too.

The retriever holds the texts and is the truth; the bank follows. So whatever changes both changes the retriever first
and then the bank. A crash between the two leaves a bank that is behind, and the retriever has all it takes to catch up.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass

from mac_rag.data.provenance import content_hash
from mac_rag.data.types import Document
from mac_rag.errors import BankError, ConfigError
from mac_rag.memory.bank import MemoryBank
from mac_rag.memory.storage.manifest import Intent
from mac_rag.retrieval.base import Retriever

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


def unfiled(retriever: Retriever | None, documents: Sequence[Document], fresh: Container[str]) -> set[str]:
    """The ids of those documents that a retriever lacks, or holds with another text or other metadata.

    Args:
        retriever: where it does not tell which texts it holds, every document that is `fresh` counts as changed.
        documents: of which it is asked.
        fresh: ids of those that are new or changed to the bank.
    """
    if retriever is None:
        return set()
    try:
        filed = retriever.content_hashes([document.id for document in documents])
    except ConfigError:
        return {document.id for document in documents if document.id in fresh or document.id not in retriever}
    return {document.id for document in documents if filed.get(document.id) != content_hash(document)}


def reconcile(
    bank: MemoryBank,
    retriever: Retriever,
    remember: Callable[[list[Document]], object],
    *,
    group: int,
    allow_emptying: bool = False,
) -> Reconciliation:
    """Makes the bank agree with the retriever: adapts what it lacks from the stored texts, deletes what is too much.

    Interrupted, it has done a part, and the same call does the rest.

    Args:
        bank: open for writing.
        retriever: tells what it holds.
        remember: writes documents to the bank and commits.
        group: documents that are remembered at a time.
        allow_emptying: lets all documents of the bank go.

    Raises:
        BankError: for a retriever that holds none of the bank's documents, unless that is allowed.
        ConfigError: for a retriever that does not tell what it holds.
    """
    found = difference(bank, retriever)
    if len(found.surplus) == len(bank) > 0 and not allow_emptying:
        raise BankError(
            f"the retriever holds none of the bank's {len(bank)} documents, so that all of them would go; name the "
            "retriever that the bank was adapted with, adapt the documents again, or allow the bank to be emptied"
        )
    for document_id in (*found.surplus, *found.outdated):
        if document_id in bank:  # it may have gone with one that it was merged with
            bank.delete(document_id)
    bank.commit()
    lacking = difference(bank, retriever).missing
    for names in _groups(lacking, group):
        remember(retriever.documents(names))
    outdated = set(found.outdated)
    return Reconciliation(tuple(name for name in lacking if name not in outdated), found.outdated, found.surplus)


def finish(bank: MemoryBank, retriever: Retriever, remember: Callable[[list[Document]], object]) -> int:
    """Does the rest of a change that a crash interrupted between the retriever and the bank, as the bank's intent says.

    Args:
        bank: open for writing.
        retriever: where it does not tell what it holds, nothing is done.
        remember: writes documents to the bank.

    Returns:
        How many documents were adapted or forgotten.
    """
    intent = bank.intent
    try:
        filed = retriever.content_hashes([*intent.puts, *intent.deletes])
    except ConfigError:
        return 0
    changed = [name for name in intent.puts if name in filed and not is_held(bank, name, filed[name])]
    gone = [name for name in intent.deletes if name not in filed and name in bank]
    for name in gone:
        if name in bank:  # it may have gone with one that it was merged with
            bank.delete(name)
    remember(retriever.documents(changed))
    bank.commit(Intent())
    return len(changed) + len(gone)


def is_held(bank: MemoryBank, document_id: str, content: str) -> bool:
    """Whether the bank holds a document with this content hash."""
    if document_id not in bank:
        return False
    members = bank[document_id].members
    return any(member.document_id == document_id and member.content_hash == content for member in members)


def _groups(names: Sequence[str], size: int) -> Iterator[Sequence[str]]:
    return (names[first : first + size] for first in range(0, len(names), size))
