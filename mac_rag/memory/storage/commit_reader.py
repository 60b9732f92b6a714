"""Reads the last commit of a bank, also while a writer makes the next one and removes the files of this one."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from mac_rag.errors import DamageError
from mac_rag.memory.storage.manifest import MANIFEST, MANIFEST_COPY, Manifest, read_manifest
from mac_rag.memory.storage.quantizer_file import read_quantizer
from mac_rag.memory.storage.segment import Segment, read_segment
from mac_rag.nn.product_quantizer import ProductQuantizer
from mac_rag.untrusted_files import MalformedError


class Commit(NamedTuple):
    """What a bank on disk consists of.

    Attributes:
        manifest: the manifest.
        segments: the segments that it names.
        quantizer: with rows pq, what their codes are looked up in; otherwise None.
    """

    manifest: Manifest
    segments: tuple[Segment, ...]
    quantizer: ProductQuantizer | None


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
    while True:
        try:
            manifest = read_manifest(folder / MANIFEST)
        except FileNotFoundError:
            has_copy = (folder / MANIFEST_COPY).is_file()
            remedy = "repair the bank" if has_copy else "nothing is left of this bank; restore a backup, or remove it"
            raise DamageError(f"{folder / MANIFEST} is missing; {remedy}") from None
        try:
            return read_files(folder, manifest, known)
        except (FileNotFoundError, DamageError) as error:
            # A writer may have removed, or overwritten, what the manifest names that was just read.
            if read_manifest(folder / MANIFEST) != manifest:
                continue
            if isinstance(error, DamageError):
                raise
            raise DamageError(f"{error.filename} is missing; repair the bank to keep what is not lost") from None


def read_files(folder: Path, manifest: Manifest, known: Commit | None = None) -> Commit:
    """Reads the files that a manifest names; `known` as for `read_commit`.

    Raises:
        FileNotFoundError: when a segment is missing.
        DamageError: when the quantizer is missing, or a file is not what was written.
    """
    segments = {} if known is None else {segment.name: segment for segment in known.segments}
    read = tuple(
        (info.name in segments and segments[info.name].at(info))
        or read_segment(folder, info, manifest.layout, secure_delete=manifest.secure_delete)
        for info in manifest.segments
    )
    if known is not None and known.manifest.codebook == manifest.codebook:
        return Commit(manifest, read, known.quantizer)
    return Commit(manifest, read, _read_quantizer(folder, manifest))


def _read_quantizer(folder: Path, manifest: Manifest) -> ProductQuantizer | None:
    if manifest.codebook is None:
        return None
    path = folder / manifest.codebook_files[0]
    try:
        return read_quantizer(path, manifest)[0]
    except FileNotFoundError:
        raise DamageError(f"{path} is missing; repair the bank") from None
    except MalformedError as error:
        raise DamageError(f"{path} is damaged: {error}; repair the bank") from None
