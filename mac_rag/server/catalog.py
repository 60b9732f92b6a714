"""The banks of a server: one folder each, by name."""

from __future__ import annotations

import json
import logging
import re
import shutil
import threading
from datetime import UTC, datetime
from pathlib import Path
from secrets import token_hex
from typing import Any

from mac_rag.atomic_files import make_folder, remove_file, sealed, sync_folder, unsealed, write_text
from mac_rag.engine import MACEngine
from mac_rag.errors import BankError, ConfigError, MACError
from mac_rag.memory.bank import MemoryBank
from mac_rag.memory.storage.backup import backup
from mac_rag.model import MACModel
from mac_rag.server.api_errors import APIError, no_such_bank
from mac_rag.server.served_bank import ServedBank
from mac_rag.server.stored_retriever import RETRIEVERS, StoredRetriever
from mac_rag.untrusted_files import MalformedError, read_file

_log = logging.getLogger(__name__)

_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,63}")
_SETTINGS = "serve.json"
_LARGEST_SETTINGS = 1 << 16


def check_bank_name(name: str) -> None:
    """Refuses anything but a name that is a folder's name and nothing else on every system.

    Raises:
        APIError: says what a name is.
    """
    if not _NAME.fullmatch(name):
        raise APIError(
            400,
            f"{name!r:.80} is no name of a bank; take lower-case letters, digits, - and _, at most 64, "
            "with a letter or digit first",
            param="name",
        )


class BankCatalog:
    """The banks in a folder, all open for writing. Thread-safe.

    A bank is `banks/NAME`, with the folders `bank` and `retriever`. It appears under its name when it is complete, and
    loses the name before it is removed. What a killed process has left of either is removed at the next start.

    Args:
        folder: the server's folder.
        model: the model that all of them are read with.

    Attributes:
        unavailable: banks that could not be opened; the log says why.
    """

    def __init__(self, folder: Path, model: MACModel) -> None:
        self._banks_folder, self._backups = folder / "banks", folder / "backups"
        self._model = model
        self._lock = threading.Lock()
        self._banks: dict[str, ServedBank] = {}
        self.unavailable: set[str] = set()
        make_folder(self._banks_folder)
        for place in sorted(self._banks_folder.iterdir()):
            if place.name.startswith("."):
                _remove_all(place)
            elif _NAME.fullmatch(place.name) and place.is_dir():
                self._open_at_start(place.name)

    def _open_at_start(self, name: str) -> None:
        try:
            self._banks[name] = self._open(name)
        except MACError as error:
            _log.error("bank %s is not served: %s", name, error)
            self.unavailable.add(name)

    def _open(self, name: str) -> ServedBank:
        place = self._banks_folder / name
        retriever = _read_settings(place / _SETTINGS)
        bank = MemoryBank.open(place / "bank", write=True, fingerprint=self._model.fingerprint)
        try:
            stored = None if retriever == "none" else StoredRetriever(retriever, place / "retriever")
            return ServedBank(name, MACEngine(self._model, bank, stored), retriever)
        except BaseException:
            bank.close()
            raise

    def served(self) -> list[ServedBank]:
        """The banks that are served, in the order of their names."""
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

    def create(self, name: str, *, retriever: str, keep_texts: bool, secure_delete: bool) -> ServedBank:
        """Makes an empty bank.

        Raises:
            APIError: 400 for a name that is none, 409 for one that is taken.
            ModelLoadError: when what the retriever needs is not installed.
        """
        check_bank_name(name)
        if retriever not in RETRIEVERS:
            raise APIError(
                400, f"unknown retriever {retriever!r:.40}; choose one of {', '.join(RETRIEVERS)}", param="retriever"
            )
        with self._lock:
            place = self._banks_folder / name
            if name in self._banks or place.exists():
                raise APIError(409, f"there is a bank {name} already", param="name", code="bank_exists")
            new = self._banks_folder / f".new-{token_hex(8)}"
            try:
                make_folder(new)
                MemoryBank.create(
                    new / "bank", self._model.fingerprint, keep_texts=keep_texts, secure_delete=secure_delete
                ).close()
                write_text(new / _SETTINGS, sealed({"retriever": retriever}).decode())
                if retriever != "none":
                    StoredRetriever(retriever, new / "retriever").save(new / "retriever")
                new.rename(place)
                sync_folder(self._banks_folder)
            except BaseException:
                _remove_all(new)
                raise
            self._banks[name] = self._open(name)
            return self._banks[name]

    def delete(self, name: str) -> None:
        """Deletes a bank with everything in it, after the change under way. Questions under way are finished.

        Raises:
            APIError: 404 for an unknown name.
        """
        bank = self.get(name)
        secure = bank.bank.secure_delete
        with self._lock:
            if self._banks.pop(name, None) is not bank:
                raise no_such_bank(name)
        bank.close()
        gone = self._banks_folder / f".deleted-{token_hex(8)}"
        (self._banks_folder / name).rename(gone)
        sync_folder(self._banks_folder)
        _remove_all(gone, secure_delete=secure)

    def back_up(self, name: str) -> tuple[str, int]:
        """Copies the last commit of a bank to the server's folder of backups.

        Returns:
            The name of the backup, and the number of documents.
        """
        bank = self.get(name)
        moment = datetime.now(UTC).strftime("%Y%m%dT%H%M%S")
        label = f"{name}.{moment}.{token_hex(3)}"
        make_folder(self._backups)
        assert bank.bank.folder is not None
        return label, backup(bank.bank.folder, self._backups / label)

    def close(self) -> None:
        """Closes all banks, each after the change under way."""
        with self._lock:
            banks, self._banks = list(self._banks.values()), {}
        for bank in banks:
            bank.close()


def _read_settings(path: Path) -> str:
    """The name of a bank's retriever.

    Raises:
        BankError: for a file that is not what `create` wrote.
    """
    try:
        content: dict[str, Any] = unsealed(read_file(path, _LARGEST_SETTINGS))
    except (OSError, MalformedError) as error:
        raise BankError(f"{path} cannot be read: {error}; put it back from a copy, or remove the bank") from None
    retriever = content.get("retriever")
    if retriever not in RETRIEVERS:
        raise ConfigError(f"{path}: unknown retriever {json.dumps(retriever)[:40]}")
    return str(retriever)


def _remove_all(place: Path, *, secure_delete: bool = False) -> None:
    """Removes a folder that has lost its name; what the system refuses is left for the next start."""
    if secure_delete:
        for file in place.rglob("*"):
            if file.is_file() and not file.is_symlink():
                remove_file(file, secure_delete=True)
    shutil.rmtree(place, ignore_errors=True)
