"""An engine whose model remembers by its LM's own keys and values: retrieval, deletes, tenants, dates, long texts."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mac_rag import Document, MACEngine
from mac_rag.bank import MemoryBank
from mac_rag.bank.bm25 import BankBM25Retriever
from mac_rag.bank.copies import backup, restore
from mac_rag.bank.own_kv_reader import OwnKVReader
from mac_rag.config import AttentionConfig, BoundConfig
from mac_rag.data.newswire.generate import generate
from mac_rag.errors import BankError, ConfigError, FingerprintError
from mac_rag.lm.base_lm import BaseLM
from mac_rag.model import MACModel, OwnKVModel, ReadRow, ReadRows
from mac_rag.model.calibration import EVIDENCE
from mac_rag.retrieval import BM25Retriever
from mac_rag.retrieval.base import Hit, Retriever
from pipelines.tasks.calibrate import fit, guesses
from tests.helpers import Folder, own_kv

STREAM = generate("train", 30)
DOCUMENTS = list(STREAM.documents)
QUESTIONS = [question.question for question in STREAM.questions[:6]]


@pytest.fixture(scope="module")
def model(model_folder: Folder) -> OwnKVModel:
    made = own_kv(model_folder("llama"))
    # Enough for every document whose bias does not leave it out.
    return OwnKVModel(
        made.config.model_copy(update={"memory_tokens": 10_000, "max_new_tokens": 12}), made.base_lm, None
    )


def engine_of(model: OwnKVModel, documents: list[Document] = DOCUMENTS, **options: Any) -> MACEngine:
    engine = MACEngine(model, **options)
    if documents:
        engine.adapt(documents)
    return engine


def texts(engine: MACEngine, questions: list[str] = QUESTIONS, **options: Any) -> list[str]:
    return [answer.text for answer in engine.answer(questions, **options)]


def reader(engine: MACEngine) -> OwnKVReader:
    assert isinstance(engine._reader, OwnKVReader)
    return engine._reader


@contextmanager
def reading(engine: MACEngine) -> Iterator[OwnKVReader]:
    """The reader as it is during a question."""
    with engine._queue.turn(), engine._question():
        yield reader(engine)


def test_confidence_is_fitted_stored_and_told(model: OwnKVModel, tmp_path: Path) -> None:
    prompt = replace(model.config.prompt, abstention="I don't know")
    lm = BaseLM(model.base_lm.model, model.base_lm.tokenizer, prompt)
    knowing = OwnKVModel(model.config.model_copy(update={"prompt": prompt}), lm, None)
    engine = MACEngine(knowing, retriever=BM25Retriever(), k=2)
    found, evidence, mode = guesses(engine, STREAM, 20, seed=0, batch_size=4)
    assert mode == "documents"
    odds = evidence[:, EVIDENCE.index("answering_odds")]
    assert len(set(odds.tolist())) > 10
    found = [
        replace(guess, right=place % 3 == 0) for place, guess in enumerate(found)
    ]  # random weights are never right
    knowing.calibration = fit(engine, found, evidence, mode, "newswire")
    knowing.save_pretrained(tmp_path / "made")
    again = MACEngine(MACModel.from_pretrained(tmp_path / "made", device="cpu"), retriever=BM25Retriever(), k=2)
    again.adapt(DOCUMENTS)
    first, second = (each.answer(QUESTIONS, min_confidence=0) for each in (engine, again))
    assert [answer.confidence for answer in first] == pytest.approx([answer.confidence for answer in second], abs=1e-4)
    with pytest.raises(ConfigError, match="from memory alone"):
        again.answer(QUESTIONS, use_retriever=False, min_confidence=0)


def test_memory_alone_is_all_documents_with_the_scores_of_bm25(model: OwnKVModel) -> None:
    """Against the plain way: each document that shares a word with the question as a row, with its own score."""
    engine = engine_of(model)
    retriever = BM25Retriever()
    retriever.add(DOCUMENTS)
    for question in QUESTIONS[:3]:
        [scores] = retriever.scores([question], [document.id for document in DOCUMENTS])
        bias = [model.config.bias_scale * (score - max(scores)) for score in scores]
        codes = model.amortize_rows([model.plan(document.text)[0] for document in DOCUMENTS])
        # A document that shares no word with the question has no part in its answer.
        found = [place for place, score in enumerate(scores) if score > 0]
        rows = ReadRows([[ReadRow(model.decode(codes[place]), bias[place]) for place in found]])
        expected = model.generate([model.fit_to_window(question)], modulation=rows)
        assert texts(engine, [question]) == expected
    assert len(set(texts(engine))) > 1


def test_a_retrieved_document_of_the_bank_is_not_in_the_prompt(
    model: OwnKVModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of(model, DOCUMENTS[:5])
    prompts: list[str] = []
    begin = model.base_lm.begin

    def spy(batch: Any, ids: Any, *arguments: Any, **named: Any) -> Any:
        prompts.extend(model.base_lm.tokenizer.decode(row) for row in ids)
        return begin(batch, ids, *arguments, **named)

    monkeypatch.setattr(model.base_lm, "begin", spy)
    held, other = DOCUMENTS[0].text, DOCUMENTS[7].text
    [answer] = engine.answer([QUESTIONS[0]], contexts=[[held, other]])
    assert held.strip() not in prompts[-1]
    assert other.strip() in prompts[-1]
    assert answer.contexts == (other.strip(),)
    engine.answer([QUESTIONS[0]], contexts=[[held, other]], use_memory=False)
    assert held.strip() in prompts[-1]


def test_retrieved_documents_count_at_least_by_their_rank(model: OwnKVModel) -> None:
    """Against the plain way: the prior of each document, or less than the best one's by the rank, what is more."""
    far, near = DOCUMENTS[20], DOCUMENTS[0]
    engine = engine_of(model, retriever=Fixed([far, near]))
    question = next(question.question for question in STREAM.questions if question.document_id == near.id)
    with reading(engine) as own:
        [scores] = own._probable([question], None)
        read, others = own.apart([Hit(one.id, one.text, 1e-9) for one in (far, near)])
        assert (read, others) == ([far.id, near.id], [])
        found = own._biases(scores, read)
    scale = model.config.bias_scale
    best = scale * max(scores.values())
    expected = {name: scale * score for name, score in scores.items()}
    assert expected.get(far.id, -99.0) < best - 2 < expected[near.id]
    assert found == pytest.approx(expected | {far.id: best - 2})
    assert found == pytest.approx(own._biases(scores, [far.id]))
    [answer] = engine.answer([question], k=2, sources=30)
    shares = {source.document_id: source.share for source in answer.sources}
    assert shares[far.id] == pytest.approx(shares[near.id] * math.exp(-2), rel=1e-4)
    assert len(shares) > 2
    assert answer.document_ids == (far.id, near.id)
    assert answer.contexts == ()


