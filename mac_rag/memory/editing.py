"""A bank's contents as they are changed in memory: documents come, are merged and go.

`mac_rag.memory.bank` writes the changes to disk.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor

from mac_rag.data.types import Document
from mac_rag.errors import BankError
from mac_rag.memory.contents import Contents, Snapshot, Summarise
from mac_rag.memory.entries import BankEntry
from mac_rag.memory.entry_table import RecordList
from mac_rag.memory.new_entries import NewEntry, described_members, new_entries
from mac_rag.memory.parts import PART_BITS, Part, no_entries
from mac_rag.memory.records import Record
from mac_rag.memory.rows import RowDtype, RowLayout, Rows
from mac_rag.nn.product_quantizer import ProductQuantizer
from mac_rag.shipped_models import describe


class EditableContents(Contents):
    """Contents that change in memory.

    Args:
        fingerprint: fingerprint of the model that writes the contents.
        keep_texts: True to keep the documents' texts.
        rows: numbers that memory tokens are kept in; None to leave it to the first that puts rows.
    """

    def __init__(self, fingerprint: str, keep_texts: bool, rows: RowDtype | None) -> None:
        super().__init__(fingerprint)
        self.keep_texts = keep_texts
        self.layout = RowLayout(dtype=rows)
        self._next_sequence = 0
        self._segments: list[Part] = []  # of the last commit, as copies that may have changed since
        self._tail = no_entries()  # entries that came since
        self._snapshot: Snapshot | None = None

    def _check_writable(self) -> None:
        """Raises BankError if the contents must not be changed."""

    def snapshot(self) -> Snapshot:
        """The current contents, uncommitted changes included, as they stay whatever happens to the bank."""
        if self._snapshot is None or self._snapshot.version != self.version:
            self._snapshot = Snapshot(self, [part.copy() for part in self._parts])
        return self._snapshot

    def keep_rows_as(self, layout: RowLayout, quantizer: ProductQuantizer | None = None) -> None:
        """Chooses how rows are kept, in a bank that holds none; any other bank stays as it is.

        A dtype that the bank has already been given stays.

        Args:
            layout: how rows are kept.
            quantizer: how they are kept in a bank with dtype pq, which keeps the first one that it is given.

        Raises:
            BankError: for dtype pq without a quantizer, or with one of another model.
        """
        self._check_writable()
        if len(self):
            return
        dtype = self.layout.dtype or layout.dtype
        if dtype != "pq":
            self.layout = layout.model_copy(update={"dtype": dtype, "whole_tokens": 0, "code_bytes": 0})
            return
        quantizer = self.quantizer or quantizer
        if quantizer is None:
            raise BankError(
                f"{describe(self.fingerprint)} has no codebooks to keep rows as 'pq'; fit them with python -m "
                "pipelines.fit_rows, or choose other numbers (rows 'int8')"
            )
        if quantizer.fingerprint != self.fingerprint:
            raise BankError(
                f"the codebooks for rows 'pq' were fitted to the memory tokens of {describe(quantizer.fingerprint)}, "
                f"not to those of {describe(self.fingerprint)}; fit them again with python -m pipelines.fit_rows"
            )
        self.quantizer, self.layout = quantizer, layout.quantized(quantizer)

    def put(
        self,
        documents: Sequence[Document],
        phi: Tensor,
        rows: Sequence[int] | None = None,
        *,
        summarise: Summarise | None = None,
    ) -> tuple[str, ...]:
        """Adds documents and replaces those with the same ids. On an error the bank does not change.

        Args:
            documents: K documents with distinct ids.
            phi: `[N, T, D]`, the memory tokens of all documents, row after row.
            rows: number of rows of each document; None for one row each.
            summarise: makes the summaries, in a bank whose layout has any; None if they are not known.

        Returns:
            Ids of other documents that were removed, because they were merged with a replaced document.

        Raises:
            BankError: for an id that occurs twice, metadata that are not JSON, or memory tokens that do not fit the
                documents or the bank.
        """
        self._check_writable()
        entries = new_entries(documents, rows, len(phi), keep_texts=self.keep_texts)
        encoded = self._encoded(phi, summarise)
        names = dict.fromkeys(document.id for document in documents)
        removed = [name for document_id in names if document_id in self for name in self._tombstone(document_id)]
        self._append(encoded, entries)
        return tuple(name for name in removed if name not in names)

    def describe(self, documents: Sequence[Document]) -> None:
        """Gives documents other metadata, such as another date. Their memory tokens and texts stay as they are.

        So does the time at which they were added, and with what they were merged.

        Args:
            documents: documents with distinct ids, with the texts that the bank holds them with.

        Raises:
            BankError: for an id that the bank does not hold or that occurs twice, for another text, and for metadata as
                `mac_rag.data.provenance.Member.of`; the bank does not change.
            DamageError: when the memory tokens of a document, or its kept text, are not what was written.
        """
        self._check_writable()
        members = described_members(documents, lambda name: self[name].members)
        found = {placed.record.sequence: (part, placed) for part, placed in map(self._found, members)}
        if not found:
            return
        rows, entries = [], []
        for part, placed in found.values():
            record = placed.record
            rows.append(part.entry_rows(placed))
            described = tuple(members.get(one.document_id, one) for one in record.members)
            entries.append(NewEntry(record.rows, described, part.texts(record)))
        for part, placed in found.values():
            part.tombstone(placed.record.sequence)
        self._append(Rows.cat(rows), entries)

    def merge(self, document_ids: Iterable[str], phi: Tensor) -> None:
        """Replaces the entries of these documents by one entry that stands for all of their documents.

        Args:
            document_ids: ids of documents, at least one of each entry to be merged.
            phi: `[rows, T, D]`, the memory tokens of the new entry.

        Raises:
            BankError: for an id that the bank does not hold, or memory tokens that do not fit the bank.
        """
        self._check_writable()
        found = {entry.sequence: entry for entry in map(self.__getitem__, document_ids)}
        merged = [found[sequence] for sequence in sorted(found)]
        if not merged or not 0 < len(phi) < 1 << PART_BITS:
            raise BankError(f"{len(merged)} entries and {len(phi)} rows of memory tokens cannot become one entry")
        members = tuple(member for entry in merged for member in entry.members)
        texts = tuple(text for entry in merged for text in entry.texts)
        encoded = self._encoded(phi)
        for entry in merged:
            self._tombstone(entry.document_id)
        self._append(encoded, [NewEntry(len(encoded), members, texts)])

    def delete(self, document_id: str) -> tuple[str, ...]:
        """Deletes a document with all its rows.

        The share of one document cannot be taken out of merged memory tokens. So the whole entry is deleted, and the
        document has no influence afterwards.

        Returns:
            Ids of all deleted documents: this one, and those that it was merged with.

        Raises:
            BankError: for an id that the bank does not hold.
        """
        self._check_writable()
        deleted = self._tombstone(document_id)
        self._changed()
        return deleted

    def _append(self, rows: Rows, entries: Sequence[NewEntry]) -> None:
        records = [Record(self._next_sequence + n, entry.rows, entry.members) for n, entry in enumerate(entries)]
        texts = {record.sequence: entry.texts for record, entry in zip(records, entries) if self.keep_texts}
        self._next_sequence += len(records)
        if self._tail.count:
            self._tail.append(rows, records, texts)
        else:
            self._tail = Part(rows, RecordList(records), texts)
        self._changed()

    def _tombstone(self, document_id: str) -> tuple[str, ...]:
        """Marks the entry of a document as deleted; returns the ids of all its documents."""
        part, (record, _) = self._found(document_id)
        part.tombstone(record.sequence)
        return record.document_ids

    def _changed(self) -> None:
        self.version += 1
        if self._tail.is_mostly_deleted:
            self._tail = self._tail.compacted()
        self._hold([*self._segments, self._tail])

    def restore(self, entries: Iterable[BankEntry], summarise: Summarise | None = None) -> None:
        """Appends entries of another bank.

        Args:
            entries: the entries. This bank must hold none of their documents.
            summarise: as for `put`.

        Raises:
            BankError: when this bank holds one of the documents, or memory tokens do not fit it. Entries that came
                before it are there, uncommitted.
        """
        self._check_writable()
        for entry in entries:
            for member in entry.members:
                if member.document_id in self:
                    raise BankError(f"this bank holds document {member.document_id!r} already; delete it first")
            rows = self._encoded(entry.phi, summarise)
            self._append(rows, [NewEntry(len(rows), entry.members, entry.texts)])
