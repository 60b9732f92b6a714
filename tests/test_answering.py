"""Calls of several threads share batches, and each gets what it would get alone."""

from __future__ import annotations

import threading
from collections.abc import Callable, Container, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from mac_rag.data.newswire.generate import generate
from mac_rag.data.types import Answer, Document
from mac_rag.engine import MACEngine
from mac_rag.errors import BankError, DocumentError
from mac_rag.lm.continuous_batch import Answers, ContinuousBatch
from mac_rag.lm.decoding import Sampling
from mac_rag.model import MACModel
from mac_rag.retrieval.base import Hit
from mac_rag.retrieval.bm25 import BM25Retriever
from tests.helpers import wait_until

STREAM = generate("val", 12)
QUESTIONS = [question.question for question in STREAM.questions][:8]


class PickyRetriever(BM25Retriever):
    """Raises an exception for a question with the word "forbidden"."""

    def retrieve(self, questions: Sequence[str], k: int, *, allowed: Container[str] | None = None) -> list[list[Hit]]:
        if any("forbidden" in question for question in questions):
            raise ConnectionError("no forbidden words")
        return super().retrieve(questions, k, allowed=allowed)


@pytest.fixture
def engine(tiny_model: MACModel) -> MACEngine:
    torch.manual_seed(0)
    for parameter in tiny_model.modulation.parameters():
        torch.nn.init.normal_(parameter, std=0.3)  # so that memory changes the answers
    tiny_model.config = tiny_model.config.model_copy(update={"max_new_tokens": 6})
    engine = MACEngine(tiny_model, retriever=PickyRetriever(), k=2)
    engine.adapt(STREAM.documents)
    return engine


