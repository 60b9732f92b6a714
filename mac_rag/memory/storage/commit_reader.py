"""Reads the last commit of a bank, also while a writer makes the next one and removes the files of this one."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from mac_rag.errors import DamageError
from mac_rag.memory.rows import Codebook
from mac_rag.memory.storage.codebook_file import read_codebook
from mac_rag.memory.storage.manifest import MANIFEST, MANIFEST_COPY, Manifest, read_manifest
from mac_rag.memory.storage.segment import Segment, read_segment
from mac_rag.untrusted_files import MalformedError


class Commit(NamedTuple):
    """What a bank on disk consists of.

    Attributes:
        manifest: the manifest.
        segments: the segments that it names.
        codebook: what codes of rows are looked up in; None for a bank that has none.
    """

    manifest: Manifest
    segments: tuple[Segment, ...]
    codebook: Codebook | None


def read_commit(folder: Path, known: Commit | None = None) -> Commit:
    """Reads the last commit.

    Args:
        folder: folder of the bank.
        known: an earlier commit; what it has already is not read again.

    Raises:
        BankError: when the format is unknown.
        DamageError: when a file is missing, or not what was written.
        OSError: when a file cannot be read.
    """
    segments = {} if known is None else {segment.name: segment for segment in known.segments}
    while True:
        try:
            manifest = read_manifest(folder / MANIFEST)
        except FileNotFoundError:
            has_copy = (folder / MANIFEST_COPY).is_file()
            remedy = "repair the bank" if has_copy else "nothing is left of this bank; restore a backup, or remove it"
            raise DamageError(f"{folder / MANIFEST} is missing; {remedy}") from None
        try:
            read = tuple(
                (info.name in segments and segments[info.name].at(info))
                or read_segment(folder, info, manifest.layout, secure_delete=manifest.secure_delete)
                for info in manifest.segments
            )
            if known is not None and known.manifest.codebook == manifest.codebook:
                return Commit(manifest, read, known.codebook)
            return Commit(manifest, read, _read_codebook(folder, manifest))
        except (FileNotFoundError, DamageError) as error:
            # A writer may have removed, or overwritten, what the manifest names that was just read.
            if read_manifest(folder / MANIFEST) != manifest:
                continue
            if isinstance(error, DamageError):
                raise
            raise DamageError(f"{error.filename} is missing; repair the bank to keep what is not lost") from None


def _read_codebook(folder: Path, manifest: Manifest) -> Codebook | None:
    if manifest.codebook is None:
        return None
    path = folder / manifest.codebook_files[0]
    try:
        return read_codebook(path, manifest)[0]
    except FileNotFoundError:
        raise DamageError(f"{path} is missing; repair the bank") from None
    except MalformedError as error:
        raise DamageError(f"{path} is damaged: {error}; repair the bank") from None
