"""A segment behind a URL: its records are fetched when it is opened, its rows before they are read."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Self, TypeVar

from torch import Tensor

from mac_rag.errors import BankError, DamageError
from mac_rag.memory.parts import PlacedRecord, Texts
from mac_rag.memory.records import Record
from mac_rag.memory.rows import OVERVIEW, GrowingRows, RowLayout, Rows
from mac_rag.memory.storage import tokens_file
from mac_rag.memory.storage.manifest import SegmentInfo
from mac_rag.memory.storage.remote.cache import BankCache, attempts
from mac_rag.memory.storage.remote.range_file import RangeFile
from mac_rag.memory.storage.segment import Segment, Verified, read_segment
from mac_rag.memory.storage.texts_file import TextsFile
from mac_rag.untrusted_files import MalformedError

_Result = TypeVar("_Result")

REMEDY = "; remove that object, and put the bank there again (mac-rag bank upload)"


class RemoteSegment(Segment):
    """A segment whose rows lie behind a URL, and in the cache as far as they were read.

    Rows are fetched and verified under one lock, because the file in the cache can begin anew at any time, to make room
    or to mend damage. Rows that were given out stay what they are: they have the old file mapped.
    """

    _cache: BankCache
    _remote: _RowsFile | None = None  # None for rows in memory, as codes are
    _remote_texts: _RemoteTexts

    def attach(self, cache: BankCache, info: SegmentInfo, rows: _RowsFile | None) -> None:
        """Tells the segment where it lies.

        Args:
            cache: the cache of the bank.
            info: what the manifest says about the segment.
            rows: the file of its rows; None for rows that are in memory.
        """
        self._cache, self._info = cache, info
        self._remote_texts = _RemoteTexts(cache, self.folder, info)
        if rows is not None:
            self._remote = rows
            rows.verified = self._verified
            self._rows = GrowingRows(Rows({}))  # nothing else may keep a file mapped that has begun anew

    def copy(self) -> Self:
        other = super().copy()
        if self._remote is not None:
            other._rows = self._rows
        return other

    @property
    def stored(self) -> Rows:
        if self._remote is None:
            return super().stored
        with self._remote.lock:
            return self._remote.rows

    def _held(self) -> AbstractContextManager[object]:
        return nullcontext() if self._remote is None else self._remote.lock

    def expect(self, index: Tensor | slice | None) -> None:
        """As `Part.expect`: begins to fetch. What goes wrong is told to the one who reads."""
        if self._remote is not None:
            self._cache.begin(self.overview if index is None else lambda: self.rows(index))

    def rows(self, index: Tensor | slice) -> Rows:
        """As `Part.rows`.

        Raises:
            BankError: when they cannot be fetched.
            DamageError: when they are not what was written.
        """
        with self._held():
            return super().rows(index)

    def entry_rows(self, placed: PlacedRecord) -> Rows:
        with self._held():
            return super().entry_rows(placed)

    def checksum(self, placed: PlacedRecord) -> str:
        with self._held():
            self._verify(slice(placed.start, placed.start + placed.record.rows))
            return super().checksum(placed)

    def overview(self) -> Rows:
        """As `Segment.overview`.

        Raises:
            BankError: when it cannot be fetched.
            DamageError: when it is not what was written.
        """
        if self._remote is None:
            return super().overview()
        return self._checked(self._remote, self._overview_ranges, super().overview)

    def check_records(self) -> None:
        """As `Segment.check_records`, of the file as the cache has it.

        Raises:
            BankError: when it cannot be fetched.
            DamageError: when it is not what was written.
        """
        try:
            self._cache.whole(self.folder, self._info.records_file, self._info.records)
            super().check_records()
        except FileNotFoundError as error:
            raise self._gone(error) from error
        except DamageError as error:
            raise _of_url(error, self._cache, self.folder) from error

    def _overview_ranges(self) -> Iterator[tuple[int, int]]:
        if not self._verified.overview:
            yield from _ranges(self._info, self._layout, [(0, self._info.shape[0])], OVERVIEW)

    def _verify(self, index: Tensor | slice) -> None:
        verify = super()._verify
        if self._remote is None or self._verified.all:
            verify(index)
            return

        def needed() -> Iterator[tuple[int, int]]:
            return _ranges(self._info, self._layout, map(self._span, self._unverified(index)))

        self._checked(self._remote, needed, lambda: verify(index))

    def _checked(
        self, remote: _RowsFile, needed: Callable[[], Iterable[tuple[int, int]]], check: Callable[[], _Result]
    ) -> _Result:
        """Fetches what is needed for a check, and makes it. If it fails, the file in the cache begins anew, once."""
        renewed = False
        with remote.lock:
            while True:
                try:
                    if not remote.bring(needed()):
                        continue
                except FileNotFoundError as error:
                    raise self._gone(error) from error
                try:
                    return check()
                except DamageError as error:
                    if renewed:
                        raise _of_url(error, self._cache, self.folder) from error
                renewed = True
                remote.renew()

    def _gone(self, error: FileNotFoundError) -> BankError:
        return BankError(
            f"{error.filename} is missing; if the bank was uploaded since it was opened, go on to its new state "
            "(refresh); otherwise put it there again (mac-rag bank upload)"
        )

    def texts(self, record: Record) -> Texts:
        """The texts of an entry; the first one of a segment fetches all of them.

        Raises:
            BankError: when they cannot be fetched.
            DamageError: when they are not what was written.
        """
        if self._info.texts is None:
            return super().texts(record)
        try:
            return tuple(map(self._remote_texts.file().text, record.members))
        except FileNotFoundError as error:
            raise self._gone(error) from error
        except MalformedError as error:
            place = self._cache.store.place(self._info.texts_file)
            raise DamageError(f"{place} is damaged: {error}{REMEDY}") from None


class _RowsFile(RangeFile):
    """The file of a segment's rows.

    Attributes:
        rows: all rows, as far as they are there.
        verified: what of them is known to be what was written.
    """

    def __init__(self, cache: BankCache, folder: Path, info: SegmentInfo, layout: RowLayout) -> None:
        super().__init__(cache, folder, info.tokens_file, info.offset + info.rows_bytes(layout))
        self._info, self._layout = info, layout
        self.verified: Verified | None = None
        self.rows = tokens_file.rows_of(self.content, info, layout)

    def _begin_anew(self) -> bool:
        super()._begin_anew()
        self.rows = tokens_file.rows_of(self.content, self._info, self._layout)
        if self.verified is not None:
            self.verified.forget()
        return False


class _RemoteTexts:
    """The file of a segment's texts, which is fetched when the first one is asked for."""

    def __init__(self, cache: BankCache, folder: Path, info: SegmentInfo) -> None:
        self._cache, self._folder, self._info = cache, folder, info
        self._file: TextsFile | None = None

    def file(self) -> TextsFile:
        if self._file is None:
            self._file = attempts(self._fetched)
        return self._file

    def _fetched(self) -> TextsFile:
        assert self._info.texts is not None
        path = self._cache.whole(self._folder, self._info.texts_file, self._info.texts)
        return TextsFile(path, self._info.texts)


