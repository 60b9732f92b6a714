"""The document prior of an LM's own keys and values with a sentence encoder: BM25 and cosines of all rows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from mac_rag import Document, MACEngine
from mac_rag.adapting import halves
from mac_rag.bank import MemoryBank
from mac_rag.bank.own_kv_reader import _SENTENCE_WEIGHT, OwnKVReader
from mac_rag.config import BoundConfig
from mac_rag.data.newswire.generate import generate
from mac_rag.errors import BankError, ConfigError, FingerprintError
from mac_rag.model import MACModel, OwnKVModel
from mac_rag.retrieval import BM25Retriever
from mac_rag.retrieval.encoders import minilm
from tests.helpers import Folder, own_kv
from tests.test_own_kv_engine import engine_of, reading, texts

STREAM = generate("train", 30)
DOCUMENTS = list(STREAM.documents)
QUESTIONS = [question.question for question in STREAM.questions[:4]]
SOUP = Document("soup", "Boil the carrots with some leek for twenty minutes.")
COOKING = "How are vegetables cooked?"  # shares no word with the soup


@pytest.fixture(scope="module")
def model(model_folder: Folder) -> OwnKVModel:
    made = own_kv(model_folder("llama"), sentence_encoder="minilm")
    config = made.config.model_copy(update={"memory_tokens": 10_000, "max_new_tokens": 8})
    return OwnKVModel(config, made.base_lm, None)


def found(engine: MACEngine, question: str, allowed: set[str] | None = None) -> dict[str, float]:
    """The documents that the prior finds, and their scores."""
    with reading(engine) as reader:
        assert isinstance(reader, OwnKVReader)
        [scores] = reader._probable([question], allowed)
        return scores


def test_evidence_is_the_best_score_and_the_odds_of_its_share(model: OwnKVModel) -> None:
    engine = engine_of(model, DOCUMENTS)
    allowed = {document.id for document in DOCUMENTS[:2]}
    with reading(engine) as reader:
        evidence = reader.prior_evidence(QUESTIONS)
        few = reader.prior_evidence(QUESTIONS, allowed)
        [alone] = reader.prior_evidence(QUESTIONS[:1], {DOCUMENTS[0].id}).tolist()
    assert evidence is not None
    assert few is not None
    for row, question in zip(evidence.tolist(), QUESTIONS, strict=True):
        scores = np.array(list(found(engine, question).values()))
        shares = np.exp(model.config.bias_scale * (scores - scores.max()))
        share = shares.max() / shares.sum()
        assert row == pytest.approx([scores.max(), np.log(share / (1 - share + 1e-3))], rel=1e-3)
    assert (few[:, 0] <= evidence[:, 0] + 1e-4).all()
    assert alone[1] == 0


def test_scores_are_those_of_bm25_and_of_the_encoder(model: OwnKVModel) -> None:
    """Against the plain way, in float64."""
    engine = engine_of(model, DOCUMENTS)
    retriever, encoder = BM25Retriever(), minilm()
    retriever.add(DOCUMENTS)
    parts = [half for document in DOCUMENTS for half in halves(document.text)]
    vectors = encoder.documents(parts).astype(np.float64).reshape(len(DOCUMENTS), 2, -1)
    names = [document.id for document in DOCUMENTS]
    for question in QUESTIONS:
        [words] = retriever.scores([question], names)
        cosines = (vectors @ encoder.questions([question])[0].astype(np.float64)).max(1)
        scores = found(engine, question)
        assert set(scores) == set(names)
        expected = np.array(words) + _SENTENCE_WEIGHT * cosines
        # The bank keeps vectors in bf16.
        assert np.allclose([scores[name] for name in names], expected, atol=_SENTENCE_WEIGHT * 2e-3)


def test_a_document_that_shares_no_word_with_the_question_is_found(model: OwnKVModel) -> None:
    engine = engine_of(model, [*DOCUMENTS, SOUP])
    [answer] = engine.answer([COOKING], sources=1)
    assert [source.document_id for source in answer.sources] == ["soup"]
    words = OwnKVModel(model.config.model_copy(update={"sentence_encoder": None}), model.base_lm, None)
    assert "soup" not in found(engine_of(words, [*DOCUMENTS, SOUP]), COOKING)


def test_of_a_long_document_the_nearest_part_has_the_highest_bias(model: OwnKVModel) -> None:
    small = OwnKVModel(model.config.model_copy(update={"max_document_tokens": 32}), model.base_lm, None)
    long = Document("long", " ".join([DOCUMENTS[0].text, SOUP.text, DOCUMENTS[1].text]))
    with reading(engine_of(small, [long])) as reader:
        scores = reader._candidates(COOKING, {"long": 0.0})
        best = max(scores, key=lambda row: row[1])[0]
        place = reader.bank.row_keys.tolist().index(best)
    assert "carrots" in small.chunks(long.text)[place]


@pytest.mark.parametrize("on_disk", [False, True])
def test_deleted_and_hidden_documents_have_no_influence(model: OwnKVModel, tmp_path: Path, on_disk: bool) -> None:
    bank = MemoryBank.create(tmp_path / "bank.mac", model.fingerprint) if on_disk else None
    engine = engine_of(model, [*DOCUMENTS[:9], SOUP, *DOCUMENTS[9:]], bank=bank)
    never = engine_of(model, DOCUMENTS)
    kept = {document.id for document in DOCUMENTS}
    for question in (COOKING, *QUESTIONS):
        assert found(engine, question, kept) == found(never, question)
    found(engine, COOKING)
    engine.forget("soup")
    assert found(engine, COOKING) == found(never, COOKING)
    assert texts(engine, QUESTIONS) == texts(never, QUESTIONS)
    with reading(engine) as reader:
        assert reader._sentences is not None
        assert len(reader._sentences._vectors) == len(DOCUMENTS)


def test_a_bank_is_opened_again_and_followed(model: OwnKVModel, tmp_path: Path) -> None:
    path = tmp_path / "bank.mac"
    with MemoryBank.create(path, model.fingerprint) as bank:
        writer = engine_of(model, DOCUMENTS, bank=bank)
        with MemoryBank.open(path) as other:
            reader = MACEngine(model, other)
            before = found(reader, COOKING)
            writer.adapt([SOUP])
            assert found(reader, COOKING) == before
            assert reader.refresh()
            assert max(found(reader, COOKING).items(), key=lambda one: one[1])[0] == "soup"
            assert found(reader, COOKING) == found(writer, COOKING)


def test_a_bounded_bank_keeps_the_vectors_of_what_it_keeps(model: OwnKVModel) -> None:
    engine = engine_of(model, DOCUMENTS, bound=BoundConfig(maximum=7, method="random-pruning"))
    kept = engine.bank.document_ids
    plain = engine_of(model, [document for document in DOCUMENTS if document.id in set(kept)])
    assert len(kept) == 7
    for question in QUESTIONS:
        assert found(engine, question) == pytest.approx(found(plain, question), abs=0.1)  # the bank's bf16


def test_codes_without_vectors_are_refused(model: OwnKVModel) -> None:
    engine = engine_of(model, DOCUMENTS[:2])
    assert isinstance(engine.bank, MemoryBank)
    with pytest.raises(BankError, match=r"summary of 768 numbers .* adapt"):
        engine.bank.put([SOUP], engine.bank[DOCUMENTS[0].id].memory)


def test_a_bank_belongs_to_its_encoder(model: OwnKVModel) -> None:
    words = OwnKVModel(model.config.model_copy(update={"sentence_encoder": None}), model.base_lm, None)
    with pytest.raises(FingerprintError):
        MACEngine(words, engine_of(model, DOCUMENTS[:2]).bank)


def test_an_unknown_encoder_is_refused_before_the_lm_is_loaded() -> None:
    with pytest.raises(ConfigError, match=r"unknown encoder 'bm25'; choose one of .*minilm"):
        MACModel.around("no such LM", compression=None, sentence_encoder="bm25")


def test_a_row_is_cut_in_two_between_sentences(model: OwnKVModel) -> None:
    assert halves("One is short. Two is a little longer. Three.") == [
        "One is short.",
        "Two is a little longer. Three.",
    ]
    assert halves("Just one sentence.") == ["Just one sentence."] * 2
    mixed = Document("mixed", f"The parliament of Orsena adopted a new budget on Tuesday. {SOUP.text}")
    with reading(engine_of(model, [mixed, *DOCUMENTS])) as reader:
        assert isinstance(reader, OwnKVReader)
        assert reader._sentences is not None
        [cosine] = reader._sentences.cosines(COOKING, [int(reader.bank.row_keys[0])])
    encoder = minilm()
    whole, half = encoder.documents([mixed.text, SOUP.text]) @ encoder.questions([COOKING])[0]
    assert cosine == pytest.approx(half, abs=0.01)
    assert cosine > whole + 0.02
