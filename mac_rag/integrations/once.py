"""Warnings that a process gives once, however many questions it answers."""

from __future__ import annotations

import threading

_lock = threading.Lock()
_given: set[str] = set()


def first_time(topic: str) -> bool:
    """True at the first call of this process with this topic.

    Examples:
        >>> first_time("an example"), first_time("an example")
        (True, False)
    """
    with _lock:
        is_first = topic not in _given
        _given.add(topic)
        return is_first


def forget_warnings() -> None:
    """Lets every warning be given once more."""
    with _lock:
        _given.clear()
