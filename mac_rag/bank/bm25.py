"""A BM25 index in the file of a memory bank: documents, memory tokens and words change in one commit.

The index is in the tables `bm25` and `bm25_document`. A document gets a new number (its key) whenever it is added. A
number that was committed is never used again, so what has changed between two commits shows in the numbers alone.
Documents of the index need not be those of the bank: a bounded bank forgets documents that the index keeps.
"""

from __future__ import annotations

import json
import zlib
from array import array
from collections.abc import Collection, Container, Iterator, Sequence
from pathlib import Path
from secrets import token_hex
from typing import NamedTuple

import numpy as np

from mac_rag.bank.bank import Contents, MemoryBank
from mac_rag.bank.database import MOST_VALUES, Connection
from mac_rag.data.types import Document
from mac_rag.errors import ConfigError, DamageError
from mac_rag.retrieval.base import DocumentRows, Hit, check_documents
from mac_rag.retrieval.bm25 import ANALYSIS, BM25Retriever, Postings, Tokenizer
from mac_rag.untrusted_files import METADATA_DEPTH, parse_json

_READ = (
    "SELECT bm25_document.key, bm25_document.id, bm25_document.metadata, coalesce(bm25_document.text, text.text), "
    "words, bm25_document.crc FROM bm25_document LEFT JOIN document ON document.id = bm25_document.id "
    "LEFT JOIN text ON text.document = document.key WHERE bm25_document.key IN ({}) ORDER BY bm25_document.key"
)
# A text that the bank keeps is not kept twice.
_ADD = (
    "INSERT INTO bm25_document SELECT ?1, ?2, ?3, CASE WHEN EXISTS (SELECT 1 FROM document JOIN text "
    "ON text.document = document.key WHERE document.id = ?2 AND text.text = ?4) THEN NULL ELSE ?4 END, ?5, ?6"
)


