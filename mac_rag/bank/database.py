"""The file of a bank: a SQLite database with its schema, its connections and its errors.

    setting         what holds for the whole bank: one row, as JSON
    document        the documents of the entries, in the order of arrival, without their texts
    text            their texts, in a bank that keeps texts
    row             the memory tokens, and what is read of every row before the first question
    codebook        with rows pq, what their codes are looked up in
    change          which entries were deleted or described anew, and in which commit
    writer          which writer has made the commits from one on
    bm25            the settings of the BM25 index in the bank, and its next number; empty without an index
    bm25_document   the documents of the index, each with its words; a text that `text` holds is only there

The key of a document or row is the number of its entry times 2 ** 16, and its number within the entry. Each document
of an entry has the number of its rows. The database has
a write-ahead log: readers see one commit while a writer makes the next. One process at a time writes; it holds the lock
of the file `<bank>-lock`, which names it.
"""

from __future__ import annotations

import errno
import os
import re
import sqlite3
import stat
import tempfile
import threading
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeAlias
from urllib.parse import quote

from filelock import FileLock, Timeout

from mac_rag.atomic_files import make_folder, private, sync_folder
from mac_rag.errors import BankError, ConfigError, DamageError, FullDiskError

# The key of a row or document holds its number within the entry in these low bits.
PART_BITS = 16
SEQUENCES = 1 << 47  # numbers of entries are below this
APPLICATION = 0x4D414342
SCHEMA_VERSION = 1
SCHEMA = (
    "CREATE TABLE setting (number INTEGER PRIMARY KEY CHECK (number = 1), version INTEGER NOT NULL, "
    "data TEXT NOT NULL, crc INTEGER NOT NULL) STRICT",
    "CREATE TABLE document (key INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, content_hash BLOB NOT NULL, "
    "metadata TEXT NOT NULL, added TEXT NOT NULL, crc INTEGER NOT NULL, rows INTEGER NOT NULL, hash INTEGER NOT NULL, "
    "moment INTEGER NOT NULL, supersedes BLOB NOT NULL, index_crc INTEGER NOT NULL) STRICT",
    "CREATE TABLE text (document INTEGER PRIMARY KEY REFERENCES document ON DELETE CASCADE, text TEXT NOT NULL) STRICT",
    # The codes come last: what fits into a page of the table before them is read without them.
    "CREATE TABLE row (key INTEGER PRIMARY KEY, tokens INTEGER NOT NULL, crc INTEGER NOT NULL, "
    "overview_crc INTEGER NOT NULL, summary BLOB NOT NULL, places BLOB NOT NULL, weights BLOB NOT NULL, "
    "codes BLOB NOT NULL) STRICT",
    "CREATE TABLE codebook (number INTEGER PRIMARY KEY CHECK (number = 1), data BLOB NOT NULL, "
    "crc INTEGER NOT NULL) STRICT",
    "CREATE TABLE change (version INTEGER NOT NULL, entry INTEGER NOT NULL, PRIMARY KEY (version, entry)) "
    "STRICT, WITHOUT ROWID",
    "CREATE TABLE writer (version INTEGER PRIMARY KEY, name TEXT NOT NULL) STRICT",
    "CREATE TABLE bm25 (number INTEGER PRIMARY KEY CHECK (number = 1), settings TEXT NOT NULL, lineage TEXT NOT NULL, "
    "next_document INTEGER NOT NULL) STRICT",
    "CREATE TABLE bm25_document (key INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, metadata TEXT NOT NULL, text TEXT, "
    "words BLOB NOT NULL, crc INTEGER NOT NULL) STRICT",
)
# Endings of the files beside a bank: of SQLite, the lock, the derived keys, and a file that is not complete yet.
WAL, SHM, LOCK, KEYS, UNFINISHED = "-wal", "-shm", "-lock", "-keys", "-new"
PUT_SETTINGS = "INSERT OR REPLACE INTO setting VALUES (1, ?, ?, ?)"
_OLDEST = (3, 37, 0)  # the first SQLite with strict tables
_PAGE = 4096  # bytes; of larger pages more stays empty, whatever the size of a row
MOST_VALUES = 500  # of one query
_KEPT = 4  # connections that nobody uses, and that are not closed
_WAIT = 10.0  # seconds for another process to end its commit, or to close the bank
_NO_ROOM = "nothing was changed: free some space on the disk, and do it again"
_LARGEST_VALUE = 1 << 30  # bytes of a text or blob
# One letter in front of the colon is a drive of Windows.
_URL = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]+:/")
Values: TypeAlias = Sequence[Any]
SettingsRow: TypeAlias = tuple[int, str, int]  # number of the commit, all settings as JSON, and their checksum


