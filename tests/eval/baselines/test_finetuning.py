"""Online fine-tuning against a plain loop, its learning-rate search, salient spans and the token weights they give."""

from __future__ import annotations

import copy
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import spacy
import torch

from eval.baselines.finetuning import (
    RULES,
    FineTuning,
    SalientSpanWeights,
    TokenWeighting,
    UniformWeights,
    passages,
    salient_spans,
    search_learning_rate,
)
from eval.harness.systems import System
from mac_rag.data.newswire.generate import generate
from mac_rag.data.types import Document
from mac_rag.errors import DocumentError
from mac_rag.model import MACModel
from pipelines.corpora.salient_spans import rule_spans

STREAM = generate("test", 6, seed=2)
RATE = 1e-3


def plain_loop(model: MACModel, documents: Sequence[Document], weight_of: object) -> dict[str, torch.Tensor]:
    """One step of Adam on each document: the mean over its tokens of weight times negative log-likelihood."""
    lm = copy.deepcopy(model.base_lm.model).requires_grad_(True)
    optimizer = torch.optim.Adam(lm.parameters(), lr=RATE)
    prompts = model.base_lm.prompts
    for document in documents:
        ids = prompts.prompt_start([document.text])
        logits = lm(input_ids=torch.tensor([ids])).logits[0]
        total = torch.zeros(())
        for place in range(1, len(ids)):
            total = total - weight_of(document.text, ids, place) * logits[place - 1].log_softmax(-1)[ids[place]]  # type: ignore[operator]
        optimizer.zero_grad()
        (total / (len(ids) - 1)).backward()
        optimizer.step()
    return dict(lm.named_parameters())


def salient(model: MACModel, text: str, ids: list[int], place: int) -> float:
    """Whether a token overlaps a span, by the text in front of it and behind it."""
    decode = model.base_lm.tokenizer.decode
    start = len(model.base_lm.prompts.start)
    if place < start:
        return 0.0
    first, end = len(decode(ids[start:place])), len(decode(ids[start : place + 1]))
    return float(any(a < end and first < b for a, b in rule_spans(text + "\n")))


@pytest.mark.parametrize("kind", ["uniform", "salient"])
def test_updates_equal_a_plain_loop(tiny_model: MACModel, kind: str) -> None:
    before = {name: weight.clone() for name, weight in tiny_model.base_lm.model.named_parameters()}
    weighting: TokenWeighting = UniformWeights() if kind == "uniform" else SalientSpanWeights(rule_spans, "rules")
    system = FineTuning(tiny_model.base_lm, weighting, RATE)
    system.adapt(STREAM.documents[:2])
    system.adapt(STREAM.documents[2:])
    expected = plain_loop(
        tiny_model,
        STREAM.documents,
        (lambda *_: 1.0) if kind == "uniform" else lambda text, ids, place: salient(tiny_model, text, ids, place),
    )
    found = dict(system.lm.model.named_parameters())
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        torch.testing.assert_close(found[name], weight, rtol=1e-4, atol=1e-5, msg=name)
    for name, weight in tiny_model.base_lm.model.named_parameters():
        assert torch.equal(weight, before[name]), f"{name} of the model itself changed"


def test_long_documents_are_read_in_parts_and_empty_ones_refused(tiny_model: MACModel) -> None:
    system = FineTuning(tiny_model.base_lm, UniformWeights(), RATE)
    before = system.lm.model.get_input_embeddings().weight.clone()
    system.adapt([Document("long", "Rain fell on Kell. " * 400)])
    assert not torch.equal(system.lm.model.get_input_embeddings().weight, before)
    with pytest.raises(DocumentError, match="must not be empty"):
        system.adapt([Document("empty", " ")])


