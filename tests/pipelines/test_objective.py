"""The training objective: equation 2 against its definition, and back-propagation dropout against all its subsets."""

from __future__ import annotations

import dataclasses
from itertools import combinations

import pytest
import torch
from torch import Tensor

from mac_rag.data.newswire.generate import generate
from mac_rag.errors import ConfigError
from mac_rag.model import MACModel
from mac_rag.nn.memory_tokens import MemoryTokens
from pipelines import objective
from pipelines.objective import (
    Batch,
    LossWeights,
    amortize_with_dropout,
    contrastive_loss,
    mac_loss,
)

STREAM = generate("val", 4)
BATCH = Batch(
    documents=[document.text for document in STREAM.documents],
    questions=[question.question for question in STREAM.questions],
    answers=[question.answers[0] for question in STREAM.questions],
    gold=[0, 1, 2, 3],
)


def gradients(model: MACModel, phi: Tensor) -> dict[str, Tensor]:
    """Gradients of one loss that reads all memory tokens."""
    model.zero_grad()
    weights = torch.linspace(-1, 1, phi.numel(), dtype=phi.dtype).view_as(phi)
    (phi * weights).tanh().sum().backward()
    return {name: p.grad.clone() for name, p in model.amortization.named_parameters() if p.grad is not None}


