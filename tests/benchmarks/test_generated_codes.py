"""Banks of mixed codes: what they say of their rows is what the network computes from them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks import generated_codes
from benchmarks.generated_codes import fill_with_codes
from mac_rag.data.types import Document
from mac_rag.memory import MemoryBank
from mac_rag.memory.storage.repair import verify
from mac_rag.memory.views.overview import put_with_overview, summarise
from mac_rag.nn.aggregation import AggregationNetwork
from mac_rag.nn.product_quantizer import ProductQuantizer

TOKENS, LEXICAL, WIDTH = 4, 2, 8
MODEL = "beef" * 16


def test_a_bank_goes_on_where_it_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generated_codes, "_GROUP", 8)
    torch.manual_seed(0)
    network = AggregationNetwork(
        WIDTH, blocks=2, heads=2, head_width=4, prior_width=4, sentence_token=True, lexical_vectors=LEXICAL
    ).eval()
    phi = torch.randn(100, TOKENS + LEXICAL, WIDTH)
    phi[:, TOKENS:] *= torch.rand(100, LEXICAL, WIDTH) < 0.2
    network.quantizer = ProductQuantizer.fit(phi[:, :TOKENS], 2, fingerprint=MODEL, whole=1)
    originals = MemoryBank(MODEL, rows="pq")
    put_with_overview(originals, network, [Document(f"{n}", "") for n in range(12)], phi[:12], [1] * 12)
    for count in (16, 30):
        fill_with_codes(tmp_path / "bank", originals, network, count, seed=0)
    fill_with_codes(tmp_path / "whole", originals, network, 30, seed=0)
    bank, whole = MemoryBank.open(tmp_path / "bank"), MemoryBank.open(tmp_path / "whole")
    assert verify(tmp_path / "bank").clean
    assert bank.document_ids == [f"{n}" for n in range(30)]
    torch.testing.assert_close(bank.phi[:12], originals.phi, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(bank.phi[:16], whole.phi[:16], rtol=1e-5, atol=1e-5)
    assert len(bank.phi.flatten(1).unique(dim=0)) == 30
    known = torch.cat([rows.summaries for _, rows in bank.overview()])
    computed = summarise(network, bank.phi)
    torch.testing.assert_close(known[:, 4:], computed[:, 4:], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(known[:, :4], computed[:, :4], rtol=2**-8, atol=1e-5)
