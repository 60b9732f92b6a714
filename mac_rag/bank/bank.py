"""The memory bank M: memory tokens of every document, with the documents' ids and provenance, in one SQLite file.

A document has one row of memory tokens `[T, D]`, or several rows if it is longer than what the amortization network
reads at once. In a bank of codes, a row is uint8 `[n, B]` instead: keys and values of n tokens, in B bytes each.
Several documents can be merged into one entry, which then stands for all of them. Rows are in the order of their
entries' sequence numbers, so new rows come after all others.
"""

from __future__ import annotations

import json
import secrets
import threading
import weakref
import zlib
from collections.abc import Callable, Container, Iterable, Iterator, Sequence, Set
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeAlias

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as tensor_bytes
from torch import Tensor

from mac_rag.bank.database import (
    PART_BITS,
    PUT_SETTINGS,
    SEQUENCES,
    Connection,
    Database,
    Pin,
    SettingsRow,
    exists,
    local_path,
)
from mac_rag.bank.directory import Directory, followed, index_crc, span
from mac_rag.bank.entries import Entry, NewEntry, Texts, described_members, new_entries
from mac_rag.bank.interface import BankContents, Intent
from mac_rag.bank.keys_file import KeysFile, read_keys_file, remove_keys_file, write_keys_file
from mac_rag.bank.known_documents import KnownDocuments
from mac_rag.bank.rows import NewRows, RowDtype, RowLayout, Rows, Summaries, row_crc
from mac_rag.data.characters import fault_of
from mac_rag.data.document_ids import id_hash
from mac_rag.data.provenance import Member
from mac_rag.data.types import Document
from mac_rag.errors import BankError, DamageError, FingerprintError
from mac_rag.nn.product_quantizer import ProductQuantizer
from mac_rag.shipped_models import describe, shipped_name
from mac_rag.untrusted_files import METADATA_DEPTH, parse_json

__all__ = ["BankEntry", "Contents", "MemoryBank", "Snapshot"]

# Makes summaries `[n, S]` of rows `[n, T, D]` as they are kept.
Summarise: TypeAlias = Callable[[NewRows], Tensor]

_PAGE = 512  # entries that are read in one query
_SUMMARIES = 8192  # rows whose summaries are read in one query
_BLOBS = 1 << 20  # bytes of rows that are read in one query, if there are several: so few stay in a processor's cache
_MOST_PLACES = 1 << 24  # numbers of the lexical vectors of a row, whose postings have an offset for each
# From this many rows on, the keys of a bank are kept in a file of their own. In the bank, they lie between the codes.
_MANY_ROWS = 2_000
_MOST_CODES = 1 << 29  # bytes of the codes of a row; SQLite takes twice as many
# A document of the index whose text only the bank holds gets it back before the bank deletes it.
_TAKE_TEXT = (
    "UPDATE bm25_document SET text = (SELECT text.text FROM document JOIN text ON text.document = document.key "
    "WHERE document.id = bm25_document.id) WHERE text IS NULL AND id = ?"
)
_REMEDY = "; restore a backup, or delete it and adapt to it again"
_Count = Annotated[int, Field(ge=0, lt=SEQUENCES)]
_Positive = Annotated[int, Field(ge=1, lt=1 << 31)]


