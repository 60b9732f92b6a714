"""The folder of a bank: names of its files, what makes it a bank, and errors of the file system that name it."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from mac_rag.atomic_files import REPLACED, UNFINISHED, remove_file
from mac_rag.errors import BankError
from mac_rag.memory.storage.lock import HOLDER, LOCK
from mac_rag.memory.storage.manifest import FORMERS, MANIFEST
from mac_rag.memory.storage.model_name import MODEL_NAME

QUARANTINE = "quarantine"  # folder of what a repair has dropped
SEGMENT_FILE = re.compile(r"segment-[0-9a-f]{16}\.(safetensors|jsonl|texts\.jsonl|index)")
# One letter in front of the colon is a drive of Windows.
_URL = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]+:/")
CODEBOOK_FILE = re.compile(r"codebook(-[0-9a-f]{16})?(\.copy)?\.safetensors")
# All names of unfinished and replaced files; beside unused segments and quantizers they are all that is ever deleted.
_UNFINISHED_FILE = re.compile(
    rf"({SEGMENT_FILE.pattern}|manifest[a-z.]*|{CODEBOOK_FILE.pattern}|writer\.json|{re.escape(MODEL_NAME)})"
    rf"({UNFINISHED}|{REPLACED})"
    rf"|{'|'.join(FORMERS)}"
)


def local_folder(place: str | Path) -> Path:
    """The folder of a bank.

    Raises:
        BankError: for a URL.
    """
    if _URL.match(str(place)):
        url = re.sub(r":/+", "://", str(place), count=1)  # a path has lost a slash
        raise BankError(
            f"{url} is a URL, and a bank is used in a folder: fetch it with mac-rag bank pull {url} FOLDER, and put it "
            f"back with mac-rag bank push FOLDER {url}"
        )
    return Path(place)


def exists(folder: Path) -> bool:
    """True if the folder holds a bank, even one that lost its manifest, or has something else in its place.

    Raises:
        BankError: for what is no folder, and where the system does not say what lies in it.
    """
    with _unreadable(folder):
        try:
            (folder / MANIFEST).lstat()  # which also works in a folder that must not be listed
            return True
        except FileNotFoundError:
            return any(SEGMENT_FILE.fullmatch(name) for name in _names(folder))


def check_exists(folder: Path) -> None:
    """Refuses a folder that holds no bank.

    Raises:
        BankError: for such a folder, and as `exists`.
    """
    if not exists(folder):
        raise BankError(f"there is no memory bank in {folder}")


def is_vacant(folder: Path) -> bool:
    """True if a new bank can be made in the folder: there is none, or nothing in it but what a killed writer left.

    Raises:
        BankError: as `exists`.
    """
    with _unreadable(folder):
        return all(name in (LOCK, HOLDER) or _UNFINISHED_FILE.fullmatch(name) for name in _names(folder))


def _names(folder: Path) -> list[str]:
    """Names of what lies in a folder; none for a folder that does not exist."""
    try:
        return os.listdir(folder)
    except FileNotFoundError:
        return []


@contextmanager
def _unreadable(folder: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError) as error:  # ValueError for NUL in its name
        reason = (isinstance(error, OSError) and error.strerror) or error
        raise BankError(f"{str(folder)!r} cannot be read as the folder of a memory bank: {reason}") from error


def remove_vacant(folder: Path, is_new: bool) -> None:
    """Removes what the attempt to make a bank has left, so that the next attempt finds the folder as this one did."""
    with suppress(OSError, BankError):
        if is_vacant(folder):
            for name in (HOLDER, LOCK):
                (folder / name).unlink(missing_ok=True)
            if is_new:
                folder.rmdir()


def remove_unused(folder: Path, used: Collection[str], *, secure_delete: bool) -> OSError | None:
    """Removes segments, quantizers and unfinished files whose names are not in `used`, as far as the system lets it.

    A folder of such a name stays: no bank has made it.

    Returns:
        The first error, if some are still there.
    """
    first: OSError | None = None
    try:
        for file in folder.iterdir():
            ours = any(pattern.fullmatch(file.name) for pattern in (SEGMENT_FILE, CODEBOOK_FILE, _UNFINISHED_FILE))
            if ours and file.name not in used:
                try:
                    if stat.S_ISDIR(file.lstat().st_mode):
                        continue
                    remove_file(file, secure_delete=secure_delete)
                except OSError as error:
                    first = first or error
    except OSError as error:
        first = first or error
    return first


@contextmanager
def file_errors(folder: Path, what: str) -> Iterator[None]:
    """Turns errors of the file system into errors that name the bank: it "cannot be {what}"."""
    try:
        yield
    except OSError as error:
        raise BankError(f"{folder} cannot be {what}: {error}") from error
