"""Kept texts: what is on disk of them, what damage to them costs, and that banks without them are as they were."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mac_rag.bank.storage.repair import repair, verify

from mac_rag.bank import MemoryBank
from mac_rag.bank.copies import backup, restore
from mac_rag.data.types import Document
from mac_rag.errors import BankError, DamageError
from tests.bank.helpers import fast_folder, memory

TEXTS = {"a": "The bridge opened.", "b": "Für alle\n\u2028 Fälle \U0001f600", "c": ""}


def filled(folder: Path, *, keep_texts: bool = True) -> Path:
    with MemoryBank.create(folder / "bank", "f00d", keep_texts=keep_texts) as bank:
        bank.put([Document(name, text, {"name": name}) for name, text in TEXTS.items()], memory(3))
        bank.commit()
    return folder / "bank"


def texts(bank: MemoryBank) -> dict[str, str | None]:
    return {member.document_id: text for entry in bank for member, text in zip(entry.members, entry.texts)}


def texts_file(bank: Path) -> Path:
    [file] = bank.glob("segment-*.texts.jsonl")
    return file


def test_a_bank_keeps_texts_from_the_beginning_or_never(folder: Path) -> None:
    bank = filled(folder)
    assert MemoryBank.open(bank).keep_texts
    assert texts(MemoryBank.open(bank)) == TEXTS
    with MemoryBank.open(bank, write=True) as again:
        again.put([Document("d", "Later.")], memory(1))
        assert texts(again) == {**TEXTS, "d": "Later."}
        again.save(folder / "copy")
    assert texts(MemoryBank.open(folder / "copy")) == {**TEXTS, "d": "Later."}
    assert texts(MemoryBank.open(bank)) == TEXTS


def test_a_bank_without_texts_has_no_byte_of_them(folder: Path) -> None:
    bank = filled(folder, keep_texts=False)
    manifest = json.loads((bank / "manifest.json").read_text())
    assert not manifest["keep_texts"]
    assert manifest["segments"][0]["texts"] is None
    assert not list(bank.glob("*.texts.jsonl"))
    assert b"bridge" not in b"".join(file.read_bytes() for file in bank.iterdir())
    assert texts(MemoryBank.open(bank)) == dict.fromkeys(TEXTS)


def test_compaction_leaves_no_byte_of_a_deleted_text(folder: Path) -> None:
    bank = filled(folder)
    with MemoryBank.open(bank, write=True) as opened:
        snapshot = opened.snapshot()
        opened.delete("a")
        opened.commit()
        assert b"bridge" in texts_file(bank).read_bytes()
        opened.compact()
        assert b"bridge" not in b"".join(file.read_bytes() for file in bank.iterdir())
        assert snapshot["a"].texts == (TEXTS["a"],)  # whose file is mapped still
    assert texts(MemoryBank.open(bank)) == {name: TEXTS[name] for name in ("b", "c")}


def test_opening_reads_no_text_and_damage_is_an_error_when_one_is_read(folder: Path) -> None:
    bank = filled(folder)
    file = texts_file(bank)
    file.write_bytes(file.read_bytes().replace(b"opened", b"closed"))
    opened = MemoryBank.open(bank, write=True)
    with opened, pytest.raises(DamageError, match=rf"{file.name} is damaged: its checksum.*repair the bank"):
        opened["b"].texts  # noqa: B018
    with MemoryBank.open(bank, write=True) as opened:
        opened.put([Document(name, "") for name in "defg"], memory(4))
        with pytest.raises(DamageError, match="is damaged"):  # the old segment would become a part of a new one
            opened.commit()
        opened.rollback()
        assert opened.document_ids == list(TEXTS)


@pytest.mark.parametrize("damage", ["a bit", "cut", "missing", "a line break", "other text"])
def test_damaged_texts_cost_no_memory_tokens(folder: Path, damage: str) -> None:
    bank = filled(folder)
    file, before = texts_file(bank), MemoryBank.open(bank).phi
    data = file.read_bytes()
    lost = ["a"]
    if damage == "a bit":
        file.write_bytes(data.replace(b"opened", b"openeD"))
    elif damage == "cut":
        file.write_bytes(data[: data.index(b"\n") + 5])
        lost = ["b", "c"]
    elif damage == "missing":
        file.unlink()
        lost = list(TEXTS)
    elif damage == "a line break":
        file.write_bytes(data.replace(b"\n", b" ", 1))
        lost = []
    else:  # a sealed line of another bank
        with MemoryBank.create(folder / "other", "f00d", keep_texts=True) as other:
            other.put([Document("a", "The bridge closed.")], memory(1))
            other.commit()
        [line, *_], [_, *rest] = (texts_file(folder / "other").read_bytes().splitlines(), data.splitlines())
        file.write_bytes(b"\n".join([line, *rest, b""]))
    found = verify(bank)
    assert not found.clean
    assert (found.documents, found.lost, found.unnamed) == (3, (), 0)
    assert list(found.textless) == lost
    assert file.name in str(found)
    assert all(f"  {name}" in str(found).splitlines() for name in lost)
    assert repair(bank).textless == found.textless
    assert verify(bank).clean
    repaired = MemoryBank.open(bank, write=True)
    with repaired:
        assert (repaired.phi == before).all()
        assert texts(repaired) == {name: None if name in lost else text for name, text in TEXTS.items()}
        repaired.merge(["a", "b"], memory(1))
        repaired.compact()
    assert texts(MemoryBank.open(bank)) == {name: None if name in lost else text for name, text in TEXTS.items()}


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_damage_costs_the_texts_that_it_hits_and_no_others(data: st.DataObject) -> None:
    with fast_folder() as folder:
        bank = filled(folder)
        file = texts_file(bank)
        written = file.read_bytes()
        start = data.draw(st.integers(0, len(written) - 1))
        stop = data.draw(st.integers(start + 1, len(written)))
        put = data.draw(st.binary(max_size=20))
        file.write_bytes(written[:start] + put + written[stop:])
        ends = [place for place, byte in enumerate(written) if byte == 10]
        begins = [0, *(end + 1 for end in ends)]
        hit = {name for name, begin, end in zip(TEXTS, begins, ends) if begin < stop and start < end}
        beside = {name for name, begin, end in zip(TEXTS, begins, ends) if begin <= stop and start <= end}
        found = verify(bank)
        assert found.clean == (file.read_bytes() == written)
        assert found.lost == ()
        if not found.clean:
            assert set(found.textless) <= beside
            assert hit <= set(found.textless) or len(put) == stop - start
            repair(bank)
        assert verify(bank).clean
        kept = texts(MemoryBank.open(bank))
        assert kept == {name: None if name in found.textless else text for name, text in TEXTS.items()}


def test_texts_go_with_the_copies_of_a_bank(folder: Path) -> None:
    bank, plain = filled(folder), filled(folder / "plain", keep_texts=False)
    backup(bank, folder / "backup")
    with MemoryBank.open(bank, write=True) as opened:
        opened.delete("a")
        opened.commit()
    restore(folder / "backup", bank, replace=True)
    texts_file(folder / "backup").unlink()
    assert repair(folder / "backup", folder / "repaired").textless == tuple(TEXTS)
    assert texts(MemoryBank.open(bank)) == TEXTS
    assert texts(MemoryBank.open(folder / "repaired")) == dict.fromkeys(TEXTS)
    for source, target in ((bank, plain), (plain, bank)):
        with pytest.raises(BankError, match=rf"{bank} keeps texts and {plain} does not; restore it into a new folder"):
            restore(source, target, replace=True)


def test_an_entry_that_is_lost_is_not_named_twice(folder: Path) -> None:
    bank = filled(folder)
    texts_file(bank).unlink()
    [tokens] = bank.glob("segment-*.safetensors")
    data = bytearray(tokens.read_bytes())
    data[-1] ^= 1  # of the last document
    tokens.write_bytes(data)
    found = verify(bank)
    assert (found.lost, found.textless) == (("c",), ("a", "b"))


def test_a_bank_knows_whose_text_it_has_lost(folder: Path) -> None:
    place = filled(folder)
    with MemoryBank.open(place, write=True) as bank:
        bank.put([Document("d", "Later."), Document("e", "Last.")], memory(2))
        bank.commit()
        bank.merge(["d", "e"], memory(1))
        bank.commit()
        bank.compact()
    lost = {"b", "d"}
    for file in place.glob("segment-*.texts.jsonl"):
        lines = file.read_bytes().splitlines(keepends=True)
        file.write_bytes(b"".join(line for line in lines if json.loads(line)["id"] not in lost))
    assert set(repair(place).textless) == lost
    with MemoryBank.open(place, write=True) as bank:
        assert [name for name in "abcde" if bank.is_textless(name)] == ["b"]  # "d" is merged with "e"
        assert [name for name in "abcde" if bank.snapshot().is_textless(name)] == ["b"]
        bank.put([Document("b", TEXTS["b"], {"name": "b"})], memory(1))
        assert not any(map(bank.is_textless, "abcde"))
        bank.commit()
    bank = MemoryBank.open(place)
    assert not any(map(bank.is_textless, "abcde"))
    assert texts(bank)["b"] == TEXTS["b"]
    with pytest.raises(BankError, match="no document 'z'"):
        bank.is_textless("z")
    assert not MemoryBank.open(filled(folder / "plain", keep_texts=False)).is_textless("a")


def test_no_text_is_read_to_find_that_none_is_lost(folder: Path) -> None:
    place = filled(folder)
    file = texts_file(place)
    file.write_bytes(b"damage\n" * len(TEXTS))
    bank = MemoryBank.open(place)
    assert not any(map(bank.is_textless, TEXTS))
    with pytest.raises(DamageError):
        bank["a"].texts  # noqa: B018


def test_texts_that_cannot_be_kept_are_refused_before_anything_changes(folder: Path) -> None:
    with MemoryBank.create(folder / "bank", "f00d", keep_texts=True) as bank:
        bank.put([Document("y", "y" * (64 << 20))], memory(1))
        with pytest.raises(BankError, match=r"the text of document 'y' needs 67,.* split it"):
            bank.commit()
        bank.rollback()
        bank.put([Document("z", "z")], memory(1))
        bank.commit()
    assert texts(MemoryBank.open(folder / "bank")) == {"z": "z"}
