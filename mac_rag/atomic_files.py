"""Files that are complete after a crash: written under another name, synced, renamed; sealed by a checksum.

Their content comes from documents, so only their user can read them: a file gets the mode 0600 and a folder 0700, or
less if the umask allows less. An existing folder keeps its mode.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from mac_rag.errors import ConfigError
from mac_rag.untrusted_files import MalformedError, parse_json

# Ending of an unfinished file, which gets its final name when all of it is on the disk.
UNFINISHED = ".new"


def write_file(path: Path, pieces: Iterable[bytes | memoryview]) -> str:
    """Writes a file atomically: under its name stands either the old content or all of the new.

    After an error, the old file is in place, and nothing of the new one. Call `sync_folder` to make the name last.

    Args:
        path: the file.
        pieces: its content.

    Returns:
        Its sha256.
    """
    digest = hashlib.sha256()
    unfinished = path.with_name(path.name + UNFINISHED)
    try:
        unfinished.unlink(missing_ok=True)  # opening it would follow a link
        with open(unfinished, "xb", opener=private) as file:
            for piece in pieces:
                digest.update(piece)
                file.write(piece)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
    except BaseException:
        with suppress(OSError):
            unfinished.unlink(missing_ok=True)
        raise
    return digest.hexdigest()


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
