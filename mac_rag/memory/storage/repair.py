"""Finds what is damaged in a bank on disk, and keeps everything that is not.

The records file has checksums of each entry's record and rows, and the header of the tokens file repeats the ids of its
documents. So damage costs only the entries that it hits, and lost documents can be named.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from io import BytesIO
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from mac_rag.atomic_files import sync_folder, write_file
from mac_rag.data.provenance import Member
from mac_rag.errors import BankError, DamageError
from mac_rag.memory.parts import Part, Texts
from mac_rag.memory.records import Record
from mac_rag.memory.storage import record_lines
from mac_rag.memory.storage.codebook_file import read_codebook
from mac_rag.memory.storage.consistency import faults
from mac_rag.memory.storage.folder import CODEBOOK, CODEBOOK_COPY, exists, file_errors
from mac_rag.memory.storage.lock import WriterLock
from mac_rag.memory.storage.manifest import (
    MANIFEST,
    MANIFEST_COPY,
    Manifest,
    SegmentInfo,
    read_manifest,
    write_manifest,
)
from mac_rag.memory.storage.record_lines import RecordLine
from mac_rag.memory.storage.segment import Segment, dtype_of, entry_ids, fault_of, read_segment
from mac_rag.memory.storage.store import Store
from mac_rag.memory.storage.texts_file import undamaged_texts
from mac_rag.untrusted_files import MalformedError, is_hole, open_file, read_at


@dataclass(frozen=True)
class Report:
    """The result of checking or repairing a bank.

    Attributes:
        folder: folder of the bank.
        documents: number of undamaged documents.
        damage: one message for each damaged file.
        lost: ids of the documents that are damaged, or that a repair has dropped.
        unnamed: number of lost entries whose ids are lost as well.
        textless: ids of the documents that keep their memory tokens, and lose the text that the bank kept.
        repaired: True if the damage has been repaired.
    """

    folder: Path
    documents: int
    damage: tuple[str, ...]
    lost: tuple[str, ...]
    unnamed: int
    textless: tuple[str, ...] = ()
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
            lines += [f"  {document_id}" for document_id in self.lost]
        if self.unnamed:
            lines.append(f"  and {self.unnamed:,} whose ids are lost too")
        if self.textless:
            lines.append(f"only the kept text is lost: {len(self.textless):,}; to keep it again, delete and adapt:")
            lines += [f"  {document_id}" for document_id in self.textless]
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
        textless: ids of its documents whose text is lost, and only that.
    """

    part: Part
    damage: list[str]
    lost: list[str]
    unnamed: int
    textless: list[str]


def verify(folder: str | Path) -> Report:
    """Checks every byte of a bank. Others may read it and write to it at the same time.

    Raises:
        BankError: when there is no bank, its format is unknown, or both copies of its manifest or of its codebook are
            damaged.
    """
    folder = Path(folder)
    with file_errors(folder, "read"):
        return _examine(folder).report


def repair(folder: str | Path) -> Report:
    """Drops damaged entries, and nothing else.

    Returns:
        What was damaged, and which documents were lost.

    Raises:
        BankError: when there is no bank, another process writes to it, its format is unknown, or nothing can be saved.
    """
    folder = Path(folder)
    with file_errors(folder, "repaired"):
        return _repair(folder)


def _repair(folder: Path) -> Report:
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
    lost = [document_id for each in remains for document_id in each.lost]
    contradictions = faults(manifest, parts, None if codebook is None else codebook[0])
    for fault in contradictions:
        damage.append(f"{folder} contradicts itself: {fault.problem}")
        lost += fault.part.entries[fault.sequence].record.document_ids
        fault.part.tombstone(fault.sequence)
    report = Report(
        folder,
        documents=sum(len(placed.record.members) for part in parts for placed in part.entries.values()),
        damage=(*damage, *(message for each in remains for message in each.damage)),
        lost=tuple(dict.fromkeys(lost)),
        unnamed=sum(each.unnamed for each in remains),
        textless=tuple(name for each in remains for name in each.textless if name not in lost),
    )
    return _Findings(manifest, parts, None if codebook is None else codebook[1], report)


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


def _codebook(folder: Path, manifest: Manifest, damage: list[str]) -> tuple[Tensor, bytes] | None:
    """The codebook and the bytes of its file, or of its copy if it is damaged; appends to `damage`."""
    if manifest.codebook is None:
        return None
    undamaged = []
    for path in (folder / CODEBOOK, folder / CODEBOOK_COPY):
        try:
            undamaged.append(read_codebook(path, manifest.codebook))
        except FileNotFoundError:
            damage.append(f"{path} is missing")
        except MalformedError as error:
            damage.append(f"{path} is damaged: {error}")
    if not undamaged:
        raise BankError(f"{'; '.join(damage)}: without it no document can be read; restore a backup")
    return undamaged[0]


