"""Long-term memory of conversations: what comes back, and that sessions know nothing of each other."""

from __future__ import annotations

import asyncio

import pytest
import torch
from llama_index.core.llms import ChatMessage
from llama_index.core.memory import Memory

from mac_rag.data.types import Document
from mac_rag.engine import MACEngine
from mac_rag.errors import ConfigError, DocumentError
from mac_rag.integrations.llama_index import MACMemoryBlock
from mac_rag.memory import MemoryBank
from mac_rag.model import MACModel
from tests.integrations.helpers import FACTS

ADA = ["Rainga Press employs 180 people.", "Irene Searkwell struck the first goal.", "A storm has hit Wunville."]
BOB = ["Rainga Press employs 90 people.", "The bridge was closed.", "Norrland won the match."]
QUESTION = "How many workers does Rainga Press have?"


@pytest.fixture(scope="module")
def model() -> MACModel:
    return MACModel.from_pretrained("mac-tiny")


def block_of(model: MACModel, **options: int) -> MACMemoryBlock:
    return MACMemoryBlock(MACEngine(model, MemoryBank(model.fingerprint, keep_texts=True)), **options)


def put(block: MACMemoryBlock, session: str, texts: list[str], role: str = "user") -> None:
    messages = [ChatMessage(role=role, content=text) for text in texts]
    asyncio.run(block.aput(messages, from_short_term_memory=True, session_id=session))


def recalled(block: MACMemoryBlock, session: str, question: str = QUESTION) -> str:
    return asyncio.run(block.aget([ChatMessage(content=question)], session_id=session))


def test_the_most_attended_turns_come_back_within_the_budget(model: MACModel) -> None:
    block = block_of(model, token_budget=1000)
    put(block, "ada", ADA)
    assert recalled(block, "ada") == "\n".join(f"user: {text}" for text in ADA)  # as they were said
    ids, mass = block.engine.document_attention([QUESTION])
    best = block.engine.bank[ids[int(mass[0].argmax())]].texts[0]
    size = len(model.base_lm.tokenizer(f"user: {best}", add_special_tokens=False).input_ids)
    block.token_budget = size
    assert recalled(block, "ada") == f"user: {best}"
    block.token_budget = size - 1
    assert recalled(block, "ada") != f"user: {best}"
    assert recalled(block, "eve") == ""
    assert asyncio.run(block.aget([], session_id="ada")) == ""


def test_sessions_have_no_influence_on_each_other(model: MACModel) -> None:
    alone, shared = block_of(model), block_of(model)
    put(alone, "ada", ADA)
    put(shared, "bob", BOB)
    put(shared, "ada", ADA)
    shared.engine.adapt(Document(name, text) for name, text in FACTS.items())
    put(shared, "bob", ["Rainga Press has moved."])
    assert recalled(shared, "ada") == recalled(alone, "ada")
    turns = shared.turns_of("ada")
    assert torch.equal(shared.engine.aggregate([QUESTION], turns), alone.engine.aggregate([QUESTION]))
    [ours] = shared.engine.answer([QUESTION], allowed=turns, sources=3)
    [expected] = alone.engine.answer([QUESTION], sources=3)
    assert ours == expected
    # Where the other session may be seen, it has influence: the test would notice.
    assert not torch.equal(shared.engine.aggregate([QUESTION]), alone.engine.aggregate([QUESTION]))
    ids, _ = shared.engine.document_attention([QUESTION], turns)
    assert len(ids) == len(ADA)


def test_turns_are_remembered_once_and_only_those_with_text(model: MACModel) -> None:
    block = block_of(model)
    put(block, "ada", [*ADA, ADA[0], "  "])
    put(block, "ada", ADA)
    assert len(block.engine.bank) == 3
    put(block, "bob", ADA)
    put(block, "ada", ADA[:1], role="assistant")
    assert len(block.engine.bank) == 7
    put(block, "ada", [""])
    assert len(block.engine.bank) == 7
    with pytest.raises(DocumentError):
        put(block, "ada", ["Good.", "half \ud800"])
    assert len(block.engine.bank) == 7


def test_a_long_message_asks_by_its_end(model: MACModel) -> None:
    block = block_of(model)
    put(block, "ada", ADA)
    assert recalled(block, "ada", "Hello there. " * 2000 + QUESTION)


def test_a_bank_without_texts_is_refused(model: MACModel) -> None:
    with pytest.raises(ConfigError, match="keep_texts=True"):
        MACMemoryBlock(MACEngine(model))


def test_llama_index_flushes_turns_into_it(model: MACModel) -> None:
    block = block_of(model)
    memory = Memory.from_defaults(
        session_id="ada", token_limit=40, chat_history_token_ratio=0.5, token_flush_size=10, memory_blocks=[block]
    )

    async def talk() -> list[ChatMessage]:
        for text in ADA:
            await memory.aput(ChatMessage(role="user", content=text))
            await memory.aput(ChatMessage(role="assistant", content="I see."))
        return await memory.aget(input=QUESTION)

    messages = asyncio.run(talk())
    assert len(block.engine.bank) > 0
    told = str(messages[0].content)
    assert "180" in told
