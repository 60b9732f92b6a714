"""A bank that one thread changes while others read its last commit."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from mac_rag.bank.interface import Bank, BankContents


class SharedBank:
    """A bank, and the right to change it, which one thread has at a time. Nobody waits to read.

    Examples:
        >>> from mac_rag import MemoryBank
        >>> shared = SharedBank(MemoryBank("fingerprint of the model"))
        >>> with shared.changing():
        ...     shared.bank.commit()  # whatever happens here, `latest` gives a commit
        >>> len(shared.latest())
        0

    Args:
        bank: the bank; the attribute may be replaced by another bank while nobody changes it.

    Attributes:
        changes: the number of changes that have begun or ended. It is odd while one is under way.
    """

    def __init__(self, bank: Bank) -> None:
        self.bank = bank
        self.changes = 0
        self._right = threading.RLock()
        self._look = threading.Lock()  # held for an instant

    def latest(self) -> BankContents:
        """The contents of the bank; while a thread changes it, those of its last commit."""
        with self._look:
            return self.bank.committed if self.changes % 2 else self.bank.snapshot()

    @contextmanager
    def changing(self) -> Iterator[None]:
        """The right to change the bank; waits until no other thread has it."""
        with self._right:
            if self.changes % 2:  # by this very thread
                yield
                return
            self._count()
            try:
                yield
            finally:
                self._count()

    def _count(self) -> None:
        with self._look:
            self.changes += 1
