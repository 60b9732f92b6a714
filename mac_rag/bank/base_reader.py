"""What all readers of a bank have in common: encoded questions, allowed rows, recent answers, mass by document."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Container, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from mac_rag.bank.directory import id_hashes
from mac_rag.bank.interface import BankContents
from mac_rag.bank.known_documents import KnownDocuments
from mac_rag.config import AttentionConfig
from mac_rag.errors import BankError, ConfigError
from mac_rag.nn.memory_tokens import MemoryTokens
from mac_rag.nn.unpadded_bert import last_states_without_gradients
from mac_rag.retrieval.base import Hit

if TYPE_CHECKING:
    from mac_rag.model import AmortizedModel, MACModel, ReadRows


# Number of questions whose attention mass is computed together.
_MASS_BATCH = 8
# What the best row leaves to all others, at least, in log-odds: a share of 1 is a matter of rounding.
_LEAST_REST = 1e-3


@dataclass(frozen=True)
class Aggregated:
    """The bank aggregated for B questions.

    Attributes:
        phi: `[B, T, D]`, phi* of each question; or the rows that each question sees (`OwnKVReader`).
        discarded: `[B]`, the share of the document prior on rows that were not attended to; zero if all rows were.
        mass: `[B, K]`, the share of each question's attention that goes to each row, where it was asked for.
    """

    phi: Tensor | ReadRows
    discarded: Tensor
    mass: Tensor | None = None

    @property
    def tensor(self) -> Tensor:
        """`phi` of a model with an aggregation network.

        Raises:
            ConfigError: for another kind of model.
        """
        if not isinstance(self.phi, Tensor):
            raise ConfigError("this model has no aggregation network: it attends to rows of the bank with its LM")
        return self.phi


def prior_summary(scores: Tensor, visible: Tensor | None) -> Tensor:
    """The largest document prior and the log-sum-exp of all, `[B, 2]`; -inf where there is none.

    Args:
        scores: `[B, K]`, the prior of each row with its scale.
        visible: `[K]`, which rows may be seen, bool; None for all.

    Examples:
        >>> prior_summary(torch.tensor([[1.0, 0.0, 9.0]]), torch.tensor([True, True, False]))
        tensor([[1.0000, 1.3133]])
    """
    if visible is not None:
        scores = scores.masked_fill(~visible.to(scores.device), -torch.inf)
    scores = functional.pad(scores, (0, 1), value=-torch.inf)
    return torch.stack([scores.amax(1), scores.logsumexp(1)], 1)


class DocumentMass:
    """The attention mass of a bank's documents for B questions. Only the ids that are asked for are read.

    Merged documents share their entry's mass equally.

    Args:
        bank: the bank, in the state of the questions.
        mass: `[B, d]`, on the CPU, of all documents in the order of its directory.
        seen: `[d]`, bool, which documents may be seen; None for all.
    """

    def __init__(self, bank: BankContents, mass: Tensor, seen: Tensor | None) -> None:
        self._bank, self._mass, self._seen = bank, mass, seen

    def of_questions(self, places: Sequence[int]) -> DocumentMass:
        """The mass for some of the questions, by their places."""
        return DocumentMass(self._bank, self._mass[list(places)], self._seen)

    def of_all(self) -> tuple[list[str], Tensor]:
        """The ids of all documents that may be seen, and their mass `[B, documents]`; each row sums to 1."""
        ids = self._bank.document_ids
        if self._seen is None:
            return ids, self._mass
        return [ids[place] for place in self._seen.nonzero()[:, 0].tolist()], self._mass[:, self._seen]

    def highest(self, question: int, count: int) -> dict[str, float]:
        """Id -> mass of the documents with the most of it, in descending order."""
        mass = self._mass[question]
        if self._seen is not None:
            mass = mass.masked_fill(~self._seen, -1.0)
        values, places = mass.topk(min(count, len(mass)))
        found = zip(self._bank.ids_at(places.tolist()), values.tolist(), strict=True)
        return {name: value for name, value in found if value >= 0}

    def of(self, question: int, names: Sequence[str]) -> dict[str, float]:
        """Id -> mass of those of some documents that the bank holds and that may be seen."""
        if not names:
            return {}
        found = torch.isin(self._bank.directory.hashes, id_hashes(names))
        places = (found if self._seen is None else found & self._seen).nonzero()[:, 0].tolist()
        shares = zip(self._bank.ids_at(places), self._mass[question, places].tolist(), strict=True)
        return {name: share for name, share in shares if name in names}  # two ids may have one hash


class BringsReader(BankContents, Protocol):
    """Contents of a bank that this process cannot read by itself."""

    def reader(self, model: AmortizedModel, config: AttentionConfig) -> Reader:
        """A reader of these contents."""


class Reader(ABC):
    """Reads a bank with one model.

    Args:
        bank: a bank that this model wrote, or a snapshot of one.
        config: attention strategy and cache of keys and values.

    Attributes:
        model: the model that reads; its weights must not change while the reader is in use.
        sees_some: True if a question sees some rows only, and the mass of all others is exactly 0.
    """

    model: MACModel
    sees_some: bool = False

    def __init__(self, bank: BankContents, config: AttentionConfig) -> None:
        self.bank = bank
        self.config = config

    @abstractmethod
    def follow(self, bank: BankContents) -> None:
        """Reads another state of the bank from now on. What is known of rows that both have is kept."""

    @property
    @abstractmethod
    def recent_questions(self) -> tuple[int, int]:
        """How often a question was found in the cache of recent ones, and how often it was not."""

    @abstractmethod
    def aggregate(
        self,
        questions: Sequence[str],
        allowed: Container[str] | None = None,
        *,
        ids: Sequence[Sequence[int]] | None = None,
        mass: bool = False,
        read: Sequence[Sequence[str]] | None = None,
    ) -> Aggregated:
        """Aggregates the bank for each question (equation 1).

        Results of recent questions are cached until the bank changes, but for those with the mass.

        Args:
            questions: B texts.
            allowed: ids of the documents that may have any influence; None for all.
            ids: token ids of each question for the input encoder, where they are known.
            mass: True computes the attention mass in the same pass.
            read: for each question the documents that a retriever has found, as `apart` gives them: they count more.
                Only a reader that gives some takes them.

        Raises:
            BankError: when the bank is empty or none of its documents is allowed.
            ConfigError: with `mass`, as `attention_mass`.
        """

    @abstractmethod
    def prior_evidence(self, questions: Sequence[str], allowed: Container[str] | None = None) -> Tensor | None:
        """What the document prior says of the best row for each question, `[B, 2]`; None for a model without a prior.

        First its prior before the scale, then the log-odds of its share among all rows, `log(p / (1 - p))`, where p is
        the softmax of the priors: how far it is ahead of all others together. With one row that may be seen there are
        no others, and the log-odds are 0.

        Raises:
            BankError: see `aggregate`.
        """

    def apart(self, hits: Sequence[Hit], allowed: Container[str] | None = None) -> tuple[list[str], list[Hit]]:
        """Divides retrieved documents into those that are read from the bank and those that stand in the prompt.

        Args:
            hits: the documents, the best first; the id of one that is only known by its text is empty. Such a text may
                be several documents with blank lines between them.
            allowed: ids of the documents that may be read from the bank; None for all.

        Returns:
            Ids of the first ones, which `aggregate` takes; and the others: by default all.
        """
        return [], list(hits)

    def text_of(self, document_id: str) -> str | None:
        """The text of a document of the bank; None if the bank does not keep it."""
        if not self.bank.keep_texts:
            return None
        entry = self.bank[document_id]
        return entry.texts[entry.place(document_id)]

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
            ConfigError: for the strategy hierarchical (algorithm 3), under which no attention of one question reaches
                all documents.
        """
        mass = self.aggregate(questions, allowed, mass=True).mass
        assert mass is not None
        return mass

    def document_mass(
        self, questions: Sequence[str], allowed: Container[str] | None = None
    ) -> tuple[list[str], Tensor]:
        """As `attention_mass`, for each document that may be seen; merged documents share their entry's mass equally.

        Returns:
            The document ids, and the mass `[B, documents]` on the CPU; each row sums to 1. A document that was merged
            with one that is not allowed is not among them.
        """
        return self.by_document(self.attention_mass(questions, allowed), allowed).of_all()

    def by_document(self, mass: Tensor, allowed: Container[str] | None) -> DocumentMass:
        """The mass of rows `[B, K]` as that of the documents that may be seen."""
        directory, visible = self.bank.directory, self._visible(allowed)
        rows, members = directory.rows, directory.members
        of_entries = mass.cpu()
        if len(rows) < of_entries.shape[1]:  # some have several rows
            of_entries = of_entries.new_zeros(len(mass), len(rows)).index_add_(1, directory.row_entries, of_entries)
        seen = None if visible is None else visible.cpu()[rows.cumsum(0) - rows].repeat_interleave(members)
        return DocumentMass(self.bank, (of_entries / members).repeat_interleave(members, 1), seen)

    def _visible(self, allowed: Container[str] | None) -> Tensor | None:
        """Which rows may be seen, bool `[K]`; a row of several documents only if all are allowed. None for all rows."""
        if not len(self.bank):
            raise BankError("the memory bank is empty; adapt to some documents first")
        if allowed is None:
            return None
        visible = self.bank.visible_rows(allowed)
        if not visible.any():
            if isinstance(allowed, KnownDocuments):
                raise BankError(f"the memory bank holds no {allowed}; ask about a later moment, or allow others")
            raise BankError("none of the documents in the memory bank is among those allowed")
        return visible