class Crowd:
    """Calls of an engine from one thread each, which all wait before the first begins."""

    def __init__(self, engine: MACEngine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.engine = engine
        self.generated: list[int] = []  # questions that begin together
        begin = engine.model.begin

        def counting(batch: ContinuousBatch, prompts: Sequence[Any], *args: Any, **options: Any) -> list[Answers]:
            self.generated.append(len(prompts))
            return begin(batch, prompts, *args, **options)

        monkeypatch.setattr(engine.model, "begin", counting)

    def __call__(self, *calls: Callable[[], Any]) -> list[Any]:
        """The results of the calls, or their exceptions."""

        def outcome(call: Callable[[], Any]) -> Any:
            try:
                return call()
            except Exception as error:
                return error

        queue = self.engine._queue
        with ThreadPoolExecutor(len(calls)) as pool:
            with queue.turn():
                futures = []
                for number, call in enumerate(calls, 1):
                    futures.append(pool.submit(outcome, call))
                    wait_until(lambda number=number: len(queue._waiting) == number)
            return [future.result() for future in futures]


@pytest.fixture
def crowd(engine: MACEngine, monkeypatch: pytest.MonkeyPatch) -> Crowd:
    return Crowd(engine, monkeypatch)


OPTIONS: list[dict[str, Any]] = [
    {},
    {"use_memory": False},
    {"use_retriever": False},
    {"contexts": [["A ferry crosses the river Vest.", "It has 760 workers."]]},
    {"allowed": frozenset(document.id for document in STREAM.documents[:4])},
    {"allowed": {document.id for document in STREAM.documents[4:]}, "k": 1},
    {"memory_weight": 0.3},
    {"max_new_tokens": 3},
    {"sampling": Sampling(temperature=0.5, seed=3)},
]


@pytest.mark.parametrize("options", OPTIONS)
def test_questions_that_wait_share_one_pass(engine: MACEngine, crowd: Crowd, options: dict[str, Any]) -> None:
    expected = [engine.answer([question], **options) for question in QUESTIONS]
    crowd.generated.clear()
    assert crowd(*(lambda q=question: engine.answer([q], **options) for question in QUESTIONS)) == expected
    assert crowd.generated == [len(QUESTIONS)]


def test_only_calls_with_equal_settings_share_a_pass(engine: MACEngine, crowd: Crowd) -> None:
    plans = [(QUESTIONS[number % 2], options) for number, options in enumerate(OPTIONS * 2)]
    expected = [engine.answer([question], **options) for question, options in plans]
    crowd.generated.clear()
    assert crowd(*(lambda q=question, o=options: engine.answer([q], **o) for question, options in plans)) == expected
    # Contexts differ from question to question anyway, so the first and the fourth options share their passes.
    assert len(crowd.generated) == len(OPTIONS) - 1
    assert sum(crowd.generated) == len(plans)


def test_calls_of_several_questions_share_batches_of_the_given_size(engine: MACEngine, crowd: Crowd) -> None:
    parts = [QUESTIONS[:2], QUESTIONS[2:3], [], QUESTIONS[3:7], QUESTIONS[7:]]
    expected = [engine.answer(part) for part in parts]
    crowd.generated.clear()
    assert crowd(*(lambda p=part: engine.answer(p, batch_size=3) for part in parts)) == expected
    assert crowd.generated == [3, 3, 1, 1]


def test_what_is_wrong_with_one_question_is_nothing_to_the_others(engine: MACEngine, crowd: Crowd) -> None:
    good = QUESTIONS[:4]
    expected = [engine.answer([question]) for question in good]
    crowd.generated.clear()
    empty, forbidden, endless, *others = crowd(
        lambda: engine.answer([" "]),
        lambda: engine.answer(["What is forbidden?"]),
        lambda: engine.answer(["why " * 3000]),
        *(lambda q=question: engine.answer([q]) for question in good),
    )
    assert others == expected
    assert isinstance(empty, DocumentError)
    assert isinstance(forbidden, ConnectionError)
    assert isinstance(endless, DocumentError)
    assert "longer than the limit" in str(endless)
    assert crowd.generated == [len(good)]


def test_what_fails_for_a_whole_batch_fails_for_all_of_it_and_not_for_the_next(
    engine: MACEngine, crowd: Crowd, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any, **options: Any) -> list[str]:
        raise MemoryError("no room")

    expected = engine.answer(QUESTIONS[:1])
    with monkeypatch.context() as broken:
        broken.setattr(engine.model, "begin", fail)
        outcomes = crowd(*(lambda q=question: engine.answer([q]) for question in QUESTIONS[:3]))
    assert [str(outcome) for outcome in outcomes] == ["no room"] * 3
    assert engine.answer(QUESTIONS[:1]) == expected
    empty = MACEngine(engine.model)
    outcomes = Crowd(empty, monkeypatch)(*(lambda q=question: empty.answer([q]) for question in QUESTIONS[:3]))
    assert all(isinstance(outcome, BankError) for outcome in outcomes)


def test_a_call_whose_questions_have_ended_does_not_wait_for_the_others(
    engine: MACEngine, crowd: Crowd, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The LM's last answer ends only after the caller of the others has them."""
    monkeypatch.setattr(engine.model.base_lm, "keeps_letters", True)
    calls = [QUESTIONS[:1], QUESTIONS[1:3]]

    def told(answers: Sequence[Answer]) -> list[tuple[str, list[str | None]]]:
        return [(answer.text, [source.document_id for source in answer.sources]) for answer in answers]

    expected = [told(engine.answer(part, sources=2)) for part in calls]
    returned, late, begin, step = threading.Event(), list[Any](), engine.model.begin, ContinuousBatch.step

    def in_turn(batch: ContinuousBatch, prompts: Sequence[Any], tell: Callable[..., Any], **options: Any) -> Any:
        def tell_later(row: int, answer: Any) -> None:
            if prompts[row].question in calls[0]:
                late.append((row, answer))
            else:
                tell(row, answer)

        def after_the_others(batch: ContinuousBatch) -> None:
            if late and not batch:
                assert returned.wait(20)
                tell(*late.pop())
            step(batch)

        monkeypatch.setattr(ContinuousBatch, "step", after_the_others)
        return begin(batch, prompts, tell_later, **options)

    def ask_two() -> Sequence[Answer]:
        answers = engine.answer(calls[1], sources=2)
        returned.set()
        return answers

    monkeypatch.setattr(engine.model, "begin", in_turn)
    assert [told(answers) for answers in crowd(lambda: engine.answer(calls[0], sources=2), ask_two)] == expected


def test_attention_of_threads_shares_one_pass(engine: MACEngine, crowd: Crowd, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = [engine.document_attention([question]) for question in QUESTIONS]
    passes: list[int] = []
    reader = engine._reader
    mass = reader.document_mass
    monkeypatch.setattr(reader, "document_mass", lambda some, allowed: passes.append(len(some)) or mass(some, allowed))
    found = crowd(*(lambda q=question: engine.document_attention([q]) for question in QUESTIONS))
    assert passes == [len(QUESTIONS)]
    for (ids, share), (expected_ids, expected_share) in zip(found, expected, strict=True):
        assert ids == expected_ids
        torch.testing.assert_close(share, expected_share, atol=1e-5, rtol=1e-5)
    good, bad = crowd(lambda: engine.document_attention(QUESTIONS[:2]), lambda: engine.document_attention([""]))
    assert good[1].shape == (2, len(STREAM.documents))
    assert isinstance(bad, DocumentError)


def test_no_question_waits_for_a_change_and_no_change_for_an_answer(engine: MACEngine) -> None:
    """Each is stopped in the midst of its work until the other is done."""
    expected = engine.answer(QUESTIONS[:1], use_retriever=False)
    ids = [document.id for document in STREAM.documents]
    asking, adapting, asked, adapted = (threading.Event() for _ in range(4))
    begin, put = engine.model.begin, engine.bank.put

    def slow_begin(*arguments: Any, **options: Any) -> Any:
        asking.set()
        assert adapted.wait(60)
        return begin(*arguments, **options)

    def slow_put(*arguments: Any, **options: Any) -> Any:
        removed = put(*arguments, **options)
        adapting.set()
        assert asked.wait(60)
        return removed

    with ThreadPoolExecutor(2) as pool, pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine.bank, "put", slow_put)
        report = pool.submit(engine.adapt, [Document("new", "The Kestrel engine was designed by Thomas Webb.")])
        assert adapting.wait(60)
        # The bank holds the document already, in this thread's sight too, but nothing is committed.
        assert "new" in engine.bank
        assert "new" not in engine.snapshot
        assert engine.document_attention(QUESTIONS[:1])[0] == ids
        assert engine.answer(QUESTIONS[:1], use_retriever=False) == expected
        asked.set()
        assert report.result().added == 1
        assert engine.document_attention(QUESTIONS[:1])[0] == [*ids, "new"]

        patch.setattr(engine.model, "begin", slow_begin)
        answer = pool.submit(engine.answer, QUESTIONS[:1])
        assert asking.wait(60)
        assert engine.forget("new") == ("new",)
        adapted.set()
        assert answer.result()


def test_a_retriever_may_ask_the_engine_itself(engine: MACEngine) -> None:
    """As one of LlamaIndex does that rewrites the question with an LLM."""

    class Asking(BM25Retriever):
        def retrieve(
            self, questions: Sequence[str], k: int, *, allowed: Container[str] | None = None
        ) -> list[list[Hit]]:
            answers = engine.answer(questions, use_retriever=False)
            return super().retrieve([answer.text + question for answer, question in zip(answers, questions)], k)

    engine.retriever = Asking()
    engine.retriever.add(STREAM.documents)
    assert len(engine.answer(QUESTIONS[:3])) == 3
