"""How a model reads a bank for its questions: one view of the bank behind every attention strategy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from mac_rag.bank.bank import Contents
from mac_rag.bank.base_reader import Aggregated, BringsReader, NetworkReader, Reader, RecentQuestions, prior_summary
from mac_rag.bank.own_kv_reader import OwnKVReader
from mac_rag.bank.projection import ProjectedBank
from mac_rag.config import AttentionConfig
from mac_rag.errors import ConfigError
from mac_rag.model import AmortizedModel, MACModel, OwnKVModel
from mac_rag.nn.bank_view import BankView
from mac_rag.nn.bank_view import prior_keys as prior_keys_of
from mac_rag.nn.hierarchical import hierarchical
from mac_rag.nn.memory_tokens import MemoryTokens

if TYPE_CHECKING:
    from mac_rag.bank.interface import BankContents
    from mac_rag.retrieval.bm25 import BM25Retriever


class BankReader(NetworkReader):
    """Reads a bank in this process with one model.

    Args:
        model: the model that reads; its weights must not change while the reader is in use.
        bank: a bank that this model wrote, or a snapshot of one.
        config: attention strategy and cache of keys and values.

    Raises:
        ConfigError: for preselection with a model that has no document prior, and for the strategy hierarchical with
            one that has slots.
    """

    bank: Contents

    def __init__(self, model: AmortizedModel, bank: Contents, config: AttentionConfig) -> None:
        if config.strategy == "preselect" and model.aggregation.prior is None:
            raise ConfigError("this model has no document prior to preselect by; choose strategy 'streaming'")
        if config.strategy == "hierarchical" and model.aggregation.slots is not None:
            count = model.aggregation.slots.count
            raise ConfigError(
                f"strategy {config.strategy!r} knows no slots, of which this model has {count}; choose 'streaming'"
            )
        super().__init__(model, bank, config)
        self._rows: ProjectedBank | None = None

    def follow(self, bank: BankContents) -> None:
        assert isinstance(bank, Contents)
        if bank.history != self.bank.history:
            self._rows, self._recent = None, RecentQuestions()
        self.bank = bank
        if self._rows is not None:
            self._rows.bank = bank

    @torch.no_grad()
    def _aggregate(
        self, questions: Sequence[str], visible: Tensor | None, ids: Mapping[str, Sequence[int]], *, mass: bool
    ) -> Aggregated:
        network = self.model.aggregation
        question, asked, look = self._encoded(questions, ids), self.model.asked(questions), self.model.look(questions)
        device = question.tokens.device
        nothing = torch.zeros(len(questions), device=device)
        if self.config.strategy == "preselect":
            selected, index, discarded = self._preselect(question, visible)
            phi, found = network(question, selected, asked=asked, look=look, mass=mass)
            if found is not None:
                all_rows = found.new_zeros(len(questions), len(self.bank.row_keys))
                found = all_rows.scatter_(1, index.to(found.device), found)
            return Aggregated(phi, discarded, mass=found)
        if self.config.strategy == "hierarchical":
            view: BankView = self._projected()
            if visible is not None:  # the groups are formed as if there were no other rows
                view = view.select(visible.nonzero().T)
            return Aggregated(hierarchical(network, question, view, self.config.subgroup, asked=asked), nothing)
        mask = None if visible is None else visible.to(device).expand(len(questions), -1)
        phi, found = network(question, self._projected(), mask=mask, asked=asked, look=look, mass=mass)
        return Aggregated(phi, nothing, mass=found)

    def _prior_summary(self, questions: Sequence[str], visible: Tensor | None) -> tuple[Tensor, int]:
        prior = self.model.aggregation.prior
        assert prior is not None
        keys = prior_keys_of(self._projected())
        scores = prior.score(prior.queries(self._encoded(questions, {})), keys)
        return prior_summary(scores, visible), scores.shape[1] if visible is None else int(visible.sum())

    def _preselect(self, question: MemoryTokens, visible: Tensor | None) -> tuple[BankView, Tensor, Tensor]:
        """The rows with the highest prior: a view, and `highest`."""
        prior = self.model.aggregation.prior
        assert prior is not None
        view = self._projected()
        scores = prior.score(prior.queries(question), prior_keys_of(view))
        count = scores.shape[1]
        if visible is not None:
            scores = scores.masked_fill(~visible.to(scores.device), -torch.inf)
            count = int(visible.sum())
        index, discarded = highest(scores, min(self.config.preselected, count))
        return view.select(index), index, discarded

    def _projected(self) -> ProjectedBank:
        if self._rows is None:
            self._rows = ProjectedBank(
                self.model.aggregation,
                self.bank,
                device=self.model.device,
                budget_bytes=self.config.cache_bytes,
            )
        self._rows.refresh()
        return self._rows


def highest(scores: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """The n highest of scores `[B, K]`: their places `[B, n]`, ascending, and the share of the softmax on all others.

    Examples:
        >>> highest(torch.tensor([[1.0, 3.0, 1.0, 3.0]]), 2)
        (tensor([[1, 3]]), tensor([0.1192]))
    """
    best, index = scores.topk(n, dim=-1)
    others = -torch.expm1(best.logsumexp(-1) - scores.logsumexp(-1))
    return index.sort(-1).values, others.clamp(0, 1)


def reader_of(
    model: MACModel,
    bank: BankContents,
    config: AttentionConfig,
    prior: BM25Retriever | None = None,
) -> Reader:
    """The reader of a bank, or of a snapshot of one, wherever it lies.

    Args:
        model: the model.
        bank: the bank.
        config: how it is read.
        prior: see `OwnKVReader`; only for its kind of model.

    Raises:
        ConfigError: for a strategy that the model or the bank does not support.
    """
    if isinstance(model, OwnKVModel):
        if not isinstance(bank, Contents) or prior is None:
            raise ConfigError("a bank in shards does not hold an LM's own keys and values; use a bank in one file")
        return OwnKVReader(model, bank, config, prior)
    assert isinstance(model, AmortizedModel)
    if isinstance(bank, Contents):
        return BankReader(model, bank, config)
    return cast(BringsReader, bank).reader(model, config)  # no check at run time: it would look at each property
