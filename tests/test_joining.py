"""Questions that come while others are being answered join them, and each has the answer that it has alone."""

from __future__ import annotations

import itertools
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mac_rag import MACEngine
from mac_rag.bank import MemoryBank
from mac_rag.data.newswire.generate import generate
from mac_rag.data.types import Answer
from mac_rag.errors import DocumentError
from mac_rag.lm.block_attention import packed_keys_values
from mac_rag.lm.decoding import Sampling
from mac_rag.model import MACModel, OwnKVModel
from mac_rag.retrieval import BM25Retriever
from tests.helpers import Folder, own_kv, strong, wait_until

STREAM = generate("train", 16)
DOCUMENTS = list(STREAM.documents)
QUESTIONS = [question.question for question in STREAM.questions[:6]]
pytestmark = pytest.mark.usefixtures("interruptible")


@pytest.fixture(scope="module")
def model(model_folder: Folder) -> OwnKVModel:
    made = own_kv(model_folder("llama"))
    config = made.config.model_copy(update={"max_new_tokens": 8, "memory_tokens": 400})
    return OwnKVModel(config, made.base_lm, None)


@pytest.fixture(params=["own keys and values", "amortized"])
def any_model(request: pytest.FixtureRequest, model: OwnKVModel, tiny_model: MACModel) -> MACModel:
    return model if request.param == "own keys and values" else strong(tiny_model)


def endless(model: MACModel) -> Sampling:
    return Sampling(bias=tuple((token, -1e9) for token in model.base_lm.end_tokens))


def told(answers: list[Answer]) -> list[Any]:
    return [
        (one.text, one.document_ids, one.prompt_tokens, [token.id for token in one.decoded.tokens], one.decoded.ended)
        for one in answers
        if one.decoded is not None
    ]


