"""Keys: who may do what with which banks. The server stores a hash of each key, never the key."""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from pathlib import Path
from threading import Lock
from typing import Any, Literal, get_args

from filelock import FileLock

from mac_rag.atomic_files import make_writable_folder, sealed, unsealed, write_text
from mac_rag.errors import ConfigError
from mac_rag.untrusted_files import MalformedError, read_file

Scope = Literal["read", "write", "admin"]
# Each scope includes those before it.
SCOPES: tuple[Scope, ...] = get_args(Scope)
_FORMAT = 1
_LARGEST = 16 << 20
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")
_PATTERN = re.compile(r"[a-z0-9*][a-z0-9_*-]{0,63}")


@dataclass(frozen=True)
class Principal:
    """The holder of a key, who makes requests.

    Attributes:
        name: name of the key.
        scope: its rights. `read` asks questions and reads documents, `write` changes documents, `admin` makes, renames,
            deletes and backs up banks, and reads the metrics. Each scope includes those before it.
        banks: patterns of the names of the banks that it may see; `*` stands for any characters.
    """

    name: str
    scope: Scope
    banks: tuple[str, ...]

    def may(self, scope: Scope) -> bool:
        """True if its scope includes this one."""
        return SCOPES.index(self.scope) >= SCOPES.index(scope)

    def sees(self, bank: str) -> bool:
        """True if it may see a bank of this name. The bank need not exist."""
        return any(fnmatchcase(bank, pattern) for pattern in self.banks)


# The principal of all requests to a server without keys.
ANYONE = Principal("anyone", "admin", ("*",))


class KeyStore:
    """The keys in a file. Another process may change the file at any time.

    Examples:
        >>> from tempfile import TemporaryDirectory
        >>> with TemporaryDirectory() as folder:
        ...     store = KeyStore(Path(folder) / "keys.json")
        ...     token = store.add("reader", "read", ["news-*"])
        ...     store.find(token), store.find("mac_guessed")
        (Principal(name='reader', scope='read', banks=('news-*',)), None)

    Args:
        path: the file; it need not exist.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock_path = Path(f"{path}.lock")
        self._lock = Lock()
        self._seen: tuple[int, int, int] | None = None
        self._keys: tuple[tuple[str, Principal], ...] = ()  # hex sha256 of each key, and its principal

    def add(self, name: str, scope: Scope, banks: Sequence[str]) -> str:
        """Makes a key. Only the caller gets the key; it is stored nowhere.

        Raises:
            ConfigError: for a name that is invalid or taken, an unknown scope, or invalid or no banks; and as
                `make_writable_folder`.
        """
        if not _NAME.fullmatch(name):
            raise ConfigError(
                f"{name!r} cannot name a key; use at most 64 letters, digits, . _ @ and -, the first a letter or digit"
            )
        if scope not in SCOPES:
            raise ConfigError(f"unknown scope {scope!r}; choose one of {', '.join(SCOPES)}")
        wrong = [pattern for pattern in banks if not _PATTERN.fullmatch(pattern)]
        if wrong or not banks:
            raise ConfigError(f"{wrong or 'nothing'} names no banks; give names, where * stands for any characters")
        token = f"mac_{secrets.token_urlsafe(32)}"
        make_writable_folder(self._path.parent)
        with FileLock(self._lock_path, mode=0o600):
            records = self._records()
            if any(record["name"] == name for record in records):
                raise ConfigError(f"a key {name!r} exists already; remove it first, or choose another name")
            created = datetime.now(UTC).isoformat(timespec="seconds")
            record = {"name": name, "scope": scope, "banks": list(banks), "sha256": _digest(token), "created": created}
            self._write([*records, record])
        return token

    def remove(self, name: str) -> None:
        """Removes a key. A running server refuses it from the next request on.

        Raises:
            ConfigError: for an unknown name; and as `make_writable_folder`.
        """
        make_writable_folder(self._path.parent)
        if all(record["name"] != name for record in self._records()):
            raise ConfigError(f"there is no key {name!r}; mac-rag key list shows all keys")
        with FileLock(self._lock_path, mode=0o600):
            self._write([record for record in self._records() if record["name"] != name])

    def described(self) -> list[dict[str, Any]]:
        """Name, scope, banks and time of creation of each key."""
        return [{key: value for key, value in record.items() if key != "sha256"} for record in self._records()]

    def find(self, token: str) -> Principal | None:
        """The principal of a key; None for an unknown key.

        The time that it takes does not depend on how much of a key was guessed right.
        """
        digest = _digest(token)
        holder = None
        for known, principal in self._current():
            if hmac.compare_digest(known, digest):
                holder = principal
        return holder

    @property
    def was_used(self) -> bool:
        """True if there ever was a key, also if none is left and if the file is gone: its lock is never removed."""
        return self._path.exists() or self._lock_path.exists()

    def _current(self) -> tuple[tuple[str, Principal], ...]:
        """The keys in the file at present. The file is read again after each change."""
        try:
            status = self._path.stat()
        except FileNotFoundError:
            return ()
        seen = (status.st_ino, status.st_mtime_ns, status.st_size)
        with self._lock:
            if seen != self._seen:
                self._keys = tuple(
                    (record["sha256"], Principal(record["name"], record["scope"], tuple(record["banks"])))
                    for record in self._records()
                )
                self._seen = seen
            return self._keys

    def _records(self) -> list[dict[str, Any]]:
        """The records in the file. Raises ConfigError for a file that is not as this class wrote it."""
        try:
            content = unsealed(read_file(self._path, _LARGEST))
            if content.get("format") != _FORMAT:
                raise MalformedError(f"its format is {content.get('format')!r:.20}, not {_FORMAT}")
            records: list[dict[str, Any]] = content["keys"]
        except FileNotFoundError:
            return []
        except (OSError, MalformedError, KeyError) as error:
            raise ConfigError(
                f"{self._path} cannot be read: {error}; restore it from a copy, or remove it and make new keys"
            ) from None
        return records

    def _write(self, records: list[dict[str, Any]]) -> None:
        write_text(self._path, sealed({"format": _FORMAT, "keys": records}).decode())


def _digest(token: str) -> str:
    """Sha256 of a key. Keys are long and random, so a plain hash cannot be inverted."""
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).hexdigest()
