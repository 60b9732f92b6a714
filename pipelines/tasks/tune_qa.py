"""Tunes a base LM on questions and answers. The baselines and the evaluations with a retriever start from it."""

from __future__ import annotations

import random
from collections.abc import Container, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.nn import functional

from mac_rag.config import BaseLMConfig, Config, PromptFormat
from mac_rag.data.types import Document, QADataset, Question
from mac_rag.errors import ConfigError
from mac_rag.lm.architectures import architecture_of
from mac_rag.lm.base_lm import BaseLM
from mac_rag.lm.batching import length_buckets, pad_rows, similar_lengths
from mac_rag.lm.chat import prompt_encoder
from mac_rag.lm.loading import load_causal_lm, quiet
from mac_rag.lm.lora_tuning import make_trainable, merged
from mac_rag.lm.minilm import PACKAGED
from mac_rag.lm.prefix_lm import repeated_positions
from mac_rag.model.presets import preset_values
from pipelines.corpora.long_documents import within_sequences
from pipelines.corpora.qa_data import ContextConfig, ContextMiner, DataRecipe, retrieved
from pipelines.tasks.open_book import reading_scores
from pipelines.tasks.pointer import init_pointer_head, last_attention, places_of, pointer_loss
from pipelines.trainer import Task, TrainingRecipe, shuffled

_COUNTED, _READ = 2048, 32  # training questions whose answers are counted, and whose prompts are read
_LENGTH_RATIO = 2.0  # largest ratio of the longest to the shortest sequence of a batch
LORA_RANK = 16  # of low-rank updates of an LM, as in LoRA's experiments on wide LMs (Hu et al., 2022)
# Largest share of document tokens that a question does not attend to, where the documents are question-blind; drawn
# uniformly for each question. A memory holds fewer vectors than a text has tokens.
_TOKEN_DROPOUT = 0.5
# For a prefix LM, padding included. A GPU is only busy with many.
_TOKENS_AT_ONCE = {"cpu": 2048, "cuda": 32_768}


class ReadingConfig(Config):
    """How an LM learns to read: documents before questions.

    Attributes:
        context: the documents before the questions.
        question_blind: only for a prefix LM: share of the sequences whose documents do not attend to the question. The
            LM then learns to read keys and values that were computed before the question, as a memory's are. Documents
            that are read in parallel always see the question.
        sequence_length: longest training sequence in tokens; longer ones are cut at the front.
    """

    context: ContextConfig = ContextConfig()
    question_blind: float = Field(0.0, ge=0, le=1)
    sequence_length: int = Field(512, ge=16)


class TuneConfig(ReadingConfig, DataRecipe, TrainingRecipe):
    """A recipe of the task `tune_qa`.

    Attributes:
        base_lm: the LM; beside a preset, the values that differ from the preset's LM.
        preset: name of a preset (see `mac_rag.model.presets`), whose LM is tuned in its dtype, without quantisation.
        prompt: the templates. With `prompt.abstention`, this text is the target of a question whose own document is not
            before it; without, the answer always is.
        tune: train all weights (`full`), or low-rank updates that are merged at the end (`lora`).
        questions_per_context: questions after one set of documents: the one that they were retrieved for, and others
            that they answer.
    """

    base_lm: BaseLMConfig
    prompt: PromptFormat = PromptFormat()
    tune: Literal["full", "lora"] = "full"
    questions_per_context: int = Field(1, ge=1)

    @model_validator(mode="before")
    @classmethod
    def _preset(cls, values: object) -> object:
        """Replaces `preset` by its LM, with the values of `base_lm` in place of its own."""
        if not isinstance(values, Mapping) or "preset" not in values:
            return values
        values = dict(values)
        changes = {"base_lm": values["base_lm"]} if "base_lm" in values else {}
        base_lm = preset_values(values.pop("preset"), changes)["base_lm"]
        if isinstance(base_lm, Mapping):
            # Trained weights cannot be quantised; the preset's quantisation is for MAC, which leaves the LM frozen.
            base_lm = {**base_lm, "quantization": changes.get("base_lm", {}).get("quantization", "none")}
        return {**values, "base_lm": base_lm}


class TrainingSequence(NamedTuple):
    """A training sequence; all but `copied` hold one value for each token.

    Attributes:
        ids: token ids.
        labels: the token id where the loss counts the token, -100 elsewhere.
        segment_ids: segment of the prompt, 0 for answers.
        hidden: True for tokens that only their own segment sees.
        copied: where the spans of the documents begin that equal the answer.
    """

    ids: list[int]
    labels: list[int]
    segment_ids: list[int]
    hidden: list[bool]
    copied: list[int]


