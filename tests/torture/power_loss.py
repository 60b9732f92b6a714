"""Folders as they may be after a power loss, at every moment of every change.

What a file system keeps is modelled as the standards allow: the contents of a file last once it is synced, and names
once their folder is; of what came later any part may be there: some of the writes, some of them torn, and some of the
names.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterable
from pathlib import Path
from typing import TypeAlias, TypeVar

from mac_rag.model import MACModel
from tests.torture.changes import CHANGES, Interrupted, after_commits, small_model
from tests.torture.mutations import copy
from tests.torture.part import Part
from tests.torture.system import Event, watching

STATES = 8  # states that are tried of each moment
_SECTOR = 512
T = TypeVar("T")
Names: TypeAlias = dict[str, int | None]  # path -> file; None where a name was removed


class _Loss:
    """A change, as it was recorded, and the folders that a power loss in it may leave."""

    def __init__(self, name: str, place: Path, model: MACModel) -> None:
        self.change = Interrupted(name, place, model)
        folder = copy(self.change.example, place / "recorded")
        self._before = {os.path.relpath(path, folder): path.read_bytes() for path in _files(folder)}
        ends: list[int] = []  # of what was noted when each commit was acknowledged
        with watching(folder, record=True) as system, after_commits(lambda bank: ends.append(system.event_count)):
            self.change.run(folder)
            self.events, places = system.events()
        self._commits = [sum(place <= end for place in places) for end in ends]

    def acknowledged(self, moment: int) -> int:
        """The number of commits that were acknowledged after so many events."""
        return sum(count <= moment for count in self._commits)

    def write(self, folder: Path, moment: int, choice: random.Random | None, *, everything: bool) -> None:
        """Writes the folder that is there after a power loss.

        Args:
            folder: the folder, as it was before the change.
            moment: the number of events before the loss.
            choice: draws what is kept of what may be lost; None to keep `everything` of it, or nothing.
        """
        disk = _Disk(self._before)
        for event in self.events[:moment]:
            disk.follow(event)
        for path in _files(folder):
            path.unlink()
        for name, data in disk.after_loss(choice, everything=everything).items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(data)


class _Disk:
    """What lasts of a folder, and what may be lost."""

    def __init__(self, files: dict[str, bytes]) -> None:
        self._kept = {number: bytearray(data) for number, data in enumerate(files.values())}
        self._pending: dict[int, list[Event]] = {number: [] for number in self._kept}
        self._names: dict[str, int] = {name: number for number, name in enumerate(files)}  # those that last
        self._now = dict(self._names)
        self._changes: list[Names] = []

    def follow(self, event: Event) -> None:
        """Takes in an event."""
        match event.kind:
            case "c":
                number = len(self._kept)
                self._kept[number], self._pending[number] = bytearray(), []
                self._rename({event.path: number})
            case "r" if event.path in self._now:
                self._rename({event.path: None, event.other: self._now[event.path]})
            case "u":
                self._rename({event.path: None})
            case "d":
                for change in [each for each in self._changes if _is_in(each, event.path)]:
                    _apply(self._names, change)
                    self._changes.remove(change)
            case "w" | "t" if event.path in self._now:
                self._pending[self._now[event.path]].append(event)
            case "s" if event.path in self._now:
                number = self._now[event.path]
                _write(self._kept[number], self._pending[number])
                self._pending[number] = []

    def _rename(self, names: Names) -> None:
        self._changes.append(names)
        _apply(self._now, names)

    def after_loss(self, choice: random.Random | None, *, everything: bool) -> dict[str, bytes]:
        """The files by their names."""
        names = dict(self._names)
        for change in _survivors(self._changes, choice, everything=everything):
            _apply(names, change)
        found = {}
        for name, number in names.items():
            data = bytearray(self._kept[number])
            _write(data, _survivors(self._pending[number], choice, everything=everything), choice)
            found[name] = bytes(data)
        return found


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _write(data: bytearray, events: Iterable[Event], choice: random.Random | None = None) -> None:
    """Makes writes, with `choice` some of them in part."""
    for event in events:
        if event.kind == "t":
            del data[event.offset :]
            data.extend(bytes(event.offset - len(data)))
            continue
        content = event.data
        if choice is not None and choice.random() < 0.2:
            content = content[: _SECTOR * choice.randint(0, len(content) // _SECTOR)]
        if content:
            data.extend(bytes(max(0, event.offset - len(data))))
            data[event.offset : event.offset + len(content)] = content


def _is_in(names: Names, folder: str) -> bool:
    return any((os.path.dirname(path) or ".") == folder for path in names)


def _apply(names: dict[str, int], change: Names) -> None:
    for path, file in change.items():
        if file is None:
            names.pop(path, None)
        else:
            names[path] = file


def _survivors(pending: list[T], choice: random.Random | None, *, everything: bool) -> list[T]:
    """What is kept of changes: all, none, the first ones, or any."""
    if choice is None:
        return pending if everything else []
    if choice.random() < 0.5:
        return pending[: choice.randint(0, len(pending))]
    return [change for change in pending if choice.random() < 0.5]


class Torture(Part):
    """Some states of every moment: what was synced alone, everything, and others at random."""

    def __init__(self, place: Path) -> None:
        model = small_model(place)
        self._folder = place / "folder"
        losses = [_Loss(name, place / str(number), model) for number, name in enumerate(CHANGES)]
        self._moments = [(loss, moment) for loss in losses for moment in range(len(loss.events) + 1)]
        random.Random(0).shuffle(self._moments)  # so that a part of a run says something of every change
        self.goal = STATES * len(self._moments)

    def kind(self, seed: int) -> str:
        return self._moments[seed // STATES][0].change.name

    def trial(self, seed: int) -> None:
        (loss, moment), state = self._moments[seed // STATES], seed % STATES
        folder = copy(loss.change.example, self._folder)
        loss.write(folder, moment, random.Random(seed) if state > 1 else None, everything=state == 1)
        try:
            done = moment == len(loss.events)
            loss.change.check(folder, done=done, commits=loss.acknowledged(moment))
        except BaseException as error:
            error.add_note(f"{loss.change.name}, after event {moment}: {loss.events[moment - 1 : moment]!r:.500}")
            raise
