"""Replicas in processes of Ray, on this machine or on several."""

from __future__ import annotations

import threading
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

from mac_rag.distributed.cluster import connected_ray
from mac_rag.engine import MACEngine
from mac_rag.errors import CancelledError, ConfigError, FingerprintError, MACError
from mac_rag.model import MACModel
from mac_rag.server.api_errors import APIError, closing, no_such_bank
from mac_rag.server.asking import Asking, Piece, Reply, ServedQuestion
from mac_rag.server.catalog import ServedBank, open_bank
from mac_rag.server.metrics import Banks, Metrics
from mac_rag.server.workers import Workers

_LOOK = 0.2  # seconds between two checks whether somebody still waits


class Replicas:
    """Starts replicas, actors of Ray, and sends each question to one that has few. Ray restarts a replica that dies.

    They listen on no port but Ray's own.

    Args:
        source: name or folder of the model; a folder must exist under this path on all machines.
        model: the model.
        folder: the server's folder, which all machines must reach under this path.
        count: number of replicas. Each takes a GPU if there are enough, otherwise a CPU.
        most: most questions at a time.
        patience: see `MACEngine.wait_for_crowds`.

    Raises:
        ConfigError: if Ray is missing, or the cluster has not enough CPUs or GPUs, or a replica cannot start.
    """

    def __init__(self, source: str, model: MACModel, folder: Path, count: int, most: int, patience: float) -> None:
        self._ray = ray = connected_ray()
        there = ray.cluster_resources()
        kind = "GPU" if there.get("GPU", 0) >= count else "CPU"
        if there.get(kind, 0) < count:
            raise ConfigError(
                f"--replicas {count} needs as many CPUs or GPUs, and Ray has {there.get(kind, 0):g} CPUs; give fewer "
                "replicas, or add machines"
            )
        self.count = count
        self._lock = threading.Lock()
        place = str(Path(source).resolve()) if Path(source).is_dir() else source
        resources = {"num_gpus": 1, "num_cpus": 0} if kind == "GPU" else {"num_cpus": 1}
        actor: Any = ray.remote(Replica).options(max_restarts=-1, max_concurrency=4 * most, **resources)
        started = [actor.remote(place, model.fingerprint, folder.resolve(), most, patience) for _ in range(count)]
        self._running = dict.fromkeys(started, 0)  # replica -> number of questions that it has
        self._lost: dict[Any, Any] = {}  # replica that has died -> what is done once it has started again
        try:
            ray.get([replica.ready.remote() for replica in started])
        except ray.exceptions.RayError as error:
            self.close()
            raise ConfigError(f"the replicas cannot start: {str(error).strip()[-500:]}") from None

    def answer(self, sent: SentQuestions, cancelled: Callable[[], bool] | None) -> list[Reply]:
        """Answers questions in one of the replicas.

        Raises:
            APIError: 503 if the replica is lost.
            CancelledError: if `cancelled` returns True.
            MACError: any error that the replica raises.
        """
        with self._one() as replica:
            response = replica.answer.remote(sent)
            while True:
                try:
                    replies: list[Reply] = self._ray.get(response, timeout=_LOOK)
                    return replies
                except self._ray.exceptions.GetTimeoutError:
                    if cancelled is not None and cancelled():
                        self._ray.cancel(response)
                        raise CancelledError("nobody waits for this request any more, so it was not run") from None

    def stream(self, sent: SentQuestions) -> Iterator[Piece | Reply]:
        """Yields an answer piece by piece from one of the replicas.

        Raises:
            APIError: 503 if the replica is lost.
            MACError: any error that the replica raises.
        """
        with self._one() as replica:
            response = replica.stream.options(num_returns="streaming").remote(sent)
            try:
                for piece in response:
                    yield self._ray.get(piece)
            except GeneratorExit:
                self._ray.cancel(response)
                raise

    def close(self) -> None:
        """Ends the replicas. A second call does nothing."""
        for replica in list(self._running):
            self._ray.kill(replica)
        self._running = {}

    @contextmanager
    def _one(self) -> Iterator[Any]:
        """The replica that has the fewest questions, of those that have not died and not started again yet."""
        with self._lock:
            if not self._running:
                raise closing("the server is closing, so nothing was done")
            self._lost = {one: back for one, back in self._lost.items() if not self._ray.wait([back], timeout=0)[0]}
            here = [one for one in self._running if one not in self._lost] or list(self._running)
            replica = min(here, key=self._running.__getitem__)
            self._running[replica] += 1
        try:
            yield replica
        except Exception as error:
            raise self._known(error, replica) from None
        finally:
            with self._lock:
                if replica in self._running:
                    self._running[replica] -= 1

    def _known(self, error: Exception, replica: Any) -> Exception:
        """The error that a replica raised; 503 for a lost replica."""
        cause: object = getattr(error, "cause", None)
        if isinstance(cause, MACError | APIError):
            return cause
        errors = self._ray.exceptions
        is_lost = isinstance(error, errors.RayError) and not isinstance(error, errors.RayTaskError)
        if not is_lost:
            return error
        with self._lock:
            if replica not in self._lost:
                self._lost[replica] = replica.ready.options(max_task_retries=-1).remote()
        return APIError(503, "the process that was to answer has died; ask again", code="lost", retry_after=1)


