"""How a bank reaches its shards: Ray actors, each in a process of its own. Lost ones restart from their folders."""

from __future__ import annotations

import copy
import secrets
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from mac_rag.distributed.cluster import connected_ray
from mac_rag.distributed.messages import ShardContents
from mac_rag.distributed.shard import Shard
from mac_rag.distributed.shard_files import (
    MOST_SHARDS,
    SHARDS,
    ShardMark,
    ShardsManifest,
    check_fingerprint,
    shard_folder,
)
from mac_rag.errors import BankError, ConfigError, MACError, ShardLostError
from mac_rag.memory.bank import MemoryBank
from mac_rag.nn.aggregation import AggregationNetwork

if TYPE_CHECKING:
    from mac_rag.model import MACModel


@dataclass(frozen=True)
class Request:
    """A call of a method of a `Shard`.

    Attributes:
        method: name of the method.
        args, kwargs: its arguments.
    """

    method: str
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class LostShard:
    """What comes back in the place of an answer from a shard that is not there.

    Attributes:
        reason: what happened to it.
        cannot_restart: True if it was started again in vain.
    """

    reason: str
    cannot_restart: bool = False


@dataclass(frozen=True)
class ShardSettings:
    """How the shards of a bank are opened.

    Attributes:
        folder: folder of the bank.
        manifest: what the bank is.
        network: the model's aggregation network, on the CPU.
        write: True to change the bank.
    """

    folder: Path
    manifest: ShardsManifest
    network: AggregationNetwork
    write: bool

    @classmethod
    def of(cls, folder: Path, model: MACModel, *, write: bool) -> ShardSettings:
        """Settings of the bank in a folder.

        Raises:
            BankError: when there is none, or its manifest is damaged.
            FingerprintError: when another model wrote it.
        """
        manifest = ShardsManifest.read(folder / SHARDS, f"there is no bank in shards in {folder}")
        check_fingerprint(folder, manifest.fingerprint, model.fingerprint)
        return cls(folder, manifest, _network_of(model), write)

    @classmethod
    def of_new(cls, folder: Path, model: MACModel, shards: int) -> ShardSettings:
        """Settings of a bank that is about to be made.

        Raises:
            BankError: when the folder holds a bank.
            ConfigError: for a number of shards that is none.
        """
        if not 1 <= shards <= MOST_SHARDS:
            raise ConfigError(f"shards is {shards}; choose 1 to {MOST_SHARDS}")
        if (folder / SHARDS).exists() or MemoryBank.exists(folder):
            raise BankError(f"{folder} already holds a bank; open it, or choose another folder")
        manifest = ShardsManifest(name=secrets.token_hex(16), fingerprint=model.fingerprint, shards=shards)
        return cls(folder, manifest, _network_of(model), write=True)

    def arguments(self, number: int, network: object, device: str) -> tuple[Any, ...]:
        """Arguments of `Shard`; `network` may be a reference to the network."""
        mark = ShardMark(bank=self.manifest.name, number=number, shards=self.manifest.shards)
        return mark, shard_folder(self.folder, number), self.manifest.fingerprint, network, device, self.write


def _network_of(model: MACModel) -> AggregationNetwork:
    network: AggregationNetwork = copy.deepcopy(model.aggregation).cpu().eval()
    return network


class Shards(Protocol):
    """The shards of a bank, in processes that can be lost."""

    def ask(self, requests: Mapping[int, Request]) -> dict[int, Any]:
        """Makes a call to each of some shards, to all at the same time.

        Returns:
            What each has returned, or the `MACError` that it raised, or a `LostShard` for one that is not there.
        """

    def start(self, number: int, *, create: bool = False) -> None:
        """Begins to open a shard from its folder, in the place of the one that was there; to make it with `create`."""

    def started(self, number: int, *, wait: bool) -> ShardContents | Exception | None:
        """What became of the start: the shard's documents, an error, or None if that is not known yet.

        Args:
            number: number of the shard.
            wait: True to wait until it is known.
        """

    def close(self) -> None:
        """Ends the shards."""


# Makes the shards of a bank; none of them is started.
StartShards: TypeAlias = Callable[[ShardSettings], Shards]
# Number of a shard -> options of its actor, as `ray.remote` takes them.
ActorOptions: TypeAlias = Callable[[int], Mapping[str, Any]]