class NetworkReader(Reader):
    """Reads a bank with an aggregation network.

    Args:
        model, bank, config: as `Reader`.
    """

    model: AmortizedModel

    def __init__(self, model: AmortizedModel, bank: BankContents, config: AttentionConfig) -> None:
        super().__init__(bank, config)
        self.model = model
        self._recent = RecentQuestions()

    @abstractmethod
    def _aggregate(
        self, questions: Sequence[str], visible: Tensor | None, ids: Mapping[str, Sequence[int]], *, mass: bool
    ) -> Aggregated:
        """Aggregates the bank for each question; `visible` `[K]` says which rows may be seen, None for all."""

    @abstractmethod
    def _prior_summary(self, questions: Sequence[str], visible: Tensor | None) -> tuple[Tensor, int]:
        """As `prior_summary`, of a model with a document prior; and the number of rows that may be seen."""

    @property
    def recent_questions(self) -> tuple[int, int]:
        return self._recent.hits, self._recent.misses

    def aggregate(
        self,
        questions: Sequence[str],
        allowed: Container[str] | None = None,
        *,
        ids: Sequence[Sequence[int]] | None = None,
        mass: bool = False,
        read: Sequence[Sequence[str]] | None = None,
    ) -> Aggregated:
        known_ids = {} if ids is None else dict(zip(questions, ids, strict=True))
        if mass:
            visible = self._visible(allowed)
            return self._with_mass(questions, lambda some: self._aggregate(some, visible, known_ids, mass=True))
        by_moment = isinstance(allowed, KnownDocuments) and allowed.among is None
        if not (allowed is None or by_moment):
            return self._aggregate(questions, self._visible(allowed), known_ids, mass=False)
        network = self.model.aggregation
        moment = allowed.as_of if isinstance(allowed, KnownDocuments) else None
        years = self.model.input_encoder.network.years
        use_years = years is not None and years.use_years
        switches = (network.use_prior, network.use_recency, network.training, use_years)
        state = (self.bank.version, switches, by_moment, moment)

        def compute(new: Sequence[str]) -> tuple[Tensor, Tensor]:
            aggregated = self._aggregate(new, self._visible(allowed), known_ids, mass=False)
            return aggregated.tensor, aggregated.discarded

        return Aggregated(*self._recent.look_up(questions, state, compute))

    @torch.no_grad()
    def attention_mass(self, questions: Sequence[str], allowed: Container[str] | None = None) -> Tensor:
        """As `Reader.attention_mass`: of all rows, or an error if some of them cannot be read."""
        visible = self._visible(allowed)
        mass = self._with_mass(questions, lambda some: self._aggregate(some, visible, {}, mass=True)).mass
        assert mass is not None
        return mass

    def _with_mass(self, questions: Sequence[str], read: Callable[[Sequence[str]], Aggregated]) -> Aggregated:
        """What `read` aggregates with the mass, a few questions at a time.

        Raises:
            ConfigError: see `attention_mass`.
        """
        if self.config.strategy == "hierarchical":
            raise ConfigError(
                "under strategy 'hierarchical' there is no attention of one question to all documents of this bank; "
                "choose 'streaming' or 'preselect'"
            )
        # Because a pass over the bank then needs one number per row and query token.
        parts = [read(questions[first : first + _MASS_BATCH]) for first in range(0, len(questions), _MASS_BATCH)]
        masses = [part.mass for part in parts if part.mass is not None]
        return Aggregated(
            torch.cat([part.tensor for part in parts]),
            torch.cat([part.discarded for part in parts]),
            torch.cat(masses),
        )

    @torch.no_grad()
    def prior_evidence(self, questions: Sequence[str], allowed: Container[str] | None = None) -> Tensor | None:
        prior = self.model.aggregation.prior
        if prior is None:
            return None
        found, rows = self._prior_summary(questions, self._visible(allowed))
        best, all_rows = found.unbind(1)
        share = (best - all_rows).exp().clamp(max=1.0)
        odds = share_odds(share) if rows > 1 else torch.zeros_like(share)
        return torch.stack([best / prior.log_scale.exp(), odds], 1)

    def _encoded(self, questions: Sequence[str], ids: Mapping[str, Sequence[int]]) -> MemoryTokens:
        encoder = self.model.input_encoder
        rows = [ids.get(question) or encoder.ids(question) for question in questions]
        encoded: MemoryTokens = encoder(rows, last_states_without_gradients)
        return encoded


