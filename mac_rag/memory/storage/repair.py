"""Checks and repairs a bank on disk: what is damaged, what is left, and how to keep all of it.

The records file has checksums of each entry's record and rows, and the header of the tokens file repeats the ids of its
documents. So damage costs only the entries that it hits, and lost documents can be named.

A repair throws nothing away. What it drops from the bank goes to a folder in its `quarantine`, with the report. It
stays there until somebody removes it, also if the bank overwrites what it deletes.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from io import BytesIO
from pathlib import Path
from typing import BinaryIO

from mac_rag.atomic_files import copy_file, make_folder, sync_folder, write_file, write_text
from mac_rag.data.provenance import Member
from mac_rag.errors import BankError, DamageError
from mac_rag.memory.entry_table import Record, RecordList
from mac_rag.memory.parts import Part, Texts, no_entries
from mac_rag.memory.rows import RowLayout, Rows
from mac_rag.memory.storage import record_lines
from mac_rag.memory.storage.commit_reader import faults, older_manifest, read_quantizer
from mac_rag.memory.storage.folder import QUARANTINE, check_exists, file_errors, local_folder
from mac_rag.memory.storage.lock import HOLDER, LOCK, WriterLock
from mac_rag.memory.storage.manifest import (
    MANIFEST,
    MANIFEST_COPY,
    Manifest,
    SegmentInfo,
    read_manifest,
    write_manifest,
)
from mac_rag.memory.storage.model_name import copy_model_name
from mac_rag.memory.storage.record_lines import RecordLine
from mac_rag.memory.storage.segment import Segment, read_segment
from mac_rag.memory.storage.store import Store
from mac_rag.memory.storage.texts_file import undamaged_texts
from mac_rag.memory.storage.tokens_file import entry_ids, read_entry
from mac_rag.nn.product_quantizer import ProductQuantizer
from mac_rag.untrusted_files import MalformedError, is_hole, open_file, printable, read_at

__all__ = ["Report", "repair", "verify"]


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
        quarantine: the folder that holds what a repair has dropped; None if it has dropped nothing.
    """

    folder: Path
    documents: int
    damage: tuple[str, ...]
    lost: tuple[str, ...]
    unnamed: int
    textless: tuple[str, ...] = ()
    repaired: bool = False
    quarantine: Path | None = None

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
        if self.textless:
            lines.append(
                f"only the kept text is lost: {len(self.textless):,}; adapt to them again, and it is kept again "
                "(not of documents that were merged with others):"
            )
            lines += [f"  {printable(document_id)}" for document_id in self.textless]
        if self.quarantine is not None:
            lines.append(f"what was dropped lies in {self.quarantine}, with this report")
        if not self.repaired:
            lines.append("repair the bank to keep those that are not damaged")
        return "\n".join(lines)


@dataclass(frozen=True)
class Findings:
    """What is left of a bank.

    Attributes:
        manifest: the manifest to restore.
        parts: the undamaged entries, in order.
        quantizer: with rows pq, what their codes are looked up in, and the bytes of its file; otherwise None.
        report: what is damaged.
    """

    manifest: Manifest
    parts: list[Part]
    quantizer: tuple[ProductQuantizer, bytes] | None
    report: Report

    @property
    def losses(self) -> tuple[int, int]:
        """The number of lost documents, and of lost texts of others."""
        return len(self.report.lost) + self.report.unnamed, len(self.report.textless)


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
        BankError: when there is no bank, its format is unknown, or both copies of its manifest or of its quantizer are
            damaged.
    """
    folder = local_folder(folder)
    with file_errors(folder, "read"):
        check_exists(folder)
        return examine(folder, older_manifest(folder)).report


def examine(folder: Path, problem: str | None) -> Findings:
    """What is left of a bank, by the manifest that loses least.

    Of equal ones the bank's own counts: a crash leaves a copy that is ahead. But if the bank's own is an older one that
    was put in the place of the newest, the highest generation counts.

    Args:
        folder: folder of the bank.
        problem: what `older_manifest` says of it, before the lock was taken.

    Raises:
        BankError: see `verify`.
    """
    while True:
        manifests, damage = _manifests(folder)
        if problem is not None:
            damage.append(problem)
        best = _findings(folder, manifests[0], damage)
        # Each of these reads all of the bank again, so they are read only if they can be better.
        for manifest in manifests[1:] if problem is not None or any(best.losses) else ():
            other = _findings(folder, manifest, damage)
            is_newer = problem is not None and manifest.generation > best.manifest.generation
            if other.losses < best.losses or (other.losses == best.losses and is_newer):
                best = other
        # Otherwise a writer may have replaced the segments that seem to be missing.
        if best.report.clean or _manifests(folder)[0] == manifests:
            return best


def _manifests(folder: Path) -> tuple[list[Manifest], list[str]]:
    """The bank's manifest, and its copy if it differs, as far as they can be read; and what is damaged."""
    manifests: list[Manifest] = []
    damage: list[str] = []
    for name in (MANIFEST, MANIFEST_COPY):
        try:
            manifest = read_manifest(folder / name)
            if manifest not in manifests:
                manifests.append(manifest)
        except FileNotFoundError:
            damage.append(f"{folder / name} is missing")
        except DamageError as error:
            damage.append(str(error))
    if not manifests:
        raise BankError(f"{'; '.join(damage)}: nothing says any more what this bank consists of; restore a backup")
    return manifests, damage


