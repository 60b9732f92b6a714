"""What holds for tiny random LMs holds for SmolLM2-135M-Instruct; `make test-lm` fetches it and runs this."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from mac_rag import Document, MACEngine
from mac_rag.config import AggregationConfig, BaseLMConfig, EncoderConfig, MACConfig, ModulationConfig, PromptFormat
from mac_rag.lm.fetched import CACHE_VARIABLE
from mac_rag.lm.loading import load_causal_lm
from tests.helpers import built, reloaded, strong
from tests.lm.helpers import KINDS, Cell, check, check_losses, prompts

pytestmark = pytest.mark.lm
NAME = "smollm2-135m"


@pytest.fixture(autouse=True)
def _fetched(user_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(user_cache))


def config(dtype: Any) -> BaseLMConfig:
    return BaseLMConfig(name=NAME, dtype=dtype)


def cell(kind: str, dtype: Any) -> Cell:
    """Thirty layers round thirty times. In bf16 0.13 was measured; the memory's effect is 1.5 and more."""
    lm, _ = load_causal_lm(config(dtype), torch.device("cpu"))
    return Cell.around(lm.requires_grad_(False).eval(), kind, dtype, {"fp32": 1e-3, "bf16": 0.25}[dtype], new=3)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("kind", KINDS)
def test_conformance(kind: str, dtype: str) -> None:
    check(cell(kind, dtype), prompts(24))


@pytest.mark.parametrize("kind", KINDS)
def test_a_memory_behind_a_prompt_of_2000_tokens(kind: str) -> None:
    with torch.no_grad():
        check_losses(cell(kind, "bf16"), prompts(2000)[1:], [[11, 12, 13], [14]])


@pytest.mark.parametrize("kind", KINDS)
def test_an_engine_around_it(kind: Any, tmp_path: Path) -> None:
    """An untrained MAC changes what the LM says; its checkpoint names the LM and does not store it."""
    encoder = EncoderConfig(design="decoder-only", name=None, layers=1)
    whole = MACConfig(
        base_lm=config("bf16"),
        amortization=encoder,
        input_encoder=encoder,
        tokens=4,
        aggregation=AggregationConfig(blocks=1, heads=2, head_width=16),
        modulation=ModulationConfig(kind=kind, bottleneck=8),
        prompt=PromptFormat(question="{question}"),
        max_new_tokens=8,
    )
    engine = MACEngine(reloaded(strong(built(whole)), tmp_path))
    assert not list(tmp_path.glob("base_lm"))
    engine.adapt([Document("may", "Ada Voss was appointed head of the museum in Orsena in May 2024.")])
    question = "The capital of France is"
    plain, steered = (engine.answer([question], use_memory=memory)[0].text for memory in (False, True))
    assert "Paris" in plain
    assert plain != steered
