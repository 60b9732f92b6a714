"""The engine: adapting, forgetting and answering through model, bank and retriever together."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mac_rag.bank import MemoryBank
from mac_rag.batching_queue import OWNER
from mac_rag.config import AttentionConfig
from mac_rag.data.newswire.generate import generate
from mac_rag.data.types import Answer, Document
from mac_rag.engine import MACEngine
from mac_rag.errors import BankError, ConfigError, DocumentError, FingerprintError
from mac_rag.lm.decoding import Sampling
from mac_rag.model import MACModel
from mac_rag.retrieval.bm25 import BM25Retriever
from tests.helpers import mac_config, wait_until

STREAM = generate("val", 12)
QUESTIONS = [question.question for question in STREAM.questions[:6]]


@pytest.fixture
def engine(tiny_model: MACModel) -> MACEngine:
    return MACEngine(tiny_model, retriever=BM25Retriever(), k=2)


def test_adapting_is_amortizing(engine: MACEngine) -> None:
    report = engine.adapt(STREAM.documents)
    assert (report.added, report.updated, report.unchanged, report.rows) == (12, 0, 0, 12)
    phi = engine.model.amortize([document.text for document in STREAM.documents])
    torch.testing.assert_close(engine.bank.phi, phi, rtol=2**-7, atol=1e-5)  # it is kept in bf16
    assert engine.bank.document_ids == [document.id for document in STREAM.documents]
    assert engine.bank[STREAM.documents[3].id].metadata == STREAM.documents[3].metadata


def test_only_a_changed_document_is_encoded_again(engine: MACEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine.adapt(STREAM.documents)
    encoded: list[str] = []
    amortize, decode = engine.model.amortize_rows, engine.model.amortization.tokenizer.decode

    def counting(rows: list[list[int]], **options: Any) -> torch.Tensor:
        encoded.extend(decode(row, skip_special_tokens=True) for row in rows)
        return amortize(rows, **options)

    monkeypatch.setattr(engine.model, "amortize_rows", counting)
    first = STREAM.documents[0]
    report = engine.adapt([Document(first.id, "Something else happened."), *STREAM.documents[1:]])
    assert (report.added, report.updated, report.unchanged) == (0, 1, 11)
    assert encoded == ["Something else happened."]
    assert len(engine.bank) == 12
    assert [hit.document_id for hit in engine.retriever.retrieve(["Something else"], 1)[0]] == [first.id]


def test_bad_documents_are_left_out_and_all_others_adapted(engine: MACEngine) -> None:
    long = Document("long", " ".join(document.text for document in generate("val", 40).documents))
    twice, blank, half = Document("twice", "One text."), Document("blank", " "), Document("half", "\ud83d")
    documents = [twice, long, blank, STREAM.documents[0], twice, Document("twice", "Other."), half, STREAM.documents[1]]
    bad: list[tuple[Document, str]] = []
    report = engine.adapt(documents, on_long="error", on_bad=lambda document, error: bad.append((document, str(error))))
    good = ["twice", STREAM.documents[0].id, STREAM.documents[1].id]
    assert engine.bank.document_ids == good
    assert (report.added, report.unchanged) == (3, 0)
    assert [document for document, _ in bad] == [long, blank, twice, documents[5], half]
    for (_, message), part in zip(bad, ("longer than the limit", "empty", "occurs twice", "occurs twice", "surrogate")):
        assert part in message
    again = engine.adapt(documents, on_long="error", on_bad=lambda document, error: None)
    assert (again.added, again.unchanged) == (0, 3)


def test_a_long_document_is_chunked_whole_or_refused(engine: MACEngine) -> None:
    long = Document("long", " ".join(document.text for document in generate("val", 40).documents))
    with pytest.raises(DocumentError, match=r"'long'.*longer than the limit"):
        engine.adapt([STREAM.documents[0], long], on_long="error")
    assert len(engine.bank) == 0
    report = engine.adapt([STREAM.documents[0], long])
    assert report.added == 2
    assert report.rows > 2
    chunks = engine.model.amortization.split(long.text)
    assert " ".join(chunks) == long.text
    assert report.rows == 1 + len(chunks)
    ids, mass = engine.document_attention(QUESTIONS[:3])
    assert ids == [STREAM.documents[0].id, "long"]
    torch.testing.assert_close(mass.sum(1), torch.ones(3))


@pytest.mark.parametrize("text", ["", "  \n", None, 3, b"bytes"])
def test_bad_documents_lose_nothing(engine: MACEngine, text: object) -> None:
    engine.adapt(STREAM.documents[:2])
    with pytest.raises(DocumentError, match="document 'bad'"):
        engine.adapt([STREAM.documents[2], Document("bad", text)])  # type: ignore[arg-type]
    assert len(engine.bank) == 2
    assert len(engine.retriever) == 2


def test_an_endless_word_is_read_in_chunks(engine: MACEngine) -> None:
    assert engine.adapt([Document("word", "Ab3/" * 10_000)]).rows > 10
    assert engine.bank.document_ids == ["word"]


def test_a_document_of_too_many_rows_is_refused_before_anything_is_written(engine: MACEngine) -> None:
    engine.model.amortization.max_tokens = 4  # one character of three bytes, and the token in front
    with pytest.raises(DocumentError, match=r"'endless': it has 65,536 rows.* split it"):
        engine.adapt([Document("before", "a"), Document("endless", "漢" * 65_536)])
    assert len(engine.bank) == 0


def test_splitting_has_a_progress_bar(engine: MACEngine, capsys: pytest.CaptureFixture[str]) -> None:
    engine.adapt([Document("long", "A storm has hit Wunville. " * 500)], progress=True)
    assert "split:" in capsys.readouterr().err
    engine.adapt([Document("other", "A storm has hit Wunville. " * 500)])
    assert "split:" not in capsys.readouterr().err


def test_forgetting_is_never_having_known(engine: MACEngine, tiny_model: MACModel) -> None:
    engine.adapt(STREAM.documents)
    forgotten = STREAM.documents[5].id
    engine.forget(forgotten)
    fresh = MACEngine(tiny_model, retriever=BM25Retriever(), k=2)
    fresh.adapt([document for document in STREAM.documents if document.id != forgotten])
    assert engine.answer(QUESTIONS) == fresh.answer(QUESTIONS)
    with pytest.raises(BankError, match=forgotten):
        engine.forget(forgotten)


def test_memory_and_documents_both_reach_the_lm(engine: MACEngine) -> None:
    engine.adapt(STREAM.documents)
    both = engine.answer(QUESTIONS)
    assert all(1 <= len(answer.contexts) == len(answer.document_ids) <= 2 for answer in both)
    alone = engine.answer(QUESTIONS, use_memory=False, use_retriever=False)
    given = engine.answer(QUESTIONS, contexts=[["A document."]] * len(QUESTIONS))
    assert all(answer.contexts == ("A document.",) and answer.document_ids == () for answer in given)
    texts = [[a.text for a in answers] for answers in (both, alone, given)]
    assert texts[0] != texts[1] != texts[2]


def test_streaming_is_answering(engine: MACEngine) -> None:
    engine.adapt(STREAM.documents)
    several: list[Any] = [{}, {"k": 1}, {"memory_weight": 0.3}, {"k": 12, "overflow": "truncate", "max_new_tokens": 4}]
    for question, options in zip(QUESTIONS, several):
        [answer] = engine.answer([question], **options)
        assert "".join(engine.stream(question, **options)) == answer.text


def test_what_is_retrieved_is_what_an_answer_reads(engine: MACEngine, tiny_model: MACModel) -> None:
    engine.adapt(STREAM.documents)
    allowed = {document.id for document in STREAM.documents[:5]}
    answers = engine.answer(QUESTIONS, k=3, allowed=allowed, overflow="truncate")
    hits = engine.retrieve(QUESTIONS, k=3, allowed=allowed)
    assert [tuple(hit.document_id for hit in row) for row in hits] == [answer.document_ids for answer in answers]
    assert max(len(row) for row in engine.retrieve(QUESTIONS)) == engine.k == 2
    assert MACEngine(tiny_model).retrieve(["Who?"]) == [[]]
    with pytest.raises(DocumentError, match="empty"):
        engine.retrieve([" "])


def test_engines_of_one_model_take_turns(engine: MACEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A modulation is attached to the LM itself, so two answers at a time would read each other's memory."""
    other = MACEngine(engine.model)
    engine.adapt(STREAM.documents[:6])
    other.adapt(STREAM.documents[6:])
    expected = [one.answer(QUESTIONS[:1], use_retriever=False)[0].text for one in (engine, other)]
    read, inside, most = engine.model.base_lm._read, [0], [0]

    def one_pass(*arguments: Any) -> Any:
        inside[0] += 1
        most[0] = max(most[0], inside[0])
        try:
            return read(*arguments)
        finally:
            inside[0] -= 1

    monkeypatch.setattr(engine.model.base_lm, "_read", one_pass)
    answers: list[list[str]] = [[], []]

    def ask(place: int) -> None:
        for _ in range(5):
            answers[place].append((engine, other)[place].answer(QUESTIONS[:1], use_retriever=False)[0].text)

    threads = [threading.Thread(target=ask, args=(place,)) for place in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1]
    assert answers == [[text] * 5 for text in expected]