def test_no_retrieved_document_is_left_out_for_want_of_room(model: OwnKVModel) -> None:
    small = OwnKVModel(model.config.model_copy(update={"memory_tokens": 8}), model.base_lm, None)
    names = [document.id for document in DOCUMENTS[10:14]]
    with reading(engine_of(small)) as own:
        phi = own.aggregate([QUESTIONS[0]], read=[names]).phi
        assert isinstance(phi, ReadRows)
        assert len(phi.rows[0]) == 5
        alone = own.aggregate([QUESTIONS[0]]).phi
        assert isinstance(alone, ReadRows)
        assert len(alone.rows[0]) == 1


def test_a_retrieved_document_of_another_version_is_text(model: OwnKVModel) -> None:
    engine = engine_of(model)
    other = [
        Hit(DOCUMENTS[0].id, "Another text.", 1.0),
        Hit("nobody", DOCUMENTS[1].text, 0.5),
        Hit("", "Unknown.", 0.1),
    ]
    with reading(engine) as own:
        assert own.apart(other) == ([], other)
        read, rest = own.apart([Hit("", f" {DOCUMENTS[1].text}", 0.0)])
    assert read == [DOCUMENTS[1].id]
    assert not rest


class Fixed(Retriever):
    """Finds the same documents for every question."""

    def __init__(self, documents: list[Document]) -> None:
        self._documents = documents

    def add(self, documents: Any) -> None:
        pass

    def put(self, documents: Any) -> None:
        pass

    def delete(self, document_id: str) -> None:
        pass

    def retrieve(self, questions: Any, k: int, *, allowed: Any = None) -> list[list[Hit]]:
        return [[Hit(one.id, one.text, 0.01) for one in self._documents[:k]] for _ in questions]

    def __len__(self) -> int:
        return len(self._documents)

    def __contains__(self, document_id: object) -> bool:
        return any(document.id == document_id for document in self._documents)


