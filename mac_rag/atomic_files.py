"""Files that are complete after a crash: written under another name, synced, renamed; sealed by a checksum.

Their content comes from documents, so only their user can read them: a file gets the mode 0600 and a folder 0700, or
less if the umask allows less. An existing folder keeps its mode.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import stat
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, BinaryIO

from mac_rag.errors import ConfigError
from mac_rag.untrusted_files import MalformedError, parse_json

# Ending of an unfinished file, which gets its final name when all of it is on the disk.
UNFINISHED = ".new"
# Ending of a replaced file until it is overwritten.
REPLACED = ".replaced"
_PIECE = 1 << 20


def write_file(path: Path, pieces: Iterable[bytes | memoryview], *, secure_delete: bool = False) -> str:
    """Writes a file atomically: under its name stands either the old content or all of the new.

    After an error, the old file is in place, and nothing of the new one. Call `sync_folder` to make the name last.

    Args:
        path: the file.
        pieces: its content.
        secure_delete: True to overwrite the file that is removed: the old one or, after an error, the new one.

    Returns:
        Its sha256.
    """
    digest = hashlib.sha256()
    unfinished = path.with_name(path.name + UNFINISHED)
    try:
        with _new_file(unfinished, secure_delete) as file:
            for piece in pieces:
                digest.update(piece)
                file.write(piece)
            file.flush()
            os.fsync(file.fileno())
        replace_file(unfinished, path, secure_delete=secure_delete)
    except BaseException:
        with suppress(OSError):
            remove_file(unfinished, secure_delete=secure_delete)
        raise
    return digest.hexdigest()


def _new_file(path: Path, secure_delete: bool) -> BinaryIO:
    """Opens a new file for writing. Removes an existing file of this name first, and follows no link."""
    remove_file(path, secure_delete=secure_delete)
    return open(path, "xb", opener=private)


def replace_file(new: Path, path: Path, *, secure_delete: bool = False) -> None:
    """Renames a file to `path`, in place of the file that has this name.

    Args:
        new: the file.
        path: its new name.
        secure_delete: True to overwrite the replaced file. Until that is done, its name is `path` with the ending
            `.replaced`, and it keeps that name if the system refuses to overwrite it. On a file system without hard
            links, it is not overwritten.
    """
    if not secure_delete:
        new.replace(path)
        return
    former = path.with_name(path.name + REPLACED)
    remove_file(former, secure_delete=True)
    with suppress(OSError):
        former.hardlink_to(path)
    new.replace(path)
    with suppress(OSError):
        remove_file(former, secure_delete=True)


def remove_file(path: Path, *, secure_delete: bool = False) -> None:
    """Removes a file if it exists.

    Args:
        path: the file.
        secure_delete: True to overwrite it with zeros on the disk first. A file with a second name (a hard link) is
            somebody's copy: it is not overwritten, and only loses this name.

    Raises:
        OSError: if the system refuses it. The file is then still there, and the call can be repeated.
    """
    if secure_delete:
        with suppress(FileNotFoundError):
            status = path.lstat()
            if stat.S_ISREG(status.st_mode) and status.st_nlink == 1:
                overwrite(path)
    path.unlink(missing_ok=True)


def overwrite(path: Path) -> None:
    """Overwrites a file with zeros on the disk.

    Raises:
        OSError: if the system refuses it, or the file is a symbolic link.
    """
    with open(path, "r+b", opener=lambda name, flags: os.open(name, flags | getattr(os, "O_NOFOLLOW", 0))) as file:
        left = os.fstat(file.fileno()).st_size
        while left > 0:
            file.write(bytes(min(left, _PIECE)))
            left -= _PIECE
        file.flush()
        os.fsync(file.fileno())


def private(path: str, flags: int) -> int:
    """An opener for `open`: only its user can read a file that it creates."""
    return os.open(path, flags, 0o600)


def make_folder(path: Path) -> None:
    """Creates a folder that only its user can enter, with missing parents. Does nothing if the folder exists."""
    if not path.parent.exists():
        make_folder(path.parent)
    path.mkdir(mode=0o700, exist_ok=True)


def make_writable_folder(path: Path) -> None:
    """As `make_folder`; also checks that files can be created in the folder.

    Raises:
        ConfigError: for a folder that cannot be created or written.
    """
    try:
        make_folder(path)
        with TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be written: {error.strerror}; give another folder, or make this one writable for the user "
            "who runs this process"
        ) from None


def copy_file(source: Path, path: Path, *, secure_delete: bool = False) -> None:
    """Copies a file of any size, and writes `path` as `write_file` does."""
    with source.open("rb") as file:
        write_file(path, iter(lambda: file.read(_PIECE), b""), secure_delete=secure_delete)


def write_text(path: Path, text: str) -> str:
    """Writes a text as UTF-8 and syncs its folder; after a crash, the file is complete, old or new.

    Returns:
        The sha256 of its bytes.
    """
    digest = write_file(path, [text.encode()])
    sync_folder(path.parent)
    return digest


@contextmanager
def write_folder(path: Path) -> Iterator[Path]:
    """Yields a new folder to fill, and renames it to `path` at the end of the block, in place of an older folder.

    After a crash, `path` is the old folder, the complete new one, or missing; never a part of one. After an error in
    the block, it is the old folder.
    """
    new, old = (path.with_name(f".{path.name}{ending}") for ending in (UNFINISHED, ".old"))
    for leftover in (new, old):
        shutil.rmtree(leftover, ignore_errors=True)
    new.mkdir(parents=True)
    yield new
    for file in new.rglob("*"):
        if file.is_file():
            with file.open("rb") as written:
                os.fsync(written.fileno())
    if path.exists():
        path.rename(old)
    new.rename(path)
    sync_folder(path.parent)
    shutil.rmtree(old, ignore_errors=True)


def sync_folder(folder: Path) -> None:
    """Syncs the names in a folder to the disk, if the system can."""
    if os.name != "posix":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sealed(content: Mapping[str, Any]) -> bytes:
    """One line of JSON that ends with its own checksum."""
    digest = hashlib.sha256(_json(content)).hexdigest()
    return _json({**content, "sha256": digest})


def unsealed(data: bytes) -> dict[str, Any]:
    """The content of a sealed line.

    Raises:
        MalformedError: if the line is not, byte for byte, what `sealed` wrote.
    """
    content = parse_json(data)
    if not isinstance(content, dict):
        raise MalformedError("it is not a JSON object")
    content.pop("sha256", None)
    if sealed(content) != data:
        raise MalformedError("its checksum differs")
    return content


def _json(content: Mapping[str, Any]) -> bytes:
    return json.dumps(content, separators=(",", ":")).encode()
