"""A bank for another model from kept texts or a retriever: the same documents, also after an interruption."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from mac_rag import rebuilding
from mac_rag.bank import MemoryBank
from mac_rag.bank.bank import Contents
from mac_rag.bank.bm25 import BankBM25Retriever
from mac_rag.bank.database import Connection
from mac_rag.config import BoundConfig
from mac_rag.data.newswire.generate import generate
from mac_rag.data.types import Document
from mac_rag.engine import MACEngine
from mac_rag.errors import BankError, ConfigError
from mac_rag.model import MACModel
from mac_rag.rebuilding import rebuild
from mac_rag.retrieval import BM25Retriever
from mac_rag.retrieval.registry import make_retriever
from mac_rag.shipped_models import FINGERPRINTS
from tests.cli.helpers import refusal, run
from tests.processes import run_in_process

DOCUMENTS = [Document(each.id, each.text, {"number": n}) for n, each in enumerate(generate("test", 40).documents[:30])]


def described(bank: Contents) -> list[tuple[object, ...]]:
    """Everything of each document but the time of its addition."""
    return [(m.document_id, m.content_hash, dict(m.metadata), t) for e in bank for m, t in zip(e.members, e.texts)]


def assert_equal(one: Contents, other: Contents) -> None:
    """The same, row by row and bit by bit."""
    assert described(one) == described(other)
    assert torch.equal(one.phi, other.phi)


@pytest.fixture(scope="module")
def other_model() -> MACModel:
    """The model to which banks are moved."""
    return MACModel.from_pretrained("mac-tiny", device="cpu")


@pytest.fixture
def engine(loaded_tiny_model: MACModel, tmp_path: Path) -> MACEngine:
    """An engine of the former model on an empty bank that keeps texts."""
    bank = MemoryBank.create(tmp_path / "old", loaded_tiny_model.fingerprint, keep_texts=True)
    return MACEngine(loaded_tiny_model, bank)


def new_engine(model: MACModel, folder: Path, *, keep_texts: bool = True) -> MACEngine:
    return MACEngine(model, MemoryBank.create(folder, model.fingerprint, keep_texts=keep_texts))


def test_a_rebuilt_bank_is_that_of_the_documents(engine: MACEngine, other_model: MACModel, tmp_path: Path) -> None:
    engine.adapt(DOCUMENTS)
    engine.adapt([Document(DOCUMENTS[3].id, "The harbour of Lund was closed."), Document("long", "Rain fell. " * 400)])
    engine.forget(DOCUMENTS[5].id)
    current = [each for each in DOCUMENTS if each.id not in (DOCUMENTS[3].id, DOCUMENTS[5].id)]
    current += [Document(DOCUMENTS[3].id, "The harbour of Lund was closed."), Document("long", "Rain fell. " * 400)]
    before = (tmp_path / "old").read_bytes()

    new = new_engine(other_model, tmp_path / "new")
    report = rebuild(MemoryBank.open(tmp_path / "old"), new)
    assert (report.documents, report.adapted, report.skipped) == (30, 30, ())
    directly = MACEngine(other_model, MemoryBank(other_model.fingerprint, keep_texts=True))
    directly.adapt(current)
    assert_equal(MemoryBank.open(tmp_path / "new"), directly.bank)
    assert rebuild(MemoryBank.open(tmp_path / "old"), new).adapted == 0
    assert (tmp_path / "old").read_bytes() == before


def test_averaged_documents_become_entries_of_their_own(loaded_tiny_model: MACModel, other_model: MACModel) -> None:
    bank = MemoryBank(loaded_tiny_model.fingerprint, keep_texts=True)
    MACEngine(loaded_tiny_model, bank, bound=BoundConfig(maximum=3)).adapt(DOCUMENTS[:8])
    assert len(list(bank)) == 3
    new = MACEngine(other_model, MemoryBank(other_model.fingerprint, keep_texts=True))
    rebuild(bank, new)
    assert described(new.bank) == described(bank)
    assert len(list(new.bank)) == 8


def interrupt(old: Path, new: Path, number: int) -> None:
    """Rebuilds a bank, and dies without a word in the middle of its n-th commit of documents."""
    commits = 0
    write = Connection.write

    def die(link: Connection, statement: str, *values: object) -> None:
        nonlocal commits
        commits += statement == "COMMIT"
        if commits == number:
            os._exit(9)
        write(link, statement, *values)  # type: ignore[arg-type]

    Connection.write = die  # type: ignore[method-assign, assignment]
    rebuilding._GROUP = 7
    model = MACModel.from_pretrained("mac-tiny", device="cpu")
    rebuild(MemoryBank.open(old), MACEngine(model, MemoryBank.open(new, write=True)))


@pytest.mark.parametrize("how", ["killed", "Ctrl-C"])
def test_an_interrupted_rebuild_goes_on(
    engine: MACEngine, other_model: MACModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setattr(rebuilding, "_GROUP", 7)
    engine.adapt(DOCUMENTS)
    old = MemoryBank.open(tmp_path / "old")
    whole = new_engine(other_model, tmp_path / "whole")
    rebuild(old, whole)

    new = new_engine(other_model, tmp_path / "new")
    if how == "killed":
        new.bank.close()
        assert run_in_process(interrupt, tmp_path / "old", tmp_path / "new", 3) == 9
    else:
        encode, calls = other_model.amortize_rows, []

        def stop(*arguments, **options):  # type: ignore[no-untyped-def]
            calls.append(arguments)
            if len(calls) == 3:
                raise KeyboardInterrupt
            return encode(*arguments, **options)

        monkeypatch.setattr(other_model, "amortize_rows", stop)
        with new.bank, pytest.raises(KeyboardInterrupt):
            rebuild(old, new)
    half = MemoryBank.open(tmp_path / "new", write=True)
    done = len(half)
    assert done == 14
    assert half.document_ids == old.document_ids[:done]
    resumed = MACEngine(other_model, half)
    assert resumed.answer(["Who was appointed?"])
    assert rebuild(old, resumed).adapted == 30 - done
    assert_equal(half, whole.bank)


def test_texts_come_from_the_retriever_in_the_version_that_the_bank_remembers(
    loaded_tiny_model: MACModel, other_model: MACModel, tmp_path: Path
) -> None:
    retriever = BM25Retriever()
    bank = MemoryBank(loaded_tiny_model.fingerprint)
    MACEngine(loaded_tiny_model, bank, retriever).adapt(DOCUMENTS[:5])
    new = new_engine(other_model, tmp_path / "new")
    retriever.delete(DOCUMENTS[1].id)
    retriever.put([Document(DOCUMENTS[3].id, "Another text.", DOCUMENTS[3].metadata)])
    with pytest.raises(BankError, match=rf"2 of 5 documents(?s:.*)\n  {DOCUMENTS[1].id}\n  {DOCUMENTS[3].id}$"):
        rebuild(bank, new, retriever)
    assert len(new.bank) == 0
    report = rebuild(bank, new, retriever, skip_missing=True)
    assert report.skipped == (DOCUMENTS[1].id, DOCUMENTS[3].id)
    expected = [DOCUMENTS[0], DOCUMENTS[2], DOCUMENTS[4]]
    assert [(name, text) for name, _, _, text in described(new.bank)] == [(each.id, each.text) for each in expected]
    # with the text at last, the first documents are not the same any more
    retriever.put([DOCUMENTS[1]])
    with pytest.raises(BankError, match=r"are not the first ones of.*choose a new"):
        rebuild(bank, new, retriever, skip_missing=True)


def test_a_retriever_that_tells_no_texts_is_refused(loaded_tiny_model: MACModel, other_model: MACModel) -> None:
    from llama_index.core import MockEmbedding, VectorStoreIndex

    from mac_rag.retrieval.llama_index import LlamaIndexRetriever

    bank = MemoryBank(loaded_tiny_model.fingerprint)
    retriever = LlamaIndexRetriever(VectorStoreIndex([], embed_model=MockEmbedding(4)))
    MACEngine(loaded_tiny_model, bank, retriever).adapt(DOCUMENTS[:2])
    with pytest.raises(ConfigError, match=r"does not tell which texts it holds; .*MemoryWriter.from_index"):
        rebuild(bank, MACEngine(other_model), retriever)


class TestCommand:
    """`mac-rag bank rebuild`, from a bank that a checkpoint's folder wrote to mac-tiny."""

    @pytest.fixture
    def notes(self, tmp_path: Path) -> Path:
        (tmp_path / "notes.csv").write_text("id,text,source\n1,Rain fell on Kell.,radio\nü,Snow fell on Tarn.,post\n")
        return tmp_path / "notes.csv"

    def test_from_kept_texts(self, notes: Path, tiny_checkpoint: Path, tmp_path: Path) -> None:
        old, new = tmp_path / "old", tmp_path / "new"
        assert run("adapt", notes, "--bank", old, "--model", tiny_checkpoint, "--keep-texts").exit_code == 0
        assert "texts          kept\n" in run("bank", "info", "--bank", old).stdout
        message = refusal("ask", "Where?", "--bank", old, "--model", "mac-tiny")
        assert f"mac-rag bank rebuild --bank {old} --into NEW --model mac-tiny" in message
        command = ("bank", "rebuild", "--bank", old, "--into", new, "--model", "mac-tiny")
        first = run(*command)
        assert first.exit_code == 0, first.output
        assert first.stdout == f"2 adapted, 0 already there, 0 skipped; {new} is complete and holds 2 documents\n"
        assert run(*command).stdout.startswith("0 adapted, 2 already there")
        assert run("ask", "Where did snow fall?", "--bank", new, "--model", "mac-tiny").exit_code == 0
        info = run("bank", "info", "--bank", new).stdout
        assert f"model          mac-tiny, {FINGERPRINTS['mac-tiny']}\n" in info
        assert "texts          kept\n" in info
        with MemoryBank.open(new) as rebuilt:
            assert rebuilt["ü"].metadata == {"source": "post"}
            assert rebuilt["ü"].texts == ("Snow fell on Tarn.",)
        message = refusal("ask", "Where?", "--bank", new, "--model", tiny_checkpoint)
        assert "was written by mac-tiny and cannot be read by" in message
        assert "use --model mac-tiny, or" in message

    @pytest.mark.parametrize("kind", ["bm25", pytest.param("chroma", marks=pytest.mark.slow)])
    def test_from_a_retriever(self, notes: Path, tiny_checkpoint: Path, tmp_path: Path, kind: str) -> None:
        old, new = tmp_path / "old", tmp_path / "new"
        holder: tuple[object, ...] = ("--retriever", f"chroma:{tmp_path / 'texts'}")
        if kind == "bm25":
            holder = ("--retriever", "bm25")
        assert run("adapt", notes, "--bank", old, "--model", tiny_checkpoint, *holder).exit_code == 0
        command = ("bank", "rebuild", "--bank", old, "--into", new, "--model", "mac-tiny")
        assert "keeps no texts; give the retriever" in refusal(*command)
        assert run(*command, *holder).exit_code == 0
        assert "was begun without kept texts" in refusal(*command, *holder, "--keep-texts")
        assert run("ask", "Where did snow fall?", "--bank", new, "--model", "mac-tiny", *holder).stderr == ""
        with_texts = tmp_path / "with texts"
        assert run(*command[:5], with_texts, *command[6:], *holder, "--keep-texts").exit_code == 0
        assert MemoryBank.open(with_texts)["1"].texts == ("Rain fell on Kell.",)
        if kind == "bm25":
            with MemoryBank.open(old, write=True) as opened:
                BankBM25Retriever(opened).delete("1")
                opened.commit()
        else:
            retriever = make_retriever(str(holder[1]))
            assert retriever is not None
            retriever.delete("1")
        fewer = tmp_path / "fewer"
        assert refusal(*command[:5], fewer, *command[6:], *holder).endswith("(--skip-missing):\n  1")
        assert not fewer.exists()
        skipped = run(*command[:5], fewer, *command[6:], *holder, "--skip-missing")
        assert "skipped: 1\n" in skipped.stderr
        assert MemoryBank.open(fewer).document_ids == ["ü"]

    def test_where_a_new_bank_cannot_be(self, notes: Path, tiny_checkpoint: Path, tmp_path: Path) -> None:
        old = tmp_path / "old"
        assert run("adapt", notes, "--bank", old, "--model", tiny_checkpoint, "--keep-texts").exit_code == 0
        command = ("bank", "rebuild", "--bank", old, "--model", "mac-tiny", "--into")
        (tmp_path / "link").symlink_to(old)
        for same in (old, tmp_path / "link"):
            assert "choose a new file for --into" in refusal(*command, same)
        assert "Not a directory" in refusal(*command, old / "new")
        (tmp_path / "files").mkdir()
        assert run(*command, tmp_path / "files").exit_code == 2
        third = tmp_path / "third"
        assert run("adapt", notes, "--bank", third, "--model", tiny_checkpoint, "--keep-texts").exit_code == 0
        assert "cannot be read by mac-tiny" in refusal(*command, third)

    def test_texts_are_exported(self, notes: Path, tiny_checkpoint: Path, tmp_path: Path) -> None:
        for name, options, said in (("with", ["--keep-texts"], "with their texts"), ("without", [], "without texts")):
            bank, output = tmp_path / name, tmp_path / f"{name} exported"
            assert run("adapt", notes, "--bank", bank, "--model", tiny_checkpoint, *options).exit_code == 0
            assert said in run("bank", "export", "--bank", bank, "--output", output).stdout
            exported = "".join(file.read_text() for file in output.glob("*.jsonl"))
            assert ("Snow fell" in exported) == (name == "with")

    def test_keeping_texts_is_decided_at_the_creation(self, notes: Path, tiny_checkpoint: Path, tmp_path: Path) -> None:
        adapt = ("adapt", notes, "--model", tiny_checkpoint, "--bank")
        assert run(*adapt, tmp_path / "without").exit_code == 0
        assert "was created without --keep-texts" in refusal(*adapt, tmp_path / "without", "--keep-texts")
        assert run(*adapt, tmp_path / "with", "--keep-texts").exit_code == 0
        assert run(*adapt, tmp_path / "with").stdout.startswith("0 added, 0 updated, 2 unchanged")
        assert MemoryBank.open(tmp_path / "with").keep_texts
