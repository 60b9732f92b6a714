"""Fitting how much the years that texts name count in the document prior. All weights of the model stay as they are."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from mac_rag.config import YearsConfig
from mac_rag.data.types import QADataset
from mac_rag.errors import ConfigError
from mac_rag.lm.batching import pad_rows
from mac_rag.model import MACModel
from mac_rag.model.factory import named_years
from mac_rag.model.text_encoder import TextEncoder
from mac_rag.nn.lexical import NamedYears
from mac_rag.nn.prior import DocumentPrior
from pipelines.tasks.extended_model import with_years
from pipelines.tasks.fitting import fitted

_START = YearsConfig(weight=1.0, decay=3.0)
_NEVER = 1e5  # years
_TOGETHER = 256  # texts that are looked at at a time


def with_fitted_years(model: MACModel, dataset: QADataset, prior_keys: Tensor, **how: Any) -> tuple[MACModel, Tensor]:
    """The model with the years of `fit_years`, and its document prior's keys; both as they were if nothing was fitted.

    The arguments are those of `fit_years`. The model's parts go over to the new one; do not use it any more.
    """
    found, lexical = fit_years(model, dataset, prior_keys, **how), model.config.hashed_bm25
    prior = model.aggregation.prior
    if found is None or lexical is None or prior is None:
        return model, prior_keys
    model = with_years(model, found)
    years = model.amortization.network.years
    assert years is not None
    ids = [model.amortization.ids(document.text) for document in dataset.documents]
    held = torch.cat([years(*batch, of_questions=False) for batch in _batches(model.amortization, ids)])
    words = prior.key.out_features + lexical.vectors * model.base_lm.width
    return model, torch.cat([prior_keys[:, :words], held.to(prior_keys.dtype)], 1)


def fit_years(
    model: MACModel,
    dataset: QADataset,
    prior_keys: Tensor,
    *,
    steps: int = 500,
    batch_size: int = 256,
    learning_rate: float = 0.05,
) -> YearsConfig | None:
    """The configuration of years with which the document prior ranks each question's own document first.

    Args:
        model: a model with a document prior and hashed BM25; its own years do not count.
        dataset: documents and questions. Those that name no year teach nothing.
        prior_keys: the document prior's keys of the documents, `[K, d_prior]`.
        steps, batch_size, learning_rate: as for `pipelines.tasks.fitting.fitted`.

    Returns:
        What was fitted; None if no question names a year, if no year is one token of the vocabulary, or for a model
        without hashed BM25.
    """
    prior, lexical = model.aggregation.prior, model.config.hashed_bm25
    if prior is None or lexical is None:
        return None
    try:
        years = named_years(_START, model.base_lm.tokenizer, model.base_lm.width).to(model.device)
    except ConfigError:
        return None
    with model.without_times():
        asked = _asked(model, prior, years, dataset, prior_keys)
    if asked is None:
        return None
    ids = [model.amortization.ids(document.text) for document in dataset.documents]
    # Behind an infinite distance, which no number of years comes near, gradients would not be numbers.
    since = years.since(_named(model.amortization, years, ids)).clamp(max=_NEVER)  # [K, Y]
    scale = prior.log_scale.exp().detach() * prior.lexical_weight
    # The last one is of a temperature, because the prior is surer of what it ranks first than it may be where years
    # decide. Without it the few questions of which it is most wrong would settle the other two.
    logarithms = torch.tensor([_START.weight, _START.decay, 1.0], device=model.device).log().requires_grad_()

    def batch_loss(generator: torch.Generator) -> Tensor:
        index = torch.randint(len(asked.gold), (batch_size,), generator=generator).to(model.device)
        weight, decay, temperature = logarithms.exp()
        of_years = weight * torch.exp(-since[:, asked.first[index]].T / decay)
        return functional.cross_entropy((asked.scores[index] + scale * of_years) / temperature, asked.gold[index])

    fitted([logarithms], batch_loss, steps=steps, learning_rate=learning_rate)
    weight, decay, _ = (round(float(value), 4) for value in logarithms.detach().exp())
    return YearsConfig(weight=weight, decay=decay)


class _Asked(NamedTuple):
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
def _asked(
    model: MACModel, prior: DocumentPrior, years: NamedYears, dataset: QADataset, prior_keys: Tensor
) -> _Asked | None:
    """The questions that name a year; None if none does."""
    place = {document.id: number for number, document in enumerate(dataset.documents)}
    ids = [model.input_encoder.ids(question.question) for question in dataset.questions]
    named = _named(model.input_encoder, years, ids)
    parts = []
    for some in named.any(1).nonzero()[:, 0].split(_TOGETHER):
        encoded = model.input_encoder([ids[number] for number in some.tolist()])
        gold = torch.tensor([place[dataset.questions[number].gold] for number in some.tolist()], device=model.device)
        parts.append(_Asked(prior.score(prior.queries(encoded), prior_keys), named[some].int().argmax(1), gold))
    return _Asked(*map(torch.cat, zip(*parts, strict=True))) if parts else None


def _named(encoder: TextEncoder, years: NamedYears, ids: list[list[int]]) -> Tensor:
    """`NamedYears.named` of any number of texts."""
    return torch.cat([years.named(*batch) for batch in _batches(encoder, ids)])


def _batches(encoder: TextEncoder, ids: list[list[int]]) -> Iterator[tuple[Tensor, Tensor]]:
    for first in range(0, len(ids), _TOGETHER):
        yield pad_rows(ids[first : first + _TOGETHER], 0, encoder.device)
