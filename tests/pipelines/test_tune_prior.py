"""Tuning the document prior together with its sentence encoder."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from mac_rag.config import HashedBM25Config, SentenceEncoderConfig
from mac_rag.errors import ConfigError
from mac_rag.lm.batching import pad_rows
from mac_rag.model import MACModel
from mac_rag.model.checkpoint import read_config
from pipelines.tasks import tune_prior
from pipelines.tasks.registry import run_task
from pipelines.tasks.tune_prior import TunePriorConfig, TunePriorTask, compared
from tests.model.test_sentence_encoder import with_encoder

ENCODER = SentenceEncoderConfig(name="minilm", embeddings="base-lm")
DATA = {"name": "newswire", "documents": 40, "validation_documents": 12}


@pytest.fixture(autouse=True)
def small_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups as small as the batches."""
    monkeypatch.setattr(tune_prior, "_GROUP", 4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose sentence encoder reads with the LM's embeddings, and which compares words, too."""
    torch.manual_seed(1)
    config = with_encoder(ENCODER, hashed_bm25=HashedBM25Config(vectors=2))
    place = tmp_path_factory.mktemp("start") / "mac"
    MACModel.from_config(config, device="cpu").save_pretrained(place)
    return place


def recipe(folder: Path, **trainer: Any) -> TunePriorConfig:
    values = {"steps": 4, "batch_size": 8, "learning_rate": 1e-4, "validate_every": 4, "best": "first", "cpu": True}
    return TunePriorConfig.parse({"start_from": str(folder), "data": DATA, "trainer": {**values, **trainer}}, "test")


def test_the_loss_is_that_of_the_model_as_it_is_used(folder: Path) -> None:
    """The oracle encodes whole memory tokens, and compares them pair by pair."""
    task = TunePriorTask(recipe(folder))
    model, batch = task.model, task.batch(0, 0, 6)
    with torch.no_grad():
        asked, phi = (
            encoder(rows)
            for encoder, rows in ((model.input_encoder, batch.questions), (model.amortization, batch.documents))
        )
        scores = model.aggregation.prior_scores(asked, model.project(phi.stacked()))
        expected = -torch.stack([row.log_softmax(0)[gold] for row, gold in zip(scores, batch.gold, strict=True)]).mean()
        torch.testing.assert_close(task(batch)["loss"], expected, atol=1e-4, rtol=1e-4)


def test_a_run_changes_the_encoder_and_the_prior_alone(folder: Path, tmp_path: Path) -> None:
    """What compares texts learns faster than the encoder: Adam's first step moves each weight by its learning rate."""
    run_task("tune_prior", recipe(folder, steps=1, average_from=None), tmp_path / "run")
    before, after = MACModel.from_pretrained(folder, device="cpu"), MACModel.from_pretrained(tmp_path / "run" / "last")
    stored = before.mac_state()
    assert stored.keys() == after.mac_state().keys()
    changed = {name for name, weight in after.mac_state().items() if not torch.equal(weight, stored[name])}
    assert {"aggregation.prior.query.weight", "aggregation.prior.log_scale"} < changed
    assert any(".sentence_encoder." in name for name in changed)
    assert all(name.startswith(("amortization.network.sentence_encoder.", "aggregation.prior.")) for name in changed)
    for name, weight in before.base_lm.state_dict().items():  # its embeddings are the encoder's, too
        assert torch.equal(weight, after.base_lm.state_dict()[name]), name
    assert before.fingerprint != after.fingerprint  # banks of one are not the other's
    moved = {name: (weight - stored[name]).abs().max().item() for name, weight in after.mac_state().items()}
    prior = "aggregation.prior."
    assert moved[f"{prior}query.weight"] == pytest.approx(3e-4, rel=0.01)
    assert moved[f"{prior}key.weight"] == pytest.approx(3e-4, rel=0.01)
    assert moved[f"{prior}log_scale"] == pytest.approx(1e-3, rel=0.01)
    encoder = [value for name, value in moved.items() if ".sentence_encoder." in name and value]
    assert max(encoder) == pytest.approx(1e-4, rel=0.01)
    old, new = (read_config(place).hashed_bm25 for place in (folder, tmp_path / "run" / "last"))
    assert abs(math.log(new.weight / old.weight)) == pytest.approx(1e-2, rel=0.01)


def test_a_model_that_compares_no_words_is_tuned_too(tmp_path: Path) -> None:
    config = with_encoder(ENCODER)
    MACModel.from_config(config, device="cpu").save_pretrained(tmp_path / "mac")
    run_task("tune_prior", recipe(tmp_path / "mac", steps=1, validate_every=1), tmp_path / "run")
    assert read_config(tmp_path / "run" / "last").hashed_bm25 is None


def test_texts_of_all_lengths_are_encoded_as_each_alone(folder: Path) -> None:
    encoder = MACModel.from_pretrained(folder, device="cpu").amortization
    rows = [encoder.ids(text) for text in ("Rain fell. " * 9, "It was cold.", "Who won at Hastings in 1066?")]
    together = compared(encoder, rows)
    for number, row in enumerate(rows):
        alone = encoder.network.sentence_token(*pad_rows([row], 0, encoder.device))
        torch.testing.assert_close(together.tokens[number], alone[0], atol=1e-5, rtol=1e-5)


def test_held_out_documents_are_ranked_among_all_of_them(folder: Path) -> None:
    figures = TunePriorTask(recipe(folder)).validate()
    assert 0 < figures["first"] <= figures["among_three"] <= 1


def test_a_model_without_a_sentence_encoder_is_refused() -> None:
    with pytest.raises(ConfigError, match="mac-tiny has no sentence encoder"):
        TunePriorTask(recipe(Path("mac-tiny")))