class TuneTask(Task):
    """An LM and its questions. Validation gives EM and F1 without documents and with each number of them.

    Another task that trains the LM, too, gives it as `base_lm`, and decides which of its weights are trained.
    """

    def __init__(self, config: TuneConfig, base_lm: BaseLM | None = None) -> None:
        super().__init__()
        self.config = config
        torch.manual_seed(config.trainer.seed)
        if base_lm is None:
            lm, tokenizer = load_causal_lm(config.base_lm, config.trainer.device)
        else:
            lm, tokenizer = base_lm.model, base_lm.tokenizer
        self.lm: Any = lm
        architecture = architecture_of(lm)
        architecture.check_format(config.prompt)
        self._segmented = architecture.takes_segments
        if self._segmented and config.questions_per_context > 1:
            raise ConfigError(
                f"questions_per_context is {config.questions_per_context}, but a prefix LM reads a question at a time; "
                "set it to 1"
            )
        if config.question_blind and not self._segmented:
            raise ConfigError(
                f"question_blind is {config.question_blind}, but only in a prefix LM do documents attend to what "
                "follows them; set it to 0"
            )
        if base_lm is None:
            make_trainable(self.lm, LORA_RANK if config.tune == "lora" else None)
        self.encoder = prompt_encoder(tokenizer, config.prompt)
        data = config.data.training_set()
        if config.context.retriever != "none":
            data = within_sequences(data, self.encoder, config.sequence_length)
        self._questions = data.questions
        packaged = PACKAGED.get(config.base_lm.name)
        self._from_encoder = base_lm is None and packaged is not None and not packaged.writes
        if self._from_encoder:
            self._init_pointer_head(data)
        self._by_document = data.questions_by_document()
        self._miner = ContextMiner(config.context, data)
        # Another task that trains the LM validates it, too.
        self._validation = config.data.validation_set() if base_lm is None else None
        self._validation_retrieved = None if self._validation is None else retrieved(config.context, self._validation)

    def _init_pointer_head(self, data: QADataset) -> None:
        texts = {document.id: document.text for document in data.documents}
        sample = self._questions[:_COUNTED]
        prompts = [self.encoder.prompt(q.question, [texts[q.gold]]) for q in sample[:_READ]]
        ids, _ = pad_rows(prompts, self.encoder.tokenizer.pad_token_id, self.lm.device)
        answers = [token for q in sample for token in self.encoder.answer(q.answers[0])]
        init_pointer_head(self.lm, ids, torch.tensor(answers, device=self.lm.device))

    def batch(self, step: int, micro: int, size: int) -> list[TrainingSequence]:
        """Training sequences."""
        trainer = self.config.trainer
        per_step = size * self.passes
        indices = shuffled(len(self._questions), step, micro, size, seed=trainer.seed, per_step=per_step)
        questions = [self._questions[i] for i in indices]
        rng = random.Random(f"{trainer.seed}/{step}/{micro}")
        contexts = self._miner.mine(questions, rng)
        return [self._sequence(q, c, rng) for q, c in zip(questions, contexts, strict=True)]

    def _sequence(self, question: Question, contexts: list[Document], rng: random.Random) -> TrainingSequence:
        others = [q for document in contexts for q in self._by_document[document.id] if q.id != question.id]
        rng.shuffle(others)
        questions = [question, *others[: self.config.questions_per_context - 1]]
        rng.shuffle(questions)
        texts, read = [document.text for document in contexts], {document.id for document in contexts}
        ids: list[int] = []
        labels: list[int] = []
        segment_ids: list[int] = []
        for prompt, answer in self.encoder.exchanges(texts, [(q.question, self._target(q, read)) for q in questions]):
            ids += prompt + answer
            segment_ids += self.encoder.segment_ids(prompt) + [0] * len(answer)
            labels += [-100] * len(prompt) + answer
        blind = rng.random() < self.config.question_blind
        documents = self.encoder.places_of_documents(question.question, texts) if self._segmented else []
        copied = [
            part.start + place for part in documents for place in places_of(answer[:-1], ids[part.start : part.stop])
        ]
        hidden = [False] * len(ids)
        blind = blind and len(documents) == 1  # those of several prompts see the question beside them
        start = documents[0].stop if blind else 0
        if blind:
            share = rng.random() * _TOKEN_DROPOUT
            segment_ids[:start], hidden[:start] = [2] * start, [rng.random() < share for _ in range(start)]
        # Cut at the front: document text goes, and the question that it was retrieved for can stay.
        length = self.config.sequence_length
        cut = max(0, len(ids) - length)
        places = [place - cut for place in copied if place >= cut]
        return TrainingSequence(ids[cut:], labels[cut:], segment_ids[cut:], hidden[cut:], places)

    def _target(self, question: Question, read: Container[str]) -> str:
        """The target of a question after the documents with these ids."""
        abstention = self.encoder.format.abstention
        return question.answers[0] if abstention is None or question.document_id in read else abstention

    def forward(self, batch: list[TrainingSequence]) -> dict[str, Tensor]:
        if self._segmented:
            return self._segmented_losses(batch)
        device, pad = self.lm.device, self.encoder.tokenizer.pad_token_id
        loss = torch.zeros((), device=device)
        for group in similar_lengths([len(sequence.ids) for sequence in batch], _LENGTH_RATIO):
            ids, mask = pad_rows([batch[i].ids for i in group], pad, device)
            labels, _ = pad_rows([batch[i].labels for i in group], -100, device)
            logits = self.lm(input_ids=ids, attention_mask=mask).logits[:, :-1].flatten(0, 1).float()
            loss = loss + functional.cross_entropy(logits, labels[:, 1:].flatten(), ignore_index=-100, reduction="sum")
        return {"loss": loss / sum(label != -100 for sequence in batch for label in sequence.labels[1:])}

    def networks_to_compile(self) -> list[nn.Module]:
        """The LM, if it is a causal one whose layers run once."""
        return [] if self._segmented or self.config.trainer.gradient_checkpointing else [self.lm.base_model]

    @cached_property
    def _base_lm(self) -> BaseLM:
        """The LM as it answers; made once, since each one hooks into the LM."""
        return BaseLM(self.lm, self.encoder.tokenizer, self.encoder.format)

    def _segmented_losses(self, batch: list[TrainingSequence]) -> dict[str, Tensor]:
        """The losses of an LM that takes segments; rows of similar length share a batch.

        A second loss of equal weight tells the last layer where in the documents an answer stands (see
        `pipelines.tasks.pointer`).
        """
        base_lm = self._base_lm
        prompt_lengths = [sequence.labels.count(-100) for sequence in batch]  # the one answer stands at the end
        answer = pointer = torch.zeros((), device=self.lm.device)
        most = _TOKENS_AT_ONCE["cuda" if self.lm.device.type == "cuda" else "cpu"]
        for group in length_buckets([len(sequence.ids) for sequence in batch], most):
            rows = [(batch[i], prompt_lengths[i]) for i in group]
            with last_attention(self.lm) as attention:
                losses = base_lm.answer_loss(
                    [sequence.ids[:length] for sequence, length in rows],
                    [sequence.labels[length:] for sequence, length in rows],
                    None,
                    segment_ids=[sequence.segment_ids[:length] for sequence, length in rows],
                    hidden=[sequence.hidden[:length] for sequence, length in rows],
                )
            answer = answer + losses.sum()
            pointer = pointer + pointer_loss(
                attention,
                self.lm.config.num_attention_heads,
                [len(sequence.ids) for sequence, _ in rows],
                [len(sequence.ids) - length for sequence, length in rows],
                [sequence.copied for sequence, _ in rows],
            )
        count = sum(len(sequence.ids) - length for sequence, length in zip(batch, prompt_lengths, strict=True))
        return {"loss": (answer + pointer) / count, "answer": answer / count, "pointer": pointer / count}

    def validate(self) -> dict[str, float]:
        assert self._validation is not None
        questions = self._validation.questions
        figures = self._scores(questions, [()] * len(questions), "_closed")
        retrieved = self._validation_retrieved
        if retrieved is not None:
            for k in sorted(set(self.config.context.k)):
                contexts = [[document.text for document in retrieved[q.question][:k]] for q in questions]
                figures |= self._scores(questions, contexts, f"_retrieved_{k}")
        return figures

    def _scores(
        self, questions: Sequence[Question], contexts: Sequence[Sequence[str]], suffix: str
    ) -> dict[str, float]:
        """The figures under two names: with the suffix, and without it, where later calls replace them."""
        scores = reading_scores(self.lm, self.encoder, questions, contexts)
        return {**{f"{name}{suffix}": value for name, value in scores.items()}, **scores}

    def save(self, folder: Path) -> None:
        if self._from_encoder:
            # Positions beyond the longest sequence repeated MiniLM's. They were not tuned, and repeat the tuned ones.
            table = self.lm.bert.embeddings.position_embeddings.weight
            with torch.no_grad():
                table.copy_(repeated_positions(table[: self.config.sequence_length].clone(), len(table)))
        with quiet():
            merged(self.lm).save_pretrained(folder)
        self.encoder.tokenizer.save_pretrained(folder)
