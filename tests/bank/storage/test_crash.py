"""A bank whose writer is killed at any moment, and one that is read while it is written.

MAC_RAG_KILLS sets how many times the writer is killed at random moments.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import shutil
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from mac_rag.bank import MemoryBank
from mac_rag.bank.verify import verify
from mac_rag.data.types import Document
from mac_rag.errors import BankError
from tests.bank.helpers import change, contents, memory, stop_at, update_for_ever, write_for_ever

KILLS = int(os.environ.get("MAC_RAG_KILLS", "30"))
# Processes are forked from one that has imported everything, so that each starts within milliseconds.
_PROCESSES = multiprocessing.get_context("forkserver")
_PROCESSES.set_forkserver_preload(["tests.bank.helpers"])


def started(target: Callable[..., None], *arguments: Any) -> tuple[Any, Connection]:
    """A process, and what it says."""
    heard, said = _PROCESSES.Pipe(duplex=False)
    process = _PROCESSES.Process(target=target, args=(*arguments, said), daemon=True)
    process.start()
    said.close()
    return process, heard


def all_said(heard: Connection) -> list[Any]:
    said = []
    try:
        while True:
            said.append(heard.recv())
    except EOFError:
        return said


def test_a_killed_writer_loses_nothing_that_it_acknowledged(folder: Path) -> None:
    choice = random.Random(0)
    MemoryBank.create(folder, "f00d", keep_texts=True).close()
    state: dict[str, float] = {}
    commits = 0
    for kill in range(KILLS):
        process, heard = started(write_for_ever, folder, kill, 1000 * kill)
        assert heard.recv() == state  # what one writer left is what the next one finds
        said = [heard.recv() for _ in range(choice.randrange(10))]  # two words a commit, however slow the machine
        time.sleep(choice.uniform(0, 0.05))
        process.kill()
        process.join()
        possible = [state]
        for word in said + all_said(heard):
            if word == "done":
                possible = possible[-1:]
                commits += 1
            else:
                possible.append(word)
        report = verify(folder)
        assert report.clean, report
        state = contents(MemoryBank.open(folder))
        # The last commit that was acknowledged, or else all of the one that the process died in.
        assert state in possible
        assert report.documents == len(state)
    assert commits > KILLS


@pytest.mark.parametrize(
    ("first", "what", "secure_delete"),
    [
        (number % 3 + 1, what, secure_delete)
        for number, (what, secure_delete) in enumerate(
            [(what, False) for what in ("create", "save", "add", "merge segments", "delete", "compact")]
            + [("compact", True)]
        )
    ],
)
def test_a_crash_before_a_step_on_the_disk(folder: Path, first: int, what: str, secure_delete: bool) -> None:
    """Every file that is opened, renamed or removed is a place to crash; what is then found is the old or the new.

    Each change tries another third of the places; `make torture` tries all of them.
    """
    is_new = what in ("create", "save")
    old, new = folder / "old", folder / "new"
    if not is_new:
        with MemoryBank.create(old, "f00d", keep_texts=True, secure_delete=secure_delete) as bank:
            for name, size in (("a", 8), ("b", 3)):
                bank.put([Document(f"{name}{index}", "") for index in range(size)], memory(size, size))
                bank.commit()
            bank.delete("a3")
            bank.commit()
        shutil.copytree(old, new)
    change(new, what)
    after = contents(MemoryBank.open(new))
    files = len(list(new.iterdir()))
    for event in range(first, 200, 3):
        place = folder / str(event)
        if not is_new:
            shutil.copytree(old, place)
        process, heard = started(stop_at, event, place, what)
        process.join()
        if all_said(heard):
            break
        assert process.exitcode == 9
        if (place / "manifest.json").exists():
            assert verify(place).clean
            assert contents(MemoryBank.open(place)) in ([after] if is_new else [contents(MemoryBank.open(old)), after])
            done = contents(MemoryBank.open(place)) == after
            MemoryBank.open(place, write=True).close()
        else:
            assert is_new
            done = False
            if MemoryBank.exists(place):  # in the midst of a copy
                with pytest.raises(BankError, match=r"manifest.json is missing; (repair|nothing is left)"):
                    MemoryBank.open(place)
                continue
        # Trying again is all it takes, and nothing of the crash remains.
        if not done or what == "compact":
            change(place, what)
        assert verify(place).clean
        assert contents(MemoryBank.open(place)) == after
        assert len(list(place.iterdir())) == files
    else:
        pytest.fail("it never came to an end")
    assert event > 8


@pytest.mark.parametrize("secure_delete", [pytest.param(False, marks=pytest.mark.slow), True])
def test_reading_while_another_process_commits_and_compacts(folder: Path, secure_delete: bool) -> None:
    names = [f"document {index}" for index in range(40)]
    with MemoryBank.create(folder, "f00d", keep_texts=True, secure_delete=secure_delete) as bank:
        for name in names:
            bank.put([Document(name, "0")], memory(1, 0))
            bank.commit()
    process, heard = started(update_for_ever, folder)
    try:
        assert heard.recv() == "writing"
        with pytest.raises(BankError, match=rf"open for writing in process {process.pid} on "):
            MemoryBank.open(folder, write=True)
        reader, last, changes = MemoryBank.open(folder), 0.0, 0
        until = time.monotonic() + 120
        while changes < 20:
            assert time.monotonic() < until
            (value,) = set(contents(reader).values())
            assert value >= last
            assert (reader.phi == value).all()  # all of one commit, whatever the writer does meanwhile
            assert {text for entry in reader for text in entry.texts} == {f"{value:.0f}"}
            last = value
            changes += reader.refresh()
            (value,) = set(contents(MemoryBank.open(folder)).values())
            assert value >= last
            assert verify(folder).clean
    finally:
        process.kill()
        process.join()
    with MemoryBank.open(folder, write=True) as bank:  # the lock went with its holder
        assert sorted(bank.document_ids) == sorted(names)
