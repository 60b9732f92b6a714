"""What a bank keeps of its rows, and a view made of it: what a view made of the rows themselves would have."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mac_rag.bank.bank import MemoryBank
from mac_rag.bank.overview import keeps_overview, layout_for, put_with_overview
from mac_rag.bank.projection import ProjectedBank
from mac_rag.data.types import Document
from mac_rag.nn.aggregation import AggregationNetwork
from mac_rag.nn.attention import direct_attention
from mac_rag.nn.memory_tokens import MemoryTokens
from tests.bank.helpers import rows_read, whole_keys

TOKENS, LEXICAL, WIDTH = 3, 2, 8
CLOSE = {"rtol": 1e-5, "atol": 1e-5}  # summaries are kept in single precision
BUDGETS = [1 << 30, 0]


def network(lexical_vectors: int = LEXICAL, sharpness: float = 6.0) -> AggregationNetwork:
    torch.manual_seed(0)
    return (
        AggregationNetwork(
            WIDTH,
            blocks=2,
            heads=2,
            head_width=4,
            prior_width=4,
            prior_sharpness=sharpness,
            lexical_vectors=lexical_vectors,
        )
        .double()
        .eval()
    )


def rows_of(count: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    phi = torch.randn(count, TOKENS + LEXICAL, WIDTH, generator=generator)
    phi[:, TOKENS:] *= torch.rand(count, LEXICAL, WIDTH, generator=generator) < 0.2
    return phi


def view(net: AggregationNetwork, bank: MemoryBank, budget: int) -> ProjectedBank:
    return ProjectedBank(net, bank, device="cpu", dtype=torch.float64, budget_bytes=budget, chunk_rows=2)


def read(projected: ProjectedBank) -> dict[str, Any]:
    """All that attention asks of a view, in the order in which it may ask."""
    index = torch.arange(projected.documents)[::2]
    found: dict[str, Any] = {"prior keys": whole_keys(projected.prior_keys)}
    for block in range(2):
        found[f"norms {block}"] = projected.longest(block)
        found[f"rows {block}"] = torch.stack(projected.rows(block, index))
        keys, values = zip(*projected.chunks(block), strict=True)
        found[f"all rows {block}"] = torch.stack([torch.cat(keys, 1), torch.cat(values, 1)])
        found[f"rows {block} again"] = torch.stack(projected.rows(block, index))
    return found


KINDS = ["put", "put", "delete", "merge", "refresh", "read"]
STEPS = st.lists(st.tuples(st.sampled_from(KINDS), st.integers(0, 5), st.integers(1, 3)), min_size=1, max_size=8)


@settings(deadline=None)
@given(steps=STEPS, budget=st.sampled_from(BUDGETS), lexical_vectors=st.sampled_from([0, LEXICAL]))
def test_it_follows_the_bank(steps: list[tuple[str, int, int]], budget: int, lexical_vectors: int) -> None:
    net = network(lexical_vectors)
    plain, kept = MemoryBank("f00d"), MemoryBank("f00d", rows="fp32")
    followed: ProjectedBank | None = None
    for number, (step, name, rows) in enumerate([("put", 0, 2), *steps, ("put", 9, 1)]):
        document = f"document {name}"
        if step == "put":
            phi = rows_of(rows, number)
            plain.put([Document(document, str(number))], phi, [rows])
            put_with_overview(kept, net, [Document(document, str(number))], phi, [rows])
        elif step == "delete" and document in plain and len(plain) > 1:
            for bank in (plain, kept):
                bank.delete(document)
        elif step == "merge" and len(plain) > 1:
            for bank in (plain, kept):
                bank.merge(bank.document_ids[:2], rows_of(1, number))
        elif step == "refresh":
            followed = followed or view(net, kept, budget)
            followed.refresh()
        elif step == "read" and followed is not None and len(plain):
            followed.refresh()
            read(followed)
    assert keeps_overview(net, kept)
    assert not keeps_overview(net, plain)
    expected = read(view(net, plain, budget))
    for found in (view(net, kept, budget), followed or view(net, kept, budget)):
        found.refresh()
        for name, value in read(found).items():
            torch.testing.assert_close(value, expected[name], **CLOSE, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("budget", BUDGETS)
def test_the_first_question_reads_the_rows_that_can_matter(budget: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a sharp prior: few rows, whether or not all fit into memory; and the result is that of all of them."""
    net, bank = network(sharpness=40.0), MemoryBank("f00d", rows="fp32")
    phi = rows_of(60, 7)
    put_with_overview(bank, net, [Document(f"{number}", "") for number in range(60)], phi, [1] * 60)
    question = MemoryTokens.split(rows_of(1, 8).double(), LEXICAL)
    numbers = rows_read(monkeypatch)
    with torch.no_grad():
        projected = view(net, bank, budget)
        found, _ = net(question, projected)
        assert 0 < sum(numbers) < 30
        whole = net.project(MemoryTokens.split(phi.double(), LEXICAL))
        expected, _ = net(question, whole, attention=direct_attention)
    torch.testing.assert_close(found, expected, **CLOSE)


def test_a_bank_of_another_network_is_read_itself() -> None:
    """Summaries of another width, or other lexical vectors, are nothing that this network knows."""
    bank = MemoryBank("f00d", rows="fp32")
    put_with_overview(bank, network(), [Document("a", "a"), Document("b", "b")], rows_of(2, 1), [1, 1])
    assert bank.layout == layout_for(network()).model_copy(update={"dtype": "fp32"})
    other = network(0)
    assert not keeps_overview(other, bank)
    plain = MemoryBank("f00d")
    plain.put([Document("a", "a"), Document("b", "b")], rows_of(2, 1))
    for name, value in read(view(other, bank, 0)).items():
        torch.testing.assert_close(value, read(view(other, plain, 0))[name])
