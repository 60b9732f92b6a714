"""How a model reads a bank for its questions: one view of it, kept in step, behind every way of attending to it."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mac_rag.config import AttentionConfig
from mac_rag.errors import BankError, ConfigError
from mac_rag.lm.devices import DTYPES
from mac_rag.memory.views.codebook import CodebookView
from mac_rag.memory.views.prior_index import PriorIndex
from mac_rag.memory.views.projection import ProjectedBank
from mac_rag.memory.views.question_cache import RecentQuestions
from mac_rag.nn.attention import BankAttention, streaming_attention
from mac_rag.nn.bank_view import BankView
from mac_rag.nn.hierarchical import hierarchical
from mac_rag.nn.memory_tokens import MemoryTokens
from mac_rag.nn.sharded import ShardedAttention

if TYPE_CHECKING:
    from mac_rag.memory.bank import MemoryBank
    from mac_rag.model import MACModel


# Questions whose attention mass is computed together.
_MASS = 8


@dataclass(frozen=True)
class Aggregated:
    """What questions found in the bank.

    Attributes:
        phi: phi* of each question `[B, T, D]`.
        discarded: share of the document prior that lay on documents which were not attended to `[B]`; zero where all
            were. What it means beyond an exact product is told by `PriorIndex.search`.
    """

    phi: Tensor
    discarded: Tensor


class BankReader:
    """A bank as one model reads it.

    Args:
        model: whose weights stay as they are while the reader is in use.
        bank: that the model wrote.
        config: the way of attending.

    Raises:
        ConfigError: for preselection with a model that has no document prior.
    """

    def __init__(self, model: MACModel, bank: MemoryBank, config: AttentionConfig) -> None:
        if config.strategy == "preselect" and model.aggregation.prior is None:
            raise ConfigError("this model has no document prior to preselect by; choose strategy 'streaming'")
        self.model = model
        self.bank = bank
        self.config = config
        self._rows: ProjectedBank | None = None
        self._codes: CodebookView | None = None
        self._priors = PriorIndex(exact_rows=config.exact_rows)
        self._recent = RecentQuestions()
        self._attention: BankAttention = ShardedAttention() if config.strategy == "sharded" else streaming_attention

    def aggregate(
        self,
        questions: Sequence[str],
        allowed: Container[str] | None = None,
        *,
        ids: Sequence[Sequence[int]] | None = None,
    ) -> Aggregated:
        """Aggregates the bank for each question (equation 1).

        What recent questions found is kept until the bank changes, so that asking them again costs nothing.

        Args:
            questions: B texts.
            allowed: ids of the documents that may have any influence; None for all.
            ids: token ids of each question for the input encoder, where they are known.

        Raises:
            BankError: when the bank is empty or none of its documents is allowed.
        """
        known = {} if ids is None else dict(zip(questions, ids, strict=True))
        if allowed is not None or self.config.strategy == "sharded":  # shards must all compute, or none
            return self._aggregate(questions, allowed, known)
        network = self.model.aggregation
        state = (self.bank.version, network.use_prior, network.training)

        def compute(new: Sequence[str]) -> tuple[Tensor, Tensor]:
            found = self._aggregate(new, None, known)
            return found.phi, found.discarded

        return Aggregated(*self._recent.look_up(questions, state, compute))

    @torch.no_grad()
    def _aggregate(
        self, questions: Sequence[str], allowed: Container[str] | None, ids: Mapping[str, Sequence[int]]
    ) -> Aggregated:
        network = self.model.aggregation
        question = self._encoded(questions, ids)
        visible = self._visible(allowed)
        device = question.tokens.device
        nothing = torch.zeros(len(questions), device=device)
        if self.config.strategy == "preselect":
            selected, _, discarded = self._preselect(question, visible)
            return Aggregated(network(question, selected)[0], discarded)
        if self._by_codes and visible is None:
            return Aggregated(network(question, self._coded(), attention=self._attention)[0], nothing)
        mask = None if visible is None else visible.to(device).expand(len(questions), -1)
        if self.config.strategy == "hierarchical":
            view = self._projected()
            return Aggregated(hierarchical(network, question, view, self.config.subgroup, mask=mask), nothing)
        phi, _ = network(question, self._projected(), mask=mask, attention=self._attention)
        return Aggregated(phi, nothing)

    @torch.no_grad()
    def attention_mass(self, questions: Sequence[str], allowed: Container[str] | None = None) -> Tensor:
        """How much of each question's attention goes to each row of the bank, `[B, K]`; each question's sum to 1.

        It is that of the last block. Documents that are not attended to have none.

        Raises:
            BankError: as `aggregate`.
            ConfigError: under algorithm 3, where no attention reaches from a question to all documents, or over shards.
        """
        if self.config.strategy in ("hierarchical", "sharded"):
            raise ConfigError(
                f"under strategy {self.config.strategy!r} there is no attention of one question to all documents of "
                "this bank; choose 'streaming' or 'preselect'"
            )
        visible = self._visible(allowed)
        # A few questions at a time: until a pass over the bank is done, each row has a number for each query token.
        parts = [self._mass(questions[first : first + _MASS], visible) for first in range(0, len(questions), _MASS)]
        return torch.cat(parts)

    def document_mass(
        self, questions: Sequence[str], allowed: Container[str] | None = None
    ) -> tuple[list[str], Tensor]:
        """As `attention_mass`, for each document of the bank; documents that were merged share their entry's equally.

        Returns:
            The document ids, and the mass `[B, documents]` on the CPU; each row sums to 1.
        """
        mass = self.attention_mass(questions, allowed).cpu()
        ids = self.bank.document_ids
        place = {document_id: index for index, document_id in enumerate(ids)}
        owners = [(row, place[i], len(members)) for row, members in enumerate(self.bank.row_members) for i in members]
        rows, documents, shared = (torch.tensor(column) for column in zip(*owners, strict=True))
        return ids, mass.new_zeros(len(questions), len(ids)).index_add_(1, documents, mass[:, rows] / shared)

    def _mass(self, questions: Sequence[str], visible: Tensor | None) -> Tensor:
        network, question = self.model.aggregation, self._encoded(questions, {})
        if self.config.strategy == "preselect":
            selected, index, _ = self._preselect(question, visible)
            _, mass = network(question, selected, mass=True)
            found: Tensor = mass.new_zeros(len(questions), len(self.bank.row_keys))
            return found.scatter_(1, index.to(mass.device), mass)
        mask = None if visible is None else visible.to(question.tokens.device).expand(len(questions), -1)
        _, mass = network(question, self._projected(), mask=mask, mass=True)
        assert isinstance(mass, Tensor)
        return mass

    def _encoded(self, questions: Sequence[str], ids: Mapping[str, Sequence[int]]) -> MemoryTokens:
        encoder = self.model.input_encoder
        encoded: MemoryTokens = encoder([ids.get(question) or encoder.ids(question) for question in questions])
        return encoded

    def _visible(self, allowed: Container[str] | None) -> Tensor | None:
        """Which rows may be seen `[K]`. One that stands for several documents may only be if all of them may."""
        if not len(self.bank):
            raise BankError("the memory bank is empty; adapt to some documents first")
        if allowed is None:
            return None
        visible = torch.tensor([all(member in allowed for member in members) for members in self.bank.row_members])
        if not visible.any():
            raise BankError("none of the documents in the memory bank is among those allowed")
        return visible

    def _preselect(self, question: MemoryTokens, visible: Tensor | None) -> tuple[BankView, Tensor, Tensor]:
        """The rows with the highest prior: a view, their numbers `[B, N]`, and the share of all others `[B]`."""
        prior = self.model.aggregation.prior
        view = self._projected() if self.bank.codebook is None else self._coded()
        prior_keys = view.prior_keys if isinstance(view, ProjectedBank) else view.row_prior_keys
        assert prior is not None
        assert prior_keys is not None
        queries, scale, n = prior.queries(question), prior.log_scale.exp(), self.config.preselected
        if visible is None:
            self._priors.refresh(view.row_keys, prior_keys)
            index, discarded = self._priors.search(queries, scale, n)
        else:
            rows = visible.nonzero()[:, 0]
            among = PriorIndex(exact_rows=len(rows))
            among.refresh(view.row_keys[rows], prior_keys[rows.to(prior_keys.device)])
            index, discarded = among.search(queries, scale, n)
            index = rows.to(index.device)[index]
        return view.select(index), index, discarded

    def _projected(self) -> ProjectedBank:
        if self._rows is None:
            self._rows = ProjectedBank(
                self.model.aggregation,
                self.bank,
                device=self.model.device,
                dtype=DTYPES[self.config.cache_dtype],
                budget_bytes=self.config.cache_bytes,
            )
        self._rows.refresh()
        return self._rows

    @property
    def _by_codes(self) -> bool:
        """Whether attention over codes is that over the bank: a document prior tells rows of equal codes apart."""
        network = self.model.aggregation
        exact = self.config.strategy in ("streaming", "sharded")
        return self.bank.codebook is not None and exact and (network.prior is None or not network.use_prior)

    def _coded(self) -> CodebookView:
        if self._codes is None:
            self._codes = CodebookView(
                self.model.aggregation,
                self.bank,
                device=self.model.device,
                dtype=DTYPES[self.config.cache_dtype],
            )
        self._codes.refresh()
        return self._codes
