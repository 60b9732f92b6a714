"""The experiments of eval.variants: their rows, and their recipes for the paper's scale."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from eval.dropout_memory import TABLE
from eval.harness.variants import Training
from eval.variants import DESIGNS, KINDS, PRECISIONS, tiny_designs
from mac_rag.config import EncoderConfig
from mac_rag.lm.loading import INT8_LM, load_backbone
from mac_rag.model import MACModel
from mac_rag.model.presets import merged
from tests.eval.helpers import Evaluate

SMALL = ("--steps", 2, "--documents", 5)
pytestmark = pytest.mark.usefixtures("few_stories")


@pytest.mark.slow
def test_each_modulation_is_trained_once(evaluate: Evaluate, monkeypatch: pytest.MonkeyPatch) -> None:
    result, _, samples, _ = evaluate("variants", "peft", *SMALL)
    assert [row.settings["method"] for row in result.rows] == list(KINDS)
    assert all(row.em is not None and row.measures["answer_loss"] > 0 for row in result.rows)
    assert len(samples) == 5
    losses = [row.measures["answer_loss"] for row in result.rows]
    assert len(set(losses)) == 3

    def again(*_: object) -> None:
        raise AssertionError("a finished training was made again")

    monkeypatch.setattr("pipelines.trainer.Trainer.run", again)
    assert [row.measures["answer_loss"] for row in evaluate("variants", "peft", *SMALL).result.rows] == losses


def test_quantization_lists_4_bit_as_not_run_without_a_gpu(evaluate: Evaluate) -> None:
    result, _, _, shown = evaluate("variants", "quantization", *SMALL)
    expected = ["32bit", "16bit"] + ["4bit"] * torch.cuda.is_available()
    assert [row.settings["method"] for row in result.rows] == expected
    if not torch.cuda.is_available():
        assert "needs a CUDA GPU" in result.not_run["4bit"]
        assert "Not run: 4bit" in shown


@pytest.mark.slow
def test_each_design_of_amortization_is_trained(evaluate: Evaluate, tmp_path: Path) -> None:
    result = evaluate("variants", "amortization", *SMALL).result
    assert [row.settings["method"] for row in result.rows] == [*DESIGNS, "decoder-only, pretrained"]
    trained = [json.loads(path.read_text()) for path in (tmp_path / "variants").glob("*/best/config.json")]
    assert sorted(config["amortization"]["design"] for config in trained) == [
        "decoder-only", "decoder-only", "encoder-decoder", "encoder-only",
    ]  # fmt: skip


def test_designs_start_from_the_embeddings_of_a_model_stored_as_int8(tiny_checkpoint: Path, tmp_path: Path) -> None:
    model = MACModel.from_pretrained(tiny_checkpoint)
    model.train_base_lm(lora_rank=None)
    model.save_pretrained(tmp_path / "int8", dtype=torch.int8)
    assert (tmp_path / "int8" / "base_lm" / INT8_LM).is_file()
    designs = tiny_designs(str(tmp_path / "int8"), tmp_path, 0)
    expected = MACModel.from_pretrained(tmp_path / "int8", device="cpu").base_lm.model.get_input_embeddings().weight
    for design in DESIGNS:
        backbone = load_backbone(EncoderConfig.model_validate(designs[design]), torch.device("cpu"))
        assert torch.equal(backbone.get_input_embeddings().weight, expected)


@pytest.mark.parametrize(
    ("preset", "fresh", "changes"),
    [
        *(("gpt2-xl", "modulation", {"model": {"modulation": {"kind": kind}}}) for kind in KINDS.values()),
        *(("gpt2-xl", "amortization", {"model": {"amortization": design}}) for design in DESIGNS.values()),
        *(("llama2-7b", "modulation", changes) for changes in PRECISIONS["paper"].values()),
        *(("llama2-7b", "amortization", {"trainer": {"batch_size": k}}) for k, _, _ in TABLE["paper"].values()),
        *((preset, None, {}) for preset in ("distilgpt2", "gpt2-large")),
    ],
)
def test_the_papers_recipes_load(preset: str, fresh: Any, changes: dict[str, Any]) -> None:
    training = Training(preset, "data/streamingqa", Path("variants"), 3, None, "paper")
    recipe = training.recipe(fresh, changes)
    assert (recipe.data.name, recipe.data.path, recipe.trainer.seed) == ("streamingqa", "data/streamingqa", 3)
    assert recipe.model.base_lm.name == f"runs/{preset}/tune_qa/best"
    values = recipe.model_dump(mode="json")
    assert merged(values, changes) == values
