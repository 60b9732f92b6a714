"""The bank on disk and in memory against a plain list, in any order of changes, commits and reopening."""

from __future__ import annotations

from contextlib import ExitStack, suppress
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch import Tensor

from mac_rag.bank import MemoryBank, database
from mac_rag.bank import bank as module
from mac_rag.bank.bank import Contents, Snapshot
from mac_rag.bank.rows import RowLayout, Summaries
from mac_rag.bank.verify import verify
from mac_rag.data.types import Document
from mac_rag.errors import BankError
from tests.bank.helpers import TOKENS, WIDTH, fast_folder

IDS = ["a", "b", "ü/../c", "\x1b[2J\n\x85", "\u202e\u2028 👩‍👩‍👧", "f"]
LAYOUTS = [
    RowLayout(),
    RowLayout(dtype="fp32", summary=3),
    RowLayout(dtype="fp32", lexical_vectors=1, summary=4, prior_keys=2),
    RowLayout(dtype="fp32", lexical_vectors=2),
]

ids = st.sampled_from(IDS)


class Entry:
    """What the plain list holds: ids, texts and metadata of the documents, rows, summaries, and the rows' keys."""

    def __init__(self, documents: list[tuple[str, str, dict[str, Any]]], phi: Tensor, summaries: Tensor) -> None:
        self.documents = documents
        self.phi = phi
        self.summaries = summaries
        self.keys: list[int] = []

    @property
    def ids(self) -> tuple[str, ...]:
        return tuple(document_id for document_id, _, _ in self.documents)


