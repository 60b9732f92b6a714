"""LMs and encoders in half precision: everything works, and what is trained is trained in fp32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from mac_rag import Document, MACEngine, MACModel
from mac_rag.config import AggregationConfig, BaseLMConfig, EncoderConfig, MACConfig, ModulationConfig, PromptFormat
from mac_rag.lm.base_lm import BaseLM
from mac_rag.lm.lora_tuning import make_trainable
from mac_rag.nn.dtypes import use_master_weights, widest_dtype
from mac_rag.nn.modulation import FiLM, LMShape
from pipelines.objective import LossWeights, mac_loss
from pipelines.tasks.train import TrainTask
from pipelines.tasks.train_config import TrainConfig
from pipelines.trainer import Trainer
from tests.helpers import Folder, built, mac_config, reloaded, strong
from tests.lm.helpers import BATCH, KINDS, QUESTIONS, TEXTS
from tests.pipelines.helpers import TRAINER

HALF = ["bf16", "fp16"]


def in_dtype(config: MACConfig, dtype: Any, /, quantization: str = "none", **encoder: Any) -> MACConfig:
    """The configuration with an LM in a dtype, and further values of both encoders."""
    values = config.model_dump()
    values["base_lm"] |= {"dtype": dtype, "quantization": quantization}
    values["amortization"] |= encoder
    values["input_encoder"] |= encoder
    return MACConfig.model_validate(values)


@pytest.mark.parametrize(("kind", "dtype"), zip(KINDS, ["bf16", "fp16", "bf16"]))
def test_every_path_around_a_half_precision_lm(model_folder: Folder, kind: Any, dtype: str) -> None:
    """The LM's own paths in all dtypes are in test_conformance.py."""
    config = mac_config(model_folder("llama"), modulation=ModulationConfig(kind=kind), memory_weight=0.5)
    model = strong(built(in_dtype(config, dtype)))
    assert widest_dtype(model.base_lm) is model.base_lm.dtype is not torch.float32
    assert {p.dtype for p in model.mac_state().values()} == {torch.float32}

    every = LossWeights(answer=1, direct=1, reconstruction=1, contrastive=1)
    mac_loss(model.train(), BATCH, every)[0]["loss"].backward()
    for part in (model.amortization, model.input_encoder, model.aggregation, model.modulation):
        gradients = [p.grad for p in part.parameters() if p.requires_grad and p.grad is not None]
        assert sum(float(g.abs().sum()) for g in gradients) > 0
        assert all(g.isfinite().all() for g in gradients)

    model.eval()
    engine = MACEngine(model)
    engine.adapt([Document(str(i), text) for i, text in enumerate(TEXTS)])
    for contexts in (None, [TEXTS[:1]]):
        streamed = "".join(engine.stream(QUESTIONS[0], contexts=contexts and contexts[0]))
        assert streamed == engine.answer(QUESTIONS[:1], contexts=contexts)[0].text


@pytest.mark.parametrize(
    ("kind", "quantization"),
    zip(KINDS, ["nf4", "int8", "nf4"]),
)
def test_a_quantised_lm_in_bf16_carries_a_memory(model_folder: Folder, kind: Any, quantization: Any) -> None:
    parts = {"modulation": ModulationConfig(kind=kind), "aggregation": AggregationConfig(blocks=1, heads=2)}
    config = mac_config(model_folder("llama"), model_folder("t5"), "encoder-decoder", **parts)
    model = strong(built(in_dtype(config, "bf16", quantization=quantization)))
    assert model.base_lm.dtype is torch.bfloat16
    phi = model.aggregate(QUESTIONS, model.amortize(TEXTS))
    assert model.generate(QUESTIONS, modulation=phi) != model.generate(QUESTIONS)
    assert model.base_lm.answer_loss([[1, 30]], [[60, 2]], model.modulation(phi[:1])).isfinite().all()


@pytest.mark.parametrize(
    ("dtype", "init"),
    zip(HALF, ["kv_regression", "pretrained"]),
)
def test_training_around_a_half_precision_lm(model_folder: Folder, tmp_path: Path, dtype: str, init: str) -> None:
    config = mac_config(model_folder("llama"), None, "encoder-pooling", tokens=3)
    recipe = TrainConfig.parse(
        {
            "model": in_dtype(config, dtype, embeddings="base-lm", dtype=dtype).model_dump(),
            "init": init,
            "data": {"name": "newswire", "documents": 20, "validation_documents": 4},
            "losses": {"answer": 1, "direct": 1},
            "trainer": {**TRAINER, "steps": 2},
        },
        "test",
    )
    task = TrainTask(recipe)
    Trainer(task, recipe.trainer, tmp_path).run()
    assert {p.dtype for p in task.model.mac_state().values()} == {torch.float32}
    assert task.model.base_lm.dtype is not torch.float32
    again = MACModel.from_pretrained(tmp_path / "last", device="cpu")
    assert again.base_lm.dtype is task.model.base_lm.dtype
    torch.testing.assert_close(again.amortize(TEXTS), task.model.eval().amortize(TEXTS), atol=0.1, rtol=0.1)


