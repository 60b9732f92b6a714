"""A model whose phi* has slots: through a bank on disk, an engine, a checkpoint, and a step of training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from mac_rag.bank import MemoryBank
from mac_rag.config import AggregationConfig, AttentionConfig, ModulationConfig, PromptFormat
from mac_rag.data.types import Document
from mac_rag.engine import MACEngine
from mac_rag.errors import ConfigError
from mac_rag.model import MACModel
from pipelines.objective import Batch, LossWeights, mac_loss
from pipelines.tasks.fit_recency import with_recency_term
from tests.distributed.local_shards import assert_read_alike, readers_of_one
from tests.helpers import Folder, mac_config, reloaded

TEXTS = [f"{name} was born in {place} in {year}." for name, place, year in
         (("Ann", "Kyiv", 1950), ("Bob", "Lima", 1960), ("Cid", "Oslo", 1970), ("Dee", "Rome", 1980))]  # fmt: skip
QUESTIONS = ["Where was Bob born?", "When was Dee born?"]


def with_slots(model_folder: Folder, slots: int = 2, kind: Any = "prefix", **values: Any) -> MACModel:
    torch.manual_seed(0)
    sizes = AggregationConfig(blocks=2, heads=2, head_width=8, prior_width=16, slots=slots)
    config = mac_config(model_folder("llama"), aggregation=sizes, modulation=ModulationConfig(kind=kind), **values)
    model = MACModel.from_config(config, device="cpu")
    torch.nn.init.normal_(model.aggregation.slots.places)
    torch.nn.init.normal_(model.aggregation.slots.faint)
    return model.eval()


@torch.no_grad()
@pytest.mark.parametrize("strategy", ["streaming", "preselect"])
def test_a_bank_on_disk_gives_what_the_documents_give(model_folder: Folder, tmp_path: Path, strategy: Any) -> None:
    """With a sharp prior, most of its rows cannot matter, and are not read."""
    model, texts = with_slots(model_folder), [f"{text} {number}" for text in TEXTS for number in range(10)]
    for block in model.aggregation.blocks:
        block.prior_scale.fill_(40.0)
    with MemoryBank.create(tmp_path / "bank", model.fingerprint, rows="fp32") as bank:
        MACEngine(model, bank).adapt([Document(str(number), text) for number, text in enumerate(texts)])
    engine = MACEngine(model, MemoryBank.open(tmp_path / "bank"), attention=AttentionConfig(strategy=strategy))
    phi = engine.aggregate(QUESTIONS)
    expected = model.aggregate(QUESTIONS, model.amortize(texts))
    torch.testing.assert_close(phi, expected, rtol=1e-4, atol=1e-5)
    assert phi.shape[1] == 2 * model.config.tokens


def test_a_checkpoint_keeps_slots(model_folder: Folder, tmp_path: Path) -> None:
    model = with_slots(model_folder)
    loaded = reloaded(model, tmp_path / "saved")
    assert loaded.fingerprint == model.fingerprint
    memory = model.amortize(TEXTS)
    torch.testing.assert_close(loaded.aggregate(QUESTIONS, memory), model.aggregate(QUESTIONS, memory))


@pytest.mark.parametrize("kind", ["prefix", "lora", "film"])
def test_training_reaches_the_marks(model_folder: Folder, kind: Any) -> None:
    model = with_slots(model_folder, kind=kind).train()
    batch = Batch(documents=TEXTS, questions=QUESTIONS, answers=["Lima", "1980"], gold=[1, 3])
    if kind != "prefix":  # these begin without an effect
        for parameter in model.modulation.parameters():
            torch.nn.init.normal_(parameter, std=0.1)
    losses, _ = mac_loss(model, batch, LossWeights(answer=1, direct=1))
    losses["loss"].backward()
    for parameter in model.aggregation.slots.parameters():
        assert parameter.grad is not None
        assert parameter.grad.abs().sum() > 0


@pytest.mark.parametrize("recency", [False, True], ids=["", "recency"])
@pytest.mark.parametrize("shards", [1, 3])
def test_a_bank_in_shards_is_read_as_one(model_folder: Folder, tmp_path: Path, shards: int, recency: bool) -> None:
    """Also where a shard holds no document that a slot sees, and without the prior."""
    model = with_slots(model_folder, slots=3)
    model = with_recency_term(model) if recency else model
    documents = [
        Document(f"{number}", f"{text} {number}", {"date": 2001 + number % 3}) for number, text in enumerate(TEXTS * 2)
    ]
    found, expected = readers_of_one(tmp_path / "shards", model, shards, documents)
    assert_read_alike(found, expected, QUESTIONS)
    for names in ({"0"}, {"1", "5"}, {"0", "3", "6"}):
        assert_read_alike(found, expected, QUESTIONS, names)
    with model.without_document_prior():
        assert_read_alike(found, expected, QUESTIONS)
        assert_read_alike(found, expected, QUESTIONS, {"1", "5"})


def test_the_lm_looks_at_the_slots_of_a_bank_in_shards_as_at_those_of_one(model_folder: Folder, tmp_path: Path) -> None:
    torch.manual_seed(0)
    sizes = AggregationConfig(
        blocks=1, heads=2, head_width=8, prior_width=16, slots=3, slot_cutoff=6.0, reading_cutoff=0.5
    )
    config = mac_config(
        model_folder("prefix_lm"),
        aggregation=sizes,
        modulation=ModulationConfig(kind="prompt", entry_layer=1),
        prompt=PromptFormat(parallel_documents=True, abstention="I don't know"),
    )
    model = MACModel.from_config(config, device="cpu")
    model.aggregation.prior.log_scale.data.fill_(0.0)
    documents = [Document(f"{number}", f"{text} {number}") for number, text in enumerate(TEXTS * 2)]
    found, expected = readers_of_one(tmp_path / "shards", model, 3, documents)
    assert_read_alike(found, expected, QUESTIONS)
    assert_read_alike(found, expected, QUESTIONS, {"1", "5"})
    phi = expected.aggregate(QUESTIONS).phi
    model.aggregation.slots.reading_cutoff = None
    assert not torch.allclose(model.aggregate(QUESTIONS, model.amortize([d.text for d in documents])), phi)


def test_a_strategy_that_knows_no_slots_is_refused(model_folder: Folder) -> None:
    model = with_slots(model_folder)
    with pytest.raises(ConfigError, match="'hierarchical' knows no slots, of which this model has 2"):
        MACEngine(model, attention=AttentionConfig(strategy="hierarchical"))


def test_a_cutoff_leaves_the_fingerprint_as_it_was(model_folder: Folder) -> None:
    """It changes what is read of a bank, and not what is written."""
    sizes = AggregationConfig(blocks=1, prior_width=8, slots=2)
    prompt = ModulationConfig(kind="prompt", entry_layer=1)
    config = mac_config(model_folder("prefix_lm"), aggregation=sizes, modulation=prompt)
    cut = config.model_copy(update={"aggregation": sizes.model_copy(update={"slot_cutoff": 6.0})})
    whole, without = (MACModel.from_config(each, device="cpu") for each in (config, cut))
    without.load_state_dict(whole.state_dict())
    assert without.fingerprint == whole.fingerprint
    assert without.answer_digest != whole.answer_digest
