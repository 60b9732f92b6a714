"""Every architecture with quantised weights, under every modulation: inference only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from mac_rag.config import BaseLMConfig
from mac_rag.lm.loading import load_causal_lm
from tests.helpers import save_tokenizer
from tests.lm.conftest import InTable
from tests.lm.helpers import ARCHITECTURES, KINDS, Cell, check_generation, check_losses, prompts, random_lm

QUANTIZATIONS = ("nf4", "int8")
# Largest differences, as in half precision: int8 multiplies in fp16, and columns of outliers apart for each batch.
TOLERANCES = {"nf4": 0.08, "int8": 0.15}


@pytest.mark.matrix
@pytest.mark.parametrize("quantization", QUANTIZATIONS)
@pytest.mark.parametrize("kind", [*KINDS, "sink"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_quantised_weights(tmp_path: Path, name: str, kind: str, quantization: Any, in_table: InTable) -> None:
    in_table(name, kind, quantization)
    random_lm(name, "bf16").save_pretrained(tmp_path)
    save_tokenizer(tmp_path, "<s> $A")
    config = BaseLMConfig(name=str(tmp_path), dtype="bf16", quantization=quantization)
    model, _ = load_causal_lm(config, torch.device("cpu"), modulation="prefix" if kind == "sink" else kind)
    cell = Cell.around(model.requires_grad_(False).eval(), kind, "bf16", TOLERANCES[quantization])
    rows = prompts()
    with torch.no_grad():
        answers = [cell.plain_answer(prompt, cell.modulation(i)) for i, prompt in enumerate(rows)]
        check_losses(cell, rows, answers)
        check_generation(cell, rows, answers)
