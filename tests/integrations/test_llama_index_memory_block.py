"""Memory that finds texts by itself: MACMemoryBlock in LlamaIndex's own Memory, and MACRetriever around an engine."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from llama_index.core import Document as LlamaDocument
from llama_index.core import MockEmbedding, VectorStoreIndex
from llama_index.core.base.llms.types import ChatMessage, MessageRole
from llama_index.core.memory import Memory

from mac_rag.data.types import Document
from mac_rag.engine import MACEngine
from mac_rag.errors import ConfigError
from mac_rag.integrations.llama_index import MACMemoryBlock, MACRetriever, MemoryWriter
from mac_rag.integrations.llama_index.memory_block import _Session
from mac_rag.memory import MemoryBank
from mac_rag.model import MACModel
from mac_rag.retrieval import BM25Retriever

ANNA = ["The bridge of Norrland was opened by Anna Berg.", "A ferry crosses the river Vest.", "Peter Holm sings."]
BODO = ["The bridge of Norrland was opened by Bodo Lang.", "Sola has a museum."]
QUESTION = "Who opened the bridge of Norrland?"


def words(text: str) -> list[str]:
    return text.split()


@pytest.fixture
def engine(tiny_model: MACModel) -> MACEngine:
    return MACEngine(tiny_model, MemoryBank(tiny_model.fingerprint, keep_texts=True))


def put(block: MACMemoryBlock, texts: list[str], session: str | None, role: Any = MessageRole.USER) -> None:
    asyncio.run(block.aput([ChatMessage(role=role, content=text) for text in texts], session_id=session))


def get(block: MACMemoryBlock, question: str = QUESTION, session: str | None = None) -> str:
    return asyncio.run(block.aget([ChatMessage(question)], session_id=session))


def test_what_memory_flushes_is_recalled_in_the_order_of_its_saying(engine: MACEngine) -> None:
    block = MACMemoryBlock(engine, token_limit=100, tokenizer=words)
    memory = Memory.from_defaults(
        session_id="anna", token_limit=40, chat_history_token_ratio=0.4, token_flush_size=8, memory_blocks=[block],
        tokenizer_fn=words,
    )  # fmt: skip
    for text in ANNA:
        memory.put(ChatMessage(text))
        memory.put(ChatMessage(role="assistant", content="I see."))
    flushed = len(engine.bank)
    assert 0 < flushed < 6
    recalled = get(block, session="anna").split("\n")
    said = [line for text in ANNA for line in (f"user: {text}", "assistant: I see.")]
    assert recalled == said[:flushed]
    [block_message] = [m for m in memory.get(input=QUESTION) if "<memory>" in (m.content or "")]
    assert f"user: {ANNA[0]}" in (block_message.content or "")
    assert all(entry.metadata["date"] and entry.metadata["role"] in ("user", "assistant") for entry in engine.bank)


def test_two_sessions_are_bit_equal_with_and_without_each_other(engine: MACEngine, tiny_model: MACModel) -> None:
    alone = MACEngine(tiny_model, MemoryBank(tiny_model.fingerprint, keep_texts=True))
    both, single = MACMemoryBlock(engine), MACMemoryBlock(alone)
    put(both, BODO, "bodo")
    for block in (both, single):
        put(block, ANNA, "anna")
    put(both, BODO, "bodo")
    assert get(both, session="anna") == get(single, session="anna") != ""
    questions, session = [QUESTION, "Who sings?"], _Session("anna")
    assert torch.equal(engine.aggregate(questions, session), alone.aggregate(questions, session))
    masses = [e.document_attention(questions, session)[1] for e in (engine, alone)]
    assert torch.equal(*masses)
    answers = [[answer.text for answer in e.answer(questions, allowed=session)] for e in (engine, alone)]
    assert answers[0] == answers[1]


@given(names=st.lists(st.one_of(st.none(), st.text(max_size=6)), min_size=2, max_size=2, unique=True))
def test_no_session_holds_documents_of_another(names: list[str | None]) -> None:
    first, second = map(_Session, names)
    assert f"{first.prefix}x" in first
    assert f"{first.prefix}x" not in second
    assert first != second


def test_the_most_attended_messages_are_recalled_within_the_limit(engine: MACEngine) -> None:
    block = MACMemoryBlock(engine, token_limit=10, tokenizer=words)
    put(block, ANNA, "anna")
    [recalled] = get(block, session="anna").split("\n")
    ids, mass = engine.document_attention([QUESTION], _Session("anna"))
    assert recalled == f"user: {ANNA[sorted(ids).index(ids[int(mass[0].argmax())])]}"
    assert get(MACMemoryBlock(engine, token_limit=1, tokenizer=words), session="anna") == ""


def test_truncation_leaves_out_the_oldest(engine: MACEngine) -> None:
    block = MACMemoryBlock(engine, tokenizer=words)
    content = "user: one two\nassistant: three\nuser: four"
    assert asyncio.run(block.atruncate(content, 1)) == "assistant: three\nuser: four"
    assert asyncio.run(block.atruncate(content, 7)) is None


def test_a_session_is_forgotten_whole(engine: MACEngine) -> None:
    block = MACMemoryBlock(engine)
    put(block, ANNA, "anna")
    put(block, BODO, "bodo")
    assert block.forget("anna") == len(ANNA)
    assert get(block, session="anna") == ""
    assert get(block, session="bodo").split("\n") == [f"user: {text}" for text in BODO]


def test_calls_of_tools_instructions_and_empty_messages_are_left_out(engine: MACEngine) -> None:
    block = MACMemoryBlock(engine)
    put(block, ["You are kind."], None, MessageRole.SYSTEM)
    put(block, ["42"], None, MessageRole.TOOL)
    put(block, [" "], None)
    assert len(engine.bank) == 0
    assert get(block) == ""
    assert asyncio.run(block.aget([])) == asyncio.run(block.aget(None)) == ""


def test_long_messages_are_kept_and_asked(engine: MACEngine) -> None:
    block = MACMemoryBlock(engine, token_limit=10**6, tokenizer=words)
    long = " ".join(ANNA * 60)
    put(block, [long, *ANNA], None)
    assert get(block, long).split("\n")[0] == f"user: {long}"


def test_a_bank_on_disk_remembers(tiny_model: MACModel, tmp_path: Path) -> None:
    with MemoryBank.create(tmp_path / "bank", tiny_model.fingerprint, keep_texts=True) as bank:
        put(MACMemoryBlock(MACEngine(tiny_model, bank)), ANNA, "anna")
    with MemoryBank.open(tmp_path / "bank", write=True) as bank:
        assert get(MACMemoryBlock(MACEngine(tiny_model, bank)), session="anna").split("\n") == [
            f"user: {text}" for text in ANNA
        ]


def test_a_bank_without_texts_is_refused(tiny_model: MACModel) -> None:
    with pytest.raises(ConfigError, match="keep_texts=True"):
        MACMemoryBlock(MACEngine(tiny_model))


def test_memory_ranks_documents_by_attention(engine: MACEngine, tiny_model: MACModel) -> None:
    engine.adapt([Document(str(number), text, {"n": number}) for number, text in enumerate(ANNA)])
    found = MACRetriever(engine, similarity_top_k=2).retrieve(QUESTION)
    ids, mass = engine.document_attention([QUESTION])
    best = [ids[place] for place in mass[0].argsort(descending=True)[:2].tolist()]
    assert [(node.node_id, node.text, node.metadata) for node in found] == [
        (name, ANNA[int(name)], {"n": int(name)}) for name in best
    ]
    assert found[0].score == pytest.approx(float(mass.max()))
    [only] = MACRetriever(engine, allowed={"1"}).retrieve(QUESTION)
    assert (only.node_id, only.score) == ("1", 1.0)
    assert MACRetriever(MACEngine(tiny_model, MemoryBank(tiny_model.fingerprint, keep_texts=True))).retrieve("x") == []


def test_texts_come_from_an_index_where_the_bank_has_none(tiny_model: MACModel) -> None:
    documents = [LlamaDocument(id_=str(number), text=text) for number, text in enumerate(ANNA)]
    index = VectorStoreIndex.from_documents(documents, embed_model=MockEmbedding(embed_dim=4))
    engine = MemoryWriter.from_index(index, MACEngine(tiny_model)).engine
    with pytest.raises(ConfigError, match="give source=index"):
        MACRetriever(engine)
    with pytest.raises(ConfigError, match="leave them out"):
        MACRetriever(BM25Retriever(), source=index)
    found = MACRetriever(engine, similarity_top_k=3, source=index).retrieve(QUESTION)
    assert sorted(node.text for node in found) == sorted(ANNA)
    assert {node.node.ref_doc_id for node in found} == {"0", "1", "2"}
