"""The folder of a bank: names of its files, what makes it a bank, and errors of the file system that name it."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from mac_rag.atomic_files import UNFINISHED
from mac_rag.errors import BankError
from mac_rag.memory.storage.lock import HOLDER, LOCK
from mac_rag.memory.storage.manifest import FORMERS, MANIFEST

CODEBOOK = "codebook.safetensors"
CODEBOOK_COPY = "codebook.copy.safetensors"
QUARANTINE = "quarantine"  # folder of what a repair has dropped
_SEGMENT_FILE = re.compile(r"segment-[0-9a-f]{16}\.(safetensors|jsonl|texts\.jsonl)")
# All names of unfinished files; together with unused segments they are the only files that are ever deleted.
_UNFINISHED_FILE = re.compile(
    rf"({_SEGMENT_FILE.pattern}|(manifest|codebook)[a-z.]*|writer\.json){UNFINISHED}|{'|'.join(FORMERS)}"
)


def exists(folder: Path) -> bool:
    """True if the folder holds a bank, even one that lost its manifest.

    Raises:
        BankError: when the folder cannot be read.
    """
    with file_errors(folder, "read"):
        return (folder / MANIFEST).is_file() or (
            folder.is_dir() and any(_SEGMENT_FILE.fullmatch(file.name) for file in folder.iterdir())
        )


def is_vacant(folder: Path) -> bool:
    """True if a new bank can be made in the folder: there is none, or nothing in it but what a killed writer left.

    Raises:
        BankError: when the folder cannot be read.
    """
    with file_errors(folder, "read"):
        return not folder.exists() or (
            folder.is_dir()
            and all(file.name in (LOCK, HOLDER) or _UNFINISHED_FILE.fullmatch(file.name) for file in folder.iterdir())
        )


def remove_vacant(folder: Path, is_new: bool) -> None:
    """Removes what the attempt to make a bank has left, so that the next attempt finds the folder as this one did."""
    with suppress(OSError, BankError):
        if is_vacant(folder):
            for name in (HOLDER, LOCK):
                (folder / name).unlink(missing_ok=True)
            if is_new:
                folder.rmdir()


def remove_unused(folder: Path, used: Collection[str]) -> None:
    """Removes segments and unfinished files whose names are not in `used`, as far as the system lets it."""
    with suppress(OSError):
        for file in folder.iterdir():
            if file.name not in used and (_SEGMENT_FILE.fullmatch(file.name) or _UNFINISHED_FILE.fullmatch(file.name)):
                with suppress(OSError):
                    file.unlink()


@contextmanager
def file_errors(folder: Path, what: str) -> Iterator[None]:
    """Turns errors of the file system into errors that name the bank: it "cannot be {what}"."""
    try:
        yield
    except OSError as error:
        raise BankError(f"{folder} cannot be {what}: {error}") from error
