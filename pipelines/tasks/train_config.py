"""The recipe of meta-training: the model, its start, the losses, and what the batches hold."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, Self

from pydantic import Field, model_validator

from mac_rag.config import MACConfig
from mac_rag.model.presets import preset_values
from pipelines.corpora.qa_data import ContextConfig, DataRecipe
from pipelines.objective import LossWeights
from pipelines.tasks.tune_qa import ReadingConfig
from pipelines.trainer import TrainingRecipe


class TrainConfig(DataRecipe, TrainingRecipe):
    """A recipe of the task `train`. `trainer.batch_size` counts documents, K in the paper without `context_set`.

    Attributes:
        model: the networks; beside a preset, the values that differ from the preset's. Give a model, a preset, or
            `start_from`.
        preset: name of a preset; see `mac_rag.model.presets`.
        base_lm: short for `model: {base_lm: ...}` beside a preset, such as `{name: ...}` for an LM that was tuned on
            questions. Values that it lacks stay the preset's, as dtype and quantisation do.
        start_from: name or folder of a MAC checkpoint whose training continues.
        init: first weights of the networks of `model`: those of the pretrained backbones and random ones elsewhere
            (`pretrained`), or fitted by regression to the keys and values that the base LM computes (`kv_regression`;
            see `pipelines.tasks.kv_regression`).
        group_by_title: largest number of consecutive documents with one title that stay together in a batch. A question
            then has to find its document among others on the same subject, as in a bank.
        questions_per_document: questions drawn for each document of a batch.
        backprop_dropout: p, share of the documents that are amortized without gradients.
        context_set: K, the number of documents to which a question attends. A batch then holds several sets, which
            share its passes through the networks; None for all documents of the batch.
        losses: weight of each term; the paper has `answer` alone.
        negatives: number of documents of earlier batches that are negatives of the contrastive loss.
        distractors: number of negatives that each question adds to the documents which all questions attend to: those
            with the highest document prior.
        context: retrieved documents before the questions, `LM(d + x; phi*)`; without a retriever the LM reads the
            question alone.
        without_memory: share of the questions after documents that the LM answers without memory. A base LM that is
            trained jointly then still reads without it.
        gold_hidden: share of the questions from which aggregation hides the document that answers them, as if the bank
            lacked it. If no document before such a question answers it either, the target is the model's
            `prompt.abstention`; likewise for a question without memory.
        reading: steps between the others in which the LM reads documents without memory, as by the task `tune_qa`;
            None for none. A base LM that is trained jointly then continues to learn to read. Such a step has as many
            questions as the largest other step.
        curriculum: number of first steps on short documents, which move a small model off the plateau where whole
            documents leave it: of one sentence in the first fifth of these steps, of two in the next, and so on.
            Sentences that hold an answer come first. The loss is then `direct` alone.
        tune_base_lm: `frozen`, or joint training of all weights (`full`) or of low-rank updates that are merged at the
            end (`lora`).
        store_dtype: dtype of the weights in exported checkpoints; see `mac_rag.lm.loading.to_int8`.
    """

    model: MACConfig | None = None
    start_from: str | None = None
    init: Literal["pretrained", "kv_regression"] = "pretrained"
    group_by_title: int = Field(1, ge=1)
    questions_per_document: int = Field(1, ge=1)
    backprop_dropout: float = Field(0.0, ge=0, lt=1)
    context_set: int | None = Field(None, ge=1)
    losses: LossWeights = LossWeights()
    negatives: int = Field(0, ge=0)
    distractors: int = Field(0, ge=0)
    context: ContextConfig = ContextConfig()
    without_memory: float = Field(0.0, ge=0, le=1)
    gold_hidden: float = Field(0.0, ge=0, lt=1)
    reading: ReadingConfig | None = None
    curriculum: int = Field(0, ge=0)
    tune_base_lm: Literal["frozen", "lora", "full"] = "frozen"
    store_dtype: Literal["fp32", "bf16", "int8"] = "fp32"

    @model_validator(mode="before")
    @classmethod
    def _preset(cls, values: object) -> object:
        """Replaces `preset` by its model, with the values of `base_lm` and `model` in place of the preset's own."""
        if not isinstance(values, Mapping) or "preset" not in values:
            return values
        values = dict(values)
        changes = values.pop("model", None) or {}
        if not isinstance(changes, Mapping):
            raise ValueError(f"model is {changes!r:.200}; give the values that shall differ from the preset's")
        if "base_lm" in values:
            if "base_lm" in changes:
                raise ValueError("give either base_lm or model.base_lm, not both")
            changes = {**changes, "base_lm": values.pop("base_lm")}
        model = preset_values(values.pop("preset"), changes)
        return {**values, "model": model}

    @model_validator(mode="after")
    def _one_start(self) -> Self:
        if (self.model is None) == (self.start_from is None):
            raise ValueError("give one of model, preset and start_from")
        if self.init != "pretrained" and self.start_from is not None:
            raise ValueError(
                f"init is {self.init}, but the networks of start_from ({self.start_from!r}) are trained on"
            )
        return self

    @model_validator(mode="after")
    def _distractors_are_negatives(self) -> Self:
        if self.distractors > self.negatives:
            raise ValueError(
                f"distractors ({self.distractors}) are chosen among negatives ({self.negatives}); raise these"
            )
        return self

    @model_validator(mode="after")
    def _whole_sets(self) -> Self:
        documents = self.trainer.batch_size
        if self.context_set is not None and (documents % self.context_set or self.negatives):
            raise ValueError(
                f"context_set is {self.context_set}, but a batch of {documents} documents is no multiple of it, or "
                f"negatives ({self.negatives}) belong to no set; change one of them"
            )
        return self

    @model_validator(mode="after")
    def _reading_trains_the_lm(self) -> Self:
        if self.reading is not None and self.tune_base_lm == "frozen":
            raise ValueError("reading trains the LM, but tune_base_lm is frozen; set it to lora or full")
        if self.reading is not None and self.trainer.in_parts:
            raise ValueError(
                "with trainer.parallel: fsdp all processes must call the LM equally often, which steps of reading do "
                "not; leave reading out"
            )
        return self

    @model_validator(mode="after")
    def _processes_call_alike(self) -> Self:
        """Processes that train in parts gather each layer together, so all must call it equally often."""
        if not self.trainer.in_parts:
            return self
        if self.without_memory:
            raise ValueError(
                f"without_memory is {self.without_memory}, but with trainer.parallel: fsdp all processes must call the "
                "LM equally often; set it to 0"
            )
        if self.group_by_title > 1 and self.backprop_dropout:
            raise ValueError(
                f"group_by_title is {self.group_by_title}, and with it the processes have batches of different sizes, "
                "which backprop_dropout divides; with trainer.parallel: fsdp, set one of them to its default"
            )
        return self
