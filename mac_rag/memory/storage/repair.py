"""What of a bank on disk is damaged, and how to keep all that is not.

Every entry has a checksum of its own in the records file, for its record and for its rows; its documents' ids are also
in the header of the tokens file. So a damaged place costs the entries that it belongs to and no others, and those that
are lost can be named.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from mac_rag.atomic_files import sync_folder, unsealed, write_file
from mac_rag.errors import BankError, DamageError
from mac_rag.memory.parts import Part
from mac_rag.memory.records import Record
from mac_rag.memory.storage.lock import WriterLock
from mac_rag.memory.storage.manifest import (
    MANIFEST,
    MANIFEST_COPY,
    Manifest,
    SegmentInfo,
    read_manifest,
    write_manifest,
)
from mac_rag.memory.storage.segment import Segment, dtype_of, named_entries, read_segment, record_of
from mac_rag.memory.storage.store import CODEBOOK, CODEBOOK_COPY, Store, exists


@dataclass(frozen=True)
class Report:
    """What was found in a bank.

    Attributes:
        folder: of the bank.
        documents: how many are undamaged.
        damage: one message for each damaged file.
        lost: ids of the documents that are damaged, or that were dropped by a repair.
        unnamed: entries that are lost and whose ids are lost as well.
        repaired: whether the damage was there only before.
    """

    folder: Path
    documents: int
    damage: tuple[str, ...]
    lost: tuple[str, ...]
    unnamed: int
    repaired: bool = False

    @property
    def clean(self) -> bool:
        """Whether nothing was damaged."""
        return not self.damage

    def __str__(self) -> str:
        if self.clean:
            return f"{self.folder} holds {self.documents:,} documents, none of them damaged"
        lines = [*self.damage, f"{self.folder} holds {self.documents:,} documents that are not damaged"]
        lost = len(self.lost) + self.unnamed
        if lost:
            lines.append(f"lost: {lost:,}; adapt to them again:")
            lines += [f"  {document_id}" for document_id in self.lost]
        if self.unnamed:
            lines.append(f"  and {self.unnamed:,} whose ids are lost too")
        if not self.repaired:
            lines.append("repair the bank to keep those that are not damaged")
        return "\n".join(lines)


@dataclass(frozen=True)
class _Findings:
    """What is left of a bank: the state to restore, its undamaged parts in order, the codebook's bytes."""

    manifest: Manifest
    parts: list[Part]
    codebook: bytes | None
    report: Report


@dataclass(frozen=True)
class _Remains:
    """What is left of one segment."""

    part: Part
    damage: list[str]
    lost: list[str]
    unnamed: int


def verify(folder: str | Path) -> Report:
    """Checks every byte of a bank, while others may read it and write to it.

    Raises:
        BankError: when there is no bank, its format is unknown, or nothing says any more what it consists of.
    """
    return _examine(Path(folder)).report


def repair(folder: str | Path) -> Report:
    """Drops what is damaged, and nothing else.

    Returns:
        What was damaged, and the documents that were lost with it.

    Raises:
        BankError: when there is no bank, someone else writes to it, its format is unknown, or nothing can be saved.
    """
    folder = Path(folder)
    if not exists(folder):
        raise BankError(f"there is no memory bank in {folder}")
    lock = WriterLock(folder)
    try:
        found = _examine(folder)
        if found.report.clean:
            return found.report
        if found.codebook is not None:
            for name in (CODEBOOK, CODEBOOK_COPY):
                write_file(folder / name, [found.codebook])
            sync_folder(folder)
        segments = [part for part in found.parts if isinstance(part, Segment)]
        store = Store(folder, lock, found.manifest, segments, None)
        store.commit(found.parts, found.manifest.next_sequence)
        write_manifest(folder, store.manifest)  # where nothing else was damaged the commit had nothing to write
    finally:
        lock.release()
    return replace(found.report, repaired=True)


def _examine(folder: Path) -> _Findings:
    if not exists(folder):
        raise BankError(f"there is no memory bank in {folder}")
    while True:
        manifest, damage = _manifest(folder)
        codebook = _codebook(folder, manifest, damage)
        remains = [_remains(folder, info) for info in manifest.segments]
        # Otherwise a writer may have put other segments in place of those that seem to be missing.
        if not any(each.damage for each in remains) or _manifest(folder)[0] == manifest:
            break
    parts = [each.part for each in remains]
    report = Report(
        folder,
        documents=sum(len(placed.record.members) for part in parts for placed in part.entries.values()),
        damage=(*damage, *(message for each in remains for message in each.damage)),
        lost=tuple(document_id for each in remains for document_id in each.lost),
        unnamed=sum(each.unnamed for each in remains),
    )
    return _Findings(manifest, parts, codebook, report)