@dataclass(frozen=True)
class BankState:
    """The oldest state of a bank that a question may see.

    Attributes:
        opening: `ServedBank.opening`, which differs between banks that had the same name.
        changes: `ServedBank.changes`.
    """

    opening: str
    changes: int


@dataclass(frozen=True)
class SentQuestions:
    """Questions as a replica gets them.

    Attributes:
        questions: the questions, without their bank, and with the documents retrieved for them.
        bank: name of their bank; None for the LM alone.
        banks: name -> state of all open banks.
        number: a number that grows with each message.
    """

    questions: tuple[ServedQuestion, ...]
    bank: str | None
    banks: Mapping[str, BankState]
    number: int


class ReplicatedAsking(Asking):
    """Answers questions in replicas.

    A replica reads the banks on the disk, and this process is their only writer. So that a question sees every change
    before it, its message says how many changes there were, and a replica that has seen fewer looks at the disk first.

    Args:
        alone: an engine of the model with an empty bank.
        metrics: measures the parts of requests.
        replicas: the replicas.
        banks: the open banks.
    """

    def __init__(self, alone: MACEngine, metrics: Metrics, replicas: Replicas, banks: Banks) -> None:
        super().__init__(alone, metrics)
        self._replicas = replicas
        self._banks = banks
        self._numbers = count()

    def answer(self, questions: Sequence[ServedQuestion], cancelled: Callable[[], bool] | None = None) -> list[Reply]:
        """As `Asking.answer`.

        Raises:
            APIError: 503 if the replica is lost.
            MACError: as `MACEngine.answer`.
        """
        sent = self._sent(questions)
        with self._metrics.part("answer"):
            return self._replicas.answer(sent, cancelled)

    def stream(self, question: ServedQuestion) -> Iterator[Piece | Reply]:
        """As `Asking.stream`.

        Raises:
            APIError: 503 if the replica is lost.
            MACError: as `MACEngine.stream`.
        """
        sent = self._sent([question])
        with self._metrics.part("stream"):
            yield from self._replicas.stream(sent)

    def _sent(self, questions: Sequence[ServedQuestion]) -> SentQuestions:
        ready = tuple(replace(question, bank=None, hits=tuple(self._retrieved(question))) for question in questions)
        bank, number = questions[0].bank, next(self._numbers)
        states = {one.name: BankState(one.opening, one.changes) for one in self._banks.served()}
        return SentQuestions(ready, None if bank is None else bank.name, states, number)


class Replica:
    """Answers questions from the last commits of the banks, in one process. Questions that come together share a batch.

    Args:
        model: name or folder of the model.
        fingerprint: the fingerprint that the model must have.
        folder: the server's folder.
        most: most questions at a time.
        patience: see `MACEngine.wait_for_crowds`.

    Raises:
        FingerprintError: for a model with another fingerprint, such as a folder that differs between machines.
    """

    def __init__(self, model: str, fingerprint: str, folder: Path, most: int, patience: float) -> None:
        self._model = MACModel.from_pretrained(model)
        if self._model.fingerprint != fingerprint:
            raise FingerprintError(f"{model} is not the server's model on this machine; copy its folder again")
        self._folder = folder
        self._lock = threading.Lock()
        self._banks: dict[str, ServedBank] = {}
        self._newest = -1  # number of the newest message, whose list of banks is the present one
        alone = MACEngine(self._model)
        alone.wait_for_crowds(patience)
        self._asking = Asking(alone, Metrics(self))
        # Twice the bound: the server bounds the questions, but takes a request that exceeds the bound by itself.
        self._workers = Workers("questions", 2 * most)

    async def ready(self) -> None:
        """Returns when the replica has started."""

    def served(self) -> list[ServedBank]:
        """The banks that are open."""
        with self._lock:
            return list(self._banks.values())

    async def answer(self, sent: SentQuestions) -> list[Reply]:
        """Answers questions; see `Asking.answer`. Questions that are cancelled while they wait are dropped."""
        return await self._workers.run(lambda gone: self._answered(sent, gone))

    async def stream(self, sent: SentQuestions) -> AsyncGenerator[Piece | Reply, None]:
        """Yields the answer to a question piece by piece; see `Asking.stream`."""
        async for piece in self._workers.stream(lambda: self._streamed(sent)):
            yield piece

    def _answered(self, sent: SentQuestions, gone: Callable[[], bool]) -> list[Reply]:
        return self._asking.answer(self._questions(sent), gone)

    def _streamed(self, sent: SentQuestions) -> Iterator[Piece | Reply]:
        [question] = self._questions(sent)
        return self._asking.stream(question)

    def _questions(self, sent: SentQuestions) -> list[ServedQuestion]:
        bank = None if sent.bank is None else self._bank(sent.bank, sent)
        return [replace(question, bank=bank) for question in sent.questions]

    def _bank(self, name: str, sent: SentQuestions) -> ServedBank:
        """A bank in the state that a question must see, or in a later one.

        Raises:
            APIError: 404 for a bank that was deleted after the question was sent.
            BankError: if the bank is damaged.
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

    def _close_all_but(self, sent: SentQuestions) -> None:
        """Closes the banks that the server has closed."""
        for name, bank in list(self._banks.items()):
            if name not in sent.banks or sent.banks[name].opening != bank.opening:
                del self._banks[name]
                bank.close()
