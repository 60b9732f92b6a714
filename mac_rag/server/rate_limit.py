"""So many requests a minute for each key."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from mac_rag.server.api_errors import APIError


class RateLimit:
    """A token bucket for each name: full at first, refilled steadily.

    Examples:
        >>> limit = RateLimit(2, clock=lambda: 0.0)
        >>> limit.take("reader"), limit.take("reader")
        (None, None)
        >>> limit.take("reader")
        Traceback (most recent call last):
        ...
        mac_rag.server.api_errors.APIError: more than 2 requests a minute; try again in 30 s

    Args:
        per_minute: requests a minute; 0 for any number.
        clock: seconds.
    """

    def __init__(self, per_minute: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._per_minute = per_minute
        self._clock = clock
        self._left: dict[str, tuple[float, float]] = {}  # tokens, and when they were counted

    def take(self, name: str) -> None:
        """Counts a request.

        Raises:
            APIError: 429 when there were too many; says when to try again.
        """
        if not self._per_minute:
            return
        now = self._clock()
        left, counted = self._left.get(name, (float(self._per_minute), now))
        left = min(float(self._per_minute), left + (now - counted) * self._per_minute / 60)
        if left < 1:
            self._left[name] = (left, now)
            seconds = math.ceil((1 - left) * 60 / self._per_minute)
            raise APIError(
                429,
                f"more than {self._per_minute} requests a minute; try again in {seconds} s",
                code="rate_limit_exceeded",
                retry_after=seconds,
            )
        self._left[name] = (left - 1, now)