def test_film_keeps_a_scale_below_the_resolution_of_bf16() -> None:
    network = FiLM(LMShape(1, 1, 1, width=1, linears={}, blocks=("0",), embeddings=""), width=1)
    lm = torch.nn.Sequential(torch.nn.Identity())
    states = torch.full((1, 1, 1), 255.0, dtype=torch.bfloat16)
    for beta, expected in [(0.0, 255.0), (0.5, 256.0)]:  # 255.25 rounds back; both together reach the next number
        network.to_gamma_beta.bias.data = torch.tensor([2.0**-10, beta])
        with network(torch.zeros(1, 1, 1)).attached(lm):
            assert lm(states).item() == expected


class TestMasterWeights:
    def test_trainable_half_precision_becomes_fp32_and_frozen_stays(self) -> None:
        module = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)).bfloat16()
        module[0].requires_grad_(False)
        use_master_weights(module)
        assert [module[i].weight.dtype for i in range(2)] == [torch.bfloat16, torch.float32]

    @pytest.mark.parametrize(
        "design", ["encoder-decoder", "encoder-pooling", pytest.param("encoder-only", marks=pytest.mark.slow)]
    )
    def test_a_small_step_changes_the_weights_of_a_bf16_backbone(self, model_folder: Folder, design: Any) -> None:
        config = in_dtype(mac_config(model_folder("llama"), model_folder("t5"), design), "bf16", dtype="bf16")
        changed = {}
        for master in (False, True):
            model = strong(built(config)).train()
            if master:
                model.use_master_weights()
            weights = [p for p in model.amortization.network.backbone.parameters() if p.requires_grad]
            before = [p.detach().clone() for p in weights]
            optimiser = torch.optim.AdamW(model.parameters(), lr=1e-5, weight_decay=0.0)
            for _ in range(3):
                mac_loss(model, BATCH, LossWeights())[0]["loss"].backward()
                optimiser.step()
                optimiser.zero_grad()
            moved = sum(int((p != old).sum()) for p, old in zip(weights, before, strict=True) if p.ndim > 1)
            changed[master] = moved / sum(p.numel() for p in weights if p.ndim > 1)
            assert model.base_lm.dtype is torch.bfloat16
        assert changed[True] > 4 * changed[False]

    def test_a_quantised_encoder_stays_bf16_beside_a_decoder_in_fp32(self, model_folder: Folder) -> None:
        config = mac_config(model_folder("llama"), model_folder("t5"), "encoder-decoder")
        part = config.amortization.model_copy(update={"quantization": "nf4"})
        config = config.model_copy(update={"amortization": part, "input_encoder": part})
        model = built(in_dtype(config, "bf16", dtype="bf16"))
        at_first = model.amortize(TEXTS)
        model.use_master_weights()
        backbone = model.amortization.network.backbone
        assert {p.dtype for p in backbone.parameters() if p.requires_grad} == {torch.float32}
        assert torch.float32 not in {p.dtype for p in backbone.parameters() if not p.requires_grad}
        torch.testing.assert_close(model.amortize(TEXTS), at_first, atol=0.1, rtol=0.05)

    @pytest.mark.parametrize("rank", [None, 4])
    def test_an_lm_in_bf16_is_tuned_in_fp32(self, model_folder: Folder, rank: int | None) -> None:
        config = BaseLMConfig(name=str(model_folder("llama")), dtype="bf16")
        lm = BaseLM.load(config, PromptFormat(), torch.device("cpu"))
        make_trainable(lm.model, rank)
        trained = [p for p in lm.model.parameters() if p.requires_grad]
        assert {p.dtype for p in trained} == {torch.float32}
        lm.answer_loss([[1, 30]], [[60, 2]], None).sum().backward()
        assert any(p.grad is not None and p.grad.abs().sum() > 0 for p in trained)


@pytest.mark.parametrize("dtype", ["fp32", *HALF])
def test_encoders_share_the_embeddings_of_an_lm_in_any_dtype(model_folder: Folder, tmp_path: Path, dtype: str) -> None:
    config = in_dtype(mac_config(model_folder("llama")), dtype, embeddings="base-lm", dtype=dtype)
    model = built(config).train()
    backbone = model.amortization.network.backbone
    shared = model.base_lm.model.get_input_embeddings().weight
    assert backbone.get_input_embeddings().weight is shared
    assert not any(p is shared for p in model.mac_state().values())
    assert {p.dtype for p in model.mac_state().values()} == {torch.float32}
    mac_loss(model, BATCH, LossWeights())[0]["loss"].backward()
    assert any(p.grad is not None and p.grad.abs().sum() > 0 for p in backbone.parameters())
    assert shared.grad is None
    again = reloaded(model.eval(), tmp_path)
    assert MACModel.from_pretrained(tmp_path, device="cpu").fingerprint == again.fingerprint
    tolerance = 1e-5 if dtype == "fp32" else 0.1
    torch.testing.assert_close(again.amortize(TEXTS), model.amortize(TEXTS), atol=tolerance, rtol=tolerance)
    assert EncoderConfig.model_validate(again.config.amortization.model_dump()) == config.amortization
