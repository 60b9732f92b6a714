"""What every part of the torture is: trials, each drawn from a number, and the kinds of failure that they can have."""

from __future__ import annotations

import gc
import importlib
from abc import ABC, abstractmethod
from pathlib import Path

from mac_rag.errors import MACError

# Each is a module beside this one, with a class `Torture`.
PARTS = ("kills", "faults", "power_loss", "soak", "banks", "retrievers", "checkpoints", "data_files", "texts")
FAILURES = ("lost", "stale", "foreign", "hang", "wrong")


class Lost(AssertionError):
    """Something that was acknowledged is not there, or something that was not is half there."""


class Stale(AssertionError):
    """A reader saw an older state than the last one that was acknowledged to it."""


class Part(ABC):
    """One kind of torture. Making the object makes what its trials need.

    Args:
        place: an empty folder for its files.

    Attributes:
        goal: the number of trials of a whole run.
        limit: seconds after which a trial counts as a hang.
    """

    goal = 10_000
    limit = 60.0

    @abstractmethod
    def __init__(self, place: Path) -> None: ...

    @abstractmethod
    def kind(self, seed: int) -> str:
        """What a trial tries, in a word or two; they are counted by it."""

    @abstractmethod
    def trial(self, seed: int) -> None:
        """Tries something that is drawn from the seed, and raises if it does not go as it should."""


def make(name: str, place: Path) -> Part:
    """The part of a name."""
    part: Part = importlib.import_module(f"tests.torture.{name}").Torture(place)
    gc.collect()
    gc.freeze()  # collecting what a trial leaves would take two seconds, to look through all modules
    return part


def failure_of(error: BaseException) -> str:
    """The kind of failure that an error of a trial is, one of `FAILURES`."""
    if isinstance(error, Lost):
        return "lost"
    if isinstance(error, Stale):
        return "stale"
    # pytest's `Failed`, for an error that did not come, is no Exception.
    if isinstance(error, AssertionError | MACError) or type(error).__name__ == "Failed":
        return "wrong"
    return "foreign"
