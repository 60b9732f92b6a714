"""Keys: who may do what with which banks. The server keeps a hash of each, never the key."""

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
    """Whoever makes a request.

    Attributes:
        name: name of the key.
        scope: what it may do: `read` asks and reads documents, `write` changes documents, `admin` makes, deletes and
            backs up banks, and reads the metrics. Each includes those before it.
        banks: names of the banks that exist for it; `*` stands for any characters.
    """

    name: str
    scope: Scope
    banks: tuple[str, ...]

    def may(self, scope: Scope) -> bool:
        """True if its scope includes another."""
        return SCOPES.index(self.scope) >= SCOPES.index(scope)

    def sees(self, bank: str) -> bool:
        """True if a bank of this name exists for it, if it exists at all."""
        return any(fnmatchcase(bank, pattern) for pattern in self.banks)


# Without keys, on the loopback address: whoever can reach the port.
ANYONE = Principal("anyone", "admin", ("*",))


class KeyStore:
    """The keys in a file, which another process may change at any time.

    Examples:
        >>> from tempfile import TemporaryDirectory
        >>> with TemporaryDirectory() as folder:
        ...     store = KeyStore(Path(folder) / "keys.json")
        ...     token = store.add("reader", "read", ["news-*"])
        ...     store.find(token), store.find("mac_guessed")
        (Principal(name='reader', scope='read', banks=('news-*',)), None)

    Args:
        path: the file; there need not be one.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = Lock()
        self._seen: tuple[int, int, int] | None = None
        self._keys: tuple[tuple[str, Principal], ...] = ()  # hex sha256, and whose it is

    def add(self, name: str, scope: Scope, banks: Sequence[str]) -> str:
        """Makes a key. It is returned once, and kept nowhere.

        Raises:
            ConfigError: for a name that is taken or no name, an unknown scope, and for no banks; and as
                `make_writable_folder`.
        """
        if not _NAME.fullmatch(name):
            raise ConfigError(f"{name!r} is no name of a key; take letters, digits, . _ @ and -, at most 64 of them")
        if scope not in SCOPES:
            raise ConfigError(f"unknown scope {scope!r}; choose one of {', '.join(SCOPES)}")
        wrong = [pattern for pattern in banks if not _PATTERN.fullmatch(pattern)]
        if wrong or not banks:
            raise ConfigError(f"{wrong or 'nothing'} names no banks; give names, in which * stands for any characters")
        token = f"mac_{secrets.token_urlsafe(32)}"
        make_writable_folder(self._path.parent)
        with FileLock(f"{self._path}.lock", mode=0o600):
            records = self._records()
            if any(record["name"] == name for record in records):
                raise ConfigError(f"there is a key {name!r} already; remove it first, or choose another name")
            created = datetime.now(UTC).isoformat(timespec="seconds")
            record = {"name": name, "scope": scope, "banks": list(banks), "sha256": _digest(token), "created": created}
            self._write([*records, record])
        return token

    def remove(self, name: str) -> None:
        """Ends a key. A running server refuses it from its next request on.

        Raises:
            ConfigError: for an unknown name; and as `make_writable_folder`.
        """
        make_writable_folder(self._path.parent)
        with FileLock(f"{self._path}.lock", mode=0o600):
            records = self._records()
            left = [record for record in records if record["name"] != name]
            if len(left) == len(records):
                raise ConfigError(f"there is no key {name!r}; mac-rag key list shows those there are")
            self._write(left)

    def described(self) -> list[dict[str, Any]]:
        """Name, scope, banks and time of creation of each key."""
        return [{key: value for key, value in record.items() if key != "sha256"} for record in self._records()]

    def find(self, token: str) -> Principal | None:
        """Whose key this is. The time that it takes does not depend on how much of a key was guessed."""
        digest = _digest(token)
        found = None
        for known, principal in self._current():
            if hmac.compare_digest(known, digest):
                found = principal
        return found

    def __bool__(self) -> bool:
        return bool(self._current())

    def _current(self) -> tuple[tuple[str, Principal], ...]:
        """The keys in the file as it is now; it is read again when it has changed."""
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
        """What the file says.

        Raises:
            ConfigError: for a file that is not what this class wrote.
        """
        try:
            content = unsealed(read_file(self._path, _LARGEST))
            if content.get("format") != _FORMAT:
                raise MalformedError(f"its format is {content.get('format')!r:.20}, not {_FORMAT}")
            records: list[dict[str, Any]] = content["keys"]
        except FileNotFoundError:
            return []
        except (OSError, MalformedError, KeyError) as error:
            raise ConfigError(f"{self._path} cannot be read: {error}; put a copy back, or make new keys") from None
        return records

    def _write(self, records: list[dict[str, Any]]) -> None:
        write_text(self._path, sealed({"format": _FORMAT, "keys": records}).decode())


def _digest(token: str) -> str:
    """Keys are random and long, so a plain hash cannot be turned back."""
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).hexdigest()