def local_path(place: str | Path) -> Path:
    """The file of a bank.

    Raises:
        BankError: for a URL, and for a name that no file has.
    """
    if _URL.match(str(place)):
        url = re.sub(r":/+", "://", str(place), count=1)  # a path has lost a slash
        raise BankError(
            f"{url} is a URL, and a bank is a file: fetch it with mac-rag bank pull {url} FILE, and put it back with "
            f"mac-rag bank push FILE {url}"
        )
    if "\0" in str(place):
        raise BankError(f"{str(place)!r} cannot be the file of a memory bank: its name has a NUL")
    return Path(place)


def exists(path: Path) -> bool:
    """True if there is a file that is not empty. Whether it is a bank, opening it tells.

    Raises:
        BankError: for what is no file, and where the system does not say what is there.
    """
    try:
        status = path.stat()
    except FileNotFoundError:
        if path.is_symlink():
            raise BankError(f"{path} is a link to nothing; remove it, or name another file") from None
        return False
    except OSError as error:
        raise BankError(f"{path} cannot be read as a memory bank: {error.strerror}") from error
    if stat.S_ISDIR(status.st_mode):
        raise BankError(f"{path} is a folder, and a memory bank is one file; name a file, such as {path / 'bank.mac'}")
    if not stat.S_ISREG(status.st_mode):
        raise BankError(f"{path} is not a file, and a memory bank is one; name another")
    return status.st_size > 0


@contextmanager
def database_errors(path: Path, what: str) -> Iterator[None]:
    """Turns errors of SQLite and of the file system into errors that name the bank: it "cannot be {what}".

    Raises:
        FullDiskError: when there is no room on the disk.
        DamageError: when the file is not what was written.
        BankError: for anything else.
    """
    try:
        yield
    except OSError as error:
        reason = f"{path} cannot be {what}: {error.strerror or error}"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise FullDiskError(f"{reason}; {_NO_ROOM}") from error
        raise BankError(reason) from error
    except sqlite3.ProgrammingError as error:
        raise BankError(f"{path} cannot be {what}: {error} Open it again") from error
    except UnicodeDecodeError as error:  # even in the message of an error
        raise DamageError(f"{path} is damaged or no memory bank: {error}; restore it from a backup") from error
    except sqlite3.Error as error:
        code = (getattr(error, "sqlite_errorcode", None) or sqlite3.SQLITE_ERROR) & 0xFF
        if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
            raise BankError(
                f"{path} cannot be {what}: another process is using it; wait until it is done, or close the bank there"
            ) from error
        if code in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_NOMEM):
            raise FullDiskError(f"{path} cannot be {what}: {error}; {_NO_ROOM}") from error
        if code in (sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM):
            raise BankError(f"{path} cannot be {what}: {error}") from error
        raise DamageError(f"{path} is damaged or no memory bank: {error}; restore it from a backup") from error


