"""The banks of a server: each with its engine and its changes, which take turns; by name, in folders."""

from __future__ import annotations

import hashlib
import json
import logging
import re
import shutil
import threading
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from secrets import token_hex
from typing import Any

from mac_rag.atomic_files import (
    make_folder,
    make_writable_folder,
    sealed,
    sync_folder,
    unsealed,
    write_text,
)
from mac_rag.bank.bank import MemoryBank
from mac_rag.bank.bm25 import BankBM25Retriever
from mac_rag.bank.copies import backup
from mac_rag.data.dates import ALWAYS, written
from mac_rag.data.metadata_filters import Filters, condition
from mac_rag.data.provenance import Member
from mac_rag.data.types import AdaptReport, Document
from mac_rag.engine import MACEngine
from mac_rag.errors import BankError, CancelledError, ConfigError, MACError
from mac_rag.model import MACModel
from mac_rag.retrieval.base import Hit, Retriever
from mac_rag.retrieval.registry import make_retriever
from mac_rag.server.api_errors import APIError, closing, no_such_bank
from mac_rag.untrusted_files import MalformedError, read_file

_REMEMBERED_FILTERS = 8
_FILTERED_TOGETHER = 200  # documents that a filter is compared with in one turn of the model, which Python slows down
_LOOK = 0.2  # seconds between two looks whether somebody still waits for a change
_PAGE_CHARACTERS = 1_000_000  # of a page of documents


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
        self._changing = threading.Lock()
        self._closed = False
        self._filtered: dict[tuple[int, bytes], frozenset[str]] = {}

    @property
    def bank(self) -> MemoryBank:
        assert isinstance(self.engine.bank, MemoryBank)
        return self.engine.bank

    def __len__(self) -> int:
        return len(self.engine.snapshot)

    def info(self) -> dict[str, Any]:
        """The bank as clients see it."""
        bank, seen = self.bank, self.engine.snapshot
        return {
            "name": self.name,
            "object": "bank",
            "state": "open",
            "documents": len(seen),
            "bytes": bank.nbytes,
            "rows": bank.layout.name if len(seen) else None,
            "retriever": self.retriever,
            "keep_texts": bank.keep_texts,
            "model": bank.fingerprint,
        }

    def put(
        self,
        documents: Sequence[Document],
        on_bad: Callable[[Document, MACError], object] | None = None,
        cancelled: Callable[[], bool] | None = None,
    ) -> AdaptReport:
        """Remembers documents, which are on the disk when the call returns.

        Args:
            documents: the documents.
            on_bad: called with each document that cannot be adapted, and its error; None to raise the error, and then
                none of the documents is remembered.
            cancelled: as `MACEngine.adapt` takes it.

        Raises:
            APIError: if the bank is being deleted, or the server is closing.
            CancelledError: if `cancelled` returned True.
            MACError: as `MACEngine.adapt`.
        """
        with self._change(cancelled or bool):
            return self.engine.adapt(documents, on_bad=on_bad, cancelled=cancelled)

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

    def close(self, seconds: float = -1) -> bool:
        """Waits so long for the running change, and refuses all further ones. Returns False if the change goes on."""
        self._closed = True
        if not self._changing.acquire(timeout=seconds):
            return False
        try:
            self.bank.close()
        finally:
            self._changing.release()
        return True

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

    def listing(
        self, after: str | None, limit: int, characters: int = _PAGE_CHARACTERS
    ) -> tuple[list[dict[str, Any]], bool]:
        """Documents without their texts, oldest first, and whether there are more.

        Args:
            after: id of a document after which to begin; None for the first page.
            limit: most documents to return.
            characters: most characters of them as JSON.

        Raises:
            APIError: 404 if the bank does not hold the document `after`.
        """
        members = self._members(after)
        page: list[dict[str, Any]] = []
        size = 0
        for member in members:
            described = _described(member)
            size += len(json.dumps(described))
            if len(page) == limit or (page and size > characters):
                return page, True
            page.append(described)
        return page, False

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

    def allowed(self, filters: Filters | None, gone: Callable[[], bool] = lambda: False) -> frozenset[str] | None:
        """Ids of the documents whose metadata match; None without filters. The results of recent filters are cached.

        Args:
            filters: the filters.
            gone: returns True once nobody waits for the result any more.

        Raises:
            CancelledError: if `gone` returned True.
        """
        if not filters:
            return None
        seen = self.engine.snapshot
        key = (seen.version, hashlib.sha256(json.dumps(filters, sort_keys=True).encode()).digest())
        ids = self._filtered.get(key)
        if ids is None:
            fits = condition(filters)
            members = (member for entry in seen for member in entry.members)
            found: list[str] = []
            while some := list(islice(members, _FILTERED_TOGETHER)):
                if gone():
                    raise CancelledError("nobody waits for this request any more, so it was not run")
                with self.engine.turn():
                    found += [member.document_id for member in some if fits(member.metadata)]
            ids = frozenset(found)
            if len(self._filtered) >= _REMEMBERED_FILTERS:
                self._filtered.clear()
            self._filtered[key] = ids
        return ids

    @contextmanager
    def _change(self, cancelled: Callable[[], bool] = bool) -> Iterator[None]:
        """A turn to change the bank, which is refused once the bank is closed."""
        while not self._changing.acquire(timeout=_LOOK):
            if cancelled():
                raise CancelledError("nobody waits for this change any more, so it was not made")
        try:
            if self._closed:
                raise closing("the bank is being closed, so nothing was changed")
            yield
        finally:
            self._changing.release()


