"""First marks of slots: behind all slots the LM predicts what it predicts behind the first one alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn import functional

from mac_rag.data.newswire.generate import generate
from mac_rag.data.types import QADataset
from mac_rag.model import MACModel
from mac_rag.nn.memory_slots import MemorySlots
from pipelines.tasks.kv_regression import fit_slot_marks, init_by_kv_regression
from tests.pipelines.test_kv_regression import around

DATA = generate("train", 60, seed=3, questions_per_document=2)
UNANSWERED = replace(DATA, questions=[replace(question, answers=[]) for question in DATA.questions])


def with_slots(count: int) -> MACModel:
    """The shipped mac-tiny, which reads its memory, with further slots that it was not trained with."""
    model = MACModel.from_pretrained("mac-tiny", device="cpu")
    model.aggregation.slots = MemorySlots(count, model.base_lm.width)
    return model


@torch.no_grad()
def divergence(model: MACModel) -> float:
    """How far predictions behind all slots are from those behind the first one (KL), on held-out questions."""
    held_out, prompts = generate("val", 40), model.base_lm.prompts
    questions = [question.question for question in held_out.questions]
    phi = model.aggregate(questions, model.amortize([document.text for document in held_out.documents]))
    rows = [prompts.prompt(q) for q in questions], [prompts.answer(q.answers[0]) for q in held_out.questions]
    alone, together = (
        model.base_lm.answer_logits(*rows, model.modulation(tokens)).log_softmax(-1)
        for tokens in (phi[:, : model.config.tokens], phi)
    )
    return float(functional.kl_div(together, alone, log_target=True, reduction="batchmean"))


@pytest.mark.parametrize(
    ("slots", "data"),
    [
        pytest.param(3, DATA, id="three"),
        pytest.param(2, DATA, id="two", marks=pytest.mark.slow),
        pytest.param(2, UNANSWERED, id="questions without answers", marks=pytest.mark.slow),
    ],
)
def test_improbable_documents_are_heard_little(slots: int, data: QADataset) -> None:
    model = with_slots(slots)
    unmarked = divergence(model)
    fit_slot_marks(model, data)
    assert divergence(model) < 0.25 * unmarked


def test_a_model_without_slots_stays_as_it_is() -> None:
    model = MACModel.from_pretrained("mac-tiny", device="cpu")
    before = model.fingerprint
    fit_slot_marks(model, DATA)
    assert model.fingerprint == before


def test_kv_regression_fits_them(tmp_path: Path) -> None:
    model = around("llama", tmp_path, slots=2)
    init_by_kv_regression(model, DATA)
    assert model.aggregation.slots is not None
    assert model.aggregation.slots.faint.any()
