"""How a model reads a bank for its questions: one view of the bank behind every attention strategy."""

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
    from mac_rag.memory.contents import Contents
    from mac_rag.model import MACModel


# Number of questions whose attention mass is computed together.
_MASS_BATCH = 8


@dataclass(frozen=True)
class Aggregated:
    """The bank aggregated for B questions.

    Attributes:
        phi: `[B, T, D]`, phi* of each question.
        discarded: `[B]`, the share of the document prior on rows that were not attended to; zero if all rows were.
            `PriorIndex.search` tells when it is exact.
    """

    phi: Tensor
    discarded: Tensor


class BankReader:
    """Reads a bank with one model.

    Args:
        model: the model that reads; its weights must not change while the reader is in use.
        bank: a bank that this model wrote, or a snapshot of one.
        config: attention strategy and cache of keys and values.

    Raises:
        ConfigError: for preselection with a model that has no document prior.
    """

    def __init__(self, model: MACModel, bank: Contents, config: AttentionConfig) -> None:
        if config.strategy == "preselect" and model.aggregation.prior is None:
            raise ConfigError("this model has no document prior to preselect by; choose strategy 'streaming'")
        self.model = model
        self.bank = bank
        self.config = config
        self._rows: ProjectedBank | None = None
        self._codes: CodebookView | None = None
        self._priors = PriorIndex(exact_rows=config.exact_rows)
        self._recent = RecentQuestions()
        self._shards = ShardedAttention() if config.strategy == "sharded" else None
        self._attention: BankAttention = self._shards or streaming_attention

    def follow(self, bank: Contents) -> None:
        """Reads another state of the bank from now on. What is known of rows that both have is kept."""
        if bank.history != self.bank.history:
            self._rows, self._codes, self._recent = None, None, RecentQuestions()
            self._priors = PriorIndex(exact_rows=self.config.exact_rows)
        self.bank = bank
        for view in (self._rows, self._codes):
            if view is not None:
                view.bank = bank

    def aggregate(
        self,
        questions: Sequence[str],
        allowed: Container[str] | None = None,
        *,
        ids: Sequence[Sequence[int]] | None = None,
    ) -> Aggregated:
        """Aggregates the bank for each question (equation 1).

        Results of recent questions are cached until the bank changes.

        Args:
            questions: B texts.
            allowed: ids of the documents that may have any influence; None for all.
            ids: token ids of each question for the input encoder, where they are known.

        Raises:
            BankError: when the bank is empty or none of its documents is allowed.
        """
        known_ids = {} if ids is None else dict(zip(questions, ids, strict=True))
        # Shards compute together, so none may skip the computation because of its own cache.
        if allowed is not None or self.config.strategy == "sharded":
            return self._aggregate(questions, allowed, known_ids)
        network = self.model.aggregation
        state = (self.bank.version, network.use_prior, network.training)

        def compute(new: Sequence[str]) -> tuple[Tensor, Tensor]:
            aggregated = self._aggregate(new, None, known_ids)
            return aggregated.phi, aggregated.discarded

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
        if self.config.strategy == "hierarchical":
            view: BankView = self._projected()
            if visible is not None:  # the groups are formed as if there were no other rows
                view = view.select(visible.nonzero().T)
            return Aggregated(hierarchical(network, question, view, self.config.subgroup), nothing)
        mask = None if visible is None else visible.to(device).expand(len(questions), -1)
        phi, _ = network(question, self._projected(), mask=mask, attention=self._attention)
        return Aggregated(phi, nothing)

    @torch.no_grad()
    def attention_mass(self, questions: Sequence[str], allowed: Container[str] | None = None) -> Tensor:
        """The share of each question's attention that goes to each row of the bank, in the last block.

        Args:
            questions: B texts.
            allowed: ids of the documents that may have any influence; None for all.

        Returns:
            `[B, K]`; each question's shares sum to 1. Rows that are not attended to have 0.

        Raises:
            BankError: see `aggregate`.
            ConfigError: for the strategies hierarchical (algorithm 3) and sharded, under which no attention of one
                question reaches all documents.
        """
        if self.config.strategy in ("hierarchical", "sharded"):
            raise ConfigError(
                f"under strategy {self.config.strategy!r} there is no attention of one question to all documents of "
                "this bank; choose 'streaming' or 'preselect'"
            )
        visible = self._visible(allowed)
        # A few questions at a time, because a pass over the bank needs one number per row and query token.
        parts = [
            self._mass(questions[first : first + _MASS_BATCH], visible)
            for first in range(0, len(questions), _MASS_BATCH)
        ]
        return torch.cat(parts)

    def document_mass(
        self, questions: Sequence[str], allowed: Container[str] | None = None
    ) -> tuple[list[str], Tensor]:
        """As `attention_mass`, for each document that may be seen; merged documents share their entry's mass equally.

        Returns:
            The document ids, and the mass `[B, documents]` on the CPU; each row sums to 1. A document that was merged
            with one that is not allowed is not among them.
        """
        mass = self.attention_mass(questions, allowed).cpu()
        visible = self._visible(allowed)
        members = [
            (row, row_ids)
            for row, row_ids in enumerate(self.bank.row_members)
            if visible is None or visible[row].item()
        ]
        seen = {document_id for _, row_ids in members for document_id in row_ids}
        ids = [document_id for document_id in self.bank.document_ids if document_id in seen]
        place = {document_id: index for index, document_id in enumerate(ids)}
        owners = [(row, place[document_id], len(row_ids)) for row, row_ids in members for document_id in row_ids]
        rows, documents, shared = (torch.tensor(column) for column in zip(*owners, strict=True))
        return ids, mass.new_zeros(len(questions), len(ids)).index_add_(1, documents, mass[:, rows] / shared)

    def _mass(self, questions: Sequence[str], visible: Tensor | None) -> Tensor:
        network, question = self.model.aggregation, self._encoded(questions, {})
        if self.config.strategy == "preselect":
            selected, index, _ = self._preselect(question, visible)
            _, mass = network(question, selected, mass=True)
            all_rows: Tensor = mass.new_zeros(len(questions), len(self.bank.row_keys))
            return all_rows.scatter_(1, index.to(mass.device), mass)
        mask = None if visible is None else visible.to(question.tokens.device).expand(len(questions), -1)
        _, mass = network(question, self._projected(), mask=mask, mass=True)
        assert isinstance(mass, Tensor)
        return mass

    def _encoded(self, questions: Sequence[str], ids: Mapping[str, Sequence[int]]) -> MemoryTokens:
        encoder = self.model.input_encoder
        encoded: MemoryTokens = encoder([ids.get(question) or encoder.ids(question) for question in questions])
        return encoded

    def _visible(self, allowed: Container[str] | None) -> Tensor | None:
        """Which rows may be seen, bool `[K]`; a row of several documents only if all are allowed. None for all rows."""
        if not self._over_shards(len(self.bank)):
            raise BankError("the memory bank is empty; adapt to some documents first")
        if allowed is None:
            return None
        visible = torch.tensor(
            [all(member in allowed for member in members) for members in self.bank.row_members], dtype=torch.bool
        )
        if not self._over_shards(int(visible.sum())):
            raise BankError("none of the documents in the memory bank is among those allowed")
        return visible

    def _over_shards(self, count: int) -> int:
        """The sum over all processes, which must all go on or all raise; the count itself without shards."""
        return count if self._shards is None else self._shards.total(count, self.model.device)

    def _preselect(self, question: MemoryTokens, visible: Tensor | None) -> tuple[BankView, Tensor, Tensor]:
        """The rows with the highest prior: a view, their numbers `[B, N]`, and the discarded prior `[B]`."""
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
        """True if attention over codes equals attention over rows: exact attention without a document prior."""
        network = self.model.aggregation
        exact = self.config.strategy in ("streaming", "sharded")
        return self.bank.codebook is not None and exact and (network.prior is None or not network.use_prior)

    def _coded(self) -> CodebookView:
        # A codebook that has lost codes is another one: new rows may get the numbers of those.
        if self._codes is None or self._codes.codebook is not self.bank.codebook:
            self._codes = CodebookView(
                self.model.aggregation,
                self.bank,
                device=self.model.device,
                dtype=DTYPES[self.config.cache_dtype],
            )
        self._codes.refresh()
        return self._codes
