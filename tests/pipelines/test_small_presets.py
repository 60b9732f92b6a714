"""The presets of small open LMs train: tiny LMs of their architectures, sized by the same rule, for a few steps."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mac_rag.model import MACModel
from mac_rag.model.presets import SMALL, sized_for
from pipelines.sizes import architecture
from pipelines.tasks.train import TrainTask
from pipelines.tasks.train_config import TrainConfig
from pipelines.trainer import Trainer
from tests.helpers import VOCABULARY, save_tokenizer
from tests.lm.helpers import random_lm
from tests.pipelines.helpers import TRAINER

ARCHITECTURES = sorted({architecture(config.base_lm.name).model_type for config in SMALL.values()})


def test_all_architectures_are_known_to_work() -> None:
    assert ARCHITECTURES == ["gemma3_text", "llama", "mistral", "qwen3"]


# The default run takes the one with most traits: layers with windows, scaled embeddings, heads wider than the LM.
@pytest.mark.parametrize(
    "kind",
    [name if name == "gemma3_text" else pytest.param(name, marks=pytest.mark.slow) for name in ARCHITECTURES],
)
def test_a_model_of_the_presets_rule_trains(kind: str, tmp_path: Path) -> None:
    lm = random_lm(kind, vocab_size=VOCABULARY)
    lm.save_pretrained(tmp_path / "lm")
    save_tokenizer(tmp_path / "lm", "<s> $A")
    config = sized_for(
        str(tmp_path / "lm"), width=lm.config.hidden_size, layers=lm.config.num_hidden_layers
    ).model_copy(update={"tokens": 8})
    recipe = TrainConfig.model_validate(
        {
            "model": config.model_dump(),
            "init": "kv_regression",
            "data": {"name": "newswire", "documents": 24, "validation_documents": 2},
            "losses": {"answer": 1.0, "direct": 0.5, "contrastive": 0.3},
            "negatives": 8,
            "store_dtype": "bf16",
            "trainer": {**TRAINER, "steps": 2, "best": "loss", "best_mode": "min", "precision": "bf16"},
        }
    )
    task = TrainTask(recipe)
    Trainer(task, recipe.trainer, tmp_path / "run").run()
    trained = [name for name, weight in task.model.named_parameters() if weight.requires_grad]
    assert any("amortization.network.backbone.layers.0." in name for name in trained)
    assert not any("backbone.layers.1." in name or "embed" in name for name in trained)
    loaded = MACModel.from_pretrained(tmp_path / "run" / "last", device="cpu")
    text = ["Ada Voss was appointed head of the museum."]
    torch.testing.assert_close(loaded.amortize(text), task.model.amortize(text), rtol=0.1, atol=0.1)