class BankBM25Retriever(BM25Retriever):
    """A `BM25Retriever` that is kept in the file of a memory bank.

    Its changes are a part of the bank's next commit: `MemoryBank.commit` makes them crash-safe and visible to readers,
    `rollback` takes them back, and `refresh` of a bank that is open for reading brings what others have committed. Like
    the bank, it is changed by one thread at a time, while any number of threads retrieve.

    Args:
        bank: the bank. Until the first document, there is no index in it.
        tokenizer: splits documents and questions into terms; None for that of the index, or an English one.

    Raises:
        ConfigError: if the bank has an index with another tokenizer.
        DamageError: if the index is not what was written.

    Examples:
        >>> from mac_rag.bank import MemoryBank
        >>> from mac_rag.bank.bm25 import BankBM25Retriever
        >>> bank = MemoryBank("fingerprint of the model")
        >>> retriever = BankBM25Retriever(bank)
        >>> retriever.add([Document("bridge", "Anna Berg opened the bridge.")])
        >>> len(retriever)
        1
        >>> bank.rollback()
        >>> len(retriever)
        0
    """

    _scorer: Postings

    def __init__(self, bank: MemoryBank, *, tokenizer: Tokenizer | None = None) -> None:
        self.bank = bank
        contents = bank.snapshot()
        kept = _read_settings(contents.connection)
        contents.release()
        if kept is not None:
            if tokenizer not in (None, kept.tokenizer):
                raise ConfigError(
                    f"{bank.path or 'the bank'} has an index with tokenizer {kept.tokenizer!r:.200}, not "
                    f"{tokenizer!r:.200}; leave tokenizer out, or make a new bank"
                )
            tokenizer = kept.tokenizer
        super().__init__(tokenizer=tokenizer)
        self._keys = array("q")  # by row: the key of its document
        self._seen: int | None = None  # `bank.index_version` when memory and file agreed
        self._kept: tuple[int, _Settings | None] | None = None  # `bank.history` and the settings then
        self._follow()

    def add(self, documents: Sequence[Document]) -> None:
        with self._change:
            self._follow()
            self._rows.check(documents)
            self._write([], documents)

    def put(self, documents: Sequence[Document]) -> None:
        with self._change:
            self._follow()
            check_documents(documents)
            self._write([document.id for document in documents if document.id in self._rows], documents)

    def delete(self, document_id: str) -> None:
        with self._change:
            self._follow()
            self._rows.row_of(document_id)
            self._write([document_id], [])

    def retrieve(self, questions: Sequence[str], k: int, *, allowed: Container[str] | None = None) -> list[list[Hit]]:
        self._follow()
        return super().retrieve(questions, k, allowed=allowed)

    def scores(
        self, questions: Sequence[str], document_ids: Sequence[str], *, allowed: Container[str] | None = None
    ) -> list[list[float]]:
        self._follow()
        return super().scores(questions, document_ids, allowed=allowed)

    def __len__(self) -> int:
        self._follow()
        return super().__len__()

    def __contains__(self, document_id: object) -> bool:
        self._follow()
        return super().__contains__(document_id)

    def content_hashes(self, document_ids: Collection[str] | None = None) -> dict[str, str]:
        self._follow()
        return super().content_hashes(document_ids)

    def documents(self, document_ids: Collection[str]) -> list[Document]:
        self._follow()
        return super().documents(document_ids)

    def save(self, folder: Path) -> None:
        """Writes a copy to a folder, which `BM25Retriever.load` reads."""
        self._follow()
        super().save(folder)

    def is_in(self, bank: object) -> bool:
        return bank is self.bank

    def _write(self, removed: Collection[str], documents: Sequence[Document]) -> None:
        """Deletes documents and then adds others, in the file and in memory; in both or in none."""
        documents = [Document(one.id, one.text, json.loads(json.dumps(dict(one.metadata)))) for one in documents]
        try:
            with self.bank.changing(erases=bool(removed)) as link:
                kept = self._kept[1] if self._kept is not None else None
                if kept is None or not kept.is_current:
                    gone = set(removed)
                    documents = [*(one for one in self._rows if one.id not in gone), *documents]
                    removed = []
                    self._begin(link, kept)
                indexed = self._index(documents)
                with self._lock:
                    self._change_both(link, removed, documents, indexed)
        except BaseException:
            self._seen = self._kept = None  # the next call reads the index again
            raise

    def _begin(self, link: Connection, kept: _Settings | None) -> None:
        """Makes an empty index, in place of one whose words were made otherwise."""
        link.write("DELETE FROM bm25_document")
        lineage = token_hex(8) if kept is None else kept.lineage
        settings = _Settings(self.tokenizer, ANALYSIS, lineage)
        link.write(
            "INSERT INTO bm25 VALUES (1, ?1, ?2, 0) ON CONFLICT (number) DO UPDATE SET settings = ?1",
            [(settings.written, lineage)],
        )
        with self._lock:
            self._empty()
        self._kept = (self.bank.history, settings)

    def _change_both(
        self, link: Connection, removed: Collection[str], documents: Sequence[Document], indexed: list[list[str]]
    ) -> None:
        [(first,)] = link.rows("SELECT next_document FROM bm25")
        if not 0 <= first < 1 << 62:
            raise _damage(link, "its next number is out of range")
        keys = range(first, first + len(documents))
        rows = []
        for key, document, words in zip(keys, documents, indexed, strict=True):
            fields = document.id, json.dumps(document.metadata), document.text, _written(words)
            rows.append((key, *fields, _crc(*fields)))
        link.write("DELETE FROM bm25_document WHERE id = ?", [(name,) for name in removed])
        link.write(_ADD, rows)
        link.write("UPDATE bm25 SET next_document = ?", [(keys.stop,)])
        for name in removed:
            self._remove(name)
        self._append(documents, indexed)
        self._keys.extend(keys)
        if self._rows.sparse:
            self._compact()

    def _follow(self) -> None:
        """Makes the index in memory that of the file, if the bank has changed it otherwise than by this object."""
        if self._seen == self.bank.index_version:
            return
        with self._change:
            seen = self.bank.index_version
            contents = self.bank.snapshot()
            try:
                with self._lock:
                    self._load(contents)
            except BaseException:
                self._seen = self._kept = None
                raise
            finally:
                contents.release()
            self._seen = seen

    def _load(self, contents: Contents) -> None:
        link = contents.connection
        settings = _read_settings(link)
        if self._kept != (contents.history, settings):
            if settings is not None:
                self.tokenizer = settings.tokenizer
            self._empty()
            self._kept = (contents.history, settings)
        if settings is None:
            return
        keys = np.array([key for (key,) in link.rows("SELECT key FROM bm25_document ORDER BY key")], dtype=np.int64)
        mine = np.frombuffer(self._keys.tobytes(), np.int64)[self._rows.live()]
        for document, is_held in zip(list(self._rows), np.isin(mine, keys).tolist(), strict=True):
            if not is_held:
                self._remove(document.id)
        missing = np.setdiff1d(keys, mine).tolist()
        for first in range(0, len(missing), MOST_VALUES):
            self._read(link, missing[first : first + MOST_VALUES], settings.is_current)
        if len(missing) and len(mine) and missing[0] < mine[-1]:
            self._sort()

    def _read(self, link: Connection, keys: list[int], is_current: bool) -> None:
        """Reads documents of the file, and adds them after the others."""
        found = [_Row(*row) for row in link.rows_in(_READ, keys)]
        if [row.key for row in found] != keys:
            raise _damage(link, "documents are missing")
        read = [row.read(link) for row in found]
        documents = [document for document, _ in read]
        # Other words may now be made of the same text.
        self._append(documents, [words for _, words in read] if is_current else self._index(documents))
        self._keys.extend(keys)

    def _empty(self) -> None:
        self._rows, self._terms, self._scorer, self._vocabulary = DocumentRows(), [], Postings(), {}
        self._keys = array("q")

    def _compact(self) -> None:
        self._keys = array("q", [key for key, live in zip(self._keys, self._rows.live().tolist()) if live])
        super()._compact()

    def _sort(self) -> None:
        """Puts the rows into the order of their keys, after a deletion was taken back."""
        self._compact()
        documents, order = list(self._rows), np.argsort(np.frombuffer(self._keys.tobytes(), np.int64)).tolist()
        terms = [self._terms[row] for row in order]
        self._keys = array("q", sorted(self._keys))
        self._rows, self._terms, self._scorer = DocumentRows(), [], Postings()
        self._append_terms([documents[row] for row in order], terms)


