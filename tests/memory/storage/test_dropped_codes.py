"""A codebook loses the codes that only deleted documents used, and everything else stays as it was."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from torch import Tensor

from mac_rag.data.types import Document
from mac_rag.errors import BankError
from mac_rag.memory import MemoryBank
from mac_rag.memory.storage.backup import backup
from mac_rag.memory.storage.repair import verify
from tests.faults import faults

CODES = torch.tensor([[1.0, 0, 0], [0, 2.5, 0], [0, 0, 3], [7.25, 7.25, 7.25]])


def row(*codes: int) -> Tensor:
    return CODES[list(codes)][None]


def filled(folder: Path, secure_delete: bool = False) -> Path:
    with MemoryBank.create(folder, "f00d", codebook=CODES, secure_delete=secure_delete) as bank:
        bank.put([Document(name, "") for name in "abc"], torch.cat([row(3, 0), row(0, 1), row(1, 1)]))
        bank.commit()
    return folder


def forgotten(folder: Path) -> None:
    with MemoryBank.open(folder, write=True) as bank:
        bank.delete("a")
        bank.compact()


def trace(folder: Path, code: int) -> bool:
    word = CODES[code].numpy().tobytes()
    return any(word in file.read_bytes() for file in folder.iterdir())


@pytest.mark.parametrize("secure_delete", [False, True])
def test_codes_of_deleted_documents_go_and_the_others_stay(folder: Path, secure_delete: bool) -> None:
    bank = filled(folder / "bank", secure_delete)
    reader = MemoryBank.open(bank)
    with MemoryBank.open(bank, write=True) as opened, (bank / "codebook.safetensors").open("rb") as former:
        before = opened.snapshot()
        opened.delete("a")
        opened.compact()
        assert (set(former.read()) == {0}) == secure_delete
        assert torch.equal(before["a"].phi, row(3, 0))
        assert opened.codebook is not None
        assert not (opened.codebook == 7.25).any()
        opened.put([Document("d", "")], torch.full((1, 2, 3), 7.0))  # nearest to the code that has gone
        assert torch.equal(opened["d"].phi, row(1, 1))
        opened.commit()
    assert not trace(bank, 3)  # used by the deleted document alone
    assert not trace(bank, 2)  # used by nobody
    assert len(list(bank.glob("codebook*"))) == 2
    assert verify(bank).clean
    assert reader.refresh()
    for seen in (reader, MemoryBank.open(bank)):
        assert torch.equal(seen.phi, torch.cat([row(0, 1), row(1, 1), row(1, 1)]))
    backup(bank, folder / "saved")
    assert torch.equal(MemoryBank.open(folder / "saved").phi, reader.phi)


def test_a_bank_from_which_nothing_was_deleted_keeps_its_codes(folder: Path) -> None:
    bank = filled(folder / "bank")
    before = (bank / "codebook.safetensors").read_bytes()
    with MemoryBank.open(bank, write=True) as opened:
        opened.compact()
    assert (bank / "codebook.safetensors").read_bytes() == before


def test_a_code_goes_with_what_had_become_equal_to_it(folder: Path) -> None:
    bank = filled(folder / "bank")
    forgotten(bank)  # codes 2 and 3 are equal to code 0 now
    with MemoryBank.open(bank, write=True) as opened:
        opened.delete("b")  # the last document with code 0
        opened.compact()
        assert opened.codebook is not None
        assert torch.equal(opened.codebook, CODES[[1, 1, 1, 1]])
        opened.delete("c")
        opened.compact()
        assert not opened.codebook.any()
        with pytest.raises(BankError, match="has lost its codes with the last document; make a new bank"):
            opened.put([Document("d", "")], row(0, 0))
    assert not any(trace(bank, code) for code in range(4))
    assert verify(bank).clean


@pytest.mark.parametrize(("first", "how"), [(1, "full"), (2, "interrupt")])
def test_a_failure_at_any_call_leaves_a_bank_with_a_codebook(folder: Path, first: int, how: str) -> None:
    """Each way of failing tries every other call."""
    filled(folder / "old")
    with MemoryBank.open(folder / "old", write=True) as opened:
        opened.delete("a")
        opened.commit()
    for number in range(first, 400, 2):
        place = folder / str(number)
        shutil.copytree(folder / "old", place)
        with MemoryBank.open(place, write=True) as opened, faults(place) as fault:
            getattr(fault, how)(number)
            try:
                opened.compact()
            except (BankError, KeyboardInterrupt):
                fault.heal()
                assert torch.equal(opened.phi, torch.cat([row(0, 1), row(1, 1)])), fault.failed
                assert torch.equal(MemoryBank.open(place).phi, opened.phi), fault.failed
                assert verify(place).clean
                opened.compact()
            fault.heal()
        assert not trace(place, 3)
        assert verify(place).clean
        assert len(list(place.glob("codebook*"))) == 2
        shutil.rmtree(place)
        if fault.failed is None:
            break
    else:
        pytest.fail("it never came to an end")
    assert number > 20