def test_backprop_dropout_is_unbiased(tiny_model: MACModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Averaged over every subset, the gradient is the full gradient; the values never change."""
    tiny_model.double()
    rows = [tiny_model.amortization.ids(document) for document in BATCH.documents]
    whole = tiny_model.amortization(rows).stacked()
    full = gradients(tiny_model, whole)
    subsets = list(combinations(range(4), 2))
    mean = {name: torch.zeros_like(gradient) for name, gradient in full.items()}
    for subset in subsets:
        order = torch.tensor([*subset, *(i for i in range(4) if i not in subset)])
        monkeypatch.setattr(objective.torch, "randperm", lambda _, order=order: order)
        phi = amortize_with_dropout(tiny_model, rows, 0.5).stacked()
        torch.testing.assert_close(phi, whole)
        for name, gradient in gradients(tiny_model, phi).items():
            mean[name] += gradient / len(subsets)
    for name, gradient in full.items():
        torch.testing.assert_close(mean[name], gradient)


def test_backprop_dropout_encodes_only_the_subset_with_gradients(tiny_model: MACModel) -> None:
    seen: list[tuple[int, bool]] = []
    tiny_model.amortization.network.register_forward_hook(
        lambda module, inputs, output: seen.append((len(output), output.tokens.requires_grad))
    )
    rows = [tiny_model.amortization.ids(document) for document in BATCH.documents]
    amortize_with_dropout(tiny_model, rows, 0.75)
    # Texts of unlike lengths are not encoded together.
    assert [sum(n for n, live in seen if live == wanted) for wanted in (True, False)] == [1, 3]
    assert amortize_with_dropout(tiny_model, rows, 0.99).tokens.requires_grad  # at least one always has a gradient


@pytest.mark.parametrize("dropout", [1.0, -0.1])
def test_impossible_dropout(tiny_model: MACModel, dropout: float) -> None:
    with pytest.raises(ConfigError, match=str(dropout)):
        amortize_with_dropout(tiny_model, [[1, 5]], dropout)


def test_equation_2_is_the_likelihood_of_the_answers_under_the_aggregate(tiny_model: MACModel) -> None:
    terms, phi = mac_loss(tiny_model, BATCH, LossWeights())
    assert set(terms) == {"loss", "answer"}
    total = count = 0.0
    modulations = tiny_model.aggregate(BATCH.questions, phi.stacked())
    lm = tiny_model.base_lm
    for question, answer, modulation in zip(BATCH.questions, BATCH.answers, modulations, strict=True):
        for place, token in enumerate(ids := lm.prompts.answer(answer)):
            prompt = lm.prompts.prompt(question) + ids[:place]
            total += lm.answer_loss([prompt], [[token]], tiny_model.modulation(modulation[None])).item()
            count += 1
    assert terms["loss"].item() == pytest.approx(total / count, rel=1e-4)


def test_contexts_beyond_the_window_are_shortened(tiny_model: MACModel) -> None:
    prompts, window = tiny_model.base_lm.prompts, tiny_model.context_window
    long = " ".join(BATCH.documents * (window // 20))
    assert len(prompts.prompt(BATCH.questions[0], [long])) > window
    whole, cut = [], []
    for question, answer in zip(BATCH.questions, BATCH.answers, strict=True):
        whole.append(["Some text.", long])
        cut.append(prompts.fit_to_window(question, whole[-1], window - len(prompts.answer(answer))).contexts)
    given = [dataclasses.replace(BATCH, contexts=contexts) for contexts in (whole, cut)]
    losses = [mac_loss(tiny_model, batch, LossWeights())[0]["answer"].item() for batch in given]
    assert losses[0] == losses[1]


def test_some_questions_are_answered_without_memory(tiny_model: MACModel) -> None:
    bare = [True, False, False, True]
    contexts = [["Some text."], ["Some text."], [], []]
    batch = dataclasses.replace(BATCH, contexts=contexts, without_memory=bare)
    prompts = tiny_model.base_lm.prompts
    answers = [prompts.answer(answer) for answer in BATCH.answers]
    total = 0.0
    for index in range(4):
        if bare[index]:
            prompt = prompts.prompt(BATCH.questions[index], contexts[index])
            total += tiny_model.base_lm.answer_loss([prompt], [answers[index]], None).sum().item()
        else:
            one = Batch(BATCH.documents, [BATCH.questions[index]], [BATCH.answers[index]], [index], [contexts[index]])
            total += mac_loss(tiny_model, one, LossWeights())[0]["loss"].item() * len(answers[index])
    loss = mac_loss(tiny_model, batch, LossWeights())[0]["loss"].item()
    assert loss == pytest.approx(total / sum(map(len, answers)), rel=1e-5)


def test_each_term_counts_by_its_weight(tiny_model: MACModel) -> None:
    weights = LossWeights(answer=0.5, direct=2, reconstruction=3, contrastive=0.25)
    terms, _ = mac_loss(tiny_model, BATCH, weights)
    expected = sum(weight * terms[name] for name, weight in weights)
    torch.testing.assert_close(terms["loss"].detach(), expected)


def test_the_contrastive_term_prefers_the_questions_own_document(tiny_model: MACModel) -> None:
    weights = LossWeights(answer=0, contrastive=1)
    optimizer = torch.optim.Adam(tiny_model.aggregation.parameters(), 1e-2)
    for _ in range(60):
        loss = mac_loss(tiny_model, BATCH, weights)[0]["loss"]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.1
    negatives = MemoryTokens(tiny_model.amortize(["Another thing.", "And one more."]))
    with_negatives = mac_loss(tiny_model, BATCH, weights, negatives=negatives)[0]["loss"]
    assert with_negatives > mac_loss(tiny_model, BATCH, weights)[0]["loss"]


@torch.no_grad()
@pytest.mark.parametrize("distractors", [1, 2, 9])
def test_distractors_are_the_others_of_the_highest_prior(tiny_model: MACModel, distractors: int) -> None:
    """The answer loss with them is that over a bank that holds them, too."""
    others = MemoryTokens(tiny_model.amortize([document.text for document in generate("val", 12).documents[4:]]))
    phi = MemoryTokens(tiny_model.amortize(BATCH.documents))
    network = tiny_model.aggregation
    encoded = tiny_model.input_encoder([tiny_model.input_encoder.ids(question) for question in BATCH.questions])
    best = [row.tolist() for row in network.prior_scores(encoded, network.project(others)).argsort(1, descending=True)]
    chosen = sorted({place for row in best for place in row[:distractors]})
    assert 0 < len(chosen) <= len(others)
    terms, returned = mac_loss(tiny_model, BATCH, LossWeights(), negatives=others, distractors=distractors)
    assert len(returned) == len(BATCH.documents)
    bank = network.project(MemoryTokens.cat([phi, others[chosen]]))
    modulation = tiny_model.modulation(network(encoded, bank)[0])
    prompts = tiny_model.base_lm.prompts
    answers = [prompts.answer(answer) for answer in BATCH.answers]
    asked = [prompts.prompt(question) for question in BATCH.questions]
    expected = tiny_model.base_lm.answer_loss(asked, answers, modulation).sum() / sum(map(len, answers))
    torch.testing.assert_close(terms["answer"], expected, rtol=1e-4, atol=1e-5)


def test_contrastive_loss_needs_a_prior(tiny_model: MACModel) -> None:
    tiny_model.aggregation.prior = None
    with pytest.raises(ConfigError, match="prior_width"):
        mac_loss(tiny_model, BATCH, LossWeights(contrastive=1))
    with pytest.raises(ConfigError, match="distractors are chosen by the document prior"):
        mac_loss(tiny_model, BATCH, LossWeights(), distractors=1)


def test_any_document_that_a_question_needs_is_a_target_of_the_prior() -> None:
    """Worked by hand; with one document it is plain cross-entropy."""
    scores = torch.tensor([[2.0, 1.0, 0.0], [0.0, 3.0, 1.0]])
    needed = torch.tensor([[1, 1, 0], [0, 1, 0]]).bool()
    losses = [-torch.log(scores[0].softmax(0)[:2].sum()), -torch.log(scores[1].softmax(0)[1])]
    torch.testing.assert_close(contrastive_loss(scores, needed), torch.stack(losses).mean())
    scores, gold = torch.randn(4, 6), torch.tensor([0, 5, 2, 2])
    needed = torch.nn.functional.one_hot(gold, 6).bool()
    torch.testing.assert_close(contrastive_loss(scores, needed), torch.nn.functional.cross_entropy(scores, gold))


def test_sets_that_share_a_pass_do_not_see_each_other(tiny_model: MACModel) -> None:
    """The loss and its gradients are those of the sets alone, weighted by their answers' tokens."""
    tiny_model.double()
    weights, prompts = LossWeights(), tiny_model.base_lm.prompts

    def part(first: int, size: int, **options: int) -> tuple[Tensor, int]:
        some = slice(first, first + size)
        batch = Batch(BATCH.documents[some], BATCH.questions[some], BATCH.answers[some], list(range(size)))
        tokens = sum(len(prompts.answer(answer)) for answer in batch.answers)
        return mac_loss(tiny_model, batch, weights, **options)[0]["loss"], tokens

    (one, ones), (other, others), (both, _) = part(0, 2), part(2, 2), part(0, 4, context_set=2)
    expected = (ones * one + others * other) / (ones + others)
    torch.testing.assert_close(both, expected)
    assert abs(float(part(0, 4)[0] - both)) > 1e-6
    trained = [p for p in tiny_model.aggregation.parameters() if p.requires_grad]
    for ours, theirs in zip(
        torch.autograd.grad(both, trained, allow_unused=True),
        torch.autograd.grad(expected, trained, allow_unused=True), strict=True,
    ):  # fmt: skip
        if theirs is not None:
            torch.testing.assert_close(ours, theirs)
