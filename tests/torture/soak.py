"""One writer and several readers for a while: what each sees is what a plain dict says.

The writer adapts, forgets and compacts as a list says that is drawn beforehand, so that everybody knows the state after
each step. It tells by two counters how many steps it has begun and how many it has acknowledged. Whoever reads must see
the state after one of the steps between them. In the writer's process a thread asks questions; two readers refresh, one
opens the bank anew, and one makes backups. Nobody may need more and more files or memory.
"""

from __future__ import annotations

import gc
import json
import os
import random
import re
import shutil
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing.sharedctypes import RawArray
from pathlib import Path
from typing import Any, TypeAlias

from mac_rag.bank import MemoryBank
from mac_rag.bank.bank import Contents
from mac_rag.bank.copies import backup
from mac_rag.bank.verify import verify
from mac_rag.data.types import Document
from mac_rag.engine import MACEngine
from mac_rag.errors import BankError
from mac_rag.model import MACModel
from mac_rag.retrieval import BM25Retriever
from tests.torture.changes import leftovers, small_model
from tests.torture.part import Lost, Part, Stale, failure_of

State: TypeAlias = dict[str, int]  # document id -> its version
Step: TypeAlias = tuple[str, State]  # what is done, and to which documents
_STEPS = 5_000  # more than there is time for
_LEAST_STEPS = 6  # a round goes on until so many are acknowledged; fewer say nothing
_NAMES = [f"document {number}" for number in range(25)]
# What a process may need at its end beyond what it needed half-way; a leak at each step would be more.
_MORE_FILES, _MORE_MEMORY = 40, 60 << 20


class Torture(Part):
    """Rounds of some seconds, longer where the machine is busy."""

    goal = 60
    limit = 300.0
    seconds = 20.0

    def __init__(self, place: Path) -> None:
        self._model, self._place = small_model(place), place / "round"

    def kind(self, seed: int) -> str:
        return "rounds"

    def trial(self, seed: int) -> None:
        shutil.rmtree(self._place, ignore_errors=True)
        self._place.mkdir()
        round_ = _Round(self._place, self._model, seed, time.monotonic() + self.seconds)
        processes = [_forked(act, self._place / f"{number}.json") for number, act in enumerate(round_.acts)]
        codes = [os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) for process in processes]
        for report in sorted(self._place.glob("*.json")):
            failure, message = json.loads(report.read_text())
            raise {"lost": Lost, "stale": Stale, "wrong": AssertionError}.get(failure, RuntimeError)(message)
        assert not any(codes), codes
        round_.check_end()


class _Round:
    def __init__(self, place: Path, model: MACModel, seed: int, until: float) -> None:
        self._folder, self._place, self._model, self._until = place / "bank", place, model, until
        self._steps, self._states = _plan(random.Random(seed))
        self._counters: Any = RawArray("q", 3)  # steps that were begun, and that were acknowledged; 1 after the last
        with MemoryBank.create(self._folder, model.fingerprint, keep_texts=True) as bank:
            MACEngine(model, bank).adapt([_document("document 0", 0)])
        self.acts: list[Callable[[], None]] = [self.write, self.refresh, self.refresh, self.open, self.back_up]

    def _looks(self) -> list[int]:
        """The number of acknowledged steps, as long as the round goes on."""
        _, acknowledged, ended = self._counters
        goes_on = not ended and (time.monotonic() < self._until or acknowledged < _LEAST_STEPS)
        return [acknowledged] if goes_on else []

    def _check(self, seen: State, acknowledged: int) -> None:
        """Checks what was read after so many steps had been acknowledged."""
        begun = self._counters[0]
        if seen not in self._states[acknowledged : begun + 1]:
            kind = Stale if seen in self._states[:acknowledged] else Lost
            raise kind(f"after step {acknowledged} and before {begun + 1}: {seen}")

    def write(self) -> None:
        """Makes the steps, while a thread asks questions."""
        errors: list[BaseException] = []
        with MemoryBank.open(self._folder, write=True) as bank:
            held = BM25Retriever()
            held.add([_document("document 0", 0)])
            engine = MACEngine(self._model, bank, held, k=2)
            asking = threading.Thread(target=self._ask, args=(engine, errors))
            asking.start()
            growth = _Growth()
            try:
                for step in self._steps:
                    if not self._looks() or errors:
                        break
                    self._counters[0] += 1
                    _do(engine, step)
                    self._counters[1] += 1
                    growth.look(self._until)
            finally:
                self._counters[2] = 1
                asking.join()
            growth.check()
        for error in errors:
            raise error

    def _ask(self, engine: MACEngine, errors: list[BaseException]) -> None:
        try:
            while looks := self._looks():
                ids, _ = engine.document_attention(["Which version?"])
                self._check_ids(set(ids), looks[0])
                looks = [self._counters[1]]
                [answer] = engine.answer(["Which version of document 7?"], max_new_tokens=2)
                possible = self._states[looks[0] : self._counters[0] + 1]
                for name, text in zip(answer.document_ids, answer.contexts, strict=True):
                    if not any(state.get(name) == _version(text) for state in possible):
                        raise Stale(f"after step {looks[0]} it was answered from {text!r}")
        except BaseException as error:
            errors.append(error)

    def _check_ids(self, ids: set[str], acknowledged: int) -> None:
        if ids not in [set(state) for state in self._states[acknowledged : self._counters[0] + 1]]:
            raise Stale(f"after step {acknowledged} attention goes to {sorted(ids)}")

    def refresh(self) -> None:
        """Follows the writer with one engine, and asks."""
        engine, growth = MACEngine(self._model, MemoryBank.open(self._folder)), _Growth()
        while looks := self._looks():
            engine.refresh()
            self._check(_state(engine.bank), looks[0])
            ids, _ = engine.document_attention(["Which version?"])
            assert set(ids) == set(_state(engine.bank))
            growth.look(self._until)
        growth.check()

    def open(self) -> None:
        """Opens the bank anew each time."""
        growth = _Growth()
        while looks := self._looks():
            self._check(_state_of(self._folder), looks[0])
            assert verify(self._folder).clean
            growth.look(self._until)
        growth.check()

    def back_up(self) -> None:
        """Makes backups."""
        growth = _Growth()
        while looks := self._looks():
            into = self._place / "backup"
            backup(self._folder, into)
            self._check(_state_of(into), looks[0])
            into.unlink()
            growth.look(self._until)
        growth.check()

    def check_end(self) -> None:
        """Checks what is left when all have ended."""
        assert verify(self._folder).clean
        if _state_of(self._folder) != self._states[self._counters[1]]:
            raise Lost("the bank does not end as the last step says")
        assert not (left := leftovers(self._folder)), left
        assert self._counters[1] >= _LEAST_STEPS


