"""Files behind a URL, through fsspec: read whole or in ranges, and written, with bounded retries.

Nothing here trusts the store: what it sends is held against digests by whoever asks.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeVar

from mac_rag.errors import BankError, DamageError

_Result = TypeVar("_Result")

# Seconds before the second attempt, the third, and so on; most are drawn shorter, so that clients do not come together.
WAITS = (0.2, 1.0, 4.0)
# Seconds after which nothing is tried again: file systems make attempts of their own, and some wait long.
_PATIENCE = 10.0
# Bytes of one request, and of all requests that are made at a time.
_PIECE = 8 << 20
_BATCH = 64 << 20
_LONGEST_REASON = 300


class Range(NamedTuple):
    """Bytes of a file.

    Attributes:
        name: name of the file.
        start: the first byte.
        stop: the first byte behind them.
    """

    name: str
    start: int
    stop: int


class ObjectStore:
    """The files under a URL. Credentials and endpoints are those that fsspec finds, as in the environment.

    Args:
        url: the URL of a folder.
        waits: seconds before each further attempt, after what may pass: time-outs, broken connections, answers 5xx.

    Attributes:
        url: the URL, without a slash at its end.
        requests: number of requests so far that read.
        received: bytes that they gave.

    Raises:
        BankError: for a URL with a password or a query, of an unknown protocol, or of one whose package is missing.
    """

    def __init__(self, url: str, *, waits: Sequence[float] = WAITS) -> None:
        self.url = url.rstrip("/")
        self.requests = 0
        self.received = 0
        self._waits = waits
        _refuse_secrets(self.url)
        self._process = os.getpid()
        self._fs, self._root = _filesystem(self.url)

    def place(self, name: str) -> str:
        """URL of a file."""
        return f"{self.url}/{name}"

    def read(self, name: str, limit: int) -> bytes:
        """A whole file of at most `limit` bytes, in one request.

        Raises:
            FileNotFoundError: when it is missing.
            BankError: when it cannot be read.
            DamageError: when it is larger.
        """
        data: bytes = self._retried(name, lambda: self._fs.cat_file(self._path(name), start=0, end=limit + 1))
        self._count(1, len(data))
        if len(data) > limit:
            raise DamageError(f"{self.place(name)} has more than {limit:,} bytes, which are the most that are read")
        return data

    def download(self, name: str, file: BinaryIO, limit: int) -> None:
        """Writes a whole file of at most `limit` bytes to a file; a small one takes one request.

        Raises:
            FileNotFoundError, BankError, DamageError: as `read`.
        """
        end = min(_PIECE, limit + 1)
        first: bytes = self._retried(name, lambda: self._fs.cat_file(self._path(name), start=0, end=end))
        self._count(1, len(first))
        first = first[:end]  # a web server without ranges gives all
        size = len(first) if len(first) < _PIECE else self.size(name)
        if size > limit:
            raise DamageError(f"{self.place(name)} has {size:,} bytes, and {limit:,} are the most that are read")
        file.write(first[:size])
        for start in range(_PIECE, size, _BATCH):
            [data] = self.ranges([Range(name, start, min(start + _BATCH, size))])
            file.write(data)

    def size(self, name: str) -> int:
        """Bytes of a file.

        Raises:
            FileNotFoundError, BankError: as `read`.
        """
        info = self._retried(name, lambda: self._fs.info(self._path(name)))
        self._count(1, 0)
        if info["size"] is None:
            raise BankError(f"{self.place(name)} is of a size that the store does not tell; use another store")
        return int(info["size"])

    def ranges(self, wanted: Sequence[Range]) -> list[bytes]:
        """Some ranges, several at a time. What comes has the length that was asked for.

        Raises:
            FileNotFoundError: when a file is missing.
            BankError: when one cannot be read.
            DamageError: when one ends before.
        """
        pieces = [
            Range(name, first, min(first + _PIECE, stop))
            for name, start, stop in wanted
            for first in range(start, stop, _PIECE)
        ]
        found = iter(self._pieces(pieces))
        return [b"".join(next(found) for _ in range(start, stop, _PIECE)) for _, start, stop in wanted]

    def _pieces(self, wanted: Sequence[Range]) -> list[bytes]:
        found: list[bytes] = [b""] * len(wanted)
        left = list(range(len(wanted)))

        def attempt() -> None:
            nonlocal left
            paths, starts, stops = zip(*((self._path(name), start, stop) for name, start, stop in map(get, left)))
            got = self._fs.cat_ranges(list(paths), list(starts), list(stops), on_error="return")
            self._count(len(left), sum(len(each) for each in got if isinstance(each, bytes)))
            failed = {}
            for number, data in zip(left, got, strict=True):
                name, start, stop = wanted[number]
                if isinstance(data, BaseException):
                    failed[number] = data
                elif len(data) != stop - start:
                    failed[number] = DamageError(
                        f"{self.place(name)} gave {len(data):,} bytes for its bytes {start:,} to {stop:,}: it is not "
                        "the file that was uploaded, or the store serves no ranges"
                    )
                else:
                    found[number] = data
            left = list(failed)
            if failed:
                # What cannot pass comes first, so that it is not tried again.
                raise min(failed.values(), key=_may_pass)

        get = wanted.__getitem__
        if left:
            self._retried(wanted[0].name, attempt)
        return found

    def sizes(self) -> dict[str, int]:
        """Names of all files under the URL and their bytes; none where there is no such folder.

        Raises:
            BankError: when they cannot be listed.
        """
        self._fs_of_process().invalidate_cache()
        try:
            entries = self._retried("", lambda: self._fs.ls(self._root, detail=True))
        except FileNotFoundError:
            return {}
        files = (entry for entry in entries if entry.get("type") == "file")
        return {str(entry["name"]).rstrip("/").rpartition("/")[2]: int(entry["size"] or 0) for entry in files}

    def put(self, name: str, path: Path) -> None:
        """Uploads a file.

        Raises:
            FileNotFoundError: when `path` is missing.
            BankError: when it cannot be written.
        """
        path.stat()
        self._retried(name, lambda: self._fs.put_file(str(path), self._path(name)), "written")

    def write(self, name: str, data: bytes) -> None:
        """Writes a small file; on an object store, all of it appears at once.

        Raises:
            BankError: when it cannot be written.
        """
        self._retried(name, lambda: self._fs.pipe_file(self._path(name), data), "written")

    def remove(self, name: str) -> None:
        """Removes a file; one that is not there any more is no error.

        Raises:
            BankError: when it cannot be removed.
        """
        try:
            self._retried(name, lambda: self._fs.rm_file(self._path(name)), "removed")
        except FileNotFoundError:
            return

    def make_folder(self) -> None:
        """Makes the folder where the protocol has folders; an object store has none."""
        self._retried("", lambda: self._fs.makedirs(self._root, exist_ok=True), "written")

    def _retried(self, name: str, call: Callable[[], _Result], what: str = "read") -> _Result:
        began = time.monotonic()
        for wait in (*self._waits, None):
            self._fs_of_process()
            try:
                return call()
            except Exception as error:  # each file system has errors of its own
                if isinstance(error, FileNotFoundError):
                    raise FileNotFoundError(2, "there is no such object", self.place(name)) from error
                if wait is None or not _may_pass(error) or time.monotonic() - began > _PATIENCE:
                    raise self._refusal(name, error, what) from error
            time.sleep(wait * random.uniform(0.5, 1))
        raise AssertionError("the last attempt returns or raises")

    def _refusal(self, name: str, error: BaseException, what: str) -> BankError:
        if isinstance(error, BankError):
            return error
        reason = f"{type(error).__name__}: {error}"[:_LONGEST_REASON]
        remedy = "check the connection and the endpoint, and try again"
        if isinstance(error, PermissionError):
            remedy = "check credentials and permissions, and that it is there: some stores refuse what is missing"
        elif "Credentials" in type(error).__name__:
            remedy = "give credentials in the environment, as fsspec and the store's own tools read them"
        return BankError(f"{self.place(name).rstrip('/')} cannot be {what} ({reason}); {remedy}")

    def _fs_of_process(self) -> Any:
        """The file system; a fork needs one of its own, because its connections belong to threads that it has not."""
        if self._process != os.getpid():
            self._process = os.getpid()
            self._fs, self._root = _filesystem(self.url)
        return self._fs

    def _path(self, name: str) -> str:
        return f"{self._root.rstrip('/')}/{name}"

    def _count(self, requests: int, received: int) -> None:
        self.requests += requests
        self.received += received


def _may_pass(error: BaseException) -> bool:
    """True if another attempt may do better."""
    lasting = (FileNotFoundError, PermissionError, NotImplementedError, IsADirectoryError, NotADirectoryError)
    return not isinstance(error, lasting) and "Credentials" not in type(error).__name__


def _filesystem(url: str) -> tuple[Any, str]:
    """The file system of a URL, and the path there."""
    protocol = url.partition(":")[0]
    try:
        from fsspec.core import url_to_fs

        fs, path = url_to_fs(url)
    except ImportError as error:
        raise BankError(
            f"{url} needs a package that is not installed ({error}); pip install 'mac-rag[remote]' brings fsspec and "
            "s3fs, for s3://; other protocols have packages of their own, as gcsfs for gs:// and adlfs for az://"
        ) from error
    except ValueError as error:
        raise BankError(f"{url}: fsspec knows no protocol {protocol!r} ({error})"[:_LONGEST_REASON]) from error
    except Exception as error:
        raise BankError(f"{url} cannot be opened ({type(error).__name__}: {error})"[:_LONGEST_REASON]) from error
    return fs, str(path)


def _refuse_secrets(url: str) -> None:
    protocol, _, rest = url.partition("://")
    user, _, host = rest.partition("/")[0].rpartition("@")
    if ":" in user:
        raise BankError(
            f"a URL of {protocol}:// has a password, which would be printed with every error; leave it out, and give "
            "credentials in the environment"
        )
    if protocol in ("http", "https") and ("?" in rest or "#" in rest):
        raise BankError(
            f"the URL of a bank on {host} has a query or a fragment, behind which its files cannot be named; give "
            "that of a folder"
        )
