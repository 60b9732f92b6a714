"""Adapting in steps: what is encoded together, when a commit is made, and what an interrupt leaves."""

from __future__ import annotations

import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mac_rag import adapting
from mac_rag.adapting import windows
from mac_rag.bank import MemoryBank
from mac_rag.data.newswire.generate import generate
from mac_rag.data.types import Document
from mac_rag.engine import MACEngine
from mac_rag.errors import CancelledError
from mac_rag.model import AmortizedModel, MACModel
from mac_rag.retrieval.bm25 import BM25Retriever
from tests.cli.helpers import run

DOCUMENTS = generate("val", 12).documents


@given(st.lists(st.lists(st.integers(1, 300), max_size=4), max_size=40))
def test_windows_divide_documents_in_order_by_their_tokens(lengths: list[list[int]]) -> None:
    monkeypatch = pytest.MonkeyPatch()
    monkeypatch.setattr(adapting, "WINDOW", 500)
    documents = [Document(f"{number}", "") for number in range(len(lengths))]
    plan = {each.id: [[0] * length for length in rows] for each, rows in zip(documents, lengths) if rows}
    found = list(windows(documents, plan))
    monkeypatch.undo()
    assert [document for window in found for document in window] == documents
    sizes = [[sum(map(len, plan.get(document.id, ()))) for document in window] for window in found]
    assert all(sum(window) >= 500 for window in sizes[:-1])
    assert all(sum(window[:-1]) < 500 for window in sizes)
    # Documents that are not planned change nothing, so that processes that never see them encode the same together.
    planned = [document for document in documents if document.id in plan]
    with_tokens = [[document for document in window if document.id in plan] for window in found]
    monkeypatch.setattr(adapting, "WINDOW", 500)
    assert list(windows(planned, plan)) == [window for window in with_tokens if window]
    monkeypatch.undo()


class Clock:
    """Stands for the module `time`; each batch takes `seconds`."""

    def __init__(self, model: MACModel, monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
        self.now = 0.0
        self.ends: list[float] = []  # of commits
        amortize, commit = model.amortize_rows, MemoryBank.commit

        def slow(rows: Any, **options: Any) -> torch.Tensor:
            self.now += seconds
            return amortize(rows, **options)

        def timed(bank: MemoryBank, *arguments: Any) -> None:
            before = len(bank.committed)
            commit(bank, *arguments)
            if len(bank.committed) > before:
                self.ends.append(self.now)

        monkeypatch.setattr(adapting, "time", self)
        monkeypatch.setattr(model, "amortize_rows", slow)
        monkeypatch.setattr(MemoryBank, "commit", timed)

    def monotonic(self) -> float:
        return self.now


@pytest.mark.parametrize(
    ("seconds", "commits"), [(1, [12]), (10, [30, 60, 90, 120]), (40, [40 * number for number in range(1, 13)])]
)
def test_a_commit_is_made_every_thirty_seconds(
    tiny_model: MACModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: float, commits: list[float]
) -> None:
    monkeypatch.setattr(adapting, "WINDOW", 1)  # each document is a window
    clock = Clock(tiny_model, monkeypatch, seconds)
    retriever = BM25Retriever()
    with MemoryBank.create(tmp_path / "bank", tiny_model.fingerprint) as bank:
        report = MACEngine(tiny_model, bank, retriever).adapt(DOCUMENTS)
        assert (report.added, report.rows, report.filed) == (12, 12, 12)
    assert clock.ends == commits
    monkeypatch.undo()
    # When it was committed makes no difference.
    at_once = MACEngine(tiny_model, MemoryBank(tiny_model.fingerprint))
    monkeypatch.setattr(adapting, "WINDOW", 1)
    at_once.adapt(DOCUMENTS)
    opened = MemoryBank.open(tmp_path / "bank")
    assert opened.document_ids == at_once.bank.document_ids == [document.id for document in DOCUMENTS]
    assert torch.equal(opened.phi, at_once.bank.phi)
    assert retriever.content_hashes().keys() == set(opened.document_ids)


@pytest.mark.parametrize("retriever", [False, True])
@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_says_what_is_kept_and_the_command_goes_on(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, retriever: bool
) -> None:
    for number, document in enumerate(DOCUMENTS):
        (tmp_path / f"{number:02}.txt").write_text(document.text)
    files = sorted(tmp_path.glob("*.txt"))
    options = ["--bank", tmp_path / "bank", "--model", tiny_checkpoint]
    options += ["--retriever", "bm25"] if retriever else []
    monkeypatch.setattr(adapting, "GROUP", 5)
    encoded = 0
    encode = AmortizedModel.amortize_rows

    def interrupted(*arguments: Any, **options: Any) -> Any:
        nonlocal encoded
        encoded += 1
        if encoded == 3:
            signal.raise_signal(signal.SIGINT)
        return encode(*arguments, **options)

    monkeypatch.setattr(AmortizedModel, "amortize_rows", interrupted)
    stopped = run("adapt", *files, *options)
    assert stopped.exit_code == 130
    message = f"interrupted: 10 of 12 documents are in {tmp_path / 'bank'}; run the command again for the rest\n"
    assert stopped.stderr.endswith(message)
    assert len(MemoryBank.open(tmp_path / "bank")) == 10
    done = run("adapt", *files, *options)
    assert done.stdout.startswith("2 added, 0 updated, 10 unchanged"), done.output
    assert "do not agree" not in done.stderr


def test_what_nobody_waits_for_any_more_is_taken_back(tiny_checkpoint: Path) -> None:
    engine = MACEngine(MACModel.from_pretrained(tiny_checkpoint, device="cpu"))
    engine.adapt([Document("before", "Ines Kaur opened the bridge.")])
    asked: list[int] = []

    def after(times: int) -> bool:
        asked.append(times)
        return len(asked) > times

    for times in (0, 3):
        asked.clear()
        documents = [Document(f"{number}", f"Report {number} of the board.") for number in range(3)]
        with pytest.raises(CancelledError):
            engine.adapt(documents, cancelled=partial(after, times))
        assert engine.bank.document_ids == ["before"]
    assert engine.adapt(documents, cancelled=bool).added == 3