def _manifest(folder: Path) -> tuple[Manifest, list[str]]:
    """The manifest, or where it is damaged its copy; and what is damaged."""
    found: list[Manifest] = []
    damage: list[str] = []
    for name in (MANIFEST, MANIFEST_COPY):
        try:
            found.append(read_manifest(folder / name))
        except FileNotFoundError:
            damage.append(f"{folder / name} is missing")
        except DamageError as error:
            damage.append(str(error))
    if not found:
        raise BankError(f"{'; '.join(damage)}: nothing says any more what this bank consists of; restore a backup")
    return found[0], damage


def _codebook(folder: Path, manifest: Manifest, damage: list[str]) -> bytes | None:
    """The bytes of the codebook or of its copy; appends to `damage`."""
    if manifest.codebook is None:
        return None
    found = []
    for path in (folder / CODEBOOK, folder / CODEBOOK_COPY):
        data = path.read_bytes() if path.is_file() else b""
        if hashlib.sha256(data).hexdigest() == manifest.codebook:
            found.append(data)
        else:
            damage.append(f"{path} is damaged: its checksum differs from the manifest's")
    if not found:
        raise BankError(f"{'; '.join(damage)}: without it no document can be read; restore a backup")
    return found[0]


def _remains(folder: Path, info: SegmentInfo) -> _Remains:
    """What is left of a segment: itself, or its undamaged entries in memory."""
    try:
        return _Remains(read_segment(folder, info), [], [], 0)
    except (DamageError, FileNotFoundError):
        pass
    damage = []
    files = []
    for name, digest in ((info.tokens_file, info.tokens), (info.records_file, info.records)):
        path = folder / name
        files.append(path.read_bytes() if path.is_file() else b"")
        if hashlib.sha256(files[-1]).hexdigest() != digest:
            damage.append(f"{path} is {'damaged' if path.is_file() else 'missing'}")
    tokens, lines = files
    width = 4 * math.prod(info.shape[1:])
    kept: dict[int, tuple[Record, bytes]] = {}
    names: dict[int, tuple[str, ...]] = {}
    for stated in _undamaged(lines):
        record, first = record_of(stated), info.offset + stated["start"] * width
        names[record.sequence] = record.document_ids
        rows = tokens[first : first + record.rows * width]
        if hashlib.sha256(rows).hexdigest() == stated["tokens"]:
            kept[record.sequence] = (record, rows)
    if len(names) < info.entries:
        names = _named(tokens[: info.offset]) | names
    for sequence in info.tombstones:
        kept.pop(sequence, None)
    lost = set(names).difference(kept, info.tombstones)
    return _Remains(
        _part([kept[sequence] for sequence in sorted(kept)], info.shape),
        damage,
        lost=[document_id for sequence in sorted(lost) for document_id in names[sequence]],
        unnamed=max(0, info.entries - len(set(names).union(info.tombstones))),
    )


def _undamaged(lines: bytes) -> Iterator[dict[str, Any]]:
    """What the undamaged lines of a records file state."""
    decoder = json.JSONDecoder()
    for line in lines.split(b"\n"):
        start = 0
        with suppress(ValueError):
            while start < len(line):
                # Where it is only the line break between two that is damaged, both are there.
                end = decoder.raw_decode(line.decode("latin-1"), start)[1]
                yield unsealed(line[start:end])
                start = end + 1


def _named(header: bytes) -> dict[int, tuple[str, ...]]:
    try:
        return named_entries(header)
    except (ValueError, KeyError, TypeError):
        return {}


def _part(kept: Sequence[tuple[Record, bytes]], shape: Sequence[int]) -> Part:
    if not kept:
        return Part(torch.empty(0), ())
    data = bytearray(b"".join(rows for _, rows in kept))
    return Part(torch.frombuffer(data, dtype=dtype_of(shape)).view(-1, *shape[1:]), [record for record, _ in kept])
