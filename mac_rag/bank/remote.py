"""Copies a bank from a URL to a file and back, through fsspec: whole files, compared with their digest.

    bank.json              the last commit that was pushed: its digest, version and model
    bank-<digest>.sqlite   the bank

What `bank.json` names is written first. So the URL holds one commit or the next, and a copy that was interrupted is
made again. Credentials and endpoints are those that fsspec finds, as in the environment.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from mac_rag.atomic_files import make_folder, write_file
from mac_rag.bank.bank import MemoryBank, Settings, has_commit
from mac_rag.bank.copies import take_over
from mac_rag.bank.database import database_errors, local_path
from mac_rag.errors import BankError, DamageError, FingerprintError
from mac_rag.shipped_models import describe
from mac_rag.untrusted_files import MalformedError, file_digest, parse_json

_POINTER = "bank.json"
_LARGEST_POINTER = 1 << 16
_FILE = re.compile(r"bank-[0-9a-f]{64}\.sqlite")
_PIECE = 8 << 20
_LONGEST_REASON = 300


class _MissingError(Exception):
    """There is no such object; the message names it."""


class _Pushed(BaseModel):
    """What `bank.json` says."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    fingerprint: str
    version: Annotated[int, Field(ge=0)]
    writer: str

    @property
    def file(self) -> str:
        return f"bank-{self.sha256}.sqlite"


def pull(url: str, path: str | Path) -> int:
    """Fetches the bank at a URL into a file.

    A bank that is in the file becomes the fetched one in one commit, to which its readers go on as to any other.

    Args:
        url: URL of a folder, as `push` fills it.
        path: a new file, or one that holds an earlier commit of the bank.

    Returns:
        The number of documents.

    Raises:
        BankError: when there is no bank at the URL, it cannot be read, the file holds something else or a later commit,
            or another process writes to it.
        DamageError: when what is at the URL is not what was pushed.
        FingerprintError: when the file holds a bank of another model.
    """
    path, remote = local_path(path), _Remote(url)
    with database_errors(path, "written to"):
        make_folder(path.parent)
    with TemporaryDirectory(dir=path.parent, prefix=f".{path.name}-") as folder:
        copy = Path(folder) / "bank"
        while True:
            pushed = remote.pushed()
            if pushed is None:
                raise BankError(f"there is no memory bank at {remote.url}; put one there: mac-rag bank push FILE URL")
            try:
                with database_errors(path, "written to"):
                    remote.fetch(pushed.file, copy, pushed.sha256)
                break
            except _MissingError as error:
                if remote.pushed() == pushed:  # otherwise somebody has pushed a new commit meanwhile
                    raise DamageError(f"{error} is missing; push the bank again: mac-rag bank push") from error
        take_over(path, copy)
    with MemoryBank.open(path) as bank:
        return len(bank)


def push(path: str | Path, url: str) -> int:
    """Puts the last commit of a bank at a URL. Others may write to the bank meanwhile.

    One process pushes to a URL at a time: object stores have no locks.

    Args:
        path: file of the bank.
        url: URL of a folder: an empty one, or one that holds an earlier commit of the bank.

    Returns:
        The number of documents.

    Raises:
        BankError: when there is no bank in the file, or the URL holds a later commit or cannot be written.
        FingerprintError: when the URL holds a bank of another model.
    """
    path, remote = local_path(path), _Remote(url)
    former = remote.pushed()
    with MemoryBank.open(path) as bank, TemporaryDirectory() as folder:
        if former is not None:
            if former.fingerprint != bank.fingerprint:
                raise FingerprintError(
                    f"{remote.url} holds a bank of {describe(former.fingerprint)}, and {path} one of "
                    f"{describe(bank.fingerprint)}; choose another place"
                )
            if not has_commit(bank.connection, former.version, former.writer):
                raise BankError(
                    f"{remote.url} is at commit {former.version:,}, which {path} does not have: it holds a later "
                    "state, or another bank; choose another place"
                )
        copy = Path(folder) / "bank"
        bank.save(copy)
        settings = Settings.read(bank.connection)
        pushed = _Pushed(
            sha256=file_digest(copy), fingerprint=bank.fingerprint, version=settings.version, writer=bank.writer
        )
        is_there = former is not None and (former.version, former.writer) == (pushed.version, pushed.writer)
        files = remote.files()
        if former is None or not is_there or former.file not in files:
            remote.put(copy, pushed.file)
            remote.write(_POINTER, json.dumps(pushed.model_dump()).encode())
            former = pushed
        for name in files - {former.file}:  # also those of a push that was interrupted
            remote.remove(name)
        return len(bank)


