"""The models in the package: their size, what their folders hold, and that they answer questions."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from mac_rag.bank import MemoryBank
from mac_rag.cli.main import SAMPLE
from mac_rag.data.metrics import f1
from mac_rag.data.types import Document
from mac_rag.engine import MACEngine
from mac_rag.errors import FingerprintError, ModelLoadError
from mac_rag.lm.fetched import CACHE_VARIABLE, FETCHABLE
from mac_rag.model import MACModel
from mac_rag.model.calibration import read_calibration
from mac_rag.model.checkpoint import SHIPPED, find, read_values
from mac_rag.retrieval.registry import make_retriever
from mac_rag.shipped_models import FINGERPRINTS

NAMES = sorted(path.parent.name for path in SHIPPED.glob("*/config.json"))
# Those around an LM that `mac-rag fetch` brings are loaded where it is there.
LOADED = [
    pytest.param(name, marks=[pytest.mark.lm] * (read_values(SHIPPED / name)[1]["base_lm"]["name"] in FETCHABLE))
    for name in NAMES
]
OF_THE_SAMPLE = {
    "Who opened the office in Rotterdam?": "Helen Park",
    "When did a shepherd discover the marble caves?": "1926",
    "Where was the Kestrel engine built?": "Coventry",
}
# Paragraphs that nobody has written before, each with the questions about it and their answers.
PARAGRAPHS: dict[str, dict[str, str]] = {
    **{text: {question: answer} for text, (question, answer) in zip(SAMPLE, OF_THE_SAMPLE.items())},
    "The Varde lighthouse was built in 1871 by the engineer Ida Kloster after two ships had sunk in the strait. Its "
    "lamp burned rapeseed oil until 1912, when it was replaced by an electric light.": {
        "Who built the Varde lighthouse?": "Ida Kloster",
        "In what year was the Varde lighthouse built?": "1871",
        "What did the lamp of the Varde lighthouse burn until 1912?": "rapeseed oil",
    },
    "Bluewater Bay is home to the largest colony of grey seals on the coast. Every November, about 3,000 pups are born "
    "on its beaches.": {
        "What animals live in Bluewater Bay?": "grey seals",
        "How many pups are born every November?": "3,000",
    },
    "The treaty of Lindholm ended the war between Denmark and Sweden in 1643. It gave the island of Rossa to Sweden "
    "and was signed by King Frederick.": {
        "When did the treaty of Lindholm end the war?": "1643",
        "Who signed the treaty of Lindholm?": "King Frederick",
    },
}
ASKED = {question: answer for about in PARAGRAPHS.values() for question, answer in about.items()}


@pytest.mark.parametrize("name", NAMES)
def test_a_shipped_model_is_small_and_described(name: str) -> None:
    files = [path for path in (SHIPPED / name).rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= 64_000_000
    assert {path.suffix for path in files} <= {".json", ".safetensors", ".txt", ".md", ""}
    assert (SHIPPED / name / "README.md").read_text().startswith(f"# {name}\n")


@pytest.fixture(scope="module", autouse=True)
def _fetched(user_cache: Path) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(CACHE_VARIABLE, str(user_cache))
        yield


@pytest.fixture(scope="module", params=[each for each in LOADED if each.values != ("mac-tiny",)])
def engine(request: pytest.FixtureRequest, _fetched: None) -> MACEngine:
    """Of each model that reads English."""
    engine = MACEngine(request.param, retriever=make_retriever("bm25"), k=1)
    engine.adapt([Document(text, text) for text in PARAGRAPHS])
    return engine


@pytest.mark.parametrize("name", LOADED)
def test_every_weight_comes_from_the_files(name: str) -> None:
    """Memory that no file fills holds NaN here."""
    torch.use_deterministic_algorithms(True)
    try:
        model = MACModel.from_pretrained(name, device="cpu")
    finally:
        torch.use_deterministic_algorithms(False)
    assert [name for name, weight in model.named_parameters() if not weight.isfinite().all()] == []


@pytest.mark.parametrize("name", LOADED)
def test_the_fingerprint_of_a_shipped_model_is_known(name: str) -> None:
    assert MACModel.from_pretrained(name, device="cpu").fingerprint == FINGERPRINTS[name]


@pytest.mark.parametrize("name", NAMES)
def test_a_calibration_belongs_to_its_model(name: str) -> None:
    calibration = read_calibration(SHIPPED / name)
    assert calibration is None or calibration.fingerprint == FINGERPRINTS[name]


def test_a_bank_of_a_shipped_model_tells_its_name() -> None:
    assert list(FINGERPRINTS) == NAMES
    with pytest.raises(FingerprintError, match=r"by mac-tiny and .* by model f00d; use --model mac-tiny, .*MODEL$"):
        MemoryBank(FINGERPRINTS["mac-tiny"]).check_model("f00d")


def test_an_unknown_name_is_refused_with_those_that_are_shipped() -> None:
    for unknown in ("mac-small@1", "mac-tiny-hops", "mac-tiny@"):
        with pytest.raises(ModelLoadError, match=rf"'{unknown}'.* not shipped .*\({', '.join(NAMES)}\)"):
            find(unknown, None)


def test_memory_answers_what_the_lm_alone_cannot(engine: MACEngine) -> None:
    def score(memory: bool, retriever: bool) -> float:
        answers = engine.answer(list(ASKED), use_memory=memory, use_retriever=retriever)
        return sum(f1(answer.text, right) for answer, right in zip(answers, ASKED.values())) / len(ASKED)

    assert score(True, False) >= 0.5
    assert score(True, True) >= 0.5
    assert score(False, False) <= 0.1


def test_the_sample_is_answered_from_memory(engine: MACEngine) -> None:
    assert set(OF_THE_SAMPLE) == {line for line in SAMPLE if line.endswith("?")}
    answers = engine.answer(list(OF_THE_SAMPLE), use_retriever=False)
    assert [answer.text.lower() for answer in answers] == [right.lower() for right in OF_THE_SAMPLE.values()]


def test_the_model_attends_to_the_paragraph_that_answers(engine: MACEngine) -> None:
    asked = {question: text for text, about in PARAGRAPHS.items() for question in about}
    ids, mass = engine.document_attention(list(asked))
    assert [ids[index] for index in mass.argmax(1).tolist()] == list(asked.values())
