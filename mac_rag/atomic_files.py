"""Files that are whole after a crash and known to be whole: written, renamed and synced; sealed by a checksum."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

# What an unfinished file is called; it gets its name when all of it is on the disk.
UNFINISHED = ".new"


def write_file(path: Path, pieces: Iterable[bytes | memoryview]) -> str:
    """Writes a file so that under its name there is never less than all of it. Needs `sync_folder` to last.

    After an error there is what was there before, and nothing of the new file.

    Returns:
        Its sha256.
    """
    digest = hashlib.sha256()
    unfinished = path.with_name(path.name + UNFINISHED)
    try:
        with unfinished.open("wb") as file:
            for piece in pieces:
                digest.update(piece)
                file.write(piece)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
    except BaseException:
        with suppress(OSError):
            unfinished.unlink()
        raise
    return digest.hexdigest()


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
        ValueError: when it is not, byte for byte, what `sealed` wrote.
    """
    content = json.loads(data)
    if not isinstance(content, dict):
        raise ValueError("it is no JSON object")
    content.pop("sha256", None)
    if sealed(content) != data:
        raise ValueError("its checksum differs")
    return content


def _json(content: Mapping[str, Any]) -> bytes:
    return json.dumps(content, separators=(",", ":")).encode()
