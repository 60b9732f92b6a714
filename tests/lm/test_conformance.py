"""Every architecture, in every dtype and quantised, under every modulation: see `tests.lm.helpers.check`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from mac_rag.config import BaseLMConfig, PromptFormat
from mac_rag.errors import ModelLoadError, QuantizationError
from mac_rag.lm.base_lm import BaseLM
from tests.lm.conftest import InTable
from tests.lm.helpers import (
    ALIKE,
    ARCHITECTURES,
    DTYPES,
    HYBRIDS,
    KINDS,
    QUANTIZED_TOLERANCES,
    UNSUPPORTED,
    WITHOUT_PREFIX,
    Cell,
    check,
    check_generation,
    check_losses,
    prompts,
    quantized_lm,
)


def marks(place: int, name: str, kind: str, dtype: str) -> Any:
    """Each architecture is run once, by turns in each dtype under each modulation; the others are in the matrix."""
    if (kind, dtype) != (KINDS[place % 3], list(DTYPES)[place // 3 % 3]):
        return [pytest.mark.matrix]
    return [pytest.mark.slow] if name in ALIKE else []


@pytest.mark.parametrize(
    ("name", "kind", "dtype"),
    [
        pytest.param(name, kind, dtype, marks=marks(place, name, kind, dtype))
        for place, name in enumerate(ARCHITECTURES)
        for kind in KINDS
        for dtype in DTYPES
    ],
)
def test_every_path_of_every_architecture(name: str, kind: str, dtype: str, in_table: InTable) -> None:
    in_table(name, kind, dtype)
    check(Cell.of(name, kind, dtype))


@pytest.mark.parametrize(
    ("name", "length"),
    [("mistral", 500), *(pytest.param(name, 2000, marks=pytest.mark.slow) for name in ("mistral", "gemma3_text"))],
)
def test_a_prefix_behind_a_long_prompt(name: str, length: int) -> None:
    check(replace(Cell.of(name, "prefix", "fp32"), new=3), prompts(length))


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        pytest.param(name, kind, marks=[] if i % 2 == j else [pytest.mark.slow])
        for i, name in enumerate(HYBRIDS)
        for j, kind in enumerate(["lora", "film"])
    ],
)
def test_hybrids_carry_what_needs_no_keys_and_values(name: str, kind: str, in_table: InTable) -> None:
    in_table(name, kind, "fp32")
    check(Cell.of(name, kind, "fp32"))


class TestRefusals:
    """The folders hold a configuration and no weights: nothing else is read."""

    @staticmethod
    def load(folder: Path, kind: str, name: str, **config: Any) -> None:
        AutoConfig.for_model(name, **config).save_pretrained(folder)
        BaseLM.load(BaseLMConfig(name=str(folder)), PromptFormat(), torch.device("cpu"), modulation=kind)

    @pytest.mark.parametrize(("name", "reason"), WITHOUT_PREFIX)
    def test_no_prefix_without_keys_and_values_in_every_layer(
        self, tmp_path: Path, name: str, reason: str, in_table: InTable
    ) -> None:
        pattern = rf"{name} (cannot carry a prefix: .*{reason}.*); set modulation.kind to lora or film"
        with pytest.raises(ModelLoadError, match=pattern) as refused:
            self.load(tmp_path, "prefix", name, **HYBRIDS.get(name, {}))
        in_table(name, "prefix", "", refused.value)

    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize(("name", "reason"), UNSUPPORTED)
    def test_lms_that_carry_no_modulation(
        self, tmp_path: Path, name: str, reason: str, kind: str, in_table: InTable
    ) -> None:
        with pytest.raises(ModelLoadError, match=f"{name} {reason}") as refused:
            self.load(tmp_path, kind, name)
        in_table(name, kind, "", refused.value)


@pytest.mark.matrix
@pytest.mark.parametrize("quantization", QUANTIZED_TOLERANCES)
@pytest.mark.parametrize("kind", [*KINDS, "sink"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_quantised_weights(tmp_path: Path, name: str, kind: str, quantization: Any, in_table: InTable) -> None:
    modulation = "prefix" if kind == "sink" else kind
    if (name, quantization) == ("qwen2_moe", "nf4"):
        with pytest.raises(QuantizationError, match="shared_expert_gate has a single output") as refused:
            quantized_lm(tmp_path, name, quantization, modulation)
        in_table(name, kind, quantization, refused.value)
        return
    in_table(name, kind, quantization)
    model = quantized_lm(tmp_path, name, quantization, modulation)
    cell = Cell.around(model, kind, "bf16", QUANTIZED_TOLERANCES[quantization])
    rows = prompts()
    with torch.no_grad():
        answers = [cell.plain_answer(prompt, cell.modulation(i)) for i, prompt in enumerate(rows)]
        check_losses(cell, rows, answers)
        check_generation(cell, rows, answers)
