"""Meta-training of MAC (algorithm 1): equation 2 and the further losses on batches of documents and questions."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from mac_rag.config import BaseLMConfig, MACConfig
from mac_rag.data.dates import ALWAYS, moment_of
from mac_rag.data.types import Document, Question
from mac_rag.engine import MACEngine
from mac_rag.errors import ConfigError
from mac_rag.lm.base_lm import BaseLM
from mac_rag.lm.devices import STORED_DTYPES
from mac_rag.lm.loading import require_gradients
from mac_rag.model import AmortizedModel
from mac_rag.nn.memory_tokens import MemoryTokens
from mac_rag.nn.modulation import has_limited_layers
from pipelines.corpora.long_documents import within_limits
from pipelines.corpora.qa_data import ContextMiner, DataConfig, retrieved
from pipelines.corpora.title_groups import drawn, title_groups
from pipelines.objective import Batch, LossWeights, mac_loss
from pipelines.tasks.kv_regression import init_by_kv_regression
from pipelines.tasks.open_book import mean_scores
from pipelines.tasks.train_config import TrainConfig
from pipelines.tasks.tune_qa import LORA_RANK, ReadingConfig, TrainingSequence, TuneConfig, TuneTask
from pipelines.trainer import Task, TrainerConfig

_READING_EVERY = 3  # every third step is one of reading: most steps train the use of memory, which is new to the LM
# In a curriculum: sentences of the longest documents, those of a generated story; and the loss, which trains the
# memory of a document before its aggregation with others.
_MOST_SENTENCES, _OF_SHORT = 5, LossWeights(answer=0, direct=1)


class TrainTask(Task):
    """A MAC model with its training batches and its validation on a held-out stream."""

    def __init__(self, config: TrainConfig) -> None:
        super().__init__()
        self.config = config
        device = config.trainer.device
        torch.manual_seed(config.trainer.seed)
        if config.model is not None:
            _require_gradients(config.model, device)
            self.model = AmortizedModel.from_config(config.model, device=device)
        elif config.start_from is not None:
            self.model = AmortizedModel.from_pretrained(config.start_from, device=device)
            _require_gradients(self.model.config, device)
        if config.tune_base_lm != "frozen":
            self.model.train_base_lm(lora_rank=LORA_RANK if config.tune_base_lm == "lora" else None)
        if config.gold_hidden and self.model.config.prompt.abstention is None:
            raise ConfigError(
                f"gold_hidden is {config.gold_hidden}, but the model does not say what it answers then; set "
                "model.prompt.abstention"
            )
        self.model.use_master_weights()
        # Texts that are too long are divided now, not once a batch draws one.
        data, self._validation = (
            within_limits(part, self.model, reconstruction=config.losses.reconstruction > 0)
            for part in (config.data.training_set(), config.data.validation_set())
        )
        if config.init == "kv_regression":  # after all checks of the data, because it takes minutes
            init_by_kv_regression(self.model, data)
        self._questions = data.questions_by_document()
        self._stories = title_groups(data, self._questions, config.group_by_title)
        self._documents = {document.id: document for document in data.documents}
        self._miner = ContextMiner(config.context, data)
        self._validation_retrieved = retrieved(config.context, self._validation)
        reading = config.reading
        self.reading: TuneTask | None = None
        if reading is not None:
            self.reading = reading_task(reading, self.model.base_lm, config.data, config.trainer)
        # A ring of the newest documents' memory tokens; part of the state, so that a resumed run has the same.
        shape = config.negatives, *self.model.row_shape
        self.register_buffer("negatives", torch.zeros(shape, dtype=torch.bfloat16, device=device))
        self.register_buffer("negatives_seen", torch.zeros((), dtype=torch.long))
        self.negatives: Tensor
        self.negatives_seen: Tensor

    def batch(self, step: int, micro: int, size: int) -> tuple[Batch, LossWeights] | list[TrainingSequence]:
        """Documents and questions, and the weights of the losses on them; or what the LM reads without memory."""
        trainer = self.config.trainer
        if self.reading is not None and step % _READING_EVERY == _READING_EVERY - 1:
            self.reading.passes = self.passes
            return self.reading.batch(step // _READING_EVERY, micro, size * self.config.questions_per_document)
        # Documents of one story stay in one batch: they are the hardest to tell apart.
        group_size = self.config.group_by_title
        documents = drawn(
            self._stories, step, micro, size, group_size=group_size, seed=trainer.seed, passes=self.passes
        )
        rng = random.Random(f"{trainer.seed}/{step}/{micro}")
        short = step < self.config.curriculum
        sentences = 1 + _MOST_SENTENCES * step // self.config.curriculum if short else None
        texts: list[str] = []
        questions: list[Question] = []
        gold: list[int] = []
        for index, document in enumerate(documents):
            known = self._questions[document.id]
            count = min(self.config.questions_per_document, len(known), sentences or len(known))
            chosen = rng.sample(known, count)
            questions += chosen
            gold += [index] * len(chosen)
            answers = [question.answers[0] for question in chosen]
            texts.append(document.text if sentences is None else excerpt(document.text, answers, sentences))
        further = self._with_further(documents, texts, questions)
        contexts = self._miner.mine(questions, rng)
        without_memory = [bool(mined) and rng.random() < self.config.without_memory for mined in contexts]
        gold_hidden = [rng.random() < self.config.gold_hidden for _ in questions]
        batch = Batch(
            documents=texts,
            questions=[question.question for question in questions],
            answers=[question.answers[0] for question in questions],
            gold=gold,
            contexts=[[document.text for document in mined] for mined in contexts],
            without_memory=without_memory,
            dates=[moment(document) for document in documents],
            gold_hidden=gold_hidden,
            further=further,
            abstains=[
                self._abstains(question, mined, from_memory=not (without or hidden))
                for question, mined, without, hidden in zip(
                    questions, contexts, without_memory, gold_hidden, strict=True
                )
            ],
        )
        return batch, _OF_SHORT if short else self.config.losses

    def _with_further(
        self, documents: list[Document], texts: list[str], questions: Sequence[Question]
    ) -> list[list[int]]:
        """Adds the documents that questions need beside their own to those of a batch; returns their indices.

        Documents that are not in the data, as those that are too long, are left out.
        """
        places = {document.id: place for place, document in enumerate(documents)}
        for name in dict.fromkeys(name for question in questions for name in question.further_ids):
            if name in self._documents and name not in places:
                places[name] = len(documents)
                documents.append(self._documents[name])
                texts.append(self._documents[name].text)
        return [[places[name] for name in question.further_ids if name in places] for question in questions]

    def _abstains(self, question: Question, mined: Sequence[Document], *, from_memory: bool) -> bool:
        """True if the prompt has an abstention, and neither memory nor a document before the question answers it."""
        if self.model.config.prompt.abstention is None or from_memory:
            return False
        return question.document_id not in {document.id for document in mined}

    def begin_step(self, step: int) -> None:
        """Copies the amortization network to an equal input encoder after a curriculum, which did not train the latter.

        A question's tokens are then like those of the documents that share its words.
        """
        model = self.model.config
        if 0 < step == self.config.curriculum and model.input_encoder == model.amortization:
            self.model.input_encoder.load_state_dict(self.model.amortization.state_dict())

    def forward(self, batch: tuple[Batch, LossWeights] | list[TrainingSequence]) -> dict[str, Tensor]:
        config = self.config
        if isinstance(batch, list):
            assert self.reading is not None
            losses: dict[str, Tensor] = self.reading(batch)
            return {name if name == "loss" else f"reading_{name}": loss for name, loss in losses.items()}
        seen = int(self.negatives_seen)
        held = self.negatives[: min(seen, config.negatives)]
        terms, phi = mac_loss(
            self.model,
            *batch,
            backprop_dropout=config.backprop_dropout,
            context_set=config.context_set,
            negatives=MemoryTokens.split(held, self.model.config.lexical_vectors) if config.negatives else None,
            distractors=config.distractors,
        )
        if config.negatives:
            newest = _from_all_processes(phi.stacked().to(self.negatives.dtype))[: config.negatives]
            places = (torch.arange(len(newest)) + seen) % config.negatives
            # A new buffer: the loss of this batch still holds the old one for its backward pass.
            self.negatives = self.negatives.index_copy(0, places.to(newest.device), newest)
            self.negatives_seen += len(newest)
        return terms

    def networks_to_compile(self) -> list[nn.Module]:
        """LM and encoders, unless hooks change the LM: torch.compile does not see that hooks were replaced."""
        lm, modulation = self.model.base_lm.model, self.model.config.modulation
        if self.config.trainer.gradient_checkpointing or modulation.kind != "prefix" or has_limited_layers(lm.config):
            return []
        return [lm.base_model, self.model.amortization.network, self.model.input_encoder.network]

    def validate(self) -> dict[str, float]:
        """EM and F1 on the held-out stream, from memory alone and with retrieved documents, if any; and the losses."""
        data, retrieved, questions = self._validation, self._validation_retrieved, self._validation.questions
        engine = MACEngine(self.model)
        engine.adapt(data.documents)
        figures = _figures(engine, questions, None)
        if retrieved is not None:
            k = max(self.config.context.k)
            contexts = [[document.text for document in retrieved[question.question][:k]] for question in questions]
            figures |= {f"{name}_retrieved": value for name, value in _figures(engine, questions, contexts).items()}
        return figures | self._losses()

    def _losses(self) -> dict[str, float]:
        """Each term on the held-out documents, in batches as in training; questions have no documents before them."""
        questions_of = self._validation.questions_by_document()
        documents = [document for document in self._validation.documents if questions_of[document.id]]
        most = self.config.questions_per_document
        totals: dict[str, float] = {}
        count = 0
        for start in range(0, len(documents), self.config.trainer.batch_size):
            part = documents[start : start + self.config.trainer.batch_size]
            pairs = [(i, q) for i, document in enumerate(part) for q in questions_of[document.id][:most]]
            batch = Batch(
                documents=[document.text for document in part],
                questions=[question.question for _, question in pairs],
                answers=[question.answers[0] for _, question in pairs],
                gold=[i for i, _ in pairs],
                dates=[moment(document) for document in part],
            )
            terms, _ = mac_loss(self.model, batch, self.config.losses)
            count += len(pairs)
            for name, term in terms.items():
                totals[name] = totals.get(name, 0.0) + float(term) * len(pairs)
        return {name if name == "loss" else f"{name}_loss": total / count for name, total in totals.items()}

    def save(self, folder: Path) -> None:
        self.model.save_pretrained(folder, dtype=STORED_DTYPES[self.config.store_dtype])


def moment(document: Document) -> int:
    """Date of a document in microseconds since 1970; a document without one is before all others."""
    return ALWAYS if document.date is None else moment_of(document.date)


def _figures(engine: MACEngine, questions: Sequence[Question], contexts: list[list[str]] | None) -> dict[str, float]:
    """EM and F1 of the engine's answers."""
    generated = engine.answer([question.question for question in questions], contexts=contexts, overflow="truncate")
    return mean_scores([answer.text for answer in generated], questions)


