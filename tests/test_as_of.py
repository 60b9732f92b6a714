"""Questions as of a date: what is later, or superseded by then, has exactly no influence."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from mac_rag.bank import MemoryBank
from mac_rag.config import AttentionConfig
from mac_rag.data.newswire.generate import generate
from mac_rag.data.types import Document
from mac_rag.engine import MACEngine
from mac_rag.errors import BankError, DataError
from mac_rag.model import MACModel
from mac_rag.retrieval import Retriever
from mac_rag.retrieval.bm25 import BM25Retriever
from mac_rag.retrieval.chroma import ChromaRetriever
from tests.retrieval.helpers import RETRIEVERS, WordEncoder

STREAM = generate("val", 12)
QUESTIONS = [question.question for question in STREAM.questions[:4]]
STRATEGIES = {
    "streaming": AttentionConfig(),
    "preselect": AttentionConfig(strategy="preselect", preselected=3),
    "hierarchical": AttentionConfig(strategy="hierarchical", subgroup=2),
}
# The stream, a document a year from 2001 on.
DATED = [Document(document.id, document.text, {"date": 2001 + year}) for year, document in enumerate(STREAM.documents)]


def engine(model: MACModel, attention: str = "streaming", retriever: Retriever | None = None) -> MACEngine:
    return MACEngine(model, retriever=retriever or BM25Retriever(), k=3, attention=STRATEGIES[attention])


def assert_answers_alike(found: MACEngine, wanted: MACEngine, as_of: object, *, mass: bool = True) -> None:
    for ours, theirs in zip(found.answer(QUESTIONS, as_of=as_of), wanted.answer(QUESTIONS), strict=True):  # type: ignore[arg-type]
        assert (ours.text, ours.contexts, ours.document_ids) == (theirs.text, theirs.contexts, theirs.document_ids)
    phi = found.aggregate(QUESTIONS, as_of=as_of)  # type: ignore[arg-type]
    torch.testing.assert_close(phi, wanted.aggregate(QUESTIONS), atol=1e-5, rtol=1e-4)
    if mass:
        (names, masses), (names_alone, alone) = (
            found.document_attention(QUESTIONS, as_of=as_of),  # type: ignore[arg-type]
            wanted.document_attention(QUESTIONS),
        )
        assert names == names_alone
        torch.testing.assert_close(masses, alone, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("attention", STRATEGIES)
def test_answers_are_those_of_an_engine_without_later_documents(loaded_tiny_model: MACModel, attention: str) -> None:
    found, wanted = engine(loaded_tiny_model, attention), engine(loaded_tiny_model, attention)
    found.adapt([*DATED[6:], *DATED[:6]])
    wanted.adapt(DATED[:6])
    assert_answers_alike(found, wanted, "2006-12-31T23:59", mass=attention != "hierarchical")
    pieces = "".join(found.stream(QUESTIONS[0], as_of="2006"))
    assert pieces == wanted.answer(QUESTIONS[:1])[0].text


@pytest.mark.parametrize("attention", STRATEGIES)
def test_what_later_documents_say_changes_no_bit(loaded_tiny_model: MACModel, attention: str) -> None:
    found, other = engine(loaded_tiny_model, attention), engine(loaded_tiny_model, attention)
    for one in (found, other):  # amortized apart from the others, with whom they would share batches
        one.adapt(DATED[:6])
    found.adapt(DATED[6:])
    other.adapt([Document(one.id, DATED[0].text, one.metadata) for one in DATED[6:]])
    assert not torch.equal(found.aggregate(QUESTIONS), other.aggregate(QUESTIONS))
    assert torch.equal(found.aggregate(QUESTIONS, as_of=2006), other.aggregate(QUESTIONS, as_of=2006))
    assert found.answer(QUESTIONS, as_of=2006) == other.answer(QUESTIONS, as_of=2006)


@pytest.mark.parametrize("name", [*RETRIEVERS, "chroma"])
def test_retrieval_knows_no_later_document(loaded_tiny_model: MACModel, name: str, tmp_path: Path) -> None:
    made = [
        ChromaRetriever(tmp_path / side, WordEncoder()) if name == "chroma" else RETRIEVERS[name]() for side in "ab"
    ]
    found, wanted = (engine(loaded_tiny_model, retriever=retriever) for retriever in made)
    found.adapt(DATED)
    wanted.adapt(DATED[:6])
    options = {"use_memory": False, "max_new_tokens": 1}
    ours = found.answer(QUESTIONS, as_of=2006, **options)  # type: ignore[arg-type]
    assert ours == wanted.answer(QUESTIONS, **options)  # type: ignore[arg-type]
    hits, alone = (
        one.retriever.retrieve(QUESTIONS, 20, allowed=None if one is wanted else found._known(None, _moment(2006)))
        for one in (found, wanted)
        if one.retriever is not None
    )
    assert hits == alone  # scores, too


def _moment(year: int) -> int:
    from mac_rag.data.dates import moment_of

    return moment_of(year)


def test_allowed_and_a_date_restrict_together(loaded_tiny_model: MACModel) -> None:
    found = engine(loaded_tiny_model)
    found.adapt(DATED)
    allowed = {document.id for document in DATED[3:9]}
    names, _ = found.document_attention(QUESTIONS, allowed, as_of="2005-06")
    assert names == [document.id for document in DATED[3:5]]
    with pytest.raises(BankError, match="holds no documents of 2002-01-01 or before among those allowed"):
        found.answer(QUESTIONS, allowed=allowed, as_of="2002")
    with pytest.raises(DataError, match="can be read in several ways"):
        found.answer(QUESTIONS, as_of="03/04/2005")


def test_a_superseded_document_is_gone_until_the_other_is(loaded_tiny_model: MACModel) -> None:
    old, new = DATED[4], Document("new", DATED[8].text, {"date": "2010", "supersedes": DATED[4].id})
    found, without, before = (engine(loaded_tiny_model) for _ in range(3))
    found.adapt([*DATED[:6], new])
    without.adapt([one for one in [*DATED[:6], new] if one is not old])
    before.adapt(DATED[:6])
    assert_answers_alike(found, without, None)
    assert_answers_alike(found, without, "2010")
    assert_answers_alike(found, before, "2009-12-31")
    # A document that is not allowed supersedes none.
    names, _ = found.document_attention(QUESTIONS, {old.id})
    assert names == [old.id]
    found.forget("new")
    assert_answers_alike(found, before, None)


def test_a_circle_is_refused_before_anything_is_written(loaded_tiny_model: MACModel) -> None:
    found = engine(loaded_tiny_model)
    found.adapt([Document("a", "One.", {"supersedes": "b"}), Document("b", "Two.", {"supersedes": ["c", "later"]})])
    for circle, names in (
        ([Document("c", "Three.", {"supersedes": "a"})], "'c' -> 'a' -> 'b' -> 'c'"),
        ([Document("d", "Four.", {"supersedes": "d"})], "'d' -> 'd'"),
        ([Document("e", "5.", {"supersedes": "f"}), Document("f", "6.", {"supersedes": "e"})], "'e' -> 'f' -> 'e'"),
    ):
        with pytest.raises(BankError, match=f"in a circle: {names}"):
            found.adapt(circle)
    assert found.bank.document_ids == ["a", "b"]
    found.adapt([Document("a", "One.", {}), Document("c", "Three.", {"supersedes": "a"})])  # a lets go of b
    assert found.document_attention(QUESTIONS)[0] == ["b"]


@pytest.mark.parametrize("on_disk", [False, True])
def test_a_new_date_costs_no_amortization(
    tiny_model: MACModel, tmp_path: Path, on_disk: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    bank = MemoryBank.create(tmp_path / "bank", tiny_model.fingerprint) if on_disk else None
    found = MACEngine(tiny_model, bank, BM25Retriever())
    found.adapt(DATED)
    phi = {document.id: found.bank[document.id].phi for document in DATED}
    amortized: list[int] = []
    amortize = tiny_model.amortize_rows

    def counted(rows: list[list[int]], advance: Callable[[int], object] | None) -> torch.Tensor:
        amortized.append(len(rows))
        return amortize(rows, advance=advance)

    monkeypatch.setattr(tiny_model, "amortize_rows", counted)
    later = [Document(one.id, one.text, {"date": "2020"}) for one in DATED[:5]]
    report = found.adapt([*later, *DATED[5:], Document("more", DATED[0].text)])
    assert (report.added, report.updated, report.unchanged, report.rows) == (1, 5, 7, 1)
    assert amortized == [1]
    assert all(torch.equal(found.bank[name].phi, tokens) for name, tokens in phi.items())
    assert found.document_attention(QUESTIONS, as_of="2019")[0] == [one.id for one in DATED[5:]]
    assert found.retriever.content_hashes() == {
        member.document_id: member.content_hash for entry in found.bank for member in entry.members
    }
    assert found.adapt(later).unchanged == 5
    assert amortized == [1]
