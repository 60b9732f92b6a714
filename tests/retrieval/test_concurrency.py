"""No question waits while documents are encoded, and none sees a document replaced by nothing."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from chromadb.errors import InternalError

from mac_rag.data.types import Document
from mac_rag.errors import BankError
from mac_rag.retrieval import BM25Retriever, DenseRetriever, HybridRetriever, Retriever
from mac_rag.retrieval.bm25 import Tokenizer
from mac_rag.retrieval.chroma import ChromaRetriever
from tests.retrieval.helpers import WordEncoder

OLD = [Document("a", "a storm has hit the town"), Document("b", "the bridge is closed")]
NEW = Document("a", "a storm has left the town")


class Gate:
    """Stops the thread that indexes documents until it is let through."""

    def __init__(self) -> None:
        self.is_shut = False
        self.reached, self.opened = threading.Event(), threading.Event()

    def __call__(self) -> None:
        if self.is_shut:
            self.reached.set()
            assert self.opened.wait(60)


class SlowEncoder(WordEncoder):
    def __init__(self, gate: Gate) -> None:
        super().__init__()
        self._gate = gate

    def documents(self, texts: Sequence[str], advance: Any = None) -> Any:
        self._gate()
        return super().documents(texts, advance)


class SlowTokenizer(Tokenizer):
    def __init__(self, gate: Gate) -> None:
        super().__init__()
        self._gate = gate

    def __call__(self, text: str) -> list[str]:
        if text == NEW.text:
            self._gate()
        return super().__call__(text)


MAKE: dict[str, Callable[[Gate, Path], Retriever]] = {
    "bm25": lambda gate, folder: BM25Retriever(tokenizer=SlowTokenizer(gate)),
    "dense": lambda gate, folder: DenseRetriever(SlowEncoder(gate)),
    "chroma": lambda gate, folder: ChromaRetriever(folder, SlowEncoder(gate)),
    "hybrid": lambda gate, folder: HybridRetriever([BM25Retriever(), DenseRetriever(SlowEncoder(gate))]),
}


@pytest.mark.parametrize("kind", MAKE)
def test_questions_do_not_wait_while_documents_are_indexed(kind: str, tmp_path: Path) -> None:
    gate = Gate()
    retriever = MAKE[kind](gate, tmp_path)
    retriever.add(OLD)
    with ThreadPoolExecutor(1) as pool:
        gate.is_shut = True
        putting = pool.submit(retriever.put, [NEW])
        assert gate.reached.wait(60)
        [hits] = retriever.retrieve(["storm in the town"], 2)
        assert hits[0].document_id == "a"
        if kind != "hybrid":  # whose parts change one after the other
            assert hits[0].text == OLD[0].text
        assert retriever.content_hashes(["b"])
        gate.opened.set()
        putting.result()
    assert retriever.retrieve(["storm in the town"], 1)[0][0].text == NEW.text


@pytest.mark.parametrize("kind", MAKE)
def test_questions_and_changes_of_many_threads(kind: str, tmp_path: Path) -> None:
    retriever = MAKE[kind](Gate(), tmp_path)
    retriever.add(OLD)
    stop = threading.Event()

    def ask(allowed: set[str] | None) -> int:
        asked = 0
        while not stop.is_set():
            [hits] = retriever.retrieve(["the bridge of the town"], 5, allowed=allowed)
            texts = {hit.document_id: hit.text for hit in hits}
            assert texts["b"] == OLD[1].text
            assert texts.get("a") in (OLD[0].text, NEW.text, None if kind == "hybrid" else "")
            asked += 1
        return asked

    with ThreadPoolExecutor(3) as pool:
        asking = [pool.submit(ask, allowed) for allowed in (None, {"a", "b"}, {"a", "b", "c"})]
        try:
            for round in range(20):
                retriever.put([NEW if round % 2 else OLD[0], Document("c", f"round {round}")])
                retriever.delete("c")
        finally:
            stop.set()
        assert all(future.result() for future in asking)


def test_chroma_is_asked_again_when_a_change_confuses_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It looks ids up first and their records afterwards; a deletion in between is an error inside of it."""
    retriever = ChromaRetriever(tmp_path, WordEncoder())
    retriever.add(OLD)
    confused = iter(range(100))
    times = 2

    def confusing(name: str) -> Callable[..., Any]:
        request = getattr(retriever._collection, name)

        def asked(**options: Any) -> Any:
            if next(confused) < times:
                raise InternalError("Error executing plan: Internal error: Error finding id")
            return request(**options)

        return asked

    for name in ("get", "query"):
        monkeypatch.setattr(retriever._collection, name, confusing(name))
    for allowed in (None, {"a"}):
        confused = iter(range(100))
        [[hit]] = retriever.retrieve(["a storm"], 1, allowed=allowed)
        assert hit.document_id == "a"
        assert next(confused) == times + (1 if allowed is None else 2)  # ids, and then their records
    confused, times = iter(range(100)), 100
    with pytest.raises(BankError, match="Error finding id"):
        retriever.retrieve(["a storm"], 1, allowed={"a"})
    assert 1 < next(confused) < 10