def open_segment(cache: BankCache, info: SegmentInfo, layout: RowLayout) -> Segment:
    """Opens a segment behind a URL: fetches its records, and with codes its rows as well.

    Raises:
        FileNotFoundError: when one of its files is missing.
        DamageError: when one of its files is not what was written.
        BankError: when one cannot be fetched.
    """
    return attempts(lambda: _open_segment(cache, info, layout))


def _open_segment(cache: BankCache, info: SegmentInfo, layout: RowLayout) -> Segment:
    folder = cache.segment_folder(info)
    are_codes = len(info.shape) == 2
    later = {info.texts_file, *(() if are_codes else (info.tokens_file,))}
    for name, digest in info.digests.items():
        if name not in later:
            cache.whole(folder, name, digest)
    file = None if are_codes else _RowsFile(cache, folder, info, layout)
    without_texts = info.model_copy(update={"texts": None})
    try:
        segment = read_segment(
            folder,
            without_texts,
            layout,
            secure_delete=False,
            rows=None if file is None else file.rows,
            kind=RemoteSegment,
        )
    except DamageError as error:
        raise _of_url(error, cache, folder) from error
    assert isinstance(segment, RemoteSegment)
    segment.attach(cache, info, file)
    return segment


def _of_url(error: DamageError, cache: BankCache, folder: Path) -> DamageError:
    """An error about a file in the cache as one about the file behind the URL, with a remedy that helps there."""
    problem = str(error).replace(str(folder), cache.store.url).partition("; repair")[0]
    return DamageError(f"{problem}{REMEDY}")


def _ranges(
    info: SegmentInfo, layout: RowLayout, spans: Iterable[tuple[int, int]], columns: Iterable[str] | None = None
) -> Iterator[tuple[int, int]]:
    """Where some rows lie in the file of a segment.

    Args:
        info: what the manifest says about the segment.
        layout: how the bank keeps its rows.
        spans: first row, and first row behind, of each group of rows.
        columns: names of the columns; None for all.
    """
    offset, spans = info.offset, list(spans)
    for name, (dtype, shape) in layout.columns(info.shape, info.places).items():
        width = dtype.itemsize * math.prod(shape[1:])
        if width and (columns is None or name in columns):
            yield from ((offset + start * width, offset + stop * width) for start, stop in spans)
        offset += shape[0] * width
