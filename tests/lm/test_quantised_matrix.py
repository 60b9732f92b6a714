"""Every architecture with quantised weights, under every modulation: inference only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from mac_rag.config import BaseLMConfig
from mac_rag.errors import QuantizationError
from mac_rag.lm.loading import load_causal_lm
from tests.helpers import VOCABULARY, save_tokenizer
from tests.lm.conftest import InTable
from tests.lm.helpers import ARCHITECTURES, KINDS, Cell, check_generation, check_losses, prompts, random_lm

QUANTIZATIONS = ("nf4", "int8")
# Largest differences, as in half precision: int8 multiplies in fp16, and columns of outliers apart for each batch.
TOLERANCES = {"nf4": 0.08, "int8": 0.15}


def load(folder: Path, name: str, kind: str, quantization: Any) -> Any:
    # One row more than tokens, since the class of Qwen2's tokenizers adds a token of its own.
    random_lm(name, "bf16", vocab_size=VOCABULARY + 1).save_pretrained(folder)
    save_tokenizer(folder, "<s> $A")
    config = BaseLMConfig(name=str(folder), dtype="bf16", quantization=quantization)
    return load_causal_lm(config, torch.device("cpu"), modulation="prefix" if kind == "sink" else kind)[0]


@pytest.mark.matrix
@pytest.mark.parametrize("quantization", QUANTIZATIONS)
@pytest.mark.parametrize("kind", [*KINDS, "sink"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_quantised_weights(tmp_path: Path, name: str, kind: str, quantization: Any, in_table: InTable) -> None:
    if (name, quantization) == ("qwen2_moe", "nf4"):
        with pytest.raises(QuantizationError, match="shared_expert_gate has a single output") as refused:
            load(tmp_path, name, kind, quantization)
        in_table(name, kind, quantization, refused.value)
        return
    in_table(name, kind, quantization)
    model = load(tmp_path, name, kind, quantization)
    cell = Cell.around(model.requires_grad_(False).eval(), kind, "bf16", TOLERANCES[quantization])
    rows = prompts()
    with torch.no_grad():
        answers = [cell.plain_answer(prompt, cell.modulation(i)) for i, prompt in enumerate(rows)]
        check_losses(cell, rows, answers)
        check_generation(cell, rows, answers)
