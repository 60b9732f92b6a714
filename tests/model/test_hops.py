"""A model whose slots follow one another: its losses, a bank on disk, banks in shards, a checkpoint, its refusals."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from mac_rag.config import AggregationConfig, AttentionConfig
from mac_rag.data.types import Document
from mac_rag.engine import MACEngine
from mac_rag.errors import ConfigError
from mac_rag.memory import MemoryBank
from mac_rag.model import MACModel
from mac_rag.model.stored_names import fingerprint_fields
from pipelines.objective import Batch, LossWeights, contrastive_of_slots, mac_loss
from tests.helpers import mac_config
from tests.model.test_slots import QUESTIONS, TEXTS, with_slots

Folder = Callable[[str], Path]


def with_hops(model_folder: Folder, slots: int = 2) -> MACModel:
    return with_slots(model_folder, slots, hops=True)


@torch.no_grad()
def test_a_bank_on_disk_gives_what_the_documents_give(model_folder: Folder, tmp_path: Path) -> None:
    """With a sharp prior, most of its rows cannot matter, and are not read."""
    model, texts = with_hops(model_folder), [f"{text} {number}" for text in TEXTS for number in range(10)]
    for block in model.aggregation.blocks:
        block.prior_scale.fill_(40.0)
    with MemoryBank.create(tmp_path / "bank", model.fingerprint, rows="fp32") as bank:
        MACEngine(model, bank).adapt([Document(str(number), text) for number, text in enumerate(texts)])
    engine = MACEngine(model, MemoryBank.open(tmp_path / "bank"))
    memory = model.amortize(texts)
    torch.testing.assert_close(engine.aggregate(QUESTIONS), model.aggregate(QUESTIONS, memory), rtol=1e-4, atol=1e-5)
    names, shares = engine.document_attention(QUESTIONS)
    assert names == [str(number) for number in range(len(texts))]
    torch.testing.assert_close(shares, model.attention(QUESTIONS, memory), rtol=1e-4, atol=1e-5)


def test_a_checkpoint_keeps_hops(model_folder: Folder, tmp_path: Path) -> None:
    model = with_hops(model_folder)
    model.save_pretrained(tmp_path / "saved")
    loaded = MACModel.from_pretrained(tmp_path / "saved", device="cpu")
    assert loaded.fingerprint == model.fingerprint
    memory = model.amortize(TEXTS)
    torch.testing.assert_close(loaded.aggregate(QUESTIONS, memory), model.aggregate(QUESTIONS, memory))


def test_a_model_without_hops_keeps_its_fingerprint(model_folder: Folder) -> None:
    sizes = AggregationConfig(blocks=1, prior_width=8, slots=2)
    config = mac_config(model_folder("llama"), aggregation=sizes)
    assert "hops" not in fingerprint_fields(config)
    hops = config.model_copy(update={"aggregation": sizes.model_copy(update={"hops": True})})
    assert '"hops":true' in fingerprint_fields(hops)


@pytest.mark.parametrize(
    ("strategy", "message"),
    [("preselect", "chooses documents by the question alone"), ("hierarchical", "knows no slots")],
)
def test_strategies_that_cannot_follow_are_refused(model_folder: Folder, strategy: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        MACEngine(with_hops(model_folder), attention=AttentionConfig(strategy=strategy))


def test_training_reaches_the_hops(model_folder: Folder) -> None:
    """By the answers that the LM reads from the second slot, and by the documents that it has to find."""
    batch = Batch(TEXTS, QUESTIONS, answers=["Lima", "1980"], gold=[1, 3], further=[[0], [2]])
    for weights in (LossWeights(answer=1), LossWeights(answer=0, contrastive=1)):
        model = with_hops(model_folder).train()
        losses, _ = mac_loss(model, batch, weights)
        losses["loss"].backward()
        assert model.aggregation.hops is not None
        grads = [parameter.grad for parameter in model.aggregation.hops.parameters()]
        assert all(grad is not None and grad.abs().sum() > 0 for grad in grads)


def test_a_slot_is_trained_on_what_a_question_still_needs() -> None:
    """Worked by hand: a slot has any needed document as its target, but none that a slot before it ranks first."""
    first = torch.tensor([[2.0, 1.0, 0.0], [0.0, 3.0, 1.0], [1.0, 0.0, 2.0]])
    second = torch.tensor([[5.0, 1.0, 0.0], [0.0, 3.0, 1.0], [1.0, 0.5, 9.0]])
    needed = torch.tensor([[1, 1, 0], [0, 1, 0], [1, 1, 0]]).bool()
    losses = [
        -torch.log(functional.softmax(first[0], 0)[:2].sum()),
        -torch.log(functional.softmax(first[1], 0)[1]),
        -torch.log(functional.softmax(first[2], 0)[:2].sum()),
        -torch.log(functional.softmax(second[0, 1:], 0)[0]),  # the first document is found
        # The second question has found all that it needs. The third one ranked a document first that it does not need.
        torch.zeros(()),
    ]
    torch.testing.assert_close(contrastive_of_slots([first, second], needed), torch.stack(losses).mean())


def test_one_document_is_plain_cross_entropy() -> None:
    scores, gold = torch.randn(4, 6), torch.tensor([0, 5, 2, 2])
    needed: Tensor = functional.one_hot(gold, 6).bool()
    torch.testing.assert_close(contrastive_of_slots([scores], needed), functional.cross_entropy(scores, gold))
