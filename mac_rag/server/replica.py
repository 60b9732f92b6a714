"""One of several processes that answer questions. It reads the server's banks, changes none, and knows no Ray."""

from __future__ import annotations

import threading
from collections.abc import AsyncGenerator, Callable, Iterator
from dataclasses import replace
from pathlib import Path

from mac_rag.engine import MACEngine
from mac_rag.errors import FingerprintError
from mac_rag.model import MACModel
from mac_rag.server.api_errors import no_such_bank
from mac_rag.server.asking import Asking, Question, Reply
from mac_rag.server.catalog import open_bank
from mac_rag.server.metrics import Metrics
from mac_rag.server.replicas import Sent
from mac_rag.server.served_bank import ServedBank
from mac_rag.server.workers import Workers


class Replica:
    """Answers questions from the last commits of the banks. Those that arrive together are answered together.

    Args:
        model: name or folder of the model.
        fingerprint: the fingerprint that it must have.
        folder: the server's folder.
        most: questions at a time.
        patience: see `MACEngine.wait_for_crowds`.

    Raises:
        FingerprintError: for a model with another fingerprint, as where a folder differs between machines.
    """

    def __init__(self, model: str, fingerprint: str, folder: Path, most: int, patience: float) -> None:
        self._model = MACModel.from_pretrained(model)
        if self._model.fingerprint != fingerprint:
            raise FingerprintError(f"{model} has another fingerprint here than at the server; copy its folder anew")
        self._folder = folder
        self._lock = threading.Lock()
        self._banks: dict[str, ServedBank] = {}
        self._newest = -1  # number of the newest question, which knows best which banks there are
        alone = MACEngine(self._model)
        alone.wait_for_crowds(patience)
        self._asking = Asking(alone, Metrics(self))
        # The server bounds the questions; a request that is larger than the bound may come beside others.
        self._workers = Workers("questions", 2 * most)

    def served(self) -> list[ServedBank]:
        """The banks that are open."""
        with self._lock:
            return list(self._banks.values())

    async def answer(self, sent: Sent) -> list[Reply]:
        """Answers questions; see `Asking.answer`. Cancelled while they wait, they are not answered."""
        return await self._workers.run(lambda gone: self._answered(sent, gone))

    async def stream(self, sent: Sent) -> AsyncGenerator[str | Reply, None]:
        """Yields the answer to a question piece by piece; see `Asking.stream`."""
        async for piece in self._workers.stream(lambda: self._streamed(sent)):
            yield piece

    def _answered(self, sent: Sent, gone: Callable[[], bool]) -> list[Reply]:
        return self._asking.answer(self._questions(sent), gone)

    def _streamed(self, sent: Sent) -> Iterator[str | Reply]:
        [question] = self._questions(sent)
        return self._asking.stream(question)

    def _questions(self, sent: Sent) -> list[Question]:
        bank = None if sent.bank is None else self._bank(sent.bank, sent)
        return [replace(question, bank=bank) for question in sent.questions]

    def _bank(self, name: str, sent: Sent) -> ServedBank:
        """A bank in the state that a question is to see, or a later one.

        Raises:
            APIError: 404 for a bank that was deleted since the question was sent.
            BankError: when it is damaged.
        """
        with self._lock:
            if sent.number > self._newest:
                self._newest = sent.number
                self._close_all_but(sent)
            state = sent.banks.get(name)
            known = self._banks.get(name)
            if state is None or (known is not None and known.opening != state.opening):
                raise no_such_bank(name)
            if name not in self._banks:
                opened = open_bank(self._folder / "banks" / name / "bank", self._model, write=False)
                self._banks[name] = ServedBank(name, MACEngine(self._model, opened), "none")
                self._banks[name].opening = state.opening
            elif self._banks[name].changes < state.changes:
                self._banks[name].engine.refresh()
            self._banks[name].changes = max(self._banks[name].changes, state.changes)
            return self._banks[name]

    def _close_all_but(self, sent: Sent) -> None:
        """Closes the banks that are not served any more."""
        for name, bank in list(self._banks.items()):
            if name not in sent.banks or sent.banks[name].opening != bank.opening:
                del self._banks[name]
                bank.close()
