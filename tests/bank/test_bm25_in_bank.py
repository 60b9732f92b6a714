"""A BM25 index in the file of a bank: what it finds, what one commit means for it, and what is left of a deletion."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mac_rag.bank import MemoryBank
from mac_rag.bank.bm25 import BankBM25Retriever, index_faults, index_size
from mac_rag.bank.copies import backup, restore
from mac_rag.bank.reduction import BoundedBank
from mac_rag.bank.verify import verify
from mac_rag.data.types import Document
from mac_rag.errors import BankError, ConfigError, DamageError
from mac_rag.retrieval import BM25Retriever
from tests.bank.helpers import fast_folder, files_of, memory
from tests.retrieval.helpers import PLAIN

WORDS = ["storm", "sun", "rain", "snow", "fog"]
TEXTS = st.lists(st.sampled_from(WORDS), max_size=6).map(" ".join)
IDS = st.sampled_from([f"d{number}" for number in range(6)])
BRIDGE = Document("bridge", "Anna Berg opened the bridge.", {"year": 2004})
RIVER = Document("river", "A ferry crosses the river.")


def everything(retriever: BM25Retriever) -> object:
    """All that a retriever tells, in its order."""
    allowed = {"d0", "d2", "d3"}
    return (
        list(retriever.content_hashes()),
        [retriever.retrieve([*WORDS, " ".join(WORDS)], k, allowed=some) for k in (1, 9) for some in (None, allowed)],
    )


def fresh(documents: dict[str, Document]) -> BM25Retriever:
    retriever = BM25Retriever(tokenizer=PLAIN)
    retriever.add(list(documents.values()))
    return retriever


@settings(max_examples=150, deadline=None)
@given(st.data(), st.booleans())
def test_results_are_those_of_a_retriever_in_memory(data: st.DataObject, keep_texts: bool) -> None:
    """After every change, rollback, refresh, deletion by the bank alone, and reopening."""
    with fast_folder() as folder:
        bank = MemoryBank.create(folder / "bank", "f00d", keep_texts=keep_texts)
        retriever = BankBM25Retriever(bank, tokenizer=PLAIN)
        kept: dict[str, Document] = {}
        retriever.put([])
        bank.commit()
        committed = dict(kept)
        reader = MemoryBank.open(folder / "bank")
        follower = BankBM25Retriever(reader)
        steps = ["put", "put both", "delete", "delete both", "bank", "commit", "commit", "rollback", "refresh", "open"]
        for step in data.draw(st.lists(st.sampled_from(steps), max_size=14)):
            if step in ("put", "put both"):
                names = data.draw(st.lists(IDS, unique=True, max_size=3))
                new = [Document(name, data.draw(TEXTS), {"step": [1]}) for name in names]
                if step == "put both":
                    bank.put(new, memory(len(new))) if new else None
                retriever.put(new)
                for document in new:
                    kept.pop(document.id, None)
                    kept[document.id] = document
            elif step in ("delete", "delete both") and kept:
                name = data.draw(st.sampled_from(sorted(kept)))
                retriever.delete(name)
                del kept[name]
                if step == "delete both" and name in bank:
                    bank.delete(name)
            elif step == "bank" and len(bank):
                name = data.draw(st.sampled_from(bank.document_ids))
                alone = data.draw(st.booleans())
                bank.delete(name, from_index=alone)
                if alone:
                    kept.pop(name, None)
            elif step == "commit":
                bank.commit()
                committed = dict(kept)
            elif step == "rollback":
                bank.rollback()
                kept = dict(committed)
            elif step == "refresh":
                reader.refresh()
                assert everything(follower) == everything(fresh(committed))
            elif step == "open":
                bank.close()
                bank = MemoryBank.open(folder / "bank", write=True)
                retriever = BankBM25Retriever(bank)
                kept = dict(committed)
            assert everything(retriever) == everything(fresh(kept))
            assert len(retriever) == len(kept)
            assert index_size(bank) == len(kept)
            assert not list(index_faults(bank))
        bank.close()
        reader.close()


@pytest.fixture
def bank(folder: Path) -> MemoryBank:
    return MemoryBank.create(folder / "bank", "f00d")


def names(retriever: BM25Retriever, question: str) -> list[str]:
    return [hit.document_id for hit in retriever.retrieve([question], 9)[0]]


def test_another_tokenizer_than_that_of_the_index_is_refused(bank: MemoryBank) -> None:
    BankBM25Retriever(bank).put([BRIDGE])
    with pytest.raises(ConfigError, match="tokenizer"):
        BankBM25Retriever(bank, tokenizer=PLAIN)


def test_a_bank_that_is_open_for_reading_has_no_index_that_can_be_changed(bank: MemoryBank) -> None:
    BankBM25Retriever(bank).put([BRIDGE])
    bank.commit()
    assert bank.path is not None
    reader = BankBM25Retriever(MemoryBank.open(bank.path))
    with pytest.raises(BankError, match="write=True"):
        reader.put([RIVER])
    assert reader.held(["bridge", "river"]) == ["bridge"]


def test_a_kept_text_is_once_in_the_file(folder: Path) -> None:
    bank = MemoryBank.create(folder / "bank", "f00d", keep_texts=True)
    bank.put([BRIDGE, RIVER], memory(2))
    retriever = BankBM25Retriever(bank)
    retriever.put([BRIDGE, RIVER])
    bank.merge(["bridge", "river"], memory(1))
    bank.compact()
    assert files_of(bank.path).count(b"Anna Berg opened") == 1
    assert bank.delete("river") == ("bridge", "river")  # the index keeps the one that nobody asked to delete
    bank.compact()
    assert files_of(bank.path).count(b"Anna Berg opened") == 1
    assert not files_of(bank.path).count(b"ferry")
    assert retriever.documents(["bridge"]) == [BRIDGE]
    assert "river" not in retriever


@pytest.mark.parametrize("how", ["retriever", "bank", "replaced"])
@pytest.mark.parametrize("keep_texts", [False, True])
def test_text_and_words_of_a_deleted_document_are_not_in_the_file(keep_texts: bool, how: str, folder: Path) -> None:
    bank = MemoryBank.create(folder / "bank", "f00d", keep_texts=keep_texts)
    retriever = BankBM25Retriever(bank)
    secret = Document("secret", "Quetzal opened the vault.", {"about": "Zanzibar"})
    bank.put([BRIDGE, secret], memory(2))
    retriever.put([BRIDGE, secret])
    bank.commit()
    assert all(files_of(bank.path).lower().count(word) for word in (b"quetzal", b"vault", b"zanzibar"))
    if how == "replaced":
        bank.put([Document("secret", "A museum.")], memory(1))
        retriever.put([Document("secret", "A museum.")])
    else:
        if how == "retriever":
            retriever.delete("secret")
        bank.delete("secret")
    bank.commit()
    left = files_of(bank.path).lower()
    assert not any(word in left for word in (b"quetzal", b"vault", b"zanzibar"))
    assert names(retriever, "Who opened the quetzal?") == ["bridge"]
    assert verify(folder / "bank").clean


def test_a_document_that_a_bounded_bank_forgets_stays_in_the_index(folder: Path) -> None:
    bank = MemoryBank.create(folder / "bank", "f00d", keep_texts=True)
    bounded, retriever = BoundedBank(bank, 1, "random-pruning"), BankBM25Retriever(bank)
    bounded.put([BRIDGE, RIVER], memory(2))
    retriever.put([BRIDGE, RIVER])
    bounded.put([Document("museum", "The museum of Sola.")], memory(1))
    bank.commit()
    assert len(bank) == 1
    assert BankBM25Retriever(bank).documents(["bridge", "river"]) == [BRIDGE, RIVER]


def test_a_change_that_the_file_refuses_is_made_neither_there_nor_in_memory(
    bank: MemoryBank, monkeypatch: pytest.MonkeyPatch
) -> None:
    retriever = BankBM25Retriever(bank)
    retriever.put([BRIDGE])
    with monkeypatch.context() as patch:
        patch.setattr("mac_rag.bank.bm25._ADD", "INSERT INTO nowhere VALUES (?)")
        with pytest.raises(BankError):
            retriever.put([Document("bridge", "new"), RIVER])
    assert retriever.documents(["bridge"]) == [BRIDGE]
    assert "river" not in retriever
    retriever.put([RIVER])
    bank.commit()
    assert not list(index_faults(bank))


def test_the_words_of_another_stemmer_are_made_anew(bank: MemoryBank, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mac_rag.bank.bm25.ANALYSIS", "another")
    BankBM25Retriever(bank).put([BRIDGE, RIVER])
    monkeypatch.undo()
    retriever = BankBM25Retriever(bank)
    assert names(retriever, "Who opened the bridge?") == ["bridge"]
    retriever.delete("river")
    retriever.put([Document("museum", "The museum opened.")])
    assert names(retriever, "opened") == ["museum", "bridge"]
    assert names(BankBM25Retriever(bank), "opened") == ["museum", "bridge"]
    assert not list(index_faults(bank))


def test_many_changes_leave_no_trace(bank: MemoryBank) -> None:
    retriever, kept = BankBM25Retriever(bank), BM25Retriever()
    for step in range(4):
        added = [Document(f"{step}-{number}", f"w{number % 50} w{step} w{number}") for number in range(900)]
        retriever.put(added)
        kept.put(added)
        for document in added[:-40]:
            kept.delete(document.id)
        retriever._write([document.id for document in added[:-40]], [])
    questions = [f"w{number}" for number in range(900)]
    assert retriever.retrieve(questions, 5) == kept.retrieve(questions, 5)
    bank.commit()
    assert BankBM25Retriever(bank).retrieve(questions, 5) == kept.retrieve(questions, 5)
    assert not list(index_faults(bank))


def test_copies_of_a_bank_have_the_index(bank: MemoryBank, folder: Path) -> None:
    retriever = BankBM25Retriever(bank)
    bank.put([BRIDGE], memory(1))
    retriever.put([BRIDGE])
    bank.commit()
    backup(folder / "bank", folder / "copy")
    assert names(BankBM25Retriever(MemoryBank.open(folder / "copy")), "bridge") == ["bridge"]
    bank.put([RIVER], memory(1))
    retriever.put([RIVER])
    bank.commit()
    bank.close()
    reader = MemoryBank.open(folder / "bank")
    follower = BankBM25Retriever(reader)
    restore(folder / "copy", folder / "bank", replace=True)
    with MemoryBank.open(folder / "bank", write=True) as again:  # the numbers of the river are those of another now
        BankBM25Retriever(again).put([Document("museum", "The museum of Sola.")])
        again.commit()
    reader.refresh()
    assert names(follower, "bridge") == ["bridge"]
    assert names(follower, "museum") == ["museum"]
    assert names(follower, "ferry") == []


@pytest.mark.parametrize(
    ("damage", "fault"),
    [
        ("UPDATE bm25_document SET text = 'Other text.'", "document 'bridge'"),
        ("UPDATE bm25_document SET metadata = '{}'", "document 'bridge'"),
        ("UPDATE bm25_document SET words = x'00'", "document 'bridge'"),
        ("UPDATE bm25 SET settings = '{}'", "settings"),
        ("DELETE FROM bm25", "no settings"),
    ],
)
def test_verify_names_damage_of_the_index(damage: str, fault: str, bank: MemoryBank) -> None:
    BankBM25Retriever(bank).put([BRIDGE])
    bank.commit()
    assert bank.path is not None
    assert verify(bank.path).clean
    with bank.changing() as link:
        link.write(damage)
    bank.commit()
    bank.close()
    assert any(fault in found for found in verify(bank.path).faults)


def test_a_damaged_index_is_not_opened(bank: MemoryBank) -> None:
    BankBM25Retriever(bank).put([BRIDGE])
    with bank.changing() as link:
        link.write("UPDATE bm25_document SET text = 'Other text.'")
    with pytest.raises(DamageError, match=r"document 'bridge'.*restore a backup"):
        BankBM25Retriever(bank)
