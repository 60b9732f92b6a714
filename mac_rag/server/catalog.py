"""The banks of a server, by name; each has a folder."""

from __future__ import annotations

import json
import logging
import re
import shutil
import threading
from collections.abc import Collection, Container, Iterable, Sequence
from datetime import UTC, datetime
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
from mac_rag.bank.interface import Bank
from mac_rag.data.types import Document
from mac_rag.distributed.shard_files import SHARDS
from mac_rag.engine import MACEngine
from mac_rag.errors import BankError, ConfigError, MACError
from mac_rag.model import MACModel
from mac_rag.retrieval.base import Hit, Retriever
from mac_rag.retrieval.registry import make_retriever
from mac_rag.server.api_errors import APIError, no_such_bank
from mac_rag.server.served_bank import ServedBank
from mac_rag.untrusted_files import MalformedError, read_file

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

    A bank is `banks/NAME`, with `bank`, a file or, for a bank in shards, a folder, and the folder `retriever`. BM25 has
    no folder, because its index is in the bank's file, unless the bank is in shards. A bank gets its name when it is
    complete, and loses the name before it is removed. The next start removes what a killed process has left of either
    step.

    Args:
        folder: the server's folder.
        model: the model that reads all of them.
        shards: number of shards of a new bank, each in a process of its own; None for a bank in one piece.

    Attributes:
        unavailable: names of the banks that could not be opened; the log says why.
    """

    def __init__(self, folder: Path, model: MACModel, shards: int | None = None) -> None:
        self._banks_folder, self._backups = folder / "banks", folder / "backups"
        self._model = model
        self._shards = shards
        self._lock = threading.Lock()
        self._banks: dict[str, ServedBank] = {}
        self.unavailable: set[str] = set()
        make_writable_folder(self._banks_folder)
        for place in sorted(self._banks_folder.iterdir()):
            if place.name.startswith("."):
                _remove_all(place)
            elif _NAME.fullmatch(place.name) and place.is_dir():
                self._open_at_start(place.name)

    def _open_at_start(self, name: str) -> None:
        try:
            self._banks[name] = self._open(name)
        except (MACError, OSError) as error:
            _log.error("bank %s is not served: %s", name, error)
            self.unavailable.add(name)

    def _open(self, name: str) -> ServedBank:
        place = self._banks_folder / name
        retriever = _read_settings(place / _SETTINGS)
        if self._shards is None and is_in_shards(place / "bank"):
            raise BankError(f"{place} is a bank in shards; serve it with mac-rag serve --ray")
        bank = open_bank(place / "bank", self._model, write=True)
        try:
            found = _retriever_of(bank, retriever, place / "retriever")
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

    def create(self, name: str, *, retriever: str, keep_texts: bool | None = None) -> ServedBank:
        """Makes an empty bank.

        Args:
            name: its name.
            retriever: one of `RETRIEVERS`.
            keep_texts: True to keep texts; None to keep them if the bank can.

        Raises:
            APIError: 400 for an invalid name, or for an option that a bank in shards does not have; 409 for a name
                that is taken.
            ModelLoadError: if a package that the retriever needs is not installed.
        """
        check_bank_name(name)
        if retriever not in RETRIEVERS:
            raise APIError(
                400, f"unknown retriever {retriever!r:.40}; choose one of {', '.join(RETRIEVERS)}", param="retriever"
            )
        if self._shards is not None and keep_texts:
            raise APIError(400, "a bank in shards keeps no texts; leave out keep_texts", param="keep_texts")
        with self._lock:
            place = self._banks_folder / name
            if name in self._banks or place.exists():
                raise APIError(
                    409, f"a bank {name} exists already; choose another name", param="name", code="bank_exists"
                )
            new = self._banks_folder / f".new-{token_hex(8)}"
            try:
                make_folder(new)
                self._create_bank(new / "bank", keep_texts is not False)
                write_text(new / _SETTINGS, sealed({"retriever": retriever}).decode())
                if retriever != "none" and (retriever != "bm25" or self._shards is not None):
                    StoredRetriever(retriever, new / "retriever").save(new / "retriever")
                new.rename(place)
                sync_folder(self._banks_folder)
            except BaseException:
                _remove_all(new)
                raise
            self._banks[name] = self._open(name)
            return self._banks[name]

    def _create_bank(self, place: Path, keep_texts: bool) -> None:
        if self._shards is not None:
            from mac_rag.distributed import ShardedBank

            ShardedBank.create(place, self._model, shards=self._shards).close()
        else:
            MemoryBank.create(place, self._model.fingerprint, keep_texts=keep_texts).close()

    def delete(self, name: str) -> None:
        """Deletes a bank and all of its documents, after the running change. Running questions are finished.

        Raises:
            APIError: 404 for an unknown name.
        """
        bank = self.get(name)
        with self._lock:
            if self._banks.pop(name, None) is not bank:
                raise no_such_bank(name)
        bank.close()
        gone = self._banks_folder / f".deleted-{token_hex(8)}"
        (self._banks_folder / name).rename(gone)
        sync_folder(self._banks_folder)
        _remove_all(gone)

    def back_up(self, name: str) -> tuple[str, int]:
        """Copies the last commit of a bank to the server's folder of backups.

        Returns:
            The name of the backup, and the number of its documents.
        """
        bank = self.get(name)
        if not isinstance(bank.bank, MemoryBank):
            raise APIError(400, f"bank {name} is in shards; copy its folder while the server is stopped", param="name")
        moment = datetime.now(UTC).strftime("%Y%m%dT%H%M%S")
        label = f"{name}.{moment}.{token_hex(3)}"
        make_folder(self._backups)
        assert bank.bank.path is not None
        return label, backup(bank.bank.path, self._backups / label)

    def close(self) -> None:
        """Closes all banks, each after its running change."""
        with self._lock:
            banks, self._banks = list(self._banks.values()), {}
        for bank in banks:
            bank.close()


def is_in_shards(folder: Path) -> bool:
    """True if a folder holds a bank in shards."""
    return (folder / SHARDS).exists()


def open_bank(folder: Path, model: MACModel, *, write: bool) -> Bank:
    """Opens a bank, in one piece or in shards.

    Raises:
        BankError, FingerprintError: as `MemoryBank.open` and `ShardedBank.open`.
    """
    if not is_in_shards(folder):
        return MemoryBank.open(folder, write=write, fingerprint=model.fingerprint)
    from mac_rag.distributed import ShardedBank

    return ShardedBank.open(folder, model, write=write)


def _retriever_of(bank: Bank, spec: str, folder: Path) -> Retriever | None:
    """A bank's retriever: BM25 in the bank's file or, for a bank in shards, in a folder, as all others are."""
    if spec == "none":
        return None
    return BankBM25Retriever(bank) if spec == "bm25" and isinstance(bank, MemoryBank) else StoredRetriever(spec, folder)


def _read_settings(path: Path) -> str:
    """Reads the name of a bank's retriever from its settings file.

    Raises:
        BankError: for a file that is not as `create` wrote it.
        ConfigError: for an unknown retriever.
    """
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
