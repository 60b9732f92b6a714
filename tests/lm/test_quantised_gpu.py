"""A MAC model around an LM with quantised weights on a GPU, whose kernels are not the CPU's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from mac_rag.config import BaseLMConfig, EncoderConfig, MACConfig, ModulationConfig
from mac_rag.model import MACModel
from pipelines.objective import LossWeights, mac_loss
from tests.helpers import Folder, strong
from tests.lm.helpers import BATCH, KINDS, QUESTIONS, TEXTS

PROMPTS, ANSWERS = [[1, 30, 31, 32], [1, 40]], [[60, 61, 2], [62, 2]]
TOLERANCE = 0.15  # of a loss in nats; in float32 they are equal


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("quantization", ["nf4", "int8"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_gpu_answers_and_learns_as_a_cpu(model_folder: Folder, tmp_path: Path, kind: Any, quantization: Any) -> None:
    encoder = EncoderConfig(name=str(model_folder("t5")))
    config = MACConfig(
        base_lm=BaseLMConfig(name=str(model_folder("llama")), dtype="bf16", quantization=quantization),
        amortization=encoder,
        input_encoder=encoder,
        tokens=4,
        modulation=ModulationConfig(kind=kind),
    )
    model = strong(MACModel.from_config(config, device="cuda"))
    assert model.base_lm.model.is_quantized
    phi = model.aggregate(QUESTIONS, model.amortize(TEXTS))
    with torch.no_grad():
        loss = model.base_lm.answer_loss(PROMPTS, ANSWERS, model.modulation(phi))
    mac_loss(model, BATCH, LossWeights())[0]["loss"].backward()
    for network in (model.amortization, model.input_encoder, model.aggregation, model.modulation):
        gradients = [p.grad for p in network.parameters() if p.grad is not None]
        assert gradients
        assert all(gradient.isfinite().all() for gradient in gradients)
        assert any(gradient.any() for gradient in gradients)

    with torch.no_grad():
        alone = [
            model.base_lm.answer_loss([prompt], [answer], model.modulation(phi[i : i + 1]))
            for i, (prompt, answer) in enumerate(zip(PROMPTS, ANSWERS))
        ]
        torch.testing.assert_close(torch.cat(alone), loss, rtol=0, atol=TOLERANCE)
        without = model.base_lm.answer_loss(PROMPTS, ANSWERS, None)
    assert (without - loss).abs().max() > TOLERANCE  # memory has an effect
    assert len(model.generate(QUESTIONS, modulation=phi)) == len(QUESTIONS)

    model.save_pretrained(tmp_path)
    with torch.no_grad():
        for device in ("cuda", "cpu"):
            again = MACModel.from_pretrained(tmp_path, device=device)
            phi = again.aggregate(QUESTIONS, again.amortize(TEXTS))
            losses = again.base_lm.answer_loss(PROMPTS, ANSWERS, again.modulation(phi))
            torch.testing.assert_close(losses.cpu(), loss.cpu(), rtol=0, atol=TOLERANCE)
