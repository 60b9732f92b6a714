"""A bank's connection to its shards: Ray actors, each in its own process. Lost shards restart from their folders."""

from __future__ import annotations

import copy
import secrets
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

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
    """Replaces the answer of a shard that is lost.

    Attributes:
        reason: what happened to the shard.
        cannot_restart: True if an attempt to restart it has failed.
    """

    reason: str
    cannot_restart: bool = False


@dataclass(frozen=True)
class ShardSettings:
    """How the shards of a bank are opened.

    Attributes:
        folder: folder of the bank.
        manifest: the bank's manifest.
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
            BankError: if there is none, or its manifest is damaged.
            FingerprintError: if another model wrote it.
            ConfigError: for a model that is not amortized.
        """
        manifest = ShardsManifest.read(
            folder / SHARDS,
            f"there is no bank in shards in {folder}; give its folder, or create one (ShardedBank.create)",
        )
        check_fingerprint(folder, manifest.fingerprint, model.fingerprint)
        return cls(folder, manifest, _network_of(model), write)

    @classmethod
    def of_new(cls, folder: Path, model: MACModel, shards: int) -> ShardSettings:
        """Settings of a bank that is to be made.

        Raises:
            BankError: if the folder already holds a bank.
            ConfigError: for an impossible number of shards, and for a model that is not amortized.
        """
        if not 1 <= shards <= MOST_SHARDS:
            raise ConfigError(f"shards is {shards}; choose 1 to {MOST_SHARDS}")
        if (folder / SHARDS).exists() or folder.is_file():
            raise BankError(f"{folder} already holds a bank; open it, or choose another folder")
        manifest = ShardsManifest(name=secrets.token_hex(16), fingerprint=model.fingerprint, shards=shards)
        return cls(folder, manifest, _network_of(model), write=True)

    def arguments(self, number: int, network: object, device: str) -> tuple[Any, ...]:
        """Arguments of `Shard`; `network` may be a reference to the network."""
        mark = ShardMark(bank=self.manifest.name, number=number, shards=self.manifest.shards)
        return mark, shard_folder(self.folder, number), self.manifest.fingerprint, network, device, self.write


def _network_of(model: MACModel) -> AggregationNetwork:
    from mac_rag.model import AmortizedModel

    if not isinstance(model, AmortizedModel):
        raise ConfigError(f"a model of the kind {model.kind!r} writes no banks in shards; make a bank in one piece")
    network: AggregationNetwork = copy.deepcopy(model.aggregation).cpu().eval()
    return network


# Number of a shard -> options of its actor, as `ray.remote` takes them.
ActorOptions: TypeAlias = Callable[[int], Mapping[str, Any]]


class RayShards:
    """The shards of a bank as actors that live as long as this object; their processes can be lost.

    Args:
        settings: how the shards are opened.
        options: Ray options of each actor, such as `num_gpus` or `resources`; None places it on any machine, sharing
            the CPU.

    Raises:
        ConfigError: without Ray, or if its cluster cannot be reached.
    """

    def __init__(self, settings: ShardSettings, options: ActorOptions | None = None) -> None:
        self._ray = connected_ray()
        self._settings = settings
        self._options = options
        self._network = self._ray.put(settings.network)
        self._actors: dict[int, Any] = {}
        self._opening: dict[int, Any] = {}

    def start(self, number: int, *, create: bool = False) -> None:
        """Begins to open a shard from its folder, replacing a running one. With `create`, makes the shard first."""
        former = self._actors.get(number)
        if former is not None:
            self._ray.kill(former)
        # Ray must not restart it: only this object knows what a restarted shard has forgotten.
        options = {"num_cpus": 0, "max_restarts": 0, **({} if self._options is None else self._options(number))}
        device = "cuda" if options.get("num_gpus") else "cpu"
        actor = self._ray.remote(**options)(Shard).remote(*self._settings.arguments(number, self._network, device))
        self._actors[number], self._opening[number] = actor, actor.open.remote(create=create)

    def started(self, number: int, *, wait: bool) -> ShardContents | Exception | None:
        """The outcome of the start: the shard's contents, an error, or None if it is not known yet.

        Args:
            number: number of the shard.
            wait: True to wait until it is known.
        """
        reference = self._opening[number]
        if not wait and not self._ray.wait([reference], timeout=0)[0]:
            return None
        outcome = self._outcome(reference)
        found: ShardContents | Exception = ShardLostError(outcome.reason) if isinstance(outcome, LostShard) else outcome
        return found

    def ask(self, requests: Mapping[int, Request]) -> dict[int, Any]:
        """Makes a call to each of some shards, to all at the same time.

        Returns:
            For each shard the return value, the `MACError` that it raised, or a `LostShard` if it is lost.
        """
        references = {
            number: getattr(self._actors[number], request.method).remote(*request.args, **request.kwargs)
            for number, request in requests.items()
        }
        return {number: self._outcome(reference) for number, reference in references.items()}

    def _outcome(self, reference: Any) -> Any:
        """The return value of a call, the `MACError` that the shard raised, or a `LostShard`."""
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
        """Ends the shards."""
        for actor in self._actors.values():
            self._ray.kill(actor)


# Makes the shards of a bank without starting them.
StartShards: TypeAlias = Callable[[ShardSettings], RayShards]


class WatchedShards:
    """The shards of a bank, with restarts of those that are lost. Threads may share it.

    Args:
        settings: how the shards are opened.
        start: makes the shards.
        create: True to make a new bank.

    Attributes:
        transport: the connection to the shards.
        opened: the contents of each shard when it was first opened.

    Raises:
        BankError: if a shard cannot be opened or made.
    """

    def __init__(self, settings: ShardSettings, start: StartShards, *, create: bool) -> None:
        self.folder = settings.folder
        self.numbers = range(settings.manifest.shards)
        self._look = threading.RLock()  # held briefly, never while a shard is asked
        self._lost: dict[int, LostShard] = {}  # shards that are restarting
        self._is_closed = False
        self.transport = start(settings)
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
            For each shard the return value, or the error that it raised; a `ShardLostError` for a lost shard, which
            then restarts.

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
        """As `ask`, but raises the first error; if a shard is known to be lost, before any shard is asked."""
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
            return ShardLostError(f"{place} was lost and cannot restart: {lost.reason}; repair that and try again")
        reason = "" if lost is None else f": {lost.reason}"
        return ShardLostError(f"{place} was lost{reason}; it restarts from its folder: try again in a moment")

    def _restart(self, number: int, lost: LostShard) -> None:
        self._lost[number] = lost
        self.transport.start(number)

    def take_restarted(self, take: Callable[[int, ShardContents], object], *, wait: bool) -> None:
        """Continues with the shards that have restarted.

        Args:
            take: called once for each with its contents on disk, before any other call can reach it.
            wait: True to wait for shards that are still restarting.
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
