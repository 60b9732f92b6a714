"""What earlier versions wrote still opens: `fixtures/format-0.1` holds a checkpoint and a bank of version 0.1.0."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from mac_rag.data.types import Document
from mac_rag.engine import MACEngine
from mac_rag.memory import MemoryBank
from mac_rag.model import MACModel

WRITTEN = Path(__file__).parent / "fixtures" / "format-0.1"
EXPECTED = json.loads((WRITTEN / "expected.json").read_text())
QUESTIONS = ["Who was appointed?", "Who opened the bridge?"]


def test_a_checkpoint_and_its_bank_answer_as_they_did() -> None:
    model = MACModel.from_pretrained(WRITTEN / "checkpoint", device="cpu")
    assert model.fingerprint == EXPECTED["fingerprint"]
    engine = MACEngine(model, MemoryBank.open(WRITTEN / "bank"))
    ids, mass = engine.document_attention(QUESTIONS)
    assert ids == EXPECTED["document_ids"]
    torch.testing.assert_close(mass, torch.tensor(EXPECTED["attention"]), atol=1e-4, rtol=1e-3)
    assert [answer.text for answer in engine.answer(QUESTIONS)] == EXPECTED["answers"]


def test_a_bank_can_be_written_to_again(tmp_path: Path) -> None:
    shutil.copytree(WRITTEN / "bank", tmp_path / "bank")
    model = MACModel.from_pretrained(WRITTEN / "checkpoint", device="cpu")
    with MemoryBank.open(tmp_path / "bank", write=True) as bank:
        engine = MACEngine(model, bank)
        known = Document("a", "Ada Voss was appointed chief engineer in May.", {"source": "reports/may.md"})
        assert engine.adapt([known]).unchanged == 1
        engine.adapt([Document("d", "A ferry sank.")])
    assert MemoryBank.open(tmp_path / "bank").document_ids == ["a", "c", "d"]


@pytest.mark.parametrize("name", sorted(EXPECTED["shipped"]))
def test_banks_of_the_shipped_models_stay_readable(name: str) -> None:
    assert MACModel.from_pretrained(name, device="cpu").fingerprint == EXPECTED["shipped"][name]
