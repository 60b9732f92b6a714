"""Rows as codes of a product quantizer: against plain numpy, and on disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mac_rag.bank import MemoryBank
from mac_rag.bank.copies import backup, restore
from mac_rag.bank.rows import RowLayout
from mac_rag.bank.verify import verify
from mac_rag.data.types import Document
from mac_rag.errors import BankError
from mac_rag.nn.product_quantizer import ProductQuantizer

T, R, D, M = 4, 2, 6, 3
MODEL = "f00d" * 16
LAYOUT = RowLayout(lexical_vectors=R, summary=5, prior_keys=3)


def phi_of(rows: int, seed: int, size: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    phi = size * torch.randn(rows, T + R, D, generator=generator)
    phi[:, T:] *= torch.rand(rows, R, D, generator=generator) < 0.3
    return phi


QUANTIZER = ProductQuantizer.fit(phi_of(200, 0)[:, :T], M, fingerprint=MODEL, whole=1)


def expected_of(phi: Tensor, quantizer: ProductQuantizer = QUANTIZER) -> Tensor:
    """What a bank gives back, by plain numpy: the nearest codeword of each group by its distance."""
    mean, rotation, words = (
        each.double().numpy() for each in (quantizer.mean, quantizer.rotation, quantizer.codewords)
    )
    kept = phi.to(torch.bfloat16).double().numpy()
    turned = (phi[:, 1:T].double().numpy() - mean) @ rotation
    for group in range(M):
        place = slice(group * D // M, (group + 1) * D // M)
        distance = np.square(turned[..., None, place] - words[group]).sum(-1)
        turned[..., place] = words[group][distance.argmin(-1)]
    kept[:, 1:T] = turned @ rotation.T + mean
    return torch.from_numpy(kept).float()


def put(bank: MemoryBank, names: str, seed: int, quantizer: ProductQuantizer | None = QUANTIZER) -> Tensor:
    """Puts documents with these names, as an engine does, and returns what should be kept of them."""
    phi = phi_of(len(names), seed)
    bank.keep_rows_as(LAYOUT, quantizer)
    bank.put([Document(name, name) for name in names], phi, summarise=lambda kept: kept[:, 0, :5])
    return expected_of(phi)


def made(folder: Path, **settings: Any) -> Tensor:
    """A bank of six documents in two segments, of which one document was deleted; and its rows."""
    with MemoryBank.create(folder, MODEL, rows="pq", **settings) as bank:
        kept = [put(bank, "abcd", 1)]
        bank.commit()
        kept.append(put(bank, "ef", 2))
        bank.commit()
        bank.delete("b")
        bank.commit()
    return torch.cat(kept)[[0, 2, 3, 4, 5]]


def assert_kept(bank: MemoryBank, expected: Tensor) -> None:
    torch.testing.assert_close(bank.phi, expected, rtol=1e-5, atol=1e-5)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 9), st.integers(0, 999), st.sampled_from([0.0, 0.1, 1.0, 30.0]))
def test_each_group_becomes_its_nearest_codeword(rows: int, seed: int, size: float) -> None:
    layout = LAYOUT.quantized(QUANTIZER)
    phi = phi_of(rows, seed, size)
    encoded = layout.encode(phi, QUANTIZER)
    kept = layout.decode(encoded, QUANTIZER)
    torch.testing.assert_close(kept, expected_of(phi), rtol=1e-4, atol=1e-5)
    assert layout.row_shape(encoded) == (T, D)
    assert sum(len(row.codes) + len(row.summary) for row in layout.pack(encoded)) == rows * layout.row_bytes(T, D)
    assert encoded["product_codes"].shape == (rows, T - 1, M)
    # What was rounded once stays what it is, so a bank can be copied again and again.
    torch.testing.assert_close(layout.decode(layout.encode(kept, QUANTIZER), QUANTIZER), kept, rtol=1e-5, atol=1e-5)


def test_it_learns_what_varies_together() -> None:
    """Numbers that vary alike in pairs are far apart in a token: only a rotation brings them into one group."""
    generator = torch.Generator().manual_seed(1)
    causes = torch.randn(4000, 1, 8, generator=generator) * torch.tensor([9.0, 5, 3, 2, 1, 0.5, 0.1, 0.1])
    mixed = causes @ torch.linalg.qr(torch.randn(8, 8, generator=generator))[0] + 5
    quantizer = ProductQuantizer.fit(mixed[:3000], 4, fingerprint=MODEL)
    torch.testing.assert_close(quantizer.rotation.T @ quantizer.rotation, torch.eye(8), rtol=0, atol=1e-5)
    error = (quantizer.decode(quantizer.encode(mixed[3000:])) - mixed[3000:]).square().mean()
    assert error < 0.01 * mixed.var()  # 0.005; in the order of the numbers 0.03
    again = ProductQuantizer.fit(mixed[:3000], 4, fingerprint=MODEL)
    assert all(torch.equal(again.tensors[name], tensor) for name, tensor in quantizer.tensors.items())


def test_a_bank_on_disk(tmp_path: Path) -> None:
    """Through commits, deletions, a new process, compaction, a copy and a backup."""
    expected = made(tmp_path / "bank")
    opened = MemoryBank.open(tmp_path / "bank")
    assert opened.quantizer is not None
    assert opened.layout == LAYOUT.quantized(QUANTIZER)
    assert opened.row_shape == (T + R, D)
    assert_kept(opened, expected)
    torch.testing.assert_close(opened["d"].phi, expected[2:3], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(opened.take(torch.tensor([3, 0])), expected[[3, 0]], rtol=1e-5, atol=1e-5)
    summaries = torch.cat([part.summaries for part in opened.overview()])
    torch.testing.assert_close(summaries, expected[:, 0, :5], rtol=0, atol=0)  # of bf16, which has their numbers
    assert opened.nbytes <= 5 * (2 * 4 + 3 * 2 + 12 * 6 + 2 * D + (T - 1) * M)
    with MemoryBank.open(tmp_path / "bank", write=True) as bank:
        more = put(bank, "g", 3, quantizer=None)  # it has its codebooks
        bank.commit()
    assert opened.refresh()
    assert_kept(opened, torch.cat([expected, more]))
    opened.save(tmp_path / "copy")
    backup(tmp_path / "bank", tmp_path / "backup")
    for place in ("bank", "copy", "backup"):
        assert verify(tmp_path / place).clean
        assert_kept(MemoryBank.open(tmp_path / place), torch.cat([expected, more]))


def test_codebooks_come_with_the_first_rows(tmp_path: Path) -> None:
    with MemoryBank.create(tmp_path / "bank", MODEL, rows="pq") as bank:
        assert verify(tmp_path / "bank").clean
        with pytest.raises(BankError, match=r"takes its codebooks from the model: put documents with an engine"):
            bank.put([Document("a", "a")], phi_of(1, 1))
        with pytest.raises(BankError, match=r"model f00df00df00d has no codebooks to keep rows as 'pq'; fit them with"):
            put(bank, "a", 1, None)
        another = ProductQuantizer(MODEL[::-1], 1, QUANTIZER.mean, QUANTIZER.rotation, QUANTIZER.codewords)
        with pytest.raises(BankError, match=r"were fitted to the memory tokens of model d00fd00fd00f, not to those of"):
            put(bank, "a", 1, another)
        bank.keep_rows_as(LAYOUT, QUANTIZER)
        with pytest.raises(BankError, match=r"rows of 3 memory tokens of width 6 do not fit the bank's codebooks"):
            bank.put([Document("a", "a")], phi_of(1, 1)[:, 1:])
        put(bank, "a", 1)
        bank.rollback()
        assert bank.quantizer is None
        assert bank.layout == RowLayout(dtype="pq")
        expected = put(bank, "ab", 1)
        bank.commit()
        bank.delete("a")
        bank.delete("b")
        bank.commit()
        assert MemoryBank.open(tmp_path / "bank").quantizer is not None
        put(bank, "ab", 1, another)  # it has its own
        bank.commit()
    assert_kept(MemoryBank.open(tmp_path / "bank"), expected)


def test_a_backup_with_other_codebooks_brings_them(tmp_path: Path) -> None:
    made(tmp_path / "bank")
    other = ProductQuantizer(MODEL, 1, QUANTIZER.mean + 1, QUANTIZER.rotation, QUANTIZER.codewords)
    with MemoryBank.create(tmp_path / "other", MODEL, rows="pq") as bank:
        put(bank, "a", 1, other)
        bank.commit()
        expected = bank.phi
    reader = MemoryBank.open(tmp_path / "bank")
    restore(tmp_path / "other", tmp_path / "bank", replace=True)
    assert reader.refresh()
    assert torch.equal(reader.phi, expected)
    torch.testing.assert_close(expected, expected_of(phi_of(1, 1), other), rtol=1e-5, atol=1e-5)
