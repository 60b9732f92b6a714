"""A change that fails leaves bank and retriever as they were, in memory and on disk, and the same call then succeeds.

Every call of the file system fails once, in each of three ways: it alone, with an I/O error; it and all later ones that
need space, as on a full disk; and by Ctrl-C.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import pytest

from mac_rag.data.newswire.generate import generate
from mac_rag.data.types import Document
from mac_rag.engine import MACEngine
from mac_rag.errors import BankError
from mac_rag.memory import MemoryBank
from mac_rag.memory.storage.repair import verify
from mac_rag.model import MACModel
from mac_rag.retrieval import BM25Retriever
from tests.faults import Faults, faults
from tests.memory.helpers import fast_folder

How = Literal["once", "full", "interrupt"]
Change = Callable[[MACEngine], object]

STREAM = generate("val", 12).documents
CHANGED = Document(STREAM[1].id, "Something else happened.")

CHANGES: dict[str, Change] = {
    "adapt": lambda engine: engine.adapt([CHANGED, *STREAM[6:]]),
    "forget": lambda engine: engine.forget(STREAM[0].id),
    "reconcile": lambda engine: engine.reconcile(),
    "compact": lambda engine: engine.bank.compact(),
}


@pytest.fixture(scope="module")
def before(loaded_tiny_model: MACModel) -> Iterator[dict[bool, Path]]:
    """Banks of six documents in two segments, one with a deleted entry: True for the one that overwrites what goes."""
    with fast_folder() as folder:
        banks = {False: folder / "bank", True: folder / "overwriting"}
        for secure_delete, place in banks.items():
            bank = MemoryBank.create(place, loaded_tiny_model.fingerprint, secure_delete=secure_delete)
            with bank:
                engine = MACEngine(loaded_tiny_model, bank)
                engine.adapt(STREAM[:5])
                engine.adapt(STREAM[5:7])
                engine.forget(STREAM[6].id)
        yield banks


def retriever(change: str) -> BM25Retriever:
    """What the bank was adapted to; for `reconcile`, what it should become."""
    held = BM25Retriever()
    held.add(STREAM[:6])
    if change == "reconcile":
        held.delete(STREAM[0].id)
        held.put([CHANGED, STREAM[8]])
    return held


def state(bank: Any, held: BM25Retriever | None = None) -> Any:
    """What must be as it was: documents and memory tokens, and the retriever's texts."""
    entries = {entry.document_id: (entry.content_hash, entry.phi.tolist()) for entry in bank}
    texts = None if held is None else {each.id: each for each in held.documents(list(held.content_hashes()))}
    return entries, texts


def start_failing(state: Faults, how: How, number: int) -> None:
    {"once": state.at, "full": state.full, "interrupt": state.interrupt}[how](number)


@pytest.mark.parametrize(
    ("change", "how", "secure_delete"),
    [(change, how, False) for change in CHANGES for how in ("once", "full", "interrupt")]
    + [("compact", "once", True), ("compact", "full", True), ("forget", "interrupt", True)],
)
def test_a_change_that_fails_at_any_call(
    change: str, how: How, secure_delete: bool, before: dict[bool, Path], tiny_model: MACModel
) -> None:
    run = CHANGES[change]
    failures = 0
    with fast_folder() as place:
        for number in range(1, 1000):
            folder = place / str(number)
            shutil.copytree(before[secure_delete], folder)
            held = retriever(change)
            with MemoryBank.open(folder, write=True) as bank, faults(folder) as fault:
                engine = MACEngine(tiny_model, bank, held)
                was, files = state(bank, held), names(folder)
                start_failing(fault, how, len(fault.calls) + number)
                try:
                    run(engine)
                    failed = None
                except (BankError, KeyboardInterrupt) as error:
                    failed = error
                fault.heal()
                if failed is not None:
                    failures += 1
                    if change not in ("reconcile", "compact"):  # these commit step by step
                        assert state(bank, held) == was, fault.failed
                        assert state(MemoryBank.open(folder)) == (was[0], None), fault.failed
                        left = {name for name in names(folder) - files if name.endswith((".old", ".replaced"))}
                        assert secure_delete or not left, fault.failed  # what could not be overwritten
                        assert names(folder) - left == files, fault.failed
                    assert state(bank)[0] == state(MemoryBank.open(folder))[0], fault.failed
                    assert state(engine.snapshot) == state(bank)
                    assert verify(folder).clean
                    run(engine)  # now it does the work
                after = state(bank, held)
                assert not bank.intent
            assert state(MemoryBank.open(folder)) == (after[0], None)
            assert after == expected(change, before[False], tiny_model), fault.failed
            assert verify(folder).clean
            assert not [name for name in names(folder) if name.endswith((".old", ".replaced", ".new"))]
            shutil.rmtree(folder)
            if fault.failed is None:
                break
        else:
            pytest.fail("it never came to an end")
    assert failures > 8


def names(folder: Path) -> set[str]:
    return {file.name for file in folder.iterdir()}


_expected: dict[str, Any] = {}


def expected(change: str, before: Path, model: MACModel) -> Any:
    """The state after the change, when nothing fails."""
    if change not in _expected:
        with fast_folder() as place:
            shutil.copytree(before, place / "bank")
            with MemoryBank.open(place / "bank", write=True) as bank:
                held = retriever(change)
                engine = MACEngine(model, bank, held)
                CHANGES[change](engine)
                _expected[change] = state(bank, held)
    return _expected[change]
