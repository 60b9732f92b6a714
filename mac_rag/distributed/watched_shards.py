"""The shards of a bank, some of which may be lost: those restart from their folders."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

from mac_rag.distributed.messages import ShardContents
from mac_rag.distributed.shard_files import shard_folder
from mac_rag.distributed.transport import LostShard, Request, Shards, ShardSettings, StartShards
from mac_rag.errors import BankError, ShardLostError


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
