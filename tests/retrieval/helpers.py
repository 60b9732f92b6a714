"""Helpers of the retrieval tests: an encoder that needs no model, documents, a real Chroma server, a reverse proxy."""

from __future__ import annotations

import hashlib
import http.client
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self
from urllib.request import urlopen

import numpy as np
from hypothesis import strategies as st

from mac_rag.data.types import Document
from mac_rag.retrieval import BM25Retriever, DenseRetriever, HybridRetriever, Retriever, Tokenizer
from mac_rag.retrieval.dense import Vectors


class WordEncoder:
    """Embeddings of hashed bags of words: deterministic, and texts that share words are near each other."""

    width = 32

    def __init__(self, name: str = "words", fail_after: int | None = None) -> None:
        self.fingerprint = name
        self.encoded: list[str] = []
        self._left = fail_after

    def documents(self, texts: Sequence[str], advance: Callable[[int], None] | None = None) -> Vectors:
        if self._left is not None:
            if not self._left:
                raise KeyboardInterrupt
            self._left -= 1
        self.encoded += texts
        if advance is not None:
            advance(len(texts))
        return self.questions(texts)

    def questions(self, texts: Sequence[str]) -> Vectors:
        vectors = np.zeros((len(texts), self.width), dtype=np.float32)
        for row, text in enumerate(texts):
            for word in text.split():
                vectors[row, hashlib.sha256(word.encode()).digest()[0] % self.width] += 1
        return vectors


PLAIN = Tokenizer(stemmer=None, stopwords=())


class UnevenEncoder(WordEncoder):
    """Vectors of random numbers, one text independent of the next, whose products are rounded."""

    width = 48

    def questions(self, texts: Sequence[str]) -> Vectors:
        seeds = (int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") for text in texts)
        rows = [np.random.default_rng(seed).standard_normal(self.width, dtype=np.float32) for seed in seeds]
        return np.stack(rows) if rows else np.zeros((0, self.width), dtype=np.float32)


def in_blocks(retriever: DenseRetriever, scores: int) -> DenseRetriever:
    """The retriever, which computes so many scores at a time."""
    retriever._most_scores = scores
    return retriever


RETRIEVERS: dict[str, Callable[[], Retriever]] = {
    "incremental": lambda: BM25Retriever(tokenizer=PLAIN),
    "rank_bm25": lambda: BM25Retriever("rank_bm25", tokenizer=PLAIN),
    "dense": lambda: in_blocks(DenseRetriever(UnevenEncoder()), 24),
    "hybrid": lambda: HybridRetriever(
        [BM25Retriever(tokenizer=PLAIN), DenseRetriever(UnevenEncoder())], [1, 0.7], depth=3
    ),
}


def documents(*texts: str) -> list[Document]:
    """Documents `d0`, `d1`, ... with these texts, each with its number as metadata."""
    return [Document(f"d{index}", text, {"place": index}) for index, text in enumerate(texts)]


def changed(retriever: Retriever, data: st.DataObject, texts: st.SearchStrategy[str]) -> Iterator[dict[str, Document]]:
    """Adds and deletes drawn documents, and yields what the retriever has to hold after each step."""
    kept: dict[str, Document] = {}
    for step in range(data.draw(st.integers(1, 8))):
        if kept and data.draw(st.booleans()):
            gone = data.draw(st.sampled_from(sorted(kept)))
            retriever.delete(gone)
            del kept[gone]
        else:
            added = [Document(f"{step}-{i}", text) for i, text in enumerate(data.draw(st.lists(texts, max_size=4)))]
            retriever.add(added)
            kept |= {document.id: document for document in added}
        assert len(retriever) == len(kept)
        assert all(document_id in retriever for document_id in kept)
        yield kept


class Server:
    """A real Chroma server on loopback: `chroma run` on a free port, until the context ends."""

    def __init__(self, folder: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = int(free.getsockname()[1])
        self.url = f"http://127.0.0.1:{self.port}"
        command = Path(sys.executable).with_name("chroma")
        self._command = [command, "run", "--path", folder, "--host", "127.0.0.1", "--port", str(self.port)]
        self.process: subprocess.Popen[bytes]

    def start(self) -> None:
        """Starts it, and waits until it answers."""
        self.process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for _ in range(600):
            try:
                urlopen(f"{self.url}/api/v2/heartbeat").close()
                return
            except OSError:
                assert self.process.poll() is None, "chroma run ended"
                time.sleep(0.05)
        raise AssertionError("chroma run does not answer")

    def client(self) -> Any:
        """One of Chroma's own clients."""
        import chromadb
        from chromadb.config import Settings

        return chromadb.HttpClient("127.0.0.1", self.port, settings=Settings(anonymized_telemetry=False))

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()


class Proxy:
    """A reverse proxy in front of a Chroma server that lets requests with the right headers through.

    Args:
        server: the port that it forwards to.
        wanted: headers that a request must have.
        tls: the context of an HTTPS proxy; None for HTTP.

    Attributes:
        failures: statuses that the next requests get, first come first served; None closes the connection unanswered.
        forwarded: method and path of all requests that were let through.
    """

    def __init__(self, server: int, wanted: dict[str, str], tls: ssl.SSLContext | None = None) -> None:
        self.failures: list[int | None] = []
        self.forwarded: list[str] = []
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def _handle(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                if any(self.headers.get(name) != value for name, value in wanted.items()):
                    self._send(401, b"<html>who are you?</html>")
                elif proxy.failures:
                    status = proxy.failures.pop(0)
                    if status is None:
                        self.close_connection = True
                    else:
                        self._send(status, b"<html>not now</html>")
                else:
                    proxy.forwarded.append(f"{self.command} {self.path}")
                    connection = http.client.HTTPConnection("127.0.0.1", server)
                    connection.request(self.command, self.path, body, {"Content-Type": "application/json"})
                    response = connection.getresponse()
                    self._send(response.status, response.read())
                    connection.close()

            def _send(self, status: int, body: bytes) -> None:
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            do_GET = do_POST = do_DELETE = do_PUT = _handle

            def log_message(self, *_: object) -> None:
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        if tls is not None:
            self._http.socket = tls.wrap_socket(self._http.socket, server_side=True)
        self.url = f"{'http' if tls is None else 'https'}://localhost:{self._http.server_address[1]}"

    def __enter__(self) -> Self:
        threading.Thread(target=self._http.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._http.shutdown()
        self._http.server_close()
