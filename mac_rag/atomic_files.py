"""Files that are whole after a crash and known to be whole: written, renamed and synced; sealed by a checksum.

They hold what documents say. So only their user can read them: a file gets the mode 0600 and a folder 0700, or less
where the umask allows less. A folder that is there already keeps its mode.
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

# What an unfinished file is called; it gets its name when all of it is on the disk.
UNFINISHED = ".new"
# What a replaced file is called until it is overwritten.
REPLACED = ".replaced"
_PIECE = 1 << 20


def write_file(path: Path, pieces: Iterable[bytes | memoryview], *, secure_delete: bool = False) -> str:
    """Writes a file so that under its name there is never less than all of it. Needs `sync_folder` to last.

    After an error there is what was there before, and nothing of the new file.

    Args:
        path: the file.
        pieces: its content.
        secure_delete: True to overwrite what goes: the file that had this name, or, after an error, the new one.

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
    """Opens a new file for writing. What has its name is removed, and no link is followed."""
    remove_file(path, secure_delete=secure_delete)
    return open(path, "xb", opener=private)


def replace_file(new: Path, path: Path, *, secure_delete: bool = False) -> None:
    """Gives a file the name of another, which goes.

    Args:
        new: the file.
        path: its new name.
        secure_delete: True to overwrite the file that had this name. Until that is done, it is called `path` with the
            ending `.replaced`; it stays under that name where the system refuses to overwrite it. On a file system
            without hard links, it goes as it is.
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
    """Removes a file, if there is one.

    Args:
        path: the file.
        secure_delete: True to overwrite it with zeros first, on the disk. A file that has another name as well is
            somebody's copy, and loses this name only.

    Raises:
        OSError: when the system refuses it; the file is still there then, and can be tried again.
    """
    if secure_delete:
        with suppress(FileNotFoundError):
            status = path.lstat()
            if stat.S_ISREG(status.st_mode) and status.st_nlink == 1:
                overwrite(path)
    path.unlink(missing_ok=True)


def overwrite(path: Path) -> None:
    """Overwrites a file with zeros, on the disk.

    Raises:
        OSError: when the system refuses it, or the file is a symbolic link.
    """
    with open(path, "r+b", opener=lambda name, flags: os.open(name, flags | getattr(os, "O_NOFOLLOW", 0))) as file:
        left = os.fstat(file.fileno()).st_size
        while left > 0:
            file.write(bytes(min(left, _PIECE)))
            left -= _PIECE
        file.flush()
        os.fsync(file.fileno())


def private(path: str, flags: int) -> int:
    """An opener for `open`: a file that it creates can be read by its user only."""
    return os.open(path, flags, 0o600)


def make_folder(path: Path) -> None:
    """Makes a folder that only its user can enter, and those above it that are missing; does nothing if it is there."""
    if not path.parent.exists():
        make_folder(path.parent)
    path.mkdir(mode=0o700, exist_ok=True)


def make_writable_folder(path: Path) -> None:
    """As `make_folder`, and checks that files can be made there.

    Raises:
        ConfigError: for a folder that cannot be made or written.
    """
    try:
        make_folder(path)
        with TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be written: {error.strerror}; give another folder, or make this one writable for the user "
            "of this process"
        ) from None


def copy_file(source: Path, path: Path, *, secure_delete: bool = False) -> None:
    """Copies a file of any size; `path` is written as by `write_file`."""
    with source.open("rb") as file:
        write_file(path, iter(lambda: file.read(_PIECE), b""), secure_delete=secure_delete)


def write_text(path: Path, text: str) -> str:
    """Writes a text as UTF-8, so that after a crash the file is whole, old or new, and syncs its folder.

    Returns:
        The sha256 of its bytes.
    """
    digest = write_file(path, [text.encode()])
    sync_folder(path.parent)
    return digest


@contextmanager
def write_folder(path: Path) -> Iterator[Path]:
    """Gives a new folder to fill, which takes its name when it is complete, in place of an older one of that name.

    A crash leaves under the name what was there before, all that is new, or nothing; never a part. An error while the
    folder is filled leaves what was there before.
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
    """Makes the names in a folder last, where the system can."""
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
    """What a sealed line says.

    Raises:
        MalformedError: when it is not, byte for byte, what `sealed` wrote.
    """
    content = parse_json(data)
    if not isinstance(content, dict):
        raise MalformedError("it is no JSON object")
    content.pop("sha256", None)
    if sealed(content) != data:
        raise MalformedError("its checksum differs")
    return content


def _json(content: Mapping[str, Any]) -> bytes:
    return json.dumps(content, separators=(",", ":")).encode()
