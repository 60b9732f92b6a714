"""Documents and their vectors in Chroma: in a folder on this machine, or on a server that others can use as well."""

from __future__ import annotations

import heapq
import json
import threading
from collections.abc import Collection, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
from filelock import FileLock, Timeout

from mac_rag.data.characters import fault_of
from mac_rag.data.provenance import Member
from mac_rag.data.types import Document
from mac_rag.errors import BankError, ConfigError, FingerprintError
from mac_rag.retrieval.base import Hit, Retriever, check_documents, check_request
from mac_rag.retrieval.dense import Encoder
from mac_rag.retrieval.embeddings import Vectors

COLLECTION = "mac_rag"

_ENCODER = "mac_rag_encoder"  # key in the collection's metadata: fingerprint of the encoder
_HASH, _METADATA = "content_hash", "metadata"  # keys in a document's metadata; the second is all its metadata as JSON
_LOCK = "mac_rag.lock"
_IDS = 4096  # ids in one request; Chroma fails on more variables than its database takes


class ChromaRetriever(Retriever):
    """Keeps texts, vectors, metadata and content hashes in a Chroma collection and ranks by dot product.

    Every document is a hit; equal scores rank by document id. Chroma searches an HNSW graph, so it can miss one of the
    best among very many documents. With `allowed`, the allowed documents are compared exactly. When `add` or `put`
    returns, its documents survive a crash of this process and of the server; a crash during the call can leave some of
    them.

    Args:
        place: a folder, or `http://HOST:PORT` (or https) of a running server, with `/NAME` for a collection of that
            name. Only one process can open a folder, because two would lose each other's documents; any number can use
            a server.
        encoder: encoder of documents and questions.
        batch_bytes: bytes in one request; servers take much more than the default.

    Raises:
        ConfigError: when chromadb is missing, the address is malformed, or the collection was not made by mac_rag.
        FingerprintError: when another encoder made the vectors of the collection.
        BankError: when the server does not answer, or another process has the folder open.
    """

    def __init__(self, place: str | Path, encoder: Encoder, *, batch_bytes: int = 8 << 20) -> None:
        try:
            import chromadb
            from chromadb.config import Settings
        except ImportError:
            raise ConfigError(f"{place!s} needs chromadb: pip install 'mac-rag[chroma]'") from None
        self.encoder = encoder
        self._batch_bytes = batch_bytes
        self._place = str(place)
        self._lock = threading.RLock()
        self._file_lock: FileLock | None = None
        settings = Settings(anonymized_telemetry=False)
        self._client: Any  # chromadb's interface class lacks `close`, which every client has
        name = COLLECTION
        with self._errors():
            if self._place.startswith(("http://", "https://")):
                host, port, name = _address(self._place)
                is_secure = self._place.startswith("https://")
                self._client = chromadb.HttpClient(host, port, ssl=is_secure, settings=settings)
            else:
                self._file_lock = _locked(Path(place))
                self._client = chromadb.PersistentClient(place, settings=settings)
            self._collection = self._client.get_or_create_collection(
                name,
                embedding_function=None,
                metadata={_ENCODER: encoder.fingerprint},
                configuration={"hnsw": {"space": "ip"}},
            )
            self._batch = self._client.get_max_batch_size()
        fingerprint = (self._collection.metadata or {}).get(_ENCODER)
        if fingerprint is None:
            raise ConfigError(f"the collection {name!r} in {self._place} is not mac_rag's; name another collection")
        if fingerprint != encoder.fingerprint:
            raise FingerprintError(
                f"the vectors in {self._place} were made by the encoder {fingerprint!r}, not by "
                f"{encoder.fingerprint!r}; open it with that one, or put the documents into another folder or "
                "collection"
            )

    def close(self) -> None:
        """Closes the client, and lets another process open the folder. The retriever cannot be used afterwards."""
        self._client.close()
        if self._file_lock is not None:
            self._file_lock.release()

    def add(self, documents: Sequence[Document]) -> None:
        with self._lock:
            for document_id in self.content_hashes([document.id for document in documents]):
                raise BankError(f"document {document_id!r} is already in the index; delete it before adding it again")
            self.put(documents)

    def put(self, documents: Sequence[Document]) -> None:
        with self._lock:
            check_documents(documents)
            records = [_record(document) for document in documents]
            vectors = self.encoder.documents([document.text for document in documents])
            for part in self._batches(documents):
                with self._errors():
                    self._collection.upsert(
                        ids=[document.id for document in documents[part]],
                        embeddings=vectors[part],
                        documents=[document.text for document in documents[part]],
                        metadatas=list(records[part]),
                    )

    def delete(self, document_id: str) -> None:
        with self._lock:
            if document_id not in self:
                raise BankError(f"no document {document_id!r} in this index of {len(self)} documents")
            with self._errors():
                self._collection.delete(ids=[document_id])

    def retrieve(self, questions: Sequence[str], k: int, *, allowed: Container[str] | None = None) -> list[list[Hit]]:
        check_request(questions, k)
        with self._lock:
            if not questions or not len(self):
                return [[] for _ in questions]
            vectors = self.encoder.questions(questions)
            if allowed is None:
                return self._query(vectors, min(k, len(self)))
            parts = [[name for name in page["ids"] if name in allowed] for page in self._pages(None, [])]
            rankings = [self._compare(vectors, k, ids) for ids in parts if ids]
        return [_best((hit for ranking in rankings for hit in ranking[place]), k) for place in range(len(questions))]

    def _compare(self, vectors: Vectors, k: int, ids: list[str]) -> list[list[Hit]]:
        """The `k` best of these documents for each question's vector `[B, D]`, by exact comparison.

        A search in the graph, filtered down to few documents, ends before it has seen all of them.
        """
        result = self._get(ids=ids, include=["embeddings", "documents", "metadatas"])
        scores = vectors @ np.asarray(result["embeddings"], dtype=np.float32).T
        records = list(zip(result["ids"], result["documents"], result["metadatas"], strict=True))
        rankings = []
        for row in scores.tolist():
            ranked = zip(row, records, strict=True)
            best = heapq.nsmallest(k, ranked, key=lambda scored: (-scored[0], scored[1][0]))
            rankings.append([Hit(name, text, score, json.loads(r[_METADATA])) for score, (name, text, r) in best])
        return rankings

    def _query(self, vectors: Vectors, k: int) -> list[list[Hit]]:
        """The `k` best of all documents for each question's vector `[B, D]`, by a search in the graph."""
        with self._errors():
            result: Any = self._collection.query(query_embeddings=vectors, n_results=k)
        columns = zip(result["ids"], result["documents"], result["distances"], result["metadatas"], strict=True)
        return [
            _best(
                (
                    Hit(name, text, 1.0 - distance, json.loads(record[_METADATA]))
                    for name, text, distance, record in zip(*column, strict=True)
                ),
                k,
            )
            for column in columns
        ]

    def __len__(self) -> int:
        with self._lock, self._errors():
            return int(self._collection.count())

    def __contains__(self, document_id: object) -> bool:
        return isinstance(document_id, str) and bool(self.content_hashes([document_id]))

    def content_hashes(self, document_ids: Collection[str] | None = None) -> dict[str, str]:
        hashes: dict[str, str] = {}
        with self._lock:
            for page in self._pages(document_ids, ["metadatas"]):
                hashes.update((name, row[_HASH]) for name, row in zip(page["ids"], page["metadatas"], strict=True))
        return hashes

    def documents(self, document_ids: Collection[str]) -> list[Document]:
        by_id: dict[str, Document] = {}
        with self._lock:
            for page in self._pages(document_ids, ["documents", "metadatas"]):
                for name, text, row in zip(page["ids"], page["documents"], page["metadatas"], strict=True):
                    by_id[name] = Document(name, text, json.loads(row[_METADATA]))
        if missing := [name for name in document_ids if name not in by_id]:
            raise BankError(f"no document {missing[0]!r} in this index of {len(self)} documents")
        return [by_id[name] for name in document_ids]

    def _pages(self, document_ids: Collection[str] | None, include: list[str]) -> Iterator[Any]:
        """What Chroma holds of these documents (None for all), page by page."""
        if document_ids is None:
            for first in range(0, len(self), _IDS):
                yield self._get(limit=_IDS, offset=first, include=include)
            return
        ids = [
            name for name in dict.fromkeys(document_ids) if isinstance(name, str) and name and fault_of(name) is None
        ]
        for first in range(0, len(ids), _IDS):
            yield self._get(ids=ids[first : first + _IDS], include=include)

    def _get(self, **options: Any) -> Any:
        with self._errors():
            return self._collection.get(**options)

    def _batches(self, documents: Sequence[Document]) -> Iterator[slice]:
        """Slices of the documents that Chroma takes in one request each."""
        first = size = 0
        for index, document in enumerate(documents):
            added = 4 * (len(document.text) + 8 * self.encoder.width)
            if index > first and (index - first == self._batch or size + added > self._batch_bytes):
                yield slice(first, index)
                first, size = index, 0
            size += added
        if first < len(documents):
            yield slice(first, len(documents))

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """Turns errors of Chroma, and of the connection to it, into `BankError`."""
        from chromadb.errors import ChromaError
        from httpx import HTTPError

        try:
            yield
        except (HTTPError, ValueError) as error:
            if isinstance(error, ValueError) and "connect to a Chroma server" not in str(error):
                raise BankError(f"Chroma refuses a request to {self._place}: {error}") from error
            raise BankError(
                f"no Chroma server answers at {self._place} ({error}); start one: "
                "chroma run --path FOLDER --host HOST --port PORT"
            ) from error
        except ChromaError as error:
            raise BankError(f"Chroma refuses a request to {self._place}: {error}") from error


