"""One shard: an ordinary bank on disk, and its rows' contribution to a question about all shards. Independent of Ray.

A question is asked block by block, because a block's queries depend on the result of the previous block over all
shards.
"""

from __future__ import annotations

import secrets
from collections import OrderedDict
from collections.abc import Collection, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from mac_rag.bank.bank import MemoryBank, Snapshot
from mac_rag.bank.base_reader import prior_summary
from mac_rag.bank.entries import Entry
from mac_rag.bank.overview import put_with_overview
from mac_rag.bank.projection import ProjectedBank
from mac_rag.data.types import Document
from mac_rag.distributed.messages import Array, ShardChange, ShardContents, ShardQuestion, Version, to_array, to_tensor
from mac_rag.distributed.shard_files import MARK, ShardMark, read_mark, shard_of, shards_of
from mac_rag.errors import BankError, ShardLostError
from mac_rag.nn.aggregation import AggregationNetwork
from mac_rag.nn.attended_bank import AttendedBank
from mac_rag.nn.attention import Partial, partial_attention
from mac_rag.nn.bank_view import prior_keys
from mac_rag.nn.memory_slots import FirstRows
from mac_rag.nn.prior import Candidates

# Largest number of question batches that engines may be asking at the same time.
_QUESTIONS = 8


def _unpacked(visible: Array, rows: int) -> Tensor:
    """Visible rows, bool `[k]`, from the packed bits of a message."""
    return torch.tensor(np.unpackbits(visible, count=rows)).bool()


