"""Fits what a trained MAC model's document prior makes of words and times: lexical vectors, named years, and recency.

All other weights stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional

from mac_rag.atomic_files import write_folder
from mac_rag.config import Dtype, HashedBM25Config, MACConfig, YearsConfig
from mac_rag.data.types import QADataset
from mac_rag.errors import ConfigError
from mac_rag.lm.batching import pad_rows
from mac_rag.lm.devices import STORED_DTYPES
from mac_rag.model import AmortizedModel
from mac_rag.model.factory import make_hashed_bm25, named_years
from mac_rag.model.text_encoder import TextEncoder
from mac_rag.nn.lexical import NamedYears
from mac_rag.nn.memory_tokens import MemoryTokens
from mac_rag.nn.prior import Candidates, DocumentPrior, RankedFirst
from pipelines.corpora.long_documents import within_limits
from pipelines.corpora.qa_data import DataRecipe
from pipelines.tasks.train import moment

_VECTORS = 8  # R, lexical vectors of each text: those of both shipped models
_QUESTIONS = 2  # of each document, at most: other documents teach a handful of numbers more than further questions
# Steps of Adam, questions of a step, and the first rate: a handful of numbers is fitted, which takes seconds.
_STEPS, _BATCH, _RATE = 500, 256, 0.05
_TOGETHER = 256  # texts that are encoded, or compared with all documents, at a time
_YEARS_START = YearsConfig(weight=1.0, decay=3.0)
_NEVER = 1e5  # years


class FitRecencyConfig(DataRecipe):
    """A stage that fits the recency term: `a`, `alpha`, `beta` and `gamma` of `mac_rag.nn.prior`.

    For a model with hashed BM25 it first fits how much the years count that texts name, which are part of the prior
    that recency is a term of (`fit_years`). Its data are documents with dates, of which some are newer versions of
    others, and questions about them. Of newswire, half of the stories should be updated (`update_rate: 0.5`), so that
    both sides of the choice are learned.

    Attributes:
        start_from: a MAC checkpoint with a document prior, name or folder.
        lexical_weight: gives the model hashed BM25 with this weight, whose counts come from the documents; None for
            what the model has.
        store_dtype: dtype of the weights in the checkpoint; see `mac_rag.lm.loading.to_int8`.
    """

    start_from: str
    lexical_weight: float | None = Field(None, gt=0)
    store_dtype: Dtype | Literal["int8"] = "fp32"


def write_fitted(config: FitRecencyConfig, output: Path) -> None:
    """Writes the model with its recency term to `output/last`.

    Raises:
        ConfigError: as `fit_recency`.
        DataError, DocumentError: for a question or a document that the model cannot take.
    """
    dataset = config.data.training_set()
    check_dates(dataset)  # before minutes of amortization
    model = AmortizedModel.from_pretrained(config.start_from)
    if config.lexical_weight is not None:
        texts = (document.text for document in dataset.documents)
        model = add_hashed_bm25(model, texts, _VECTORS, config.lexical_weight)
    model = with_recency_term(model)
    dataset = within_limits(dataset, model)
    prior_keys = prior_keys_of(model, dataset)
    model, prior_keys = with_fitted_years(model, dataset, prior_keys)
    fit_recency(model, dataset, prior_keys)
    with write_folder(output / "last") as new:
        model.save_pretrained(new, dtype=STORED_DTYPES[config.store_dtype])


def add_hashed_bm25(model: AmortizedModel, texts: Iterable[str], vectors: int, weight: float) -> AmortizedModel:
    """The same networks with hashed BM25, whose counts come from a corpus; a model's former counts are replaced.

    Args:
        model: a model with a document prior. Its parts go over to the new model; do not use it any more.
        texts: the corpus.
        vectors, weight: see `mac_rag.config.HashedBM25Config`.

    Raises:
        ConfigError: for a model without a document prior.
        DocumentError: for a text that the model cannot take.
    """
    if model.aggregation.prior is None:
        raise ConfigError("this model has no document prior, which hashed BM25 serves; train one with prior_width")
    lexical = HashedBM25Config(vectors=vectors, weight=weight)
    config = model.config.model_copy(update={"hashed_bm25": lexical})
    hashed_bm25 = make_hashed_bm25(config, model.base_lm)
    assert hashed_bm25 is not None
    hashed_bm25.count(row for text in texts for row in model.amortization.plan(text))
    for encoder in (model.amortization, model.input_encoder):
        encoder.network.hashed_bm25 = hashed_bm25
    return _rebuilt(model, config).eval()


def _rebuilt(model: AmortizedModel, config: MACConfig) -> AmortizedModel:
    """The same encoders, LM and weights with another configuration, which adds to the model's own.

    Additions to the aggregation network are untrained. The parts of the model go over to the new one; do not use it any
    more.
    """
    again = AmortizedModel(config, model.base_lm, model.amortization, model.input_encoder)
    again.aggregation.load_state_dict(model.aggregation.state_dict(), strict=False)
    again.modulation.load_state_dict(model.modulation.state_dict())
    again.base_lm_trained = model.base_lm_trained
    return again.train(model.training)


def with_recency_term(model: AmortizedModel) -> AmortizedModel:
    """The same networks with a recency term that is not fitted yet; the model itself, if it has one.

    The parts of the model go over to the new one; do not use it any more.
    """
    if model.aggregation.recency is not None:
        return model
    if model.aggregation.prior is None:
        raise ConfigError("this model has no document prior, of which recency is a term; train one with prior_width")
    aggregation = model.config.aggregation.model_copy(update={"recency": True})
    return _rebuilt(model, model.config.model_copy(update={"aggregation": aggregation})).eval()


def check_dates(dataset: QADataset) -> None:
    """Checks that recency can be learned.

    Raises:
        ConfigError: for data without dates.
    """
    if all(document.date is None for document in dataset.documents):
        raise ConfigError(f"no document of {dataset.name} has a date, from which recency is learned; give them dates")


@torch.no_grad()
def prior_keys_of(model: AmortizedModel, dataset: QADataset) -> Tensor:
    """The document prior's keys of all documents, `[K, d_prior]`."""
    prior = model.aggregation.prior
    assert prior is not None
    phi = model.amortize([document.text for document in dataset.documents], progress=True)
    return prior.keys(MemoryTokens.split(phi, model.config.lexical_vectors))


