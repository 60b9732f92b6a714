"""A bank on disk: immutable segments and one manifest that names them.

    manifest.json, manifest.copy.json              what the bank consists of; see `mac_rag.memory.storage.manifest`
    segment-<random>.safetensors, .jsonl           entries that never change; see `mac_rag.memory.storage.segment`
    codebook.safetensors, codebook.copy.safetensors    the codebook, if memory tokens are stored as codes
    writer.lock, writer.json                       which process is writing

A commit writes new entries as a segment, syncs it, and then replaces the manifest in one rename. So a killed process
leaves the last commit, and a reader sees one commit or the next. New entries are merged with the last segments as in a
binary counter, each segment at least as large as the next: n documents make O(log n) segments, and each document is
written O(log n) times. The next writer removes files that the manifest does not name.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from safetensors.torch import save as tensor_bytes
from torch import Tensor

from mac_rag.atomic_files import UNFINISHED, sync_folder, write_file
from mac_rag.errors import BankError, DamageError
from mac_rag.memory.parts import Part
from mac_rag.memory.storage.codebook_file import read_codebook
from mac_rag.memory.storage.consistency import check_consistency
from mac_rag.memory.storage.lock import WriterLock
from mac_rag.memory.storage.manifest import (
    MANIFEST,
    MANIFEST_COPY,
    Intent,
    Manifest,
    read_manifest,
    renew_copy,
    write_manifest,
)
from mac_rag.memory.storage.segment import Segment, read_segment, write_segment
from mac_rag.untrusted_files import MalformedError

CODEBOOK = "codebook.safetensors"
CODEBOOK_COPY = "codebook.copy.safetensors"
# Segments are not merged beyond this many bytes, so that no commit copies much.
_LARGE = 256 << 20
_SEGMENT_FILE = re.compile(r"segment-[0-9a-f]{16}\.(safetensors|jsonl)")
# All names of unfinished files; together with unused segments they are the only files that are ever deleted.
_UNFINISHED_FILE = re.compile(rf"({_SEGMENT_FILE.pattern}|(manifest|codebook)[a-z.]*|writer\.json){UNFINISHED}")


def exists(folder: Path) -> bool:
    """True if the folder holds a bank, even one that lost its manifest."""
    return (folder / MANIFEST).is_file() or (
        folder.is_dir() and any(_SEGMENT_FILE.fullmatch(file.name) for file in folder.iterdir())
    )


class Store:
    """A bank on disk at one commit.

    Args:
        folder: folder of the bank.
        lock: the right to write to it; None to read only.
        manifest: the manifest of the commit.
        segments: the segments that the manifest names.
        codebook: `[C, D]`; None for a bank without a codebook.

    Attributes:
        manifest: the manifest of the commit.
        segments: the segments, in order. The next commit makes deletions from them permanent.
    """

    def __init__(
        self,
        folder: Path,
        lock: WriterLock | None,
        manifest: Manifest,
        segments: Sequence[Segment],
        codebook: Tensor | None,
    ) -> None:
        self.folder = folder
        self.manifest = manifest
        self.segments = list(segments)
        self.codebook = codebook
        self._lock = lock
        self._was_writable = lock is not None  # its segments may have changed, so it never follows another writer

    @classmethod
    def create(
        cls,
        folder: Path,
        fingerprint: str,
        codebook: Tensor | None,
        parts: Sequence[Part] = (),
        next_sequence: int = 0,
    ) -> Store:
        """Makes a new bank and opens it for writing. A crash before the end leaves no bank.

        Args:
            folder: folder of the bank; it is made if it does not exist.
            fingerprint: fingerprint of the model that writes the bank.
            codebook: `[C, D]`; None for a bank without a codebook.
            parts: all entries of the bank, in order.
            next_sequence: sequence number of the next entry.

        Raises:
            BankError: when the folder holds a bank, another process makes one there, or a file cannot be written.
        """
        with file_errors(folder, "written to"):
            folder.mkdir(parents=True, exist_ok=True)
            store = cls(folder, WriterLock(folder), Manifest(fingerprint=fingerprint), [], codebook)
        try:
            if exists(folder):
                raise BankError(f"{folder} already holds a memory bank; open it, or choose another folder")
            with file_errors(folder, "written to"):
                store._begin(parts, next_sequence)
        except BaseException:
            store.close()
            raise
        return store

    @classmethod
    def open(cls, folder: Path, *, write: bool) -> Store:
        """Opens a bank at its last commit.

        Args:
            folder: folder of the bank.
            write: True to change it.

        Raises:
            BankError: when there is no bank, it is damaged, its format is unknown, it cannot be read, or another
                process writes to it.
        """
        with file_errors(folder, "opened"):
            if not exists(folder):
                raise BankError(f"there is no memory bank in {folder}")
            lock = WriterLock(folder) if write else None
            try:
                manifest, segments = _snapshot(folder, {})
                store = cls(folder, lock, manifest, segments, _read_codebook(folder, manifest))
                check_consistency(folder, manifest, segments, store.codebook)
                if write:
                    renew_copy(folder, manifest)
                    store._tidy()
            except BaseException:
                if lock is not None:
                    lock.release()
                raise
        return store

    def _begin(self, parts: Sequence[Part], next_sequence: int) -> None:
        """Writes the codebook and the first commit."""
        try:
            digest = None
            if self.codebook is not None:
                data = tensor_bytes({"codebook": self.codebook.contiguous()})
                digest = write_file(self.folder / CODEBOOK, [data])
                write_file(self.folder / CODEBOOK_COPY, [data])
            manifest, segments = self._next_state(parts, next_sequence, compact=False)
            manifest = manifest.model_copy(update={"codebook": digest})
            write_manifest(self.folder, manifest)
            sync_folder(self.folder.parent)
        except BaseException:
            if not (self.folder / MANIFEST).is_file():
                self._tidy()
            raise
        self.manifest, self.segments = manifest, segments
        self._tidy()

    @property
    def writable(self) -> bool:
        """True if the bank can be changed."""
        return self._lock is not None

    def close(self) -> None:
        """Releases the right to write; changes that were not committed are lost."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def refresh(self) -> bool:
        """Moves to the last commit; on an error nothing changes.

        Returns:
            True if there was a newer commit.

        Raises:
            BankError: when the bank is damaged.
        """
        if self._was_writable:
            return False
        with file_errors(self.folder, "read"):
            manifest, segments = _snapshot(self.folder, {segment.name: segment for segment in self.segments})
        if manifest == self.manifest:
            return False
        for segment, info in zip(segments, manifest.segments, strict=True):
            segment.follow(info)
        check_consistency(self.folder, manifest, segments, self.codebook)
        self.manifest, self.segments = manifest, segments
        return True

    def commit(
        self, parts: Sequence[Part], next_sequence: int, *, compact: bool = False, intent: Intent | None = None
    ) -> None:
        """Makes these parts the contents of the bank. After an error the last commit stands, and a retry is possible.

        Args:
            parts: all entries in order; parts that are segments of this bank already are not written again.
            next_sequence: sequence number of the next entry.
            compact: True to rewrite every segment that has deleted entries.
            intent: the change that starts after this commit; None to leave the recorded intent as it is.

        Raises:
            BankError: when a file cannot be written.
        """
        with file_errors(self.folder, "written to"):
            manifest, segments = self._next_state(parts, next_sequence, compact)
            if intent is not None:
                manifest = manifest.model_copy(update={"intent": intent})
            if manifest != self.manifest:
                manifest = manifest.model_copy(update={"generation": manifest.generation + 1})
                write_manifest(self.folder, manifest)
        self.manifest, self.segments = manifest, segments
        self._tidy()

    def _next_state(self, parts: Sequence[Part], next_sequence: int, compact: bool) -> tuple[Manifest, list[Segment]]:
        """The state after a commit. Writes new segments, but not the manifest."""
        segments = [self._written(group, compact) for group in _groups(parts)]
        infos = tuple(segment.info for segment in segments)
        return self.manifest.model_copy(update={"next_sequence": next_sequence, "segments": infos}), segments

    def _written(self, group: Sequence[Part], compact: bool) -> Segment:
        """The segment that holds a group of parts: the only part, if it is a good segment already, or a new one."""
        first = group[0]
        if len(group) == 1 and isinstance(first, Segment) and any(first is segment for segment in self.segments):
            is_outdated = first.is_mostly_deleted or (compact and first.tombstones)
            if not is_outdated:
                return first
        return write_segment(self.folder, group)

    def _tidy(self) -> None:
        """Removes files that the manifest does not name. The next call tries again where the system refuses."""
        used = {file for info in self.manifest.segments for file in (info.tokens_file, info.records_file)}
        for file in self.folder.iterdir():
            if file.name not in used and (_SEGMENT_FILE.fullmatch(file.name) or _UNFINISHED_FILE.fullmatch(file.name)):
                with suppress(OSError):
                    file.unlink()


