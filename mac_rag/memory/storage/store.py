"""A bank on disk: immutable segments and one manifest that names them.

    manifest.json, manifest.copy.json              what the bank consists of; see `mac_rag.memory.storage.manifest`
    segment-<random>.safetensors, .jsonl           entries that never change; see `mac_rag.memory.storage.segment`
    codebook.safetensors, codebook.copy.safetensors    where memory tokens are kept as codes
    writer.lock, writer.json                       who is writing

A commit writes what is new as a segment, syncs it, and then replaces the manifest in one rename. So a process that is
killed leaves the last commit, and a reader meets one commit or the next. Segments at the end are written together with
new ones as in a binary counter, each at least as large as the next: with n documents there are O(log n) of them, and
each document is written O(log n) times. What the manifest does not name is removed by the next writer.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from safetensors.torch import load as load_tensors
from safetensors.torch import save as tensor_bytes
from torch import Tensor

from mac_rag.atomic_files import UNFINISHED, sync_folder, write_file
from mac_rag.errors import BankError, DamageError
from mac_rag.memory.parts import Part
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

CODEBOOK = "codebook.safetensors"
CODEBOOK_COPY = "codebook.copy.safetensors"
# Segments are not written together beyond this size, so that no commit copies much.
_LARGE = 256 << 20
_SEGMENT_FILE = re.compile(r"segment-[0-9a-f]{16}\.(safetensors|jsonl)")
# Every name that an unfinished file may have; nothing else in the folder is ever deleted.
_UNFINISHED_FILE = re.compile(rf"({_SEGMENT_FILE.pattern}|(manifest|codebook)[a-z.]*|writer\.json){UNFINISHED}")


def exists(folder: Path) -> bool:
    """Whether a folder holds a bank, be it one that lost its manifest."""
    return (folder / MANIFEST).is_file() or (
        folder.is_dir() and any(_SEGMENT_FILE.fullmatch(file.name) for file in folder.iterdir())
    )


class Store:
    """One state of a bank on disk.

    Args:
        folder: where it is.
        lock: the right to write to it; None to read.
        manifest: its state.
        segments: those of the manifest.
        codebook: the codebook `[C, D]`, if it has one.

    Attributes:
        segments: the segments of this state, in order. Entries that are deleted from them go with the next commit.
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
        self._was_writable = lock is not None  # and may have been changed, so it never follows another writer

    @classmethod
    def create(
        cls,
        folder: Path,
        fingerprint: str,
        codebook: Tensor | None,
        parts: Sequence[Part] = (),
        next_sequence: int = 0,
    ) -> Store:
        """A new bank, open for writing. Until all of it is written there is none.

        Args:
            folder: where it will be.
            fingerprint: of its model.
            codebook: `[C, D]`, if it is to have one.
            parts: all its entries in order.
            next_sequence: of the entry that comes next.

        Raises:
            BankError: when the folder holds a bank, someone else makes one there, or something cannot be written.
        """
        with _errors(folder, "written to"):
            folder.mkdir(parents=True, exist_ok=True)
            store = cls(folder, WriterLock(folder), Manifest(fingerprint=fingerprint), [], codebook)
        try:
            if exists(folder):
                raise BankError(f"{folder} already holds a memory bank; open it, or choose another folder")
            with _errors(folder, "written to"):
                store._begin(parts, next_sequence)
        except BaseException:
            store.close()
            raise
        return store

    @classmethod
    def open(cls, folder: Path, *, write: bool) -> Store:
        """The last commit, for reading or for writing.

        Raises:
            BankError: when there is no bank, it is damaged, its format is unknown, it cannot be read, or someone else
                writes to it.
        """
        with _errors(folder, "opened"):
            if not exists(folder):
                raise BankError(f"there is no memory bank in {folder}")
            lock = WriterLock(folder) if write else None
            try:
                manifest, segments = _snapshot(folder, {})
                store = cls(folder, lock, manifest, segments, _read_codebook(folder, manifest))
                if write:
                    renew_copy(folder, manifest)
                    store._tidy()
            except BaseException:
                if lock is not None:
                    lock.release()
                raise
        return store

    def _begin(self, parts: Sequence[Part], next_sequence: int) -> None:
        try:
            digest = None
            if self.codebook is not None:
                data = tensor_bytes({"codebook": self.codebook.contiguous()})
                digest = write_file(self.folder / CODEBOOK, [data])
                write_file(self.folder / CODEBOOK_COPY, [data])
            manifest, segments = self._next(parts, next_sequence, compact=False)
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
        return self._lock is not None

    def close(self) -> None:
        """Lets others write; what was not committed is forgotten."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def refresh(self) -> bool:
        """Goes on to the last commit; on an error nothing changes.

        Returns:
            Whether there was a newer one.

        Raises:
            BankError: when the bank is damaged.
        """
        if self._was_writable:
            return False
        with _errors(self.folder, "read"):
            manifest, segments = _snapshot(self.folder, {segment.name: segment for segment in self.segments})
        if manifest == self.manifest:
            return False
        for segment, info in zip(segments, manifest.segments, strict=True):
            segment.follow(info)
        self.manifest, self.segments = manifest, segments
        return True

    def commit(
        self, parts: Sequence[Part], next_sequence: int, *, compact: bool = False, intent: Intent | None = None
    ) -> None:
        """Makes these parts the bank. On an error the last commit stays, and another attempt may follow.

        Args:
            parts: all entries in order; those that are segments of this bank already are not written again.
            next_sequence: of the entry that comes next.
            compact: writes every segment again that has deleted entries.
            intent: what is begun with it; None to leave that as it is.

        Raises:
            BankError: when something cannot be written.
        """
        with _errors(self.folder, "written to"):
            manifest, segments = self._next(parts, next_sequence, compact)
            if intent is not None:
                manifest = manifest.model_copy(update={"intent": intent})
            if manifest != self.manifest:
                manifest = manifest.model_copy(update={"generation": manifest.generation + 1})
                write_manifest(self.folder, manifest)
        self.manifest, self.segments = manifest, segments
        self._tidy()

    def _next(self, parts: Sequence[Part], next_sequence: int, compact: bool) -> tuple[Manifest, list[Segment]]:
        """The state that a commit leads to. Writes its segments, but not its manifest."""
        segments = [self._written(group, compact) for group in _groups(parts)]
        infos = tuple(segment.info for segment in segments)
        return self.manifest.model_copy(update={"next_sequence": next_sequence, "segments": infos}), segments

    def _written(self, group: Sequence[Part], compact: bool) -> Segment:
        """The segment that holds a group of parts: the one that it is already, or a new one."""
        only = group[0]
        if len(group) == 1 and isinstance(only, Segment) and any(only is segment for segment in self.segments):
            stays = not (only.is_mostly_deleted or (compact and only.tombstones))
            if stays:
                return only
        return write_segment(self.folder, group)

    def _tidy(self) -> None:
        """Removes what the manifest does not name; what cannot be removed now is left to the next time."""
        named = {file for info in self.manifest.segments for file in (info.tokens_file, info.records_file)}
        for file in self.folder.iterdir():
            if file.name not in named and (_SEGMENT_FILE.fullmatch(file.name) or _UNFINISHED_FILE.fullmatch(file.name)):
                with suppress(OSError):
                    file.unlink()


def _groups(parts: Sequence[Part]) -> list[list[Part]]:
    """The parts that are to be one segment each, so that each segment is larger than the next."""
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
def _errors(folder: Path, what: str) -> Iterator[None]:
    """Says of an error of the system which bank it befell."""
    try:
        yield
    except OSError as error:
        raise BankError(f"{folder} cannot be {what}: {error}") from error


def _rows(parts: Sequence[Part]) -> int:
    return sum(part.count for part in parts)


def _snapshot(folder: Path, known: Mapping[str, Segment]) -> tuple[Manifest, list[Segment]]:
    """The manifest and its segments, those that are known already as they are."""
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
            # A writer may have put other segments in place of those of the manifest that was just read.
            if read_manifest(folder / MANIFEST) == manifest:
                raise DamageError(f"{error.filename} is missing; repair the bank to keep what is not lost") from None


def _read_codebook(folder: Path, manifest: Manifest) -> Tensor | None:
    if manifest.codebook is None:
        return None
    path = folder / CODEBOOK
    data = path.read_bytes() if path.is_file() else b""
    if hashlib.sha256(data).hexdigest() != manifest.codebook:
        raise DamageError(f"{path} is damaged: its checksum differs from the manifest's; repair the bank")
    return load_tensors(data)["codebook"]
