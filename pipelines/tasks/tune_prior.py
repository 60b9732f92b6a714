"""Tuning the document prior of a trained MAC model with its sentence encoder, by contrast. All other weights stay.

A sentence encoder that was trained on pairs of all kinds tells subjects apart, and a bank holds many documents on one
subject. So a batch is made of groups of documents with one title, and each question is to rank its own document first
among all of the batch, by the prior's own score, hashed BM25 included: the encoder learns what words do not say.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from mac_rag.data.types import Document, Question
from mac_rag.errors import ConfigError
from mac_rag.lm.batching import pad_rows, similar_lengths
from mac_rag.model import AmortizedModel
from mac_rag.model.text_encoder import TextEncoder
from mac_rag.nn.memory_tokens import MemoryTokens
from pipelines.corpora.long_documents import within_limits
from pipelines.corpora.qa_data import DataRecipe
from pipelines.corpora.title_groups import drawn, title_groups
from pipelines.trainer import Task, TrainingRecipe

_LENGTH_RATIO = 1.5  # largest ratio of the longest to the shortest text that the encoder reads at a time
_GROUP = 80  # consecutive documents with one title that stay together in a batch, at most: a third of mac-small's 240
_QUESTIONS = 2  # drawn for each document of a batch
_TOGETHER = 256  # held-out texts that are encoded at a time
# Learning rates of the prior's own weights, in those of the encoder, which is trained already and hardly has to move.
_PROJECTIONS, _SCALE, _LEXICAL_WEIGHT = 3.0, 10.0, 100.0


class TunePriorConfig(DataRecipe, TrainingRecipe):
    """A stage that tunes the document prior and its sentence encoder. `trainer.batch_size` counts documents.

    Documents beyond the model's limit are divided, and the part that answers a question is its document.

    Attributes:
        start_from: a MAC checkpoint with a sentence encoder, name or folder.
    """

    start_from: str


class PriorBatch(NamedTuple):
    """Token ids of documents and questions, and for each question the number of its document."""

    documents: list[list[int]]
    questions: list[list[int]]
    gold: list[int]


class TunePriorTask(Task):
    """Trains the document prior and the sentence encoder of a MAC model, but not the encoder's embeddings.

    The weight of hashed BM25, a setting of the model, is trained, too, by its logarithm.

    The figures of validation are `first` and `among_three`, the shares of held-out questions whose document the prior
    ranks first, and among the first three, of all held-out documents.

    Raises:
        ConfigError: for a model without a sentence encoder.
    """

    def __init__(self, config: TunePriorConfig) -> None:
        super().__init__()
        self.config = config
        torch.manual_seed(config.trainer.seed)
        self.model = AmortizedModel.from_pretrained(config.start_from, device=config.trainer.device)
        encoder, prior = self.model.amortization.network.sentence_encoder, self.model.aggregation.prior
        if encoder is None or prior is None:
            raise ConfigError(
                f"{config.start_from} has no sentence encoder, which this tunes; train a model with "
                "model.sentence_encoder, or leave this stage out"
            )
        self.model.use_master_weights()
        self._prior = prior
        self._stored = {parameter: parameter.requires_grad for parameter in self.model.parameters()}
        self.model.requires_grad_(False)
        prior.requires_grad_(True)
        encoder.requires_grad_(True)
        encoder.get_input_embeddings().requires_grad_(False)  # the base LM may read with them, too
        hashed = self.model.config.hashed_bm25
        self.log_lexical_weight = None if hashed is None else nn.Parameter(torch.tensor(hashed.weight).log())
        data, self._validation = (
            within_limits(part, self.model, reconstruction=False)
            for part in (config.data.training_set(), config.data.validation_set())
        )
        self._questions = data.questions_by_document()
        self._groups = title_groups(data, self._questions, _GROUP)

    def batch(self, step: int, micro: int, size: int) -> PriorBatch:
        """Documents of a few titles, and questions about each."""
        trainer = self.config.trainer
        documents = drawn(self._groups, step, micro, size, group_size=_GROUP, seed=trainer.seed, passes=self.passes)
        rng = random.Random(f"{trainer.seed}/{step}/{micro}")
        questions: list[Question] = []
        gold: list[int] = []
        for number, document in enumerate(documents):
            known = self._questions[document.id]
            chosen = rng.sample(known, min(_QUESTIONS, len(known)))
            questions += chosen
            gold += [number] * len(chosen)
        return PriorBatch(*self._ids(documents, questions), gold)

    def _ids(
        self, documents: Sequence[Document], questions: Sequence[Question]
    ) -> tuple[list[list[int]], list[list[int]]]:
        return (
            [self.model.amortization.ids(document.text) for document in documents],
            [self.model.input_encoder.ids(question.question) for question in questions],
        )

    def forward(self, batch: PriorBatch) -> dict[str, Tensor]:
        keys = self._prior.keys(compared(self.model.amortization, batch.documents))
        queries = self._queries(batch.questions)
        scores = self._prior.score(queries, keys)
        return {"loss": functional.cross_entropy(scores, torch.tensor(batch.gold, device=scores.device))}

    def _queries(self, questions: Sequence[Sequence[int]]) -> Tensor:
        weight = None if self.log_lexical_weight is None else self.log_lexical_weight.exp()
        return self._prior.queries(compared(self.model.input_encoder, questions), weight)

    def parameter_groups(self) -> list[dict[str, Any]]:
        """The encoder's groups as of any network, and the prior's weights without weight decay, at higher rates."""
        rates = dict.fromkeys((self._prior.query.weight, self._prior.key.weight), _PROJECTIONS)
        rates[self._prior.log_scale] = _SCALE
        if self.log_lexical_weight is not None:
            rates[self.log_lexical_weight] = _LEXICAL_WEIGHT
        encoder = [
            {**group, "params": [weight for weight in group["params"] if weight not in rates]}
            for group in super().parameter_groups()
        ]
        return encoder + [
            {"params": [weight], "weight_decay": 0.0, "relative_rate": rate} for weight, rate in rates.items()
        ]

    @torch.no_grad()
    def validate(self) -> dict[str, float]:
        data = self._validation
        place = {document.id: number for number, document in enumerate(data.documents)}
        documents, questions = self._ids(data.documents, data.questions)
        keys = torch.cat([self._prior.keys(compared(self.model.amortization, rows)) for rows in _parts(documents)])
        queries = [self._queries(rows) for rows in _parts(questions)]
        scores = torch.cat([self._prior.score(part, keys) for part in queries])
        gold = torch.tensor([place[question.gold] for question in data.questions], device=scores.device)
        rank = (scores > scores.gather(1, gold[:, None])).sum(1)
        return {name: float((rank < count).float().mean()) for name, count in (("first", 1), ("among_three", 3))}

    def save(self, folder: Path) -> None:
        """Writes the whole model: `save_pretrained` stores the weights that can be trained."""
        config = self.model.config
        if config.hashed_bm25 is not None and self.log_lexical_weight is not None:
            weight = float(self.log_lexical_weight.detach().exp())
            hashed = config.hashed_bm25.model_copy(update={"weight": weight})
            self.model.config = config.model_copy(update={"hashed_bm25": hashed})
        trained = {parameter for parameter in self.model.parameters() if parameter.requires_grad}
        for parameter, stored in self._stored.items():
            parameter.requires_grad_(stored)
        self.model.save_pretrained(folder, dtype=torch.float32)  # lower ones would undo small steps
        for parameter in self._stored:
            parameter.requires_grad_(parameter in trained)


def _parts(rows: list[list[int]]) -> Iterator[list[list[int]]]:
    for first in range(0, len(rows), _TOGETHER):
        yield rows[first : first + _TOGETHER]


def compared(encoder: TextEncoder, rows: Sequence[Sequence[int]]) -> MemoryTokens:
    """The sentence token and the lexical vectors of K texts, which the document prior compares.

    Gradients reach the sentence encoder. `rows` are the token ids of each text.
    """
    network = encoder.network
    parts, order = [], []
    for group in similar_lengths([len(row) for row in rows], _LENGTH_RATIO):
        ids, mask = pad_rows([rows[i] for i in group], 0, encoder.device)
        parts.append(MemoryTokens(network.sentence_token(ids, mask).float(), network.lexical(ids, mask)))
        order += group
    return MemoryTokens.cat(parts)[torch.tensor(order, device=encoder.device).argsort()]
