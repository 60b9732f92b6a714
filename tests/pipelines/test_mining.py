"""Retrieved documents of training questions: which, in what order and how often, and found only once."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from mac_rag.data.metrics import normalize
from mac_rag.data.newswire.generate import generate
from mac_rag.data.types import Document, QADataset, Question
from mac_rag.lm.fetched import CACHE_VARIABLE
from mac_rag.retrieval import BM25Retriever, encoders
from pipelines.corpora import qa_data as mining
from pipelines.corpora.qa_data import ContextConfig, ContextMiner, Retrieved
from tests.retrieval.helpers import WordEncoder

DATA = generate("train", 60, questions_per_document=4)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setattr(mining, "_BATCH", 32)
    return tmp_path / "cache"


def answers(name: str, data: QADataset = DATA, depth: int = 3) -> list[list[str]]:
    found = Retrieved(name, data, depth)
    return [[document.id for document in found[question.question]] for question in data.questions]


def plain(depth: int = 3) -> list[list[str]]:
    """The oracle: a retriever that is asked one question after another."""
    retriever = BM25Retriever()
    retriever.add(DATA.documents)
    return [[hit.document_id for hit in retriever.retrieve([q.question], depth)[0]] for q in DATA.questions]


def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many questions BM25 is asked from now on, call by call."""
    calls: list[int] = []
    retrieve = BM25Retriever.retrieve

    def counting(self: BM25Retriever, questions: list[str], *arguments: object, **options: object) -> object:
        calls.append(len(questions))
        return retrieve(self, questions, *arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(BM25Retriever, "retrieve", counting)
    return calls


def test_what_is_retrieved_is_retrieved_once(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = plain()
    calls = counted(monkeypatch)
    assert answers("bm25") == expected
    assert sum(calls) == len({question.question for question in DATA.questions})
    calls.clear()
    assert answers("bm25") == expected
    assert calls == []
    assert sorted(path.name for path in next(cache.rglob("lock")).parent.iterdir()) == ["lock", "rows.safetensors"]


@pytest.mark.parametrize("damage", [lambda file: file.unlink(), lambda file: file.write_bytes(file.read_bytes()[:-9])])
def test_results_that_are_missing_or_damaged_are_retrieved_again(cache: Path, damage: Callable[[Path], object]) -> None:
    expected = plain()
    answers("bm25")
    [file] = cache.rglob("*.safetensors")
    whole = file.read_bytes()
    damage(file)
    assert answers("bm25") == expected
    assert file.read_bytes() == whole


def test_other_data_or_depth_are_other_work(cache: Path) -> None:
    changed = Document(DATA.documents[0].id, "Something else happened.", {})
    answers("bm25")
    answers("bm25", depth=4)
    answers("bm25", QADataset("d", "train", (changed, *DATA.documents[1:]), DATA.questions))
    answers("bm25", QADataset("d", "train", DATA.documents, DATA.questions[:90]))
    assert len(list(cache.rglob("lock"))) == 4


def test_a_dense_retriever_is_kept_under_its_weights(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And so is a hybrid of it; what it has encoded goes when all is retrieved."""
    data = QADataset("d", "train", DATA.documents[:9], DATA.questions[:36])
    made: list[WordEncoder] = []

    def encoder_named(name: str) -> None:
        monkeypatch.setattr(encoders, "minilm", lambda: made.append(WordEncoder(name)) or made[-1])

    def encoded() -> int:
        return sum(len(encoder.encoded) for encoder in made)

    encoder_named("first")
    found = {name: answers(name, data) for name in ("minilm", "hybrid")}
    assert encoded() == 18
    assert {name: answers(name, data) for name in found} == found
    assert encoded() == 18
    assert not list(cache.rglob("encoded"))
    encoder_named("second")
    answers("minilm", data)
    assert encoded() == 27


class Other:
    """Stands for a retriever of a user's own, which holds documents of another kind as well."""

    retriever = BM25Retriever()


def test_an_imported_retriever_is_asked_anew_and_finds_training_documents_only(cache: Path) -> None:
    question = DATA.questions[0].question
    Other.retriever.put([Document(f"other {number}", question) for number in range(5)])
    found = answers(f"{__name__}:Other.retriever")
    assert Other.retriever.retrieve([question], 1)[0][0].document_id.startswith("other")
    assert not any(name.startswith("other") for row in found for name in row)
    assert found == answers(f"{__name__}:Other.retriever")
    assert not cache.exists()


def mined(config: ContextConfig, data: QADataset = DATA, rounds: int = 1) -> list[tuple[Question, list[Document]]]:
    miner = ContextMiner(config, data)
    rng = random.Random(0)
    return [pair for _ in range(rounds) for pair in zip(data.questions, miner.mine(data.questions, rng))]


@pytest.mark.parametrize("gold_rate", [0.0, 0.3, 1.0])
def test_the_gold_document_is_there_at_the_stated_rate_and_anywhere(gold_rate: float) -> None:
    """Over 2,400 draws, within four standard deviations; rank must not tell where the answer is."""
    pairs = mined(ContextConfig(retriever="bm25", k=(3,), gold_rate=gold_rate), rounds=10)
    places = [
        [document.id for document in documents].index(question.document_id)
        for question, documents in pairs
        if len(documents) == 3 and question.document_id in {document.id for document in documents}
    ]
    present = sum(question.document_id in {document.id for document in found} for question, found in pairs)
    assert abs(present - gold_rate * len(pairs)) <= 4 * math.sqrt(len(pairs) * gold_rate * (1 - gold_rate))
    for _, documents in pairs:
        assert len({document.id for document in documents}) == len(documents) <= 3
    counts = np.bincount(places, minlength=3)
    assert all(abs(count - len(places) / 3) <= 4 * math.sqrt(len(places) * 2 / 9) for count in counts)


def test_the_others_are_the_best_that_the_retriever_found() -> None:
    """Beside the document of the question; where that is left out, they are the best that do not hold its answer."""
    texts = {document.id: normalize(document.text) for document in DATA.documents}
    skipped = 0
    for row, (question, documents) in zip(plain(6), mined(ContextConfig(retriever="bm25", k=(3,), gold_rate=0.5))):
        ids = {document.id for document in documents}
        others = [name for name in row if name != question.document_id]
        if question.document_id in ids:
            assert ids == {*others[:2], question.document_id}
            continue
        answer = normalize(question.answers[0])
        silent = [name for name in others if not re.search(rf"(?<!\w){re.escape(answer)}(?!\w)", texts[name])]
        assert ids == set(silent[:3])
        skipped += silent[:3] != others[:3]
    assert skipped


@pytest.mark.parametrize("rate", [0.0, 1.0])
def test_the_share_of_questions_with_documents(rate: float) -> None:
    for _, documents in mined(ContextConfig(retriever="bm25", k=(2,), rate=rate)):
        assert bool(documents) == bool(rate)


def test_documents_as_retrieved_come_best_first_with_or_without_the_right_one(cache: Path) -> None:
    config = ContextConfig(retriever="bm25", k=(2,), gold_rate=None)
    mined = ContextMiner(config, DATA).mine(DATA.questions, random.Random(0))
    assert [[document.id for document in documents] for documents in mined] == plain(2)
    found = [q.document_id in {d.id for d in documents} for q, documents in zip(DATA.questions, mined, strict=True)]
    assert any(found)
    assert not all(found)