class Knowing(System):
    """Knows the answers to some questions."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.documents = 0

    def adapt(self, documents: Sequence[Document]) -> None:
        self.documents += len(documents)

    def answer(self, questions: Sequence[str]) -> list[str]:
        assert self.documents == len(STREAM.documents)
        known = {question.question: question.answers[0] for question in STREAM.questions[: self.count]}
        return [known.get(question, "zzz") for question in questions]


def test_the_search_takes_the_best_rate_and_the_smallest_of_equals() -> None:
    known = {1e-2: 3, 1e-3: 5, 1e-4: 5, 1e-5: 0}
    rate, found = search_learning_rate(lambda r: Knowing(known[r]), tuple(known), STREAM.documents, STREAM.questions)
    assert rate == 1e-4
    assert found == {rate: pytest.approx(count / 6) for rate, count in known.items()}


TEXT = (
    "On May 3, 1999 the Lund Bank paid $1,200.50 to Ada Voss. Rain fell. It was her 2nd prize from University of Kell."
)


def test_rules_find_names_dates_and_numbers() -> None:
    found = {TEXT[first:end] for first, end in rule_spans(TEXT)}
    assert {"May 3, 1999", "Lund Bank", "$1,200.50", "Ada Voss", "2nd", "University of Kell"} <= found
    covered = {TEXT[place] for first, end in rule_spans(TEXT) for place in range(first, end)}
    assert covered
    for ordinary in ("Rain", "It ", "paid", "prize"):
        at = TEXT.index(ordinary)
        assert not any(first <= at < end for first, end in rule_spans(TEXT)), ordinary


@pytest.fixture
def pipelines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder from which Python imports packages, with no spaCy pipeline beyond those put there."""
    kept = [folder for folder in sys.path if not list(Path(folder or ".").glob("en_core_web*"))]
    monkeypatch.setattr(sys, "path", [str(tmp_path), *kept])
    return tmp_path


def installed(folder: Path, name: str) -> None:
    """A spaCy pipeline that knows the entity Lund Bank, as pip would install it."""
    pipeline = spacy.blank("en", meta={"name": name.removeprefix("en_"), "version": "1.0.0"})
    pipeline.add_pipe("entity_ruler").add_patterns([{"label": "ORG", "pattern": "Lund Bank"}])
    (folder / name).mkdir()
    pipeline.to_disk(folder / name / f"{name}-1.0.0")
    shutil.copy(folder / name / f"{name}-1.0.0" / "meta.json", folder / name)
    (folder / name / "__init__.py").write_text(
        "from spacy.util import load_model_from_init_py\n"
        "def load(**overrides):\n"
        "    return load_model_from_init_py(__file__, **overrides)\n"
    )
    about = folder / f"{name}-1.0.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0.0\n")
    (about / "entry_points.txt").write_text(f"[spacy_models]\n{name} = {name}\n")


def test_without_an_english_pipeline_rules_find_the_spans(pipelines: Path) -> None:
    found = salient_spans()
    assert found.settings["spans"] == RULES


def test_an_installed_english_pipeline_finds_the_spans(pipelines: Path, tiny_model: MACModel) -> None:
    installed(pipelines, "en_names_sm")
    found = salient_spans()
    assert found.settings["spans"] == "spaCy en_names_sm"
    (passage,) = passages(tiny_model.base_lm.prompts, TEXT, 1024)
    kept = [span for span, weight in zip(passage.spans, found.weights(passage), strict=True) if weight]
    assert "".join(passage.text[first:end] for first, end in kept).strip() == "Lund Bank"


@pytest.mark.parametrize("window", [1024, 20])
def test_passages_hold_all_tokens_of_the_document_as_the_prompt_writes_it(tiny_model: MACModel, window: int) -> None:
    prompts = tiny_model.base_lm.prompts
    parts = list(passages(prompts, TEXT, window))
    assert all(len(part.ids) <= window for part in parts)
    joined = [token for part in parts for token in part.ids.tolist()[len(prompts.start) :]]
    assert prompts.start + joined == prompts.prompt_start([TEXT])
    assert "".join(part.text[first:end] for part in parts for first, end in part.spans) == TEXT + "\n"
