"""Every architecture, in every dtype, under every modulation: see `tests.lm.helpers.check`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from mac_rag.config import BaseLMConfig, PromptFormat
from mac_rag.errors import ModelLoadError
from mac_rag.lm.base_lm import BaseLM
from tests.lm.conftest import InTable
from tests.lm.helpers import ARCHITECTURES, DTYPES, HYBRIDS, KINDS, Cell, check, prompts

MATRIX = [(name, kind, dtype) for name in ARCHITECTURES for kind in KINDS for dtype in DTYPES]


# LMs that mac_rag handles as it handles another one of the list.
ALIKE = {"llama", "qwen2", "qwen3", "qwen2_moe", "mistral", "phi", "gemma2", "olmo2", "stablelm"}


@pytest.mark.parametrize(
    ("name", "kind", "dtype"),
    [
        pytest.param(name, KINDS[i % 3], list(DTYPES)[i // 3 % 3], marks=[pytest.mark.slow] if name in ALIKE else [])
        for i, name in enumerate(ARCHITECTURES)
    ],
)
def test_each_architecture_once(name: str, kind: str, dtype: str) -> None:
    check(Cell.of(name, kind, dtype))


@pytest.mark.matrix
@pytest.mark.parametrize(("name", "kind", "dtype"), MATRIX)
def test_the_whole_matrix(name: str, kind: str, dtype: str, in_table: InTable) -> None:
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

    @pytest.mark.parametrize(
        ("name", "reason"),
        [
            *((name, "state-space layers or convolutions") for name in HYBRIDS),
            ("deepseek_v3", "keys and values differ in width"),
            ("gemma3n_text", "share keys and values"),
        ],
    )
    def test_no_prefix_without_keys_and_values_in_every_layer(
        self, tmp_path: Path, name: str, reason: str, in_table: InTable
    ) -> None:
        pattern = rf"{name} (cannot carry a prefix: .*{reason}.*); set modulation.kind to lora or film"
        with pytest.raises(ModelLoadError, match=pattern) as refused:
            self.load(tmp_path, "prefix", name, **HYBRIDS.get(name, {}))
        in_table(name, "prefix", "", refused.value)

    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("name", ["mamba", "mamba2", "rwkv"])
    def test_state_space_lms_are_refused(self, tmp_path: Path, name: str, kind: str, in_table: InTable) -> None:
        with pytest.raises(ModelLoadError, match=f"{name} keeps its state in a cache of its own") as refused:
            self.load(tmp_path, kind, name)
        in_table(name, kind, "", refused.value)

    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("name", ["bloom", "mpt"])
    def test_an_lm_without_a_number_of_positions_is_refused(
        self, tmp_path: Path, name: str, kind: str, in_table: InTable
    ) -> None:
        with pytest.raises(ModelLoadError, match=f"{name} does not say how many positions it has") as refused:
            self.load(tmp_path, kind, name)
        in_table(name, kind, "", refused.value)

    @pytest.mark.parametrize("kind", KINDS)
    def test_an_lm_of_images_is_refused(self, tmp_path: Path, kind: str, in_table: InTable) -> None:
        with pytest.raises(ModelLoadError, match="gemma3 is more than a text model") as refused:
            self.load(tmp_path, kind, "gemma3")
        in_table("gemma3", kind, "", refused.value)
