"""Tuning a base LM on questions and answers: the starting point of the baselines and of the rows with a retriever."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional

from mac_rag.config import BaseLMConfig, Config
from mac_rag.data.types import Document, Question
from mac_rag.loading import load_causal_lm, quiet
from mac_rag.prompt import PromptEncoder, PromptFormat
from mac_rag.tuning import make_trainable, merged
from pipelines.tasks.questions import ContextConfig, ContextMiner, DataConfig, retrieved
from pipelines.tasks.reading import reading_scores
from pipelines.trainer import Task, TrainerConfig, shuffled


class TuneConfig(Config):
    """A recipe of `pipelines.tune_qa`.

    Attributes:
        tune: all weights (`full`), or low-rank updates that are merged at the end (`lora`).
        loss_on: `answers`, or `all` tokens of documents, questions and answers.
        questions_per_context: questions asked behind one set of documents: the one that they were retrieved for, and
            others that they answer.
        sequence_length: longest training sequence in tokens; documents beyond it are left out of the set.
    """

    base_lm: BaseLMConfig
    prompt: PromptFormat = PromptFormat()
    data: DataConfig = DataConfig()
    context: ContextConfig = ContextConfig()
    tune: Literal["full", "lora"] = "full"
    lora_rank: int = Field(16, ge=1)
    loss_on: Literal["answers", "all"] = "answers"
    questions_per_context: int = Field(1, ge=1)
    sequence_length: int = Field(512, ge=16)
    trainer: TrainerConfig


class TuneTask(Task):
    """The LM, its questions, and its validation: EM and F1 without documents and with each number of them."""

    def __init__(self, config: TuneConfig) -> None:
        super().__init__()
        self.config = config
        device = torch.device("cuda" if torch.cuda.is_available() and not config.trainer.cpu else "cpu")
        torch.manual_seed(config.trainer.seed)
        lm, tokenizer = load_causal_lm(config.base_lm, device)
        self.lm: Any = lm
        make_trainable(self.lm, config.lora_rank if config.tune == "lora" else None)
        self.encoder = PromptEncoder(tokenizer, config.prompt)
        data = config.data.training_set()
        self._questions = data.questions
        self._by_document = data.questions_by_document()
        self._miner = ContextMiner(config.context, data)
        self._validation = config.data.validation_set()
        self._validation_retrieved = retrieved(config.context, self._validation)

    def batch(self, step: int, micro: int, size: int) -> list[tuple[list[int], list[int]]]:
        """Sequences as token ids, each with the ids that the loss looks at and -100 elsewhere."""
        trainer = self.config.trainer
        per_step = size * self.passes
        indices = shuffled(len(self._questions), step, micro, size, seed=trainer.seed, per_step=per_step)
        questions = [self._questions[i] for i in indices]
        rng = random.Random(f"{trainer.seed}/{step}/{micro}")
        contexts = self._miner.mine(questions, rng)
        return [self._sequence(q, c, rng) for q, c in zip(questions, contexts, strict=True)]

    def _sequence(
        self, question: Question, contexts: list[Document], rng: random.Random
    ) -> tuple[list[int], list[int]]:
        others = [q for document in contexts for q in self._by_document[document.id] if q.id != question.id]
        rng.shuffle(others)
        asked = [question, *others[: self.config.questions_per_context - 1]]
        rng.shuffle(asked)
        ids = self.encoder.prompt_start([document.text for document in contexts])
        whole = self.config.loss_on == "all"
        labels = list(ids) if whole else [-100] * len(ids)
        for pair in asked:
            prompt, answer = self.encoder.question(pair.question), self.encoder.answer(pair.answers[0])
            ids += prompt + answer
            labels += (prompt if whole else [-100] * len(prompt)) + answer
        # From the front, so that what is cut is document text, and the question it was retrieved for may remain.
        length = self.config.sequence_length
        return ids[-length:], labels[-length:]

    def forward(self, batch: list[tuple[list[int], list[int]]]) -> dict[str, Tensor]:
        length = max(len(ids) for ids, _ in batch)
        pad = self.encoder.tokenizer.pad_token_id
        device = self.lm.device
        ids = torch.tensor([[*ids, *[pad] * (length - len(ids))] for ids, _ in batch], device=device)
        labels = torch.tensor([[*row, *[-100] * (length - len(row))] for _, row in batch], device=device)
        mask = torch.tensor([[1] * len(ids) + [0] * (length - len(ids)) for ids, _ in batch], device=device)
        logits = self.lm(input_ids=ids, attention_mask=mask).logits[:, :-1].flatten(0, 1)
        return {"loss": functional.cross_entropy(logits.float(), labels[:, 1:].flatten(), ignore_index=-100)}

    def validate(self) -> dict[str, float]:
        data = self._validation
        figures = self._scores([()] * len(data.questions), "_closed")
        found = self._validation_retrieved
        if found is not None:
            for k in sorted(set(self.config.context.k)):
                contexts = [[document.text for document in found[q.question][:k]] for q in data.questions]
                figures |= self._scores(contexts, f"_retrieved_{k}")
        return figures

    def _scores(self, contexts: Sequence[Sequence[str]], suffix: str) -> dict[str, float]:
        """The figures under their own names, too: those of the last number of documents stay there."""
        scores = reading_scores(self.lm, self.encoder, self._validation.questions, contexts)
        return {**{f"{name}{suffix}": value for name, value in scores.items()}, **scores}

    def save(self, folder: Path) -> None:
        with quiet():
            merged(self.lm).save_pretrained(folder)
        self.encoder.tokenizer.save_pretrained(folder)