def index_size(contents: Contents) -> int | None:
    """The number of documents of the BM25 index in a bank; None if there is no index."""
    link = contents.connection
    if not link.rows("SELECT 1 FROM bm25"):
        return None
    [(count,)] = link.rows("SELECT count(*) FROM bm25_document")
    return int(count)


def index_faults(contents: Contents) -> Iterator[str]:
    """Checks every byte of the BM25 index in a bank, and yields what is damaged.

    Raises:
        DamageError: if nothing of it can be read.
    """
    link = contents.connection
    settings = _read_settings(link)
    keys = [key for (key,) in link.rows("SELECT key FROM bm25_document ORDER BY key")]
    if settings is None and keys:
        yield "the index has no settings"
    for found in link.rows_in(_READ, keys):
        try:
            _Row(*found).read(link)
        except DamageError as error:
            yield str(error).removeprefix(f"{link.path} is damaged: ")


class _Settings(NamedTuple):
    """How an index was made.

    Attributes:
        tokenizer: splits its documents into words.
        analysis: what has made its words; see `mac_rag.retrieval.bm25.ANALYSIS`.
        lineage: a random name; only within one lineage does a number always stand for the same document.
    """

    tokenizer: Tokenizer
    analysis: str
    lineage: str

    @property
    def is_current(self) -> bool:
        """True if the same words are made now."""
        return self.analysis == ANALYSIS

    @property
    def written(self) -> str:
        """The settings as JSON."""
        return json.dumps({"tokenizer": self.tokenizer.describe(), "analysis": self.analysis})


class _Row(NamedTuple):
    """A document of the index as the file has it."""

    key: int
    id: str
    metadata: str
    text: str
    words: bytes
    crc: int

    def read(self, link: Connection) -> tuple[Document, list[str]]:
        """The document and its words.

        Raises:
            DamageError: if it is not what was written.
        """
        try:
            if _crc(self.id, self.metadata, self.text, self.words) != self.crc:
                raise ValueError("its checksum differs")
            metadata = parse_json(self.metadata, depth=METADATA_DEPTH)
            if not isinstance(metadata, dict):
                raise TypeError("its metadata are no JSON object")
            return Document(self.id, self.text, metadata), self.words.decode().split("\0")[:-1]
        except (ValueError, TypeError, AttributeError) as error:
            raise _damage(link, f"document {self.id!r:.80}: {error}") from error


def _written(words: list[str]) -> bytes:
    """The words of a document, each with a NUL after it, which no text has."""
    return "".join(f"{word}\0" for word in words).encode()


def _read_settings(link: Connection) -> _Settings | None:
    found = link.rows("SELECT settings, lineage FROM bm25")
    if not found:
        return None
    try:
        [(settings, lineage)] = found
        content = parse_json(settings)
        return _Settings(Tokenizer(**content["tokenizer"]), content["analysis"], lineage)
    except (ValueError, TypeError, KeyError, ConfigError) as error:
        raise _damage(link, f"its settings: {error!r:.200}") from error


def _damage(link: Connection, fault: str) -> DamageError:
    return DamageError(f"{link.path} is damaged: the BM25 index: {fault}; restore a backup")


def _crc(name: str, metadata: str, text: str, words: bytes) -> int:
    return zlib.crc32(words, zlib.crc32("\0".join((name, metadata, text)).encode()))
