"""Finds what is damaged in a bank on disk, and keeps everything that is not.

The records file has checksums of each entry's record and rows, and the header of the tokens file repeats the ids of its
documents. So damage costs only the entries that it hits, and lost documents can be named.
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
from mac_rag.memory.storage.folder import CODEBOOK, CODEBOOK_COPY, exists
from mac_rag.memory.storage.lock import WriterLock
from mac_rag.memory.storage.manifest import (
    MANIFEST,
    MANIFEST_COPY,
    Manifest,
    SegmentInfo,
    read_manifest,
    write_manifest,
)
from mac_rag.memory.storage.segment import Segment, dtype_of, entry_ids, read_segment, record_of
from mac_rag.memory.storage.store import Store
from mac_rag.printable import printable


@dataclass(frozen=True)
class Report:
    """The result of checking or repairing a bank.

    Attributes:
        folder: folder of the bank.
        documents: number of undamaged documents.
        damage: one message for each damaged file.
        lost: ids of the documents that are damaged, or that a repair has dropped.
        unnamed: number of lost entries whose ids are lost as well.
        repaired: True if the damage has been repaired.
    """

    folder: Path
    documents: int
    damage: tuple[str, ...]
    lost: tuple[str, ...]
    unnamed: int
    repaired: bool = False

    @property
    def clean(self) -> bool:
        """True if nothing was damaged."""
        return not self.damage

    def __str__(self) -> str:
        if self.clean:
            return f"{self.folder} holds {self.documents:,} documents, none of them damaged"
        lines = [*self.damage, f"{self.folder} holds {self.documents:,} documents that are not damaged"]
        lost = len(self.lost) + self.unnamed
        if lost:
            lines.append(f"lost: {lost:,}; adapt to them again:")
            lines += [f"  {printable(document_id)}" for document_id in self.lost]
        if self.unnamed:
            lines.append(f"  and {self.unnamed:,} whose ids are lost too")
        if not self.repaired:
            lines.append("repair the bank to keep those that are not damaged")
        return "\n".join(lines)


@dataclass(frozen=True)
class _Findings:
    """What is left of a bank.

    Attributes:
        manifest: the manifest to restore.
        parts: the undamaged entries, in order.
        codebook: bytes of the codebook's file; None for a bank without a codebook.
        report: what is damaged.
    """

    manifest: Manifest
    parts: list[Part]
    codebook: bytes | None
    report: Report


@dataclass(frozen=True)
class _Remains:
    """What is left of one segment.

    Attributes:
        part: its undamaged live entries.
        damage: one message for each damaged file.
        lost: ids of the damaged documents.
        unnamed: number of lost entries whose ids are lost as well.
    """

    part: Part
    damage: list[str]
    lost: list[str]
    unnamed: int


def verify(folder: str | Path) -> Report:
    """Checks every byte of a bank. Others may read it and write to it at the same time.

    Raises:
        BankError: when there is no bank, its format is unknown, or both copies of its manifest or of its codebook are
            damaged.
    """
    return _examine(Path(folder)).report


def repair(folder: str | Path) -> Report:
    """Drops damaged entries, and nothing else.

    Returns:
        What was damaged, and which documents were lost.

    Raises:
        BankError: when there is no bank, another process writes to it, its format is unknown, or nothing can be saved.
    """
    folder = Path(folder)
    if not exists(folder):
        raise BankError(f"there is no memory bank in {folder}")
    lock = WriterLock(folder)
    try:
        findings = _examine(folder)
        if findings.report.clean:
            return findings.report
        if findings.codebook is not None:
            for name in (CODEBOOK, CODEBOOK_COPY):
                write_file(folder / name, [findings.codebook])
            sync_folder(folder)
        segments = [part for part in findings.parts if isinstance(part, Segment)]
        write_manifest(folder, findings.manifest)
        store = Store(folder, lock, findings.manifest, segments, None)
        store.commit(findings.parts, findings.manifest.next_sequence)
    finally:
        lock.release()
    return replace(findings.report, repaired=True)


def _examine(folder: Path) -> _Findings:
    if not exists(folder):
        raise BankError(f"there is no memory bank in {folder}")
    while True:
        manifest, damage = _manifest(folder)
        codebook = _codebook(folder, manifest, damage)
        remains = [_remains(folder, info) for info in manifest.segments]
        # Otherwise a writer may have replaced the segments that seem to be missing.
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
    """The manifest, or its copy if it is damaged; and what is damaged."""
    manifests: list[Manifest] = []
    damage: list[str] = []
    for name in (MANIFEST, MANIFEST_COPY):
        try:
            manifests.append(read_manifest(folder / name))
        except FileNotFoundError:
            damage.append(f"{folder / name} is missing")
        except DamageError as error:
            damage.append(str(error))
    if not manifests:
        raise BankError(f"{'; '.join(damage)}: nothing says any more what this bank consists of; restore a backup")
    return manifests[0], damage


def _codebook(folder: Path, manifest: Manifest, damage: list[str]) -> bytes | None:
    """The bytes of the codebook, or of its copy if it is damaged; appends to `damage`."""
    if manifest.codebook is None:
        return None
    undamaged = []
    for path in (folder / CODEBOOK, folder / CODEBOOK_COPY):
        data = path.read_bytes() if path.is_file() else b""
        if hashlib.sha256(data).hexdigest() == manifest.codebook:
            undamaged.append(data)
        else:
            damage.append(f"{path} is damaged: its checksum differs from the manifest's")
    if not undamaged:
        raise BankError(f"{'; '.join(damage)}: without it no document can be read; restore a backup")
    return undamaged[0]


def _remains(folder: Path, info: SegmentInfo) -> _Remains:
    """What is left of a segment: the segment, or its undamaged entries in memory."""
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
    undamaged: dict[int, tuple[Record, bytes]] = {}
    ids: dict[int, tuple[str, ...]] = {}
    for fields in _undamaged_lines(lines):
        record, first = record_of(fields), info.offset + fields["start"] * width
        ids[record.sequence] = record.document_ids
        rows = tokens[first : first + record.rows * width]
        if hashlib.sha256(rows).hexdigest() == fields["tokens"]:
            undamaged[record.sequence] = (record, rows)
    if len(ids) < info.entries:
        ids = _ids_in_header(tokens[: info.offset]) | ids
    for sequence in info.tombstones:
        undamaged.pop(sequence, None)
    lost = set(ids).difference(undamaged, info.tombstones)
    return _Remains(
        _part([undamaged[sequence] for sequence in sorted(undamaged)], info.shape),
        damage,
        lost=[document_id for sequence in sorted(lost) for document_id in ids[sequence]],
        unnamed=max(0, info.entries - len(set(ids).union(info.tombstones))),
    )


def _undamaged_lines(lines: bytes) -> Iterator[dict[str, Any]]:
    """The contents of the undamaged lines of a records file."""
    decoder = json.JSONDecoder()
    for line in lines.split(b"\n"):
        start = 0
        with suppress(ValueError):
            while start < len(line):
                # If only the line break between two lines is damaged, this finds both.
                end = decoder.raw_decode(line.decode("latin-1"), start)[1]
                yield unsealed(line[start:end])
                start = end + 1


def _ids_in_header(header: bytes) -> dict[int, tuple[str, ...]]:
    """The document ids of each entry by sequence number; none if the header is damaged."""
    try:
        return entry_ids(header)
    except (ValueError, KeyError, TypeError):
        return {}


def _part(entries: Sequence[tuple[Record, bytes]], shape: Sequence[int]) -> Part:
    """A part in memory with these records and their rows."""
    if not entries:
        return Part(torch.empty(0), ())
    data = bytearray(b"".join(rows for _, rows in entries))
    return Part(torch.frombuffer(data, dtype=dtype_of(shape)).view(-1, *shape[1:]), [record for record, _ in entries])