def broken_info(name: str) -> dict[str, Any]:
    """A bank that could not be opened, as clients see it."""
    return {"name": name, "object": "bank", "state": "broken"}


def no_such_document(document_id: str) -> APIError:
    return APIError(404, f"there is no document {document_id!r:.200} in this bank", code="document_not_found")


def _described(member: Member) -> dict[str, Any]:
    return {
        "id": member.document_id,
        "metadata": dict(member.metadata),
        "added": member.added,
        "date": written(member.moment) if member.moment != ALWAYS else None,
    }


_log = logging.getLogger(__name__)

_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,63}")
_SETTINGS = "serve.json"
_LARGEST_SETTINGS = 1 << 16


def check_bank_name(name: str) -> None:
    """Checks the name of a bank: it must be valid as a folder's name on every system.

    Raises:
        APIError: for any other name; says which names are valid.
    """
    if not _NAME.fullmatch(name):
        raise APIError(
            400,
            f"{name!r:.80} cannot name a bank; use at most 64 lower-case letters, digits, - and _, and begin with a "
            "letter or digit",
            param="name",
        )


class BankCatalog:
    """The banks in a folder, all open for writing. Thread-safe.

    A bank is `banks/NAME`, with the file `bank` and the folder `retriever`; BM25 has no folder, because its index is in
    the bank's file. A bank gets its name when it is complete, and loses the name before it is removed. The next start
    removes what a killed process has left of either step.

    Args:
        folder: the server's folder.
        model: the model that reads all of them.

    Attributes:
        unavailable: names of the banks that could not be opened; the log says why.
    """

    def __init__(self, folder: Path, model: MACModel) -> None:
        self._banks_folder, self._backups = folder / "banks", folder / "backups"
        self._model = model
        self._lock = threading.Lock()
        self._banks: dict[str, ServedBank] = {}
        self.unavailable: set[str] = set()
        make_writable_folder(self._banks_folder)
        for place in sorted(self._banks_folder.iterdir()):
            if place.name.startswith("."):
                _remove_all(place)
            elif _NAME.fullmatch(place.name) and place.is_dir():
                self._try_open(place.name)

    def _try_open(self, name: str) -> None:
        try:
            self._banks[name] = self._open(name)
        except (MACError, OSError) as error:
            _log.error("bank %s is not served: %s", name, error)
            self.unavailable.add(name)

    def _open(self, name: str) -> ServedBank:
        place = self._banks_folder / name
        retriever = _read_settings(place / _SETTINGS)
        bank = MemoryBank.open(place / "bank", write=True, fingerprint=self._model.fingerprint)
        try:
            found: Retriever | None = None
            if retriever != "none":
                found = (
                    BankBM25Retriever(bank) if retriever == "bm25" else StoredRetriever(retriever, place / "retriever")
                )
            return ServedBank(name, MACEngine(self._model, bank, found), retriever)
        except BaseException:
            bank.close()
            raise

    def served(self) -> list[ServedBank]:
        """The open banks, ordered by name."""
        with self._lock:
            return [bank for _, bank in sorted(self._banks.items())]

    def get(self, name: str) -> ServedBank:
        """A bank by its name.

        Raises:
            APIError: 404 for an unknown name; 503 for a bank that could not be opened.
        """
        with self._lock:
            if name in self.unavailable:
                raise APIError(503, f"bank {name} could not be opened; the server's log says why", code="unavailable")
            if name not in self._banks:
                raise no_such_bank(name)
            return self._banks[name]

    def create(self, name: str, *, retriever: str, keep_texts: bool = True) -> ServedBank:
        """Makes an empty bank.

        Args:
            name: its name.
            retriever: one of `RETRIEVERS`.
            keep_texts: True to keep texts.

        Raises:
            APIError: 400 for an invalid name; 409 for a name that is taken.
            ModelLoadError: if a package that the retriever needs is not installed.
        """
        check_bank_name(name)
        with self._lock:
            place = self._banks_folder / name
            self._check_free(name)
            new = self._banks_folder / f".new-{token_hex(8)}"
            try:
                make_folder(new)
                MemoryBank.create(new / "bank", self._model.fingerprint, keep_texts=keep_texts).close()
                write_text(new / _SETTINGS, sealed({"retriever": retriever}).decode())
                if retriever not in ("none", "bm25"):
                    StoredRetriever(retriever, new / "retriever").save(new / "retriever")
                new.rename(place)
                sync_folder(self._banks_folder)
            except BaseException:
                _remove_all(new)
                raise
            self._banks[name] = self._open(name)
            return self._banks[name]

    def delete(self, name: str) -> None:
        """Deletes a bank and all of its documents, after the running change. Running questions are finished.

        Raises:
            APIError: 404 for an unknown name.
        """
        with self._lock:
            if name in self.unavailable:
                self.unavailable.discard(name)
            elif name not in self._banks:
                raise no_such_bank(name)
            bank = self._banks.pop(name, None)
        if bank is not None:
            bank.close()
        gone = self._banks_folder / f".deleted-{token_hex(8)}"
        (self._banks_folder / name).rename(gone)
        sync_folder(self._banks_folder)
        _remove_all(gone)

    def rename(self, name: str, new: str) -> ServedBank:
        """Gives a bank another name, after the running change. Until the bank has it, there is no bank of either name.

        Raises:
            APIError: 400 for an invalid name; 404 for an unknown bank; 409 for a name that is taken.
        """
        check_bank_name(new)
        bank = self.get(name)
        with self._lock:
            self._check_free(new)
            if self._banks.pop(name, None) is not bank:
                raise no_such_bank(name)
        bank.close()
        with self._lock:
            present = name
            try:
                self._check_free(new)
                (self._banks_folder / name).rename(self._banks_folder / new)
                present = new
                sync_folder(self._banks_folder)
            finally:
                self._try_open(present)
        return self.get(new)

    def _check_free(self, name: str) -> None:
        if name in self._banks or (self._banks_folder / name).exists():
            raise APIError(409, f"a bank {name} exists already; choose another name", param="name", code="bank_exists")

    def back_up(self, name: str) -> tuple[str, int]:
        """Copies the last commit of a bank to the server's folder of backups.

        Returns:
            The name of the backup, and the number of its documents.
        """
        bank = self.get(name)
        moment = datetime.now(UTC).strftime("%Y%m%dT%H%M%S")
        label = f"{name}.{moment}.{token_hex(3)}"
        make_folder(self._backups)
        assert bank.bank.path is not None
        return label, backup(bank.bank.path, self._backups / label)

    def close(self, seconds: float = -1) -> bool:
        """Closes all banks, each after its running change. Returns False if one of these takes longer than that."""
        with self._lock:
            banks, self._banks = list(self._banks.values()), {}
        closed = [bank.close(seconds) for bank in banks]
        return all(closed)


