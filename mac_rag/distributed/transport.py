"""How a bank reaches its shards."""

from __future__ import annotations

import copy
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from mac_rag.distributed.messages import ShardContents
from mac_rag.distributed.shard_files import (
    MOST_SHARDS,
    SHARDS,
    ShardMark,
    ShardsManifest,
    check_fingerprint,
    shard_folder,
)
from mac_rag.errors import BankError, ConfigError
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