class Connection:
    """One connection to a bank's file. Threads may share it; a call is done before the next one starts.

    All methods but `end` and `close` raise a BankError as `database_errors` does.

    Args:
        path: the file.
        write: True to change it.
        durable: False if nothing needs to be there after a crash.
    """

    def __init__(self, path: Path, *, write: bool = False, durable: bool = True) -> None:
        if sqlite3.sqlite_version_info < _OLDEST:
            raise ConfigError(
                f"a memory bank needs SQLite {'.'.join(map(str, _OLDEST))} or later, and this Python has "
                f"{sqlite3.sqlite_version}; take a later build of Python"
            )
        self.path = path
        self._process = os.getpid()
        self._synchronous = "FULL" if durable else "OFF"
        self._turn = threading.RLock()
        with database_errors(path, "opened"):
            self._connection = self._connect("rw")
            try:
                self._configure(write)
            except sqlite3.OperationalError as error:
                self._connection.close()
                # In a folder where nothing can be written, a log that is not there cannot be begun, nor is there one.
                is_refused = error.sqlite_errorcode & 0xFF in (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY)
                if write or not is_refused or _size(path, WAL):
                    raise
                self._connection = self._connect("ro&immutable=1")
                self._configure(write)
            except BaseException:
                self._connection.close()
                raise

    def _connect(self, mode: str) -> sqlite3.Connection:
        return sqlite3.connect(
            f"file:{'//' if os.name == 'posix' else ''}{quote(os.fsencode(self.path.absolute()))}?mode={mode}",
            uri=True,
            timeout=_WAIT,
            isolation_level=None,
            check_same_thread=False,
        )

    def _configure(self, write: bool) -> None:
        connection = self._connection
        connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _LARGEST_VALUE)
        connection.setlimit(sqlite3.SQLITE_LIMIT_ATTACHED, 0)
        for setting in (
            f"synchronous = {self._synchronous}",
            "trusted_schema = OFF",
            "cell_size_check = ON",
            "mmap_size = 0",
            "cache_size = -16384",
        ):
            connection.execute(f"PRAGMA {setting}")
        if write:
            for setting in ("journal_mode = WAL", "foreign_keys = ON", "secure_delete = ON"):
                connection.execute(f"PRAGMA {setting}").fetchall()
        else:
            connection.execute("PRAGMA query_only = ON")
        connection.execute("SELECT count(*) FROM sqlite_schema").fetchall()  # fails here rather than later

    def rows(self, statement: str, values: Values = ()) -> list[Any]:
        """Executes a statement, and returns all rows of its result."""
        with self._turn, database_errors(self.path, "read"):
            return self._connection.execute(statement, values).fetchall()

    def rows_in(self, statement: str, values: Values) -> Iterator[Any]:
        """Yields the rows of a statement with `{}` in place of any number of values, which takes several queries."""
        for first in range(0, len(values), MOST_VALUES):
            some = values[first : first + MOST_VALUES]
            yield from self.rows(statement.format(",".join("?" * len(some))), some)

    def write(self, statement: str, many: Iterable[Values] | None = None) -> None:
        """Executes a statement, with `many` once for each of their values."""
        with self._turn, database_errors(self.path, "written to"):
            if many is None:
                self._connection.execute(statement)
            else:
                self._connection.executemany(statement, many)

    @property
    def in_transaction(self) -> bool:
        """True between the begin of a transaction and its end."""
        return self._connection.in_transaction

    def end(self) -> None:
        """Ends the transaction, and takes back what was changed in it; not in a process that was forked meanwhile."""
        with self._turn, suppress(sqlite3.Error):
            if self._connection.in_transaction and os.getpid() == self._process:
                self._connection.execute("ROLLBACK")

    def copy_to(self, path: Path) -> None:
        """Writes a copy of what this connection sees as a new file, even while others write to the bank."""
        with self._turn, database_errors(self.path, f"copied to {path}"):
            os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
            target = sqlite3.connect(path, isolation_level=None)
            try:
                target.execute("PRAGMA synchronous = FULL")
                self._connection.backup(target, pages=1024, sleep=0)
                # The copy has the header of a database with a log; without one, it is complete in one file.
                target.execute("PRAGMA journal_mode = DELETE").fetchall()
            finally:
                target.close()

    def copy_from(self, source: Connection) -> None:
        """Replaces everything in this database by what is in another, in one transaction."""
        with self._turn, database_errors(self.path, "written to"):
            source._connection.backup(self._connection, pages=-1)

    def shrink(self) -> None:
        """Gives pages that hold nothing back to the disk."""
        with self._turn, database_errors(self.path, "written to"):
            # `execute` ends after the first page, because the statement has no columns.
            self._connection.executescript("PRAGMA incremental_vacuum")

    def clean(self, *, wait: bool) -> bool:
        """Moves the log into the file and empties it, so that nothing older is left in it.

        Args:
            wait: True to wait for readers of older commits.

        Returns:
            False if such a reader was in the way.
        """
        with self._turn, database_errors(self.path, "written to"):
            self._connection.execute(f"PRAGMA busy_timeout = {int(_WAIT * 1000) if wait else 0}")
            try:
                [(busy, *_)] = self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
            except sqlite3.OperationalError as error:
                if error.sqlite_errorcode & 0xFF not in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
                    raise
                busy = 1
            finally:
                self._connection.execute(f"PRAGMA busy_timeout = {int(_WAIT * 1000)}")
            return not busy

    def close(self) -> None:
        """Closes the connection; a second call does nothing, nor does one in a process that was forked meanwhile."""
        with self._turn, suppress(sqlite3.Error):
            if os.getpid() == self._process:
                self._connection.close()


