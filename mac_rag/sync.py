"""Keeps a memory bank and a retriever in agreement, also through errors and crashes. Knows no model.

The retriever holds the texts and is the source of truth; the bank follows it. A change of both takes four steps:

1. the bank commits an intent that names the documents;
2. the bank writes its change, without committing it, so that most failures come before the retriever changes;
3. the retriever changes;
4. the bank commits, which ends the intent.

An error in any step undoes the whole change. After a crash, or an error after which the retriever cannot be restored,
the bank is out of date: the intent names the documents to look at, and the retriever holds their texts.

A retriever that is in the bank's own file changes with one commit of the bank, and needs no intent.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TypeVar

from mac_rag.bank.interface import Bank, BankContents, Intent
from mac_rag.data.provenance import content_hash
from mac_rag.data.types import Document
from mac_rag.errors import BankError, ConfigError
from mac_rag.retrieval.base import Retriever

T = TypeVar("T")

_COMPARED = 10_000  # up to so many documents, every opening compares hashes; with more, it compares only the counts


@dataclass(frozen=True)
class Difference:
    """How a bank differs from its retriever, by document id.

    Attributes:
        missing: documents that only the retriever holds.
        outdated: documents that both hold, with different text or metadata.
        surplus: documents that only the bank holds.
    """

    missing: tuple[str, ...]
    outdated: tuple[str, ...]
    surplus: tuple[str, ...]

    def __bool__(self) -> bool:
        return bool(self.missing or self.outdated or self.surplus)


@dataclass(frozen=True)
class Reconciliation:
    """How a bank was changed to agree with its retriever, by document id.

    Attributes:
        added: documents that only the retriever held; they were adapted.
        updated: documents whose text or metadata differed; they were adapted again.
        deleted: documents that only the bank held; they were deleted.
    """

    added: tuple[str, ...]
    updated: tuple[str, ...]
    deleted: tuple[str, ...]


@dataclass(frozen=True)
class Deletion:
    """What a deletion removed, by document id.

    Attributes:
        from_bank: documents deleted from the bank: the requested ones, and those that were merged with them.
        from_retriever: documents deleted from the retriever.
    """

    from_bank: tuple[str, ...]
    from_retriever: tuple[str, ...]


def difference(bank: Bank, retriever: Retriever) -> Difference:
    """Compares the documents of both by id and content hash.

    Raises:
        ConfigError: for a retriever that does not tell what it holds.
    """
    retriever_hashes = retriever.content_hashes()
    bank_hashes = {member.document_id: member.content_hash for entry in bank for member in entry.members}
    return Difference(
        missing=tuple(name for name in retriever_hashes if name not in bank_hashes),
        outdated=tuple(name for name, value in retriever_hashes.items() if bank_hashes.get(name, value) != value),
        surplus=tuple(name for name in bank_hashes if name not in retriever_hashes),
    )


def disagreement(bank: Bank, retriever: Retriever) -> str | None:
    """How a bank differs from its retriever, in a few words; None if no difference is found.

    Cheap enough to run whenever both are opened: of large banks, only the number of documents is compared. Also returns
    None for a retriever that does not tell what it holds.
    """
    try:
        count = len(retriever)
        if max(count, len(bank)) > _COMPARED:
            return None if count == len(bank) else f"{len(bank)} documents against {count}"
        differ = difference(bank, retriever)
    except ConfigError:
        return None
    parts = {"missing from the bank": differ.missing, "outdated in it": differ.outdated, "only in it": differ.surplus}
    return ", ".join(f"{len(names)} {what}" for what, names in parts.items() if names) or None


Remember = Callable[[list[Document]], object]  # writes documents to the bank, without committing


class SyncedBank:
    """A memory bank and the retriever that it follows.

    Examples:
        >>> import torch
        >>> from mac_rag import MemoryBank
        >>> from mac_rag.retrieval import BM25Retriever
        >>> synced = SyncedBank(MemoryBank("fingerprint of the model"), BM25Retriever())
        >>> documents = [Document("bridge", "The bridge opened."), Document("museum", "The museum closed.")]
        >>> forgotten = synced.put(documents, lambda: synced.bank.put(documents, torch.zeros(2, 4, 8)))
        >>> synced.delete(["bridge"])
        Deletion(from_bank=('bridge',), from_retriever=('bridge',))
        >>> "bridge" in synced.bank, "bridge" in synced.retriever
        (False, False)

    Args:
        bank: a bank that is open for writing, or in memory.
        retriever: the retriever; None for a bank alone.
        index: an index in the bank's file other than the retriever; None if there is none, or nobody knows.
    """

    def __init__(self, bank: Bank, retriever: Retriever | None, index: Retriever | None = None) -> None:
        self.bank = bank
        self.retriever = retriever
        self._index = index

    def missing_from_retriever(self, documents: Sequence[Document], changed: Container[str]) -> set[str]:
        """Ids of the documents that the retriever lacks, or holds with another text or other metadata.

        Args:
            documents: the documents to look up.
            changed: ids of the documents that are new to the bank or differ from its versions. If the retriever does
                not tell which texts it holds, all of these count as missing.
        """
        if self.retriever is None:
            return set()
        hashes = {document.id: content_hash(document) for document in documents}
        try:
            filed = self.retriever.content_hashes(list(hashes))
        except ConfigError:
            known = set(self.retriever.held(hashes))
            return {name for name in hashes if name in changed or name not in known}
        return {name for name, value in hashes.items() if filed.get(name) != value}

    def put(self, documents: Sequence[Document], write_to_bank: Callable[[], T]) -> T:
        """Writes documents to the retriever and to the bank, and commits. On an error, neither changes.

        Args:
            documents: the documents that the retriever lacks.
            write_to_bank: writes the documents that the bank lacks to the bank.

        Returns:
            What `write_to_bank` returns.
        """
        if self.retriever is None or not documents or self.retriever.is_in(self.bank):
            with self._all_or_nothing((), (), commits=1):
                result = write_to_bank()
                if self.retriever is not None and documents:
                    self.retriever.put(documents)
                self.bank.commit(None if self.retriever is None else Intent())
            return result
        ids = [document.id for document in documents]
        retriever, before = self.retriever, self._held(ids)
        with self._all_or_nothing(ids, before, commits=2):
            self.bank.commit(Intent(puts=tuple(ids)))
            result = write_to_bank()
            retriever.put(documents)
            self.bank.commit(Intent())
        return result

    def delete(self, document_ids: Sequence[str], *, persist: Callable[[], object] = lambda: None) -> Deletion:
        """Deletes documents from the retriever and the bank, whichever holds them, and commits.

        On an error, neither changes. The intent of an earlier, interrupted change stays, because only an engine with a
        model can finish that change.

        Args:
            document_ids: ids of the documents to delete.
            persist: saves a retriever outside of the bank's file; called after it has changed and before the bank does.

        Raises:
            BankError: for an id that neither holds, before anything changes.
        """
        ids = list(dict.fromkeys(document_ids))
        in_retriever = [] if self.retriever is None else self.retriever.held(ids)
        for name in ids:
            if name not in self.bank and name not in in_retriever:
                place = self.bank.path or "the bank"
                raise BankError(
                    f"no document {name!r} in {place}" + ("" if self.retriever is None else " or its retriever")
                )
        pending = self.bank.intent
        if self.retriever is not None and self.retriever.is_in(self.bank):
            with self._all_or_nothing((), (), commits=1):
                for name in in_retriever:
                    self.retriever.delete(name)
                from_bank = self._forget(ids)
                self.bank.commit()
            return Deletion(from_bank, tuple(in_retriever))
        with self._all_or_nothing(in_retriever, self._held(in_retriever), persist, commits=2 if in_retriever else 1):
            if in_retriever:
                self.bank.commit(Intent(puts=pending.puts, deletes=(*pending.deletes, *ids)))
            from_bank = self._forget(ids)
            if self.retriever is not None and in_retriever:
                for name in in_retriever:
                    self.retriever.delete(name)
                persist()
            self.bank.commit(pending)
        return Deletion(from_bank, tuple(in_retriever))

    def _held(self, document_ids: Sequence[str]) -> list[Document]:
        """The retriever's versions of these documents; none if it does not tell what it holds."""
        try:
            return [] if self.retriever is None else held_documents(self.retriever, document_ids)
        except ConfigError:
            return []

    @contextmanager
    def _all_or_nothing(
        self,
        document_ids: Collection[str],
        before: Sequence[Document],
        persist: Callable[[], object] = lambda: None,
        *,
        commits: int,
    ) -> Iterator[None]:
        """If the block raises an error, undoes what the block has changed in the bank and in the retriever.

        Args:
            document_ids: ids of the documents that change in the retriever.
            before: the retriever's present versions of those that it holds.
            persist: saves the retriever.
            commits: number of commits of the block, the last of which completes it.
        """
        self.bank.commit()  # earlier changes are not undone
        pending, complete = self.bank.intent, self.bank.commits + commits
        try:
            yield
        except BaseException:
            if self.bank.commits >= complete:  # an interrupt that came when all was done
                raise
            self.bank.rollback()
            # If the retriever cannot be restored, the intent stays, and the next change of both finishes this one.
            with suppress(Exception):
                if self._restore(document_ids, before):
                    persist()
                if self.bank.intent != pending:
                    self.bank.commit(pending)
            raise

    def _restore(self, document_ids: Collection[str], before: Sequence[Document]) -> bool:
        """Restores the retriever's former versions of documents; True if it had changed."""
        retriever = self.retriever
        if retriever is None:
            return False
        held = {document.id: document for document in self._held(list(document_ids))}
        former = {document.id: document for document in before}
        for name in held.keys() - former.keys():
            retriever.delete(name)
        changed = [document for name, document in former.items() if held.get(name) != document]
        if changed:
            retriever.put(changed)
        return bool(changed) or not held.keys() <= former.keys()

    def finish(self, remember: Remember) -> int:
        """Finishes the change named by the bank's intent, which was interrupted between retriever and bank.

        Does nothing if the retriever does not tell what it holds.

        Returns:
            The number of documents that were adapted or deleted.
        """
        intent = self.bank.intent
        if self.retriever is None or not intent:
            return 0
        try:
            hashes = self.retriever.content_hashes([*intent.puts, *intent.deletes])
        except ConfigError:
            return 0
        changed = [name for name in intent.puts if name in hashes and not is_held(self.bank, name, hashes[name])]
        deleted = [name for name in intent.deletes if name not in hashes and name in self.bank]
        with self._all_or_nothing((), (), commits=1):
            self._forget(deleted)
            remember(self.retriever.documents(changed))
            self.bank.commit(Intent())
        return len(changed) + len(deleted)

    def reconcile(self, remember: Remember, *, group: int, allow_emptying: bool = False) -> Reconciliation:
        """Makes the bank agree with the retriever: adapts to missing documents, and deletes those of the bank alone.

        After an interruption, the same call does the rest.

        Args:
            remember: writes documents to the bank, without committing.
            group: number of documents in one commit.
            allow_emptying: allows the deletion of all documents of the bank.

        Raises:
            BankError: if the retriever holds none of the bank's documents, unless `allow_emptying` is True.
            ConfigError: without a retriever, or for one that does not tell what it holds.
        """
        bank, retriever = self.bank, self.retriever
        if retriever is None:
            raise ConfigError("there is no retriever to reconcile the bank with; give the engine one")
        before = difference(bank, retriever)
        if len(before.surplus) == len(bank) > 0 and not allow_emptying:
            raise BankError(
                f"the retriever holds none of the bank's {len(bank)} documents, so all of them would be deleted; name "
                "the retriever that the bank was adapted with, adapt the documents again, or allow the bank to be "
                "emptied"
            )
        with self._all_or_nothing((), (), commits=1):
            self._forget(before.surplus)
            bank.commit()
        self._remember(before.outdated, remember, group)  # may cost others that they were merged with
        missing = difference(bank, retriever).missing
        self._remember(missing, remember, group)
        outdated = set(before.outdated)
        return Reconciliation(tuple(name for name in missing if name not in outdated), before.outdated, before.surplus)

    def _remember(self, document_ids: Sequence[str], remember: Remember, group: int) -> None:
        """Writes documents of the retriever to the bank, in commits of so many."""
        assert self.retriever is not None
        for first in range(0, len(document_ids), group):
            with self._all_or_nothing((), (), commits=1):
                remember(self.retriever.documents(document_ids[first : first + group]))
                self.bank.commit()

    def _forget(self, document_ids: Sequence[str]) -> tuple[str, ...]:
        """Deletes the documents that the bank holds; returns their ids, and those of documents merged with them."""
        deleted: dict[str, None] = {}
        for name in document_ids:
            if name in self.bank:  # it may have gone with an earlier document that it was merged with
                if self._index is not None and name in self._index:
                    self._index.delete(name)  # the bank would have to read the words of all documents
                deleted |= dict.fromkeys(self.bank.delete(name))
        return tuple(deleted)


def held_documents(retriever: Retriever, document_ids: Sequence[str]) -> list[Document]:
    """The documents with these ids that a retriever holds.

    Raises:
        ConfigError: for a retriever that does not tell what it holds.
    """
    held = retriever.held(document_ids)
    return retriever.documents(held) if held else []


def is_held(bank: BankContents, document_id: str, content: str) -> bool:
    """True if the bank holds a document with this id and content hash."""
    if document_id not in bank:
        return False
    members = bank[document_id].members
    return any(member.document_id == document_id and member.content_hash == content for member in members)
