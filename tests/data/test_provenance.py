"""Which documents can be kept exactly, decided in one place."""

from __future__ import annotations

from collections.abc import Callable
from types import MappingProxyType
from typing import Any

import pytest

from mac_rag.bank import MemoryBank
from mac_rag.data.provenance import Member
from mac_rag.data.types import Document
from mac_rag.engine import MACEngine
from mac_rag.errors import BankError, DocumentError, MACError
from mac_rag.model import MACModel
from mac_rag.retrieval import BM25Retriever
from mac_rag.retrieval.base import check_documents
from tests.bank.helpers import memory

RECURSIVE: dict[str, Any] = {}
RECURSIVE["itself"] = RECURSIVE
DEEP: dict[str, Any] = {}
for _ in range(100_000):
    DEEP = {"a": DEEP}

REFUSED = {
    "a half of a pair in the text": (Document("x", "ab\ud83dc"), "document 'x': the character at index 2 is U+D83D"),
    "NUL in the text": (Document("x", "ab\0"), "document 'x': the character at index 2 is NUL"),
    "no text": (Document("x", b"ab"), "document 'x': expected a text, got bytes"),  # type: ignore[arg-type]
    "a half of a pair in the id": (
        Document("x\udc80", "a"),
        r"id 'x\udc80' of a document: the character at index 1 is",
    ),
    "NUL in the id": (Document("\0", "a"), r"id '\x00' of a document: the character at index 0 is NUL"),
    "an empty id": (Document("", "a"), "id '' of a document: it has no visible character"),
    "an id of controls": (Document("\x1b\u200b ", "a"), "it has no visible character"),
    "no id": (Document(7, "a"), "a document's id is 7; give a text"),  # type: ignore[arg-type]
    "a half of a pair in metadata": (
        Document("x", "a", {"b": [{"c": "d\ud800"}]}),
        "metadata of document 'x' cannot be kept as JSON: in metadata['b'][0]['c'], the character at index 1 is U+D800",
    ),
    "NUL in a key": (
        Document("x", "a", {"b\0": 1}),
        r"in the key 'b\x00' of metadata, the character at index 1 is NUL",
    ),
    "a key that is no text": (Document("x", "a", {"b": {1: 2}}), "the keys of metadata['b'] must be texts, got 1"),
    "an endless number": (Document("x", "a", {"n": -(10**640)}), "metadata['n'] is a number of more than 640 digits"),
    "a number that Python does not print": (Document("x", "a", {"n": 10**5000}), "metadata of document 'x'"),
    "no number": (Document("x", "a", {"n": float("nan")}), "metadata of document 'x' cannot be kept as JSON"),
    "what contains itself": (Document("x", "a", RECURSIVE), "metadata of document 'x' cannot be kept as JSON"),
    "what is nested without end": (Document("x", "a", DEEP), "metadata of document 'x' cannot be kept as JSON"),
    "no JSON": (Document("x", "a", {"n": {1, 2}}), "metadata of document 'x' cannot be kept as JSON"),
}


def _by_bank(documents: list[Document]) -> None:
    MemoryBank("f00d").put(documents, memory(len(documents), 1))


def _by_retriever(documents: list[Document]) -> None:
    BM25Retriever().add(documents)


@pytest.mark.parametrize("by", [_by_bank, _by_retriever, check_documents])
@pytest.mark.parametrize("kind", REFUSED)
def test_the_same_documents_are_refused_in_the_same_words(kind: str, by: Callable[[list[Document]], None]) -> None:
    document, message = REFUSED[kind]
    with pytest.raises((BankError, DocumentError)) as here:
        Member.of(document)
    assert message in str(here.value)
    with pytest.raises((BankError, DocumentError)) as there:
        by([Document("before", "a"), document])
    assert str(there.value) == str(here.value)


@pytest.mark.parametrize(
    "document",
    [
        Document("\x1b[2J\n\x85", "\x1b\x7f\x9b \u202e text"),
        Document(" id ", "e\u0301 👩‍👩‍👧 \uffff\U0010ffff", {"\n": [1e308, -0.0, True, None, {"": 10**640 - 1}]}),
        Document("x" * 1_000_000, "y" * 1_000_000, {"z": "z" * 1_000_000}),
        Document("m", "a", MappingProxyType({"b": (1, 2)})),
    ],
)
def test_others_are_kept_exactly(document: Document) -> None:
    member = Member.of(document)
    assert member.document_id == document.id
    assert repr(member.metadata).replace("[1, 2]", "(1, 2)") == repr(dict(document.metadata))
    retriever = BM25Retriever()
    retriever.add([document])
    assert retriever.documents([document.id]) == [document]


def test_a_pair_of_halves_is_not_mistaken_for_its_character(tiny_model: MACModel) -> None:
    engine = MACEngine(tiny_model)
    engine.adapt([Document("x", "smile \U0001f600")])
    with pytest.raises(MACError, match=r"index 6 is U\+D83D"):
        engine.adapt([Document("x", "smile \ud83d\ude00")])