class Banks(RuleBasedStateMachine):
    """One writer and one reader of the same file, and the list of entries that each of them should see."""

    @initialize(
        keep_texts=st.booleans(),
        layout=st.sampled_from(LAYOUTS),
        many=st.sampled_from([2, 1000]),
        place=st.integers(0, 4),
    )
    def start(self, keep_texts: bool, layout: RowLayout, many: int, place: int) -> None:
        self.open = ExitStack()
        self.open.enter_context(patch.multiple(module, _MANY_ROWS=many))
        self.open.enter_context(patch.multiple(database, _WAIT=0.01))
        self.path = self.open.enter_context(fast_folder()) / "bank"
        self.generator = torch.Generator().manual_seed(0)
        self.keep_texts, self.layout = keep_texts, layout
        self.entries: list[Entry] = []
        self.committed: list[Entry] = []
        self.used: set[int] = set()
        self.used_before: set[int] = set()
        self.number = 0
        self.snapshots: list[tuple[Snapshot, list[Entry]]] = []
        self.fleeting: Snapshot | None = None
        self.on_disk = place > 1
        if self.on_disk:
            self.bank = MemoryBank.create(self.path, "f00d", keep_texts=keep_texts)
        elif place:
            self.bank = MemoryBank.create_on_commit(self.path, "f00d", keep_texts=keep_texts)
        else:
            self.bank = MemoryBank("f00d", keep_texts=keep_texts)
        self.is_uncreated = place == 1
        self.bank.keep_rows_as(layout)
        self.reader = MemoryBank.open(self.path) if self.on_disk else None
        self.seen: list[Entry] = []

    def teardown(self) -> None:
        if hasattr(self, "bank"):
            self.bank.close()
            self.open.close()

    def phi(self, rows: int) -> Tensor:
        phi = torch.randn(rows, TOKENS + self.layout.lexical_vectors, WIDTH, generator=self.generator)
        phi[:, TOKENS:] *= torch.rand(phi[:, TOKENS:].shape, generator=self.generator) < 0.4
        return phi

    def summaries_of(self, phi: Tensor) -> Tensor:
        return phi.flatten(1)[:, : self.layout.summary].bfloat16().float()

    def holding(self, document_id: str) -> list[Entry]:
        return [entry for entry in self.entries if document_id in entry.ids]

    def changed(self, gone: list[Entry], come: list[Entry]) -> None:
        """Does to the list what was done to the bank, and takes the keys that the bank gave."""
        self.fleeting = None
        self.entries = [entry for entry in self.entries if entry not in gone] + come
        keys = self.bank.row_keys.tolist()
        for entry in reversed(come):
            keys, entry.keys = keys[: -len(entry.phi)], keys[-len(entry.phi) :]
            assert not self.used.intersection(entry.keys)
            self.used.update(entry.keys)

    @rule(documents=st.lists(st.tuples(ids, st.integers(1, 3)), max_size=8, unique_by=lambda each: each[0]))
    def put(self, documents: list[tuple[str, int]]) -> None:
        whole = [
            (name, f"text\n\u2028{self.number + index}", {"list": [name, None]})
            for index, (name, _) in enumerate(documents)
        ]
        self.number += len(documents)
        parts = [self.phi(rows) for _, rows in documents]
        names = [name for name, _ in documents]
        replaced = [entry for name in names for entry in self.holding(name)]
        if not len(self.bank):
            self.bank.keep_rows_as(self.layout)
        gone = self.bank.put(
            [Document(*each) for each in whole],
            torch.cat([self.phi(0), *parts]),
            [rows for _, rows in documents],
            summarise=self.summaries_of,
        )
        assert set(gone) == {i for entry in replaced for i in entry.ids} - set(names)
        self.changed(replaced, [Entry([each], part, self.summaries_of(part)) for each, part in zip(whole, parts)])

    @rule(document_id=ids)
    def delete(self, document_id: str) -> None:
        held = self.holding(document_id)
        if not held:
            with pytest.raises(BankError, match="holds no document"):
                self.bank.delete(document_id)
            return
        assert self.bank.delete(document_id) == held[0].ids
        self.changed(held, [])

    @rule(chosen=st.lists(ids, min_size=1, max_size=3), rows=st.integers(1, 2))
    def merge(self, chosen: list[str], rows: int) -> None:
        held = [entry for entry in self.entries if set(chosen) & set(entry.ids)]
        phi = self.phi(rows)
        if not all(self.holding(document_id) for document_id in chosen):
            with pytest.raises(BankError, match="holds no document"):
                self.bank.merge(chosen, phi)
            return
        self.bank.merge(chosen, phi)
        documents = [document for entry in held for document in entry.documents]
        self.changed(held, [Entry(documents, phi, torch.zeros(rows, self.layout.summary))])

    @rule(document_id=ids, date=st.integers(2000, 2009))
    def describe(self, document_id: str, date: int) -> None:
        held = self.holding(document_id)
        documents = [each for entry in held for each in entry.documents if each[0] == document_id]
        metadata = {"date": f"{date}", "supersedes": ["b", "nobody"]}
        self.bank.describe([Document(name, text, metadata) for name, text, _ in documents])
        for entry in held:
            others = [each if each[0] != document_id else (*each[:2], metadata) for each in entry.documents]
            new = Entry(others, entry.phi, entry.summaries)
            new.keys = entry.keys
            self.entries = [new if each is entry else each for each in self.entries]
            self.fleeting = None

    @rule(compact=st.booleans())
    def commit(self, compact: bool) -> None:
        self.fleeting = None
        if compact:
            self.snapshots = []  # which would be in its way
            if self.reader is not None:  # as is a reader of an older commit
                with suppress(BankError):
                    self.bank.compact()
                self.reader.refresh()
                self.seen = list(self.entries)
            self.bank.compact()
        else:
            self.bank.commit()
        self.committed, self.used_before = list(self.entries), set(self.used)
        if self.is_uncreated:
            self.is_uncreated, self.on_disk = False, True
            self.reader, self.seen = MemoryBank.open(self.path), list(self.committed)

    @rule()
    def rollback(self) -> None:
        self.bank.rollback()
        self.entries, self.fleeting = list(self.committed), None

    @rule()
    def snapshot(self) -> None:
        """It stays, whatever comes; if there are changes that were not committed, until the next change."""
        snapshot = self.bank.snapshot()
        if self.entries == self.committed and not self.bank.connection.in_transaction:
            self.snapshots.append((snapshot, list(self.entries)))
        else:
            self.fleeting = snapshot
        self.snapshots.append((self.bank.committed, list(self.committed)))

    @precondition(lambda self: self.on_disk)
    @rule()
    def reopen(self) -> None:
        """As after a crash or a close: what was not committed is gone."""
        self.bank.close()
        with pytest.raises(BankError, match="closed; open it again"):
            self.bank.put([Document("late", "")], self.phi(1))
        self.bank = MemoryBank.open(self.path, write=True, fingerprint="f00d")
        self.entries, self.used, self.fleeting = list(self.committed), set(self.used_before), None

    @precondition(lambda self: self.on_disk)
    @rule(again=st.booleans())
    def read(self, again: bool) -> None:
        """The reader follows, or is opened anew."""
        assert self.reader is not None
        if again:
            self.reader = MemoryBank.open(self.path)
        else:
            version = self.reader.version
            assert self.reader.refresh() == (self.reader.version > version)
            assert self.reader.history == 0
            assert not self.reader.refresh()
        assert not self.bank.refresh()
        self.seen = list(self.committed)

    @precondition(lambda self: self.on_disk)
    @rule()
    def verify(self) -> None:
        report = verify(self.path)
        assert report.clean, report
        assert report.documents == sum(len(entry.documents) for entry in self.committed)

    @rule()
    def save(self) -> None:
        with fast_folder() as folder:
            self.bank.save(folder / "copy")
            self.check(MemoryBank.open(folder / "copy"), self.committed)

    @invariant()
    def same(self) -> None:
        if hasattr(self, "bank"):
            self.check(self.bank, self.entries)
            for snapshot, entries in self.snapshots[-2:]:
                self.check(snapshot, entries)
            if self.fleeting is not None:
                self.check(self.fleeting, self.entries)
            if self.reader is not None:
                self.check(self.reader, self.seen)

    def check(self, bank: Contents, entries: list[Entry]) -> None:
        """The bank is the list, however it is read."""
        assert bank.document_ids == [document_id for entry in entries for document_id in entry.ids]
        assert len(bank) == len(bank.document_ids)
        for name in IDS:
            assert (name in bank) == (name in bank.document_ids)
        found = list(bank)
        assert len(found) == len(entries)
        for one, expected in zip(found, entries):
            assert tuple(member.document_id for member in one.members) == expected.ids
            assert [member.metadata for member in one.members] == [metadata for *_, metadata in expected.documents]
            texts = tuple(text if self.keep_texts else None for _, text, _ in expected.documents)
            assert one.texts == bank[expected.ids[0]].texts == texts
            assert torch.equal(one.phi, expected.phi)
            assert bank[expected.ids[-1]] == one
            assert {key >> 16 for key in expected.keys} == {one.sequence}
        assert bank.row_keys.tolist() == [key for entry in entries for key in entry.keys]
        assert bank.row_members == [entry.ids for entry in entries for _ in entry.phi]
        moments = [member.moment for one in found for member in one.members]
        assert bank.directory.dates.tolist() == moments
        assert bank.supersedes == any("supersedes" in metadata for entry in entries for *_, metadata in entry.documents)
        allowed = set(IDS[::2])
        assert bank.visible_rows(allowed).tolist() == [allowed.issuperset(names) for names in bank.row_members]
        sizes = [f"coalesce(sum(length({column})), 0)" for column in ("summary", "places", "weights", "codes")]
        assert bank.nbytes == sum(bank.connection.rows(f"SELECT {', '.join(sizes)} FROM row")[0])
        if not entries:
            assert bank.row_shape is None
            return
        phi = torch.cat([entry.phi for entry in entries])
        assert bank.row_shape == phi.shape[1:]
        assert torch.equal(bank.phi, phi)
        low, high = sorted(torch.randint(0, len(phi) + 1, (2,), generator=self.generator).tolist())
        assert torch.equal(bank.take(torch.arange(low, high)), phi[low:high])
        index = torch.randint(0, len(phi), (5,), generator=self.generator)
        assert torch.equal(bank.take(index), phi[index])
        if self.layout.summary or self.layout.lexical_vectors:
            parts = list(bank.overview(low))
            assert sum(len(part.summaries) for part in parts) == len(phi) - low
            summaries = torch.cat([entry.summaries for entry in entries])[low:]
            assert torch.equal(torch.cat([part.summaries for part in parts]) if parts else summaries, summaries)
            by_place = phi[low:, TOKENS:].flatten(1).T
            weights = Summaries.cat(parts).lexical.weights if parts else torch.empty(0)
            assert torch.equal(weights, by_place[by_place != 0])


TestBanks = Banks.TestCase
TestBanks.settings = settings(max_examples=10, stateful_step_count=25, deadline=None)
