"""The memory bank in memory: single behaviours. Any order of changes is in `test_states.py`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from mac_rag.bank import MemoryBank
from mac_rag.data.types import Document
from mac_rag.errors import BankError
from tests.bank.helpers import TOKENS, WIDTH, memory


def filled(*ids: str) -> MemoryBank:
    bank = MemoryBank("f00d")
    for number, document_id in enumerate(ids):
        bank.put([Document(document_id, f"text of {document_id}", {"n": number})], memory(1, number))
    return bank


def test_a_failed_addition_changes_nothing() -> None:
    bank = filled("a")
    version, keys = bank.version, bank.row_keys.tolist()
    cyclic: dict[str, Any] = {}
    cyclic["self"] = cyclic
    for second, message in (
        (Document("b", ""), "'b' occurs twice"),
        (Document(3, ""), "id is 3; give a text"),  # type: ignore[arg-type]
        (Document("odd", "", {"thing": object()}), "'odd'.*JSON"),
        (Document("odd", "", {"thing": float("nan")}), "'odd'.*JSON"),
        (Document("odd", "", cyclic), "'odd'.*JSON"),
    ):
        with pytest.raises(BankError, match=message):
            bank.put([Document("b", ""), Document("a", "new"), second], memory(3))
    assert (bank.document_ids, bank.version, bank.row_keys.tolist()) == (["a"], version, keys)


@pytest.mark.parametrize(
    ("phi", "rows"),
    [
        (memory(3), None),
        (memory(1), None),
        (memory(2), [1, 2]),
        (memory(2), [2, 0]),
        (torch.ones(2, TOKENS, 5), None),
        (torch.ones(2, TOKENS), None),
    ],
)
def test_memory_tokens_must_fit(phi: Tensor, rows: list[int] | None) -> None:
    bank = filled("a")
    with pytest.raises(BankError, match="memory tokens"):
        bank.put([Document("b", ""), Document("c", "")], phi, rows)
    assert len(bank) == 1


def test_the_longest_document() -> None:
    limit = 1 << 16
    bank = MemoryBank("f00d")
    with pytest.raises(BankError, match="65,536 rows is too long"):
        bank.put([Document("a", "")], torch.ones(limit, 1, 1), [limit])
    bank.put([Document("a", ""), Document("b", "")], torch.ones(limit, 1, 1), [limit - 1, 1])
    assert bank.row_keys.diff().min() > 0


def test_an_entry_holds_provenance_and_is_read_until_it_is_deleted() -> None:
    bank = filled("a", "b")
    first, second = bank
    assert (second.document_id, second.metadata) == ("b", {"n": 1})
    assert first.content_hash != second.content_hash
    assert bank["b"] == second
    assert second.members[0].added.endswith("+00:00")
    second.phi.zero_()  # what was read is one's own
    assert second.phi[0, 0, 0] == 1
    bank.delete("b")
    for read in (lambda: second.phi, lambda: bank["b"], lambda: bank.entry(second.sequence)):
        with pytest.raises(BankError):
            read()
    assert second.metadata == {"n": 1}


def test_merged_documents_go_together() -> None:
    bank = filled("a", "b", "c", "d", "e")
    bank.merge(["c", "a"], memory(1, 9))
    bank.merge(["a", "d"], memory(1, 8))
    assert [[member.document_id for member in entry.members] for entry in bank] == [["b"], ["e"], ["d", "a", "c"]]
    assert bank.document_ids == ["b", "e", "d", "a", "c"]
    assert [member.metadata["n"] for member in bank["a"].members] == [3, 0, 2]
    assert bank.row_members == [("b",), ("e",), ("d", "a", "c")]
    assert bank.phi[:, 0, 0].tolist() == [1, 4, 8]
    assert bank.put([Document("a", "new"), Document("f", "")], memory(2)) == ("d", "c")
    assert bank.document_ids == ["b", "e", "a", "f"]
    bank.merge(["b", "e"], memory(1))
    assert bank.delete("e") == ("b", "e")
    assert bank.delete("f") == ("f",)
    for ids in (["a", "nobody"], []):
        with pytest.raises(BankError):
            bank.merge(ids, memory(1))
    assert bank.document_ids == ["a"]


def test_an_empty_bank_takes_any_shape() -> None:
    bank = filled("a")
    bank.delete("a")
    assert bank.row_shape is None
    assert len(bank.row_keys) == 0
    with pytest.raises(BankError, match="empty"):
        _ = bank.phi
    with pytest.raises(BankError, match="no document 'a'"):
        bank.delete("a")
    bank.put([Document("a", "")], torch.ones(1, 5, 7))
    assert bank.row_shape == (5, 7)


def test_rows_beyond_the_bank() -> None:
    bank = filled("a", "b")
    for read in (lambda: bank.take(torch.tensor([2])), lambda: bank.take(torch.tensor([-1]))):
        with pytest.raises(IndexError, match="2 rows"):
            read()
    assert bank.take(torch.tensor([], dtype=torch.long)).shape == (0, TOKENS, WIDTH)
