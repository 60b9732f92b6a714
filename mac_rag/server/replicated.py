"""Questions that other processes answer: this one retrieves, says which banks there are, and waits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Protocol

from mac_rag.engine import MACEngine
from mac_rag.server.asking import Asking, Question, Reply
from mac_rag.server.metrics import Banks, Metrics


@dataclass(frozen=True)
class BankState:
    """Which state of a bank a question is to see, at least.

    Attributes:
        opening: `ServedBank.opening`: another bank of the same name has another one.
        changes: `ServedBank.changes`.
    """

    opening: str
    changes: int


@dataclass(frozen=True)
class Sent:
    """Questions as a replica gets them.

    Attributes:
        questions: without their bank, and with what is retrieved for them.
        bank: name of their bank; None for the LM alone.
        banks: all banks that are served, by name.
        number: larger than that of what was sent before.
    """

    questions: tuple[Question, ...]
    bank: str | None
    banks: Mapping[str, BankState]
    number: int


class Answerers(Protocol):
    """Processes that answer; see `mac_rag.server.replicas.Replicas`."""

    def answer(self, sent: Sent, cancelled: Callable[[], bool] | None) -> list[Reply]: ...

    def stream(self, sent: Sent) -> Iterator[str | Reply]: ...


class ReplicatedAsking(Asking):
    """Asks replicas.

    A replica reads the banks on the disk, and this process is their only writer. So a question that comes behind a
    change sees it: it says how many changes there were, and a replica that has seen fewer looks at the disk first.

    Args:
        alone: an engine of the model with an empty bank.
        metrics: what parts take.
        answerers: the replicas.
        banks: the banks that are served.
    """

    def __init__(self, alone: MACEngine, metrics: Metrics, answerers: Answerers, banks: Banks) -> None:
        super().__init__(alone, metrics)
        self._answerers = answerers
        self._banks = banks
        self._numbers = count()

    def answer(self, questions: Sequence[Question], cancelled: Callable[[], bool] | None = None) -> list[Reply]:
        """As `Asking.answer`.

        Raises:
            APIError: 503 when the replica is lost.
            MACError: as `MACEngine.answer`.
        """
        sent = self._sent(questions)
        with self._metrics.part("answer"):
            return self._answerers.answer(sent, cancelled)

    def stream(self, question: Question) -> Iterator[str | Reply]:
        """As `Asking.stream`.

        Raises:
            APIError: 503 when the replica is lost.
            MACError: as `MACEngine.stream`.
        """
        sent = self._sent([question])
        with self._metrics.part("stream"):
            yield from self._answerers.stream(sent)

    def _sent(self, questions: Sequence[Question]) -> Sent:
        ready = tuple(replace(question, bank=None, hits=tuple(self._retrieved(question))) for question in questions)
        bank, number = questions[0].bank, next(self._numbers)
        states = {one.name: BankState(one.opening, one.changes) for one in self._banks.served()}
        return Sent(ready, None if bank is None else bank.name, states, number)
