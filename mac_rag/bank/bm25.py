"""A BM25 index in the file of a memory bank: documents, memory tokens and words change in one commit.

The index is in the tables `bm25`, `bm25_document` and `bm25_word`. A document gets a new number (its key) whenever it
is added, and a word whenever it comes into the file. A number that was committed is never used again, so what has
changed between two commits shows in the numbers alone. Documents of the index need not be those of the bank: a bounded
bank forgets documents that the index keeps.
"""

from __future__ import annotations

import json
import zlib
from array import array
from collections.abc import Collection, Container, Iterable, Iterator, Sequence
from pathlib import Path
from secrets import token_hex
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mac_rag.bank.bank import Contents, MemoryBank
from mac_rag.bank.database import MOST_VALUES, Connection
from mac_rag.data.types import Document
from mac_rag.errors import ConfigError, DamageError
from mac_rag.retrieval.base import DocumentRows, Hit, check_documents
from mac_rag.retrieval.bm25 import ANALYSIS, BM25Retriever, Postings, Terms, Tokenizer
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
        self._numbers = array("q")  # by term id: the number of its word; -1 for one that is not in the file
        self._term_of: dict[int, int] = {}  # number of a word -> term id
        self._next_word = 0
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
        for table in ("bm25_document", "bm25_word"):
            link.write(f"DELETE FROM {table}")
        lineage = token_hex(8) if kept is None else kept.lineage
        settings = _Settings(self.tokenizer, ANALYSIS, lineage)
        link.write(
            "INSERT INTO bm25 VALUES (1, ?1, ?2, 0, 0) ON CONFLICT (number) DO UPDATE SET settings = ?1",
            [(settings.written, lineage)],
        )
        with self._lock:
            self._empty()
        self._kept = (self.bank.history, settings)

    def _change_both(
        self, link: Connection, removed: Collection[str], documents: Sequence[Document], indexed: list[list[str]]
    ) -> None:
        [(key, number)] = link.rows("SELECT next_document, next_word FROM bm25")
        most = 1 << 30  # a word's number has 32 bits, a key 64
        if not (0 <= number < most and 0 <= key < most**2):
            raise _damage(link, "its next numbers are out of range")
        before = _distinct([self._terms[self._rows.row_of(name)] for name in removed])
        for name in removed:
            self._remove(name)
        terms = [self._ids(words) for words in indexed]
        self._numbers.extend([-1] * (len(self._vocabulary) - len(self._numbers)))
        after = _distinct(terms)
        # In the file are the words that a document has.
        unused = [term for term in before - after if not self._scorer.holding(term)]
        new = [term for term in sorted(after - before) if not self._scorer.holding(term)]
        for place, term in enumerate(new, number):
            self._term_of.pop(self._numbers[term], None)
            self._numbers[term] = place
            self._term_of[place] = term
        self._next_word = number + len(new)
        word_of = {self._vocabulary[word]: word for words in indexed for word in words}
        link.write("DELETE FROM bm25_document WHERE id = ?", [(name,) for name in removed])
        link.write("DELETE FROM bm25_word WHERE number = ?", [(self._numbers[term],) for term in unused])
        link.write(
            "INSERT INTO bm25_word VALUES (?, ?, ?)",
            [(self._numbers[term], word_of[term], zlib.crc32(word_of[term].encode())) for term in new],
        )
        numbers = np.frombuffer(self._numbers.tobytes(), np.int64)
        rows = []
        for place, (document, own) in enumerate(zip(documents, terms, strict=True), key):
            words, metadata = numbers[own].astype("<i4").tobytes(), json.dumps(document.metadata)
            crc = _crc(document.id, metadata, document.text, words)
            rows.append((place, document.id, metadata, document.text, words, crc))
        link.write(_ADD, rows)
        link.write("UPDATE bm25 SET next_document = ?, next_word = ?", [(key + len(rows), self._next_word)])
        self._append_terms(documents, terms)
        self._keys.extend(range(key, key + len(rows)))
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
        [(next_word,)] = link.rows("SELECT next_word FROM bm25")
        keys = np.array([key for (key,) in link.rows("SELECT key FROM bm25_document ORDER BY key")], dtype=np.int64)
        mine = np.frombuffer(self._keys.tobytes(), np.int64)[self._rows.live()]
        for document, is_held in zip(list(self._rows), np.isin(mine, keys).tolist(), strict=True):
            if not is_held:
                self._remove(document.id)
        if next_word < self._next_word:  # words that were never committed, whose numbers will be those of others
            for number in [number for number in self._term_of if number >= next_word]:
                self._numbers[self._term_of.pop(number)] = -1
        self._next_word = next_word
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
        documents = [row.document(link) for row in found]
        if is_current:
            terms = self._terms_of(link, [row.numbers for row in found])
        else:  # other words may now be made of the same text
            terms = [self._ids(words) for words in self._index(documents)]
            self._numbers.extend([-1] * (len(self._vocabulary) - len(self._numbers)))
        self._append_terms(documents, terms)
        self._keys.extend(keys)

    def _terms_of(self, link: Connection, documents: list[NDArray[np.int64]]) -> list[Terms]:
        """The terms of documents, from the numbers of their words."""
        numbers, places = np.unique(np.concatenate(documents), return_inverse=True)
        unknown = [number for number in numbers.tolist() if number not in self._term_of]
        for number, word, crc in link.rows_in("SELECT number, word, crc FROM bm25_word WHERE number IN ({})", unknown):
            if not isinstance(word, str) or zlib.crc32(word.encode()) != crc:
                raise _damage(link, f"word {number}: its checksum differs")
            term = self._vocabulary.setdefault(word, len(self._vocabulary))
            if term == len(self._numbers):
                self._numbers.append(-1)
            self._term_of.pop(self._numbers[term], None)
            self._numbers[term] = number
            self._term_of[number] = term
        try:
            terms = np.array([self._term_of[number] for number in numbers.tolist()], dtype=np.int32)[places]
        except KeyError as error:
            raise _damage(link, f"word {error} is missing") from None
        return np.split(terms, np.cumsum([len(numbers) for numbers in documents])[:-1])

    def _empty(self) -> None:
        self._rows, self._terms, self._scorer, self._vocabulary = DocumentRows(), [], Postings(), {}
        self._keys, self._numbers, self._term_of, self._next_word = array("q"), array("q"), {}, 0

    def _compact(self) -> None:
        self._keys = array("q", [key for key, live in zip(self._keys, self._rows.live().tolist()) if live])
        numbers = dict(zip(self._vocabulary, self._numbers))
        super()._compact()
        self._numbers = array("q", [numbers[word] for word in self._vocabulary])
        self._term_of = {number: term for term, number in enumerate(self._numbers) if number >= 0}

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
    known: set[int] = set()
    for number, word, crc in link.rows("SELECT number, word, crc FROM bm25_word"):
        known.add(number)
        if zlib.crc32(word.encode()) != crc:
            yield f"word {number} of the index"
    keys = [key for (key,) in link.rows("SELECT key FROM bm25_document ORDER BY key")]
    if settings is None and (keys or known):
        yield "the index has no settings"
    used: set[int] = set()
    for row in (_Row(*found) for found in link.rows_in(_READ, keys)):
        try:
            row.document(link)
            numbers = set(row.numbers.tolist())
        except DamageError as error:
            yield str(error).removeprefix(f"{link.path} is damaged: ")
            continue
        if numbers - known:
            yield f"the index of document {row.id!r:.80}: a word is missing"
        used |= numbers
    if known - used:
        yield f"{len(known - used):,} words of the index belong to no document"


class _Settings(NamedTuple):
    """How an index was made.

    Attributes:
        tokenizer: splits its documents into words.
        analysis: what has made its words; see `mac_rag.retrieval.bm25.ANALYSIS`.
        lineage: a random name; only within one lineage does a number always stand for the same document or word.
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

    def document(self, link: Connection) -> Document:
        """The document.

        Raises:
            DamageError: if it is not what was written.
        """
        try:
            if _crc(self.id, self.metadata, self.text, self.words) != self.crc:
                raise ValueError("its checksum differs")
            metadata: dict[str, Any] = parse_json(self.metadata, depth=METADATA_DEPTH)
            if not isinstance(metadata, dict) or len(self.words) % 4:
                raise ValueError("it is none")
            return Document(self.id, self.text, metadata)
        except (ValueError, TypeError, AttributeError) as error:
            raise _damage(link, f"document {self.id!r:.80}: {error}") from error

    @property
    def numbers(self) -> NDArray[np.int64]:
        """The numbers of its words."""
        return np.frombuffer(self.words, "<i4").astype(np.int64)


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


def _distinct(terms: Iterable[Terms]) -> set[int]:
    return set(np.unique(np.concatenate([np.zeros(0, dtype=np.int32), *terms])).tolist())