def test_of_a_deleted_document_nothing_is_left(model: OwnKVModel, tmp_path: Path) -> None:
    bank = MemoryBank.create(tmp_path / "bank.mac", model.fingerprint)
    engine = engine_of(model, bank=bank)
    before = texts(engine)
    gone = engine.answer(QUESTIONS[:1], sources=1)[0].sources[0].document_id
    assert gone is not None
    [key] = bank.rows_of([gone])[gone]
    [codes] = bank.codes([key])
    assert key in reader(engine)._kept
    assert codes.numpy().tobytes()[-64:] in b"".join(file.read_bytes() for file in tmp_path.iterdir())
    engine.forget(gone)
    assert texts(engine) == texts(engine_of(model, [one for one in DOCUMENTS if one.id != gone])) != before
    assert key not in reader(engine)._kept
    kept = b"".join(file.read_bytes() for file in tmp_path.iterdir())
    assert codes.numpy().tobytes()[-64:] not in kept
    assert next(one.text for one in DOCUMENTS if one.id == gone).encode()[:40] not in kept
    with pytest.raises(BankError, match="holds no document"):
        bank.codes(bank.rows_of([gone])[gone]) if bank.rows_of([gone]) else bank[gone]


def test_documents_that_a_question_does_not_see_are_no_sources(model: OwnKVModel) -> None:
    engine = engine_of(model)
    assert engine.answer(["Xyzzy plugh?"], sources=5)[0].sources == ()
    [answer] = engine.answer(QUESTIONS[:1], sources=30)
    assert 0 < len(answer.sources) < len(DOCUMENTS)
    assert sum(source.share or 0 for source in answer.sources) == pytest.approx(1, abs=1e-5)
    held = {document.id: document.text for document in DOCUMENTS}
    assert all(source.text == held[source.document_id] for source in answer.sources)  # the index in the bank has them


def test_tenants_see_their_own_documents_alone(model: OwnKVModel) -> None:
    engine = engine_of(model)
    halves = [frozenset(one.id for one in DOCUMENTS[start::2]) for start in (0, 1)]
    for half in halves:
        alone = engine_of(model, [one for one in DOCUMENTS if one.id in half])
        # The scores of BM25 depend on all documents of the index, so the rows are the same and their biases differ.
        for answer in engine.answer(QUESTIONS, allowed=half, sources=50):
            assert {source.document_id for source in answer.sources} <= half
        assert [len(rows) for rows in seen(engine, half)] == [len(rows) for rows in seen(alone, None)]
    with pytest.raises(BankError, match="none of the documents"):
        engine.answer(QUESTIONS[:1], allowed=frozenset({"nobody"}))


def seen(engine: MACEngine, allowed: Any) -> list[Any]:
    with reading(engine) as own:
        phi = own.aggregate([QUESTIONS[0]], allowed).phi
    assert isinstance(phi, ReadRows)
    return list(phi.rows)