def test_a_long_answer_gives_way_and_keeps_its_snapshot(
    tiny_model: MACModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another owner's question is answered between two tokens of a long answer, after the bank has changed."""
    endless = Sampling(bias=tuple((token, -1e9) for token in tiny_model.base_lm.end_tokens))
    long: dict[str, Any] = {"max_new_tokens": 60, "sampling": endless, "sources": 3}
    with MemoryBank.create(tmp_path / "bank", tiny_model.fingerprint) as bank:
        engine = MACEngine(tiny_model, bank, BM25Retriever(), k=2)
        engine.adapt(STREAM.documents[:6])
        expected = engine.answer(QUESTIONS[:2], **long)
        finished, passes = list[str](), threading.Semaphore(0)
        forward = engine.model.base_lm._read

        def slow(*arguments: Any) -> Any:
            passes.release()
            time.sleep(0.02)
            return forward(*arguments)

        def ask(owner: str, questions: list[str], **options: Any) -> list[Answer]:
            OWNER.set(owner)
            answers = engine.answer(questions, **options)
            finished.append(owner)
            return answers

        monkeypatch.setattr(engine.model.base_lm, "_read", slow)
        with ThreadPoolExecutor(2) as pool:
            waiting = pool.submit(ask, "long", QUESTIONS[:2], **long)
            assert passes.acquire(timeout=60)
            engine.forget(STREAM.documents[0].id)
            short = pool.submit(ask, "short", QUESTIONS[2:3], max_new_tokens=2).result(60)
            assert waiting.result(60) == expected
        assert finished == ["short", "long"]
        assert short == engine.answer(QUESTIONS[2:3], max_new_tokens=2)


@pytest.fixture
def passes(engine: MACEngine, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of rows of each pass of the LM from now on; passes are slow."""
    forward, rows = engine.model.base_lm._read, list[int]()

    def noted(ids: torch.Tensor, *rest: Any) -> Any:
        rows.append(len(ids))
        time.sleep(0.002)
        return forward(ids, *rest)

    monkeypatch.setattr(engine.model.base_lm, "_read", noted)
    return rows


class TestStreamsTogether:
    @pytest.fixture
    def long(self, engine: MACEngine) -> dict[str, Any]:
        endless = Sampling(bias=tuple((token, -1e9) for token in engine.model.base_lm.end_tokens))
        return {"max_new_tokens": 40, "sampling": endless}

    @pytest.fixture
    def expected(self, engine: MACEngine, long: dict[str, Any]) -> list[str]:
        engine.adapt(STREAM.documents[:6])
        return [answer.text for answer in engine.answer(QUESTIONS[:3], **long)]

    def test_a_stream_joins_answers_that_are_being_written(
        self, engine: MACEngine, long: dict[str, Any], expected: list[str], passes: list[int]
    ) -> None:
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(engine.answer, QUESTIONS[:2], **long)
            wait_until(lambda: bool(passes))
            assert "".join(engine.stream(QUESTIONS[2], **long)) == expected[2]
            assert [answer.text for answer in waiting.result(60)] == expected[:2]
        assert 3 in passes
        assert len(passes) < 70

    def test_streams_are_written_together(
        self, engine: MACEngine, long: dict[str, Any], expected: list[str], passes: list[int]
    ) -> None:
        streams = [engine.stream(question, **long) for question in QUESTIONS[:3]]
        assert ["".join(stream) for stream in streams] == expected
        assert 3 in passes
        assert len(passes) < 100

    def test_a_closed_or_forgotten_stream_ends(
        self, engine: MACEngine, long: dict[str, Any], expected: list[str], passes: list[int]
    ) -> None:
        stream, forgotten = (engine.stream(question, **long) for question in QUESTIONS[:2])
        stream.close()  # type: ignore[attr-defined]
        del forgotten
        gc.collect()
        assert "".join(engine.stream(QUESTIONS[2], **long)) == expected[2]
        assert passes[-1] == 1
        assert sum(passes) < 90

    def test_a_stream_within_a_turn_of_its_thread(
        self, engine: MACEngine, long: dict[str, Any], expected: list[str]
    ) -> None:
        with engine.turn():
            assert "".join(engine.stream(QUESTIONS[0], **long)) == expected[0]


def test_batches_and_recent_questions_are_counted(engine: MACEngine) -> None:
    engine.adapt(STREAM.documents)
    sizes: list[int] = []
    engine.on_batch = sizes.append
    engine.answer(QUESTIONS[:3], use_retriever=False)
    engine.answer(QUESTIONS[:4], use_retriever=False)
    assert sizes == [3, 4]
    assert engine.recent_questions == (3, 4)


def test_the_memory_weight_is_the_engines_or_the_models(tiny_model: MACModel) -> None:
    torch.manual_seed(0)
    for parameter in tiny_model.modulation.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    engine = MACEngine(tiny_model, retriever=BM25Retriever(), k=2)
    engine.adapt(STREAM.documents)
    with_memory, without = engine.answer(QUESTIONS), engine.answer(QUESTIONS, use_memory=False)
    assert with_memory != without
    engine.memory_weight = 1e-6
    assert [answer.text for answer in engine.answer(QUESTIONS)] == [answer.text for answer in without]
    assert "".join(engine.stream(QUESTIONS[0])) == without[0].text
    engine.model.config = engine.model.config.model_copy(update={"memory_weight": 1e-6})
    engine.memory_weight = 1.0
    assert engine.answer(QUESTIONS) == with_memory
    for wrong in (0.0, 1.5, float("nan")):
        engine.memory_weight = wrong
        with pytest.raises(ConfigError, match=f"memory_weight is {wrong}; give a number above 0 and at most 1"):
            engine.answer(QUESTIONS[:1])


def test_memory_needs_a_bank(engine: MACEngine) -> None:
    for ask in (
        lambda: engine.answer(QUESTIONS),
        lambda: engine.stream(QUESTIONS[0]),
        lambda: engine.document_attention(QUESTIONS),
    ):
        with pytest.raises(BankError, match="empty"):
            ask()
    assert engine.answer(QUESTIONS[:1], use_memory=False)


def test_an_empty_question(engine: MACEngine) -> None:
    with pytest.raises(DocumentError, match="must not be empty"):
        engine.answer([" "], use_memory=False)


def test_documents_beyond_the_window_are_refused_or_shortened(engine: MACEngine) -> None:
    texts = ["tiny document", "word " * 2000, "other " * 900]
    with pytest.raises(DocumentError, match="3 documents and the question take"):
        engine.answer(QUESTIONS[:1], contexts=[texts], use_memory=False)
    (answer,) = engine.answer(QUESTIONS[:1], contexts=[texts], use_memory=False, overflow="truncate")
    assert answer.truncated
    assert answer.contexts[0] == "tiny document"
    assert all(long.startswith(short.rstrip()) for short, long in zip(answer.contexts, texts[:2], strict=True))
    used = len(engine.model.base_lm.prompts.prompt(QUESTIONS[0], answer.contexts))
    room = engine.model.context_window - engine.model.config.max_new_tokens
    assert room - 20 < used <= room


def test_a_window_may_be_smaller_than_the_lm_s(engine: MACEngine, model_folder: Callable[[str], Path]) -> None:
    model, texts = engine.model, ["word " * 40, "other " * 40]
    whole = len(model.base_lm.prompts.prompt(QUESTIONS[0], texts))
    window = whole - 1 + model.config.max_new_tokens
    model.config = model.config.model_copy(update={"context_window": window})
    with pytest.raises(DocumentError, match=f"take {whole} tokens, but the LM's window leaves room for {whole - 1}"):
        engine.answer(QUESTIONS[:1], contexts=[texts], use_memory=False)
    (answer,) = engine.answer(QUESTIONS[:1], contexts=[texts], use_memory=False, overflow="truncate")
    assert answer.contexts[0] == texts[0].strip()
    assert texts[1].startswith(answer.contexts[1].strip())
    room = MACModel.from_config(mac_config(model_folder("gpt2"))).context_window
    with pytest.raises(ConfigError, match=f"context_window is {room + 1}, but the LM has positions for {room} tokens"):
        MACModel.from_config(mac_config(model_folder("gpt2"), context_window=room + 1))


def test_another_models_bank_is_refused_at_every_turn(engine: MACEngine) -> None:
    engine.adapt(STREAM.documents)
    engine.answer(QUESTIONS[:1])
    foreign = MemoryBank("beef")
    foreign.put(STREAM.documents, engine.bank.phi)
    engine.bank = foreign
    for use in (lambda: engine.answer(QUESTIONS), lambda: engine.adapt(STREAM.documents)):
        with pytest.raises(FingerprintError):
            use()


def test_a_new_bank_is_used_at_once(engine: MACEngine) -> None:
    engine.adapt(STREAM.documents[:6])
    before = engine.document_attention(QUESTIONS)[0]
    other = MACEngine(engine.model)
    other.adapt(STREAM.documents[6:])
    assert other.bank.version == engine.bank.version
    engine.bank = other.bank
    assert engine.document_attention(QUESTIONS)[0] != before


@settings(max_examples=6, deadline=None)
@given(data=st.data())
def test_answers_are_those_of_an_engine_of_the_allowed_alone(loaded_tiny_model: MACModel, data: st.DataObject) -> None:
    """Through BM25, prompts, the bank and attention."""
    ids = st.sampled_from([document.id for document in STREAM.documents])
    deleted, allowed = data.draw(st.sets(ids, max_size=4)), data.draw(st.sets(ids, min_size=1, max_size=8))
    left = [document for document in STREAM.documents if document.id in allowed - deleted]
    config = data.draw(
        st.sampled_from(
            [
                AttentionConfig(),
                AttentionConfig(strategy="preselect", preselected=2),
                AttentionConfig(strategy="hierarchical", subgroup=2),
            ]
        )
    )
    engine, fresh = (MACEngine(loaded_tiny_model, retriever=BM25Retriever(), k=3, attention=config) for _ in range(2))
    engine.adapt(STREAM.documents)
    for document_id in deleted:
        engine.forget(document_id)
    if not left:
        with pytest.raises(BankError, match="none of the documents"):
            engine.answer(QUESTIONS, allowed=allowed)
        return
    fresh.adapt(left)
    found, wanted = engine.answer(QUESTIONS, allowed=allowed), fresh.answer(QUESTIONS)
    for ours, theirs in zip(found, wanted, strict=True):
        assert (ours.text, ours.contexts, ours.document_ids) == (theirs.text, theirs.contexts, theirs.document_ids)
        assert ours.discarded_prior == pytest.approx(theirs.discarded_prior, abs=1e-5)
    if config.strategy != "hierarchical":
        (names, mass), (names_alone, alone) = (
            engine.document_attention(QUESTIONS, allowed),
            fresh.document_attention(QUESTIONS),
        )
        assert names == names_alone
        torch.testing.assert_close(mass, alone, atol=1e-5, rtol=1e-4)


def test_questions_are_answered_while_a_bank_is_compacted(
    tiny_model: MACModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with MemoryBank.create(tmp_path / "bank", tiny_model.fingerprint) as bank:
        engine = MACEngine(tiny_model, bank, BM25Retriever(), k=2)
        engine.adapt(STREAM.documents)
        engine.forget(STREAM.documents[0].id)
        expected = [answer.text for answer in engine.answer(QUESTIONS[:2])]
        compacted, answered, compact = threading.Event(), threading.Event(), bank.compact

        def slow() -> None:
            compact()
            compacted.set()
            assert answered.wait(60)

        monkeypatch.setattr(bank, "compact", slow)
        thread = threading.Thread(target=engine.compact)
        thread.start()
        assert compacted.wait(60)  # the bank's old files are gone, and the change is not over
        try:
            assert [answer.text for answer in engine.answer(QUESTIONS[:2])] == expected
            new = MACEngine(tiny_model, MemoryBank.open(tmp_path / "bank"), engine.retriever, k=2)
            assert [answer.text for answer in new.answer(QUESTIONS[:2])] == expected
        finally:
            answered.set()
            thread.join()
        assert STREAM.documents[0].id.encode() not in b"".join(file.read_bytes() for file in tmp_path.iterdir())
        assert engine.adapt(STREAM.documents[:1]).added == 1