def _groups(parts: Sequence[Part]) -> list[list[Part]]:
    """Groups the parts that become one segment each, so that each segment is larger than the next."""
    groups: list[list[Part]] = []
    for part in parts:
        if not part.count:
            continue
        groups.append([part])
        while len(groups) > 1 and _rows(groups[-2]) <= _rows(groups[-1]):
            if _rows(groups[-2] + groups[-1]) * part.tokens[0].nbytes > _LARGE:
                break
            groups[-2:] = [groups[-2] + groups[-1]]
    return groups


@contextmanager
def file_errors(folder: Path, what: str) -> Iterator[None]:
    """Turns errors of the file system into errors that name the bank: it "cannot be {what}"."""
    try:
        yield
    except OSError as error:
        raise BankError(f"{folder} cannot be {what}: {error}") from error


def _rows(parts: Sequence[Part]) -> int:
    return sum(part.count for part in parts)


def _snapshot(folder: Path, known: Mapping[str, Segment]) -> tuple[Manifest, list[Segment]]:
    """Reads the manifest and its segments; segments that are in `known`, by name, are not read again."""
    while True:
        try:
            manifest = read_manifest(folder / MANIFEST)
        except FileNotFoundError:
            has_copy = (folder / MANIFEST_COPY).is_file()
            remedy = "repair the bank" if has_copy else "nothing is left of this bank; restore a backup, or remove it"
            raise DamageError(f"{folder / MANIFEST} is missing; {remedy}") from None
        try:
            return manifest, [known.get(info.name) or read_segment(folder, info) for info in manifest.segments]
        except FileNotFoundError as error:
            # A writer may have replaced the segments of the manifest that was just read; then it is read again.
            if read_manifest(folder / MANIFEST) == manifest:
                raise DamageError(f"{error.filename} is missing; repair the bank to keep what is not lost") from None


def _read_codebook(folder: Path, manifest: Manifest) -> Tensor | None:
    if manifest.codebook is None:
        return None
    path = folder / CODEBOOK
    try:
        return read_codebook(path, manifest.codebook)[0]
    except FileNotFoundError:
        raise DamageError(f"{path} is missing; repair the bank") from None
    except MalformedError as error:
        raise DamageError(f"{path} is damaged: {error}; repair the bank") from None
