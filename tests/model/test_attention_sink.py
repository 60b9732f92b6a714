"""A MAC model whose prefix has an attention sink: positions, checkpoints, and an LM that is trained along."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from mac_rag.config import ModulationConfig
from mac_rag.lm.attention_sink import sink_keys_values
from mac_rag.model import MACModel
from mac_rag.model.checkpoint import WEIGHTS
from pipelines.objective import LossWeights, mac_loss
from tests.helpers import Folder, built, mac_config, reloaded, strong
from tests.lm.helpers import BATCH, QUESTIONS, TEXTS


def build(folder: Path, sink: bool, **values: Any) -> MACModel:
    modulation = ModulationConfig(attention_sink=sink)
    return strong(built(mac_config(folder, modulation=modulation, **values)))


def loss(model: MACModel, phi: torch.Tensor) -> torch.Tensor:
    return model.base_lm.answer_loss([[1, 30]], [[60, 2]], model.modulation(phi[:1]))


def sink_of(model: MACModel) -> torch.Tensor:
    return model.modulation.sink.keys_values


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_the_sink_takes_a_position_and_no_weights(model_folder: Folder, tmp_path: Path, name: str) -> None:
    """A checkpoint computes it anew."""
    plain, model = (build(model_folder(name), sink) for sink in (False, True))
    assert plain.context_window == model.context_window + 1 == 1024 - 4
    assert model.mac_state().keys() == plain.mac_state().keys()
    assert model.fingerprint != plain.fingerprint  # the same weights read memory tokens in another way
    phi = model.aggregate(QUESTIONS, model.amortize(TEXTS))
    assert not torch.allclose(loss(plain, phi), loss(model, phi))
    again = reloaded(model, tmp_path / "mac")
    with safe_open(tmp_path / "mac" / WEIGHTS, "pt") as stored:
        assert set(stored.keys()) == model.mac_state().keys()
    assert again.fingerprint == model.fingerprint
    torch.testing.assert_close(*(loss(m, phi) for m in (model, again)))
    for contexts in (None, [TEXTS[:1], TEXTS[:1]]):
        options: dict[str, Any] = {"modulation": phi, "memory_weight": 0.5}
        assert again.generate(QUESTIONS, contexts, **options) == model.generate(QUESTIONS, contexts, **options)


@pytest.mark.parametrize("rank", [None, 4])
def test_the_sink_follows_an_lm_that_is_trained_along(model_folder: Folder, tmp_path: Path, rank: int | None) -> None:
    model = build(model_folder("llama"), True)
    before = sink_of(model).clone()
    model.train_base_lm(lora_rank=rank)
    model.train()
    optimiser = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01, fused=True)
    for _ in range(2):
        mac_loss(model.train(), BATCH, LossWeights())[0]["loss"].backward()
        optimiser.step()
    model.eval()
    assert not torch.allclose(sink_of(model), before, atol=1e-3)
    torch.testing.assert_close(sink_of(model), sink_keys_values(model.base_lm))
    torch.testing.assert_close(sink_of(reloaded(model, tmp_path / "mac")), sink_of(model))


def test_only_a_prefix_has_a_sink() -> None:
    with pytest.raises(ValueError, match="attention_sink is true, but only kind prefix has one, not lora"):
        ModulationConfig(kind="lora", attention_sink=True)
