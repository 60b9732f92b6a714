"""Replicas in processes of Ray Serve, on this machine or on several."""

from __future__ import annotations

import threading
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from secrets import token_hex
from typing import Any

from mac_rag.distributed.cluster import connected_ray
from mac_rag.engine import MACEngine
from mac_rag.errors import CancelledError, ConfigError, FingerprintError, MACError
from mac_rag.model import MACModel
from mac_rag.server.api_errors import APIError, no_such_bank
from mac_rag.server.asking import Asking, Question, Reply
from mac_rag.server.catalog import open_bank
from mac_rag.server.metrics import Banks, Metrics
from mac_rag.server.served_bank import ServedBank
from mac_rag.server.workers import Workers

_LOOK = 0.2  # seconds between looks whether somebody still waits


class Replicas:
    """Starts replicas, and gives each question to one that has few. Ray Serve starts a replica again that dies.

    They answer to this process alone: no port is opened beside Ray's own.

    Args:
        source: name or folder of the model; a folder lies under this path on all machines.
        model: the model.
        folder: the server's folder, which all machines reach under this path.
        count: number of replicas. Each takes a GPU where there are enough, or else a CPU.
        most: questions at a time.
        patience: see `MACEngine.wait_for_crowds`.

    Raises:
        ConfigError: without Ray Serve, or if the cluster has no room for them.
    """

    def __init__(self, source: str, model: MACModel, folder: Path, count: int, most: int, patience: float) -> None:
        ray = connected_ray()
        try:
            from ray import serve
        except ImportError as error:
            raise ConfigError(f"--ray needs Ray Serve: pip install 'mac-rag[server,ray]' ({error})") from None
        there = ray.cluster_resources()
        kind = "GPU" if there.get("GPU", 0) >= count else "CPU"
        if there.get(kind, 0) < count:
            raise ConfigError(f"--replicas {count} needs as many CPUs or GPUs, and Ray has {there.get(kind, 0):g} CPUs")
        self.count = count
        self._is_closed = False
        self._ray, self._serve, self._name = ray, serve, f"mac-rag-{token_hex(4)}"
        place = str(Path(source).resolve()) if Path(source).is_dir() else source
        deployment: Any = serve.deployment(
            name="replica",
            num_replicas=count,
            max_ongoing_requests=2 * most,
            ray_actor_options={"num_gpus": 1, "num_cpus": 0} if kind == "GPU" else {"num_cpus": 1},
        )(Replica)
        serve.start(proxy_location="Disabled")
        bound = deployment.bind(place, model.fingerprint, folder.resolve(), most, patience)
        try:
            self._handle = serve.run(bound, name=self._name, route_prefix=None)
        except RuntimeError as error:
            self.close()
            raise ConfigError(f"the replicas cannot start: {str(error).strip()[-500:]}") from None

    def answer(self, sent: Sent, cancelled: Callable[[], bool] | None) -> list[Reply]:
        """Answers questions in one of the replicas.

        Raises:
            APIError: 503 if it is lost.
            CancelledError: if `cancelled` says so.
            MACError: what the replica raises.
        """
        response: Any = self._handle.answer.remote(sent)
        while True:
            try:
                replies: list[Reply] = response.result(timeout_s=_LOOK)
                return replies
            except TimeoutError:
                if cancelled is not None and cancelled():
                    response.cancel()
                    raise CancelledError("nobody waits for this request any more, so it was not run") from None
            except Exception as error:
                raise self._known(error) from None

    def stream(self, sent: Sent) -> Iterator[str | Reply]:
        """Yields an answer piece by piece from one of the replicas.

        Raises:
            APIError: 503 if it is lost.
            MACError: what the replica raises.
        """
        response: Any = self._handle.options(stream=True).stream.remote(sent)
        try:
            yield from response
        except GeneratorExit:
            response.cancel()
            raise
        except Exception as error:
            raise self._known(error) from None

    def close(self) -> None:
        """Ends the replicas, unless that is done."""
        if not self._is_closed:
            self._is_closed = True
            self._serve.delete(self._name)

    def _known(self, error: Exception) -> Exception:
        """The error that a replica has raised, or that of a lost one."""
        cause: object = getattr(error, "cause", None)
        if isinstance(cause, MACError | APIError):
            return cause
        errors = self._ray.exceptions
        is_lost = isinstance(error, errors.RayError) and not isinstance(error, errors.RayTaskError)
        lost = APIError(503, "the process that was to answer is lost; ask again", code="lost", retry_after=1)
        return lost if is_lost else error


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


class ReplicatedAsking(Asking):
    """Asks replicas.

    A replica reads the banks on the disk, and this process is their only writer. So a question that comes behind a
    change sees it: it says how many changes there were, and a replica that has seen fewer looks at the disk first.

    Args:
        alone: an engine of the model with an empty bank.
        metrics: what parts take.
        replicas: the replicas.
        banks: the banks that are served.
    """

    def __init__(self, alone: MACEngine, metrics: Metrics, replicas: Replicas, banks: Banks) -> None:
        super().__init__(alone, metrics)
        self._replicas = replicas
        self._banks = banks
        self._numbers = count()

    def answer(self, questions: Sequence[Question], cancelled: Callable[[], bool] | None = None) -> list[Reply]:
        """As `Asking.answer`.

        Raises:
            APIError: 503 if the replica is lost.
            MACError: as `MACEngine.answer`.
        """
        sent = self._sent(questions)
        with self._metrics.part("answer"):
            return self._replicas.answer(sent, cancelled)

    def stream(self, question: Question) -> Iterator[str | Reply]:
        """As `Asking.stream`.

        Raises:
            APIError: 503 if the replica is lost.
            MACError: as `MACEngine.stream`.
        """
        sent = self._sent([question])
        with self._metrics.part("stream"):
            yield from self._replicas.stream(sent)

    def _sent(self, questions: Sequence[Question]) -> Sent:
        ready = tuple(replace(question, bank=None, hits=tuple(self._retrieved(question))) for question in questions)
        bank, number = questions[0].bank, next(self._numbers)
        states = {one.name: BankState(one.opening, one.changes) for one in self._banks.served()}
        return Sent(ready, None if bank is None else bank.name, states, number)


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
            BankError: if it is damaged.
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
