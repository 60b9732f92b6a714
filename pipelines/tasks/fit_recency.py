"""Fitting the recency term of a trained MAC model's document prior. Its other weights stay as they are."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from mac_rag.atomic_files import write_folder
from mac_rag.config import Config, Dtype
from mac_rag.data.newswire.generate import generate
from mac_rag.data.types import QADataset
from mac_rag.errors import ConfigError
from mac_rag.lm.devices import STORED_DTYPES
from mac_rag.model import MACModel
from mac_rag.nn.memory_tokens import MemoryTokens
from mac_rag.nn.prior import Candidates, RankedFirst
from pipelines.corpora.long_documents import within_limits
from pipelines.corpora.qa_data import DataConfig
from pipelines.tasks.extended_model import with_aggregation
from pipelines.tasks.fit_years import with_fitted_years
from pipelines.tasks.fitting import fitted
from pipelines.tasks.train import moment

_QUESTIONS = 2  # of each document, at most: for a handful of numbers, other documents say more than further questions
_TOGETHER = 256  # questions that are encoded, or compared with all documents, at a time


class FitRecencyConfig(Config):
    """A stage that fits the recency term: `a`, `alpha`, `beta` and `gamma` of `mac_rag.nn.prior`.

    For a model with hashed BM25 it first fits how much the years count that texts name, which are part of the prior
    that recency is a term of (`pipelines.tasks.fit_years`).

    Attributes:
        start_from: a MAC checkpoint with a document prior, name or folder.
        data: documents with dates, of which some are newer versions of others, and questions about them. Of newswire,
            half of the stories should be updated (`update_rate: 0.5`), so that both sides of the choice are learned.
        store_dtype: dtype of the weights in the checkpoint; see `mac_rag.lm.int8_storage` for int8.
    """

    start_from: str
    data: DataConfig = DataConfig(update_rate=0.5)
    store_dtype: Dtype | Literal["int8"] = "fp32"

    def dataset(self) -> QADataset:
        """The documents and questions."""
        if self.data.name != "newswire":
            return self.data.training_set()
        return generate(
            "train",
            self.data.documents,
            seed=self.data.seed,
            questions_per_document=_QUESTIONS,
            update_rate=self.data.update_rate,
        )


def write_fitted(config: FitRecencyConfig, output: Path) -> None:
    """Writes the model with its recency term to `output/last`.

    Raises:
        ConfigError: as `fit_recency`.
        DataError, DocumentError: for a question or a document that the model cannot take.
    """
    model = with_recency_term(MACModel.from_pretrained(config.start_from))
    dataset = within_limits(config.dataset(), model)
    check_dates(dataset)  # before minutes of amortization
    prior_keys = prior_keys_of(model, dataset)
    model, prior_keys = with_fitted_years(model, dataset, prior_keys)
    fit_recency(model, dataset, prior_keys)
    with write_folder(output / "last") as new:
        model.save_pretrained(new, dtype=STORED_DTYPES[config.store_dtype])


def with_recency_term(model: MACModel) -> MACModel:
    """The same networks with a recency term that is not fitted yet; the model itself, if it has one.

    Args:
        model: a model with a document prior. Its parts go over to the new model; do not use it any more.

    Raises:
        ConfigError: for a model without a document prior.
    """
    if model.aggregation.recency is not None:
        return model
    if model.aggregation.prior is None:
        raise ConfigError("this model has no document prior, of which recency is a term; train one with prior_width")
    return with_aggregation(model, {"recency": True}).eval()


def check_dates(dataset: QADataset) -> None:
    """Checks that there is something to learn recency from.

    Raises:
        ConfigError: for data without dates.
    """
    if all(document.date is None for document in dataset.documents):
        raise ConfigError(f"no document of {dataset.name} has a date, from which recency is learned; give them dates")


@torch.no_grad()
def prior_keys_of(model: MACModel, dataset: QADataset) -> Tensor:
    """The document prior's keys of all documents, `[K, d_prior]`."""
    prior = model.aggregation.prior
    assert prior is not None
    phi = model.amortize([document.text for document in dataset.documents], progress=True)
    return prior.keys(MemoryTokens.split(phi, model.config.lexical_vectors))


def fit_recency(
    model: MACModel,
    dataset: QADataset,
    prior_keys: Tensor,
    *,
    steps: int = 500,
    batch_size: int = 256,
    learning_rate: float = 0.05,
) -> float:
    """Fits the term in place: the document prior shall rank the document of each question first among all.

    Args:
        model: a model with a recency term.
        dataset: see `FitRecencyConfig`.
        prior_keys: of `prior_keys_of`.
        steps: steps of Adam. A handful of numbers is fitted, which takes seconds.
        batch_size: questions of a step.
        learning_rate: rate of the first step; it falls to 0 linearly.

    Returns:
        The mean loss of the last tenth of the steps.

    Raises:
        ConfigError: for data without dates.
    """
    check_dates(dataset)
    prior, term = model.aggregation.prior, model.aggregation.recency
    assert prior is not None
    assert term is not None
    compared = _compared(model, dataset, prior_keys)
    scale = prior.log_scale.exp().detach()

    def batch_loss(generator: torch.Generator) -> Tensor:
        index = torch.randint(len(compared.gold), (batch_size,), generator=generator).to(model.device)
        own = Candidates(*(part[index] for part in compared.candidates))
        scores = own.scores + term.penalties(own, own, compared.asked[index], scale)
        rest = compared.rest[index]
        return functional.cross_entropy(torch.cat([scores, rest[:, None]], 1), compared.gold[index])

    return fitted(list(term.parameters()), batch_loss, steps=steps, learning_rate=learning_rate)


class _Compared(NamedTuple):
    """B questions, and what the prior says of all documents.

    Attributes:
        candidates: the documents that it ranks first.
        rest: `[B]`, log-sum-exp of the scores of the others.
        gold: `[B]`, the place of the question's own document among the candidates.
        asked: `[B]`, see `RecencyTerm.penalties`.
    """

    candidates: Candidates
    rest: Tensor
    gold: Tensor
    asked: Tensor


@torch.no_grad()
def _compared(model: MACModel, dataset: QADataset, prior_keys: Tensor) -> _Compared:
    """The questions whose own document is among the candidates; the term cannot change others."""
    prior = model.aggregation.prior
    assert prior is not None
    keys = prior_keys[:, : prior.key.out_features]
    dates = torch.tensor([moment(document) for document in dataset.documents], device=model.device)
    place = {document.id: number for number, document in enumerate(dataset.documents)}
    by_document = dataset.questions_by_document()
    questions = [question for some in by_document.values() for question in some[:_QUESTIONS]]
    parts = []
    for first in range(0, len(questions), _TOGETHER):
        some = questions[first : first + _TOGETHER]
        texts = [question.question for question in some]
        encoded = model.input_encoder([model.input_encoder.ids(text) for text in texts])
        scores = prior.score(prior.queries(encoded), prior_keys)
        ranked = RankedFirst.among(scores, keys, dates)
        own = torch.tensor([place[question.gold] for question in some], device=model.device)
        is_own = ranked.rows == own[:, None]
        asked = model.asked(texts)
        assert asked is not None
        rest = scores.scatter(1, ranked.rows, -torch.inf).logsumexp(1)
        there = is_own.any(1)
        parts.append(
            [*(part[there] for part in ranked.candidates), rest[there], is_own.int().argmax(1)[there], asked[there]]
        )
    scores, found, moments, rest, gold, asked = (torch.cat(column) for column in zip(*parts, strict=True))
    return _Compared(Candidates(scores, found, moments), rest, gold, asked)