def _findings(folder: Path, manifest: Manifest, damage: Sequence[str]) -> Findings:
    """What is left of a bank that consists of what a manifest says."""
    damage = list(damage)
    quantizer = _quantizer(folder, manifest, damage)
    remains = [_remains(folder, info, manifest) for info in manifest.segments]
    parts = [each.part for each in remains]
    lost = [document_id for each in remains for document_id in each.lost]
    contradictions = faults(manifest, parts)
    for fault in contradictions:
        damage.append(f"{folder} contradicts itself: {fault.problem}")
        lost += fault.part[fault.sequence].record.document_ids
        fault.part.tombstone(fault.sequence)
    report = Report(
        folder,
        documents=sum(part.documents for part in parts),
        damage=(*damage, *(message for each in remains for message in each.damage)),
        lost=tuple(dict.fromkeys(lost)),
        unnamed=sum(each.unnamed for each in remains),
        textless=tuple(name for each in remains for name in each.textless if name not in lost),
    )
    return Findings(manifest, parts, quantizer, report)


def _quantizer(folder: Path, manifest: Manifest, damage: list[str]) -> tuple[ProductQuantizer, bytes] | None:
    """The quantizer and the bytes of its file, or of its copy if it is damaged; appends to `damage`."""
    if manifest.codebook is None:
        return None
    undamaged = []
    for path in (folder / name for name in manifest.codebook_files):
        try:
            undamaged.append(read_quantizer(path, manifest))
        except FileNotFoundError:
            damage.append(f"{path} is missing")
        except MalformedError as error:
            damage.append(f"{path} is damaged: {error}")
    if not undamaged:
        raise BankError(f"{'; '.join(damage)}: without it no document can be read; restore a backup")
    return undamaged[0]


