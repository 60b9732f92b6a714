"""Shards in this process, which die when a test wants them to."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from mac_rag.bank import MemoryBank
from mac_rag.bank.base_reader import Reader
from mac_rag.bank.overview import layout_for
from mac_rag.bank.reader import reader_of
from mac_rag.config import AttentionConfig
from mac_rag.data.types import Document
from mac_rag.distributed.messages import ShardContents
from mac_rag.distributed.shard import Shard
from mac_rag.distributed.sharded_bank import ShardedBank
from mac_rag.distributed.transport import LostShard, Request, ShardSettings
from mac_rag.errors import MACError
from mac_rag.model import MACModel


class LocalShards:
    """Shards without processes.

    Attributes:
        asked: all requests, in order.
        dies: (number, method, "before" or "after"): this shard dies once, at its next such request.
        held: shards that are slow to restart.
        is_gone: True if this process is dead, so that nothing reaches the shards.
    """

    def __init__(self, settings: ShardSettings) -> None:
        self.settings = settings
        self.shards: dict[int, Shard] = {}
        self.asked: list[tuple[int, Request]] = []
        self.dies: tuple[int, str, str] | None = None
        self.held: set[int] = set()
        self.is_gone = False
        self._outcomes: dict[int, ShardContents | Exception] = {}
        self._turn = threading.Lock()  # as a shard in a process serves one call at a time

    def start(self, number: int, *, create: bool = False) -> None:
        self.kill(number)
        shard = Shard(*self.settings.arguments(number, self.settings.network, "cpu"))
        try:
            self._outcomes[number] = shard.open(create=create)
            self.shards[number] = shard
        except MACError as error:
            self._outcomes[number] = error

    def started(self, number: int, *, wait: bool) -> ShardContents | Exception | None:
        return None if number in self.held and not wait else self._outcomes[number]

    def ask(self, requests: Mapping[int, Request]) -> dict[int, Any]:
        answers = {}
        for number, request in sorted(requests.items()):
            with self._turn:
                answers[number] = self._answer(number, request)
        return answers

    def _answer(self, number: int, request: Request) -> Any:
        if self.is_gone:
            raise SystemExit
        dies = None
        if self.dies is not None and self.dies[:2] == (number, request.method):
            dies, self.dies = self.dies[2], None
        if dies == "before":
            self.kill(number)
        if number not in self.shards:
            return LostShard("it was killed")
        self.asked.append((number, request))
        try:
            outcome = getattr(self.shards[number], request.method)(*request.args, **request.kwargs)
        except MACError as error:
            outcome = error
        if dies == "after":
            self.kill(number)
            return LostShard("it was killed")
        return outcome

    def kill(self, number: int) -> None:
        """What was not committed is lost, and the system releases the lock."""
        shard = self.shards.pop(number, None)
        if shard is not None:
            shard.close()

    def close(self) -> None:
        for number in list(self.shards):
            self.kill(number)


def made(folder: Path, model: MACModel, shards: int, **options: Any) -> ShardedBank:
    """A new bank with shards in this process."""
    return ShardedBank(ShardSettings.of_new(folder, model, shards), LocalShards, create=True, **options)


def opened(folder: Path, model: MACModel, *, write: bool = True, **options: Any) -> ShardedBank:
    return ShardedBank(ShardSettings.of(folder, model, write=write), LocalShards, **options)


def local(bank: ShardedBank) -> LocalShards:
    shards = bank.shards.transport
    assert isinstance(shards, LocalShards)
    return shards


def documents(count: int) -> list[Document]:
    """Documents that spread over 3 and over 4 shards."""
    return [Document(f"text {number}", f"text {number}", {"number": number}) for number in range(count)]


def reader(model: MACModel, bank: ShardedBank | MemoryBank, **config: Any) -> Reader:
    return reader_of(model, bank.snapshot(), AttentionConfig.model_validate(config))


def readers_of_one(folder: Path, model: MACModel, shards: int, stream: list[Document]) -> tuple[Reader, Reader]:
    """Readers of the same documents in shards, and in one bank."""
    phi = model.amortize([document.text for document in stream])
    bank, sharded = MemoryBank(model.fingerprint), made(folder, model, shards)
    bank.keep_rows_as(layout_for(model.aggregation))  # as shards do
    bank.put(stream, phi)
    sharded.put(stream, phi, [1] * len(stream))
    sharded.commit()
    return reader(model, sharded), reader(model, bank)


def assert_read_alike(found: Reader, expected: Reader, questions: list[str], allowed: set[str] | None = None) -> None:
    """Two banks give the same phi*, evidence of the prior and attention to each document, up to rounding."""
    close = {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(
        # Sums in another order: processors without AVX-512 round a single element by a little more.
        found.aggregate(questions, allowed).phi,
        expected.aggregate(questions, allowed).phi,
        rtol=1e-5,
        atol=2e-5,
    )
    evidence, evidence_expected = (one.prior_evidence(questions, allowed) for one in (found, expected))
    assert evidence is not None
    assert evidence_expected is not None
    torch.testing.assert_close(evidence, evidence_expected, rtol=1e-4, atol=1e-4)
    ids, mass = found.document_mass(questions, allowed)
    ids_expected, mass_expected = expected.document_mass(questions, allowed)
    assert sorted(ids) == sorted(ids_expected)
    torch.testing.assert_close(mass[:, [ids.index(name) for name in ids_expected]], mass_expected, **close)