def _remains(folder: Path, info: SegmentInfo) -> _Remains:
    """What is left of a segment: the segment, or its undamaged entries in memory."""
    try:
        segment = read_segment(folder, info)
        segment.check_texts()
        return _Remains(segment, [], [], 0, [])
    except (DamageError, FileNotFoundError) as error:
        fault = str(error)
    damage: list[str] = []
    undamaged: dict[int, tuple[Record, bytes]] = {}
    ids: dict[int, tuple[str, ...]] = {}
    with ExitStack() as opened:
        tokens, lines = (
            _unlike(folder / name, digest, size, damage, opened)
            for name, digest, size in (
                (info.tokens_file, info.tokens, info.offset + info.tensor_bytes),
                (info.records_file, info.records, None),
            )
        )
        texts: dict[str, str] = {}
        if info.texts is not None:
            texts = undamaged_texts(_unlike(folder / info.texts_file, info.texts, None, damage, opened))
        for line in record_lines.undamaged(lines):
            ids[line.record.sequence] = line.record.document_ids
            rows = _rows(tokens, info, line)
            if rows is not None:
                undamaged[line.record.sequence] = (line.record, rows)
        if len(ids) < info.entries:
            ids = _ids_in_header(tokens, info.offset) | ids
    for sequence in info.tombstones:
        undamaged.pop(sequence, None)
    lost = set(ids).difference(undamaged, info.tombstones)
    kept = {
        sequence: tuple(_text(member, texts) for member in record.members)
        for sequence, (record, _) in undamaged.items()
    }
    members = [member for sequence in sorted(undamaged) for member in undamaged[sequence][0].members]
    has_text = [text is not None for sequence in sorted(undamaged) for text in kept[sequence]]
    return _Remains(
        _part([undamaged[sequence] for sequence in sorted(undamaged)], info.shape, kept),
        damage or [fault],  # files that are what was written, and say what cannot be true
        lost=[document_id for sequence in sorted(lost) for document_id in ids[sequence]],
        unnamed=max(0, info.entries - len(set(ids).union(info.tombstones))),
        textless=[member.document_id for member, has in zip(members, has_text) if info.texts is not None and not has],
    )


def _unlike(path: Path, digest: str, size: int | None, damage: list[str], opened: ExitStack) -> BinaryIO:
    """A file of a segment, or an empty one for what cannot be read; appends to `damage` if its digest differs.

    A file of text has no size that is known before, but no holes.
    """
    try:
        file = opened.enter_context(open_file(path))
    except FileNotFoundError:
        damage.append(f"{path} is missing")
    except MalformedError as error:
        damage.append(f"{path} is damaged: {error}")
    else:
        if size not in (None, os.fstat(file.fileno()).st_size) or _digest(file, is_text=size is None) != digest:
            damage.append(f"{path} is damaged")
        file.seek(0)
        return file
    return BytesIO()


def _digest(file: BinaryIO, *, is_text: bool) -> str | None:
    """The sha256 of a file; None for text with a hole."""
    digest = hashlib.sha256()
    while piece := file.read(1 << 20):
        if is_text and is_hole(piece):
            return None
        digest.update(piece)
    return digest.hexdigest()


def _rows(tokens: BinaryIO, info: SegmentInfo, line: RecordLine) -> bytes | None:
    """The rows of an entry, if they are what was written."""
    width = 4 * math.prod(info.shape[1:])
    if line.stop > info.shape[0]:
        return None
    rows = read_at(tokens, info.offset + line.start * width, line.record.rows * width)
    if hashlib.sha256(rows).hexdigest() != line.checksum or fault_of(rows, dtype_of(info.shape)) is not None:
        return None
    return rows


def _text(member: Member, texts: Mapping[str, str]) -> str | None:
    """The text of a document, if it is what was written."""
    text = texts.get(member.document_id)
    return text if text is not None and member.matches(text) else None


def _ids_in_header(tokens: BinaryIO, offset: int) -> dict[int, tuple[str, ...]]:
    """The document ids of each entry by sequence number; none if the header is damaged."""
    try:
        return entry_ids(read_at(tokens, 0, offset))
    except MalformedError:
        return {}


def _part(entries: Sequence[tuple[Record, bytes]], shape: Sequence[int], texts: Mapping[int, Texts]) -> Part:
    """A part in memory with these records, their rows and their texts."""
    if not entries:
        return Part(torch.empty(0), ())
    data = bytearray(b"".join(rows for _, rows in entries))
    rows = torch.frombuffer(data, dtype=dtype_of(shape)).view(-1, *shape[1:])
    return Part(rows, [record for record, _ in entries], texts)