def _remains(folder: Path, info: SegmentInfo, manifest: Manifest) -> _Remains:
    """What is left of a segment: the segment, or its undamaged entries in memory."""
    layout = manifest.layout
    try:
        segment = read_segment(folder, info, layout, secure_delete=manifest.secure_delete)
        segment.check_records()
        segment.check_rows()
        segment.check_texts()
        return _Remains(segment, [], [], 0, [])
    except (DamageError, FileNotFoundError) as error:
        fault = str(error)
    damage: list[str] = []
    undamaged: dict[int, tuple[Record, Rows]] = {}
    ids: dict[int, tuple[str, ...]] = {}
    with ExitStack() as opened:
        tokens, lines = (
            _unlike(folder / name, digest, size, damage, opened)
            for name, digest, size in (
                (info.tokens_file, info.tokens, info.offset + info.rows_bytes(layout)),
                (info.records_file, info.records, None),
            )
        )
        texts: dict[str, str] = {}
        if info.texts is not None:
            texts = undamaged_texts(_unlike(folder / info.texts_file, info.texts, None, damage, opened))
        for line in record_lines.undamaged(lines):
            ids[line.record.sequence] = line.record.document_ids
            rows = _rows(tokens, info, layout, line)
            if rows is not None:
                undamaged[line.record.sequence] = (line.record, rows)
        if len(ids) < info.entries:
            ids = _ids_in_header(tokens, info.offset) | ids
    for sequence in info.tombstones:
        undamaged.pop(sequence, None)
    lost = set(ids).difference(undamaged, info.tombstones)
    entries = [undamaged[sequence] for sequence in sorted(undamaged)]
    kept = {record.sequence: tuple(_text(member, texts) for member in record.members) for record, _ in entries}
    return _Remains(
        _part(entries, kept),
        damage or [fault],  # files that are what was written, and say what cannot be true
        lost=[document_id for sequence in sorted(lost) for document_id in ids[sequence]],
        unnamed=max(0, info.entries - len(set(ids).union(info.tombstones))),
        textless=[
            name
            for record, _ in entries
            for name, text in zip(record.document_ids, kept[record.sequence])
            if text is None and info.texts is not None
        ],
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


def _rows(tokens: BinaryIO, info: SegmentInfo, layout: RowLayout, line: RecordLine) -> Rows | None:
    """The rows of an entry, if they are what was written."""
    if line.stop > info.shape[0]:
        return None
    rows = read_entry(tokens, info, layout, line.start, line.record.rows)
    if rows is None or rows.checksum() != line.checksum or rows.fault(layout, info.shape[-1]) is not None:
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


def _part(entries: Sequence[tuple[Record, Rows]], texts: Mapping[int, Texts]) -> Part:
    """A part in memory with these records, their rows and their texts."""
    if not entries:
        return no_entries()
    return Part(Rows.cat([rows for _, rows in entries]), RecordList([record for record, _ in entries]), texts)


def repair(folder: str | Path, into: str | Path | None = None) -> Report:
    """Drops damaged entries, and nothing else.

    The manifest that loses least counts: the bank's own or its copy, which can be newer.

    Args:
        folder: folder of the bank.
        into: folder for a new bank of what is not damaged; the old one is not touched. None to repair the bank itself.
            What is dropped then goes to its quarantine.

    Returns:
        What was damaged, and which documents were lost.

    Raises:
        BankError: when there is no bank, another process writes to it, its format is unknown, or nothing can be saved;
            when its quarantine is a link; when `into` is not empty.
    """
    folder = local_folder(folder)
    with file_errors(folder, "repaired"):
        check_exists(folder)
        if into is not None:
            return _repair_into(folder, local_folder(into))
        return _repair(folder)


def _repair(folder: Path) -> Report:
    problem = older_manifest(folder)
    lock = WriterLock(folder)
    try:
        findings = examine(folder, problem)
        if findings.report.clean:
            return findings.report
        segments = [part for part in findings.parts if isinstance(part, Segment)]
        kept = {file for each in segments for file in each.info.files}
        report = replace(findings.report, repaired=True, quarantine=_new_quarantine(folder))
        _quarantine(folder, kept, report)
        if findings.quantizer is not None:
            for name in findings.manifest.codebook_files:
                write_file(folder / name, [findings.quantizer[1]], secure_delete=findings.manifest.secure_delete)
            sync_folder(folder)
        write_manifest(folder, findings.manifest)
        store = Store(folder, lock, findings.manifest, segments, None)
        store.commit(findings.parts, findings.manifest.next_sequence)
        store.tidy()
    finally:
        lock.release()
    return report


def _repair_into(folder: Path, new: Path) -> Report:
    findings = examine(folder, older_manifest(folder))
    quantizer = None if findings.quantizer is None else findings.quantizer[0]
    Store.create(new, findings.manifest, quantizer, findings.parts).close()
    copy_model_name(folder, new, findings.manifest.fingerprint)
    return replace(findings.report, repaired=True)


def _new_quarantine(folder: Path) -> Path:
    quarantine = folder / QUARANTINE
    if quarantine.is_symlink():
        raise BankError(
            f"{quarantine} is a symbolic link, and what is dropped would be written to the place that it names; remove "
            "the link, or repair into a new folder (into)"
        )
    now = datetime.now(UTC).strftime("%Y%m%dT%H%M%S")
    return next(place for number in range(1000) if not os.path.lexists(place := quarantine / f"{now}-{number}"))


def _quarantine(folder: Path, kept: Collection[str], report: Report) -> None:
    """Keeps every file of a bank that a repair replaces or removes."""
    place = report.quarantine
    assert place is not None
    make_folder(place)
    for file in folder.iterdir():
        if file.is_file() and not file.is_symlink() and file.name not in {*kept, LOCK, HOLDER}:
            try:
                (place / file.name).hardlink_to(file)  # the repair replaces files and never writes into one
            except OSError:
                copy_file(file, place / file.name)
    write_text(place / "report.txt", f"{report}\n")
    write_text(place / "report.json", json.dumps(asdict(report), default=str))
    sync_folder(place.parent)