def fit_recency(model: AmortizedModel, dataset: QADataset, prior_keys: Tensor) -> float:
    """Fits the term in place: the document prior shall rank the document of each question first among all.

    `prior_keys` are those of `prior_keys_of`.

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
        index = torch.randint(len(compared.gold), (_BATCH,), generator=generator).to(model.device)
        own = Candidates(*(part[index] for part in compared.candidates))
        scores = own.scores + term.penalties(own, own, compared.asked[index], scale)
        rest = compared.rest[index]
        return functional.cross_entropy(torch.cat([scores, rest[:, None]], 1), compared.gold[index])

    return fitted(list(term.parameters()), batch_loss)


class _Compared(NamedTuple):
    """B questions, and the prior's scores of all documents.

    Attributes:
        candidates: the documents that it ranks first.
        rest: `[B]`, log-sum-exp of the scores of the others.
        gold: `[B]`, the rank of the question's own document among the candidates.
        asked: `[B]`, see `RecencyTerm.penalties`.
    """

    candidates: Candidates
    rest: Tensor
    gold: Tensor
    asked: Tensor


@torch.no_grad()
def _compared(model: AmortizedModel, dataset: QADataset, prior_keys: Tensor) -> _Compared:
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


def with_fitted_years(model: AmortizedModel, dataset: QADataset, prior_keys: Tensor) -> tuple[AmortizedModel, Tensor]:
    """The model with the years of `fit_years`, and its document prior's keys; both as they were if nothing was fitted.

    The model's parts go over to the new one; do not use it any more.
    """
    found, lexical = fit_years(model, dataset, prior_keys), model.config.hashed_bm25
    prior = model.aggregation.prior
    if found is None or lexical is None or prior is None:
        return model, prior_keys
    with_years = lexical.model_copy(update={"years": found})
    model = _rebuilt(model, model.config.model_copy(update={"hashed_bm25": with_years}))
    years = model.amortization.network.years
    assert years is not None
    ids = [model.amortization.ids(document.text) for document in dataset.documents]
    held = torch.cat([years(*batch, of_questions=False) for batch in _batches(model.amortization, ids)])
    words = prior.key.out_features + lexical.vectors * model.base_lm.width
    return model, torch.cat([prior_keys[:, :words], held.to(prior_keys.dtype)], 1)


def fit_years(
    model: AmortizedModel,
    dataset: QADataset,
    prior_keys: Tensor,
) -> YearsConfig | None:
    """The configuration of years with which the document prior ranks each question's own document first.

    Args:
        model: a model with a document prior and hashed BM25; its own years do not count.
        dataset: documents and questions. Those that name no year teach nothing.
        prior_keys: the document prior's keys of the documents, `[K, d_prior]`.

    Returns:
        None if no question names a year, if no year is one token of the vocabulary, or for a model without hashed BM25.
    """
    prior, lexical = model.aggregation.prior, model.config.hashed_bm25
    if prior is None or lexical is None:
        return None
    try:
        years = named_years(_YEARS_START, model.base_lm.tokenizer, model.base_lm.width).to(model.device)
    except ConfigError:
        return None
    with model.without_times():
        asked = _dated(model, prior, years, dataset, prior_keys)
    if asked is None:
        return None
    ids = [model.amortization.ids(document.text) for document in dataset.documents]
    # An infinite distance would make gradients NaN.
    since = years.since(_named(model.amortization, years, ids)).clamp(max=_NEVER)  # [K, Y]
    scale = prior.log_scale.exp().detach() * prior.lexical_weight
    # The last one is of a temperature: if years decide, the prior is too sure of the document that it ranks first.
    # Without it, the few questions on which the prior is most wrong would settle the other two.
    logarithms = (
        torch.tensor([_YEARS_START.weight, _YEARS_START.decay, 1.0], device=model.device).log().requires_grad_()
    )

    def batch_loss(generator: torch.Generator) -> Tensor:
        index = torch.randint(len(asked.gold), (_BATCH,), generator=generator).to(model.device)
        weight, decay, temperature = logarithms.exp()
        of_years = weight * torch.exp(-since[:, asked.first[index]].T / decay)
        return functional.cross_entropy((asked.scores[index] + scale * of_years) / temperature, asked.gold[index])

    fitted([logarithms], batch_loss)
    weight, decay, _ = (round(float(value), 4) for value in logarithms.detach().exp())
    return YearsConfig(weight=weight, decay=decay)


class _Dated(NamedTuple):
    """Q questions that name a year.

    Attributes:
        scores: the document prior's scores without years, `[Q, K]`.
        first: the place in the calendar of the first year that each names, `[Q]`.
        gold: the number of each question's document, `[Q]`.
    """

    scores: Tensor
    first: Tensor
    gold: Tensor


@torch.no_grad()
def _dated(
    model: AmortizedModel, prior: DocumentPrior, years: NamedYears, dataset: QADataset, prior_keys: Tensor
) -> _Dated | None:
    """The questions that name a year; None if none does."""
    place = {document.id: number for number, document in enumerate(dataset.documents)}
    ids = [model.input_encoder.ids(question.question) for question in dataset.questions]
    named = _named(model.input_encoder, years, ids)
    parts = []
    for some in named.any(1).nonzero()[:, 0].split(_TOGETHER):
        encoded = model.input_encoder([ids[number] for number in some.tolist()])
        gold = torch.tensor([place[dataset.questions[number].gold] for number in some.tolist()], device=model.device)
        parts.append(_Dated(prior.score(prior.queries(encoded), prior_keys), named[some].int().argmax(1), gold))
    return _Dated(*map(torch.cat, zip(*parts, strict=True))) if parts else None


def _named(encoder: TextEncoder, years: NamedYears, ids: list[list[int]]) -> Tensor:
    """`NamedYears.named` of any number of texts."""
    return torch.cat([years.named(*batch) for batch in _batches(encoder, ids)])


def _batches(encoder: TextEncoder, ids: list[list[int]]) -> Iterator[tuple[Tensor, Tensor]]:
    for first in range(0, len(ids), _TOGETHER):
        yield pad_rows(ids[first : first + _TOGETHER], 0, encoder.device)


def fitted(parameters: Sequence[Tensor], batch_loss: Callable[[torch.Generator], Tensor]) -> float:
    """Fits parameters in place by steps of Adam on the loss of a drawn batch; the learning rate falls to 0 linearly.

    Returns the mean loss of the last tenth of the steps.
    """
    optimizer = torch.optim.Adam(parameters, lr=_RATE)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=_STEPS)
    generator = torch.Generator().manual_seed(0)
    losses = []
    for _ in range(_STEPS):
        loss = batch_loss(generator)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(float(loss.detach()))
    last = losses[-max(1, _STEPS // 10) :]
    return sum(last) / len(last)
