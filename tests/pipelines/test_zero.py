"""Training with gradients and optimiser state in parts (DeepSpeed's ZeRO) on two processes, as one process trains."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from mac_rag.errors import ConfigError
from pipelines.zero import _deepspeed
from tests.pipelines import tiny_training
from tests.pipelines.helpers import metrics
from tests.pipelines.test_sharding import differences, models, on_two_processes

__all__ = ["models"]

Folder = Callable[[str], Path]
ZERO = {"parallel": "zero"}


def test_without_deepspeed_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    with pytest.raises(ConfigError, match=r"parallel is zero.*mac-rag\[deepspeed\]"):
        _deepspeed(torch.device("cpu"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "values"),
    [
        pytest.param("tune_qa", {}, id="an LM"),
        pytest.param("tune_qa", {"trainer": {"gradient_checkpointing": True}}, id="an LM, layers computed again"),
        pytest.param("train", {"trainer": {"accumulate": 2}}, id="MAC around a frozen LM"),
        pytest.param("train", {"tune_base_lm": "lora"}, id="MAC and low-rank updates"),
    ],
)
def test_two_processes_with_parts_of_the_optimiser_train_as_one(
    models: Path, tmp_path: Path, kind: str, values: dict[str, Any]
) -> None:
    """Twenty steps in float64; DeepSpeed updates weights in float32."""
    two = tiny_training.merged(values, {"trainer": ZERO})
    assert on_two_processes(tmp_path / "two", kind, models, two) is None
    accumulate = 2 * values.get("trainer", {}).get("accumulate", 1)
    one = tiny_training.merged(values, {"trainer": {"accumulate": accumulate}})
    tiny_training.train(tmp_path / "one", kind, models, one)
    assert len(metrics(tmp_path / "two")) == 20 + 2
    for name, difference in differences(tmp_path / "two", tmp_path / "one"):
        assert difference < (5e-5 if name == "gradient_norm" else 1e-5), name  # norms are about 2
    for first, second in zip(
        *(sorted((tmp_path / run / "last").rglob("*.safetensors")) for run in ("one", "two")), strict=True
    ):
        whole, parted = load_file(first), load_file(second)
        assert whole.keys() == parted.keys()
        for name in whole:
            torch.testing.assert_close(parted[name], whole[name], rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_a_killed_process_goes_on_exactly(models: Path, tmp_path: Path) -> None:
    """In fp32 around a frozen LM in bf16, with mixed precision."""
    values = {"model": {"base_lm": {"dtype": "bf16"}}, "trainer": {**ZERO, "precision": "bf16"}}
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert on_two_processes(whole, "train", models, values, double=False) is None
    failed = on_two_processes(killed, "train", models, values, double=False, kill=16)
    assert failed is not None
    assert "SIGKILL" in failed or "-9" in failed
    [checkpoint] = (killed / "checkpoints").iterdir()
    assert {path.name for path in checkpoint.iterdir()} == {
        "trainer.json",
        "model.safetensors",
        "optimizer.safetensors",
    }
    assert on_two_processes(killed, "train", models, values, double=False) is None
    assert metrics(killed) == metrics(whole)


@pytest.mark.slow
def test_a_checkpoint_goes_on_in_one_process(models: Path, tmp_path: Path) -> None:
    assert on_two_processes(tmp_path / "two", "tune_qa", models, {"trainer": ZERO}, kill=8) is not None
    one = {"trainer": {"accumulate": 2}}
    tiny_training.train(tmp_path / "two", "tune_qa", models, one)
    tiny_training.train(tmp_path / "one", "tune_qa", models, one)
    for name, difference in differences(tmp_path / "two", tmp_path / "one"):
        assert difference < 1e-5, name
