"""Documents and their vectors in Chroma: in a folder on this machine, or on a server that other processes can share."""

from __future__ import annotations

import heapq
import json
import os
import ssl
import stat
import threading
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, urlsplit

import numpy as np
from filelock import FileLock, Timeout

from mac_rag.atomic_files import make_folder
from mac_rag.data.characters import fault_of, shown_id
from mac_rag.data.document_ids import those_in
from mac_rag.data.provenance import Member
from mac_rag.data.types import Document
from mac_rag.errors import BankError, ConfigError, FingerprintError
from mac_rag.retrieval.base import Hit, Retriever, check_documents, check_request
from mac_rag.retrieval.dense import Encoder, Vectors, check_finite
from mac_rag.untrusted_files import METADATA_DEPTH, MalformedError, parse_json

try:
    import chromadb
    import httpx
    from chromadb.api.fastapi import FastAPI
    from chromadb.api.models.Collection import Collection as ChromaCollection
    from chromadb.config import Settings, System
    from chromadb.errors import ChromaError, InternalError, error_types
    from tenacity import (
        Retrying,
        retry_if_exception,
        retry_if_exception_type,
        stop_after_attempt,
        wait_exponential,
        wait_fixed,
    )
    from typing_extensions import override
except ModuleNotFoundError:
    raise ConfigError("a Chroma retriever needs chromadb: pip install 'mac-rag[chroma]'") from None

COLLECTION = "mac_rag"

_ENCODER = "mac_rag_encoder"  # key in the collection's metadata: fingerprint of the encoder
_HASH, _METADATA = "content_hash", "metadata"  # keys in the record of a document
_LOCK = "mac_rag.lock"
_BATCH_BYTES = 8 << 20  # most bytes in one request; servers take much more
_READS = 5  # attempts of a request that changes nothing
_IDS = 4096  # most ids in one request; Chroma fails if there are more variables than its database takes


