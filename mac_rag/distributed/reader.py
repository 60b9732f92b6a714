"""Reads a bank in shards with a model: two round trips to all shards for each block, and an exact merge.

A recency term and slots cost two more round trips each, once per question.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from functools import reduce
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from mac_rag.bank.base_reader import Aggregated, NetworkReader
from mac_rag.distributed.messages import Array, ShardQuestion, to_array, to_tensor
from mac_rag.distributed.transport import Request
from mac_rag.errors import ConfigError
from mac_rag.nn.attention import Partial
from mac_rag.nn.memory_slots import FirstRows
from mac_rag.nn.prior import Candidates

if TYPE_CHECKING:
    from mac_rag.bank.interface import BankContents
    from mac_rag.config import AttentionConfig
    from mac_rag.distributed.sharded_contents import ShardedContents
    from mac_rag.model import AmortizedModel
    from mac_rag.nn.memory_tokens import MemoryTokens


class ShardedReader(NetworkReader):
    """Reads a bank in shards with one model.

    Args:
        model: the model that reads; its weights must not change while the reader is in use.
        bank: a snapshot of a bank that this model wrote.
        config: attention strategy, and the cache of keys and values of each shard.

    Raises:
        ConfigError: for any strategy except streaming.
    """

    bank: ShardedContents

    def __init__(self, model: AmortizedModel, bank: ShardedContents, config: AttentionConfig) -> None:
        if config.strategy != "streaming":
            raise ConfigError(
                f"strategy is {config.strategy!r}, which cannot read a bank in shards; choose 'streaming'"
            )
        super().__init__(model, bank, config)

    def follow(self, bank: BankContents) -> None:
        self.bank = bank  # type: ignore[assignment]  # the engine's bank makes all of its snapshots

    @torch.no_grad()
    def _aggregate(
        self, questions: Sequence[str], visible: Tensor | None, ids: Mapping[str, Sequence[int]], *, mass: bool
    ) -> Aggregated:
        phi, found = self._attended(self._encoded(questions, ids), self._seen_rows(visible), questions, mass=mass)
        return Aggregated(phi, torch.zeros(len(questions), device=phi.device), found)

    def _prior_summary(self, questions: Sequence[str], visible: Tensor | None) -> tuple[Tensor, int]:
        encoded, seen = self._encoded(questions, {}), self._seen_rows(visible)
        asked = _asked(self, encoded, seen, secrets.token_hex(8), use_prior=True)
        found = self.bank.shards.done({number: Request("prior_summary", (one,)) for number, one in asked.items()})
        parts = torch.stack([to_tensor(found[number], encoded.tokens.device) for number in sorted(found)])
        count = sum(
            self.bank.directories[number].rows if rows is None else int(rows.sum()) for number, rows in seen.items()
        )
        return torch.stack([parts[..., 0].amax(0), parts[..., 1].logsumexp(0)], 1), count

    def _attended(
        self, question: MemoryTokens, seen: Mapping[int, Tensor | None], texts: Sequence[str], *, mass: bool
    ) -> tuple[Tensor, Tensor | None]:
        """As `AggregationNetwork.forward`, for questions with their texts; `seen` as for `_ShardsAttention`."""
        network, asked, look = self.model.aggregation, self.model.asked(texts), self.model.look(texts)
        attention = _ShardsAttention(self, question, seen, asked)
        return network.aggregate(question, attention, first=attention.begun(len(question)), look=look, mass=mass)

    def _seen_rows(self, visible: Tensor | None) -> dict[int, Tensor | None]:
        """Index of each shard with visible rows -> its visible rows, bool `[k]`, or None for all."""
        rows = [directory.rows for directory in self.bank.directories]
        if visible is None:
            return {number: None for number, count in enumerate(rows) if count}
        return {number: part for number, part in enumerate(visible.split(rows)) if part.any()}


def _asked(
    reader: ShardedReader,
    question: MemoryTokens,
    seen: Mapping[int, Tensor | None],
    name: str,
    asked: Tensor | None = None,
    *,
    use_prior: bool,
) -> dict[int, ShardQuestion]:
    """The message about B questions to each shard; `seen` as `ShardedReader._seen_rows` gives it.

    `asked`: `[B]`, see `mac_rag.nn.prior.RecencyTerm.penalties`; None without the term.
    """
    prior = reader.model.aggregation.prior if use_prior else None
    queries = None if prior is None else prior.queries(question)
    return {
        number: ShardQuestion(
            name=name,
            version=reader.bank.states[number],
            prior_queries=None if queries is None else to_array(queries),
            use_prior=use_prior,
            use_recency=reader.model.aggregation.use_recency,
            asked=None if asked is None else to_array(asked),
            visible=None if rows is None else np.packbits(rows.numpy()),
            cache_bytes=reader.config.cache_bytes,
        )
        for number, rows in seen.items()
    }


class _ShardsAttention:
    """Attention of B questions to the rows of some shards, block by block; see `mac_rag.nn.aggregation.Attend`.

    `seen` and `asked` are as for `_asked`.
    """

    def __init__(
        self,
        reader: ShardedReader,
        question: MemoryTokens,
        seen: Mapping[int, Tensor | None],
        asked: Tensor | None,
    ) -> None:
        network = reader.model.aggregation
        self.bank = reader.bank
        self.device = question.tokens.device
        self.has_recency = network.recency_in_use is not None
        self.has_slots = network.slots is not None and network.use_prior
        self.name = secrets.token_hex(8)
        self.questions = _asked(reader, question, seen, self.name, asked, use_prior=network.use_prior)
        # The questions that the next request carries; None once the shards have them.
        self._to_tell: Mapping[int, ShardQuestion | None] = self.questions

    def begun(self, batch: int) -> FirstRows | None:
        """Sends each shard the facts about others that it needs before the first block of B questions.

        Returns the rows that the prior ranks first in all shards; None without slots, or if the prior is not in use.
        """
        if self.has_recency and len(self.questions) > 1:
            self._compare(batch)
        return self._ranked(batch) if self.has_slots else None

    def __call__(self, block: int, mass: bool, query: Tensor) -> tuple[Tensor, Tensor | None]:
        queries = to_array(query)
        sent: Array | None = queries
        floor = None
        if len(self.questions) > 1:
            # By its own bound, a shard without the question's documents would believe that many of its rows can matter.
            floor, sent = self._floor(block, queries), None
        packed = self._ask("attend", block, sent, mass=mass, floor=floor)
        parts = (Partial.unpacked(to_tensor(packed[number], query.device)) for number in sorted(packed))
        whole = reduce(Partial.merged, parts)
        return whole.attended.to(query.dtype), self._mass(whole.lse).to(query.dtype) if mass else None

    def _ask(self, method: str, *arguments: Any, **options: Any) -> dict[int, Any]:
        """The answers of all shards to a request; the first request carries the questions."""
        told, self._to_tell = self._to_tell, dict.fromkeys(self.questions)
        return self.bank.shards.done(
            {
                number: Request(method, (self.name, *arguments), {"question": question, **options})
                for number, question in told.items()
            }
        )

    def _compare(self, batch: int) -> None:
        """Sends each shard the recency term's candidates of all shards: two more round trips."""
        found = self._ask("candidates", batch)
        parts = [Candidates(*(to_tensor(array, "cpu") for array in found[number])) for number in sorted(found)]
        among = tuple(map(to_array, Candidates.of_all(parts)))
        self.bank.shards.done(dict.fromkeys(self.questions, Request("compare", (self.name, among))))

    def _ranked(self, batch: int) -> FirstRows:
        """Sends each shard the rows that the prior ranks first in all shards: two round trips."""
        found = self._ask("first_rows", batch)
        parts = [FirstRows(*(to_tensor(array, "cpu") for array in found[number])) for number in sorted(found)]
        if len(parts) > 1:
            self.bank.shards.done(
                {
                    number: Request("rank", (self.name, tuple(map(to_array, FirstRows.of_all(parts, place)))))
                    for place, number in enumerate(sorted(found))
                }
            )
        first = FirstRows.of_all(parts)
        return FirstRows(*(part.to(self.device) for part in first))

    def _floor(self, block: int, queries: Array) -> Array | None:
        """A lower bound of the largest logits over all shards `[B, H, S]`; None if no shard has one."""
        found = self._ask("floor", block, queries)
        floors = [floor for floor in found.values() if floor is not None]
        return np.maximum.reduce(floors) if floors else None

    def _mass(self, lse: Tensor) -> Tensor:
        """The attention mass on the rows of all shards `[B, K]`; 0 on those of shards that are not asked."""
        request = Request("mass", (self.name, to_array(lse)))
        masses = self.bank.shards.done(dict.fromkeys(self.questions, request))
        return torch.cat(
            [
                to_tensor(masses[number], lse.device) if number in masses else lse.new_zeros(len(lse), directory.rows)
                for number, directory in enumerate(self.bank.directories)
            ],
            1,
        )