class _Growth:
    """What a process needs, half-way and at its end."""

    def __init__(self) -> None:
        self._begin, self._middle = time.monotonic(), (0, 0)

    def look(self, until: float) -> None:
        if self._middle == (0, 0) and time.monotonic() > (self._begin + until) / 2:
            self._middle = _needs()

    def check(self) -> None:
        files, memory = _needs()
        if self._middle != (0, 0):
            assert files <= self._middle[0] + _MORE_FILES, f"{files} open files, half-way {self._middle[0]}"
            assert memory <= self._middle[1] + _MORE_MEMORY, f"{memory:,} bytes, half-way {self._middle[1]:,}"


def _needs() -> tuple[int, int]:
    """The number of open files of this process, and its memory in bytes."""
    gc.collect()
    memory = int(Path("/proc/self/status").read_text().split("RssAnon:")[1].split()[0]) * 1024
    return len(os.listdir("/proc/self/fd")), memory


def _plan(draw: random.Random) -> tuple[list[Step], list[State]]:
    """Steps, and the state before the first one and after each."""
    steps: list[Step] = []
    states: list[State] = [{"document 0": 0}]
    for number in range(1, _STEPS):
        state = dict(states[-1])
        kind = draw.choices(["adapt", "forget", "compact"], [6, 3, 1])[0]
        if kind == "forget" and len(state) > 1:
            changed = {draw.choice(sorted(state)): number}
            state = {name: version for name, version in state.items() if name not in changed}
        elif kind == "compact":
            changed = {}
        else:
            kind, changed = "adapt", dict.fromkeys(draw.sample(_NAMES, draw.randint(1, 4)), number)
            state |= changed
        steps.append((kind, changed))
        states.append(state)
    return steps, states


def _do(engine: MACEngine, step: Step) -> None:
    kind, changed = step
    if kind == "adapt":
        engine.adapt([_document(name, version) for name, version in changed.items()])
    elif kind == "forget":
        engine.forget(*changed)
    else:
        try:
            engine.compact()
        except BankError as error:  # a reader has not refreshed within its time
            if "compact it again" not in str(error):
                raise


def _document(name: str, version: int) -> Document:
    return Document(name, f"This is version {version} of {name}.")


def _version(text: str) -> int:
    found = re.search(r"version (\d+)", text)
    assert found is not None, text
    return int(found[1])


def _state(bank: Contents) -> State:
    return {entry.document_id: _version(str(entry.texts[0])) for entry in bank}


def _state_of(path: Path) -> State:
    with MemoryBank.open(path) as bank:
        return _state(bank)


def _forked(act: Callable[[], None], report: Path) -> int:
    process = os.fork()
    if process:
        return process
    try:
        act()
        os._exit(0)
    except BaseException as error:
        report.write_text(json.dumps([failure_of(error), traceback.format_exc()]))
    finally:
        os._exit(1)