def test_what_was_last_known_in_a_year_that_a_question_names_counts_most(model: OwnKVModel) -> None:
    texts = [
        f"{year}: the keeper of the light of Orsena, {name}." for year, name in ((1997, "A"), (2001, "B"), (2004, "C"))
    ]
    engine = engine_of(
        model, [Document(text[:4], text) for text in [*texts, "0000: the light of Orsena, 2,002 lamps."]]
    )
    with reading(engine) as own:
        named, unnamed = own._probable(["Who kept the light of Orsena in 2003?", "Who kept the light of Orsena?"], None)
        with model.without_times():
            [without] = own._probable(["Who kept the light of Orsena in 2003?"], None)
    more = {name: score - unnamed[name] for name, score in named.items()}
    assert more == pytest.approx(
        {"1997": 12 * math.exp(-6 / 2.7), "2001": 12 * math.exp(-2 / 2.7), "2004": 0, "0000": 0}
    )
    assert without == unnamed


def test_of_a_long_document_the_part_that_names_the_year_comes_first(model: OwnKVModel) -> None:
    small = OwnKVModel(model.config.model_copy(update={"max_document_tokens": 80}), model.base_lm, None)
    sentences = [
        f"In {year} the keeper of the light of Orsena was {document.text}"
        for year, document in enumerate(DOCUMENTS, 1970)
    ]
    engine = engine_of(small, [Document("long", " ".join(sentences))])
    assert isinstance(engine.bank, MemoryBank)
    rows, chunks = engine.bank.rows_of(["long"])["long"], small.chunks(" ".join(sentences))
    [best, *_] = chosen_keys(engine, "Who kept the light of Orsena in 1985?")
    assert "In 1985" in chunks[rows.index(best)]


def test_later_documents_have_no_influence(model: OwnKVModel) -> None:
    early, late = (
        Document(name, text, {"date": date})
        for name, text, date in (
            ("early", "The port of Riga was closed by a storm.", "2004-01-01"),
            ("late", "The port of Riga was opened again.", "2006-01-01"),
        )
    )
    engine = engine_of(model, [early, late])
    [answer] = engine.answer(["What happened to the port of Riga?"], as_of="2005-01-01", sources=5)
    assert [source.document_id for source in answer.sources] == ["early"]


def test_of_a_long_document_the_parts_that_fit_the_question_come_first(model: OwnKVModel) -> None:
    sentences = [document.text for document in DOCUMENTS]
    sentences[20] += " The parrots of Zanzibar speak Swahili."
    small = OwnKVModel(model.config.model_copy(update={"max_document_tokens": 80}), model.base_lm, None)
    long = " ".join(sentences)
    engine = engine_of(small, [Document("long", long), Document("other", "A parrot flew over the bridge.")])
    assert isinstance(engine.bank, MemoryBank)
    rows, chunks = engine.bank.rows_of(["long"])["long"], small.chunks(long)
    assert len(rows) == len(chunks) > 10
    [best, *_] = chosen_keys(engine, "What do the parrots of Zanzibar speak?")
    assert "parrots of Zanzibar" in chunks[rows.index(best)]


def chosen_keys(engine: MACEngine, question: str) -> list[int]:
    with reading(engine) as own:
        [biases] = map(own._biases, own._probable([question], None), [()])
        return [key for key, _ in own.model.chosen(own._candidates(question, biases))]


def test_an_index_and_a_bank_change_together(model: OwnKVModel, tmp_path: Path) -> None:
    bank = MemoryBank.create(tmp_path / "bank.mac", model.fingerprint)
    engine = engine_of(model, DOCUMENTS[:10], bank=bank)
    engine.adapt([Document(DOCUMENTS[0].id, "The mayor of Orsena keeps seven parrots.")])
    [answer] = engine.answer(["Who keeps parrots in Orsena?"], sources=1)
    assert answer.sources[0].document_id == DOCUMENTS[0].id
    bank.close()
    with MemoryBank.open(tmp_path / "bank.mac") as again:
        assert len(BankBM25Retriever(again)) == 10
        assert texts(MACEngine(model, again)) == texts(engine_of(model, [
            Document(DOCUMENTS[0].id, "The mayor of Orsena keeps seven parrots."), *DOCUMENTS[1:10]
        ]))  # fmt: skip