class RayShards:
    """The shards of a bank as actors that live as long as this object.

    Args:
        settings: how the shards are opened.
        options: where each actor runs and what it takes, such as `num_gpus` or `resources`; without them, it takes part
            of the CPU of any machine.

    Raises:
        ConfigError: without Ray, or without a cluster.
    """

    def __init__(self, settings: ShardSettings, options: ActorOptions | None = None) -> None:
        self._ray = connected_ray()
        self._settings = settings
        self._options = options
        self._network = self._ray.put(settings.network)
        self._actors: dict[int, Any] = {}
        self._opening: dict[int, Any] = {}

    def start(self, number: int, *, create: bool = False) -> None:
        """See `Shards.start`."""
        former = self._actors.get(number)
        if former is not None:
            self._ray.kill(former)
        # Ray does not restart it: only this object knows what a shard that comes back has forgotten.
        options = {"num_cpus": 0, "max_restarts": 0, **({} if self._options is None else self._options(number))}
        device = "cuda" if options.get("num_gpus") else "cpu"
        actor = self._ray.remote(**options)(Shard).remote(*self._settings.arguments(number, self._network, device))
        self._actors[number], self._opening[number] = actor, actor.open.remote(create=create)

    def started(self, number: int, *, wait: bool) -> ShardContents | Exception | None:
        """See `Shards.started`."""
        reference = self._opening[number]
        if not wait and not self._ray.wait([reference], timeout=0)[0]:
            return None
        outcome = self._outcome(reference)
        found: ShardContents | Exception = ShardLostError(outcome.reason) if isinstance(outcome, LostShard) else outcome
        return found

    def ask(self, requests: Mapping[int, Request]) -> dict[int, Any]:
        """See `Shards.ask`."""
        references = {
            number: getattr(self._actors[number], request.method).remote(*request.args, **request.kwargs)
            for number, request in requests.items()
        }
        return {number: self._outcome(reference) for number, reference in references.items()}

    def _outcome(self, reference: Any) -> Any:
        """What a call has returned, or the error that a shard raised or a lost one leaves."""
        errors = self._ray.exceptions
        try:
            return self._ray.get(reference)
        except errors.RayTaskError as error:
            if isinstance(error.cause, MACError):
                return error.cause
            raise
        except errors.RayError as error:
            return LostShard(str(error).strip().splitlines()[0])

    def close(self) -> None:
        """See `Shards.close`."""
        for actor in self._actors.values():
            self._ray.kill(actor)


class WatchedShards:
    """The shards of a bank. Threads may share it.

    Args:
        settings: how the shards are opened.
        start: makes the shards.
        create: True to make a new bank.

    Attributes:
        transport: reaches the shards.
        opened: the documents of each shard when it was opened first.

    Raises:
        BankError: when a shard cannot be opened, or made.
    """

    def __init__(self, settings: ShardSettings, start: StartShards, *, create: bool) -> None:
        self.folder = settings.folder
        self.numbers = range(settings.manifest.shards)
        self._look = threading.RLock()  # held for an instant, never while a shard is asked
        self._lost: dict[int, LostShard] = {}  # shards that restart
        self._is_closed = False
        self.transport: Shards = start(settings)
        try:
            for number in self.numbers:
                self.transport.start(number, create=create)
            self.opened = [self._opened(number) for number in self.numbers]
        except BaseException:
            self.transport.close()
            raise

    def _opened(self, number: int) -> ShardContents:
        outcome = self.transport.started(number, wait=True)
        if isinstance(outcome, Exception):
            raise outcome
        assert outcome is not None
        return outcome

    @property
    def lost(self) -> frozenset[int]:
        """Numbers of the shards that are lost and have not restarted yet."""
        with self._look:
            return frozenset(self._lost)

    def ask(self, requests: Mapping[int, Request]) -> dict[int, Any]:
        """Makes a call to each of some shards, to all at the same time.

        Returns:
            What each has returned, or the error that it raised; a `ShardLostError` for one that is lost, which then
            restarts.

        Raises:
            BankError: after `close`.
        """
        if self._is_closed:
            raise BankError(f"{self.folder} was closed; open it again")
        lost = self.lost
        outcomes = self.transport.ask({number: one for number, one in requests.items() if number not in lost})
        with self._look:
            for number, outcome in outcomes.items():
                if isinstance(outcome, LostShard) and number not in self._lost:
                    self._restart(number, outcome)
        answers = {number: one for number, one in outcomes.items() if not isinstance(one, LostShard)}
        return {number: answers[number] if number in answers else self.error_of(number) for number in requests}

    def done(self, requests: Mapping[int, Request]) -> dict[int, Any]:
        """As `ask`; raises the first error, before any shard is asked if one of them is known to be lost."""
        for number in sorted(self.lost & requests.keys()):
            raise self.error_of(number)
        outcomes = self.ask(requests)
        for outcome in outcomes.values():
            if isinstance(outcome, Exception):
                raise outcome
        return outcomes

    def error_of(self, number: int) -> ShardLostError:
        """The error of a lost shard."""
        lost = self._lost.get(number)
        place = f"shard {number} of {len(self.numbers)} ({shard_folder(self.folder, number)})"
        if lost is not None and lost.cannot_restart:
            return ShardLostError(f"{place} was lost and cannot restart: {lost.reason}; mend that and try again")
        reason = "" if lost is None else f": {lost.reason}"
        return ShardLostError(f"{place} was lost{reason}; it restarts from its folder: try again in a moment")

    def _restart(self, number: int, lost: LostShard) -> None:
        self._lost[number] = lost
        self.transport.start(number)

    def take_restarted(self, take: Callable[[int, ShardContents], object], *, wait: bool) -> None:
        """Goes on with the shards that have restarted since.

        Args:
            take: is called once for each with what it holds on disk, before anybody can ask it.
            wait: True to wait for those that are about to restart.
        """
        with self._look:
            lost = dict(self._lost)
        for number, loss in lost.items():
            outcome = self.transport.started(number, wait=wait)
            with self._look:
                if outcome is None or self._lost.get(number) is not loss:  # another thread was faster
                    continue
                if isinstance(outcome, Exception):
                    self._restart(number, LostShard(str(outcome), cannot_restart=True))
                else:
                    take(number, outcome)
                    del self._lost[number]

    def close(self) -> None:
        """Closes the shards' banks, and ends the shards."""
        if not self._is_closed:
            self.ask({number: Request("close") for number in self.numbers})
            self._is_closed = True
            self.transport.close()
