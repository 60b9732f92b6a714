"""The models in the package: their size, what their folders hold, and that the default one answers questions."""

from __future__ import annotations

import pytest

from mac_rag import DEFAULT_MODEL
from mac_rag.checkpoint import SHIPPED
from mac_rag.cli_try import SAMPLE
from mac_rag.data.types import Document
from mac_rag.engine import MACEngine
from mac_rag.metrics import f1
from mac_rag.retrieval.registry import make_retriever

NAMES = sorted(path.parent.name for path in SHIPPED.glob("*/config.json"))
ASKED = {
    "Who built the Varde lighthouse?": "Ida Kloster",
    "When did a shepherd discover the marble caves?": "1926",
    "Who won the Halden Prize in 2014?": "Amara Diallo",
}


@pytest.mark.parametrize("name", NAMES)
def test_a_shipped_model_is_small_and_described(name: str) -> None:
    files = [path for path in (SHIPPED / name).rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= 64_000_000
    assert {path.suffix for path in files} <= {".json", ".safetensors", ".txt", ".md", ""}
    assert (SHIPPED / name / "README.md").read_text().startswith(f"# {name}\n")


@pytest.fixture(scope="module")
def engine() -> MACEngine:
    engine = MACEngine(retriever=make_retriever("bm25"), k=1)
    engine.adapt([Document(f"paragraph {i}", text) for i, text in enumerate(SAMPLE) if not text.endswith("?")])
    return engine


def test_the_default_is_shipped() -> None:
    assert DEFAULT_MODEL in NAMES


@pytest.mark.parametrize("retrieved", [False, True])
def test_memory_answers_what_the_lm_alone_cannot(engine: MACEngine, retrieved: bool) -> None:
    questions = sorted(ASKED)
    assert set(questions) < set(SAMPLE)

    def score(memory: bool, retriever: bool) -> float:
        answers = engine.answer(questions, use_memory=memory, use_retriever=retriever)
        return sum(f1(answer.text, ASKED[question]) for answer, question in zip(answers, questions)) / len(questions)

    assert score(True, retrieved) >= 0.4
    assert score(False, False) <= 0.1


def test_the_default_model_attends_to_the_paragraph_that_answers(engine: MACEngine) -> None:
    ids, mass = engine.document_attention(sorted(ASKED))
    texts = {f"paragraph {i}": text for i, text in enumerate(SAMPLE)}
    most = [texts[ids[index]] for index in mass.argmax(1).tolist()]
    assert [ASKED[question] in text for question, text in zip(sorted(ASKED), most, strict=True)] == [True] * len(ASKED)
