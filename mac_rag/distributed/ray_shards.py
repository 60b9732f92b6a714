"""Shards as Ray actors: each in a process of its own, on this machine or on others."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from mac_rag.distributed.cluster import connected_ray
from mac_rag.distributed.messages import ShardContents
from mac_rag.distributed.shard import Shard
from mac_rag.distributed.transport import LostShard, Request, ShardSettings
from mac_rag.errors import MACError, ShardLostError

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
