"""A bank on disk: immutable segments and one manifest that names them.

    manifest.json, manifest.copy.json              what the bank consists of; see `mac_rag.memory.storage.manifest`
    segment-<random>.safetensors, .jsonl           entries that never change; see `mac_rag.memory.storage.segment`
    segment-<random>.texts.jsonl                   their texts, in a bank that keeps texts
    segment-<random>.index                         where their records are
    codebook.safetensors, codebook.copy.safetensors    with rows pq, what their codes are looked up in
    writer.lock, writer.json                       which process is writing

A commit writes new entries as a segment, syncs it, and then replaces the manifest in one rename. So a killed process
leaves the last commit, and a reader sees one commit or the next. New entries are merged with the last segments as in a
binary counter, each segment at least as large as the next: n documents make O(log n) segments, and each document is
written O(log n) times. A commit that fails removes what it has written. Files of former commits go before the next
one and when the bank is closed, and what a killed process has left goes when the next writer opens the bank.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from mac_rag.atomic_files import make_folder, remove_file, sync_folder, write_file
from mac_rag.errors import BankError, DamageError, FingerprintError
from mac_rag.memory.parts import Part
from mac_rag.memory.rows import RowLayout
from mac_rag.memory.storage.commit_reader import Commit, check_consistency, check_newest, quantizer_bytes, read_commit
from mac_rag.memory.storage.folder import (
    check_exists,
    exists,
    file_errors,
    remove_unused,
    remove_vacant,
)
from mac_rag.memory.storage.lock import WriterLock
from mac_rag.memory.storage.manifest import (
    CODEBOOK,
    FORMERS,
    MANIFEST,
    MANIFEST_COPY,
    Intent,
    Manifest,
    read_manifest,
    renew_copy,
    restore_manifest,
    write_manifest,
)
from mac_rag.memory.storage.segment import Segment, write_segment
from mac_rag.nn.product_quantizer import ProductQuantizer
from mac_rag.shipped_models import describe

# Segments are not merged beyond this many bytes, so that no commit copies much.
_LARGE = 256 << 20


class Store:
    """A bank on disk at one commit.

    Args:
        folder: folder of the bank.
        lock: the right to write to it; None to read only.
        manifest: the manifest of the commit.
        segments: the segments that the manifest names.
        quantizer: with rows pq, what their codes are looked up in; otherwise None.

    Attributes:
        manifest: the manifest of the commit.
        segments: the segments, in order. They never change; changes are made to copies, and committed with these.
    """

    def __init__(
        self,
        folder: Path,
        lock: WriterLock | None,
        manifest: Manifest,
        segments: Sequence[Segment],
        quantizer: ProductQuantizer | None,
    ) -> None:
        self.folder = folder
        self.manifest = manifest
        self.segments = tuple(segments)
        self.quantizer = quantizer
        self._lock = lock
        self._was_writable = lock is not None  # its bank may have changed, so it never follows another writer
        self._written: set[str] = set()  # names of segments that are on the disk for the next commit
        self._failed: Manifest | None = None  # of a commit that failed, if it may be on the disk nevertheless

    @classmethod
    def create(
        cls, folder: Path, like: Manifest, quantizer: ProductQuantizer | None, parts: Sequence[Part] = ()
    ) -> Store:
        """Makes a new bank and opens it for writing. A crash or an error before the end leaves no bank.

        Args:
            folder: folder of the bank; it is made if it does not exist.
            like: a manifest with the fingerprint, the next sequence number, the intent and the settings of the bank.
            quantizer: with rows pq, what their codes are looked up in; otherwise None.
            parts: all entries of the bank, in order.

        Raises:
            BankError: when the folder holds a bank, another process makes one there, or a file cannot be written.
        """
        nothing = {"generation": 0, "codebook": None, "codebook_name": CODEBOOK, "segments": ()}
        manifest = like.model_copy(update=nothing)
        with file_errors(folder, "written to"):
            is_new = not folder.exists()
            make_folder(folder)
            try:
                store = cls(folder, WriterLock(folder), manifest, (), quantizer)
            except BaseException:
                remove_vacant(folder, is_new)
                raise
        try:
            with file_errors(folder, "written to"):
                if exists(folder):
                    raise BankError(f"{folder} already holds a memory bank; open it, or choose another folder")
                store._begin(parts)
        except BaseException:
            store.close()
            remove_vacant(folder, is_new)
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
            check_exists(folder)
            check_newest(folder)
            lock = WriterLock(folder) if write else None
            try:
                manifest, segments, quantizer = read_commit(folder)
                store = cls(folder, lock, manifest, segments, quantizer)
                check_consistency(folder, manifest, segments, quantizer)
                if write:
                    renew_copy(folder, manifest)
                    store.tidy()
            except BaseException:
                if lock is not None:
                    lock.release()
                raise
        return store

    def _begin(self, parts: Sequence[Part]) -> None:
        """Writes the quantizer and the first commit."""
        try:
            digest = None
            if self.quantizer is not None:
                digest = self._write_quantizer(self.quantizer, self.manifest)
            segments = self._segments(parts, self.manifest.layout, None)
            manifest = self._next(segments, self.manifest.next_sequence).model_copy(update={"codebook": digest})
            write_manifest(self.folder, manifest)
            sync_folder(self.folder.parent)
        except BaseException:
            with suppress(OSError):
                for name in (MANIFEST, MANIFEST_COPY, *self.manifest.codebook_files):
                    remove_file(self.folder / name, secure_delete=self.manifest.secure_delete)
                self.tidy()
            raise
        self.manifest, self.segments = manifest, tuple(segments)
        self.tidy()

    @property
    def writable(self) -> bool:
        """True if the bank can be changed."""
        return self._lock is not None

    def close(self) -> None:
        """Releases the right to write; changes that were not committed are lost."""
        if self._lock is not None:
            with suppress(OSError, BankError):
                self._check_owner()
                self.tidy()
            self._lock.release()
            self._lock = None

    def refresh(self) -> bool:
        """Moves to the last commit; on an error nothing changes.

        Returns:
            True if there was another commit.

        Raises:
            BankError: when the bank is damaged.
            FingerprintError: when a bank of another model has taken its place.
        """
        if self._was_writable:
            return False
        with file_errors(self.folder, "read"):
            known = Commit(self.manifest, self.segments, self.quantizer)
            manifest, segments, quantizer = read_commit(self.folder, known)
            if manifest == self.manifest:
                return False
            if manifest.fingerprint != self.manifest.fingerprint:
                raise FingerprintError(
                    f"{self.folder} was written by {describe(self.manifest.fingerprint)} and has been replaced by a "
                    f"bank of {describe(manifest.fingerprint)}; open it again, with that model"
                )
            check_consistency(self.folder, manifest, segments, quantizer)
        self.manifest, self.segments, self.quantizer = manifest, segments, quantizer
        return True

    def write(
        self, parts: Sequence[Part], *, layout: RowLayout | None = None, rewrite: Part | None = None
    ) -> list[Segment]:
        """Writes what a commit of these parts needs beside the manifest.

        Args:
            parts: all entries in order; parts that are segments of this bank already are not written again.
            layout: how the parts keep their rows; None for as before.
            rewrite: a segment of this bank that is written again nevertheless, without its deleted entries.

        Returns:
            The segments to be committed instead of the parts.

        Raises:
            BankError: when a file cannot be written. What was written is removed.
        """
        self._check_owner()
        if not self._written:
            self.tidy()
        try:
            with file_errors(self.folder, "written to"):
                return self._segments(parts, layout or self.manifest.layout, rewrite)
        except BaseException:
            self.tidy()
            raise

    def commit(
        self,
        parts: Sequence[Part],
        next_sequence: int,
        *,
        rewrite: Part | None = None,
        layout: RowLayout | None = None,
        quantizer: ProductQuantizer | None = None,
        intent: Intent | None = None,
    ) -> None:
        """Makes these parts the contents of the bank. After an error the last commit stands, and a retry is possible.

        Args:
            parts: see `write`.
            next_sequence: sequence number of the next entry.
            rewrite: see `write`.
            layout: how the parts keep their rows; None for as before.
            quantizer: with dtype pq, what their codes are looked up in; None for as before.
            intent: the change that starts after this commit; None to leave the recorded intent as it is.

        Raises:
            BankError: when a file cannot be written, or another process has changed the bank.
        """
        layout = layout or self.manifest.layout
        segments = self.write(parts, layout=layout, rewrite=rewrite)
        manifest = self._next(segments, next_sequence).model_copy(update={"layout": layout})
        quantizer = quantizer or self.quantizer
        if quantizer is not None and quantizer is not self.quantizer:
            manifest = self._with_quantizer(manifest, quantizer)
        if intent is not None:
            manifest = manifest.model_copy(update={"intent": intent})
        if manifest != self.manifest:
            manifest = manifest.model_copy(update={"generation": manifest.generation + 1})
            self._failed = manifest
            try:
                with file_errors(self.folder, "written to"):
                    write_manifest(self.folder, manifest)
            except BaseException:
                with suppress(OSError, DamageError):
                    self._undo()
                raise
        # Files that are not needed any more go later: nothing may fail between the commit and the news of it.
        self.manifest, self.segments, self._failed = manifest, tuple(segments), None
        self.quantizer = quantizer
        self._written.clear()

    def _with_quantizer(self, manifest: Manifest, quantizer: ProductQuantizer) -> Manifest:
        """The manifest with another quantizer, whose files are written."""
        named = manifest.model_copy(update={"codebook_name": f"{CODEBOOK}-{secrets.token_hex(8)}"})
        try:
            with file_errors(self.folder, "written to"):
                return named.model_copy(update={"codebook": self._write_quantizer(quantizer, named)})
        except BaseException:
            self.tidy()
            raise

    def _write_quantizer(self, quantizer: ProductQuantizer, manifest: Manifest) -> str:
        """Writes a quantizer and its copy under the names that a manifest gives them; returns the sha256."""
        data = quantizer_bytes(quantizer)
        [digest, _] = [
            write_file(self.folder / name, [data], secure_delete=manifest.secure_delete)
            for name in manifest.codebook_files
        ]
        return digest

    def _next(self, segments: Sequence[Segment], next_sequence: int) -> Manifest:
        infos = tuple(segment.info for segment in segments)
        return self.manifest.model_copy(update={"next_sequence": next_sequence, "segments": infos})

    def _check_owner(self) -> None:
        """Makes sure that nobody else has written to the bank, and that a failed commit is not there after all."""
        assert self._lock is not None
        with file_errors(self.folder, "written to"):
            self._lock.check()
            if self._failed is not None:
                self._undo()
            on_disk = read_manifest(self.folder / MANIFEST)
        if on_disk != self.manifest:
            raise BankError(
                f"{self.folder} is at generation {on_disk.generation}, and this process left it at "
                f"{self.manifest.generation}: another process has changed it, or a copy was put in its place; close "
                "the bank, open it again and repeat the change"
            )

    def _undo(self) -> None:
        """Takes back what a failed commit has left. The error may have come after its manifest had taken its name."""
        with suppress(OSError):
            renew_copy(self.folder, self.manifest)  # beside a copy that is ahead, the manifest would look old
        restore_manifest(self.folder, self.manifest)
        self._failed = None
        self.tidy()

    def _segments(self, parts: Sequence[Part], layout: RowLayout, rewrite: Part | None) -> list[Segment]:
        """Segments that hold these parts; writes those that are not on the disk yet."""
        segments = []
        for group in _groups(parts):
            first = group[0]
            if len(group) > 1 or not isinstance(first, Segment) or first is rewrite or not self._is_good(first):
                first = write_segment(
                    self.folder,
                    group,
                    layout,
                    keep_texts=self.manifest.keep_texts,
                    secure_delete=self.manifest.secure_delete,
                )
                self._written.add(first.name)
            segments.append(first)
        return segments

    def _is_good(self, segment: Segment) -> bool:
        """True if a segment can stay as it is. One that a failed commit had written is not there any more."""
        on_disk = self._written.union(info.name for info in self.manifest.segments)
        return segment.folder == self.folder and segment.name in on_disk and not segment.is_mostly_deleted

    def tidy(self) -> OSError | None:
        """Removes files that no commit needs. The next call tries again where the system refuses.

        Returns:
            The first error, if some of them are still there.
        """
        manifests = [self.manifest] if self._failed is None else [self.manifest, self._failed]
        self._written.clear()
        infos = [info for manifest in manifests for info in manifest.segments]
        used = {name for info in infos for name in info.files}.union(*(each.codebook_files for each in manifests))
        used = used if self._failed is None else used.union(FORMERS)
        return remove_unused(self.folder, used, secure_delete=self.manifest.secure_delete)


def _groups(parts: Sequence[Part]) -> list[list[Part]]:
    """Groups the parts that become one segment each, so that each segment is larger than the next."""
    groups: list[list[Part]] = []
    for part in parts:
        if not part.count:
            continue
        groups.append([part])
        while len(groups) > 1 and _rows(groups[-2]) <= _rows(groups[-1]):
            if _rows(groups[-2] + groups[-1]) * part.stored.row_bytes > _LARGE:
                break
            groups[-2:] = [groups[-2] + groups[-1]]
    return groups


def _rows(parts: Sequence[Part]) -> int:
    return sum(part.count for part in parts)