class Database:
    """A bank's file, and the connections of this process to it.

    Args:
        path: the file.
        lock: the right to write to it; None to read only.
        folder: a folder of its own, which goes with this object; None for a bank that stays.

    Attributes:
        writer: the connection that changes the file; None to read only.
        opened: its `identity` when it was opened.

    Raises:
        BankError: when it is no bank, its format is unknown, or it cannot be opened.
    """

    def __init__(
        self, path: Path, lock: WriterLock | None, folder: tempfile.TemporaryDirectory[str] | None = None
    ) -> None:
        self.path = path
        self.lock = lock
        self.is_temporary = folder is not None
        self._folder = folder
        self.opened = self.identity
        self._idle = _Idle()
        self.writer: Connection | None = None
        try:
            if folder is None:
                check_format(self._first())  # before a connection that writes makes a log for whatever file it is
            if lock is not None or folder is not None:
                self.writer = Connection(path, write=True, durable=folder is None)
        except BaseException:
            self.close()
            raise

    def _first(self) -> Connection:
        connection = Connection(self.path)
        self._idle.give_back(connection)
        return connection

    @classmethod
    def open(cls, path: Path, *, write: bool) -> Database:
        """Opens the file of a bank.

        Raises:
            BankError: when there is no bank, it cannot be opened, or with `write` another process writes to it.
        """
        if not exists(path):
            raise BankError(f"there is no memory bank {path}")
        if not write:
            return cls(path, None)
        lock = WriterLock(path)
        try:
            return cls(path, lock)
        except BaseException:
            lock.release()
            raise

    @classmethod
    def create(cls, path: Path, source: Connection | SettingsRow) -> Database:
        """Makes a new file and opens it for writing. After a crash or an error, there is no file of this name.

        Args:
            path: the file.
            source: what it holds: a copy of another bank, or settings and nothing else.

        Raises:
            BankError: when there is something of this name, or the file cannot be written.
        """
        if exists(path):
            raise BankError(f"{path} holds a memory bank or another file; open it, or choose another name")
        unfinished = path.with_name(path.name + UNFINISHED)
        with database_errors(path, "written to"):
            make_folder(path.parent)
        lock = WriterLock(path)
        is_placed = False
        try:
            with database_errors(path, "written to"):
                _remove(unfinished)
                if isinstance(source, Connection):
                    source.copy_to(unfinished)
                else:
                    _new_file(unfinished, source)
                if exists(path):
                    raise BankError(f"{path} has come meanwhile; choose another name")
                _remove(path)  # the log of a bank that was removed would become a part of this one
                unfinished.replace(path)
                is_placed = True
                sync_folder(path.parent)
            return cls(path, lock)
        except BaseException:
            with suppress(OSError):
                _remove(path if is_placed else unfinished)
            lock.release()
            raise

    @classmethod
    def temporary(cls, settings: SettingsRow) -> Database:
        """A bank that this process alone sees, and that goes with the object."""
        folder = tempfile.TemporaryDirectory(prefix="mac-rag-", ignore_cleanup_errors=True)
        path = Path(folder.name) / "bank"
        with database_errors(path, "written to"):
            _new_file(path, settings, durable=False)
        return cls(path, None, folder)

    def pin(self) -> Pin:
        """A connection that sees the last commit as long as it is held."""
        return Pin(self._idle.take() or Connection(self.path), self._idle)

    def pin_without_log(self) -> Pin:
        """As `pin`, after moving the log into the file, so that a writer can begin it anew while the pin is held.

        It fails to do so if others read older commits. A reader that follows each commit would otherwise always read
        the end of the log, which then grows for ever.
        """
        connection = self._idle.take() or Connection(self.path)
        with suppress(BankError):
            connection.rows("PRAGMA wal_checkpoint(PASSIVE)")
        return Pin(connection, self._idle)

    def check_writer(self) -> None:
        """Makes sure that what this process writes is still the bank of this name, and that nobody else writes to it.

        Raises:
            BankError: when another file has the bank's name, or as `WriterLock.check`.
        """
        if self.lock is None:
            return
        self.lock.check()
        if self.identity != self.opened:
            raise BankError(
                f"{self.path} was removed or replaced while this process had it open for writing; open it again and "
                "repeat the change"
            )

    @property
    def identity(self) -> tuple[int, int] | None:
        """What tells the file from another that took its name."""
        return _identity(self.path)

    def close(self) -> None:
        """Closes all connections, those that are pinned once nobody holds them, and releases the right to write."""
        with ExitStack() as stack:  # an interrupt in one step leaves the others to be done
            if self.lock is not None:
                stack.callback(self.lock.release)
            stack.callback(self._idle.close)
            if self.writer is not None:
                stack.callback(self.writer.close)
                self.writer.end()