def _best(hits: Iterable[Hit], k: int) -> list[Hit]:
    return sorted(hits, key=lambda hit: (-hit.score, hit.document_id))[:k]


def _address(place: str) -> tuple[str, int, str]:
    """Host, port and collection name in the address of a server."""
    try:
        parts = urlsplit(place)
        host, port = parts.hostname, parts.port
    except ValueError:
        host = port = None
    if not host or port is None:
        raise ConfigError(
            f"{place!r} is not the address of a Chroma server; write http://HOST:PORT or http://HOST:PORT/NAME"
        )
    return host, port, parts.path.strip("/") or COLLECTION


def _locked(folder: Path) -> FileLock:
    """Locks a folder against other processes until this one ends or closes it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # One lock per process and folder, because Chroma also shares open folders within a process.
        lock = FileLock(folder.resolve() / _LOCK, thread_local=False, is_singleton=True)
        lock.acquire(blocking=False)
    except Timeout:
        raise BankError(
            f"{folder} is open in another process, and two would lose each other's documents; wait until it is done, "
            f"or let both use a server: chroma run --path {folder} --host HOST --port PORT"
        ) from None
    except OSError as error:
        raise BankError(f"{folder} cannot be used for Chroma: {error}") from error
    return lock


def _record(document: Document) -> dict[str, str]:
    """What Chroma stores of a document beside text and vector."""
    member = Member.of(document)
    return {_HASH: member.content_hash, _METADATA: json.dumps(member.metadata)}
