"""MAC's objective: equation 2 with back-propagation dropout, and auxiliary losses for small models.

The paper's objective is the `answer` term alone. The others help a small model over its cold start: `direct` and
`reconstruction` teach the amortization network without the aggregation network, and `contrastive` teaches the document
prior.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional

from mac_rag.config import Config
from mac_rag.data.dates import ALWAYS
from mac_rag.errors import ConfigError
from mac_rag.lm.batching import similar_lengths
from mac_rag.model import AmortizedModel
from mac_rag.nn.attention import recomputing_attention
from mac_rag.nn.memory_tokens import MemoryTokens

_LENGTH_RATIO = 2.0  # largest ratio of the longest to the shortest prompt of a batch


class LossWeights(Config):
    """Weight of each term; the defaults are the paper's.

    Attributes:
        answer: negative log-likelihood of the answer under phi*, the aggregate of all documents (equation 2).
        direct: the same under the memory tokens of the question's own document, without aggregation.
        reconstruction: negative log-likelihood of a document under its own memory tokens.
        contrastive: cross-entropy of the document prior, with the question's own document as the target; of several
            that it needs, any of them.
    """

    answer: float = Field(1.0, ge=0)
    direct: float = Field(0.0, ge=0)
    reconstruction: float = Field(0.0, ge=0)
    contrastive: float = Field(0.0, ge=0)


@dataclass(frozen=True)
class Batch:
    """K documents and B questions on them. Fields with a default are empty if they apply to no question or document.

    Attributes:
        documents: K texts.
        questions: B texts.
        answers: B texts.
        gold: for each question, the index of the document that answers it.
        contexts: retrieved documents before each question.
        without_memory: True for each question that the LM answers without phi*.
        dates: microseconds since 1970 from which each document counts, for a model with a recency term.
        gold_hidden: True for each question from which aggregation hides the document that answers it.
        abstains: True for each question that neither phi* nor a document before it answers: the target of the `answer`
            term is the abstention of the prompt's format.
        further: for each question, the indices of the documents that it needs beside `gold`.
    """

    documents: Sequence[str]
    questions: Sequence[str]
    answers: Sequence[str]
    gold: Sequence[int]
    contexts: Sequence[Sequence[str]] = field(default=())
    without_memory: Sequence[bool] = field(default=())
    dates: Sequence[int] = field(default=())
    gold_hidden: Sequence[bool] = field(default=())
    abstains: Sequence[bool] = field(default=())
    further: Sequence[Sequence[int]] = field(default=())


def mac_loss(
    model: AmortizedModel,
    batch: Batch,
    weights: LossWeights,
    *,
    backprop_dropout: float = 0.0,
    context_set: int | None = None,
    negatives: MemoryTokens | None = None,
    distractors: int = 0,
) -> tuple[dict[str, Tensor], MemoryTokens]:
    """Computes the losses of one batch.

    Back-propagation dropout (section 3.3): each step a random subset of the documents is amortized with gradients and
    the others under stop-gradient. The gradient through a document of the subset is multiplied by K / |subset|, which
    makes the expectation over subsets the full gradient.

    Args:
        weights: weight of each term; a term of weight zero is not computed.
        backprop_dropout: p, the share of documents without gradients; at least one always has them.
        context_set: number of consecutive documents to which each question on one of them attends, so that several sets
            share a pass; None for all documents.
        negatives: memory tokens of other documents, without gradients: further negatives of the contrastive term.
        distractors: number of negatives that each question adds to the documents which all questions attend to: those
            with the highest document prior. The answer term then sees a bank of more documents.

    Returns:
        `loss` and each term that has a weight, as scalars; and the memory tokens of the K documents, detached.

    Raises:
        ConfigError: for a contrastive term or distractors without a document prior, or p outside [0, 1).
    """
    prior = model.aggregation.prior
    if prior is None and (weights.contrastive or distractors):
        needs = "the contrastive loss trains" if weights.contrastive else "distractors are chosen by"
        raise ConfigError(f"{needs} the document prior; set model.aggregation.prior_width above 0")
    rows = [model.amortization.ids(document) for document in batch.documents]
    phi = amortize_with_dropout(model, rows, backprop_dropout)
    memory = phi.tokens
    gold = torch.tensor(batch.gold, device=memory.device)
    prompts = model.base_lm.prompts
    contexts = batch.contexts or [()] * len(batch.questions)
    alone = [prompts.prompt(q) for q in batch.questions]
    answers = [prompts.answer(answer) for answer in batch.answers]
    targets = answers
    if any(batch.abstains):
        abstention = prompts.answer(prompts.format.abstention or "")
        targets = [abstention if a else answer for answer, a in zip(answers, batch.abstains, strict=True)]
    after_contexts = [
        prompts.prompt(question, documents, model.context_window - len(answer))
        for question, documents, answer in zip(batch.questions, contexts, targets, strict=True)
    ]

    terms: dict[str, Tensor] = {}
    if weights.answer or weights.contrastive:
        encoded = model.input_encoder([model.input_encoder.ids(question) for question in batch.questions])
        known = phi if negatives is None else MemoryTokens.cat([phi, negatives.to(memory.dtype)])
        asked, dates = model.asked(batch.questions), _dates(model, batch, len(known))
        scores = None
        if prior is not None:
            prior_keys = prior.keys(known)
            scores = prior.score(prior.queries(encoded), prior_keys)
    if weights.answer:
        attended, attended_dates = phi, None if dates is None else dates[: len(phi)]
        if scores is not None and distractors and len(known) > len(phi):
            others = scores.detach()[:, len(phi) :]
            hardest = others.topk(min(distractors, others.shape[1])).indices.unique()
            attended = MemoryTokens.cat([phi, known[len(phi) + hardest]])
            attended_dates = None if dates is None else torch.cat([dates[: len(phi)], dates[len(phi) + hardest]])
        bank = replace(model.aggregation.project(attended), dates=attended_dates)
        mask = _seen(batch.gold_hidden, gold, len(attended), context_set)
        aggregated, _ = model.aggregation(encoded, bank, mask=mask, asked=asked, attention=recomputing_attention)
        terms["answer"] = _mean_loss(model, after_contexts, targets, aggregated, batch.without_memory)
    if weights.direct:
        terms["direct"] = _mean_loss(model, alone, answers, memory[gold])
    if weights.reconstruction:
        starts = [prompts.start or [prompts.eos]] * len(rows)
        texts = [prompts.document(document) for document in batch.documents]
        terms["reconstruction"] = _mean_loss(model, starts, texts, memory)
    if weights.contrastive and scores is not None:
        if dates is not None:
            scores = model.aggregation.with_recency(scores, prior_keys, dates, asked)
        terms["contrastive"] = contrastive_loss(scores, _needed(batch, scores))
    total = torch.stack([getattr(weights, name) * term for name, term in terms.items()]).sum()
    return {"loss": total, **{name: term.detach() for name, term in terms.items()}}, phi.detach()


def _seen(gold_hidden: Sequence[bool], gold: Tensor, rows: int, context_set: int | None) -> Tensor | None:
    """Rows of the bank that each question sees, bool `[B, rows]`: its set, without what is hidden; None for all."""
    if not any(gold_hidden) and (context_set is None or context_set >= rows):
        return None
    places = torch.arange(rows, device=gold.device)
    seen = torch.ones(len(gold), rows, dtype=torch.bool, device=gold.device)
    if context_set is not None:
        seen = places // context_set == gold[:, None] // context_set
    if any(gold_hidden):
        hidden = torch.tensor(gold_hidden, device=gold.device)
        seen &= ~(hidden[:, None] & (places == gold[:, None]))
    return seen


def _needed(batch: Batch, scores: Tensor) -> Tensor:
    """Known documents that each question needs, bool `[B, K]` as the document prior's scores."""
    further = batch.further or [()] * len(batch.gold)
    needed = torch.zeros_like(scores, dtype=torch.bool)
    for row, (gold, others) in enumerate(zip(batch.gold, further, strict=True)):
        needed[row, [gold, *others]] = True
    return needed


