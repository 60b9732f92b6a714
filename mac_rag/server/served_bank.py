"""One bank of the server: its engine, requests about its documents, and changes that take turns."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from secrets import token_hex
from typing import Any

from mac_rag.bank.bank import MemoryBank
from mac_rag.bank.interface import Bank
from mac_rag.bank.metadata_filters import Filters, fits
from mac_rag.data.dates import ALWAYS, written
from mac_rag.data.provenance import Member
from mac_rag.data.types import AdaptReport, Document
from mac_rag.distributed.sharded_contents import ShardedContents
from mac_rag.engine import MACEngine
from mac_rag.errors import MACError
from mac_rag.server.api_errors import APIError

_REMEMBERED_FILTERS = 32


class ServedBank:
    """A bank, open for writing, with its engine.

    Args:
        name: its name.
        engine: its engine, whose bank is in a folder.
        retriever: the name of its retriever; `none` for none.

    Attributes:
        opening: a random id, new each time the bank is opened.
        changes: number of changes since it was opened.
    """

    def __init__(self, name: str, engine: MACEngine, retriever: str) -> None:
        self.name = name
        self.engine = engine
        self.retriever = retriever
        self.opening = token_hex(8)
        self.changes = 0
        self._changing = threading.Lock()
        self._closed = False
        self._filtered: dict[tuple[int, str], frozenset[str]] = {}

    @property
    def bank(self) -> Bank:
        return self.engine.bank

    @property
    def nbytes(self) -> int | None:
        """Bytes of the bank's rows; None for a bank in shards, whose rows are in other processes."""
        return self.bank.nbytes if isinstance(self.bank, MemoryBank) else None

    def __len__(self) -> int:
        return len(self.engine.snapshot)

    def info(self) -> dict[str, Any]:
        """The bank as clients see it."""
        bank, seen = self.bank, self.engine.snapshot
        return {
            "name": self.name,
            "object": "bank",
            "documents": len(seen),
            "bytes": self.nbytes,
            "rows": (bank.layout.dtype or "fp32") if isinstance(bank, MemoryBank) and len(seen) else None,
            "shards": len(bank.directories) if isinstance(bank, ShardedContents) else None,
            "retriever": self.retriever,
            "keep_texts": bank.keep_texts,
            "model": bank.fingerprint,
        }

    def put(
        self, documents: Sequence[Document], on_bad: Callable[[Document, MACError], object] | None = None
    ) -> AdaptReport:
        """Remembers documents, which are on the disk when the call returns.

        Args:
            documents: the documents.
            on_bad: called with each document that cannot be adapted, and its error; None to raise the error, and then
                none of the documents is remembered.

        Raises:
            APIError: if the bank is being deleted, or the server is closing.
            MACError: as `MACEngine.adapt`.
        """
        with self._change():
            return self.engine.adapt(documents, on_bad=on_bad)

    def forget(self, document_ids: Sequence[str]) -> list[str]:
        """Deletes documents, and returns the ids of all documents that the bank forgot. Unknown ids are ignored."""
        gone: dict[str, None] = {}
        with self._change():
            for name in document_ids:
                if name not in gone and self.holds(name):
                    gone |= dict.fromkeys([name, *self.engine.forget(name)])
        return list(gone)

    def holds(self, document_id: str) -> bool:
        """True if the bank or its retriever holds a document."""
        retriever = self.engine.retriever
        return document_id in self.engine.snapshot or (retriever is not None and document_id in retriever)

    def compact(self) -> None:
        """Makes the bank's file as small as its contents."""
        with self._change():
            self.engine.compact()

    def close(self) -> None:
        """Waits for the running change, and refuses all further ones."""
        with self._changing:
            self._closed = True
            self.bank.close()

    def document(self, document_id: str) -> dict[str, Any]:
        """A document: id, metadata, date, and its text if the bank or the retriever keeps it.

        Raises:
            APIError: 404 if the bank does not hold it.
        """
        seen = self.engine.snapshot
        if document_id not in seen:
            raise no_such_document(document_id)
        entry = seen[document_id]
        place = entry.place(document_id)
        text = entry.texts[place] or self._retrieved_text(document_id)
        shared = [other.document_id for number, other in enumerate(entry.members) if number != place]
        return {**_described(entry.members[place]), "text": text, "merged_with": shared}

    def _retrieved_text(self, document_id: str) -> str | None:
        retriever = self.engine.retriever
        if retriever is None or document_id not in retriever:
            return None
        [document] = retriever.documents([document_id])
        return document.text

    def listing(self, after: str | None, limit: int) -> tuple[list[dict[str, Any]], bool]:
        """Documents without their texts, oldest first, and whether there are more.

        Args:
            after: id of a document after which to begin; None for the first page.
            limit: most documents to return.

        Raises:
            APIError: 404 if the bank does not hold the document `after`.
        """
        members = self._members(after)
        page = [_described(member) for member in islice(members, limit)]
        return page, next(members, None) is not None

    def _members(self, after: str | None) -> Iterator[Member]:
        seen = self.engine.snapshot
        if after is not None and after not in seen:
            raise no_such_document(after)
        found = after is None
        for entry in seen:
            for member in entry.members:
                if found:
                    yield member
                elif member.document_id == after:
                    found = True

    def allowed(self, filters: Filters | None) -> frozenset[str] | None:
        """Ids of the documents whose metadata match; None without filters. The results of recent filters are cached."""
        if not filters:
            return None
        seen = self.engine.snapshot
        key = (seen.version, repr(sorted(filters.items())))
        ids = self._filtered.get(key)
        if ids is None:
            ids = frozenset(
                member.document_id for entry in seen for member in entry.members if fits(member.metadata, filters)
            )
            if len(self._filtered) >= _REMEMBERED_FILTERS:
                self._filtered.clear()
            self._filtered[key] = ids
        return ids

    def _change(self) -> _Change:
        return _Change(self)


class _Change:
    """A turn to change a bank, which is refused once the bank is closed."""

    def __init__(self, bank: ServedBank) -> None:
        self._bank = bank

    def __enter__(self) -> None:
        self._bank._changing.acquire()
        if self._bank._closed:
            self._bank._changing.release()
            raise APIError(
                503, "the bank is being closed, so nothing was changed; try again", code="closing", retry_after=5
            )

    def __exit__(self, *error: object) -> None:
        self._bank.changes += 1
        self._bank._changing.release()


def no_such_document(document_id: str) -> APIError:
    return APIError(404, f"there is no document {document_id!r:.200} in this bank", code="document_not_found")


def _described(member: Member) -> dict[str, Any]:
    return {
        "id": member.document_id,
        "metadata": dict(member.metadata),
        "added": member.added,
        "date": written(member.moment) if member.moment != ALWAYS else None,
    }
