"""Fitting how far a question that names a year looks back. All weights of the model stay as they are."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from mac_rag.config import YearsConfig
from mac_rag.data.types import QADataset
from mac_rag.lm.batching import pad_rows
from mac_rag.model import MACModel
from mac_rag.model.years import years_of
from mac_rag.nn.question_words import QuestionWords
from pipelines.tasks.fitting import fitted

_START = YearsConfig(weight=0.1, decay=4.0)
_TOGETHER = 256  # questions that are encoded at a time


def fit_years(
    model: MACModel,
    dataset: QADataset,
    prior_keys: Tensor,
    *,
    steps: int = 500,
    batch_size: int = 256,
    learning_rate: float = 0.05,
    seed: int = 0,
) -> YearsConfig | None:
    """Fits `mac_rag.config.YearsConfig` in place: the document prior shall rank each question's own document first.

    Args:
        model: a model. Without hashed BM25, or if no year is one token of its vocabulary, it stays as it is.
        dataset: documents and questions. Those that name no year teach nothing.
        prior_keys: the document prior's keys of the documents, `[K, d_prior]`.
        steps, batch_size, learning_rate, seed: as for `pipelines.tasks.fitting.fitted`.

    Returns:
        What was fitted; None if nothing was.
    """
    prior, hashed_bm25 = model.aggregation.prior, model.input_encoder.network.hashed_bm25
    lexical = model.config.hashed_bm25
    if prior is None or hashed_bm25 is None or lexical is None:
        return None
    start = lexical.years or _START
    years = years_of(start, model.input_encoder.tokenizer)
    if years is None or not years.tokens:
        return None
    words = QuestionWords(years).to(model.device)
    asked = _asked(model, words, dataset)
    if asked is None:
        return None
    scale = prior.log_scale.exp().detach() * prior.lexical_weight
    vectors = hashed_bm25.of_tokens(words.tokens[:, None], words.rarity(hashed_bm25)[:, None]).flatten(1)
    of_years = scale * prior_keys[:, prior.key.out_features :] @ vectors.T  # what each year adds to each score, [K, Y]
    with torch.no_grad():
        scores = torch.cat([prior.score(part, prior_keys) for part in asked.queries.split(_TOGETHER)])  # [Q, K]
    # The last one is of a temperature, because the prior is surer of what it ranks first than it may be where years
    # decide. Without it the few questions of which it is most wrong would settle the other two.
    logarithms = torch.tensor([start.weight, start.decay, 1.0], device=model.device).log().requires_grad_()

    def batch_loss(generator: torch.Generator) -> Tensor:
        index = torch.randint(len(asked.gold), (batch_size,), generator=generator).to(model.device)
        weight, decay, temperature = logarithms.exp()
        weights = words.weights(asked.first[index], asked.last[index], weight, decay)
        return functional.cross_entropy((scores[index] + weights @ of_years.T) / temperature, asked.gold[index])

    fitted([logarithms], batch_loss, steps=steps, learning_rate=learning_rate, seed=seed)
    weight, decay, _ = (round(float(value), 4) for value in logarithms.detach().exp())
    found, again = YearsConfig(weight=weight, decay=decay), replace(years, weight=weight, decay=decay)
    model.config = model.config.model_copy(update={"hashed_bm25": lexical.model_copy(update={"years": found})})
    model.input_encoder.network.question_words = QuestionWords(again).to(model.device)
    return found


class _Asked(NamedTuple):
    """Q questions that name a year.

    Attributes:
        queries: the document prior's queries of their own words, `[Q, d_prior]`.
        first, last: the first and the last year that each names, `[Q]`.
        gold: the number of each question's document, `[Q]`.
    """

    queries: Tensor
    first: Tensor
    last: Tensor
    gold: Tensor


@torch.no_grad()
def _asked(model: MACModel, words: QuestionWords, dataset: QADataset) -> _Asked | None:
    """The questions that name a year; None if none does."""
    prior = model.aggregation.prior
    assert prior is not None
    place = {document.id: number for number, document in enumerate(dataset.documents)}
    parts = []
    with model.without_times():
        for start in range(0, len(dataset.questions), _TOGETHER):
            some = dataset.questions[start : start + _TOGETHER]
            rows = [model.input_encoder.ids(question.question) for question in some]
            first, last = words.named(*pad_rows(rows, 0, model.device))
            there = last.nonzero()[:, 0]
            if len(there):
                encoded = model.input_encoder([rows[number] for number in there.tolist()])
                gold = torch.tensor([place[some[number].gold] for number in there.tolist()], device=model.device)
                parts.append(_Asked(prior.queries(encoded), first[there], last[there], gold))
    return _Asked(*map(torch.cat, zip(*parts, strict=True))) if parts else None