class Paced:
    """An engine's LM whose passes happen one by one.

    Attributes:
        rows: the number of rows of each pass.
    """

    def __init__(self, engine: MACEngine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.engine, self.pool = engine, ThreadPoolExecutor(8)
        self.rows: list[int] = []
        self._is_before_a_pass = False
        self._go, read = threading.Semaphore(0), engine.model.base_lm._read

        def paced(ids: Any, *rest: Any) -> Any:
            self._is_before_a_pass = True
            assert self._go.acquire(timeout=60)
            self._is_before_a_pass = False
            output = read(ids, *rest)
            self.rows.append(len(ids))
            return output

        monkeypatch.setattr(engine.model.base_lm, "_read", paced)

    def go_on(self, passes: int) -> None:
        """Lets some passes happen, and waits until the next one is due, or nobody is answered any more.

        So whoever asks then waits until the next pass has been.
        """
        count, queue = len(self.rows) + passes, self.engine._queue
        self._go.release(passes)
        wait_until(lambda: len(self.rows) >= count and (self._is_before_a_pass or queue._holder is None))

    def free(self) -> None:
        self._go.release(100_000)

    def start(self, question: str, engine: MACEngine | None = None, **options: Any) -> Future[list[Answer]]:
        """Asks in a thread of its own; returns once the question waits, or is the first one."""
        queue = self.engine._queue
        waiting, is_first = len(queue._waiting), queue._holder is None
        future = self.pool.submit((engine or self.engine).answer, [question], **options)
        wait_until(lambda: queue._holder is not None if is_first else len(queue._waiting) == waiting + 1)
        return future


@pytest.fixture
def paced(any_model: MACModel, monkeypatch: pytest.MonkeyPatch) -> Iterator[Paced]:
    engine = MACEngine(any_model, retriever=BM25Retriever(), k=2)
    engine.adapt(DOCUMENTS[:8])
    yield from freed(Paced(engine, monkeypatch))


def freed(paced: Paced) -> Iterator[Paced]:
    yield paced
    paced.free()
    paced.pool.shutdown()
    assert paced.engine._queue._holder is None


def alone(engine: MACEngine, question: str, **options: Any) -> list[Any]:
    return told(engine.answer([question], **options))


def test_a_late_question_is_answered_while_the_others_go_on(paced: Paced) -> None:
    engine = paced.engine
    long = {"max_new_tokens": 30, "sampling": endless(engine.model)}
    other = MACEngine(engine.model)
    other.adapt(DOCUMENTS[8:])
    first = paced.start(QUESTIONS[0], **long)
    paced.go_on(4)
    late = [
        paced.start(QUESTIONS[1], max_new_tokens=2, sources=2),
        paced.start(QUESTIONS[2], other, max_new_tokens=1),
        paced.start(QUESTIONS[3], max_new_tokens=3, sampling=Sampling(temperature=1.0, seed=5, log_probabilities=1)),
    ]
    while not all(one.done() for one in late):
        paced.go_on(1)
        time.sleep(0.02)
    # Each is read in a pass, with a token of the others between two, and two tokens later all are done.
    assert len(paced.rows) <= 4 + 11
    assert not first.done()
    paced.free()
    answers = [one.result(60) for one in (first, *late)]
    assert told(answers[0]) == alone(engine, QUESTIONS[0], **long)
    assert told(answers[1]) == alone(engine, QUESTIONS[1], max_new_tokens=2, sources=2)
    assert [one.document_id for one in answers[1][0].sources] == [
        one.document_id for one in engine.answer([QUESTIONS[1]], max_new_tokens=2, sources=2)[0].sources
    ]
    assert told(answers[2]) == alone(other, QUESTIONS[2], max_new_tokens=1)
    drawn = Sampling(temperature=1.0, seed=5, log_probabilities=1)
    [again] = engine.answer([QUESTIONS[3]], max_new_tokens=3, sampling=drawn)
    assert told(answers[3]) == told([again])
    for one, same in zip(answers[3][0].decoded.tokens, again.decoded.tokens, strict=True):  # type: ignore[union-attr]
        assert one.log_probability == pytest.approx(same.log_probability, abs=1e-4)


def test_an_error_of_one_that_joins_is_nothing_to_the_others(paced: Paced, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, begin = paced.engine, paced.engine.model.base_lm._read_prompts
    long = {"max_new_tokens": 12, "sampling": endless(engine.model)}

    def broken(prompts: Any, modulation: Any) -> Any:
        if not failed.is_set():
            failed.set()
            raise MemoryError("no room")
        return begin(prompts, modulation)

    failed = threading.Event()
    first = paced.start(QUESTIONS[0], **long)
    paced.go_on(2)
    monkeypatch.setattr(engine.model.base_lm, "_read_prompts", broken)
    bad = paced.start(QUESTIONS[1], max_new_tokens=3)
    empty = paced.start(" ", max_new_tokens=3)
    paced.free()
    with pytest.raises(DocumentError):
        empty.result(60)
    with pytest.raises(MemoryError, match="no room"):
        bad.result(60)
    assert told(first.result(60)) == alone(engine, QUESTIONS[0], **long)


class Held:
    """Counts who holds the snapshots of an engine's bank."""

    def __init__(self, engine: MACEngine, monkeypatch: pytest.MonkeyPatch) -> None:
        self._taken: list[weakref.ref[Any]] = []
        latest = engine._shared.latest

        def noted() -> Any:
            snapshot = latest()
            self._taken.append(weakref.ref(snapshot))
            return snapshot

        monkeypatch.setattr(engine._shared, "latest", noted)

    @property
    def now(self) -> int:
        there = [snapshot for taken in self._taken if (snapshot := taken()) is not None]
        return sum(snapshot._holders for snapshot in there)


@pytest.fixture
def stored(model: OwnKVModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Paced]:
    with MemoryBank.create(tmp_path / "bank", model.fingerprint) as bank:
        engine = MACEngine(model, bank)
        engine.adapt(DOCUMENTS[:8])
        yield from freed(Paced(engine, monkeypatch))


def test_each_keeps_its_own_snapshot_and_lets_it_go(stored: Paced, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = stored.engine
    held = Held(engine, monkeypatch)
    options = {"max_new_tokens": 12, "sampling": endless(engine.model), "sources": 8}
    engine.adapt(DOCUMENTS[8:])
    first = stored.start(QUESTIONS[0], **options)
    stored.go_on(3)
    for document in DOCUMENTS[8:]:
        engine.forget(document.id)
    late = stored.start(QUESTIONS[0], **options)
    stored.go_on(3)
    wait_until(lambda: held.now == 2)
    stored.free()
    before, after = first.result(60), late.result(60)
    assert held.now == 0
    assert told(after) == alone(engine, QUESTIONS[0], **options)
    engine.adapt(DOCUMENTS[8:])
    assert told(before) == alone(engine, QUESTIONS[0], **options)
    assert {source.document_id for source in after[0].sources} <= {document.id for document in DOCUMENTS[:8]}
    assert {source.document_id for source in before[0].sources} & {document.id for document in DOCUMENTS[8:]}
    assert held.now == 0


@pytest.mark.parametrize("fault", ["interrupt", "error of all", "error of one"])
def test_snapshots_are_let_go_once_whatever_happens(stored: Paced, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    engine, queue = stored.engine, stored.engine._queue
    held, options = Held(engine, monkeypatch), {"max_new_tokens": 12, "sampling": endless(engine.model)}
    calls = itertools.count()

    def give_way() -> bool:
        if fault == "interrupt" and next(calls) == 8:
            raise KeyboardInterrupt
        return False

    monkeypatch.setattr(queue, "give_way", give_way)
    first = stored.start(QUESTIONS[0], **options)
    stored.go_on(3)
    late = stored.start(QUESTIONS[1], sources=1, **options)
    stored.go_on(2)
    wait_until(lambda: held.now == 2)
    if fault == "error of all":
        monkeypatch.setattr("mac_rag.lm.continuous_batch._Stack.step", raising(MemoryError("no room")))
    if fault == "error of one":
        monkeypatch.setattr("mac_rag.asking.find_sources", raising(MemoryError("no room")))
    stored.free()
    outcomes = [one.exception(60) for one in (first, late)]
    wait_until(lambda: queue._holder is None)
    assert held.now == 0
    monkeypatch.undo()
    if fault == "interrupt":
        assert isinstance(outcomes[0], KeyboardInterrupt)
        assert told(late.result()) == alone(engine, QUESTIONS[1], **options)
    elif fault == "error of all":
        assert [str(one) for one in outcomes] == ["no room"] * 2
    else:
        assert [str(one) for one in outcomes] == ["None", "no room"]
        assert told(first.result()) == alone(engine, QUESTIONS[0], **options)
    assert engine.answer(QUESTIONS[:1])


def raising(error: Exception) -> Callable[..., Any]:
    def raises(*_: Any, **__: Any) -> Any:
        raise error

    return raises


WAYS: list[dict[str, Any]] = [
    {},
    {"max_new_tokens": 1},
    {"use_memory": False},
    {"use_retriever": False, "max_new_tokens": 5},
    {"sampling": Sampling(temperature=0.7, seed=2), "sources": 2},
    {"allowed": frozenset(document.id for document in DOCUMENTS[:4])},
]


@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(
        st.tuples(st.sampled_from(QUESTIONS), st.integers(0, len(WAYS) - 1), st.sampled_from([0.0, 0.005, 0.02])),
        min_size=3,
        max_size=8,
    )
)
def test_a_crowd_in_any_order_has_the_answers_of_each_alone(
    any_model: MACModel, plan: list[tuple[str, int, float]]
) -> None:
    engine = MACEngine(any_model, retriever=BM25Retriever(), k=2)
    engine.adapt(DOCUMENTS[:8])
    with ThreadPoolExecutor(len(plan)) as pool:
        asked = []
        for question, way, pause in plan:
            asked.append(pool.submit(engine.answer, [question], **WAYS[way]))
            time.sleep(pause)
        found = [told(one.result(60)) for one in asked]
    assert found == [alone(engine, question, **WAYS[way]) for question, way, _ in plan]
    assert engine._queue._holder is None


def test_documents_are_read_while_nobody_is_answered(model: OwnKVModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """The LM that reads documents is the one that answers, and its attention cannot do both at once."""
    engine = MACEngine(model)
    engine.adapt(DOCUMENTS[:2])
    answering, overlaps = threading.Event(), []
    read, packed = model.base_lm._read, packed_keys_values

    def reading(*given: Any) -> Any:
        answering.set()
        time.sleep(0.01)
        try:
            return read(*given)
        finally:
            answering.clear()

    def packing(*given: Any) -> Any:
        overlaps.append(answering.is_set())
        return packed(*given)

    monkeypatch.setattr(model.base_lm, "_read", reading)
    monkeypatch.setattr("mac_rag.model.own_kv.packed_keys_values", packing)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(engine.answer, QUESTIONS[:1], max_new_tokens=8, sampling=endless(model))
        assert answering.wait(60)
        engine.adapt(DOCUMENTS[2:6])
        assert told(asked.result(60)) == alone(engine, QUESTIONS[0], max_new_tokens=8, sampling=endless(model))
    assert overlaps
    assert not any(overlaps)
