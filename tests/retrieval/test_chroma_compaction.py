"""Compaction of a folder of Chroma: no byte of a deleted document remains, and no other document is ever lost."""

from __future__ import annotations

import os
import sqlite3
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mac_rag.data.types import Document
from mac_rag.errors import BankError
from mac_rag.retrieval import chroma, chroma_compaction
from mac_rag.retrieval.chroma import ChromaRetriever
from tests.retrieval.helpers import WordEncoder, documents

WORD = "quizzaciously"


def filled(folder: Path, count: int) -> ChromaRetriever:
    retriever = ChromaRetriever(folder, WordEncoder())
    retriever.add(documents(*(f"plain words {index}" for index in range(count))))
    retriever.put([Document("secret", f"{WORD} {WORD} unique", {"note": "confidential"})])
    retriever.retrieve(["plain"], 1)
    return retriever


def traces(folder: Path, *words: bytes) -> list[str]:
    files = [file for file in folder.rglob("*") if file.is_file()]
    return [f"{word!r} in {file.name}" for file in files for word in words if word in file.read_bytes()]


def state(retriever: ChromaRetriever) -> dict[str, Document]:
    return {document.id: document for document in retriever.documents(list(retriever.content_hashes()))}


# More than 1,000 documents are in a graph on the disk; fewer are in the queue only.
@pytest.mark.parametrize("count", [3, 1100])
def test_no_byte_of_a_deleted_document_remains(tmp_path: Path, count: int) -> None:
    folder = tmp_path / "chroma"
    retriever = filled(folder, count)
    vector = np.asarray(retriever.encoder.documents([f"{WORD} {WORD} unique"]), np.float32).tobytes()
    retriever.put([Document("d1", "zymurgists were here")])
    retriever.put([Document("d1", "plain again")])  # of the former text, nothing remains either
    retriever.delete("secret")
    was, some = state(retriever), {"d0", "d1", "d2"}
    hits = retriever.retrieve(["plain words 2"], 3, allowed=some)
    words = (WORD.encode(), WORD[3:9].encode(), b"confidential", b"zymurgists", vector)
    assert len(traces(folder, *words)) >= len(words)
    retriever.compact()
    assert traces(folder, *words, b"secret") == []
    assert set(next(folder.rglob("length.bin")).read_bytes()) == {0}  # Chroma writes there what is in its memory
    assert state(retriever) == was
    assert retriever.retrieve(["plain words 2"], 3, allowed=some) == hits
    assert set(next(folder.rglob("length.bin")).read_bytes()) == {0}
    assert len(retriever.retrieve(["plain words 2"], 3)[0]) == 3
    retriever.put([Document("new", "fresh text")])
    retriever.close()
    again = ChromaRetriever(folder, WordEncoder())
    assert state(again).keys() == {*was, "new"}
    assert sum(path.is_dir() for path in folder.iterdir()) <= 1  # one graph
    again.compact(secure_delete=True)
    assert state(again).keys() == {*was, "new"}
    again.close()


def test_old_files_are_overwritten(tmp_path: Path) -> None:
    folder = tmp_path / "chroma"
    retriever = filled(folder, 1100)
    retriever.delete("secret")
    with (folder / "chroma.sqlite3").open("rb") as database, next(folder.rglob("data_level0.bin")).open("rb") as graph:
        retriever.compact(secure_delete=True)
        assert set(database.read()) == set(graph.read()) == {0}
    retriever.close()


@pytest.mark.parametrize("stop", ["copy", "rewrite", "replace", "delete"])
def test_an_interrupted_compaction_loses_nothing(tmp_path: Path, stop: str, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "chroma"
    retriever = filled(folder, 4)
    retriever.delete("secret")
    was = state(retriever)

    def fails(*_: Any, **__: Any) -> None:
        raise OSError(28, os.strerror(28))

    if stop == "copy":
        monkeypatch.setattr(chroma, "copy_documents", fails)
    elif stop == "rewrite":
        monkeypatch.setattr(chroma, "rewrite", fails)
    elif stop == "replace":
        monkeypatch.setattr(chroma_compaction, "replace_file", fails)
    else:
        monkeypatch.setattr(type(retriever._collection), "modify", fails)
    with pytest.raises((BankError, OSError)):
        retriever.compact()
    monkeypatch.undo()
    if stop in ("rewrite", "replace"):  # it can be used, and compacted again
        assert state(retriever) == was
        retriever.compact()
        assert traces(folder, WORD.encode()) == []
    retriever.close()
    again = ChromaRetriever(folder, WordEncoder())
    assert state(again) == was
    assert [collection.name for collection in again._client.list_collections()] == ["mac_rag"]
    again.compact()
    assert traces(folder, WORD.encode()) == []
    assert state(again) == was
    again.close()


def test_others_retrieve_and_write_meanwhile(tmp_path: Path) -> None:
    retriever = filled(tmp_path / "chroma", 50)
    found: list[int] = []
    errors: list[BaseException] = []
    done = threading.Event()

    def use(number: int) -> None:
        try:
            while not done.is_set():
                found.append(len(retriever.retrieve(["plain words 7"], 3, allowed={"d7", "d8", "d9"})[0]))
                retriever.put([Document(f"own {number}", f"text {len(found)}")])
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=use, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(3):
            retriever.compact()
    finally:
        done.set()
        for thread in threads:
            thread.join()
    assert errors == []
    assert set(found) == {3}
    assert {"own 0", "own 1", "d7"} <= state(retriever).keys()
    retriever.close()


def test_a_folder_that_is_open_twice_and_other_collections_are_left_alone(tmp_path: Path) -> None:
    retriever = filled(tmp_path / "chroma", 3)
    other = ChromaRetriever(tmp_path / "chroma", WordEncoder())
    with pytest.raises(BankError, match=r"is open twice in this process; close the other"):
        retriever.compact()
    other.close()
    foreign = chroma._local_client(str(tmp_path / "chroma"))
    with pytest.raises(BankError, match=r"is open twice in this process; close the other"):
        retriever.compact()
    assert len(retriever) == 4
    foreign.close()
    another = retriever._client.create_collection("another", configuration={"hnsw": {"space": "cosine"}})
    ids, vectors = [f"x{index}" for index in range(1100)], np.random.default_rng(0).normal(size=(1100, 3))
    another.add(ids=ids, documents=["kept"] * len(ids), embeddings=vectors)
    another.query(query_embeddings=vectors[:1], n_results=1)
    retriever.compact()
    found = retriever._client.get_collection("another").get(ids=["x3"], include=["documents", "embeddings"])
    assert found["documents"] == ["kept"]
    np.testing.assert_allclose(found["embeddings"], vectors[3:4], rtol=1e-5)  # by its length, which its graph holds
    retriever.close()


def test_a_database_that_cannot_be_read_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    retriever = filled(tmp_path / "chroma", 3)

    def damaged(*_: Any, **__: Any) -> None:
        raise sqlite3.DatabaseError("database disk image is malformed")

    monkeypatch.setattr(chroma, "rewrite", damaged)
    with pytest.raises(BankError, match=r"cannot be rewritten: database disk image is malformed; compact it again"):
        retriever.compact()
    assert len(retriever) == 4
    retriever.close()
