"""What a training step keeps for its backward pass, against steps that are measured."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig, LlamaForCausalLM

from eval.harness.allocations import allocated_peak
from mac_rag.config import MACConfig, ModulationConfig
from mac_rag.model import MACModel
from pipelines.objective import Batch, LossWeights, mac_loss
from pipelines.planning.activations import ANSWER_TOKENS, QUESTION_TOKENS, Step, activations
from pipelines.planning.empty_model import empty_model
from pipelines.planning.training import optimised
from pipelines.planning.weights import weights_by_part
from pipelines.trainer import TrainerConfig
from tests.helpers import VOCABULARY, mac_config, save_tokenizer
from tests.pipelines.helpers import TRAINER

FACTOR = 1.5
DOCUMENTS, TOKENS = 4, 256


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four layers, so that the step of a test is mostly layers, as that of a large LM."""
    folder = tmp_path_factory.mktemp("llama")
    config = LlamaConfig(
        vocab_size=VOCABULARY, bos_token_id=1, eos_token_id=2, pad_token_id=0, hidden_size=128, intermediate_size=384,
        num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=1024,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    save_tokenizer(folder, "<s> $A")
    return folder


def grown(count: int, length: Callable[[str], int]) -> str:
    """A text of so many tokens."""
    text = "a"
    while length(text) < count:
        text += " b"
    return text


def measured(config: MACConfig, losses: LossWeights, bf16: bool, recompute: bool = False) -> int:
    """Bytes at the peak of a step, beyond weights and gradients."""
    model = MACModel.from_config(config, device="cpu")
    model.use_master_weights()
    model.train()
    if recompute:
        for encoder in (model.amortization, model.input_encoder):
            for layer in encoder.network.backbone.layers:
                layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
    prompts = model.base_lm.prompts
    document = grown(TOKENS, lambda text: len(model.amortization.ids(text)))
    question = grown(QUESTION_TOKENS, lambda text: len(prompts.prompt(text)))
    answer = grown(ANSWER_TOKENS, lambda text: len(prompts.answer(text)))
    batch = Batch([document] * DOCUMENTS, [question] * DOCUMENTS, [answer] * DOCUMENTS, range(DOCUMENTS))

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            loss = mac_loss(model, batch, losses)[0]["loss"]
        loss.backward()

    step()  # gradients are there from now on
    return allocated_peak(step, model.device)[1]


def estimated(config: MACConfig, losses: LossWeights, bf16: bool, recompute: bool = False) -> int:
    model = empty_model(config)
    model.use_master_weights()
    step = Step(
        documents=DOCUMENTS, live=DOCUMENTS, questions=DOCUMENTS, document_tokens=TOKENS, context_tokens=0,
        further_rows=0, losses=losses, bf16=bf16, recompute=recompute,
    )  # fmt: skip
    trainer = TrainerConfig.model_validate({**TRAINER, "precision": "bf16" if bf16 else "fp32"})
    copies = sum(optimised(part, True, trainer)["bf16 copies"] for part in weights_by_part(model))
    return sum(activations(model, step).values()) + copies


@pytest.mark.parametrize(
    ("design", "bf16"),
    [
        ("encoder-pooling", True),  # as in the presets of small LMs
        *(
            pytest.param(design, bf16, marks=pytest.mark.slow)
            for design, bf16 in product(["encoder-pooling", "decoder-only", "encoder-decoder"], [False, True])
        ),
    ],
)
def test_the_estimate_is_near_the_measured_peak(
    llama: Path, model_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, design: str, bf16: bool
) -> None:
    monkeypatch.setenv("KINETO_LOG_LEVEL", "6")
    changes: dict[str, Any] = {"tokens": 16, "mlp_width": 16, "modulation": ModulationConfig(attention_sink=True)}
    config = mac_config(llama, model_folder("t5") if design == "encoder-decoder" else None, design, **changes)
    losses = LossWeights(answer=1, direct=0.5, contrastive=0.3)
    found, real = estimated(config, losses, bf16), measured(config, losses, bf16)
    assert real / FACTOR < found < real * FACTOR


def test_what_a_loss_does_not_need_is_not_kept(model_folder: Callable[[str], Path]) -> None:
    config = mac_config(model_folder("llama"))

    def kept(**losses: float) -> dict[str, int]:
        given = LossWeights(**{"answer": 0, **losses})
        model = empty_model(config)
        return activations(model, Step(4, 1, 4, 64, 0, 0, given, False))

    direct, both = kept(direct=1), kept(direct=1, answer=1)
    assert (direct["input encoder"], direct["aggregation network"]) == (0, 0)
    assert both["base LM"] == 2 * direct["base LM"]
    assert both["input encoder"] > 0
    assert kept(contrastive=1)["base LM"] == 0
    assert kept(reconstruction=1)["base LM"] > direct["base LM"]


@pytest.mark.parametrize("bf16", [pytest.param(False, marks=pytest.mark.slow), True])
def test_layers_that_are_computed_again_keep_their_inputs(
    llama: Path, monkeypatch: pytest.MonkeyPatch, bf16: bool
) -> None:
    """Without a loss of the LM, so that the encoders' layers are most of the memory."""
    monkeypatch.setenv("KINETO_LOG_LEVEL", "6")
    config = mac_config(llama, None, "decoder-only", tokens=16, mlp_width=16)
    losses = LossWeights(answer=0, alignment=1)
    whole = measured(config, losses, bf16)
    real = measured(config, losses, bf16, recompute=True)
    found = estimated(config, losses, bf16, recompute=True)
    assert real < whole / 1.5
    assert real / FACTOR < found < real * FACTOR