def test_a_bank_within_its_bound(model: OwnKVModel) -> None:
    engine = engine_of(model, bound=BoundConfig(maximum=4, method="random-pruning"))
    assert len(engine.bank) == 4
    assert all(source.document_id in engine.bank for answer in engine.answer(QUESTIONS, sources=9)
               for source in answer.sources)  # fmt: skip
    with pytest.raises((ConfigError, BankError), match=r"cannot be averaged, .*; use random-pruning"):
        engine_of(model, bound=BoundConfig(maximum=4))


def test_decoded_rows_are_kept_within_their_bytes(model: OwnKVModel) -> None:
    unbounded = engine_of(model)
    expected = texts(unbounded)
    assert len(reader(unbounded)._kept) > 5
    bounded = engine_of(model, attention=AttentionConfig(cache_bytes=200_000))
    assert texts(bounded) == expected
    assert 0 < sum(part.nbytes for part in reader(bounded)._kept.values()) <= 200_000
    nothing = engine_of(model, attention=AttentionConfig(cache_bytes=0))
    assert texts(nothing) == expected
    assert not reader(nothing)._kept


@pytest.mark.parametrize(
    ("ask", "match"),
    [
        (lambda engine: engine.answer(QUESTIONS, memory_weight=0.5), "memory_weight is 0.5"),
        (lambda engine: engine.answer(QUESTIONS, min_confidence=0.5), "has no calibration"),
    ],
)
def test_what_it_cannot_do_is_refused(model: OwnKVModel, ask: Callable[[MACEngine], Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        ask(engine_of(model, DOCUMENTS[:3]))


def test_other_models_and_strategies_are_refused(model: OwnKVModel, tiny_model: MACModel) -> None:
    bank = engine_of(model, DOCUMENTS[:2]).bank
    with pytest.raises(FingerprintError):
        MACEngine(tiny_model, bank)
    with pytest.raises(ConfigError, match="strategy 'preselect' is one of aggregation networks"):
        MACEngine(model, attention=AttentionConfig(strategy="preselect"))


def test_a_bank_that_went_back_is_read_anew(model: OwnKVModel, tmp_path: Path) -> None:
    """A key of a row means another row once a backup is in the place of the bank."""
    place = tmp_path / "bank.mac"
    with MemoryBank.create(place, model.fingerprint) as bank:
        engine = engine_of(model, DOCUMENTS[:3], bank=bank)
        backup(place, tmp_path / "backup.mac")
        engine.adapt(DOCUMENTS[3:6])
    follower = MACEngine(model, MemoryBank.open(place))
    texts(follower)
    with MemoryBank.open(tmp_path / "backup.mac", write=True) as restored:
        MACEngine(model, restored).adapt(DOCUMENTS[10:13])
    restore(tmp_path / "backup.mac", place, replace=True)
    assert follower.refresh()
    assert texts(follower) == texts(engine_of(model, [*DOCUMENTS[:3], *DOCUMENTS[10:13]]))
    assert follower.recent_questions == (0, 0)
    assert follower.answer(QUESTIONS[:1], contexts=[["  "]])[0].contexts == ()


def test_streams_batches_and_an_empty_bank(model: OwnKVModel) -> None:
    engine = engine_of(model)
    one_by_one = [texts(engine, [question])[0] for question in QUESTIONS]
    assert texts(engine) == one_by_one
    assert ["".join(engine.stream(question)) for question in QUESTIONS] == one_by_one
    with pytest.raises(BankError, match="the memory bank is empty"):
        engine_of(model, []).answer(QUESTIONS[:1])
