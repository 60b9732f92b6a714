"""Copies a bank from a URL to a folder and back: whole files through fsspec, compared with the manifest's digests.

The manifest is written last on either side. So both hold one commit or the next, and a copy that was interrupted goes
on when it is repeated. Credentials and endpoints are those that fsspec finds, as in the environment.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mac_rag.atomic_files import make_folder, remove_file, sync_folder, write_file
from mac_rag.errors import BankError, DamageError, FingerprintError
from mac_rag.memory.storage.commit_reader import check_consistency, read_files
from mac_rag.memory.storage.folder import (
    CODEBOOK_FILE,
    SEGMENT_FILE,
    exists,
    file_errors,
    is_vacant,
    local_folder,
    remove_unused,
    remove_vacant,
)
from mac_rag.memory.storage.lock import WriterLock
from mac_rag.memory.storage.manifest import (
    LARGEST,
    MANIFEST,
    Manifest,
    decode_manifest,
    read_manifest,
    write_manifest,
)
from mac_rag.memory.storage.store import Store
from mac_rag.shipped_models import describe
from mac_rag.untrusted_files import MalformedError, file_digest

_PIECE = 8 << 20
_LONGEST_REASON = 300


def pull(url: str, folder: str | Path) -> int:
    """Fetches the bank at a URL into a folder. Files that the folder has already are not fetched again.

    A bank that is in the folder becomes the fetched one in one commit, to which its readers go on as to any other.

    Args:
        url: URL of a folder, as `push` fills it.
        folder: a new or empty folder, or one that holds an earlier commit of the bank.

    Returns:
        The number of documents.

    Raises:
        BankError: when there is no bank at the URL, it cannot be read, the folder holds other files or a later commit,
            or another process writes to it.
        DamageError: when a file at the URL is not what its manifest says.
        FingerprintError: when the folder holds a bank of another model.
    """
    folder, remote = local_folder(folder), _Remote(url)
    if not exists(folder) and not is_vacant(folder):
        raise BankError(f"{folder} is not empty and holds no memory bank; choose a new folder")
    with file_errors(folder, "written to"):
        is_new = not folder.exists()
        make_folder(folder)
        lock = WriterLock(folder)
        try:
            return _pull(remote, folder)
        finally:
            lock.release()
            remove_vacant(folder, is_new)


def _pull(remote: _Remote, folder: Path) -> int:
    try:
        former = read_manifest(folder / MANIFEST)
    except FileNotFoundError:
        former = None
    while True:
        manifest = remote.manifest()
        if manifest is None:
            raise BankError(f"there is no memory bank at {remote.url}; put one there: mac-rag bank push FOLDER URL")
        _check_succession(manifest, remote.url, former, folder)
        try:
            for name, digest in manifest.digests.items():
                if not _is(folder / name, digest):
                    remote.fetch(name, folder / name, digest, secure_delete=manifest.secure_delete)
            break
        except FileNotFoundError as error:
            if remote.manifest() == manifest:  # otherwise somebody has pushed a new commit meanwhile
                raise DamageError(f"{error.filename} is missing; push the bank again: mac-rag bank push") from error
    commit = read_files(folder, manifest)
    check_consistency(folder, *commit)
    if manifest != former:
        sync_folder(folder)
        write_manifest(folder, manifest)
        sync_folder(folder.parent)
    remove_unused(folder, manifest.digests, secure_delete=manifest.secure_delete)
    return sum(segment.documents for segment in commit.segments)


def push(folder: str | Path, url: str) -> int:
    """Puts the last commit of a bank at a URL; later, only what is new in it. Others may write to the bank meanwhile.

    One process pushes to a URL at a time: object stores have no locks.

    Args:
        folder: folder of the bank.
        url: URL of a folder: an empty one, or one that holds an earlier commit of the bank.

    Returns:
        The number of documents.

    Raises:
        BankError: when there is no bank in the folder, it overwrites what it deletes, the URL holds a later commit or
            cannot be written.
        DamageError: when a file of the bank is not what was written.
        FingerprintError: when the URL holds a bank of another model.
    """
    folder, remote = local_folder(folder), _Remote(url)
    bank = Store.open(folder, write=False)
    if bank.manifest.secure_delete:
        raise BankError(
            f"{folder} overwrites what it deletes, and no object can be overwritten; keep it in folders, or make a "
            "bank without --secure-delete: mac-rag bank rebuild"
        )
    former = remote.manifest()
    known = set() if former is None else set(former.digests.items())
    there = remote.sizes()
    while True:
        _check_succession(bank.manifest, folder, former, remote.url)
        try:
            for name, digest in bank.manifest.digests.items():
                # Names of segments are random, so a file of the same name and size is the same.
                is_there = there.get(name) == (folder / name).stat().st_size
                if not (is_there and (SEGMENT_FILE.fullmatch(name) or (name, digest) in known)):
                    remote.put(folder / name, digest)
            break
        except FileNotFoundError as error:
            if not bank.refresh():
                raise DamageError(f"{error.filename} is missing; repair the bank") from error
    remote.write(MANIFEST, bank.manifest.encoded())
    for name in there.keys() - bank.manifest.digests.keys():
        if SEGMENT_FILE.fullmatch(name) or CODEBOOK_FILE.fullmatch(name):
            remote.remove(name)
    return sum(segment.documents for segment in bank.segments)


def _check_succession(new: Manifest, source: Path | str, former: Manifest | None, target: Path | str) -> None:
    """Refuses to replace a bank by something that is not a later commit of it."""
    if former is None or former == new:
        return
    if former.fingerprint != new.fingerprint:
        raise FingerprintError(
            f"{target} holds a bank of {describe(former.fingerprint)}, and {source} one of "
            f"{describe(new.fingerprint)}; choose another place"
        )
    if former.generation >= new.generation:
        raise BankError(
            f"{target} is at generation {former.generation:,} and {source} at {new.generation:,}, so it is an older "
            "state of it, or another bank; choose another place"
        )


def _is(path: Path, digest: str) -> bool:
    try:
        return file_digest(path) == digest
    except (FileNotFoundError, MalformedError):
        return False


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

    def manifest(self) -> Manifest | None:
        """The manifest of the last commit that was pushed; None where there is none."""
        place = f"{self.url}/{MANIFEST}"
        self._fs.invalidate_cache()
        try:
            with self._errors(MANIFEST, "read"), self._open(MANIFEST) as file:
                data = file.read(LARGEST + 1)
        except FileNotFoundError:
            return None
        if len(data) > LARGEST:
            raise DamageError(f"{place} has more than {LARGEST:,} bytes, which are the most that are read")
        return decode_manifest(data, place)

    def sizes(self) -> dict[str, int]:
        """Bytes of each file, by its name; none where there is no such folder."""
        self._fs.invalidate_cache()
        try:
            with self._errors("", "read"):
                entries = self._fs.ls(self._root, detail=True)
        except FileNotFoundError:
            return {}
        return {entry["name"].rpartition("/")[2]: entry["size"] for entry in entries if entry["type"] == "file"}

    def fetch(self, name: str, path: Path, digest: str, *, secure_delete: bool) -> None:
        """Writes a file to a path if it is what its digest says."""

        def pieces() -> Iterator[bytes]:
            with self._errors(name, "read"), self._open(name) as file:
                while piece := file.read(_PIECE):
                    yield piece

        if write_file(path, pieces(), secure_delete=secure_delete) != digest:
            remove_file(path, secure_delete=secure_delete)
            raise DamageError(
                f"{self.url}/{name} differs from what its manifest says; remove it, and push the bank again: "
                "mac-rag bank push"
            )

    def put(self, path: Path, digest: str) -> None:
        """Uploads a file if it is what its digest says."""
        if not _is(path, digest):
            path.stat()  # raises FileNotFoundError if a writer has removed it
            raise DamageError(f"{path} is damaged: its checksum differs from the manifest's; repair the bank")
        try:
            with self._errors(path.name, "written"):
                self._fs.makedirs(self._root, exist_ok=True)
                self._fs.put_file(str(path), self._path(path.name))
        except BankError:
            path.stat()  # likewise
            raise

    def write(self, name: str, data: bytes) -> None:
        """Writes a small file."""
        with self._errors(name, "written"):
            self._fs.makedirs(self._root, exist_ok=True)
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
                raise FileNotFoundError(2, "there is no such object", place) from error
            reason = f"{type(error).__name__}: {error}"[:_LONGEST_REASON]
            raise BankError(
                f"{place} cannot be {what} ({reason}); check the connection, the endpoint and the credentials in the "
                "environment, and try again"
            ) from error
