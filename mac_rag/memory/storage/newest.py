"""Whether a bank's manifest is its newest.

A commit writes the copy first, so after a crash the copy is one commit ahead, and the note of the lock's holder still
lies there. In any other case, a copy that is ahead means that an older manifest was put in the place of the newest.
"""

from __future__ import annotations

from pathlib import Path

from mac_rag.errors import BankError, DamageError
from mac_rag.memory.storage.lock import HOLDER
from mac_rag.memory.storage.manifest import MANIFEST, MANIFEST_COPY, Manifest, read_manifest


def check_newest(folder: Path) -> None:
    """Refuses a bank whose manifest was replaced by an older one. Others may write to the bank at the same time.

    A writer would take the newest documents for leftovers of a crash, and remove them. The caller must not have the
    lock yet.

    Raises:
        DamageError: names the generations.
    """
    problem = older_manifest(folder)
    if problem is not None:
        raise DamageError(f"{problem}; repair the bank to go on with the newest")


def older_manifest(folder: Path) -> str | None:
    """What is wrong if the manifest was replaced by an older one; None if it was not, or if it cannot be read."""
    while True:
        was_open = (folder / HOLDER).exists()  # a writer is at work, or has been killed
        manifest, copy = _read(folder / MANIFEST), _read(folder / MANIFEST_COPY)
        if manifest is None or copy is None or copy.generation <= manifest.generation + was_open:
            return None
        # What a failed commit has left of the copy names segments that went at once.
        names = [name for info in copy.segments for name in info.files]
        if not all((folder / name).is_file() for name in names):
            return None
        if _read(folder / MANIFEST) == manifest:  # otherwise a writer was at work
            return (
                f"{folder / MANIFEST} is at generation {manifest.generation:,} and its copy at {copy.generation:,}: an "
                "older manifest was put in the place of the newest"
            )


def _read(path: Path) -> Manifest | None:
    try:
        return read_manifest(path)
    except (BankError, FileNotFoundError):
        return None
