"""The bank on disk and in memory against a plain list, in any order of changes, commits, crashes and reopening."""

from __future__ import annotations

import json
import math
from contextlib import ExitStack

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from mac_rag.bank.storage import store
from torch import Tensor

from mac_rag.bank import MemoryBank
from mac_rag.bank.bank import Snapshot
from mac_rag.bank.verify import verify
from mac_rag.data.types import Document
from mac_rag.errors import BankError
from tests.bank.helpers import TOKENS, WIDTH, fast_folder

IDS = ["a", "b", "ü/../c", "\x1b[2J\n\x85", "\u202e\u2028 👩‍👩‍👧", "f"]

ids = st.sampled_from(IDS)


class Entry:
    """What the plain list holds: ids and texts of the documents, the rows, and the keys that they were given."""

    def __init__(self, documents: list[tuple[str, str]], phi: Tensor) -> None:
        self.documents = documents
        self.phi = phi
        self.keys: list[int] = []

    @property
    def ids(self) -> tuple[str, ...]:
        return tuple(document_id for document_id, _ in self.documents)


class Banks(RuleBasedStateMachine):
    """One writer and one reader of the same folder, and the list of entries that each of them should see."""

    @initialize(
        keep_texts=st.booleans(),
        large=st.sampled_from([store._LARGE, 100]),
        on_disk=st.integers(0, 4),
    )
    def start(self, keep_texts: bool, large: int, on_disk: int) -> None:
        self.large, store._LARGE = store._LARGE, large
        self.open = ExitStack()
        self.folder = self.open.enter_context(fast_folder())
        self.generator = torch.Generator().manual_seed(0)
        self.on_disk, self.keep_texts = on_disk > 0, keep_texts
        self.entries: list[Entry] = []
        self.committed: list[Entry] = []
        self.used: set[int] = set()
        self.used_before: set[int] = set()
        self.number = 0
        self.snapshots: list[tuple[Snapshot, list[Entry]]] = []
        if self.on_disk:
            self.bank = MemoryBank.create(self.folder, "f00d", keep_texts=keep_texts)
            self.reader, self.seen = MemoryBank.open(self.folder), list(self.committed)
        else:
            self.bank = MemoryBank("f00d", keep_texts=keep_texts)

    def teardown(self) -> None:
        if hasattr(self, "bank"):
            self.bank.close()
            self.open.close()
            store._LARGE = self.large

    def phi(self, rows: int) -> Tensor:
        return torch.randn(rows, TOKENS, WIDTH, generator=self.generator)

    def holding(self, document_id: str) -> list[Entry]:
        return [entry for entry in self.entries if document_id in entry.ids]

    def drop(self, entries: list[Entry]) -> None:
        self.entries = [entry for entry in self.entries if entry not in entries]

    def add(self, entries: list[Entry]) -> None:
        """Adds to the list what was added to the bank, with the keys that the bank gave."""
        self.entries += entries
        keys = self.bank.row_keys.tolist()
        for entry in reversed(entries):
            keys, entry.keys = keys[: -len(entry.phi)], keys[-len(entry.phi) :]
            assert not self.used.intersection(entry.keys)
            self.used.update(entry.keys)

    @rule(documents=st.lists(st.tuples(ids, st.integers(1, 3)), max_size=8, unique_by=lambda each: each[0]))
    def put(self, documents: list[tuple[str, int]]) -> None:
        texts = [f"text\n\u2028{self.number + index}" for index in range(len(documents))]
        self.number += len(documents)
        parts = [self.phi(rows) for _, rows in documents]
        names = [document_id for document_id, _ in documents]
        replaced = [entry for name in names for entry in self.holding(name)]
        gone = self.bank.put(
            [Document(name, text, {"id": name, "list": [text, None]}) for name, text in zip(names, texts)],
            torch.cat([torch.empty(0, TOKENS, WIDTH), *parts]),
            [rows for _, rows in documents],
        )
        assert set(gone) == {i for entry in replaced for i in entry.ids} - set(names)
        self.drop(replaced)
        self.add([Entry([(name, text)], part) for name, text, part in zip(names, texts, parts)])

    @rule(document_id=ids)
    def delete(self, document_id: str) -> None:
        held = self.holding(document_id)
        if not held:
            with pytest.raises(BankError, match="holds no document"):
                self.bank.delete(document_id)
            return
        assert self.bank.delete(document_id) == held[0].ids
        self.drop(held)

    @rule(chosen=st.lists(ids, min_size=1, max_size=3), rows=st.integers(1, 2))
    def merge(self, chosen: list[str], rows: int) -> None:
        held = [entry for entry in self.entries if set(chosen) & set(entry.ids)]
        phi = self.phi(rows)
        if not all(self.holding(document_id) for document_id in chosen):
            with pytest.raises(BankError, match="holds no document"):
                self.bank.merge(chosen, phi)
            return
        self.bank.merge(chosen, phi)
        self.drop(held)
        self.add([Entry([document for entry in held for document in entry.documents], phi)])

    @rule(compact=st.booleans())
    def commit(self, compact: bool) -> None:
        self.bank.compact() if compact else self.bank.commit()
        self.committed, self.used_before = list(self.entries), set(self.used)
        if self.on_disk:
            names = {file.name for file in self.folder.iterdir()}
            segments = len(names & {f"{segment.name}.jsonl" for segment in self.bank._store.segments})  # type: ignore[union-attr]
            others = {"manifest.json", "manifest.copy.json", "writer.lock", "writer.json"}
            if compact:
                assert len(names) == (4 if self.keep_texts else 3) * segments + len(others), names
                written = b"".join(file.read_bytes() for file in self.folder.glob("segment-*.texts.jsonl"))
                kept = {text for entry in self.entries for _, text in entry.documents} if self.keep_texts else set()
                assert {json.loads(line)["text"] for line in written.splitlines()} == kept
            rows = sum(len(entry.phi) for entry in self.entries)
            assert segments <= (rows if store._LARGE == 100 else math.log2(rows + 1) + 1)

    @rule()
    def rollback(self) -> None:
        self.bank.rollback()
        self.entries = list(self.committed)

    @rule()
    def prepare(self) -> None:
        """Nobody sees it."""
        self.bank.prepare()

    @rule()
    def snapshot(self) -> None:
        """It stays, whatever comes."""
        self.snapshots.append((self.bank.snapshot(), list(self.entries)))

    @precondition(lambda self: self.on_disk)
    @rule()
    def reopen(self) -> None:
        """As after a crash or a close: what was not committed is gone."""
        self.bank.close()
        with pytest.raises(BankError, match="not open for writing"):
            self.bank.put([Document("late", "")], self.phi(1))
        self.bank = MemoryBank.open(self.folder, write=True, fingerprint="f00d")
        self.entries, self.used = list(self.committed), set(self.used_before)

    @precondition(lambda self: self.on_disk)
    @rule(again=st.booleans())
    def read(self, again: bool) -> None:
        """The reader follows, or is opened anew."""
        if again:
            self.reader = MemoryBank.open(self.folder)
        else:
            version = self.reader.version
            assert self.reader.refresh() == (self.reader.version > version)
            assert not self.reader.refresh()
        assert not self.bank.refresh()
        self.seen = list(self.committed)

    @precondition(lambda self: self.on_disk)
    @rule()
    def verify(self) -> None:
        report = verify(self.folder)
        assert report.clean
        assert report.documents == sum(len(entry.documents) for entry in self.committed)

    @rule()
    def save(self) -> None:
        with fast_folder() as folder:
            self.bank.save(folder / "copy")
            self.check(MemoryBank.open(folder / "copy"), self.entries)

    @invariant()
    def same(self) -> None:
        if hasattr(self, "bank"):
            self.check(self.bank, self.entries)
            for snapshot, entries in self.snapshots[-3:]:
                self.check(snapshot, entries)
            if self.on_disk:
                self.check(self.reader, self.seen)

    def check(self, bank: MemoryBank | Snapshot, entries: list[Entry]) -> None:
        """The bank is the list, however it is read."""
        assert bank.document_ids == [document_id for entry in entries for document_id in entry.ids]
        assert len(bank) == len(bank.document_ids)
        for name in IDS:
            assert (name in bank) == (name in bank.document_ids)
        found = list(bank)
        assert len(found) == len(entries)
        for one, expected in zip(found, entries):
            assert tuple(member.document_id for member in one.members) == expected.ids
            assert [member.metadata for member in one.members] == [
                {"id": name, "list": [text, None]} for name, text in expected.documents
            ]
            texts = tuple(text if self.keep_texts else None for _, text in expected.documents)
            assert one.texts == bank[expected.ids[0]].texts == texts
            assert torch.equal(one.phi, expected.phi)
            assert bank[expected.ids[-1]] == one
            assert {key >> 16 for key in expected.keys} == {one.sequence}
        assert bank.row_keys.tolist() == [key for entry in entries for key in entry.keys]
        assert (bank.row_keys.diff() > 0).all()
        assert bank.row_members == [entry.ids for entry in entries for _ in entry.phi]
        if not entries:
            assert bank.row_shape is None
            return
        assert bank.row_shape == (TOKENS, WIDTH)
        phi = torch.cat([entry.phi for entry in entries])
        assert torch.equal(bank.phi, phi)
        low, high = sorted(torch.randint(0, len(phi) + 1, (2,), generator=self.generator).tolist())
        assert torch.equal(bank.read(low, high), phi[low:high])
        index = torch.randint(0, len(phi), (5,), generator=self.generator)
        assert torch.equal(bank.take(index), phi[index])


TestBanks = Banks.TestCase
TestBanks.settings = settings(max_examples=30, stateful_step_count=30, deadline=None)
