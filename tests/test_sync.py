"""Bank and retriever agree after every change, every kill, and every refusal."""

from __future__ import annotations

import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from mac_rag import sync
from mac_rag.bank import MemoryBank
from mac_rag.bank.bm25 import BankBM25Retriever
from mac_rag.bank.database import Connection
from mac_rag.bank.interface import Intent
from mac_rag.data.newswire.generate import generate
from mac_rag.data.types import Document
from mac_rag.engine import MACEngine
from mac_rag.errors import BankError, ConfigError
from mac_rag.model import MACModel
from mac_rag.retrieval import BM25Retriever, DenseRetriever, HybridRetriever, Retriever
from mac_rag.retrieval.chroma import ChromaRetriever
from mac_rag.sync import difference, disagreement
from tests.cli.helpers import run
from tests.processes import run_in_process
from tests.retrieval.helpers import WordEncoder

STREAM = generate("val", 8).documents
CHANGED = Document(STREAM[1].id, "Something else happened.")


def doomed(checkpoint: Path, folder: Path, place: Path, step: str, what: str) -> None:
    """Is killed before a step of a change: everything before it is done, nothing after it."""
    engine = MACEngine(
        MACModel.from_pretrained(checkpoint, device="cpu"),
        MemoryBank.open(folder, write=True),
        ChromaRetriever(place, WordEncoder()),
    )

    def die(*_: object, **__: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def commit(intent: Intent | None = None) -> None:
        MemoryBank.commit(engine.bank, intent) if intent is None or intent else die()

    if step == "the last commit":
        engine.bank.commit = commit  # type: ignore[method-assign]
    else:
        engine.retriever.put = engine.retriever.delete = die  # type: ignore[method-assign]
    if what == "adapt":
        engine.adapt([CHANGED, *STREAM[2:]])
    else:
        engine.forget(STREAM[0].id)


def agree(engine: MACEngine) -> bool:
    """Whether bank and retriever hold the same, and the bank what the model makes of the retriever's texts."""
    documents = engine.retriever.documents(engine.bank.document_ids)
    expected = engine.model.amortize([document.text for document in documents])
    torch.testing.assert_close(engine.bank.phi, expected, rtol=2**-7, atol=1e-5)  # it is kept in bf16
    return not difference(engine.bank, engine.retriever)


def retriever(kind: str, folder: Path) -> Retriever:
    if kind == "chroma":
        return ChromaRetriever(folder / "chroma", WordEncoder())
    if kind == "bm25":
        return BM25Retriever()
    if kind == "dense":
        return DenseRetriever(WordEncoder())
    return HybridRetriever([BM25Retriever(), retriever("chroma", folder)])


@pytest.mark.parametrize("kind", ["bm25", "bm25 in the bank", "dense", "hybrid", "chroma"])
def test_every_change_goes_to_both(kind: str, tiny_model: MACModel, tmp_path: Path) -> None:
    bank = MemoryBank(tiny_model.fingerprint)
    held = BankBM25Retriever(bank) if kind == "bm25 in the bank" else retriever(kind, tmp_path)
    engine = MACEngine(tiny_model, bank, held)
    assert engine.adapt(STREAM).filed == 8
    assert agree(engine)
    assert engine.adapt(STREAM).filed == 0
    report = engine.adapt([STREAM[0], CHANGED])
    assert (report.updated, report.unchanged, report.filed) == (1, 1, 1)
    engine.forget(STREAM[2].id)
    assert agree(engine)
    assert len(engine.retriever) == len(engine.bank) == 7
    assert engine.retriever.documents([CHANGED.id]) == [CHANGED]
    repaired = engine.reconcile()
    assert (repaired.added, repaired.updated, repaired.deleted) == ((), (), ())


@pytest.mark.parametrize("step", ["the retriever", "the last commit"])
@pytest.mark.parametrize("what", ["adapt", "forget"])
def test_what_a_kill_interrupts_is_finished_on_opening(
    step: str, what: str, tiny_model: MACModel, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    place, folder = tmp_path / "chroma", tmp_path / "bank"
    store = ChromaRetriever(place, WordEncoder())
    with MemoryBank.create(folder, tiny_model.fingerprint) as bank:
        MACEngine(tiny_model, bank, store).adapt(STREAM[:2])
    store.close()
    assert run_in_process(doomed, tiny_checkpoint, folder, place, step, what) == -signal.SIGKILL

    store = ChromaRetriever(place, WordEncoder())
    with MemoryBank.open(folder, write=True) as bank:
        assert bank.intent
        found = difference(bank, store)
        engine = MACEngine(tiny_model, bank, store)
        if step == "the retriever":
            assert not found
            assert len(bank) == 2
        elif what == "adapt":
            assert set(found.missing) == {document.id for document in STREAM[2:]}
            assert found.outdated == (CHANGED.id,)
            assert len(bank) == 8
        else:
            assert found.surplus == (STREAM[0].id,)
            assert bank.document_ids == [STREAM[1].id]
        assert agree(engine)
    again = MACEngine(tiny_model, MemoryBank.open(folder), store)
    assert not again.bank.intent
    assert agree(again)


def test_a_bank_follows_a_retriever_that_was_changed_without_it(tiny_model: MACModel) -> None:
    filed = BM25Retriever()
    engine = MACEngine(tiny_model, retriever=filed)
    engine.adapt(STREAM[:4])
    filed.put([CHANGED, STREAM[5]])
    filed.delete(STREAM[0].id)
    repaired = engine.reconcile()
    assert (repaired.added, repaired.updated, repaired.deleted) == ((STREAM[5].id,), (CHANGED.id,), (STREAM[0].id,))
    assert agree(engine)


def test_a_bank_of_before_gets_its_retriever_by_adapting_again(tiny_model: MACModel) -> None:
    engine = MACEngine(tiny_model)
    engine.adapt(STREAM)
    engine.retriever = BM25Retriever()
    report = engine.adapt(STREAM)
    assert (report.unchanged, report.rows, report.filed) == (8, 0, 8)
    assert agree(engine)


def test_an_empty_retriever_does_not_empty_the_bank(tiny_model: MACModel) -> None:
    engine = MACEngine(tiny_model, retriever=BM25Retriever())
    engine.adapt(STREAM)
    engine.retriever = BM25Retriever()
    with pytest.raises(BankError, match="holds none of the bank's 8 documents"):
        engine.reconcile()
    assert len(engine.bank) == 8
    assert set(engine.reconcile(allow_emptying=True).deleted) == {document.id for document in STREAM}
    assert len(engine.bank) == 0
    engine.retriever = None
    with pytest.raises(ConfigError, match="no retriever to reconcile"):
        engine.reconcile()


def test_what_the_bank_would_refuse_never_reaches_the_retriever(tiny_model: MACModel, tmp_path: Path) -> None:
    engine = MACEngine(tiny_model, retriever=BM25Retriever())
    with pytest.raises(BankError, match="cannot be kept as JSON"):
        engine.adapt([STREAM[0], Document("bad", "text", {"a": {1}})])
    MemoryBank.create(tmp_path / "bank", tiny_model.fingerprint).close()
    engine.bank = MemoryBank.open(tmp_path / "bank")
    with pytest.raises(BankError, match="not open for writing"):
        engine.adapt(STREAM)
    assert len(engine.retriever) == 0


@pytest.mark.parametrize("kind", ["bm25", "chroma"])
def test_a_document_of_another_tenant_now_is_one_that_changed(tiny_model: MACModel, tmp_path: Path, kind: str) -> None:
    engine = MACEngine(tiny_model, retriever=retriever(kind, tmp_path))
    engine.adapt([Document("1", "Rain fell on Kell.", {"tenant": "ours", "seen": [1, 2]})])
    assert engine.adapt([Document("1", "Rain fell on Kell.", {"seen": (1, 2), "tenant": "ours"})]).unchanged == 1
    moved = Document("1", "Rain fell on Kell.", {"tenant": "theirs", "seen": [1, 2]})
    report = engine.adapt([moved])
    assert (report.updated, report.filed) == (1, 1)
    assert engine.bank["1"].metadata == moved.metadata
    assert engine.retriever.documents(["1"]) == [moved]


def done(*arguments: object) -> str:
    result = run(*arguments)
    assert result.exit_code == 0, (result.output, result.exception)
    return result.stdout


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(f'{{"id": "{number}", "text": "Rain fell on Kell {number}."}}\n' for number in range(4)))
    return file


def test_the_command_line_keeps_bank_and_index_in_step(tiny_checkpoint: Path, tmp_path: Path, rows: Path) -> None:
    bank = tmp_path / "bank"
    common = ("--bank", bank, "--model", tiny_checkpoint)
    bm25 = (*common, "--retriever", "bm25")
    assert "4 documents written to bm25, which holds 4" in done("adapt", rows, *bm25)
    assert done("ask", "Where did rain fall?", *bm25, "--k", 1)
    assert "bm25           an index of 4 documents\n" in done("bank", "info", "--bank", bank)
    new = tmp_path / "new.txt"
    new.write_text("Snow fell on Tarn.")
    assert "1 documents written to bm25, which holds 5" in done("adapt", new, *common)  # also if nobody names it
    shown = done("bank", "delete", "2", "0", "--bank", bank)
    assert shown == f"2 deleted; {bank} holds 3 documents\n2 deleted from bm25, which holds 3\n"
    assert b"Kell 2" not in b"".join(file.read_bytes() for file in tmp_path.glob("bank*"))
    assert done("reconcile", *bm25) == "0 added, 0 updated, 0 deleted; bank and bm25 hold 3 documents\n"
    # Of several ids, one of which is unknown, none is deleted.
    assert "'7' in" in str(run("bank", "delete", "1", "7", "--bank", bank).exception)
    with MemoryBank.open(bank) as opened:
        assert len(opened) == len(BankBM25Retriever(opened)) == 3


def test_a_bank_that_differs_from_its_index_is_repaired(tiny_checkpoint: Path, tmp_path: Path, rows: Path) -> None:
    bank = tmp_path / "bank"
    bm25 = ("--bank", bank, "--model", tiny_checkpoint, "--retriever", "bm25")
    done("adapt", rows, *bm25)
    with MemoryBank.open(bank, write=True) as opened:
        retriever = BankBM25Retriever(opened)
        retriever.put([Document("1", "Hail fell on Kell.")])
        opened.delete("2", from_index=False)
        retriever.delete("3")
        opened.commit()
    asked = run("ask", "Where did rain fall?", *bm25)
    assert asked.exit_code == 0
    assert asked.stderr.splitlines()[-1] == (
        f"warning: {bank} and bm25 do not agree (1 missing from the bank, 1 outdated in it, 1 only in it); repair the "
        f"bank: mac-rag reconcile --bank {bank} --retriever bm25"
    )
    assert done("reconcile", *bm25) == "1 added, 1 updated, 1 deleted; bank and bm25 hold 3 documents\n"
    assert run("ask", "Where did rain fall?", *bm25).stderr == ""


def test_a_folder_is_for_retrievers_that_need_one(tiny_checkpoint: Path, tmp_path: Path, rows: Path) -> None:
    common = ("--bank", tmp_path / "bank", "--model", tiny_checkpoint, "--retriever")
    for wrong, message in (
        (("hybrid",), "give one with --retriever-folder"),
        (("none", "--retriever-folder", tmp_path / "r"), "takes no folder; leave out --retriever-folder"),
        (("bm25", "--retriever-folder", tmp_path / "r"), "the bank's file holds it; leave out --retriever-folder"),
        (("bm26",), "unknown retriever 'bm26'"),
    ):
        assert message in str(run("adapt", rows, *common, *wrong).exception)
    assert not (tmp_path / "bank").exists()


def test_a_change_of_bank_and_index_is_one_commit(tiny_model: MACModel, tmp_path: Path) -> None:
    bank = MemoryBank.create(tmp_path / "bank", tiny_model.fingerprint)
    engine = MACEngine(tiny_model, bank, BankBM25Retriever(bank))
    intents: list[Intent | None] = []
    engine.adapt(STREAM[:2])
    versions = [commits(bank)]
    commit = bank.commit

    def noted(intent: Intent | None = None) -> None:
        intents.append(intent)
        commit(intent)

    bank.commit = noted  # type: ignore[method-assign]
    engine.adapt([CHANGED, *STREAM[2:]])
    versions.append(commits(bank))
    engine.forget(STREAM[0].id)
    versions.append(commits(bank))
    assert versions == [versions[0], versions[0] + 1, versions[0] + 2]
    assert not any(intents)
    assert agree(engine)


def commits(bank: MemoryBank) -> int:
    [(version,)] = bank.connection.rows("SELECT version FROM setting")
    return int(version)


@pytest.mark.parametrize("what", ["adapt", "forget"])
def test_a_commit_that_fails_leaves_bank_and_index_as_they_were(
    what: str, tiny_model: MACModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bank = MemoryBank.create(tmp_path / "bank", tiny_model.fingerprint)
    engine = MACEngine(tiny_model, bank, BankBM25Retriever(bank))
    engine.adapt(STREAM[:3])
    change = partial(engine.adapt, [CHANGED, *STREAM[2:]]) if what == "adapt" else partial(engine.forget, CHANGED.id)
    write = Connection.write

    def refused(self: Connection, statement: str, many: Any = None) -> None:
        if statement == "COMMIT":
            raise BankError("the disk is full")
        write(self, statement, many)

    with monkeypatch.context() as patch:
        patch.setattr(Connection, "write", refused)
        with pytest.raises(BankError, match="the disk is full"):
            change()
    assert engine.retriever is not None
    assert engine.retriever.documents([document.id for document in STREAM[:3]]) == list(STREAM[:3])
    assert len(engine.retriever) == len(bank) == 3
    change()
    assert agree(engine)


def test_large_ones_are_compared_by_number(tiny_model: MACModel, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = MACEngine(tiny_model, retriever=BM25Retriever())
    engine.adapt(STREAM)
    assert disagreement(engine.bank, engine.retriever) is None
    engine.retriever.put([CHANGED])
    engine.retriever.delete(STREAM[2].id)
    assert disagreement(engine.bank, engine.retriever) == "1 outdated in it, 1 only in it"
    monkeypatch.setattr(sync, "_COMPARED", 6)
    assert disagreement(engine.bank, engine.retriever) == "8 documents against 7"
    engine.bank.delete(STREAM[2].id)
    assert disagreement(engine.bank, engine.retriever) is None
