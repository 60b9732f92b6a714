"""The projected bank against a projection of the whole bank made anew."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mac_rag.bank.bank import MemoryBank
from mac_rag.bank.projection import ProjectedBank
from mac_rag.data.types import Document
from mac_rag.errors import BankError
from mac_rag.nn.aggregation import AggregationNetwork
from mac_rag.nn.attended_bank import AttendedBank
from mac_rag.nn.attention import direct_attention
from mac_rag.nn.bank_view import BankView
from mac_rag.nn.memory_tokens import MemoryTokens
from tests.bank.helpers import whole_keys

TOKENS, WIDTH, BLOCKS = 3, 8, 2
ROW_BYTES = TOKENS * BLOCKS * 2 * 2 * 4 * 8  # keys and values of 2 heads of 4, in double precision
ROW_NORMS = BLOCKS * 2  # one of the keys of each head
ALL, NONE = 1 << 30, 0


def network(prior_width: int = 4) -> AggregationNetwork:
    torch.manual_seed(0)
    built = AggregationNetwork(WIDTH, blocks=BLOCKS, heads=2, head_width=4, prior_width=prior_width).double()
    torch.nn.init.normal_(built.bank_norm.weight)
    for block in built.blocks:
        torch.nn.init.normal_(block.to_key.weight)
    return built


def put(bank: MemoryBank, name: str, rows: int, seed: int) -> None:
    phi = torch.randn(rows, TOKENS, WIDTH, generator=torch.Generator().manual_seed(seed))
    bank.put([Document(name, f"{name} {seed}")], phi, [rows])


def filled(rows: int) -> MemoryBank:
    bank = MemoryBank("f00d")
    for number in range(rows):
        put(bank, f"document {number}", 1, number)
    return bank


def view(bank: MemoryBank, budget_bytes: int = ALL, chunk_rows: int = 2, prior_width: int = 4) -> ProjectedBank:
    return ProjectedBank(
        network(prior_width), bank, device="cpu", dtype=torch.float64, budget_bytes=budget_bytes, chunk_rows=chunk_rows
    )


def bytes_of(projected: ProjectedBank) -> int:
    """Those of keys and values that are kept, and of the norms."""
    tensors = [tensor for pair in projected._cache._kept for tensor in pair]
    return sum(tensor.nbytes for tensor in (*tensors, projected._overview.longest))


def whole(bank: BankView, block: int) -> tuple[Tensor, Tensor]:
    """Keys and values of all rows: the chunks joined, `[H, K, T, d]` or `[B, H, K, T, d]`."""
    keys, values = zip(*bank.chunks(block), strict=True)
    return torch.cat(keys, -3), torch.cat(values, -3)


def assert_same(projected: ProjectedBank, **tolerance: float) -> None:
    """The view is what a projection of the whole bank is."""
    if not len(projected.bank):
        assert projected.documents == 0
        assert not list(projected.chunks(0))
        return
    phi = projected.bank.phi.double()
    expected = projected.network.project(MemoryTokens(phi))
    assert projected.documents == len(phi)
    for block in range(BLOCKS):
        for fast, plain in zip(whole(projected, block), (expected.keys[block], expected.values[block])):
            torch.testing.assert_close(fast.double(), plain, **tolerance)
        if projected.network.prior is not None:
            norms = projected.longest(block)
            torch.testing.assert_close(
                norms.double(), whole(projected, block)[0].double().norm(dim=-1).amax(-1), **tolerance
            )
    keys = projected.prior_keys
    keys = keys if keys is None else whole_keys(keys)
    torch.testing.assert_close(keys, expected.prior_keys)


@contextmanager
def counted(projected: ProjectedBank) -> Iterator[list[int]]:
    """The rows of each projection that is made meanwhile."""
    rows: list[int] = []
    layer = projected.network.blocks[0].to_key
    hook = layer.register_forward_hook(lambda module, inputs, output: rows.append(len(output)))
    yield rows
    hook.remove()


@settings(max_examples=60, deadline=None)
@given(
    steps=st.lists(
        st.tuples(st.sampled_from(["put", "delete", "refresh"]), st.sampled_from("abcdefg"), st.integers(1, 3)),
        max_size=40,
    ),
    budget=st.sampled_from([NONE, 6 * ROW_BYTES, ALL]),
    chunk_rows=st.sampled_from([1, 2, 5]),
    prior_width=st.sampled_from([0, 4]),
)
def test_it_follows_the_bank(steps: list[tuple[str, str, int]], budget: int, chunk_rows: int, prior_width: int) -> None:
    """Whatever happened to the bank, the view is a fresh projection, made by projecting nothing but new rows."""
    bank = MemoryBank("f00d")
    projected = view(bank, budget, chunk_rows, prior_width)
    known: set[int] = set()
    for number, (step, name, rows) in enumerate([*steps, ("refresh", "", 0)]):
        if step == "put":
            put(bank, name, rows, number)
        elif step == "delete" and name in bank:
            bank.delete(name)
        elif step == "refresh":
            current = set(bank.row_keys.tolist())
            with counted(projected) as made:
                projected.refresh()
                passes = [list(projected.chunks(block)) for block in range(BLOCKS) if budget == ALL]
            if passes:  # a row is projected for its norms, and when it is read
                assert sum(made) == len(current - known) * (2 if prior_width else 1)
            assert projected.cached == (len(current) * ROW_BYTES <= budget)
            assert sum(tensor.nbytes for pair in projected._cache._kept for tensor in pair) <= budget
            known = current
    assert_same(projected)


def test_beyond_the_budget_each_pass_projects_each_row_once() -> None:
    projected = view(filled(5), NONE)
    assert bytes_of(projected) == 5 * 8 * ROW_NORMS
    with counted(projected) as made:
        whole(projected, 0)
    assert made == [2, 2, 1]
    put(projected.bank, "another", 1, 9)
    with counted(projected) as made:
        projected.refresh()
    assert made == [1]  # for its norms
    unbounded = view(filled(5), NONE, prior_width=0)
    put(unbounded.bank, "another", 1, 9)
    with counted(unbounded) as made:
        unbounded.refresh()
    assert not made


def test_many_small_changes_leave_few_chunks() -> None:
    bank = MemoryBank("f00d")
    projected = view(bank, chunk_rows=4)
    for number in range(32):
        put(bank, f"{number}", 1, number)
        projected.refresh()
    assert len(list(projected.chunks(0))) == 8
    for number in range(32):
        if number % 4:
            bank.delete(f"{number}")
            projected.refresh()
    assert len(list(projected.chunks(0))) <= 4
    assert_same(projected)


@pytest.mark.parametrize("budget", [ALL, NONE])
def test_in_half_precision(budget: int) -> None:
    projected = ProjectedBank(
        network(), filled(7), device="cpu", dtype=torch.bfloat16, budget_bytes=budget, chunk_rows=3
    )
    assert {tensor.dtype for block in range(BLOCKS) for tensor in whole(projected, block)} == {torch.bfloat16}
    if budget:
        assert bytes_of(projected) == 7 * (ROW_BYTES // 4 + 8 * ROW_NORMS)
    assert_same(projected, rtol=2**-8, atol=1e-6)


@settings(max_examples=40, deadline=None)
@given(data=st.data(), budget=st.sampled_from([ALL, NONE]), chunk_rows=st.sampled_from([1, 3, 8]))
def test_a_selection_is_indexing(data: st.DataObject, budget: int, chunk_rows: int) -> None:
    rows = data.draw(st.integers(1, 9))
    projected = view(filled(rows), budget, chunk_rows)
    questions, chosen = data.draw(st.integers(1, 4)), data.draw(st.integers(1, rows))
    index = torch.tensor([data.draw(st.permutations(range(rows)))[:chosen] for _ in range(questions)])
    selected, expected = projected.select(index), projected.network.project(MemoryTokens(projected.bank.phi.double()))
    narrower = torch.tensor([data.draw(st.permutations(range(chosen)))[:1] for _ in range(questions)])
    for bank, wanted in ((selected, index), (selected.select(narrower), index.gather(1, narrower))):
        assert bank.documents == wanted.shape[1]
        torch.testing.assert_close(bank.prior_keys.summaries, expected.prior_keys[wanted])
        for block in range(BLOCKS):
            for fast, plain in zip(whole(bank, block), (expected.keys[block], expected.values[block])):
                torch.testing.assert_close(fast, plain[:, wanted].transpose(0, 1))


def test_a_selection_projects_a_row_once_for_all_questions() -> None:
    projected = view(filled(9), NONE, chunk_rows=4)
    with counted(projected) as made:
        whole(projected.select(torch.tensor([[1, 5], [5, 1]])), 0)
    assert made == [2]


@pytest.mark.parametrize("budget", [ALL, NONE])
@pytest.mark.parametrize("prior_width", [0, 4])
def test_the_network_answers_the_same_from_it(budget: int, prior_width: int) -> None:
    projected = view(filled(7), budget, 3, prior_width)
    generator = torch.Generator().manual_seed(1)
    question = MemoryTokens(torch.randn(2, TOKENS, WIDTH, generator=generator, dtype=torch.float64))
    everything = torch.arange(7).expand(2, -1)
    plain = projected.network.project(MemoryTokens(projected.bank.phi.double()))
    expected, mass = projected.network(question, plain, attention=direct_attention, mass=True)
    for bank in (projected, projected.select(everything)):
        phi, found = projected.network(question, bank, mass=True)
        torch.testing.assert_close(phi, expected)
        torch.testing.assert_close(found, mass)


def test_a_view_of_an_earlier_version_is_refused() -> None:
    projected = view(filled(3))
    passing = projected.chunks(0)
    put(projected.bank, "new", 1, 9)
    for use in (lambda: next(passing), lambda: projected.select(torch.tensor([[0]])), lambda: projected.rows(0, 0)):
        with pytest.raises(BankError, match="refresh"):
            use()


def test_no_gradients_are_kept() -> None:
    projected = view(filled(3))
    assert not any(tensor.requires_grad for tensor in itertools.chain(*projected.chunks(0)))
    assert not projected.prior_keys.summaries(torch.arange(3)).requires_grad


@pytest.mark.parametrize("mass", [False, True])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("budget", [NONE, 12 * ROW_BYTES, ALL])
def test_of_a_sharp_prior_only_the_rows_that_can_matter_are_projected(budget: int, masked: bool, mass: bool) -> None:
    bank = filled(200)
    projected = view(bank, budget, chunk_rows=16)
    for block in projected.network.blocks:
        block.prior_sharpness = 40.0
    projected.network.eval()
    generator = torch.Generator().manual_seed(5)
    for number in range(4):
        question = MemoryTokens(torch.randn(2, TOKENS, WIDTH, generator=generator).double())
        mask = torch.rand(2, bank.row_keys.numel(), generator=generator) > 0.4 if masked else None
        with torch.no_grad(), counted(projected) as made:
            fast, shares = projected.network(question, projected, mask=mask, mass=mass)
        view_of_all = projected.network.project(MemoryTokens(bank.phi.double()))
        expected, of_all = projected.network(question, view_of_all, mask=mask, mass=mass, attention=direct_attention)
        torch.testing.assert_close(fast, expected)
        torch.testing.assert_close(shares, of_all)
        assert sum(made) <= 60  # of 200, for two questions
        if number == 1:
            bank.delete("document 7")
            put(bank, "document 0", 1, 1000)
            projected.refresh()


def test_rows_that_cannot_matter_have_next_to_nothing_of_the_attention_in_the_order_of_the_prior() -> None:
    projected = view(filled(200), ALL, chunk_rows=16)
    network = projected.network.eval()
    for block in network.blocks:
        block.prior_sharpness = 10.0
    question = MemoryTokens(torch.randn(2, TOKENS, WIDTH, generator=torch.Generator().manual_seed(5)).double())
    visible = torch.arange(projected.documents).remainder(3) > 0
    with torch.no_grad():
        scores = network.prior_scores(question, projected).masked_fill(~visible, -torch.inf)
        attended = AttendedBank(
            network, projected, network.prior_queries(question), mask=visible.expand(2, -1), dtype=torch.float64
        )
        block = network.blocks[0]
        query = torch.randn(2, block.heads, TOKENS, block.to_query.out_features // block.heads).double()
        _, rows, floor = attended.chunks(0, query)
        assert rows is not None
        assert len(rows) < 100
        mass = attended.of_all_rows(0, torch.zeros(2, len(rows)).double(), rows, floor)
    left_out = visible.clone()
    left_out[rows] = False
    assert (mass[:, left_out] > 0).all()
    assert not mass[:, ~left_out].any()
    assert (mass.sum(1) < torch.finfo(torch.float64).eps).all()
    for one, ranked in zip(mass[:, left_out], scores[:, left_out], strict=True):
        assert one.argsort().equal(ranked.argsort())
