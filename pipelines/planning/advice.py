"""What would help where a training needs more memory than a GPU has: changes of its recipe, each with its effect."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from mac_rag.config import MACConfig
from pipelines.planning.memory import Memory
from pipelines.planning.subject import Subject
from pipelines.tasks.train_config import TrainConfig

_DROPOUT = 0.75  # the paper's, for its large models


@dataclass(frozen=True)
class Advice:
    """A change of a recipe.

    Attributes:
        settings: the change, as options of `pipelines.train`.
        memory: the memory of the training with it.
    """

    settings: str
    memory: Memory


def advice(subject: Subject, gpu: int, document_tokens: int | None = None) -> list[Advice]:
    """Changes that make a training smaller: each alone, and last together those that add up, if none is enough alone.

    Args:
        subject: the training.
        gpu: bytes of the GPU.
        document_tokens: as `training_memory` takes it.
    """
    before = subject.training(document_tokens).total
    all_changes = list(_changes(subject))
    alone = [(_options(changes), subject.changed(**changes).training(document_tokens)) for changes in all_changes]
    found = [Advice(settings, memory) for settings, memory in alone if memory.total < before]
    if any(each.memory.fits(gpu) for each in found):
        return found
    together, settings, least = subject, [], before
    for changes in all_changes:
        memory = together.changed(**changes).training(document_tokens)
        if memory.total < least:
            together, least = together.changed(**changes), memory.total
            settings.append(_options(changes))
    if len(settings) > 1:
        found.append(Advice(" ".join(settings), together.training(document_tokens)))
    return found


def _fewer_layers(model: MACConfig) -> dict[str, Any]:
    """Half of the layers in both encoders, where these start from the base LM; nothing otherwise."""
    parts = {"amortization": model.amortization, "input_encoder": model.input_encoder}
    if any(part.name is not None or (part.layers or 0) < 2 for part in parts.values()):
        return {}
    return {name: {"layers": (part.layers or 0) // 2} for name, part in parts.items()}


def _changes(subject: Subject) -> Iterator[dict[str, Any]]:
    recipe, trainer = subject.recipe, subject.recipe.trainer
    if trainer.batch_size > 1:
        # As many documents in a step, and fewer at once.
        yield {"trainer": {"batch_size": 1, "accumulate": trainer.batch_size * trainer.accumulate}}
    if not trainer.gradient_checkpointing:
        yield {"trainer": {"gradient_checkpointing": True}}
    if trainer.precision == "fp32":
        yield {"trainer": {"precision": "bf16"}}
    if not isinstance(recipe, TrainConfig):
        if recipe.tune == "full":
            yield {"tune": "lora"}
        return
    if trainer.batch_size > 1 and recipe.backprop_dropout < _DROPOUT:
        yield {"backprop_dropout": _DROPOUT}
    if recipe.model is not None and (fewer := _fewer_layers(recipe.model)):
        yield {"model": fewer}
    if recipe.tune_base_lm != "frozen":
        yield {"tune_base_lm": "frozen"}
        if recipe.tune_base_lm == "full":
            yield {"tune_base_lm": "lora"}
    elif recipe.model is not None and recipe.model.base_lm.quantization == "none" and _can_be_quantised(recipe):
        yield {"model": {"base_lm": {"dtype": "bf16", "quantization": "nf4"}}}


def _can_be_quantised(recipe: TrainConfig) -> bool:
    """True unless an encoder reads with embeddings whose dtype would change."""
    model = recipe.model
    assert model is not None
    parts = (model.amortization, model.input_encoder)
    return model.base_lm.gguf_file is None and all(part.embeddings == "own" or part.dtype == "bf16" for part in parts)


def _options(changes: dict[str, Any], name: str = "") -> str:
    return " ".join(
        _options(value, f"{name}{key}.") if isinstance(value, dict) else f"--set {name}{key}={value}"
        for key, value in changes.items()
    )
