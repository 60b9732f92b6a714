"""Online fine-tuning against a plain loop, and its learning-rate search."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import pytest
import torch

from eval.baselines.finetuning import (
    FineTuning,
    SalientSpanWeights,
    TokenWeighting,
    UniformWeights,
    search_learning_rate,
)
from eval.harness.systems import System
from mac_rag.data.newswire.generate import generate
from mac_rag.data.types import Document
from mac_rag.errors import DocumentError
from mac_rag.model import MACModel
from pipelines.corpora.salient_spans import rule_spans

STREAM = generate("test", 6, seed=2)
ASKED = [question.question for question in STREAM.questions]
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
