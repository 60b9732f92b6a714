"""Every way of reading a bank gives what plain attention over the bank gives, and sees only what it may see."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mac_rag.bank import MemoryBank
from mac_rag.bank.base_reader import RecentQuestions
from mac_rag.bank.reader import BankReader, highest
from mac_rag.config import AttentionConfig
from mac_rag.data.newswire.generate import generate
from mac_rag.data.types import Document
from mac_rag.errors import BankError, ConfigError
from mac_rag.model import MACModel
from mac_rag.nn.memory_tokens import MemoryTokens
from mac_rag.nn.unpadded_bert import Reading
from tests.bank.helpers import memory

Strategy = Literal["streaming", "preselect", "hierarchical"]
STRATEGIES: tuple[Strategy, ...] = ("streaming", "preselect", "hierarchical")
NEWS = generate("train", 12)
QUESTIONS = [question.question for question in NEWS.questions[:3]]


def bank_of(model: MACModel, documents: list[Document]) -> MemoryBank:
    bank = MemoryBank(model.fingerprint)
    bank.put(documents, model.amortize([document.text for document in documents]))
    return bank


def exact(strategy: Strategy) -> AttentionConfig:
    """Of a size that loses nothing."""
    return AttentionConfig(strategy=strategy, preselected=100, subgroup=100)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("cache_bytes", [0, 2**30])
def test_all_strategies_agree_where_they_lose_nothing(
    tiny_model: MACModel, strategy: Strategy, cache_bytes: int
) -> None:
    bank = bank_of(tiny_model, NEWS.documents)
    config = exact(strategy).model_copy(update={"cache_bytes": cache_bytes})
    found = BankReader(tiny_model, bank, config).aggregate(QUESTIONS)
    torch.testing.assert_close(found.phi, tiny_model.aggregate(QUESTIONS, bank.phi), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(found.discarded, torch.zeros(3))


@settings(max_examples=40, deadline=None)
@given(
    rows=st.lists(st.integers(1, 3), min_size=1, max_size=7),
    merged=st.integers(0, 3),
    left_out=st.none() | st.integers(0, 6),
    seed=st.integers(0, 99),
)
def test_the_mass_of_documents_is_that_of_their_rows(
    rows: list[int], merged: int, left_out: int | None, seed: int
) -> None:
    names = [f"document {number}" for number in range(len(rows))]
    bank = MemoryBank("model")
    bank.put([Document(name, "") for name in names], memory(sum(rows)), rows)
    if merged > 1:
        bank.merge(names[:merged], memory(2))
    allowed = None if left_out is None else {name for name in names if name != f"document {left_out}"}
    mass = torch.rand(2, len(bank.row_keys), generator=torch.Generator().manual_seed(seed))
    expected: list[dict[str, float]] = [{}, {}]
    for row, members in enumerate(bank.row_members):
        if allowed is None or allowed.issuperset(members):
            for question, name in itertools.product(range(2), members):
                share = float(mass[question, row]) / len(members)
                expected[question][name] = expected[question].get(name, 0.0) + share
    reader = BankReader(MACModel.from_pretrained("mac-tiny"), bank, exact("streaming"))
    if not expected[0]:
        with pytest.raises(BankError, match="allowed"):
            reader.by_document(mass, allowed)
        return
    found = reader.by_document(mass, allowed)
    ids, of_all = found.of_all()
    for question, wanted in enumerate(expected):
        assert dict(zip(ids, of_all[question].tolist(), strict=True)) == pytest.approx(wanted)
        assert found.of(question, [*names, "nobody"]) == pytest.approx(wanted)
        first = found.of_questions([question]).highest(0, 3)
        assert list(first.values()) == pytest.approx(sorted(wanted.values(), reverse=True)[:3])
        assert first == pytest.approx({name: wanted[name] for name in first})
        assert found.highest(question, 99) == pytest.approx(wanted)


def test_a_question_asked_again_costs_nothing_until_the_bank_changes(
    tiny_model: MACModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoded: list[int] = []
    forward = tiny_model.input_encoder.forward

    def counting(rows: list[list[int]], read: Reading) -> MemoryTokens:
        encoded.append(len(rows))
        return forward(rows, read)

    monkeypatch.setattr(tiny_model.input_encoder, "forward", counting)
    bank = bank_of(tiny_model, NEWS.documents[:8])
    reader = BankReader(tiny_model, bank, exact("streaming"))
    first = reader.aggregate(QUESTIONS[:2])
    again = reader.aggregate([QUESTIONS[1], QUESTIONS[2], QUESTIONS[1]])
    assert encoded == [2, 1]
    torch.testing.assert_close(again.phi[0], first.phi[1], atol=0, rtol=0)
    torch.testing.assert_close(again.phi[2], first.phi[1], atol=0, rtol=0)
    torch.testing.assert_close(again.phi, tiny_model.aggregate([QUESTIONS[i] for i in (1, 2, 1)], bank.phi))
    bank.delete(NEWS.documents[0].id)
    torch.testing.assert_close(reader.aggregate(QUESTIONS).phi, tiny_model.aggregate(QUESTIONS, bank.phi))
    tiny_model.aggregation.use_prior = False
    torch.testing.assert_close(reader.aggregate(QUESTIONS).phi, tiny_model.aggregate(QUESTIONS, bank.phi))


def test_least_recent_questions_leave_a_full_cache() -> None:
    recent = RecentQuestions(max_bytes=12)  # three of one number each
    asked: list[str] = []

    def compute(new: Sequence[str]) -> tuple[torch.Tensor, torch.Tensor]:
        asked.extend(new)
        return torch.tensor([[[float(text)]] for text in new]), torch.zeros(len(new))

    for questions in (["1", "2"], ["3"], ["1"], ["4"], ["1", "3", "2"]):
        phi, _ = recent.look_up(questions, None, compute)
        assert phi.flatten().tolist() == [float(text) for text in questions]
    assert asked == ["1", "2", "3", "4", "2"]
    # What is kept of a batch does not hold the rest of it.
    assert {phi.untyped_storage().nbytes() for phi, _ in recent._results.values()} == {4}


def test_preselection_follows_the_bank_and_tells_what_it_left_out(tiny_model: MACModel) -> None:
    bank = bank_of(tiny_model, NEWS.documents[:8])
    reader = BankReader(tiny_model, bank, AttentionConfig(strategy="preselect", preselected=2))
    reader.aggregate(QUESTIONS)
    bank.put(NEWS.documents[8:], tiny_model.amortize([document.text for document in NEWS.documents[8:]]))
    bank.delete(NEWS.documents[0].id)
    found = reader.aggregate(QUESTIONS)
    encoder = tiny_model.input_encoder
    question = encoder([encoder.ids(text) for text in QUESTIONS])
    scores = tiny_model.aggregation.prior_scores(question, tiny_model.project(bank.phi))
    best = scores.topk(2).indices
    for i, text in enumerate(QUESTIONS):
        alone = tiny_model.aggregate([text], bank.phi[best[i]])
        torch.testing.assert_close(found.phi[i : i + 1], alone, atol=1e-4, rtol=1e-4)
    kept = scores.softmax(1).gather(1, best).sum(1)
    torch.testing.assert_close(found.discarded, 1 - kept, atol=1e-5, rtol=1e-4)
    assert reader.attention_mass(QUESTIONS).gt(0).sum(1).tolist() == [2, 2, 2]


def test_no_attention_to_documents_under_algorithm_3(tiny_model: MACModel) -> None:
    reader = BankReader(tiny_model, bank_of(tiny_model, NEWS.documents), exact("hierarchical"))
    with pytest.raises(ConfigError, match="hierarchical"):
        reader.attention_mass(QUESTIONS)


@torch.no_grad()
def test_one_row_is_not_ahead_of_others(tiny_model: MACModel) -> None:
    bank = bank_of(tiny_model, NEWS.documents)
    reader = BankReader(tiny_model, bank, AttentionConfig())
    encoded = tiny_model.input_encoder([tiny_model.input_encoder.ids(question) for question in QUESTIONS])
    network = tiny_model.aggregation
    assert network.prior is not None
    scores = network.prior_scores(encoded, tiny_model.project(bank.phi))
    scale = network.prior.log_scale.exp()
    found = reader.prior_evidence(QUESTIONS)
    assert found is not None
    torch.testing.assert_close(found[:, 0], scores.amax(1) / scale)
    share = scores.double().softmax(1).amax(1)
    torch.testing.assert_close(found[:, 1].double(), (share / (1 - share + 1e-3)).log(), rtol=1e-4, atol=1e-4)
    one = NEWS.documents[3].id
    alone = reader.prior_evidence(QUESTIONS, {one})
    assert alone is not None
    torch.testing.assert_close(alone, torch.stack([scores[:, 3] / scale, torch.zeros(len(QUESTIONS))], 1))
    single = BankReader(tiny_model, bank_of(tiny_model, NEWS.documents[3:4]), AttentionConfig())
    torch.testing.assert_close(single.prior_evidence(QUESTIONS), alone)
    two = reader.prior_evidence(QUESTIONS, {one, NEWS.documents[5].id})
    assert two is not None
    difference = (scores[:, 3] - scores[:, 5]).abs().clamp(max=4.0)
    torch.testing.assert_close(two[:, 1].clamp(max=4.0), difference, rtol=0.1, atol=0.05)


@settings(max_examples=40, deadline=None)
@given(rows=st.integers(1, 60), n=st.integers(1, 60), questions=st.integers(1, 5), scale=st.floats(0.1, 30))
def test_rows_are_preselected_by_all_scores_sorted(rows: int, n: int, questions: int, scale: float) -> None:
    scores = scale * torch.randn(questions, rows, generator=torch.Generator().manual_seed(rows), dtype=torch.float64)
    index, others = highest(scores, min(n, rows))
    best = [sorted(sorted(range(rows), key=row.__getitem__)[-n:]) for row in scores.tolist()]
    assert index.tolist() == best
    shares = [1 - float(row[kept].sum()) for row, kept in zip(scores.softmax(-1), best, strict=True)]
    torch.testing.assert_close(others, torch.tensor(shares, dtype=torch.float64), atol=1e-12, rtol=1e-9)