class Shard:
    """A shard in this process.

    Args:
        mark: identity of the shard and its bank.
        folder: folder of its bank.
        fingerprint: fingerprint of the model.
        network: the model's aggregation network, on the CPU.
        device: device of the attention.
        write: True to change the shard.
    """

    def __init__(
        self, mark: ShardMark, folder: Path, fingerprint: str, network: AggregationNetwork, device: str, write: bool
    ) -> None:
        self.mark = mark
        self.folder = folder
        self.fingerprint = fingerprint
        self.network = network
        self.device = torch.device(device)
        self.write = write
        self._opening = secrets.token_hex(8)
        self._snapshots: dict[int, Snapshot] = {}  # former states that are still in use
        self._view: ProjectedBank | None = None
        self._asked: OrderedDict[str, AttendedBank] = OrderedDict()  # by name of the questions; all see one state
        # By name of the questions: the last attention, with its block, rows and bound.
        self._last: dict[str, tuple[Partial, int, Tensor | None, Tensor | None]] = {}
        self._queries: dict[str, Tensor] = {}  # by name of the questions: the last queries

    def open(self, *, create: bool = False) -> ShardContents:
        """Opens the bank at its last commit.

        Args:
            create: True to make it first.

        Raises:
            BankError: if the folder holds no bank, a damaged one, or another shard; if another process writes to it;
                with `create`, if it already holds a bank.
        """
        if create:
            MemoryBank.create(self._file, self.fingerprint).close()
            self.mark.write(self.folder / MARK)
        read_mark(self.folder).check(self.mark, self.folder)
        self.network.to(self.device).eval()
        self.bank = MemoryBank.open(self._file, write=self.write, fingerprint=self.fingerprint)
        own = shards_of(self.bank.directory.hashes, self.mark.shards) == self.mark.number
        if not own.all():
            foreign = next(name for name in self.bank.document_ids if self._owner(name) != self.mark.number)
            self.bank.close()
            raise BankError(
                f"{self.folder} is shard {self.mark.number}, but document {foreign!r} belongs to shard "
                f"{self._owner(foreign)}; put the folder of the right shard there"
            )
        return self.contents()

    @property
    def _file(self) -> Path:
        return self.folder / "bank.mac"

    def _owner(self, document_id: str) -> int:
        return shard_of(document_id, self.mark.shards)

    def contents(self) -> ShardContents:
        """The current documents, including uncommitted changes."""
        records = tuple(Entry(entry.members, entry.sequence, entry.rows) for entry in self.bank)
        return ShardContents(self._version, records, self.bank.row_shape)

    @property
    def _version(self) -> Version:
        return self._opening, self.bank.version

    @torch.no_grad()
    def candidates(self, name: str, batch: int, *, question: ShardQuestion) -> tuple[Array, ...]:
        """The shard's candidates of the recency term, as the arrays of a `Candidates`.

        Args:
            name, question: as for `attend`.
            batch: B.

        Raises:
            ShardLostError: as `attend`.
        """
        own = self._attended(name, question, batch).candidates
        assert own is not None  # asked only with a recency term
        return tuple(map(to_array, own))

    @torch.no_grad()
    def compare(self, name: str, among: tuple[Array, ...]) -> None:
        """Sets the candidates of all shards, as `candidates` returns them; call it before the first block.

        Raises:
            ShardLostError: as `attend`.
        """
        attended = self._attended(name)
        scores, keys, dates = (to_tensor(array, self.device) for array in among)
        attended.among = Candidates(scores.to(attended.dtype), keys.to(attended.dtype), dates)

    @torch.no_grad()
    def first_rows(self, name: str, batch: int, *, question: ShardQuestion | None = None) -> tuple[Array, ...]:
        """The rows that the prior ranks first in the shard, as the arrays of a `FirstRows`; after `compare`, if used.

        Args:
            name, question: as for `attend`.
            batch: B.

        Raises:
            ShardLostError: as `attend`.
        """
        first = self._attended(name, question, batch).first
        assert first is not None  # asked only of a network with slots, and with its prior
        return tuple(map(to_array, first))

    @torch.no_grad()
    def rank(self, name: str, first: tuple[Array, ...]) -> None:
        """Sets the rows that the prior ranks first in all shards, as `first_rows` returns them, before the first block.

        Raises:
            ShardLostError: as `attend`.
        """
        attended = self._attended(name)
        scores, rows, seen = (to_tensor(array, self.device) for array in first)
        attended.first_of_all = FirstRows(scores.to(attended.dtype), rows, seen)

    @torch.no_grad()
    def floor(self, name: str, block: int, query: Array, *, question: ShardQuestion | None = None) -> Array | None:
        """A lower bound of the largest logits of one block, `[B, H, S]`; None if this shard has none.

        The largest bound of all shards tells each shard which few of its rows can matter.

        Args:
            name, block, query, question: as for `attend`.

        Raises:
            ShardLostError: as `attend`.
        """
        attended = self._attended(name, question, len(query))
        queries = self._queries[name] = to_tensor(query, self.device, attended.dtype)
        floor = attended.floor(block, queries)
        return None if floor is None else to_array(floor)

    @torch.no_grad()
    def attend(
        self,
        name: str,
        block: int,
        query: Array | None,
        *,
        mass: bool = False,
        question: ShardQuestion | None = None,
        floor: Array | None = None,
    ) -> Array:
        """Attention of one block to the shard's rows.

        Args:
            name: name of the questions.
            block: index of the block.
            query: `[B, H, S, d]`, already scaled; with slots, B counts all slots of all questions. None reuses the
                queries of the last call of `floor`.
            mass: True if a call of `mass` follows.
            question: the questions; needed in the first call about them only.
            floor: `[B, H, S]`, a lower bound of the largest logits over all shards; None if unknown.

        Returns:
            `[B, H, S, d + 2]`, see `Partial.packed`.

        Raises:
            ShardLostError: if this shard was opened again, or asked about another state, since the question began.
        """
        attended = self._attended(name, question, 0 if query is None else len(query))
        queries = self._queries[name] if query is None else to_tensor(query, self.device, attended.dtype)
        bound = None if floor is None else to_tensor(floor, self.device, attended.dtype)
        chunks, rows, bound = attended.chunks(block, queries, floor=bound)
        partial = partial_attention(queries, chunks, floor=bound, mass=mass)
        if mass:
            self._last[name] = partial, block, rows, bound
        return to_array(partial.packed)

    def _attended(self, name: str, question: ShardQuestion | None = None, batch: int = 0) -> AttendedBank:
        """The shard's rows as the named questions attend to them; `question` begins new questions."""
        if question is not None:
            self._begin(question, batch)
        if name not in self._asked:
            raise self._forgotten()
        return self._asked[name]

    def _begin(self, question: ShardQuestion, batch: int) -> None:
        view = self._refreshed_view(question)
        self.network.use_prior, self.network.use_recency = question.use_prior, question.use_recency
        dtype = next(self.network.parameters()).dtype
        queries = question.prior_queries
        prior_queries = None if queries is None else to_tensor(queries, self.device, dtype)
        mask = None
        if question.visible is not None:
            mask = _unpacked(question.visible, view.documents).to(self.device).expand(batch, -1)
        asked = None if question.asked is None else to_tensor(question.asked, self.device)
        self._asked[question.name] = AttendedBank(
            self.network, view, prior_queries, mask=mask, asked=asked, dtype=dtype
        )
        while len(self._asked) > _QUESTIONS:
            name, _ = self._asked.popitem(last=False)
            self._last.pop(name, None)
            self._queries.pop(name, None)

    def _refreshed_view(self, question: ShardQuestion) -> ProjectedBank:
        opening, version = question.version
        known = version == self.bank.version or version in self._snapshots
        if opening != self._opening or not known:
            raise self._forgotten()
        seen = self.bank.snapshot() if version == self.bank.version else self._snapshots[version]
        view = self._view
        settings = (seen.history, question.cache_bytes)
        if view is None or (view.bank.history, view.budget_bytes) != settings:
            view = ProjectedBank(self.network, seen, device=self.device, budget_bytes=question.cache_bytes)
        if view is not self._view or view.bank.version != seen.version:
            self._asked.clear()  # these questions would continue with other rows than they began with
            self._last.clear()
            self._queries.clear()
        view.bank = seen
        view.refresh()
        self._view = view
        return view

    def _forgotten(self) -> ShardLostError:
        return ShardLostError(
            f"shard {self.mark.number} ({self.folder}) restarted or changed during the question; ask again"
        )

    @torch.no_grad()
    def prior_summary(self, question: ShardQuestion) -> Array:
        """The largest document prior of the shard's rows, and the log-sum-exp of all their priors, `[B, 2]`.

        See `mac_rag.bank.base_reader.prior_summary`.

        Args:
            question: the questions, with their prior queries.

        Raises:
            ShardLostError: as `attend`.
        """
        view, prior = self._refreshed_view(question), self.network.prior
        assert prior is not None
        assert question.prior_queries is not None
        queries = to_tensor(question.prior_queries, self.device, prior.log_scale.dtype)
        visible = None if question.visible is None else _unpacked(question.visible, view.documents)
        return to_array(prior_summary(prior.score(queries, prior_keys(view)), visible))

    def mass(self, name: str, lse: Array) -> Array:
        """The attention mass `[B, k]` of the shard's rows in the last block, for which `attend` had `mass`.

        Args:
            name: name of the questions.
            lse: `[B, H, S, 1]`, the log-sum-exp over all shards.

        Raises:
            ShardLostError: as `attend`.
        """
        if name not in self._last:
            raise self._forgotten()
        partial, block, rows, floor = self._last.pop(name)
        mass = partial.mass(to_tensor(lse, self.device))
        return to_array(self._attended(name).of_all_rows(block, mass, rows, floor))

    def put(self, kept: Collection[int], documents: Sequence[Document], phi: Array, rows: Sequence[int]) -> ShardChange:
        """See `MemoryBank.put`; `kept` are the versions of this opening that are still in use."""
        self._keep(kept)
        replaced = [
            name for document in documents if document.id in self.bank for name in self.bank[document.id].document_ids
        ]
        returned = put_with_overview(self.bank, self.network, documents, to_tensor(phi, "cpu"), rows)
        entries = [self.bank[document.id] for document in documents]
        added = tuple(Entry(entry.members, entry.sequence, n) for entry, n in zip(entries, rows, strict=True))
        return ShardChange(self._version, added, tuple(replaced), returned)

    def describe(self, kept: Collection[int], documents: Sequence[Document]) -> ShardChange:
        """See `MemoryBank.describe`."""
        self._keep(kept)
        replaced = tuple({name: None for document in documents for name in self.bank[document.id].document_ids})
        self.bank.describe(documents)
        entries = {entry.sequence: entry for entry in (self.bank[name] for name in replaced)}
        added = tuple(Entry(entries[number].members, number, entries[number].rows) for number in sorted(entries))
        return ShardChange(self._version, added, replaced)

    def delete(self, kept: Collection[int], document_id: str) -> ShardChange:
        """See `MemoryBank.delete`."""
        self._keep(kept)
        deleted = self.bank.delete(document_id)
        return ShardChange(self._version, (), deleted, deleted)

    def rollback(self, kept: Collection[int]) -> ShardChange:
        """See `MemoryBank.rollback`."""
        self._keep(kept)
        self.bank.rollback()
        return ShardChange(self._version)

    def check(self) -> None:
        """Does nothing: that it was called tells that the shard is there."""

    def commit(self) -> None:
        """See `MemoryBank.commit`."""
        self._let_go()
        self.bank.commit()

    def compact(self, kept: Collection[int]) -> None:
        """See `MemoryBank.compact`; `kept` are the versions of this opening that are still in use."""
        self._keep([version for version in kept if version != self.bank.version])  # which is there again afterwards
        self._let_go()
        self.bank.compact()

    def _let_go(self) -> None:
        """Releases the state that was asked about last, unless somebody still uses it."""
        if self._view is not None and self._view.bank.version not in self._snapshots:
            self._view.bank.release()

    def refresh(self, kept: Collection[int]) -> ShardContents | None:
        """See `MemoryBank.refresh`; None if there was no other commit."""
        self._keep(kept)
        return self.contents() if self.bank.refresh() else None

    def memory_tokens(self, document_id: str | None) -> Array | None:
        """Memory tokens `[rows, T, D]` of the entry of a document, or of the whole shard; None for an empty one."""
        if document_id is not None:
            return to_array(self.bank[document_id].phi)
        return to_array(self.bank.phi) if len(self.bank) else None

    def close(self) -> None:
        """See `MemoryBank.close`."""
        self.bank.close()

    def _keep(self, versions: Collection[int]) -> None:
        """Before a change: keeps snapshots of the states that are still in use, and of no others."""
        self._snapshots = {version: one for version, one in self._snapshots.items() if version in versions}
        if self.bank.version in versions:
            self._snapshots[self.bank.version] = self.bank.snapshot()
