"""Folders as they may be after a power loss, at every moment of every change.

What a file system keeps is modelled as the standards allow: the contents of a file last once it is synced, and names
once their folder is; of what came later any part may be there. A file that was not synced has its old contents, the
new ones, a part of them, or zeros.
"""

from __future__ import annotations

import io
import os
import random
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from tests.faults import Faults, watching
from tests.torture.changes import CHANGES, Interrupted, after_commits, small_model
from tests.torture.mutations import copy
from tests.torture.part import Part

STATES = 8  # states that are tried of each moment
Names: TypeAlias = dict[str, int | None]  # path -> file; None where a name was removed


@dataclass(frozen=True)
class _Event:
    """What a call did: to names, to the contents of a file, or to what lasts.

    Attributes:
        names: names that changed, all at once.
        file: the file that got other contents or was synced; None for neither.
        contents: its contents from then on; None where they were synced.
        synced: the folder whose names were synced; None for none.
    """

    names: Names | None = None
    file: int | None = None
    contents: bytes | None = None
    synced: str | None = None


class Recorder(Faults):
    """Notes everything that changes a folder. Paths are relative to it."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._plain_open = io.open
        self._root = folder
        self.before = {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}
        self._files: dict[str, int] = {self._relative(path): n for n, path in enumerate(self.before)}
        self.contents = dict(enumerate(self.before.values()))
        self.names: dict[str, int] = dict(self._files)
        self._number = len(self._files)
        self.events: list[_Event] = []

    def _relative(self, path: object) -> str:
        return os.path.relpath(os.fspath(path), self._root)  # type: ignore[call-overload]

    def done(self, name: str, place: object, *others: object) -> None:
        path = self._relative(self.path(place))
        match name:
            case "open to write":
                if path not in self._files:
                    self._rename({path: self._number})
                    self._number += 1
                self._look(path)
            case "flush" | "close written":
                self._look(path)
            case "fsync" if path in self._files:
                self.events.append(_Event(file=self._files[path]))
            case "fsync":
                self.events.append(_Event(synced=path))
            case "replace" | "rename":
                self._rename({path: None, self._relative(others[0]): self._files[path]})
            case "link":
                self._rename({self._relative(others[0]): self._files[path]})
            case "unlink" | "remove":
                self._rename({path: None})

    def _rename(self, names: Names) -> None:
        self.events.append(_Event(names=names))
        for path, file in names.items():
            if file is None:
                self._files.pop(path, None)
            else:
                self._files[path] = file

    def _look(self, path: str) -> None:
        if path in self._files:
            with self._plain_open(self._root / path, "rb") as file:
                self.events.append(_Event(file=self._files[path], contents=file.read()))


class _Loss:
    """A change, as it was recorded, and the folders that a power loss in it may leave."""

    def __init__(self, name: str, place: Path, model: object) -> None:
        self.change = Interrupted(name, place, model)  # type: ignore[arg-type]
        recorder = Recorder(copy(self.change.example, place / "recorded"))
        self._names, self._contents, self.events = recorder.names, recorder.contents, recorder.events
        self._commits: list[int] = []  # the number of events when each commit was acknowledged
        with watching(recorder), after_commits(lambda bank: self._commits.append(len(recorder.events))):
            self.change.run(recorder._root)

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
        kept, now = dict(self._contents), dict(self._contents)
        names: dict[str, int] = dict(self._names)
        pending: list[Names] = []
        for event in self.events[:moment]:
            if event.names is not None:
                pending.append(event.names)
            elif event.file is not None and event.contents is not None:
                now[event.file] = event.contents
            elif event.file is not None:
                kept[event.file] = now[event.file]
            else:
                for change in [each for each in pending if _is_in(each, event.synced)]:
                    _apply(names, change)
                    pending.remove(change)
        for change in _survivors(pending, choice, everything=everything):
            _apply(names, change)
        for path in [path for path in folder.rglob("*") if path.is_file()]:
            path.unlink()
        for path, file in names.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            data = _contents(kept.get(file, b""), now.get(file, b""), choice, everything=everything)
            (folder / path).write_bytes(data)


def _is_in(names: Names, folder: str | None) -> bool:
    return any((os.path.dirname(path) or ".") == folder for path in names)


def _apply(names: dict[str, int], change: Names) -> None:
    for path, file in change.items():
        if file is None:
            names.pop(path, None)
        else:
            names[path] = file


def _survivors(pending: list[Names], choice: random.Random | None, *, everything: bool) -> list[Names]:
    """What is kept of changes of names: all, none, the first ones, or any."""
    if choice is None:
        return pending if everything else []
    if choice.random() < 0.5:
        return pending[: choice.randint(0, len(pending))]
    return [change for change in pending if choice.random() < 0.5]


def _contents(kept: bytes, now: bytes, choice: random.Random | None, *, everything: bool) -> bytes:
    """What a file holds that held `kept` when it was synced, and `now` at the moment of the loss."""
    if kept == now or choice is None:
        return now if everything else kept
    part = choice.randint(0, len(now))
    return choice.choice([kept, now, now[:part], bytes(len(now)), now[:part] + bytes(len(now) - part)])


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