class ChromaRetriever(Retriever):
    """Keeps texts, vectors, metadata and content hashes in a Chroma collection and ranks by dot product.

    Every document is a hit; equal scores rank by document id. Chroma searches an HNSW graph, so it can miss one of the
    best among very many documents. With `allowed`, the allowed documents are compared exactly, and their scores equal,
    bit by bit, those in a collection without the others. Once `add` or `put` has returned, its documents survive a
    crash of this process and of the server; a crash during the call can leave some of them.

    Args:
        place: a folder, or `http://HOST:PORT` (or https) of a running server, followed by `/NAME` for a collection of
            that name. Only one process can open a folder, because two would lose each other's documents; any number can
            use a server.
        encoder: encoder of documents and questions.
        headers: HTTP headers of each request to a server, for a proxy that checks them. They override the token in the
            environment variable `MAC_RAG_CHROMA_TOKEN`, which is sent as `Authorization: Bearer TOKEN`.
        timeout: most seconds that a server may take to answer.

    Raises:
        ConfigError: if the address is malformed or has a password, a header cannot be sent, or the collection was not
            made by mac_rag.
        FingerprintError: if another encoder made the vectors of the collection.
        BankError: if the server does not answer, or another process has the folder open.
    """

    def __init__(
        self,
        place: str | Path,
        encoder: Encoder,
        *,
        headers: Mapping[str, str] | None = None,
        timeout: float = 60.0,
    ) -> None:
        self.encoder = encoder
        self._place = str(place)
        self._lock = threading.RLock()  # held during a change; Chroma itself lets others read meanwhile
        self._file_lock: FileLock | None = None
        self._client: Any  # Any, because chromadb's interface class lacks `close`, which every client has
        name = COLLECTION
        with self._errors():
            if self._place.startswith(("http://", "https://")):
                name = collection_name(self._place) or COLLECTION
                self._client = ChromaServer(self._place, request_headers(headers), timeout)
            elif headers is not None:
                raise ConfigError(f"headers are for a server, and {self._place} is a folder; leave them out")
            else:
                self._file_lock = _locked(Path(place))
                settings = Settings(anonymized_telemetry=False)
                self._client = chromadb.PersistentClient(self._place, settings=settings)
            self._collection = self._client.get_or_create_collection(
                name,
                embedding_function=None,
                metadata={_ENCODER: encoder.fingerprint},
                configuration={"hnsw": {"space": "ip"}},
            )
            _check_schema(self._collection, self._place)  # before chromadb reads it
            self._batch = self._client.get_max_batch_size()
        self._hide_files()
        fingerprint = (self._collection.metadata or {}).get(_ENCODER)
        if fingerprint is None:
            raise ConfigError(
                f"the collection {name!r} in {self._place} was not made by mac_rag; name another collection"
            )
        if fingerprint != encoder.fingerprint:
            raise FingerprintError(
                f"the vectors in {self._place} were made by the encoder {fingerprint!r}, not by "
                f"{encoder.fingerprint!r}; open it with that one, or put the documents into another folder or "
                "collection"
            )

    def close(self) -> None:
        """Closes the client, and lets another process open the folder. The retriever cannot be used afterwards."""
        self._client.close()
        self._hide_files()
        if self._file_lock is not None:
            self._file_lock.release()

    def _hide_files(self) -> None:
        """Makes Chroma's files readable for their user only. Does nothing for a server; the folder keeps its mode."""
        if self._file_lock is None:
            return
        for path in Path(self._place).rglob("*"):
            with suppress(OSError):  # Chroma may have removed the file
                mode = path.lstat().st_mode
                if mode & 0o077 and (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
                    path.chmod(stat.S_IMODE(mode) & 0o700)

    def add(self, documents: Sequence[Document]) -> None:
        with self._lock:
            for document_id in self.content_hashes([document.id for document in documents]):
                raise BankError(f"document {document_id!r} is already in the index; delete it before adding it again")
            self.put(documents)

    def put(self, documents: Sequence[Document]) -> None:
        check_documents(documents)
        records = [_record_of(document) for document in documents]
        vectors = self.encoder.documents([document.text for document in documents])
        check_finite(vectors, [f"document {document.id!r}" for document in documents])
        with self._lock:
            for part in self._batches(documents):
                with self._errors():
                    self._collection.upsert(
                        ids=[document.id for document in documents[part]],
                        embeddings=vectors[part],
                        documents=[document.text for document in documents[part]],
                        metadatas=list(records[part]),
                    )
            self._hide_files()

    def delete(self, document_id: str) -> None:
        with self._lock:
            if document_id not in self:
                raise BankError(f"no document {document_id!r} in this index of {len(self)} documents")
            with self._errors():
                self._collection.delete(ids=[document_id])

    def retrieve(self, questions: Sequence[str], k: int, *, allowed: Container[str] | None = None) -> list[list[Hit]]:
        check_request(questions, k)
        count = len(self)
        if not questions or not count:
            return [[] for _ in questions]
        vectors = self.encoder.questions(questions)
        check_finite(vectors, [f"question {question!r}" for question in questions])
        if allowed is None:
            return self._query(vectors, min(k, count))
        ids = sorted(those_in(list(self._ids()), allowed))
        parts = [ids[first : first + _IDS] for first in range(0, len(ids), _IDS)]
        rankings = [self._compare(vectors, k, part) for part in parts]
        return [_best((hit for ranking in rankings for hit in ranking[place]), k) for place in range(len(questions))]

    def _compare(self, vectors: Vectors, k: int, ids: list[str]) -> list[list[Hit]]:
        """The `k` best of these documents for each question's vector `[B, D]`, by exact comparison.

        A graph search that is restricted to few documents would end before it has seen all of them.
        """
        result = self._get(ids=ids, include=["embeddings", "documents", "metadatas"])
        if not result["ids"]:  # another process has deleted them
            return [[] for _ in vectors]
        order = sorted(range(len(result["ids"])), key=result["ids"].__getitem__)  # Chroma's order is arbitrary
        scores = vectors @ np.asarray(result["embeddings"], dtype=np.float32)[order].T
        records = [(result["ids"][i], result["documents"][i], result["metadatas"][i]) for i in order]
        rankings = []
        for row in scores.tolist():
            ranked = zip(row, records, strict=True)
            best = heapq.nsmallest(k, ranked, key=lambda scored: (-scored[0], scored[1][0]))
            rankings.append(
                [
                    Hit(name, text, score, _metadata_in(record, name, self._place))
                    for score, (name, text, record) in best
                ]
            )
        return rankings

    def _query(self, vectors: Vectors, k: int) -> list[list[Hit]]:
        """The `k` best of all documents for each question's vector `[B, D]`, by a graph search."""
        result = self._read(lambda: self._collection.query(query_embeddings=vectors, n_results=k))
        columns = zip(result["ids"], result["documents"], result["distances"], result["metadatas"], strict=True)
        return [
            _best(
                (
                    Hit(name, text, 1.0 - distance, _metadata_in(record, name, self._place))
                    for name, text, distance, record in zip(*column, strict=True)
                    if record is not None  # None: deleted between Chroma's search and its look-up
                ),
                k,
            )
            for column in columns
        ]

    def __len__(self) -> int:
        with self._errors():
            return int(self._collection.count())

    def __contains__(self, document_id: object) -> bool:
        return isinstance(document_id, str) and bool(self.content_hashes([document_id]))

    def held(self, document_ids: Iterable[str]) -> list[str]:
        names = list(document_ids)
        known = {name for page in self._pages(names, []) for name in page["ids"]}
        return [name for name in names if name in known]

    def content_hashes(self, document_ids: Collection[str] | None = None) -> dict[str, str]:
        hashes: dict[str, str] = {}
        for page in self._pages(document_ids, ["metadatas"]):
            for name, row in zip(page["ids"], page["metadatas"], strict=True):
                hashes[name] = _hash_in(row, name, self._place)
        return hashes

    def documents(self, document_ids: Collection[str]) -> list[Document]:
        by_id: dict[str, Document] = {}
        for page in self._pages(document_ids, ["documents", "metadatas"]):
            for name, text, row in zip(page["ids"], page["documents"], page["metadatas"], strict=True):
                by_id[name] = Document(name, text, _metadata_in(row, name, self._place))
        if missing := [name for name in document_ids if name not in by_id]:
            raise BankError(f"no document {missing[0]!r} in this index of {len(self)} documents")
        return [by_id[name] for name in document_ids]

    def _pages(self, document_ids: Collection[str] | None, include: list[str]) -> Iterator[Any]:
        """Chroma's records of these documents (None for all), page by page.

        Pages are defined by ids. Pages by offset would miss a document if another process deletes one before it.
        """
        if document_ids is None:
            document_ids = self._ids()
        ids = [
            name for name in dict.fromkeys(document_ids) if isinstance(name, str) and name and fault_of(name) is None
        ]
        for first in range(0, len(ids), _IDS):
            yield self._get(ids=ids[first : first + _IDS], include=include)

    def _ids(self) -> list[str]:
        """The ids of all documents at one moment."""
        ids: list[str] = self._get(include=[])["ids"]
        return ids

    def _get(self, **options: Any) -> Any:
        return self._read(lambda: self._collection.get(**options))

    def _read(self, request: Callable[[], Any]) -> Any:
        """Makes a request that changes nothing, and repeats it if a change by another thread made Chroma fail.

        Chroma looks ids up in one index and their records in another. If a document is deleted in between, that is an
        internal error.
        """
        with self._errors():
            again = retry_if_exception_type(InternalError)
            return Retrying(retry=again, stop=stop_after_attempt(_READS), wait=wait_fixed(0.01), reraise=True)(request)

    def _batches(self, documents: Sequence[Document]) -> Iterator[slice]:
        """Slices of the documents, each of them small enough for one request."""
        first = size = 0
        for index, document in enumerate(documents):
            added = 4 * (len(document.text) + 8 * self.encoder.width)
            if index > first and (index - first == self._batch or size + added > _BATCH_BYTES):
                yield slice(first, index)
                first, size = index, 0
            size += added
        if first < len(documents):
            yield slice(first, len(documents))

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """Turns errors of Chroma and of the connection to it into `BankError`."""
        try:
            yield
        except httpx.HTTPError as error:
            raise explained(error, self._place) from error
        except (ChromaError, ValueError) as error:
            raise BankError(f"Chroma refuses a request to {self._place}: {error}") from error


def _best(hits: Iterable[Hit], k: int) -> list[Hit]:
    return sorted(hits, key=lambda hit: (-hit.score, hit.document_id))[:k]


def _locked(folder: Path) -> FileLock:
    """Locks a folder against other processes until this process ends or releases the lock."""
    try:
        make_folder(folder)
        # One lock per process and folder, because Chroma also shares open folders within a process.
        lock = FileLock(folder.resolve() / _LOCK, mode=0o600, thread_local=False, is_singleton=True)
        lock.acquire(blocking=False)
    except Timeout:
        raise BankError(
            f"{folder} is open in another process, and two would lose each other's documents; wait until that process "
            f"is done, or let both use a server: chroma run --path {folder} --host HOST --port PORT"
        ) from None
    except OSError as error:
        raise BankError(f"{folder} cannot be used for Chroma: {error}; give another folder") from error
    return lock


def _record_of(document: Document) -> dict[str, str]:
    """The metadata that Chroma stores with a document: its content hash, and its own metadata as JSON."""
    member = Member.of(document)
    return {_HASH: member.content_hash, _METADATA: json.dumps(member.metadata)}


def _hash_in(record: Any, document_id: str, place: str) -> str:
    """The content hash in a record, which another program may have written; BankError if there is none."""
    return _text_in(record, _HASH, document_id, place)


def _metadata_in(record: Any, document_id: str, place: str) -> dict[str, Any]:
    """The metadata in a record; BankError if there are none, or no JSON object within the bounds of metadata."""
    text = _text_in(record, _METADATA, document_id, place)
    try:
        metadata = parse_json(text, depth=METADATA_DEPTH)
        if not isinstance(metadata, dict):
            raise MalformedError("not a JSON object")
    except MalformedError as error:
        raise _foreign(f"its metadata is invalid ({error})", document_id, place) from None
    return metadata


def _text_in(record: Any, key: str, document_id: str, place: str) -> str:
    value = record.get(key) if isinstance(record, dict) else None
    if not isinstance(value, str):
        raise _foreign(f"it has no {key}", document_id, place)
    return value


def _foreign(fault: str, document_id: str, place: str) -> BankError:
    return BankError(
        f"document {shown_id(document_id)} in {place} was not written by mac_rag: {fault}; delete it there, and add it "
        "again"
    )


def _check_schema(collection: Any, place: str) -> None:
    """Refuses a collection that names an embedding function. The collections that mac_rag makes have none.

    chromadb builds such a function when it reads the schema, at the first write. Some of these functions, such as
    sentence encoders, may run code from the folder of their model.
    """
    model = collection._model
    if foreign := _embedding_functions(model.configuration_json, model.serialized_schema):
        raise ConfigError(
            f"the collection {collection.name!r} in {place} has an embedding function ({', '.join(foreign)}), which "
            "chromadb would build and run; use a collection that mac_rag made"
        )


def _embedding_functions(*values: Any) -> list[str]:
    """Names of the embedding functions in a collection's configuration and schema."""
    names, left = set(), list(values)
    while left:
        value = left.pop()
        left += value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        function = value.get("embedding_function") if isinstance(value, dict) else None
        if function is not None and not (isinstance(function, dict) and function.get("type") in ("legacy", "unknown")):
            names.add(str(function.get("name") if isinstance(function, dict) else function)[:40])
    return sorted(names)


TOKEN = "MAC_RAG_CHROMA_TOKEN"  # environment variable

_CONNECT_SECONDS = 10.0
_ATTEMPTS = 4
_FIRST_WAIT = 0.2  # seconds before the second attempt; they double
_UNAVAILABLE = (502, 503, 504)


class ChromaServer:
    """A Chroma server, with the methods of chromadb's client that a `ChromaRetriever` calls.

    chromadb's own client waits for a server forever, and raises bare exceptions with the text of a proxy. This one
    makes chromadb's requests with a session of its own.

    Args:
        place: `http://HOST:PORT` or `https://HOST:PORT`.
        headers: sent with each request.
        timeout: most seconds that the server may take to answer.
    """

    def __init__(self, place: str, headers: Mapping[str, str], timeout: float) -> None:
        parts = _split(place)
        settings = Settings(
            chroma_api_impl="chromadb.api.fastapi.FastAPI",
            chroma_server_host=parts.hostname,
            chroma_server_http_port=parts.port,
            chroma_server_ssl_enabled=parts.scheme == "https",
            anonymized_telemetry=False,
        )
        self._requests = _Requests(System(settings), headers, timeout)

    def get_or_create_collection(
        self, name: str, *, metadata: dict[str, Any], configuration: Any, embedding_function: None
    ) -> ChromaCollection:
        model = self._requests.get_or_create_collection(name, metadata=metadata, configuration=configuration)
        return ChromaCollection(self._requests, model, embedding_function)

    def get_max_batch_size(self) -> int:
        return self._requests.get_max_batch_size()

    def close(self) -> None:
        self._requests._session.close()


class _Requests(FastAPI):
    """chromadb's requests with time-outs, and with retries, which are safe: ids are upserted and deleted."""

    def __init__(self, system: System, headers: Mapping[str, str], timeout: float) -> None:
        super().__init__(system)
        # The headers are not in the settings, because their repr would show them.
        self._session.headers.update(headers)
        self._session.timeout = httpx.Timeout(timeout, connect=min(timeout, _CONNECT_SECONDS))
        self._session.event_hooks = {"response": [_check]}
        self._retrying = Retrying(
            retry=retry_if_exception(_is_passing),
            stop=stop_after_attempt(_ATTEMPTS),
            wait=wait_exponential(_FIRST_WAIT),
            reraise=True,
        )

    @override  # chromadb insists on the decorator
    def _make_request(self, method: str, path: str, **kwargs: Any) -> Any:
        return self._retrying(super()._make_request, method, path, **kwargs)


def request_headers(headers: Mapping[str, str] | None) -> dict[str, str]:
    """The headers of all requests: these, and the token in the environment, if there is one.

    Raises:
        ConfigError: for a header that HTTP cannot carry. The message does not contain its value, which is a secret.
    """
    token = os.environ.get(TOKEN)
    values = {} if token is None else {TOKEN: token}
    values |= {f"the header {name!r}": value for name, value in (headers or {}).items()}
    for source, value in values.items():
        if not value or not value.isascii() or not value.isprintable() or value != value.strip():
            raise ConfigError(
                f"{source} is empty, or has line breaks, spaces around it, or characters that are not ASCII; set it to "
                "the value alone"
            )
    return ({} if token is None else {"Authorization": f"Bearer {token}"}) | dict(headers or {})


def collection_name(place: str) -> str:
    """The name of the collection in the address of a server; empty if it has none.

    Raises:
        ConfigError: for a malformed address, or one with a password.
    """
    return _split(place).path.strip("/")


def explained(error: Exception, place: str) -> BankError:
    """The error to raise for a failure of the connection."""
    if isinstance(error, httpx.TimeoutException):
        return BankError(
            f"the Chroma server at {place} did not answer in time; check whether it is overloaded, or allow more time: "
            "ChromaRetriever(timeout=SECONDS)"
        )
    if isinstance(error, httpx.HTTPStatusError):
        status = error.response.status_code
        if status in (401, 403):
            return BankError(
                f"the server at {place} refuses access ({status}); put its token into the environment variable "
                f"{TOKEN}, or give ChromaRetriever(headers=...)"
            )
        return BankError(
            f"the server that answers at {place} with status {status} is not a Chroma server, or cannot reach one; "
            "check the address and the proxy in front of it"
        )
    if _is_certificate(error):
        return BankError(
            f"the certificate of {place} is not trusted; set SSL_CERT_FILE to the file of the authority that issued it"
        )
    return BankError(
        f"no Chroma server answers at {place} ({error}); start one: chroma run --path FOLDER --host HOST --port PORT"
    )


def _split(place: str) -> SplitResult:
    parts = urlsplit(place)
    if "@" in parts.netloc or parts.query or parts.fragment:  # the message does not repeat what may be a password
        raise ConfigError(
            "the address of a Chroma server has a user, a password or a query, which would appear in logs and results; "
            f"write http://HOST:PORT, and put a token into the environment variable {TOKEN}"
        )
    try:
        is_complete = bool(parts.hostname) and parts.port is not None
    except ValueError:
        is_complete = False
    if not is_complete:
        raise ConfigError(
            f"{place!r} is not the address of a Chroma server; write http://HOST:PORT or http://HOST:PORT/NAME"
        )
    return parts


def _check(response: httpx.Response) -> None:
    """Raises an `HTTPStatusError` for an error that is not Chroma's own; chromadb would raise a bare exception."""
    if response.is_success:
        return
    response.read()
    try:
        body = response.json()
    except ValueError:
        body = None
    if not (isinstance(body, dict) and body.get("error") in error_types) or response.status_code in _UNAVAILABLE:
        response.raise_for_status()


def _is_passing(error: BaseException) -> bool:
    """True if the same request may succeed a moment later."""
    if isinstance(error, httpx.HTTPStatusError):
        return error.response.status_code in _UNAVAILABLE
    return isinstance(error, httpx.NetworkError | httpx.RemoteProtocolError) and not _is_certificate(error)


def _is_certificate(error: BaseException | None) -> bool:
    while error is not None and not isinstance(error, ssl.SSLCertVerificationError):
        error = error.__cause__ or error.__context__
    return error is not None
