"""The progress bar of all long work, on standard error: a bar on a terminal, elsewhere a line from time to time."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from types import TracebackType

from tqdm import tqdm

from mac_rag.errors import CancelledError
from mac_rag.untrusted_files import printable


class _Bar(tqdm):  # type: ignore[misc]
    # tqdm's own lock is shared with forked processes: one that is killed while it draws would stop all others for ever.
    _lock = threading.RLock()


class ProgressBar:
    """A progress bar with a note behind it; see `progress_bar`."""

    def __init__(
        self, label: str, total: int | None, done: int, disable: bool, cancelled: Callable[[], bool] | None
    ) -> None:
        self._cancelled = cancelled
        # In logs and CI tqdm's redrawing is noise; one line every thirty seconds is enough.
        interval = 0.2 if sys.stderr.isatty() else 30.0
        self._bar = _Bar(
            total=total,
            initial=done,
            desc=printable(label),
            disable=disable,
            mininterval=interval,
            dynamic_ncols=True,
            unit_scale=total is not None and total >= 1_000_000,  # 3.20M/20.0M
            leave=False,
        )

    def advance(self, count: int = 1) -> None:
        """Reports that `count` more units are done.

        Raises:
            CancelledError: if the rest need not be done.
        """
        if self._cancelled is not None and self._cancelled():
            raise CancelledError("nobody waits for this any more, so it was not finished")
        self._bar.update(count)

    def note(self, text: str) -> None:
        """Shows a text behind the bar."""
        self._bar.set_postfix_str(text, refresh=False)

    def write(self, line: str) -> None:
        """Prints a line above the bar."""
        if not self._bar.disable:
            _Bar.write(printable(line), file=sys.stderr)

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.close()


def progress_bar(
    label: str,
    total: int | None = None,
    *,
    done: int = 0,
    disable: bool = False,
    cancelled: Callable[[], bool] | None = None,
) -> ProgressBar:
    """Makes a progress bar, to be used in a `with` statement.

    Args:
        label: text in front of the bar.
        total: number of units of work; None if unknown.
        done: number of units that were done before.
        disable: True to show nothing.
        cancelled: returns True once the rest of the work need not be done.
    """
    return ProgressBar(label, total, done, disable, cancelled)
