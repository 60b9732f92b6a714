"""A bank whose writer is killed at any moment, and one that is read while it is written.

MAC_RAG_KILLS sets how many times the writer is killed at random moments.
"""

from __future__ import annotations

import multiprocessing
import os
import random
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
from tests.bank.helpers import contents, memory, update_for_ever, write_for_ever

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
    path = folder / "bank"
    MemoryBank.create(path, "f00d", keep_texts=True).close()
    state: dict[str, float] = {}
    commits = 0
    for kill in range(KILLS):
        process, heard = started(write_for_ever, path, kill, 1000 * kill)
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
        report = verify(path)
        assert report.clean, report
        state = contents(MemoryBank.open(path))
        # The last commit that was acknowledged, or else all of the one that the process died in.
        assert state in possible
        assert report.documents == len(state)
    assert commits > KILLS


def test_reading_while_another_process_commits_and_compacts(folder: Path) -> None:
    names, path = [f"document {index}" for index in range(40)], folder / "bank"
    with MemoryBank.create(path, "f00d", keep_texts=True) as bank:
        for name in names:
            bank.put([Document(name, "0")], memory(1, 0))
            bank.commit()
    process, heard = started(update_for_ever, path)
    try:
        assert heard.recv() == "writing"
        with pytest.raises(BankError, match=rf"open for writing in process {process.pid} since "):
            MemoryBank.open(path, write=True)
        reader, last, changes = MemoryBank.open(path), 0.0, 0
        until = time.monotonic() + 120
        while changes < 20:
            assert time.monotonic() < until
            (value,) = set(contents(reader).values())
            assert value >= last
            assert (reader.phi == value).all()  # all of one commit, whatever the writer does meanwhile
            assert {text for entry in reader for text in entry.texts} == {f"{value:.0f}"}
            last = value
            changes += reader.refresh()
            (value,) = set(contents(MemoryBank.open(path)).values())
            assert value >= last
            assert verify(path).clean
    finally:
        process.kill()
        process.join()
    with MemoryBank.open(path, write=True) as bank:  # the lock went with its holder
        assert sorted(bank.document_ids) == sorted(names)