class Pin:
    """A connection in a transaction that only reads: it sees one commit. It goes back when nobody holds this object.

    Args:
        connection: the connection.
        idle: where it goes back to.
    """

    def __init__(self, connection: Connection, idle: _Idle) -> None:
        self.connection = connection
        weakref.finalize(self, idle.give_back, connection)
        connection.rows("BEGIN")
        connection.rows("SELECT count(*) FROM setting")  # the transaction begins with what is read first


class _Idle:
    """Connections that nobody uses at the moment."""

    def __init__(self) -> None:
        self._connections: list[Connection] = []
        self._is_closed = False

    def take(self) -> Connection | None:
        """One of them; None if there is none."""
        return self._connections.pop() if self._connections else None

    def give_back(self, connection: Connection) -> None:
        """Keeps a connection for the next who needs one, or closes it."""
        connection.end()
        if self._is_closed or len(self._connections) >= _KEPT:
            connection.close()
        else:
            self._connections.append(connection)

    def close(self) -> None:
        """Closes them, and those that come back later."""
        self._is_closed = True
        with ExitStack() as stack:
            while connection := self.take():
                stack.callback(connection.close)


def check_format(connection: Connection) -> None:
    """Refuses every file that is not a bank of the present format.

    Raises:
        BankError: for another file or format.
        DamageError: for another schema.
    """
    path = connection.path
    [(application,)] = connection.rows("PRAGMA application_id")
    if application != APPLICATION:
        raise BankError(f"{path} is not a memory bank; name the file of one, or another name for a new bank")
    [(version,)] = connection.rows("PRAGMA user_version")
    if version != SCHEMA_VERSION:
        raise BankError(
            f"{path} has format {version}, and this version of mac_rag reads format {SCHEMA_VERSION}; read it with the "
            "version that wrote it, or adapt to the documents again into a new bank"
        )
    found = connection.rows("SELECT sql FROM sqlite_schema WHERE sql IS NOT NULL")
    if {sql for (sql,) in found} != set(SCHEMA) or len(found) != len(SCHEMA):
        raise DamageError(f"{path} has tables that no memory bank has; restore it from a backup")