class _Remote:
    """The files under a URL.

    Args:
        url: URL of a folder, without a password or a query.

    Raises:
        BankError: for a URL with either, one of an unknown protocol, or one whose package is missing.
    """

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        protocol, _, rest = self.url.partition("://")
        has_password = ":" in rest.partition("/")[0].rpartition("@")[0]
        if has_password or (protocol in ("http", "https") and "?" in rest):
            raise BankError(
                f"a URL of {protocol}:// has a password or a query, which would be printed with every error; leave it "
                "out, and give credentials in the environment"
            )
        try:
            from fsspec.core import url_to_fs

            self._fs, self._root = url_to_fs(self.url)
        except ImportError as error:
            raise BankError(
                f"{url} needs a package that is not installed ({error}); pip install 'mac-rag[remote]' brings fsspec "
                "and s3fs, for s3://; other protocols have packages of their own, as gcsfs for gs://"
            ) from error
        except Exception as error:  # each file system has errors of its own
            raise BankError(f"{url} cannot be opened ({error})"[:_LONGEST_REASON]) from error

    def pushed(self) -> _Pushed | None:
        """What was pushed last; None where there is nothing."""
        place = f"{self.url}/{_POINTER}"
        self._fs.invalidate_cache()
        try:
            with self._errors(_POINTER, "read"), self._open(_POINTER) as file:
                data = file.read(_LARGEST_POINTER + 1)
        except _MissingError:
            return None
        try:
            if len(data) > _LARGEST_POINTER:
                raise MalformedError(f"it has more than {_LARGEST_POINTER:,} bytes")
            return _Pushed.model_validate(parse_json(data))
        except (MalformedError, ValidationError) as error:
            reason = str(error)[:_LONGEST_REASON]
            raise DamageError(f"{place} is damaged: {reason}; remove it, and push the bank again") from error

    def fetch(self, name: str, path: Path, digest: str) -> None:
        """Writes a file to a path if it is what its digest says."""

        def pieces() -> Iterator[bytes]:
            with self._errors(name, "read"), self._open(name) as file:
                while piece := file.read(_PIECE):
                    yield piece

        if write_file(path, pieces()) != digest:
            raise DamageError(
                f"{self.url}/{name} differs from its digest; remove it, and push the bank again: mac-rag bank push"
            )

    def files(self) -> set[str]:
        """Names of the banks that are there."""
        try:
            with self._errors("", "read"):
                found = {str(place).rpartition("/")[2] for place in self._fs.ls(self._root, detail=False)}
        except _MissingError:
            return set()
        return set(filter(_FILE.fullmatch, found))

    def put(self, path: Path, name: str) -> None:
        """Uploads a file."""
        with self._errors(name, "written"):
            self._fs.makedirs(self._root, exist_ok=True)
            self._fs.put_file(str(path), self._path(name))

    def write(self, name: str, data: bytes) -> None:
        """Writes a small file."""
        with self._errors(name, "written"):
            self._fs.pipe_file(self._path(name), data)

    def remove(self, name: str) -> None:
        """Removes a file."""
        with self._errors(name, "removed"):
            self._fs.rm_file(self._path(name))

    def _path(self, name: str) -> str:
        return f"{str(self._root).rstrip('/')}/{name}"

    def _open(self, name: str) -> Any:
        return self._fs.open(self._path(name), "rb")

    @contextmanager
    def _errors(self, name: str, what: str) -> Iterator[None]:
        """Turns errors of a file system into errors that name the file: it "cannot be {what}"."""
        place = f"{self.url}/{name}".rstrip("/")
        try:
            yield
        except Exception as error:
            if isinstance(error, FileNotFoundError) and what == "read":
                raise _MissingError(place) from error
            reason = f"{type(error).__name__}: {error}"[:_LONGEST_REASON]
            raise BankError(
                f"{place} cannot be {what} ({reason}); check the connection, the endpoint and the credentials in the "
                "environment, and try again"
            ) from error
