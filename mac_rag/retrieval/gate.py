"""A gate that many pass together, or one alone."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Gate:
    """Lets threads pass, and makes them wait while one thread has it closed.

    Examples:
        >>> gate = Gate()
        >>> with gate.closed(), gate.passing():  # the thread that has closed it passes
        ...     pass
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._inside = 0
        self._owner: int | None = None  # the thread that has closed it

    @contextmanager
    def passing(self) -> Iterator[None]:
        """Waits while another thread has the gate closed. A thread must not pass twice at a time."""
        with self._changed:
            self._changed.wait_for(lambda: self._owner in (None, threading.get_ident()))
            self._inside += 1
        try:
            yield
        finally:
            with self._changed:
                self._inside -= 1
                self._changed.notify_all()

    @contextmanager
    def closed(self) -> Iterator[None]:
        """Closes the gate, and waits until nobody is inside any more. One thread may do so at a time."""
        with self._changed:
            self._owner = threading.get_ident()
            self._changed.wait_for(lambda: not self._inside)
        try:
            yield
        finally:
            with self._changed:
                self._owner = None
                self._changed.notify_all()