class Settings(BaseModel):
    """What holds for a whole bank at one commit.

    Attributes:
        fingerprint: fingerprint of the model that wrote the bank.
        keep_texts: True if the bank keeps the texts of its documents.
        layout: how rows are kept.
        shape: `(T, D)` of the memory tokens of a row, without lexical vectors; `(1, B)` in a bank of codes, whose rows
            have one token or more; None for an empty bank.
        documents: number of the documents.
        bytes: bytes of all rows.
        version: number of the commit.
        next_sequence: sequence number of the next entry; numbers are never used again.
        changes_since: the commit after which the table `change` is complete.
        intent: the change of bank and retriever that starts after this commit and is complete with the next.
        model: name of the model, a hint for people; None if it is not known.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    fingerprint: str
    keep_texts: bool = False
    layout: RowLayout = RowLayout()
    shape: tuple[_Positive, _Positive] | None = None
    documents: _Count = 0
    bytes: Annotated[int, Field(ge=0)] = 0
    version: _Count = 0
    next_sequence: _Count = 0
    changes_since: _Count = 0
    intent: Intent = Intent()
    model: Annotated[str, Field(max_length=4096)] | None = None

    @classmethod
    def read(cls, connection: Connection) -> Settings:
        """The settings of a bank.

        Raises:
            DamageError: when they are not what was written.
        """
        try:
            [(version, data, crc)] = connection.rows("SELECT version, data, crc FROM setting")
            if _crc(str(version), data) != crc:
                raise ValueError("the checksum of its settings differs")
            settings = cls.model_validate(json.loads(data))
            if settings.version != version:
                raise ValueError("its settings are those of another commit")
            return settings
        except ValidationError as error:
            fault = error.errors()[0]
            place = ".".join(map(str, fault["loc"]))
            raise DamageError(f"{connection.path} is damaged: {place}: {fault['msg']}") from error
        except (ValueError, TypeError, RecursionError) as error:
            raise DamageError(f"{connection.path} is damaged: {error}; restore it from a backup") from error

    @property
    def row(self) -> SettingsRow:
        """As they are written."""
        data = json.dumps(self.model_dump(mode="json"))
        return self.version, data, _crc(str(self.version), data)


class State(NamedTuple):
    """A bank at one commit.

    Attributes:
        settings: its settings.
        directory: its entries.
        quantizer: with rows `pq`, what their codes are looked up in; otherwise None.
        writer: the name of the writer that made the commit.
        keys: the derived file that holds the summaries of the first rows; None if there is none.
    """

    settings: Settings
    directory: Directory
    quantizer: ProductQuantizer | None
    writer: str
    keys: KeysFile | None = None


@dataclass(frozen=True)
class BankEntry(Entry):
    """An entry of a bank in one file.

    Attributes:
        bank: the bank, or a snapshot of it.

    Examples:
        >>> import torch
        >>> from mac_rag import Document, MemoryBank
        >>> bank = MemoryBank("fingerprint of the model")
        >>> documents = [Document("may", "The bridge opened.", {"year": 2004}), Document("june", "The bridge closed.")]
        >>> forgotten = bank.put(documents, torch.zeros(2, 4, 8))
        >>> bank["may"].metadata["year"], bank["may"].phi.shape
        (2004, torch.Size([1, 4, 8]))
        >>> bank.merge(["may", "june"], torch.zeros(1, 4, 8))
        >>> [member.document_id for member in bank["june"].members]
        ['may', 'june']
    """

    bank: Contents = field(repr=False, compare=False)

    @property
    def row_keys(self) -> range:
        """Keys of its rows; see `Contents.row_keys`."""
        return range(self.sequence << PART_BITS, (self.sequence << PART_BITS) + self.rows)

    @property
    def phi(self) -> Tensor:
        """Memory tokens `[rows, T, D]` of the entry, read at each access.

        Raises:
            BankError: when the entry was deleted since, or in a bank of codes.
            DamageError: when they are not what was written.
        """
        return self.bank.phi_of(self.row_keys)

    @property
    def codes(self) -> list[Tensor]:
        """The codes of each row, uint8 `[n, B]`, in a bank of codes; read, and errors, as `phi`."""
        return self.bank.codes(self.row_keys)

    @property
    def memory(self) -> NewRows:
        """What `MemoryBank.put` takes: `codes` in a bank of codes, otherwise `phi`."""
        return self.codes if self.bank.layout.token_bytes else self.phi

    @property
    def texts(self) -> Texts:
        """The kept text of each member; None where the bank keeps none; read, and errors, as `phi`."""
        return self.bank.texts_of(self.sequence, len(self.members))


class Contents:
    """The contents of a bank at one version, by document or by row.

    Attributes:
        path: file of a bank on disk; None for a bank in memory.
        version: a number that grows with every change of the bank.
        history: a number that grows when the bank on disk turns out not to continue the one that was read before, as
            after the return of a backup. Only within one history does the key of a row say which row it is.
        index_version: a number that grows when the index in the bank has changed otherwise than by its retriever: after
            `rollback`, `refresh` and `delete`.
    """

    path: Path | None = None
    version = 0
    history = 0
    index_version = 0

    def __init__(self, state: State) -> None:
        self._state = state

    @property
    def connection(self) -> Connection:
        """A connection that sees these contents."""
        raise NotImplementedError

    def renewed(self, former: BankContents) -> BankContents:
        """See `Snapshot.renewed`."""
        return self

    def release(self) -> None:
        """See `Snapshot.release`; a bank holds its commit until it is closed."""

    @property
    def writer(self) -> str:
        """Name of the writer that made the last commit."""
        return self._state.writer

    @property
    def _now(self) -> State:
        return self._state

    @property
    def directory(self) -> Directory:
        """All entries and their documents, without ids."""
        return self._now.directory

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the model that wrote the bank."""
        return self._state.settings.fingerprint

    @property
    def keep_texts(self) -> bool:
        """True if the bank keeps the texts of its documents."""
        return self._state.settings.keep_texts

    @property
    def layout(self) -> RowLayout:
        """How rows are kept."""
        return self._state.settings.layout

    @property
    def quantizer(self) -> ProductQuantizer | None:
        """The product quantizer of a bank with dtype pq that has held rows, or None."""
        return self._state.quantizer

    @property
    def model(self) -> str | None:
        """Name of the model that wrote the bank, where it is known: a hint for people."""
        return self._state.settings.model

    def check_model(self, fingerprint: str, name: str | None = None) -> None:
        """Refuses a model that did not write this bank; `name` is the model's own, for the message.

        Raises:
            FingerprintError: when the fingerprints differ; names both.
        """
        if fingerprint != self.fingerprint:
            writer, reader = shipped_name(self.fingerprint) or self.model, shipped_name(fingerprint) or name
            raise FingerprintError(
                f"{self.path or 'this bank'} was written by {describe(self.fingerprint, writer)} and cannot be read by "
                f"{describe(fingerprint, name)}; use {f'--model {writer}' if writer else 'the model that wrote it'}, "
                f"or make a new bank for this one: mac-rag bank rebuild --bank {self.path or 'BANK'} --into NEW "
                f"--model {reader or 'MODEL'}"
            )

    @property
    def document_ids(self) -> list[str]:
        """Ids of all documents, in the order of their entries.

        Raises:
            DamageError: when one is not what was written.
        """
        return [name for (name,) in self.connection.rows("SELECT id FROM document ORDER BY key")]

    def ids_at(self, places: Sequence[int]) -> list[str]:
        """Ids of some documents, by their places in the directory.

        Raises:
            DamageError: when one is missing.
        """
        keys = self.directory.document_keys(torch.tensor(places, dtype=torch.long)).tolist()
        names = dict(self.connection.rows_in("SELECT key, id FROM document WHERE key IN ({})", keys))
        if len(names) < len(set(keys)):
            raise DamageError(f"{self.connection.path} is damaged: it lacks the id of a document{_REMEDY}")
        return [names[key] for key in keys]

    def __getitem__(self, document_id: str) -> BankEntry:
        return self.entry(self._found(document_id) >> PART_BITS)

    def __iter__(self) -> Iterator[BankEntry]:
        sequences, rows = self.directory.sequences.tolist(), self.directory.rows.tolist()
        for first in range(0, len(sequences), _PAGE):
            some = sequences[first : first + _PAGE]
            members = self._members(some[0], some[-1])
            for sequence, count in zip(some, rows[first : first + _PAGE]):
                if sequence in members:
                    yield BankEntry(members[sequence], sequence, count, self)
                elif (self.directory.sequences == sequence).any():  # otherwise it was deleted since the loop began
                    raise DamageError(
                        f"{self.connection.path} is damaged: entry {sequence:,} has no documents; restore it from a "
                        "backup"
                    )

    def entry(self, sequence: int) -> BankEntry:
        """An entry by its sequence number.

        Raises:
            BankError: when there is none.
            DamageError: when it is not what was written.
        """
        place = int(torch.searchsorted(self.directory.sequences, sequence))
        members = self._members(sequence, sequence).get(sequence)
        if members is None or place == len(self.directory.sequences):
            raise BankError(f"{self.path or 'this bank'} holds no entry {sequence:,}")
        return BankEntry(members, sequence, int(self.directory.rows[place]), self)

    def _members(self, first: int, last: int) -> dict[int, tuple[Member, ...]]:
        """The documents of consecutive entries, by sequence number."""
        found: dict[int, list[Member]] = {}
        fields = "key, id, lower(hex(content_hash)), metadata, added, crc"
        for key, *member, crc in self.connection.rows(
            f"SELECT {fields} FROM document WHERE key >= ? AND key <= ? ORDER BY key", (span(first)[0], span(last)[1])
        ):
            try:
                if _crc(*member) != crc:
                    raise ValueError("its checksum differs")
                name, content_hash, metadata, added = member
                parsed = parse_json(metadata, depth=METADATA_DEPTH)
                if not isinstance(parsed, dict):
                    raise TypeError("its metadata are no JSON object")
                known = Member(name, content_hash, parsed, added)
            except (ValueError, TypeError, AttributeError) as error:
                raise DamageError(
                    f"{self.connection.path} is damaged: document {member[0]!r:.80}: {error}{_REMEDY}"
                ) from error
            found.setdefault(key >> PART_BITS, []).append(known)
        return {sequence: tuple(members) for sequence, members in found.items()}

    def texts_of(self, sequence: int, count: int) -> Texts:
        """The texts of the documents of an entry, by its sequence number and their number; None where none is kept.

        Raises:
            BankError: when they were deleted since.
            DamageError: when they are not what was written.
        """
        if not self.keep_texts:
            return (None,) * count
        found = self.connection.rows(
            "SELECT id, metadata, lower(hex(content_hash)), text FROM document LEFT JOIN text ON document = key "
            "WHERE key >= ? AND key <= ? ORDER BY key",
            span(sequence),
        )
        if len(found) != count:
            raise BankError(f"the document was deleted from {self.path or 'this bank'} since")
        texts = []
        for name, metadata, content_hash, text in found:
            with suppress(ValueError, TypeError, AttributeError, BankError):
                if Member(name, content_hash, parse_json(metadata, depth=METADATA_DEPTH), "").matches(text):
                    texts.append(text)
                    continue
            raise DamageError(f"{self.connection.path} is damaged: the text of document {name!r:.80}{_REMEDY}")
        return tuple(texts)

    def __len__(self) -> int:
        return self.directory.documents

    def __contains__(self, document_id: object) -> bool:
        return isinstance(document_id, str) and self._find(document_id) is not None

    @property
    def row_keys(self) -> Tensor:
        """Keys of all rows, int64 `[N]`, ascending; a row keeps its key as long as it exists."""
        return self.directory.row_keys

    @property
    def row_members(self) -> list[tuple[str, ...]]:
        """For each of the N rows the ids of the documents that it stands for, read at each access."""
        names: dict[int, tuple[str, ...]] = {}
        for key, name in self.connection.rows("SELECT key, id FROM document ORDER BY key"):
            names[key >> PART_BITS] = (*names.get(key >> PART_BITS, ()), name)
        return [names[sequence] for sequence in (self.row_keys >> PART_BITS).tolist()]

    @property
    def supersedes(self) -> bool:
        """True if one of the documents supersedes another, which the bank need not hold."""
        return bool(len(self.directory.superseding))

    def visible_rows(self, allowed: Container[str]) -> Tensor:
        """Which rows stand for allowed documents only, bool `[N]`.

        Args:
            allowed: ids of documents, also of some that the bank does not hold. Of a set smaller than the bank, only
                its own documents are read.
        """
        if isinstance(allowed, KnownDocuments):
            return allowed.rows_of(self)
        if not isinstance(allowed, Set) or len(allowed) > len(self):
            return rows_allowed(self.row_members, allowed)
        names = [name for name in allowed if isinstance(name, str) and fault_of(name) is None]
        found: dict[int, int] = {}  # sequence number of an entry -> how many of its documents are allowed
        for (key,) in self.connection.rows_in("SELECT key FROM document WHERE id IN ({})", names):
            found[key >> PART_BITS] = found.get(key >> PART_BITS, 0) + 1
        directory = self.directory
        counts = torch.zeros(len(directory.sequences), dtype=torch.long)
        sequences = torch.tensor(list(found), dtype=torch.long)
        counts[torch.searchsorted(directory.sequences, sequences)] = torch.tensor(
            list(found.values()), dtype=torch.long
        )
        return (counts == directory.members)[directory.row_entries]

    @property
    def row_shape(self) -> tuple[int, int] | None:
        """(T, D) of a row; None for an empty bank and for a bank of codes, whose rows differ (`token_counts`)."""
        shape = self._state.settings.shape
        return None if shape is None or self.layout.token_bytes else (shape[0] + self.layout.lexical_vectors, shape[1])

    @property
    def nbytes(self) -> int:
        """Bytes of all rows as they are kept, without documents, texts and quantizer."""
        return self._state.settings.bytes

    @property
    def phi(self) -> Tensor:
        """Memory tokens of all rows `[N, T, D]`.

        Raises:
            BankError: for an empty bank, and for a bank of codes; so does `take`.
        """
        return self.take(torch.arange(len(self.row_keys)))

    def take(self, index: Tensor) -> Tensor:
        """Memory tokens `[n, T, D]` of some rows.

        Args:
            index: `[n]`, row numbers in any order.

        Raises:
            BankError: for an empty bank.
            IndexError: for rows that the bank does not have.
        """
        rows = len(self.row_keys)
        if not rows:
            raise BankError("the memory bank is empty; adapt to some documents first")
        if len(index) and not 0 <= int(index.min()) <= int(index.max()) < rows:
            raise IndexError(f"rows {int(index.min())} to {int(index.max())} of a bank with {rows} rows")
        return self.phi_of(self.row_keys[index].tolist())

    def phi_of(self, keys: Sequence[int]) -> Tensor:
        """Memory tokens `[n, T, D]` of rows by their keys.

        Raises:
            BankError: when one of them was deleted since, or in a bank of codes.
            DamageError: when one is not what was written.
        """
        if self.layout.token_bytes:
            raise BankError(f"{self.path or 'this bank'} holds codes and no memory tokens; read them with codes")
        shape = self._state.settings.shape
        if shape is None:
            raise BankError(f"the memory tokens were deleted from {self.path or 'this bank'} since")
        # numpy asks the system for large pages, and torch does not: the first write to each page costs a fault.
        tokens, width = shape[0] + self.layout.lexical_vectors, shape[1]
        found = torch.from_numpy(np.empty((len(keys), tokens, width), dtype=np.float32))
        step = max(1, _BLOBS // self.layout.row_bytes(*shape))
        for some, out in zip((keys[first : first + step] for first in range(0, len(keys), step)), found.split(step)):
            _, places, weights, codes = zip(*self._kept(some))
            try:
                self.layout.decode(self.layout.unpack(codes, places, weights, *shape), self.quantizer, out=out)
                # A sum costs little, and tells that all numbers are finite.
                if not out.sum().isfinite() and not out.isfinite().all():
                    raise ValueError("a number is not finite")
            except (ValueError, TypeError, RuntimeError, IndexError) as error:
                raise self._damaged(some[0], f"they are not what was written: {error}") from error
        return found

    def codes(self, keys: Sequence[int]) -> list[Tensor]:
        """The codes of rows by their keys, uint8 `[n, B]` each, in a bank of codes.

        Args:
            keys: some of `row_keys`, in any order; see also `rows_of`.

        Raises:
            BankError: when one of them was deleted since, or in a bank of memory tokens.
            DamageError: when one is not what was written.
        """
        self._check_holds_codes()
        found = []
        for key, (tokens, _, _, codes) in zip(keys, self._kept(keys), strict=True):
            self._check_length(key, tokens, len(codes))
            found.append(torch.frombuffer(bytearray(codes), dtype=torch.uint8).view(-1, self.layout.token_bytes))
        return found

    def token_counts(self, keys: Sequence[int]) -> list[int]:
        """The number of tokens of rows by their keys, in a bank of codes, without reading their codes.

        Raises:
            BankError, DamageError: as `codes`; but what only the checksum of the codes tells is not found.
        """
        self._check_holds_codes()
        found = self._of_rows("tokens, length(codes)", keys)
        for key, (tokens, size) in zip(keys, found, strict=True):
            self._check_length(key, tokens, size)
        return [tokens for tokens, _ in found]

    def rows_of(self, document_ids: Iterable[str]) -> dict[str, list[int]]:
        """The keys of the rows of each document, in their order; documents that the bank does not hold are left out.

        Documents that were merged have the same rows.
        """
        names = [name for name in dict.fromkeys(document_ids) if isinstance(name, str) and fault_of(name) is None]
        found = self.connection.rows_in("SELECT id, key, rows FROM document WHERE id IN ({})", names)
        spans = {name: (span(key >> PART_BITS)[0], rows) for name, key, rows in found}
        return {name: list(range(spans[name][0], sum(spans[name]))) for name in names if name in spans}

    def documents_of(self, keys: Iterable[int]) -> dict[int, str]:
        """The id of the document that each of some rows was made of, by the row's key; see `row_keys`.

        Of merged documents it is that of the first.
        """
        first = {key: key >> PART_BITS << PART_BITS for key in keys}
        found = dict(self.connection.rows_in("SELECT key, id FROM document WHERE key IN ({})", [*set(first.values())]))
        return {key: found[own] for key, own in first.items()}

    def _check_holds_codes(self) -> None:
        if self._state.settings.shape is not None and not self.layout.token_bytes:
            raise BankError(f"{self.path or 'this bank'} holds memory tokens and no codes; read them with phi")

    def _check_length(self, key: int, tokens: int, size: int) -> None:
        if tokens < 1 or tokens * self.layout.token_bytes != size:
            raise self._damaged(key, f"{tokens:,} tokens of {self.layout.token_bytes:,} bytes in {size:,} bytes")

    def _kept(self, keys: Sequence[int]) -> list[tuple[int, bytes, bytes, bytes]]:
        """Number of tokens, places, weights and codes of rows, if their checksums are right; errors as `phi_of`."""
        kept = []
        for key, (crc, *row) in zip(keys, self._of_rows("crc, tokens, places, weights, codes", keys), strict=True):
            tokens, places, weights, codes = row
            if row_crc(codes, places, weights) != crc:
                raise self._damaged(key, "their checksum differs")
            kept.append((tokens, places, weights, codes))
        return kept

    def _of_rows(self, columns: str, keys: Sequence[int]) -> list[tuple[Any, ...]]:
        """Some columns of rows by their keys."""
        statement = f"SELECT key, {columns} FROM row WHERE key IN ({{}})"
        found = {row[0]: row[1:] for row in self.connection.rows_in(statement, list(dict.fromkeys(keys)))}
        for key in keys:
            if key not in found:
                raise self._missing(key)
        return [found[key] for key in keys]

    def _missing(self, key: int) -> BankError:
        if self._ids_of(key):
            return self._damaged(key, "they are missing")
        return BankError(f"the {self._what} were deleted from {self.path or 'this bank'} since")

    @property
    def _what(self) -> str:
        return "codes" if self.layout.token_bytes else "memory tokens"

    def _ids_of(self, key: int) -> list[str]:
        """The documents that a row stands for."""
        found = self.connection.rows("SELECT id FROM document WHERE key >= ? AND key <= ?", span(key >> PART_BITS))
        return [name for (name,) in found]

    def _damaged(self, key: int, fault: str) -> DamageError:
        names = ", ".join(f"{name!r:.80}" for name in self._ids_of(key)[:3]) or f"entry {key >> PART_BITS:,}"
        return DamageError(f"{self.connection.path} is damaged: the {self._what} of {names}: {fault}{_REMEDY}")

    def overview(self, first: int = 0) -> Iterator[Summaries]:
        """What is kept beside the memory tokens of the rows from number `first` on, in several parts.

        Raises:
            DamageError: when it is not what was written.
        """
        keys = self._now.keys
        summaries = None if keys is None or first else keys.summaries
        if keys is not None and summaries is not None:
            known = keys.directory.row_keys
            first, remains = len(known), torch.ones(len(known), dtype=torch.bool)
            if not torch.equal(known, self.row_keys[:first]):
                first, remains = followed(known, self.row_keys)
            if first:
                yield summaries.kept(remains)
        shape = self._state.settings.shape
        for start in range(first, len(self.row_keys), _SUMMARIES):
            wanted = self.row_keys[start : start + _SUMMARIES]
            found = self.connection.rows(
                "SELECT key, overview_crc, length(summary) + length(codes), summary, places, weights FROM row "
                "WHERE key >= ? AND key <= ? ORDER BY key",
                (int(wanted[0]), int(wanted[-1])),
            )
            assert shape is not None
            try:
                if [key for key, *_ in found] != wanted.tolist():
                    raise ValueError("summaries of rows are missing")
                if any(row_crc(*blobs) != crc for _, crc, _, *blobs in found):
                    raise ValueError("the checksum of a summary differs")
                _, _, sizes, summary, places, weights = zip(*found)
                if not self.layout.token_bytes and {*sizes} != {self.layout.row_bytes(*shape)}:
                    raise ValueError(f"a row does not have {self.layout.row_bytes(*shape):,} bytes")
                yield self.layout.unpack_summaries(summary, places, weights, *shape)
            except (ValueError, TypeError, RuntimeError) as error:
                raise DamageError(f"{self.connection.path} is damaged: {error}; restore it from a backup") from error

    def _find(self, document_id: str) -> int | None:
        """The key of a document; None if there is none."""
        if fault_of(document_id) is not None:  # half of a surrogate pair, which no document's id has
            return None
        found = self.connection.rows("SELECT key FROM document WHERE id = ?", (document_id,))
        return int(found[0][0]) if found else None

    def _found(self, document_id: str) -> int:
        found = self._find(document_id) if isinstance(document_id, str) else None
        if found is None:
            raise BankError(f"the bank holds no document {document_id!r}")
        return found


def rows_allowed(row_members: Iterable[Sequence[str]], allowed: Container[str]) -> Tensor:
    """Which rows stand for allowed documents only, bool `[N]`, from the documents of each row."""
    return torch.tensor([all(name in allowed for name in members) for members in row_members], dtype=torch.bool)


class Snapshot(Contents):
    """The contents of a bank as they were at one moment; later changes of the bank do not reach it.

    As long as somebody holds it, the log of a bank on disk keeps what came later, so it should not be held for long.
    It can be read in any thread.

    Args:
        bank: the bank.
        state: its contents.
        version: its version then.
        pin: what keeps the commit for it, or a connection that sees changes that were not committed.
    """

    def __init__(self, bank: Contents, state: State, version: int, pin: Pin | Connection) -> None:
        super().__init__(state)
        self.path, self.version, self.history = bank.path, version, bank.history
        self._pin: Pin | Connection | None = pin
        self._holders = 1

    @property
    def connection(self) -> Connection:
        if self._pin is None:
            raise BankError("this snapshot was released; take another one")
        return self._pin.connection if isinstance(self._pin, Pin) else self._pin

    def renewed(self, former: BankContents) -> BankContents:
        """The former snapshot, if it has the same contents; it holds the commit now, until it is released once more."""
        if isinstance(former, Snapshot) and former._state is self._state and former.version == self.version:
            former._pin = self._pin
            former._holders += 1
            return former
        return self

    def release(self) -> None:
        """Lets the commit go, if nobody else holds it. Then only numbers of rows and documents can be read."""
        self._holders = max(0, self._holders - 1)
        if not self._holders:
            self._pin = None


class MemoryBank(Contents):
    """A growing set of documents as memory tokens, in the order of arrival.

    The constructor makes a bank in memory; `create` and `open` give a bank on disk. One process can write to a bank on
    disk while any number read it. `commit` makes changes visible to readers and crash-safe; `rollback` and `close` drop
    changes that were not committed. What is deleted is overwritten with zeros, in the file and in its log. A bank is
    not thread-safe: `MACEngine` serializes access to it. Threads that only read can each have a `snapshot`.

    Args:
        fingerprint: `MACModel.fingerprint` of the model that writes and reads the bank.
        keep_texts: True to keep the documents' texts (`BankEntry.texts`), for a later model to adapt to.
        rows: numbers that memory tokens are kept in: `bf16`; `int8`, in half of the bytes; `pq`, in a seventh or less,
            as codes of the model's product quantizer; or `fp32`, which keeps them as they are. None for what an engine
            chooses, bf16, and for fp32 where something else fills the bank.

    Examples:
        >>> import torch
        >>> from mac_rag.data.types import Document
        >>> from mac_rag.bank import MemoryBank
        >>> bank = MemoryBank("fingerprint of the model")
        >>> documents = [Document("bridge", "The bridge opened."), Document("museum", "The museum closed.")]
        >>> bank.put(documents, torch.zeros(2, 4, 8))
        ()
        >>> len(bank), "bridge" in bank, bank["museum"].phi.shape
        (2, True, torch.Size([1, 4, 8]))
        >>> bank.delete("bridge")
        ('bridge',)
        >>> bank.document_ids
        ['museum']
    """

    def __init__(self, fingerprint: str, *, keep_texts: bool = False, rows: RowDtype | None = None) -> None:
        settings = Settings(fingerprint=fingerprint, keep_texts=keep_texts, layout=RowLayout(dtype=rows))
        self._uncreated: Path | None = None  # file in which the first commit creates the bank
        self._initial = settings
        self._begin(Database.temporary(settings.row))

    def _begin(self, database: Database) -> None:
        """Takes over a bank's file at its last commit."""
        self._database: Database | None = database
        self.path = None if database.is_temporary else database.path
        self._settled = threading.RLock()  # held while a commit becomes the present one
        self._name = secrets.token_hex(8)  # of this writer
        self._has_written = False  # its name is in the file
        self._is_unclean = False  # something that was deleted is in the log
        self._is_stale = False  # the directory has yet to be brought up to date
        self._changed: set[int] = set()  # entries of the directory that were deleted or described anew since
        self._unused = 0  # numbers below were those of entries that a rollback has taken back
        self._touched: set[int] = set()  # entries that were deleted or described anew since the last commit
        self._latest: weakref.ref[Pin] | None = None
        self._pin: Pin | None = None
        try:
            if database.writer is None:
                self._pin = database.pin()
            state = _read_state(self.connection, None)
        except BaseException:
            self._pin = None
            database.close()
            raise
        super().__init__(state)
        self._committed, self._committed_version = state, self.version
        if database.lock is not None and state.keys is None:
            remove_keys_file(database.path)  # it may hold something that a killed process has deleted

    @classmethod
    def create(
        cls, path: str | Path, fingerprint: str, *, keep_texts: bool = False, rows: RowDtype | None = None
    ) -> MemoryBank:
        """Makes a new, empty bank on disk and opens it for writing.

        Args:
            path: file of the bank; missing folders are made.
            fingerprint, keep_texts, rows: see the class.

        Raises:
            BankError: when there is a file of this name.
        """
        settings = Settings(fingerprint=fingerprint, keep_texts=keep_texts, layout=RowLayout(dtype=rows))
        return cls._of(Database.create(local_path(path), settings.row))

    @classmethod
    def create_on_commit(
        cls, path: str | Path, fingerprint: str, *, keep_texts: bool = False, rows: RowDtype | None = None
    ) -> MemoryBank:
        """An empty bank that is in memory until its first commit, which creates it on disk as `create` does.

        `commit` raises BankError when there is a file of this name by then.
        """
        bank = cls(fingerprint, keep_texts=keep_texts, rows=rows)
        bank._uncreated = local_path(path)
        return bank

    @classmethod
    def open(cls, path: str | Path, *, write: bool = False, fingerprint: str | None = None) -> MemoryBank:
        """Opens a bank at its last commit.

        Args:
            path: file of the bank.
            write: True to change the bank. Only one process can write to it at a time. A bank that is open for reading
                stays at its commit until `refresh`; so long the log of the file keeps what others write.
            fingerprint: fingerprint of the model that will use the bank; None accepts a bank of any model.

        Raises:
            BankError: when there is no bank, it is damaged, another process writes to it, or for a URL.
            FingerprintError: when another model wrote it.
        """
        bank = cls._of(Database.open(local_path(path), write=write))
        try:
            bank.check_model(bank.fingerprint if fingerprint is None else fingerprint)
        except BaseException:
            bank.close()
            raise
        return bank

    @classmethod
    def _of(cls, database: Database) -> MemoryBank:
        bank = cls.__new__(cls)
        bank._uncreated = None
        bank._begin(database)
        return bank

    @staticmethod
    def exists(path: str | Path) -> bool:
        """True if there is a file of this name that is not empty; a `BankError` where nobody can tell."""
        return exists(local_path(path))

    @property
    def connection(self) -> Connection:
        if self._database is None:
            raise BankError(f"{self.path} was closed; open it again")
        if self._pin is not None:
            return self._pin.connection
        assert self._database.writer is not None
        return self._database.writer

    @property
    def _now(self) -> State:
        if self._is_stale:
            directory = self._state.directory.updated(self.connection, self._changed)
            self._state = self._state._replace(directory=directory)
            self._is_stale, self._changed = False, set()
        return self._state

    @property
    def intent(self) -> Intent:
        """The change of bank and retriever that the last commit announced; empty when none is under way."""
        return self._committed.settings.intent

    @property
    def commits(self) -> int:
        """Number of the last commit."""
        return self._committed.settings.version

    @property
    def writable(self) -> bool:
        """True if the bank can be changed."""
        return self._database is not None and self._database.writer is not None

    @property
    def committed(self) -> Snapshot:
        """The contents after the last commit; for a bank in memory that was never committed, none."""
        with self._settled:
            return Snapshot(self, self._committed, self._committed_version, self._pinned())

    def snapshot(self) -> Snapshot:
        """The current contents, as they stay whatever happens to the bank.

        If there are changes that were not committed, they are among them, and the snapshot is good until the next
        change.
        """
        with self._settled:
            if self._pin is None and self.connection.in_transaction:
                return Snapshot(self, self._now, self.version, self.connection)
            return self.committed

    def _pinned(self) -> Pin:
        """What keeps the last commit; all that hold the same commit share it."""
        if self._pin is not None:
            return self._pin
        if self._database is None:
            raise BankError(f"{self.path} was closed; open it again")
        pin = self._latest() if self._latest is not None else None
        if pin is None:
            pin = self._database.pin()
            self._latest = weakref.ref(pin)
        return pin

    def name_model(self, name: str) -> None:
        """Notes the name of the model that wrote the bank, a hint for people, in a commit of its own."""
        if name != self.model and len(name) <= 4096:
            self._check_writable()
            self._set(model=name)
            self.commit()

    def keep_rows_as(self, layout: RowLayout, quantizer: ProductQuantizer | None = None) -> None:
        """Chooses how rows are kept, in a bank that holds none; any other bank stays as it is.

        A dtype that the bank has already been given stays, and so do the bytes of a token in a bank of codes.

        Args:
            layout: how rows are kept.
            quantizer: how they are kept in a bank with dtype pq, which keeps the first one that it is given.

        Raises:
            BankError: for dtype pq without a quantizer, or with one of another model, and for codes in a bank that has
                been given a dtype.
        """
        self._check_writable()
        if len(self) or self.layout.token_bytes:
            return
        if layout.token_bytes:
            self._check_rate(layout.token_bytes)
            self._set(layout=layout)
            return
        dtype = self.layout.dtype or layout.dtype
        if dtype != "pq":
            self._set(layout=layout.model_copy(update={"dtype": dtype, "whole_tokens": 0, "code_bytes": 0}))
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
        if self.quantizer is None:
            data = tensor_bytes({name: tensor.contiguous() for name, tensor in quantizer.tensors.items()})
            with self.changing() as link:
                link.write("INSERT INTO codebook VALUES (1, ?, ?)", [(data, zlib.crc32(data))])
            self._state = self._state._replace(quantizer=quantizer)
        self._set(layout=layout.quantized(quantizer))

    def _set(self, **values: Any) -> None:
        """Changes settings; the next commit writes them."""
        settings = self._state.settings.model_copy(update=values)
        if settings != self._state.settings:
            self._state = self._state._replace(settings=settings)

    def put(
        self,
        documents: Sequence[Document],
        phi: NewRows,
        rows: Sequence[int] | None = None,
        *,
        summarise: Summarise | None = None,
    ) -> tuple[str, ...]:
        """Adds documents and replaces those with the same ids. On an error the bank does not change.

        Args:
            documents: K documents with distinct ids.
            phi: `[N, T, D]`, the memory tokens of all documents, row after row. Or the codes of each of the N rows,
                uint8 `[n, B]`; in an empty bank that has no dtype, the first ones make it a bank of codes for good.
            rows: number of rows of each document; None for one row each.
            summarise: makes the summaries `[N, S]`, in a bank whose layout has any; None if they are not known, which
                a bank of codes does not take.

        Returns:
            Ids of other documents that were removed, because they were merged with a replaced document.

        Raises:
            BankError: for an id that occurs twice, metadata that are not JSON, memory tokens or codes that do not fit
                the documents or the bank, or a disk that refuses them.
        """
        self._check_writable()
        entries = new_entries(documents, rows, len(phi), keep_texts=self.keep_texts)
        if not entries:
            return ()
        encoded = self._encoded(phi, summarise)
        names = dict.fromkeys(document.id for document in documents)
        with self.changing() as link:
            held = link.rows_in("SELECT key FROM document WHERE id IN ({})", list(names))
            removed = self._delete(link, sorted({key >> PART_BITS for (key,) in held}))
            self._insert(link, encoded, entries)
        return tuple(name for name in removed if name not in names)

    def describe(self, documents: Sequence[Document]) -> None:
        """Gives documents other metadata, such as another date. Their memory tokens and texts stay as they are.

        So does the time at which they were added, and with what they were merged.

        Args:
            documents: documents with distinct ids, with the texts that the bank holds them with.

        Raises:
            BankError: for an id that the bank does not hold or that occurs twice, for another text, and for metadata as
                `mac_rag.data.provenance.Member.of`; the bank does not change.
        """
        self._check_writable()
        members = described_members(documents, lambda name: self[name].members)
        if not members:
            return
        with self.changing() as link:
            held = list(link.rows_in("SELECT key, rows, id FROM document WHERE id IN ({})", list(members)))
            described = [_document_row(key, rows, members[name]) for key, rows, name in held]
            link.write(
                "UPDATE document SET (id, content_hash, metadata, added, crc, rows, hash, moment, supersedes, "
                "index_crc) = (?, ?, ?, ?, ?, ?, ?, ?, ?, ?) WHERE key = ?",
                [(*row, key) for key, *row in described],
            )
            self._change(key >> PART_BITS for key, *_ in held)

    def merge(self, document_ids: Iterable[str], phi: Tensor) -> None:
        """Replaces the entries of these documents by one entry that stands for all of their documents.

        Args:
            document_ids: ids of documents, at least one of each entry to be merged.
            phi: `[rows, T, D]`, the memory tokens of the new entry.

        Raises:
            BankError: for an id that the bank does not hold, memory tokens that do not fit the bank, and in a bank of
                codes.
        """
        self._check_writable()
        if self.layout.token_bytes:
            raise BankError("codes of keys and values cannot be averaged; use random-pruning to bound a bank of codes")
        found = {entry.sequence: entry for entry in map(self.__getitem__, document_ids)}
        merged = [found[sequence] for sequence in sorted(found)]
        if not merged or not 0 < len(phi) < 1 << PART_BITS:
            raise BankError(f"{len(merged)} entries and {len(phi)} rows of memory tokens cannot become one entry")
        members = tuple(member for entry in merged for member in entry.members)
        texts = tuple(text for entry in merged for text in entry.texts)
        encoded = self._encoded(phi)
        with self.changing() as link:
            self._delete(link, sorted(found))
            self._insert(link, encoded, [NewEntry(len(phi), members, texts)])

    def delete(self, document_id: str, *, from_index: bool = True) -> tuple[str, ...]:
        """Deletes a document with all its rows.

        The share of one document cannot be taken out of merged memory tokens. So the whole entry is deleted, and the
        document has no influence afterwards. An index in the bank keeps the documents that it was merged with.

        Args:
            document_id: id of the document.
            from_index: also delete it from an index in the bank.

        Returns:
            Ids of all deleted documents: this one, and those that it was merged with.

        Raises:
            BankError: for an id that the bank does not hold.
        """
        self._check_writable()
        sequence = self._found(document_id) >> PART_BITS
        with self.changing() as link:
            if from_index and link.rows("SELECT 1 FROM bm25_document WHERE id = ?", (document_id,)):
                link.write("DELETE FROM bm25_document WHERE id = ?", [(document_id,)])
                self.index_version += 1
            return self._delete(link, [sequence])

    def _encoded(self, phi: NewRows, summarise: Summarise | None = None) -> Rows:
        """Memory tokens as the bank keeps them; codes as they are."""
        if not isinstance(phi, Tensor):
            codes = self._checked_codes(phi)
            layout = self.layout if self.layout.token_bytes else RowLayout(token_bytes=codes[0].shape[1])
            summaries = torch.empty(len(codes), 0)
            if layout.summary:
                if summarise is None:
                    raise BankError(
                        f"this bank keeps a summary of {layout.summary} numbers beside the codes of each row, and none "
                        "was given; adapt to the documents with their model (MACEngine.adapt)"
                    )
                summaries = summarise(codes)
            coded = {"codes": torch.cat(codes), "tokens": torch.tensor([len(one) for one in codes])}
            return layout.summarised(coded, summaries)
        if self.layout.token_bytes:
            raise BankError(
                f"memory tokens of shape {list(phi.shape[1:])} do not fit this bank, whose rows are codes of "
                f"{self.layout.token_bytes:,} bytes a token; make a new bank for them"
            )
        row_shape = self.row_shape
        lexical = self.layout.lexical_vectors
        fits = phi.ndim == 3 and phi.shape[1] > lexical and phi.shape[2] > 0 and lexical * phi.shape[2] <= _MOST_PLACES
        if not fits or row_shape not in (None, phi.shape[1:]):
            raise BankError(
                f"memory tokens of shape {list(phi.shape[1:])} do not fit this bank"
                + (f", whose rows have shape {list(row_shape)}" if row_shape else "")
            )
        phi = phi.detach().to("cpu", torch.float32)
        if not phi.sum().isfinite() and not phi.isfinite().all():  # the sum alone takes a tenth of the time
            row = int((~phi.isfinite().flatten(1).all(1)).nonzero()[0])
            raise BankError(
                f"row {row:,} of {len(phi):,} rows of memory tokens has numbers that are not finite; look for them in "
                "the model's weights, or use dtype fp32 or bf16 in place of fp16"
            )
        self._check_quantizer(phi)
        rows = self.layout.encode(phi, self.quantizer)
        if summarise is not None and self.layout.summary:
            rows = self.layout.summarised(rows, summarise(self.layout.decode(rows, self.quantizer)))
        return rows

    def _checked_codes(self, codes: Sequence[Tensor]) -> list[Tensor]:
        for number, one in enumerate(codes):
            if one.dtype != torch.uint8 or one.ndim != 2 or not one.numel():
                raise BankError(
                    f"row {number:,} of {len(codes):,} rows of codes is {one.dtype} {list(one.shape)}; give uint8 "
                    "[n, B], with at least one token and one byte a token"
                )
            if one.numel() > _MOST_CODES:
                raise BankError(
                    f"row {number:,} of {len(codes):,} rows of codes has {one.numel():,} bytes, and a row holds "
                    f"{_MOST_CODES:,}; split it into several rows"
                )
        rates = sorted({one.shape[1] for one in codes})
        if len(rates) > 1:
            raise BankError(
                f"codes of {rates[0]:,} and {rates[1]:,} bytes a token cannot be in one bank; make one for each rate"
            )
        for rate in rates:
            self._check_rate(rate)
        return [one.detach().cpu() for one in codes]

    def _check_rate(self, token_bytes: int) -> None:
        """Refuses codes that do not fit the bank."""
        held = self.layout.token_bytes
        if held and token_bytes != held:
            raise BankError(
                f"codes of {token_bytes:,} bytes a token do not fit this bank, whose rows have {held:,}; make a new "
                "bank for this rate"
            )
        if not held and (self.layout.dtype is not None or self._state.settings.shape is not None):
            raise BankError(
                f"codes of {token_bytes:,} bytes a token do not fit this bank, whose rows are memory tokens in "
                f"{self.layout.name}; make a new bank for codes, without a choice of rows"
            )

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

    @contextmanager
    def changing(self, *, erases: bool = False) -> Iterator[Connection]:
        """Changes tables of the file, as a part of what the next `commit` writes: all of the block or nothing of it.

        Args:
            erases: True if the block deletes something, which is then cleaned out of the log after the commit.

        Yields:
            The connection that changes the file. Only an index in the bank, such as that of
            `mac_rag.bank.bm25.BankBM25Retriever`, writes to it from outside of this class, to its own tables.

        Raises:
            BankError: when the bank is not open for writing.
        """
        self._check_writable()
        assert self._database is not None
        self._is_unclean |= erases
        link = self._database.writer
        assert link is not None
        before = self._is_stale, set(self._changed), set(self._touched), self._state
        self._begin_transaction(link)
        link.write("SAVEPOINT step")
        try:
            yield link
            link.write("RELEASE step")
        except BaseException:
            self._is_stale, self._changed, self._touched, self._state = before
            try:
                link.write("ROLLBACK TO step")
                link.write("RELEASE step")
            except BankError:  # the disk has refused so much that the whole transaction is gone
                self.rollback()
            raise
        self.version += 1

    def _begin_transaction(self, link: Connection) -> None:
        assert self._database is not None
        self._database.check_writer()
        if link.in_transaction:
            return
        link.write("BEGIN IMMEDIATE")
        if not has_commit(link, self._committed.settings.version, self._committed.writer, latest=True):
            link.end()
            raise BankError(
                f"{self.path} was changed by another process meanwhile; open it again and repeat the change"
            )

    def _delete(self, link: Connection, sequences: Sequence[int]) -> tuple[str, ...]:
        """Deletes entries; returns the ids of all their documents."""
        spans = list(map(span, sequences))
        statement = "SELECT id FROM document WHERE key >= ? AND key <= ? ORDER BY key"
        names = [name for keys in spans for (name,) in link.rows(statement, keys)]
        if self.keep_texts:
            link.write(_TAKE_TEXT, [(name,) for name in names])
        size = "length(summary) + length(places) + length(weights) + length(codes)"
        statement = f"SELECT coalesce(sum({size}), 0) FROM row WHERE key >= ? AND key <= ?"
        deleted = sum(link.rows(statement, keys)[0][0] for keys in spans)
        for table in ("document", "row"):
            link.write(f"DELETE FROM {table} WHERE key >= ? AND key <= ?", spans)
        self._change(sequences)
        settings = self._state.settings
        left = settings.documents - len(names)
        self._set(documents=left, bytes=max(0, settings.bytes - deleted), shape=settings.shape if left else None)
        return tuple(names)

    def _change(self, sequences: Iterable[int]) -> None:
        """Notes that entries were deleted or described anew."""
        numbers = set(sequences)
        self._is_stale = True
        self._changed |= numbers
        self._touched |= numbers

    def _insert(self, link: Connection, rows: Rows, entries: Sequence[NewEntry]) -> None:
        """Writes entries with their rows."""
        shape = self.layout.row_shape(rows)
        if "codes" in rows and not self.layout.token_bytes:
            self._set(layout=RowLayout(token_bytes=shape[1]))
        settings = self._state.settings
        first = max(settings.next_sequence, self._unused)
        keyed = [
            (sequence << PART_BITS | number, entry.rows, member, text)
            for sequence, entry in enumerate(entries, first)
            for number, (member, text) in enumerate(zip(entry.members, entry.texts))
        ]
        link.write(
            "INSERT INTO document VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            [_document_row(key, rows_of, member) for key, rows_of, member, _ in keyed],
        )
        if self.keep_texts:
            kept = [(key, text) for key, _, _, text in keyed if text is not None]
            link.write("INSERT INTO text VALUES (?, ?)", kept)
            link.write(
                "UPDATE bm25_document SET text = NULL WHERE id = ? AND text = ?",
                [(member.document_id, text) for _, _, member, text in keyed],
            )
        keys = [
            sequence << PART_BITS | number
            for sequence, entry in enumerate(entries, first)
            for number in range(entry.rows)
        ]
        packed = self.layout.pack(rows)
        crcs = [(row_crc(row.codes, row.places, row.weights), row_crc(*row[1:4])) for row in packed]
        link.write(
            "INSERT INTO row VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
            ((key, row.tokens, *both, *row[1:]) for key, row, both in zip(keys, packed, crcs, strict=True)),
        )
        self._is_stale = True
        self._set(
            next_sequence=first + len(entries),
            documents=settings.documents + len(keyed),
            bytes=settings.bytes + sum(len(blob) for row in packed for blob in row[1:]),
            shape=shape,
        )

    def commit(self, intent: Intent | None = None) -> None:
        """Writes all changes to disk; no crash undoes them afterwards. For a bank in memory, nothing is written.

        Args:
            intent: the change of bank and retriever that starts after this commit; an empty intent when that change is
                complete; None to leave the recorded intent as it is.

        Raises:
            BankError: when the bank is not open for writing, or the disk refuses the write. The bank on disk is what it
                was, and so is this one: the changes are dropped. If the file of `create_on_commit` cannot be made, they
                stay until `rollback`, so that `commit` can try again.
        """
        self._check_writable()
        if intent is not None:
            self._set(intent=intent)
        link, settings = self.connection, self._state.settings
        if not link.in_transaction and settings == self._committed.settings and self._uncreated is None:
            return
        settings = settings.model_copy(update={"version": settings.version + 1})
        with self._settled:
            try:
                self._begin_transaction(link)
                link.write(PUT_SETTINGS, [settings.row])
                if not self._has_written:
                    link.write("INSERT INTO writer VALUES (?, ?)", [(settings.version, self._name)])
                link.write("INSERT INTO change VALUES (?, ?)", [(settings.version, one) for one in self._touched])
                _ = self._now  # which reads the file, and that may fail
                link.write("COMMIT")
                self._settle(settings)
            except BaseException:
                self.rollback()
                raise
        if self._uncreated is not None:
            self._replace(Database.create(self._uncreated, self._pinned().connection))
            self._uncreated = None
        elif self._is_unclean:
            self._clean()

    def _settle(self, settings: Settings) -> None:
        """Makes the current contents what `rollback` goes back to."""
        self._is_unclean |= bool(self._touched)
        self._state = self._now._replace(settings=settings, writer=self._name)
        self._committed, self._committed_version = self._state, self.version
        self._touched, self._has_written, self._latest = set(), True, None

    def _clean(self) -> None:
        """Takes what was deleted out of the log and of the derived file, or does so after a later commit."""
        assert self._database is not None
        if self._database.is_temporary:
            return
        self._is_unclean = True
        with suppress(BankError):
            self._remove_keys_file()
            self._is_unclean = not self.connection.clean(wait=False)

    def _replace(self, database: Database) -> None:
        """Goes on with another file."""
        former, version = self._database, self.version
        unused = max(self._unused, self._state.settings.next_sequence)
        self._begin(database)
        self.version = self._committed_version = version + 1
        self._unused = unused
        if former is not None:
            former.close()

    def rollback(self) -> None:
        """Drops all changes since the last commit."""
        if self._database is None or self._database.writer is None:
            return
        if self._uncreated is not None and self._committed.settings.version:  # its file could not be made
            self._replace(Database.temporary(self._initial.row))
            self.index_version += 1
            return
        with self._settled:
            self.connection.end()
            settings = Settings.read(self.connection)
            if settings.version != self._committed.settings.version:  # the commit that failed has succeeded
                self._settle(settings)
                return
            if self.version != self._committed_version or self._state is not self._committed:
                self._unused = max(self._unused, self._state.settings.next_sequence)
                self._is_stale, self._changed, self._touched = False, set(), set()
                self._state = self._committed
                self.version += 1
                self.index_version += 1
                self._committed_version = self.version

    def compact(self) -> None:
        """Commits, and makes the file as small as its contents.

        No byte of what was deleted is in it, in its log or in the derived file afterwards.

        Raises:
            BankError: see `commit`; also when everything is committed, but another process reads an older commit, so
                that the log has to keep it. Compact the bank again once that process has ended or refreshed.
        """
        self.commit()
        assert self._database is not None
        if self._database.is_temporary:
            return
        link = self.connection
        if link.rows("SELECT 1 FROM change LIMIT 1"):
            self._set(changes_since=self._committed.settings.version)
            try:
                self._begin_transaction(link)
                link.write("DELETE FROM change")
            except BaseException:
                self.rollback()
                raise
            self.commit()
        self._remove_keys_file()
        self._latest = None
        link.shrink()
        if not link.clean(wait=True):
            raise BankError(
                f"{self.path} is committed, but somebody reads an older commit of it, which its log has to keep; "
                "compact it again once that question is answered, or that process has refreshed or closed its bank"
            )
        self._is_unclean = False
        self._write_keys_file()
        self._state = self._committed = self._committed._replace(keys=read_keys_file(link.path))

    def _remove_keys_file(self) -> None:
        assert self._database is not None
        if self._state.keys is not None:
            self._state.keys.is_good = False
        remove_keys_file(self._database.path)

    def _write_keys_file(self) -> None:
        """Writes the derived file of a large bank, if something was deleted or much has come since it was written."""
        state = self._committed
        rows = int(state.directory.rows.sum())
        known = 0 if state.keys is None or not state.keys.is_good else int(state.keys.directory.rows.sum())
        if rows < _MANY_ROWS or self.connection.in_transaction or rows - known < rows // 10 or self._database is None:
            return
        with suppress(BankError, OSError):  # it is a convenience
            if self.layout.summary or self.layout.lexical_vectors:
                summaries = Summaries.cat(list(self.overview()))
                commit = state.settings.version, state.writer
                write_keys_file(self._database.path, commit, state.directory, summaries)

    def refresh(self) -> bool:
        """Moves a bank that is open for reading to the last commit, also to that of a backup that was put in its place.

        Returns:
            True if there was another commit.

        Raises:
            BankError: when the bank on disk is damaged; this object then stays at its old commit.
            FingerprintError: when a bank of another model has taken its place.
        """
        if self._pin is None or self._database is None:
            return False
        database, former = self._database, self._committed
        if database.identity != database.opened:
            database = Database.open(database.path, write=False)
        pin = database.pin()
        state = _read_state(pin.connection, former if database is self._database else None)
        if state.settings.fingerprint != self.fingerprint:
            raise FingerprintError(
                f"{self.path} was written by {describe(self.fingerprint)} and has been replaced by a bank of "
                f"{describe(state.settings.fingerprint)}; open it again, with that model"
            )
        is_same = (state.settings.version, state.writer) == (former.settings.version, former.writer)
        self._database, self._pin = database, pin
        if is_same and database is self._database and state.directory is former.directory:
            return False
        if not has_commit(pin.connection, former.settings.version, former.writer):
            self.history += 1
        self._state = self._committed = state
        self.version += 1
        self.index_version += 1
        self._committed_version = self.version
        del pin
        unlogged = database.pin_without_log()
        if has_commit(unlogged.connection, state.settings.version, state.writer, latest=True):
            self._pin = unlogged
        return not is_same

    def save(self, path: str | Path) -> None:
        """Writes a copy, without what was not committed, as a new bank on disk.

        Raises:
            BankError: when there is a file of this name.
        """
        pin = self._pinned()
        Database.create(local_path(path), pin.connection).close()

    def close(self) -> None:
        """Ends reading and writing, so that another process can write. Changes that were not committed are lost.

        A bank in memory stays as it is.
        """
        database = self._database
        if database is None or database.is_temporary:
            return
        try:
            if self.writable:
                self.rollback()
                if self._is_unclean:
                    self._clean()
                self._write_keys_file()
        finally:
            self._database = self._pin = self._latest = None
            database.close()

    def __enter__(self) -> MemoryBank:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _check_writable(self) -> None:
        if self._database is None:
            raise BankError(f"{self.path} was closed; open it again")
        if self._database.writer is None:
            raise BankError(f"{self.path} is not open for writing; open it with write=True")


def _read_state(link: Connection, former: State | None) -> State:
    """The bank that a connection sees; what is known from a former commit is not read again."""
    settings = Settings.read(link)
    writer = writer_at(link, settings.version)
    if former is not None and (settings.version, writer) == (former.settings.version, former.writer):
        return former._replace(settings=settings)

    def is_known(version: int, name: str) -> bool:
        return version >= settings.changes_since and has_commit(link, version, name)

    if former is not None and is_known(former.settings.version, former.writer):
        version, directory, keys = former.settings.version, former.directory, former.keys
    else:
        keys = read_keys_file(link.path)
        if keys is not None and not is_known(*keys.commit):
            keys = None
        version, directory = (settings.version, Directory.of([])) if keys is None else (keys.commit[0], keys.directory)
    changed = {one for (one,) in link.rows("SELECT DISTINCT entry FROM change WHERE version > ?", (version,))}
    directory = _checked_directory(link, directory.updated(link, changed), settings)
    return State(settings, directory, _read_quantizer(link, settings), writer, None if changed else keys)


def _checked_directory(link: Connection, directory: Directory, settings: Settings) -> Directory:
    """The directory, if it goes with the settings and with the size of the file.

    Raises:
        DamageError: when it does not.
    """
    [(pages,)], [(size,)] = link.rows("PRAGMA page_count"), link.rows("PRAGMA page_size")
    shape, rows, sequences = settings.shape, int(directory.rows.sum()), directory.sequences
    is_sound = directory.documents == settings.documents and (shape is None) == (not len(sequences))
    if is_sound and shape is not None:
        is_sound = int(sequences[-1]) < settings.next_sequence
        is_sound &= rows * settings.layout.row_bytes(*shape) <= pages * size
        is_sound &= settings.layout.lexical_vectors * shape[1] <= _MOST_PLACES
        is_sound &= not settings.layout.token_bytes or shape == (1, settings.layout.token_bytes)
    if not is_sound:
        raise DamageError(f"{link.path} is damaged: its entries and settings do not agree; restore it from a backup")
    return directory


def _read_quantizer(link: Connection, settings: Settings) -> ProductQuantizer | None:
    found = link.rows("SELECT data, crc FROM codebook")
    try:
        if settings.layout.dtype != "pq":
            if found:
                raise ValueError("it has codebooks, and its rows are not kept as pq")
            return None
        if not found:
            if settings.shape is not None:
                raise ValueError("it has no codebooks")
            return None
        [(data, crc)] = found
        if zlib.crc32(data) != crc:
            raise ValueError("the checksum of its codebooks differs")
        quantizer = ProductQuantizer.of_tensors(load_tensors(data))
        sizes = (quantizer.fingerprint, quantizer.whole, quantizer.code_bytes)
        if settings.shape is not None and (
            sizes != (settings.fingerprint, settings.layout.whole_tokens, settings.layout.code_bytes)
            or quantizer.row_shape != settings.shape
        ):
            raise ValueError("its codebooks are for other rows")
        return quantizer
    except (ValueError, TypeError, KeyError, RuntimeError, SafetensorError) as error:
        raise DamageError(f"{link.path} is damaged: {error}; restore it from a backup") from error


def writer_at(link: Connection, version: int) -> str:
    """Name of the writer that made a commit; empty if nobody has told."""
    found = link.rows("SELECT name FROM writer WHERE version <= ? ORDER BY version DESC LIMIT 1", (version,))
    return str(found[0][0]) if found else ""


def has_commit(link: Connection, version: int, writer: str, *, latest: bool = False) -> bool:
    """True if a commit, by its number and writer, is the one that a connection sees, or one that it has come from.

    Args:
        link: the connection.
        version, writer: the commit.
        latest: True to ask for the one that it sees.
    """
    [(last,)] = link.rows("SELECT version FROM setting")
    return (version == last if latest else version <= last) and writer_at(link, version) == writer


def _document_row(key: int, rows: int, member: Member) -> tuple[Any, ...]:
    """The columns of a document."""
    metadata = json.dumps(dict(member.metadata))
    hashes = b"".join(id_hash(name).to_bytes(8, "little", signed=True) for name in member.supersedes)
    fields = (member.document_id, member.content_hash, metadata, member.added)
    index = (rows, id_hash(member.document_id), member.moment)
    kept = member.document_id, bytes.fromhex(member.content_hash), metadata, member.added
    return (key, *kept, _crc(*fields), *index, hashes, index_crc(key, *index, data=hashes))


def _crc(*fields: str) -> int:
    return zlib.crc32("\0".join(fields).encode("utf-8", "surrogatepass"))
