"""Bounded banks against plain loops: which entries become one, that the limit holds, that nothing is lost unsaid."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mac_rag.bank import MemoryBank
from mac_rag.bank.reduction import BoundedBank, ClosestPair, ReductionMethod
from mac_rag.data.provenance import content_hash
from mac_rag.data.types import Document
from mac_rag.errors import BankError, ConfigError

TOKENS, WIDTH = 2, 3
METHODS: list[ReductionMethod] = ["random-pruning", "random-averaging", "nearest-averaging"]
every_method = pytest.mark.parametrize("method", METHODS)


def random_phi(seed: int, rows: int) -> Tensor:
    return torch.randn(rows, TOKENS, WIDTH, generator=torch.Generator().manual_seed(seed))


def documents(first: int, stop: int) -> list[Document]:
    return [Document(str(number), f"text {number}", {"n": number}) for number in range(first, stop)]


def contents(bank: MemoryBank) -> dict[tuple[str, ...], list[float]]:
    return {tuple(m.document_id for m in entry.members): entry.phi.flatten().tolist() for entry in bank}


class BruteForce:
    """Nearest-neighbour averaging by the book: all similarities anew for every arrival."""

    def __init__(self, maximum: int) -> None:
        self.maximum = maximum
        self.entries: list[tuple[tuple[str, ...], Tensor]] = []  # ids and rows [n, T, D]

    def put(self, document_id: str, phi: Tensor) -> None:
        self.entries.append(((document_id,), phi))
        if len(self.entries) <= self.maximum:
            return
        means = torch.stack([rows.mean(0) for _, rows in self.entries])
        vectors = means.flatten(1).double()
        vectors /= vectors.norm(dim=1, keepdim=True)
        similarity = (vectors @ vectors.T).fill_diagonal_(-torch.inf)
        first, second = sorted(divmod(int(similarity.argmax()), len(vectors)))
        ids = self.entries[first][0] + self.entries[second][0]
        self.entries = [entry for index, entry in enumerate(self.entries) if index not in (first, second)]
        self.entries.append((ids, ((means[first] + means[second]) / 2)[None]))

    def delete(self, document_id: str) -> None:
        self.entries = [entry for entry in self.entries if document_id not in entry[0]]


@settings(max_examples=40, deadline=None)
@given(
    maximum=st.integers(1, 8),
    steps=st.lists(
        st.tuples(st.integers(1, 5), st.integers(1, 3), st.one_of(st.none(), st.integers(0, 30))), max_size=9
    ),
    seed=st.integers(0, 2**32),
)
def test_nearest_averaging_is_the_plain_loop(maximum: int, steps: list[tuple[int, int, int | None]], seed: int) -> None:
    """Whatever the grouping of arrivals, their number of rows, and the deletions in between."""
    bounded, expected = BoundedBank(MemoryBank("f00d"), maximum, "nearest-averaging"), BruteForce(maximum)
    arrived = 0
    for count, rows, forgotten in steps:
        phi = random_phi(seed + arrived, count * rows)
        batch = documents(arrived, arrived + count)
        arrived += count
        bounded.put(batch, phi, [rows] * count)
        for document, part in zip(batch, phi.split(rows)):
            expected.put(document.id, part)
        if forgotten is not None and str(forgotten) in bounded.bank:
            bounded.bank.delete(str(forgotten))
            expected.delete(str(forgotten))
    assert contents(bounded.bank) == {ids: phi.flatten().tolist() for ids, phi in expected.entries}


@settings(max_examples=40, deadline=None)
@given(
    changes=st.lists(st.tuples(st.booleans(), st.integers(0, 2**16)), max_size=60),
    copies=st.integers(1, 4),
)
def test_the_closest_pair_of_a_changing_set(changes: list[tuple[bool, int]], copies: int) -> None:
    """Its similarity is the highest there is, also among vectors of which several are equal."""
    capacity, held = 12, dict[int, Tensor]()
    closest = ClosestPair(capacity, 4)
    for key, (is_new, number) in enumerate(changes):
        if is_new and len(held) < capacity:
            held[key] = torch.randn(4, generator=torch.Generator().manual_seed(number // copies))
            closest.add(key, held[key])
        elif held:
            gone = sorted(held)[number % len(held)]
            del held[gone]
            closest.remove(gone)
        if len(held) < 2:
            with pytest.raises(ValueError, match="two vectors"):
                closest.pair()
            continue
        first, second = closest.pair()
        assert first < second
        vectors = torch.nn.functional.normalize(torch.stack(list(held.values())).double(), dim=1)
        similarity = (vectors @ vectors.T).fill_diagonal_(-torch.inf)
        place = list(held).index
        assert similarity[place(first), place(second)] == pytest.approx(float(similarity.max()), abs=1e-7)


def test_many_vectors_are_searched_block_by_block() -> None:
    vectors = torch.randn(300, 5, generator=torch.Generator().manual_seed(0))
    closest = ClosestPair(300, 5)
    for key, vector in enumerate(vectors):
        closest.add(key, vector)
    unit = torch.nn.functional.normalize(vectors.double(), dim=1)
    similarity = (unit @ unit.T).fill_diagonal_(-torch.inf)
    for _ in range(290):
        first, second = divmod(int(similarity.argmax()), 300)
        assert closest.pair() == (min(first, second), max(first, second))
        closest.remove(first)
        similarity[first] = similarity[:, first] = -torch.inf


def test_memory_of_zeros_is_no_division_by_zero() -> None:
    bounded = BoundedBank(MemoryBank("f00d"), 2, "nearest-averaging")
    bounded.put(documents(0, 3), torch.zeros(3, TOKENS, WIDTH))
    assert bounded.bank.phi.tolist() == torch.zeros(2, TOKENS, WIDTH).tolist()


@every_method
@settings(max_examples=25, deadline=None)
@given(maximum=st.integers(1, 6), groups=st.lists(st.integers(0, 7), max_size=6), seed=st.integers(0, 99))
def test_the_limit_holds_and_every_document_is_accounted_for(
    method: ReductionMethod, maximum: int, groups: list[int], seed: int
) -> None:
    bounded = BoundedBank(MemoryBank("f00d"), maximum, method, seed=seed)
    arrived, pruned = 0, list[str]()
    for size in groups:
        pruned += bounded.put(documents(arrived, arrived + size), random_phi(arrived, size))
        arrived += size
        assert len(list(bounded.bank)) == min(maximum, arrived)
    assert sorted(pruned + bounded.bank.document_ids) == sorted(str(number) for number in range(arrived))
    averaged = sum(len(entry.members) - 1 for entry in bounded.bank)
    assert len(pruned) + averaged == max(0, arrived - maximum)
    for entry in bounded.bank:
        for member in entry.members:
            assert member.metadata == {"n": int(member.document_id)}
            [document] = documents(int(member.document_id), int(member.document_id) + 1)
            assert member.content_hash == content_hash(document)


@every_method
def test_the_outcome_depends_on_order_and_seed_alone(method: ReductionMethod) -> None:
    """Not on the grouping into calls, and not on a new start in between."""
    phi = random_phi(7, 40)

    def run(seed: int, *cuts: int, restarts: bool = False) -> dict[tuple[str, ...], list[float]]:
        bounded = BoundedBank(MemoryBank("f00d"), 12, method, seed=seed)
        for first, stop in zip((0, *cuts), (*cuts, 40)):
            if restarts:
                bounded = BoundedBank(bounded.bank, 12, method, seed=seed)
            bounded.put(documents(first, stop), phi[first:stop])
        return contents(bounded.bank)

    once = run(0)
    assert run(0, 1, 13, 14, 39) == once
    assert run(0, 5, 20, 30, restarts=True) == once
    assert (run(1) == once) == (method == "nearest-averaging")


@every_method
def test_a_bank_on_disk_goes_on_where_it_was(method: ReductionMethod, tmp_path: Path) -> None:
    """Closed and opened again, it is reduced as one that stayed in memory."""
    phi = random_phi(7, 20)
    in_memory = BoundedBank(MemoryBank("f00d"), 6, method)
    for first in (0, 10):
        with (
            MemoryBank.open(tmp_path / "bank", write=True) if first else MemoryBank.create(tmp_path / "bank", "f00d")
        ) as bank:
            BoundedBank(bank, 6, method).put(documents(first, first + 10), phi[first : first + 10])
            bank.commit()
        in_memory.put(documents(first, first + 10), phi[first : first + 10])
    with MemoryBank.open(tmp_path / "bank") as bank:
        assert contents(bank) == contents(in_memory.bank)


@every_method
def test_a_full_bank_is_reduced_to_the_limit(method: ReductionMethod) -> None:
    """By nearest averaging to what it would have become had it grown under the limit."""
    bank = MemoryBank("f00d")
    bank.put(documents(0, 20), random_phi(3, 20))
    bounded = BoundedBank(bank, 6, method)
    forgotten = bounded.put([], random_phi(0, 0))
    held = contents(bank)
    assert len(held) == 6
    assert len(forgotten) + sum(len(ids) - 1 for ids in held) == 14
    assert bounded.put([], random_phi(0, 0)) == ()
    assert contents(bank) == held
    if method == "nearest-averaging":
        grown = BoundedBank(MemoryBank("f00d"), 6, method)
        grown.put(documents(0, 20), random_phi(3, 20))
        assert {frozenset(ids) for ids in contents(bank)} == {frozenset(ids) for ids in contents(grown.bank)}


def test_random_choices_reach_every_entry() -> None:
    """The newest no less than the oldest."""
    gone = set[str]()
    for seed in range(60):
        bounded = BoundedBank(MemoryBank("f00d"), 3, "random-pruning", seed=seed)
        gone |= set(bounded.put(documents(0, 4), random_phi(0, 4)))
    assert gone == {"0", "1", "2", "3"}


@pytest.mark.parametrize("method", METHODS[1:])
def test_averaging_gives_the_mean_of_two(method: ReductionMethod) -> None:
    bounded = BoundedBank(MemoryBank("f00d"), 1, method)
    phi = random_phi(0, 3)
    bounded.put(documents(0, 2), phi, [2, 1])
    (entry,) = bounded.bank
    torch.testing.assert_close(entry.phi, ((phi[:2].mean(0) + phi[2]) / 2)[None])


def test_updating_a_document_removes_the_entry_that_it_was_part_of() -> None:
    bounded = BoundedBank(MemoryBank("f00d"), 5, "nearest-averaging")
    bounded.put(documents(0, 6), random_phi(1, 6))
    merged = next(ids for ids in contents(bounded.bank) if len(ids) > 1)
    forgotten = bounded.put([Document(merged[0], "new text")], random_phi(9, 1))
    assert set(forgotten) == set(merged[1:])
    assert set(bounded.bank.document_ids) == {"0", "1", "2", "3", "4", "5"} - set(merged[1:])
    assert bounded.bank[merged[0]].phi.tolist() == random_phi(9, 1).tolist()


def test_a_refused_document_changes_nothing() -> None:
    bounded = BoundedBank(MemoryBank("f00d"), 2, "nearest-averaging")
    bounded.put(documents(0, 2), random_phi(0, 2))
    before = contents(bounded.bank)
    with pytest.raises(BankError):
        bounded.put([Document("a", ""), Document("a", "")], random_phi(1, 2))
    assert contents(bounded.bank) == before


@every_method
def test_a_row_that_is_refused_late_changes_nothing(method: ReductionMethod) -> None:
    bounded, other = (BoundedBank(MemoryBank("f00d"), 3, method) for _ in range(2))
    for one in (bounded, other):
        one.put(documents(0, 3), random_phi(0, 3))
    before, phi = contents(bounded.bank), random_phi(1, 4)
    phi[3, 0, 0] = torch.nan
    with pytest.raises(BankError, match="row 0 of 1 rows of memory tokens has numbers that are not finite"):
        bounded.put(documents(3, 7), phi)
    assert contents(bounded.bank) == before
    for one in (bounded, other):
        one.put(documents(3, 7), random_phi(2, 4))
    assert contents(bounded.bank) == contents(other.bank)


def test_faulty_options() -> None:
    with pytest.raises(ConfigError, match=r"'oldest'.*nearest-averaging"):
        BoundedBank(MemoryBank("f00d"), 2, "oldest")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="maximum of 0"):
        BoundedBank(MemoryBank("f00d"), 0, "random-pruning")
