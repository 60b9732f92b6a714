"""Reading the contents of a bank, by document or by row.

Rows are in the order of their entries' sequence numbers, so new rows come behind all others.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Sequence, Set
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import TypeAlias

import torch
from torch import Tensor

from mac_rag.errors import BankError, FingerprintError
from mac_rag.memory.entries import BankEntry
from mac_rag.memory.known_documents import KnownDocuments, Timeline
from mac_rag.memory.parts import Part, PlacedRecord
from mac_rag.memory.rows import Codebook, RowLayout, Rows, decoded
from mac_rag.nn.product_quantizer import ProductQuantizer, nearest_codes
from mac_rag.shipped_models import describe, version_of

# Makes summaries `[n, S]` of rows `[n, T, D]` as they are kept.
Summarise: TypeAlias = Callable[[Tensor], Tensor]


class Contents:
    """The entries of a bank, in several parts, and which entry each document belongs to.

    Args:
        fingerprint: fingerprint of the model that wrote the bank.
        codebook: `[C, D]` if the parts hold codes; a product quantizer if they hold its codes; None if they hold memory
            tokens.

    Attributes:
        codebook: `[C, D]`, or None.
        quantizer: the product quantizer of a bank with dtype pq that has held rows, or None.
        folder: folder of a bank on disk, or its URL; None for a bank in memory.
        keep_texts: True if the bank keeps the texts of its documents.
        secure_delete: True if the bank's files are overwritten before they are removed.
        layout: how rows are kept.
        version: a number that grows with every change of the bank.
        history: a number that grows when the bank on disk turns out not to continue the one that was read before, as
            after the return of a backup. Only within one history does the key of a row say which row it is.
    """

    folder: Path | str | None = None
    keep_texts = False
    secure_delete = False
    version = 0
    history = 0

    codebook: Tensor | None
    quantizer: ProductQuantizer | None

    def __init__(self, fingerprint: str, codebook: Codebook | None) -> None:
        self.fingerprint = fingerprint
        self._look_up_in(codebook)
        self.layout = RowLayout()
        self._hold(())

    def _look_up_in(self, codebook: Codebook | None) -> None:
        self.codebook = codebook if isinstance(codebook, Tensor) else None
        self.quantizer = codebook if isinstance(codebook, ProductQuantizer) else None

    @property
    def _codebook(self) -> Codebook | None:
        """What codes of rows are looked up in."""
        return self.quantizer if self.codebook is None else self.codebook

    def check_model(self, fingerprint: str) -> None:
        """Refuses a model that did not write this bank.

        Raises:
            FingerprintError: when the fingerprints differ; names both.
        """
        if fingerprint != self.fingerprint:
            writer, reader = version_of(self.fingerprint), version_of(fingerprint)
            raise FingerprintError(
                f"{self.folder or 'this bank'} was written by {describe(self.fingerprint)} and cannot be read by "
                f"{describe(fingerprint)}; use {f'--model {writer}' if writer else 'the model that wrote it'}, or make "
                f"a new bank for this one: mac-rag bank rebuild --bank {self.folder or 'BANK'} --into NEW --model "
                f"{reader.partition('@')[0] if reader else 'MODEL'}"
            )

    def _hold(self, parts: Sequence[Part]) -> None:
        """Makes these parts, in their current state, the contents."""
        self._parts = [part for part in parts if part.count]
        self._row_keys: Tensor | None = None
        self._timeline: Timeline | None = None

    @property
    def document_ids(self) -> list[str]:
        """Ids of all documents, in the order of their entries.

        Raises:
            DamageError: when the bank is on disk, and a record is not what was written.
        """
        return [name for part in self._parts for record, _ in part for name in record.document_ids]

    def __getitem__(self, document_id: str) -> BankEntry:
        return self._entry(*self._found(document_id))

    def __iter__(self) -> Iterator[BankEntry]:
        for part in self._parts:
            for placed in part:
                yield self._entry(part, placed)

    @property
    def id_hashes(self) -> Tensor:
        """`mac_rag.data.document_ids.id_hash` of each document, entry by entry, int64 `[len(self)]`."""
        return torch.cat([torch.empty(0, dtype=torch.long), *(part.id_hashes for part in self._parts)])

    def entry_of(self, row: int) -> BankEntry:
        """The entry that a row belongs to, by its number among the N rows.

        Raises:
            BankError: for an empty bank.
            IndexError: for a row that the bank does not have.
        """
        if not 0 <= row < self._rows():
            raise IndexError(f"row {row} of a bank with {self._rows()} rows")
        first = 0
        for part in self._parts:
            if row < first + part.count:
                break
            first += part.count
        return self._entry(part, part.entry_of(row - first))

    def is_textless(self, document_id: str) -> bool:
        """True if this bank keeps texts, has lost that of a document, and gets it back with the document.

        A document that was merged with others does not count: to put it again would forget the others.

        Raises:
            BankError: when the bank does not hold the document.
            DamageError: when the file of the texts is damaged.
        """
        part, (record, _) = self._found(document_id)
        return self.keep_texts and len(record.members) == 1 and part.lacks_text(record)

    def _entry(self, part: Part, placed: PlacedRecord) -> BankEntry:
        record, layout, codebook = placed.record, self.layout, self._codebook

        def phi() -> Tensor:
            return decoded(part.entry_rows(placed), layout, codebook).clone()

        return BankEntry(record.members, record.sequence, record.rows, phi, partial(part.texts, record))

    def __len__(self) -> int:
        return sum(part.documents for part in self._parts)

    def __contains__(self, document_id: object) -> bool:
        return isinstance(document_id, str) and self._find(document_id) is not None

    @property
    def row_keys(self) -> Tensor:
        """Keys of all rows, int64 `[N]`, ascending; a row keeps its key as long as it exists."""
        if self._row_keys is None:
            self._row_keys = torch.cat([torch.empty(0, dtype=torch.long), *(part.keys for part in self._parts)])
        return self._row_keys

    @property
    def row_members(self) -> list[tuple[str, ...]]:
        """For each of the N rows the ids of the documents that it stands for, read at each access."""
        return [members for part in self._parts for members in part.members()]

    @property
    def supersedes(self) -> bool:
        """True if one of the documents supersedes another, which the bank need not hold."""
        return any(part.supersedes for part in self._parts)

    @property
    def timeline(self) -> Timeline:
        """All documents, in the order of their entries, with what says when they count.

        Raises:
            DamageError: when the bank is on disk, has an index from before dates, and a record is not what was written.
        """
        if self._timeline is None:
            self._timeline = Timeline.cat([part.timeline for part in self._parts])
        return self._timeline

    def visible_rows(self, allowed: Container[str]) -> Tensor:
        """Which rows stand for allowed documents only, bool `[N]`.

        Args:
            allowed: ids of documents, also of some that the bank does not hold. Of a set smaller than the bank, only
                the records of its own documents are read.
        """
        if isinstance(allowed, KnownDocuments):
            return allowed.rows_of(self)
        if not isinstance(allowed, Set) or len(allowed) > len(self):
            return rows_allowed(self.row_members, allowed)
        visible = torch.zeros(len(self.row_keys), dtype=torch.bool)
        firsts = dict(zip(map(id, self._parts), accumulate((part.count for part in self._parts), initial=0)))
        for part, placed in filter(None, map(self._find, allowed)):
            if all(name in allowed for name in placed.record.document_ids):
                rows = part.row_numbers(placed)
                visible[firsts[id(part)] + rows.start : firsts[id(part)] + rows.stop] = True
        return visible

    @property
    def row_shape(self) -> tuple[int, int] | None:
        """(T, D) of a row; None for an empty bank."""
        if not self._parts:
            return None
        shape = self.layout.row_shape(self._parts[0].stored)
        if self.codebook is not None:
            return shape[0], self.codebook.shape[1]
        return shape[0] + self.layout.lexical_vectors, shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes of all rows as they are kept, without records, texts and codebook."""
        return sum(part.count * part.stored.row_bytes for part in self._parts)

    @property
    def phi(self) -> Tensor:
        """Memory tokens of all rows `[N, T, D]`.

        Raises:
            BankError: for an empty bank.
        """
        return self.read(0, self._rows())

    def read(self, start: int, stop: int) -> Tensor:
        """Memory tokens `[stop - start, T, D]` of consecutive rows.

        Raises:
            BankError: for an empty bank.
            IndexError: for rows that the bank does not have.
        """
        return decoded(self._consecutive(start, stop), self.layout, self._codebook)

    def codes(self, start: int, stop: int) -> Tensor:
        """Codes `[stop - start, T]` of consecutive rows, int64.

        Raises:
            BankError: for an empty bank, or one without a codebook.
            IndexError: for rows that the bank does not have.
        """
        if self.codebook is None:
            raise BankError("this bank has no codebook, so its memory tokens have no codes")
        return self._consecutive(start, stop).main.long()

    def take(self, index: Tensor) -> Tensor:
        """Memory tokens `[n, T, D]` of some rows.

        Args:
            index: `[n]`, row numbers in any order.

        Raises:
            BankError: for an empty bank.
            IndexError: for rows that the bank does not have.
        """
        rows = self._rows()
        if len(index) and not 0 <= int(index.min()) <= int(index.max()) < rows:
            raise IndexError(f"rows {int(index.min())} to {int(index.max())} of a bank with {rows} rows")
        wanted: list[tuple[Part, Tensor]] = []
        order, first = [index[:0]], 0
        for part in self._parts:
            here = ((index >= first) & (index < first + part.count)).nonzero()[:, 0]
            if len(here) or not wanted:
                wanted.append((part, index[here] - first))
                order.append(here)
            first += part.count
        for part, numbers in wanted[1:]:
            part.expect(numbers)
        found = [part.rows(numbers) for part, numbers in wanted]
        taken, place = Rows.cat(found), torch.cat(order)
        if len(found) > 1:  # otherwise they are in the order in which they were asked for
            taken = taken[place.argsort()]
        return decoded(taken, self.layout, self._codebook)

    def overview(self) -> list[tuple[int, Rows]]:
        """What is kept beside the memory tokens of all rows, part by part: the number of rows, and their columns.

        Raises:
            DamageError: when they are not what was written.
        """
        for part in self._parts[1:]:
            part.expect(None)
        return [(part.count, part.overview()) for part in self._parts]

    def _consecutive(self, start: int, stop: int) -> Rows:
        rows = self._rows()
        if not 0 <= start <= stop <= rows:
            raise IndexError(f"rows {start} to {stop} of a bank with {rows} rows")
        pieces, first = [self._parts[0].stored[:0]], 0
        for part in self._parts:
            low, high = max(start - first, 0), min(stop - first, part.count)
            if low < high:
                pieces.append(part.rows(slice(low, high)))
            first += part.count
        return Rows.cat(pieces[1:] or pieces)

    def _encoded(self, phi: Tensor, summarise: Summarise | None = None) -> Rows:
        """Memory tokens as the bank keeps them; with a codebook, the nearest codes."""
        row_shape, width = self.row_shape, None if self.codebook is None else self.codebook.shape[1]
        fits = phi.ndim == 3 and phi.shape[1] > self.layout.lexical_vectors and phi.shape[2] > 0
        if not fits or row_shape not in (None, phi.shape[1:]) or width not in (None, phi.shape[2]):
            raise BankError(
                f"memory tokens of shape {list(phi.shape[1:])} do not fit this bank"
                + (f", whose rows have shape {list(row_shape)}" if row_shape else "")
            )
        phi = phi.detach().to("cpu", torch.float32)
        if not phi.isfinite().all():
            row = int((~phi.isfinite().flatten(1).all(1)).nonzero()[0])
            raise BankError(
                f"row {row:,} of {len(phi):,} rows of memory tokens has numbers that are not finite; look for them in "
                "the model's weights, or use dtype fp32 or bf16 in place of fp16"
            )
        if self.codebook is None:
            self._check_quantizer(phi)
            rows = self.layout.encode(phi, self.quantizer)
            if summarise is not None and self.layout.summary:
                rows = self.layout.summarised(rows, summarise(self.layout.decode(rows, self.quantizer)))
            return rows
        if not self.codebook.any():
            raise BankError(
                f"the codebook of {self.folder or 'this bank'} has lost its codes with the last document; make a new "
                "bank with a new codebook"
            )
        nearest, _ = nearest_codes(phi.flatten(0, 1), self.codebook)
        return Rows({"codes": nearest.to(torch.int32).view(phi.shape[:2])})

    def _check_quantizer(self, phi: Tensor) -> None:
        """Refuses rows in a bank with dtype pq that has no codebooks for them."""
        if self.layout.dtype != "pq":
            return
        if self.quantizer is None:
            raise BankError(
                "a bank with rows 'pq' takes its codebooks from the model: put documents with an engine "
                "(MACEngine.adapt), or call keep_rows_as with a quantizer first"
            )
        tokens = phi.shape[1] - self.layout.lexical_vectors
        if (tokens, phi.shape[2]) != self.quantizer.row_shape:
            raise BankError(
                f"rows of {tokens} memory tokens of width {phi.shape[2]} do not fit the bank's codebooks, which are "
                f"for {self.quantizer.row_shape[0]} of width {self.quantizer.row_shape[1]}"
            )

    def _rows(self) -> int:
        if not self._parts:
            raise BankError("the memory bank is empty; adapt to some documents first")
        return sum(part.count for part in self._parts)

    def _find(self, document_id: str) -> tuple[Part, PlacedRecord] | None:
        """The entry that a document belongs to, and its part; None if there is none."""
        # What came last is what is asked for most, and is in memory.
        for part in reversed(self._parts):
            if (placed := part.find(document_id)) is not None:
                return part, placed
        return None

    def _found(self, document_id: str) -> tuple[Part, PlacedRecord]:
        found = self._find(document_id) if isinstance(document_id, str) else None
        if found is None:
            raise BankError(f"the bank holds no document {document_id!r}")
        return found


def rows_allowed(row_members: Iterable[Sequence[str]], allowed: Container[str]) -> Tensor:
    """Which rows stand for allowed documents only, bool `[N]`, from the documents of each row."""
    return torch.tensor([all(name in allowed for name in members) for members in row_members], dtype=torch.bool)


class Snapshot(Contents):
    """The contents of a bank as they were at one moment; later changes of the bank do not reach it.

    It costs a little memory as long as the bank does not change. It can be read in any thread, by one at a time.

    Args:
        bank: the bank.
        parts: its parts, as copies.
    """

    def __init__(self, bank: Contents, parts: Sequence[Part]) -> None:
        super().__init__(bank.fingerprint, bank._codebook)
        self.version, self.history = bank.version, bank.history
        self.folder, self.keep_texts, self.secure_delete = bank.folder, bank.keep_texts, bank.secure_delete
        self.layout = bank.layout
        self._hold(parts)
