"""The memory of a training, by part of the model: what a recipe of `pipelines.train` or `pipelines.tune_qa` takes."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mac_rag.lm.base_lm import BaseLM
from mac_rag.lm.lora_tuning import make_trainable
from mac_rag.model import MACModel
from pipelines.objective import LossWeights
from pipelines.planning.activations import QUESTION_TOKENS, Step, activations, inner_width, layer_bytes
from pipelines.planning.memory import Memory
from pipelines.planning.weights import AGGREGATION, AMORTIZATION, BASE_LM, INPUT, MODULATION, Weights, weights_by_part
from pipelines.tasks.train_config import TrainConfig
from pipelines.tasks.tune_qa import TuneConfig
from pipelines.trainer import TrainerConfig

_ADAM = 8  # bytes of a weight's two moments
_ADAM_STEP = 4  # bytes of each tensor's step


def training_of(model: MACModel | BaseLM, recipe: TrainConfig | TuneConfig, document_tokens: int | None) -> Memory:
    """`training_memory` or `tuning_memory`, whichever the recipe asks for."""
    if isinstance(recipe, TuneConfig):
        assert isinstance(model, BaseLM)
        return tuning_memory(model, recipe)
    assert isinstance(model, MACModel)
    return training_memory(model, recipe, document_tokens=document_tokens)


def training_memory(model: MACModel, recipe: TrainConfig, *, document_tokens: int | None = None) -> Memory:
    """The memory of one optimiser step on one GPU.

    Args:
        model: the recipe's model without numbers (`pipelines.planning.empty_model`); it is prepared for training.
        recipe: the recipe.
        document_tokens: tokens of each document of a batch; None for as many as the model reads.

    Raises:
        ConfigError: for a base LM that cannot be trained as the recipe says.
    """
    prepare(model, recipe)
    weights = weights_by_part(model)
    bf16 = recipe.trainer.precision == "bf16"
    changed = changed_parts(recipe)
    longest = model.amortization.max_tokens
    read = longest if document_tokens is None else min(document_tokens, longest)
    phases = [activations(model, _step(recipe, losses, read, bf16)) for losses in recipe.all_losses]
    kept = max(phases, key=lambda phase: sum(phase.values()))
    parts = {}
    for part in weights:
        whole = optimised(part, part.name in changed, recipe.trainer)
        parts[part.name] = {**whole, "activations": kept.get(part.name, 0)}
    row = model.row_shape[0] * model.row_shape[1]
    if recipe.negatives:
        parts["negatives of earlier batches"] = {"weights": 2 * recipe.negatives * row}
    return Memory(parts)


def prepare(model: MACModel, recipe: TrainConfig) -> None:
    """What `pipelines.tasks.train.TrainTask` does before it trains."""
    with torch.device("meta"):
        if recipe.tune_base_lm != "frozen":
            model.train_base_lm(lora_rank=recipe.lora_rank if recipe.tune_base_lm == "lora" else None)
        model.use_master_weights()


def trained_numbers(model: MACModel | BaseLM, recipe: TrainConfig | TuneConfig) -> dict[str, int]:
    """Part -> number of weights that a training changes, of a model that is prepared for it."""
    if isinstance(model, BaseLM):
        return {BASE_LM: sum(weight.numel() for weight in model.parameters() if weight.requires_grad)}
    assert isinstance(recipe, TrainConfig)
    changed = changed_parts(recipe)
    return {
        part.name: sum(weight.numel() for weight in part.trained) if part.name in changed else 0
        for part in weights_by_part(model)
    }


def changed_parts(recipe: TrainConfig) -> set[str]:
    """Names of the parts that get gradients from any of a recipe's losses."""

    def any_of(*names: str) -> bool:
        return any(getattr(losses, name) for losses in recipe.all_losses for name in names)

    writes = any_of("answer", "direct", "distillation", "reconstruction")
    asks = any_of("answer", "contrastive", "alignment")
    return {
        *([AMORTIZATION] if recipe.tune_amortization else []),
        *([INPUT, AGGREGATION] if asks else []),
        *([MODULATION] if writes else []),
        *([BASE_LM] if writes and recipe.tune_base_lm != "frozen" else []),
    }


def optimised(part: Weights, changed: bool, trainer: TrainerConfig) -> dict[str, int]:
    """Bytes of a part's weights, and of what a training keeps beside those that it changes.

    That is AdamW's state; a copy of each trained matrix in bf16, with mixed precision; and the mean of the weights in
    float32, with `average_from`, of all that may change.

    Args:
        part: the part.
        changed: True if its trained weights get gradients.
        trainer: the recipe's trainer.
    """
    trained = part.trained if changed else ()
    numbers = sum(weight.numel() for weight in trained)
    matrices = sum(weight.numel() for weight in trained if weight.ndim >= 2)
    return {
        "weights": part.bytes,
        "gradients": sum(weight.numel() * weight.element_size() for weight in trained),
        "optimiser": _ADAM * numbers + _ADAM_STEP * len(trained),
        "bf16 copies": 2 * matrices if trainer.precision == "bf16" else 0,
        "mean": 0 if trainer.average_from is None else 4 * sum(weight.numel() for weight in part.trained),
    }


def _step(recipe: TrainConfig, losses: LossWeights, document_tokens: int, bf16: bool) -> Step:
    documents = recipe.trainer.batch_size
    questions = documents * recipe.questions_per_document
    live = max(1, round((1 - recipe.backprop_dropout) * documents)) if recipe.tune_amortization else 0
    retrieved = max(recipe.context.k) if recipe.context.retriever != "none" and recipe.context.rate else 0
    return Step(
        documents=documents,
        live=live,
        questions=questions,
        document_tokens=document_tokens,
        context_tokens=retrieved * document_tokens,
        further_rows=min(recipe.negatives, recipe.distractors * questions),
        losses=losses,
        bf16=bf16,
        recompute=recipe.trainer.gradient_checkpointing,
    )


def tuning_memory(base_lm: BaseLM, recipe: TuneConfig) -> Memory:
    """The memory of one optimiser step of tuning an LM on questions and answers.

    Args:
        base_lm: the recipe's LM without numbers; it is prepared for training.
        recipe: the recipe; sequences are as long as it allows where documents stand in front of the questions.

    Raises:
        ConfigError: for a base LM that cannot be trained as the recipe says.
    """
    with torch.device("meta"):
        make_trainable(base_lm.model, recipe.lora_rank if recipe.tune == "lora" else None)
    bf16 = recipe.trainer.precision == "bf16"
    parameters: Sequence[torch.nn.Parameter] = tuple(base_lm.model.parameters())
    weights = Weights(BASE_LM, tuple(parameters), tuple(base_lm.model.buffers()), {})
    lm, number = base_lm.model.config, 2 if bf16 or base_lm.dtype.itemsize == 2 else 4
    length = QUESTION_TOKENS if recipe.context.retriever == "none" else recipe.sequence_length
    layer = layer_bytes(lm.hidden_size, inner_width(lm), number)
    layers = lm.num_hidden_layers * layer
    if recipe.trainer.gradient_checkpointing:
        layers = 4 * lm.num_hidden_layers * lm.hidden_size + layer
    kept = recipe.trainer.batch_size * min(length, base_lm.context_window) * (layers + lm.vocab_size * (number + 8))
    return Memory({BASE_LM: {**optimised(weights, True, recipe.trainer), "activations": kept}})