def _new_file(path: Path, settings: SettingsRow, *, durable: bool = True) -> None:
    """Writes a database without documents, in one file, on the disk."""
    os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
    connection = sqlite3.connect(path, isolation_level=None)
    try:
        for setting in (
            f"synchronous = {'FULL' if durable else 'OFF'}",
            f"page_size = {_PAGE}",
            "auto_vacuum = INCREMENTAL",
            f"application_id = {APPLICATION}",
            f"user_version = {SCHEMA_VERSION}",
        ):
            connection.execute(f"PRAGMA {setting}")
        connection.execute("BEGIN")
        for statement in SCHEMA:
            connection.execute(statement)
        connection.execute(PUT_SETTINGS, settings)
        connection.execute("COMMIT")
    finally:
        connection.close()


def _remove(path: Path) -> None:
    """Removes a database with the files beside it."""
    for ending in ("", WAL, SHM, "-journal"):
        path.with_name(path.name + ending).unlink(missing_ok=True)


def _size(path: Path, ending: str) -> int:
    with suppress(OSError):
        return path.with_name(path.name + ending).stat().st_size
    return 0


class WriterLock:
    """The right to write to a file or folder. Creating the object acquires it; it waits a little for another holder.

    The lock is in a file beside it, which tells who holds it.

    Args:
        path: the file or folder.

    Raises:
        BankError: when another process holds the lock; names the process.
    """

    def __init__(self, path: Path, *, wait: float = 1.0) -> None:
        self._path = path.with_name(path.name + LOCK)
        self._process = os.getpid()
        # Not bound to this thread: a bank may be opened in one thread and closed in another.
        self._lock = FileLock(self._path, mode=0o600, thread_local=False)
        try:
            while True:
                before = _identity(self._path)
                self._lock.acquire(timeout=wait, poll_interval=0.02)
                self._file = _identity(self._path)
                if self._file is not None and self._file == before:
                    break
                self._lock.release()  # its file has come or gone meanwhile, so another may be locked
            self._sign()
        except Timeout:
            raise BankError(
                f"{path} is open for writing in {self._holder()}; wait until it is done, or close the bank there"
            ) from None
        except OSError as error:
            raise BankError(f"{path} cannot be written to: {error.strerror or error}") from error
        except BaseException:
            self._lock.release()
            raise

    def _sign(self) -> None:
        with suppress(OSError), open(self._path, "r+b", opener=private) as file:
            since = datetime.now(UTC).isoformat(timespec="seconds")
            file.write(f"process {self._process} since {since}\n".encode())
            file.truncate()

    def _holder(self) -> str:
        try:
            with open(self._path, errors="replace") as file:
                note = file.read(200).strip()
        except OSError:
            note = ""
        return note if re.fullmatch(r"process \d+ since [0-9T:+-]+", note) else "another process"

    def check(self) -> None:
        """Makes sure that the lock still keeps others out.

        Raises:
            BankError: in a process that was forked after the lock was acquired; when the lock's file was removed or
                replaced, so that another process can hold a lock of the same name.
        """
        if os.getpid() != self._process:
            raise BankError(
                f"{self._path} was locked by process {self._process}, from which this process was forked; only that "
                "one may write; open the bank after the fork, in one process"
            )
        if _identity(self._path) != self._file:
            raise BankError(
                f"{self._path} was removed or replaced while this process held the lock, so another process may be "
                "writing; close the bank, open it again and repeat the change"
            )

    def release(self) -> None:
        """Releases the lock. A second call does nothing, nor does one in a process that was forked from the holder."""
        if os.getpid() == self._process and self._lock.is_locked:
            try:
                with suppress(OSError):
                    if _identity(self._path) == self._file:
                        self._path.unlink()
            finally:
                self._lock.release()


def _identity(path: Path) -> tuple[int, int] | None:
    """What tells a file from others that had its name, as long as it is open; None if there is none."""
    with suppress(OSError):
        status = path.stat()
        return status.st_dev, status.st_ino
    return None
