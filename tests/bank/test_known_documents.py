"""Which documents count at a moment, against a loop over the records; and other metadata for the same text."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mac_rag.bank import MemoryBank
from mac_rag.bank.bank import Contents
from mac_rag.bank.known_documents import KnownDocuments
from mac_rag.bank.rows import RowLayout
from mac_rag.bank.verify import verify
from mac_rag.data.document_ids import those_in
from mac_rag.data.types import Document
from mac_rag.errors import BankError
from tests.bank.helpers import memory

NAMES = [f"d{number}" for number in range(8)]
YEARS = st.integers(2000, 2004)
DOCUMENTS = st.lists(
    st.tuples(YEARS | st.none(), st.lists(st.sampled_from([*NAMES, "nobody"]), max_size=2)), min_size=1, max_size=8
)


def stored(documents: Sequence[Document], folder: Path | None = None) -> MemoryBank:
    """A bank of documents of one and two rows; on disk, in two commits and what is not committed."""
    bank = MemoryBank("f00d") if folder is None else MemoryBank.create(folder / "bank", "f00d")
    bank.keep_rows_as(RowLayout(dtype="bf16"))
    rows = [1 + number % 2 for number in range(len(documents))]
    for number, (document, count) in enumerate(zip(documents, rows)):
        bank.put([document], memory(count, number), [count])
        if number in (2, 4):
            bank.commit()
    return bank


def counting(bank: Contents, as_of: int | None, among: set[str] | None) -> set[str]:
    """Written out, document by document."""
    members = {member.document_id: member for entry in bank for member in entry.members}
    moment = None if as_of is None else KnownDocuments(bank, as_of).as_of
    there = {name for name, one in members.items() if moment is None or one.moment <= moment}
    gone = {old for name in there if among is None or name in among for old in members[name].supersedes if old != name}
    return {name for name in there - gone if among is None or name in among}


@settings(max_examples=60, deadline=None)
@given(documents=DOCUMENTS, year=YEARS | st.none(), among=st.none() | st.sets(st.sampled_from(NAMES)), data=st.data())
def test_they_are_those_that_a_loop_finds(
    documents: list[tuple[int | None, list[str]]], year: int | None, among: set[str] | None, data: st.DataObject
) -> None:
    bank = stored(
        [
            Document(name, name, {"date": year, "supersedes": superseded})
            for name, (year, superseded) in zip(NAMES, documents)
        ]
    )
    for name in data.draw(st.sets(st.sampled_from(bank.document_ids), max_size=3)):
        bank.delete(name)
    if len(bank) > 2 and data.draw(st.booleans()):
        bank.merge(bank.document_ids[:2], memory(1))
    as_of = None if year is None else (year - 1970) * 31_557_600_000_000  # within the year, or at its end
    known = KnownDocuments(bank, as_of, among)
    expected = counting(bank, as_of, among)
    assert {name for name in bank.document_ids if name in known} == expected
    assert set(those_in(NAMES, known)) & set(bank.document_ids) == expected
    assert ("another" in known) == (year is None and among is None)
    rows = [all(name in expected for name in members) for members in bank.row_members]
    assert bank.visible_rows(known).tolist() == rows
    assert bank.snapshot().visible_rows(known).tolist() == rows


CHAIN = [
    Document("first", "1", {"date": "2001"}),
    Document("second", "2", {"date": "2002", "supersedes": "first"}),
    Document("third", "3", {"date": "2003", "supersedes": ["second", "lost"]}),
]


def seen(bank: Contents, year: str | None) -> list[str]:
    from mac_rag.data.dates import moment_of_question

    known = KnownDocuments(bank, moment_of_question(year))
    return [name for name in bank.document_ids if name in known]


@pytest.mark.parametrize("on_disk", [False, True])
def test_a_chain_and_its_end(folder: Path, on_disk: bool) -> None:
    with stored(CHAIN, folder if on_disk else None) as bank:
        bank.commit()
        assert bank.supersedes
        assert [seen(bank, year) for year in ("2000", "2001", "2002-06", "2003", None)] == [
            [], ["first"], ["second"], ["third"], ["third"],
        ]  # fmt: skip
        bank.delete("third")
        assert seen(bank, None) == ["second"]
        bank.delete("second")
        assert (seen(bank, None), bank.supersedes) == (["first"], False)


@pytest.mark.parametrize("on_disk", [False, True])
def test_other_metadata_leave_memory_tokens_texts_and_the_time_of_addition(folder: Path, on_disk: bool) -> None:
    documents = [Document(name, name, {"date": "2001"}) for name in NAMES[:6]]
    bank = MemoryBank("f00d", keep_texts=True)
    if on_disk:
        bank = MemoryBank.create(folder / "bank", "f00d", keep_texts=True)
    bank.keep_rows_as(RowLayout(dtype="bf16"))
    bank.put(documents, memory(8), [1, 2, 1, 2, 1, 1])
    bank.merge(["d3", "d4"], memory(1, 5))
    bank.commit()
    before = {name: (bank[name].phi, bank[name].texts, bank[name].members) for name in bank.document_ids}
    changed = [Document("d3", "d3", {"date": "2002"}), Document("d1", "d1", {"date": "2003", "page": 7})]
    bank.describe(changed)
    bank.commit()
    assert sorted(bank.document_ids) == sorted(before)
    for name, (phi, texts, members) in before.items():
        entry = bank[name]
        assert torch.equal(entry.phi, phi)
        assert entry.texts == texts
        for old, new in zip(members, entry.members, strict=True):
            is_changed = new.document_id in ("d1", "d3")
            assert (old == new) == (not is_changed)
            assert (old.added, old.document_id) == (new.added, new.document_id)
    assert bank["d1"].metadata == {"date": "2003", "page": 7}
    assert bank["d1"].members[0].matches("d1")
    for bad in (Document("d1", "another text"), Document("nobody", "d1"), Document("d1", "d1", {"date": "May"})):
        version = bank.version
        with pytest.raises(BankError):
            bank.describe([Document("d0", "d0", {"date": "2009"}), bad])
        assert bank.version == version
    if on_disk:
        bank.close()
        assert verify(folder / "bank").clean
