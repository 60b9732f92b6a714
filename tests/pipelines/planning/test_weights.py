"""Planned bytes of weights, gradients, optimiser and bank are those of real models, to the byte."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from mac_rag.config import EncoderConfig, HashedBM25Config, MACConfig, ModulationConfig
from mac_rag.data.types import Document
from mac_rag.engine import MACEngine
from mac_rag.memory import MemoryBank
from mac_rag.model import MACModel
from pipelines.averaging import WeightMean
from pipelines.objective import Batch, LossWeights, mac_loss
from pipelines.planning.answering import row_bytes
from pipelines.planning.empty_model import empty_model
from pipelines.planning.training import trained_numbers, training_memory
from pipelines.planning.weights import BASE_LM, weights_by_part
from pipelines.tasks.train_config import TrainConfig
from tests.helpers import mac_config
from tests.pipelines.helpers import TRAINER

Folder = Callable[[str], Path]
KINDS = [("none", "fp32"), ("none", "bf16"), ("nf4", "bf16"), ("int8", "fp16")]


def stored_bytes(modules: Iterable[nn.Module]) -> int:
    """Memory of the weights and buffers of real modules, each once, with what bitsandbytes keeps beside them."""
    tensors: dict[int, torch.Tensor] = {}
    for module in modules:
        for weight in (*module.parameters(), *module.buffers()):
            tensors[weight.data_ptr()] = weight
            state, scales = getattr(weight, "quant_state", None), getattr(weight, "SCB", None)
            kept = [] if state is None else [state.absmax, state.code]
            for tensor in kept if scales is None else [*kept, scales]:
                tensors[tensor.data_ptr()] = tensor
    return sum(tensor.nbytes for tensor in tensors.values())


def models(folder: Folder) -> dict[str, MACConfig]:
    llama, gpt2, t5 = folder("llama"), folder("gpt2"), folder("t5")
    return {
        "own layers": mac_config(llama, None, "encoder-pooling"),
        "T5": mac_config(gpt2, t5, "encoder-decoder", modulation=ModulationConfig(bottleneck=8)),
        "T5's encoder": mac_config(llama, t5, "encoder-only", modulation=ModulationConfig(kind="lora")),
    }


@pytest.mark.parametrize("name", ["own layers", "T5", "T5's encoder"])
@pytest.mark.parametrize(("quantization", "dtype"), KINDS)
def test_weights(model_folder: Folder, name: str, quantization: Any, dtype: Any) -> None:
    config = models(model_folder)[name]
    base_lm = config.base_lm.model_copy(update={"quantization": quantization, "dtype": dtype})
    changes: dict[str, Any] = {"base_lm": base_lm}
    if config.amortization.name is not None:
        part = config.amortization.model_copy(update={"quantization": quantization, "dtype": dtype})
        changes |= {"amortization": part, "input_encoder": part}
    config = config.model_copy(update=changes)
    real = MACModel.from_config(config, device="cpu")
    real.use_master_weights()
    empty = empty_model(config)
    empty.use_master_weights()
    planned = {part.name: part.bytes for part in weights_by_part(empty)}
    assert planned[BASE_LM] == stored_bytes([real.base_lm])
    assert sum(planned.values()) == stored_bytes([real])


@pytest.mark.parametrize(
    ("recipe", "losses"),
    [
        ({}, LossWeights()),
        ({"tune_amortization": False}, LossWeights(answer=1, contrastive=1)),
        ({"losses": {"answer": 0, "direct": 1}}, LossWeights(answer=0, direct=1)),
        ({"tune_base_lm": "full"}, LossWeights()),
        ({"tune_base_lm": "lora", "lora_rank": 3}, LossWeights()),
        ({"trainer": {**TRAINER, "average_from": 0.5}}, LossWeights(answer=0, direct=1)),
    ],
)
def test_gradients_and_optimiser(model_folder: Folder, recipe: dict[str, Any], losses: LossWeights) -> None:
    config = mac_config(
        model_folder("llama"), None, "encoder-pooling", modulation=ModulationConfig(attention_sink=True)
    )
    part = config.amortization.model_copy(update={"layers": 1, "embeddings": "base-lm"})
    config = config.model_copy(update={"amortization": part, "input_encoder": part})
    values = {"model": config.model_dump(), "losses": losses.model_dump(), "trainer": TRAINER, **recipe}
    settings = TrainConfig.model_validate(values)

    real = MACModel.from_config(config, device="cpu")
    if settings.tune_base_lm != "frozen":
        real.train_base_lm(lora_rank=settings.lora_rank if settings.tune_base_lm == "lora" else None)
    real.use_master_weights()
    optimizer = torch.optim.AdamW([p for p in real.parameters() if p.requires_grad], fused=True)
    texts = ["Ada Voss was appointed.", "A storm has hit Haib."]
    batch = Batch(texts, ["Who?", "What?"], ["Ada Voss", "a storm"], [0, 1])
    mac_loss(real, batch, losses, tune_amortization=settings.tune_amortization)[0]["loss"].backward()
    optimizer.step()
    gradients = sum(p.grad.nbytes for p in real.parameters() if p.grad is not None)
    states = sum(value.nbytes for state in optimizer.state.values() for value in state.values())

    empty = empty_model(config)
    memory = training_memory(empty, settings)
    assert memory.of("weights") == stored_bytes([real])
    assert sum(trained_numbers(empty, settings).values()) == memory.of("gradients") // 4
    assert memory.of("gradients") == gradients
    assert memory.of("optimiser") == states
    start = settings.trainer.average_from
    kept = {} if start is None else WeightMean(real, 2, start).state(2)
    assert memory.of("mean") == sum(mean.nbytes for mean in kept.values())


@pytest.mark.parametrize("rows", ["bf16", "int8"])
@pytest.mark.parametrize("lexical", [False, True])
def test_documents_in_a_bank(model_folder: Folder, tmp_path: Path, rows: Any, lexical: bool) -> None:
    config = mac_config(
        model_folder("llama"), hashed_bm25=HashedBM25Config(vectors=2) if lexical else None, max_document_tokens=64
    )
    model = MACModel.from_config(config, device="cpu")
    engine = MACEngine(model, MemoryBank.create(tmp_path / "bank", model.fingerprint, rows=rows))
    engine.adapt([Document(str(number), f"{number} storms have hit Haib.") for number in range(8)])
    [segment] = (tmp_path / "bank").glob("segment-*.safetensors")
    header = 8 + int.from_bytes(segment.read_bytes()[:8], "little")
    stored, planned = segment.stat().st_size - header, 8 * row_bytes(empty_model(config), rows)
    assert stored <= planned if lexical else stored == planned


def test_a_part_counts_what_an_earlier_part_has_only_once(model_folder: Folder) -> None:
    part = EncoderConfig(design="decoder-only", name=None, embeddings="base-lm")
    config = mac_config(model_folder("llama")).model_copy(update={"amortization": part, "input_encoder": part})
    real, parts = MACModel.from_config(config, device="cpu"), weights_by_part(empty_model(config))
    assert sum(part.count for part in parts) == sum(p.numel() for p in real.parameters())
