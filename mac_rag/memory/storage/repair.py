"""Repairs a bank on disk: keeps everything that is not damaged, and throws nothing away.

What a repair drops from the bank goes to a folder in its `quarantine`, with the report. It stays there until somebody
removes it, also if the bank overwrites what it deletes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path

from mac_rag.atomic_files import copy_file, make_folder, sync_folder, write_file, write_text
from mac_rag.errors import BankError
from mac_rag.memory.storage.examination import Report, examine, verify
from mac_rag.memory.storage.folder import QUARANTINE, check_exists, file_errors, local_folder
from mac_rag.memory.storage.lock import HOLDER, LOCK, WriterLock
from mac_rag.memory.storage.manifest import write_manifest
from mac_rag.memory.storage.model_name import copy_model_name
from mac_rag.memory.storage.newest import older_manifest
from mac_rag.memory.storage.segment import Segment
from mac_rag.memory.storage.store import Store

__all__ = ["Report", "repair", "verify"]


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
