"""Rows as a bank keeps them: what is read is what was put, up to the rounding that the layout states."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mac_rag.bank import MemoryBank
from mac_rag.bank.rows import RowLayout, Summaries
from mac_rag.data.types import Document
from mac_rag.errors import BankError
from tests.bank.helpers import rounded

T, R, D = 3, 2, 5
LAYOUTS = [
    RowLayout(dtype=dtype, lexical_vectors=r, summary=s)
    for dtype in ("fp32", "bf16", "int8")
    for r, s in ((0, 0), (R, 4))
]


def phi_of(rows: int, seed: int) -> Tensor:
    """Memory tokens of any size, and lexical vectors that are mostly zeros, some of them altogether."""
    generator = torch.Generator().manual_seed(seed)
    phi = torch.randn(rows, T + R, D, generator=generator) * 10 ** torch.randn(rows, 1, 1, generator=generator)
    share = torch.rand(rows, 1, 1, generator=generator) - 0.3
    phi[:, T:] *= torch.rand(rows, R, D, generator=generator) < share
    return phi


def assert_rounded(layout: RowLayout, kept: Tensor, phi: Tensor) -> None:
    sparse = layout.lexical_vectors
    tokens = T + R - sparse
    bits = {"fp32": 0.0, "bf16": 2**-8, "int8": 2**-8}[layout.dtype]
    torch.testing.assert_close(kept[:, tokens:], phi[:, tokens:], rtol=bits, atol=0)
    if layout.dtype == "int8":  # half a step of each token's scale
        step = phi[:, :tokens].abs().amax(-1, keepdim=True) / 127
        assert ((kept[:, :tokens] - phi[:, :tokens]).abs() <= 0.5001 * step).all()
    else:
        torch.testing.assert_close(kept[:, :tokens], phi[:, :tokens], rtol=bits, atol=0)


@pytest.mark.parametrize("layout", LAYOUTS, ids=repr)
def test_what_is_kept_is_rounded_and_nothing_else(layout: RowLayout) -> None:
    phi = phi_of(20, 1)
    kept = rounded(layout, phi)
    assert_rounded(layout, kept, phi)
    assert torch.equal(rounded(layout, kept), kept) or layout.dtype == "int8"
    rows = layout.encode(phi)
    phi[:] = 7.0
    assert_rounded(layout, layout.decode(rows), phi_of(20, 1))  # the bank has a copy


@settings(max_examples=50, deadline=None)
@given(layout=st.sampled_from(LAYOUTS), count=st.integers(0, 5), seed=st.integers(0, 99), data=st.data())
def test_rows_that_are_packed_and_unpacked_are_the_same(
    layout: RowLayout, count: int, seed: int, data: st.DataObject
) -> None:
    """All of them, or some in any order; with their summaries beside them."""
    phi = phi_of(count, seed)
    summaries = torch.randn(count, layout.summary)
    rows = layout.summarised(layout.encode(phi), summaries) if layout.summary else layout.encode(phi)
    packed = layout.pack(rows)
    assert len(packed) == count
    index = data.draw(st.lists(st.integers(0, count - 1), max_size=4)) if count else []
    for some in (list(range(count)), index):
        _, summary, places, weights, codes = ([packed[i][column] for i in some] for column in range(5))
        shape = layout.row_shape(rows)
        assert torch.equal(layout.decode(layout.unpack(codes, places, weights, *shape)), layout.decode(rows)[some])
        found = layout.unpack_summaries(summary, places, weights, *shape)
        assert torch.equal(found.summaries, summaries[some])
        sizes = layout.row_bytes(*shape) * len(some), sum(map(len, places)) + sum(map(len, weights))
        assert sum(sizes) == sum(len(blob) for i in some for blob in packed[i][1:])
        twice = Summaries.cat([found, found]).lexical
        assert torch.equal(twice.ends, 2 * found.lexical.ends)
        assert all(map(torch.equal, twice.kept(torch.arange(2 * len(some)) >= len(some)), found.lexical))


def test_numbers_that_a_dtype_does_not_have() -> None:
    phi = torch.full((1, T, D), torch.finfo(torch.float32).max)
    with pytest.raises(BankError, match="not finite in bf16; use dtype fp32"):
        RowLayout(dtype="bf16").encode(phi)
    assert torch.equal(rounded(RowLayout(), phi), phi)
    assert torch.equal(rounded(RowLayout(dtype="int8"), torch.zeros(1, T, D)), torch.zeros(1, T, D))


@pytest.mark.parametrize("layout", LAYOUTS, ids=repr)
def test_a_bank_on_disk(tmp_path: Path, layout: RowLayout) -> None:
    """Through commits, deletions, merged segments, a new process and compaction."""
    documents = [Document(f"{number}", f"text {number}") for number in range(9)]
    phi = phi_of(9, 5)
    summaries = torch.randn(9, 4)
    with MemoryBank.create(tmp_path / "bank", "f00d") as bank:
        bank.keep_rows_as(layout)
        for first in range(0, 9, 3):
            stop = first + 3
            bank.put(documents[first:stop], phi[first:stop], summarise=lambda _, own=summaries[first:stop]: own)
            bank.commit()
        bank.delete("4")
        bank.commit()
        bank.compact()
        bank.keep_rows_as(RowLayout())  # it holds rows, so they stay what they are
    opened = MemoryBank.open(tmp_path / "bank")
    assert opened.layout == layout
    left = [number for number in range(9) if number != 4]
    assert_rounded(layout, opened.phi, phi[left])
    assert opened.row_shape == (T + R, D)
    assert torch.equal(opened["7"].phi, opened.phi[6:7])
    assert torch.equal(opened.take(torch.tensor([5, 0])), opened.phi[[5, 0]])
    if layout.summary:
        kept = Summaries.cat(list(opened.overview()))
        assert torch.equal(kept.summaries, summaries[left])


def test_an_empty_bank_takes_the_layout_of_its_first_rows(tmp_path: Path) -> None:
    rounded = RowLayout(dtype="bf16")
    with MemoryBank.create(tmp_path / "bank", "f00d") as bank:
        bank.keep_rows_as(rounded)
        bank.put([Document("a", "a")], phi_of(1, 1))
        bank.rollback()
        assert bank.layout == RowLayout()
        bank.put([Document("a", "a")], phi_of(1, 1))
        bank.commit()
        bank.keep_rows_as(rounded)
        assert bank.layout == RowLayout()
