"""Memory of a training step: what is counted, that it falls with p, and the rows of figure and table."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from eval.dropout_memory import first_batch, memory_rows, step_memory
from eval.harness.results import Result
from mac_rag.data.newswire.generate import generate
from mac_rag.errors import ConfigError
from mac_rag.model import MACModel
from pipelines.objective import LossWeights, mac_loss
from tests.eval.helpers import Command

STREAM = generate("train", 8, questions_per_document=2)


def test_memory_falls_with_p_and_grows_with_k(tiny_model: MACModel) -> None:
    rows = {row.name: row.measures for row in memory_rows(tiny_model, STREAM, [4, 8], 0)}
    for measure in ("peak_mb", "saved_mb"):
        for count in (4, 8):
            by_p = [rows[f"K = {count}, p = {share}"][measure] for share in (0.0, 0.5, 0.75)]
            assert by_p == sorted(by_p, reverse=True)
            assert by_p[0] > 1.2 * by_p[-1]
        assert rows["K = 8, p = 0.0"][measure] > rows["K = 4, p = 0.0"][measure]
        # Of four documents, one under gradients is both p = 0.75 and the least there is.
        assert rows["K = 4, p = min"][measure] == rows["K = 4, p = 0.75"][measure]
    assert all(row["saved_mb"] <= row["peak_mb"] for row in rows.values())


def test_saved_tensors_are_counted_once_and_without_the_weights(tiny_model: MACModel) -> None:
    batch = first_batch(tiny_model, STREAM, 2)
    weights = {p.untyped_storage().data_ptr() for p in tiny_model.parameters()}
    held: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        held.append(tensor)
        return tensor

    tiny_model.train()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = mac_loss(tiny_model, batch, LossWeights())[0]["loss"]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in held}
    assert loss.requires_grad
    assert step_memory(tiny_model, batch, 0.0, 0)[1] == sum(
        size for place, size in storages.items() if place not in weights
    )
    assert not tiny_model.training
    assert all(parameter.grad is None for parameter in tiny_model.parameters())


def test_a_batch_has_a_question_on_each_document(tiny_model: MACModel) -> None:
    batch = first_batch(tiny_model, STREAM, 5)
    assert batch.documents == [document.text for document in STREAM.documents[:5]]
    assert batch.questions == [question.question for question in STREAM.questions[0:10:2]]
    with pytest.raises(ConfigError, match="K is 9, but the stream has only 8 documents"):
        first_batch(tiny_model, STREAM, 9)


@pytest.mark.usefixtures("few_stories")
@pytest.mark.slow
def test_command(command: Command, tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eval.dropout_memory.TABLE", {"tiny": {"No backprop.": (2, 1, 0.0), "MAC": (4, 2, 0.75)}})
    small = ("--steps", 1, "--documents", 4, "--k", 2, "--output", "r.json")
    assert command("eval.dropout_memory", "--model", tiny_checkpoint, *small)[0] == 0
    rows = Result.read(tmp_path / "r.json").rows
    assert [row.name for row in rows[:2]] == ["No backprop.", "MAC"]
    assert [(row.settings["K"], row.settings["p"]) for row in rows[:2]] == [(2, 0.0), (4, 0.75)]
    assert all(row.f1 is not None for row in rows[:2])
    assert len(rows) == 2 + 5
    assert command("eval.dropout_memory", "--model", tiny_checkpoint, *small, "--no-trainings")[0] == 0
    result = Result.read(tmp_path / "r.json")
    assert (len(result.rows), result.samples) == (5, None)
    assert "the table of answers by p" in result.not_run