def _read_settings(path: Path) -> str:
    """The name of a bank's retriever, from its settings file. Raises BankError or ConfigError for any other content."""
    try:
        content: dict[str, Any] = unsealed(read_file(path, _LARGEST_SETTINGS))
    except (OSError, MalformedError) as error:
        raise BankError(f"{path} cannot be read: {error}; restore it from a copy, or remove the bank") from None
    retriever = content.get("retriever")
    if retriever not in RETRIEVERS:
        raise ConfigError(
            f"{path}: unknown retriever {json.dumps(retriever)[:40]}; it must be one of {', '.join(RETRIEVERS)}"
        )
    return str(retriever)


def _remove_all(place: Path) -> None:
    """Removes a folder that is no bank any more; what the system refuses to remove is left for the next start."""
    shutil.rmtree(place, ignore_errors=True)


# The retrievers that a bank of the server can have.
RETRIEVERS = ("none", "bm25", "minilm", "hybrid")


class StoredRetriever(Retriever):
    """A retriever that every change saves to its folder before the call returns.

    So the protocol of `mac_rag.sync` holds across processes: when the bank commits, the retriever is on the disk.

    Args:
        spec: its name, one of `RETRIEVERS` except `none`.
        folder: its folder; a retriever that was saved there is loaded.
    """

    def __init__(self, spec: str, folder: Path) -> None:
        retriever = make_retriever(spec, folder=folder)
        assert retriever is not None, spec
        self._retriever = retriever
        self._folder = folder

    def add(self, documents: Sequence[Document]) -> None:
        self._retriever.add(documents)
        self._retriever.save(self._folder)

    def put(self, documents: Sequence[Document]) -> None:
        self._retriever.put(documents)
        self._retriever.save(self._folder)

    def delete(self, document_id: str) -> None:
        self._retriever.delete(document_id)
        self._retriever.save(self._folder)

    def retrieve(self, questions: Sequence[str], k: int, *, allowed: Container[str] | None = None) -> list[list[Hit]]:
        return self._retriever.retrieve(questions, k, allowed=allowed)

    def __len__(self) -> int:
        return len(self._retriever)

    def __contains__(self, document_id: object) -> bool:
        return document_id in self._retriever

    def held(self, document_ids: Iterable[str]) -> list[str]:
        return self._retriever.held(document_ids)

    def content_hashes(self, document_ids: Collection[str] | None = None) -> dict[str, str]:
        return self._retriever.content_hashes(document_ids)

    def documents(self, document_ids: Collection[str]) -> list[Document]:
        return self._retriever.documents(document_ids)

    def save(self, folder: Path) -> None:
        self._retriever.save(folder)