def share_odds(share: Tensor) -> Tensor:
    """The log-odds of the best row's share of the prior, finite for a share of 1."""
    return (share / (1 - share + _LEAST_REST)).log()


class RecentQuestions:
    """Keeps phi* and the discarded prior of the most recent questions, until the state that they depend on changes.

    LlamaIndex's response mode `refine` asks the same question for one node after the other, and an evaluation asks it
    with one retriever after the other; phi* depends on neither.

    Args:
        max_bytes: memory for phi* of all cached questions; the least recently used ones go first.

    Attributes:
        hits, misses: questions that were found here, and that were not.
    """

    def __init__(self, max_bytes: int = 128 << 20) -> None:
        self.hits = self.misses = 0
        self._max_bytes = max_bytes
        self._state: Hashable = None
        self._results: OrderedDict[str, tuple[Tensor, Tensor]] = OrderedDict()

    def look_up(
        self, questions: Sequence[str], state: Hashable, compute: Callable[[Sequence[str]], tuple[Tensor, Tensor]]
    ) -> tuple[Tensor, Tensor]:
        """Returns cached results, and computes the missing ones.

        Args:
            questions: B texts; equal ones are computed once.
            state: everything else that the result depends on; a new state empties the cache.
            compute: called with the questions that are not cached; returns phi* `[n, T, D]` and discarded prior `[n]`.

        Returns:
            phi* `[B, T, D]` and discarded prior `[B]`.
        """
        if state != self._state:
            self._results.clear()
            self._state = state
        new = [question for question in dict.fromkeys(questions) if question not in self._results]
        self.misses += len(new)
        self.hits += len(questions) - len(new)
        if new:
            # A copy of each row: a view of one would keep the whole batch.
            rows = ((phi.clone(), discarded.clone()) for phi, discarded in zip(*compute(new), strict=True))
            self._results.update(zip(new, rows, strict=True))
        for question in questions:
            self._results.move_to_end(question)
        phi, discarded = zip(*(self._results[question] for question in questions), strict=True)
        while len(self._results) * phi[0].nbytes > self._max_bytes:
            self._results.popitem(last=False)
        return torch.stack(phi), torch.stack(discarded)