def _require_gradients(network: MACConfig, device: torch.device) -> None:
    for part in (network.base_lm, network.amortization, network.input_encoder):
        require_gradients(part.quantization, device)


def excerpt(text: str, answers: Sequence[str], count: int) -> str:
    """At most `count` sentences of a text, in their order; those with an answer are chosen first.

    A text without any of the answers stays whole.
    """
    sentences = re.split(r"(?<=[.!?])\s+(?=[A-Z])", text)
    order = sorted(range(len(sentences)), key=lambda i: not any(answer in sentences[i] for answer in answers))
    if not any(answer in sentences[order[0]] for answer in answers):
        return text
    return " ".join(sentences[i] for i in sorted(order[:count]))


def _from_all_processes(phi: Tensor) -> Tensor:
    """Memory tokens of all processes: every process then keeps the same negatives, and one checkpoint holds them."""
    if not torch.distributed.is_initialized():
        return phi
    gathered = [torch.empty_like(phi) for _ in range(torch.distributed.get_world_size())]
    torch.distributed.all_gather(gathered, phi)
    return torch.cat(gathered)


def reading_task(turns: ReadingConfig, base_lm: BaseLM, data: DataConfig, trainer: TrainerConfig) -> TuneTask:
    """The task of the reading steps, around an LM that is trained elsewhere.

    Raises:
        ConfigError: as `TuneTask`.
    """
    config = TuneConfig(
        base_lm=BaseLMConfig(name="(the one of the model)"),
        prompt=base_lm.prompts.format,
        data=data,
        trainer=trainer,
        **dict(turns),
    )
    return TuneTask(config, base_lm)