def contrastive_loss(scores: Tensor, needed: Tensor) -> Tensor:
    """Mean cross-entropy of the document prior; any document that a question needs is a target.

    Args:
        scores: `[B, K]`, the prior's scores.
        needed: `[B, K]`, which documents each question needs.
    """
    of_targets = scores.masked_fill(~needed, -torch.inf).logsumexp(1)
    return (scores.logsumexp(1) - of_targets).mean()


def _dates(model: AmortizedModel, batch: Batch, known: int) -> Tensor | None:
    """Dates of a batch's documents and of further negatives `[known]`; None without a recency term, or without dates.

    Negatives are before all documents of the batch: they are on other subjects, and their dates are not kept.
    """
    if model.aggregation.recency_in_use is None or not batch.dates:
        return None
    return torch.tensor([*batch.dates, *[ALWAYS] * (known - len(batch.dates))], device=model.device)


def amortize_with_dropout(model: AmortizedModel, rows: Sequence[Sequence[int]], dropout: float) -> MemoryTokens:
    """Memory tokens of K documents, of which a random subset carries gradients, scaled to be unbiased.

    The subset has `max(1, round((1 - p) K))` documents, drawn from torch's default generator.
    """
    if not 0 <= dropout < 1:
        raise ConfigError(f"back-propagation dropout must lie in [0, 1), got {dropout}")
    count = len(rows)
    live_count = max(1, round((1 - dropout) * count))
    if live_count == count:
        whole: MemoryTokens = model.amortization(rows)
        return whole
    order = torch.randperm(count)
    with_gradient, without = order[:live_count].tolist(), order[live_count:].tolist()
    with torch.no_grad():
        stopped = model.amortization([rows[i] for i in without])
    live = model.amortization([rows[i] for i in with_gradient])
    stopped_live = live.tokens.detach()
    scaled = MemoryTokens(stopped_live + (live.tokens - stopped_live) * (count / live_count), live.lexical)
    return MemoryTokens.cat([scaled, stopped])[order.argsort()]


def _mean_loss(
    model: AmortizedModel,
    prompts: Sequence[list[int]],
    targets: Sequence[list[int]],
    phi: Tensor,
    without_memory: Sequence[bool] = (),
) -> Tensor:
    """Mean negative log-likelihood of all target tokens.

    Rows of similar length share a batch. Otherwise the longest prompts would pad all others to their length.

    Args:
        prompts, targets: token ids of B rows.
        phi: `[B, T, D]`, each row's modulation.
        without_memory: True for each row without modulation; empty if all have one.
    """
    bare = without_memory or [False] * len(prompts)
    by_row: dict[int, Tensor] = {}
    for without in (False, True):
        rows = [i for i, flag in enumerate(bare) if flag == without]
        lengths = [len(prompts[i]) + len(targets[i]) for i in rows]
        for group in similar_lengths(lengths, _LENGTH_RATIO):
            chosen = [rows[i] for i in group]
            modulation = None if without else model.modulation(phi[chosen])
            group_rows = [prompts[i] for i in chosen], [targets[i] for i in chosen]
            logits = model.base_lm.answer_logits(*group_rows, modulation)
            by_row |= zip(chosen, logits.split([len(targets[i]) for i in chosen]))
    logits = torch.cat([by_row[i] for i in range(len(prompts))])
    expected = torch.tensor([token for target in targets for token in target], device=logits.device)
    return functional.cross_entropy(logits.float(), expected)
