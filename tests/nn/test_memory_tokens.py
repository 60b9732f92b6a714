"""Memory tokens and lexical vectors: apart for the networks, side by side in a bank's rows."""

from __future__ import annotations

import pytest
import torch

from mac_rag.nn.memory_tokens import MemoryTokens


@pytest.mark.parametrize("lexical_vectors", [0, 2])
def test_rows_are_split_and_stacked_without_a_change(lexical_vectors: int) -> None:
    rows = torch.randn(4, 3 + lexical_vectors, 5)
    memory = MemoryTokens.split(rows, lexical_vectors)
    assert torch.equal(memory.tokens, rows[:, :3])
    assert (memory.lexical is None) == (lexical_vectors == 0)
    assert torch.equal(memory.stacked(), rows)
    assert len(memory) == 4


@pytest.mark.parametrize("lexical_vectors", [0, 2])
def test_texts_are_chosen_joined_and_written_in_whole(lexical_vectors: int) -> None:
    rows = torch.randn(4, 3 + lexical_vectors, 5)
    memory = MemoryTokens.split(rows, lexical_vectors)
    for some in (slice(1, 3), [2, 0], torch.tensor([3, 3, 1])):
        assert torch.equal(memory[some].stacked(), rows[some])
    assert torch.equal(MemoryTokens.cat([memory[2:], memory[:2]]).stacked(), rows[[2, 3, 0, 1]])
    room = memory.new_empty(4)
    room.put([3, 1], memory[:2])
    room.put([0, 2], memory[2:])
    assert torch.equal(room.stacked(), rows[[2, 1, 3, 0]])
    assert memory.to(torch.float64).stacked().dtype == torch.float64
    assert not MemoryTokens.split(rows.clone().requires_grad_(), lexical_vectors).detach().stacked().requires_grad
