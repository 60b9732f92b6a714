"""A memory of an LM's own keys and values in LlamaIndex, LangChain and the server: what is in the bank is read there.

A document in the bank does not stand in the prompt, and one that is not does, whichever component has found it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from langchain_core.documents import Document as LangChainDocument
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage
from llama_index.core import Document, PromptTemplate, VectorStoreIndex
from llama_index.core.agent.workflow import ReActAgent
from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.evaluation import FaithfulnessEvaluator, RelevancyEvaluator
from llama_index.core.ingestion import IngestionPipeline
from llama_index.core.query_engine import CitationQueryEngine
from llama_index.core.schema import QueryBundle
from llama_index.core.tools import FunctionTool
from llama_index.core.vector_stores import MetadataFilter, MetadataFilters

from mac_rag.asking import conversation_prompt
from mac_rag.bank import MemoryBank
from mac_rag.cli.chat import Conversation
from mac_rag.data.types import Document as MACDocument
from mac_rag.engine import MACEngine
from mac_rag.integrations.langchain import ChatMAC, create_documents_chain
from mac_rag.integrations.llama_index import (
    MACLLM,
    MACMemoryBlock,
    MACNodePostprocessor,
    MACSynthesizer,
    MemoryWriter,
)
from mac_rag.lm.base_lm import BaseLM
from mac_rag.lm.chat import Message
from mac_rag.model import MACModel, OwnKVModel
from mac_rag.retrieval.base import Hit
from mac_rag.retrieval.bm25 import BM25Retriever
from mac_rag.server.asking import Asking, Reply, ServedQuestion
from mac_rag.server.catalog import ServedBank
from mac_rag.server.metrics import Metrics
from tests.helpers import Folder, own_kv
from tests.integrations.helpers import FACTS, QUESTION, Script, scored
from tests.server.helpers import serving

REMEMBERED = ("bridge", "museum")  # the facts that are in the bank
SLOTS = PromptTemplate("{context_str}\n{query_str}")


def own_model(folder: Path) -> OwnKVModel:
    model = own_kv(folder)
    model.config = model.config.model_copy(update={"max_new_tokens": 12})
    return model


@pytest.fixture(scope="module")
def chat_model(model_folder: Folder) -> OwnKVModel:
    """Around an instruct LM; no test changes it."""
    return own_model(model_folder("instruct"))


@pytest.fixture(scope="module")
def plain_model(model_folder: Folder) -> OwnKVModel:
    """Around an LM without a chat template."""
    return own_model(model_folder("llama"))


def informed(model: MACModel, retriever: BM25Retriever | None = None) -> MACEngine:
    engine = MACEngine(model, MemoryBank(model.fingerprint, keep_texts=True), retriever)
    engine.adapt(MACDocument(name, FACTS[name], {"tenant": name}) for name in REMEMBERED)
    return engine


@pytest.fixture
def engine(chat_model: OwnKVModel) -> MACEngine:
    return informed(chat_model)


@pytest.fixture
def llm(engine: MACEngine) -> MACLLM:
    return MACLLM(engine=engine)


@pytest.fixture
def prompts(chat_model: OwnKVModel, plain_model: OwnKVModel, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The prompts that an LM has read, as texts."""
    read: list[str] = []
    for model in (chat_model, plain_model):
        monkeypatch.setattr(model.base_lm, "begin", spy(model.base_lm, read))
    return read


def spy(lm: BaseLM, read: list[str]) -> Callable[..., Any]:
    begin = lm.begin

    def spied(batch: Any, ids: Any, *arguments: Any, **options: Any) -> Any:
        read.extend(lm.tokenizer.decode(row) for row in ids)
        return begin(batch, ids, *arguments, **options)

    return spied


@pytest.fixture
def make_llm(model_folder: Folder) -> Callable[..., tuple[MACLLM, Script]]:
    """Makes a MACLLM whose LM follows a script."""

    def make(replies: dict[str, str]) -> tuple[MACLLM, Script]:
        model = own_model(model_folder("instruct"))
        engine = informed(model)
        return MACLLM(engine=engine, max_new_tokens=150), Script(model, replies)

    return make


def in_memory(prompt: str) -> set[str]:
    """The facts that do not stand in a prompt."""
    return {name for name, text in FACTS.items() if text not in prompt}


class TestQueryEngines:
    def test_what_is_in_the_bank_is_read_there(self, llm: MACLLM, index: VectorStoreIndex, prompts: list[str]) -> None:
        response = index.as_query_engine(llm=llm, similarity_top_k=3).query(QUESTION)
        assert {scored.node.ref_doc_id for scored in response.source_nodes} == set(FACTS)
        assert in_memory(prompts[-1]) == set(REMEMBERED)
        assert "the context above" in prompts[-1]
        alone = llm.model_copy(update={"use_memory": False})
        index.as_query_engine(llm=alone, similarity_top_k=3).query(QUESTION)
        assert in_memory(prompts[-1]) == set()
        assert "the context above" not in prompts[-1]

    @pytest.mark.parametrize("kind", ["chat_model", "plain_model"])
    def test_the_answer_is_that_of_the_engine(
        self, kind: str, request: pytest.FixtureRequest, index: VectorStoreIndex, prompts: list[str]
    ) -> None:
        engine = informed(request.getfixturevalue(kind))
        llm = MACLLM(engine=engine, sources=3)
        nodes = index.as_retriever(similarity_top_k=3).retrieve(QUESTION)
        [expected] = engine.answer([QUESTION], contexts=[[scored.node.get_content() for scored in nodes]])
        assert expected.contexts == (FACTS["river"],)
        read = prompts[-1]
        templates = {"text_qa_template": SLOTS} if kind == "chat_model" else {}
        joined = index.as_query_engine(llm=llm, similarity_top_k=3, **templates)
        separate = index.as_query_engine(similarity_top_k=3, llm=llm, response_synthesizer=MACSynthesizer(llm))
        streamed = index.as_query_engine(
            similarity_top_k=3, llm=llm, response_synthesizer=MACSynthesizer(llm, streaming=True)
        )
        for asked in (joined, separate, streamed):
            assert str(asked.query(QUESTION)) == expected.text
            assert prompts[-1] == read
        assert str(asyncio.run(joined.aquery(QUESTION))) == expected.text
        assert str(asyncio.run(separate.aquery(QUESTION))) == expected.text
        raw = llm.complete(QUESTION, contexts=list(FACTS.values())).raw
        assert {source["document_id"] for source in raw["mac_sources"]} == set(REMEMBERED)

    def test_only_documents_that_pass_the_filters_are_read_from_the_bank(
        self, llm: MACLLM, index: VectorStoreIndex, prompts: list[str]
    ) -> None:
        for tenant in REMEMBERED:
            filters = MetadataFilters(filters=[MetadataFilter(key="tenant", value=tenant)])
            one = llm.model_copy(update={"filters": filters, "sources": 5})
            index.as_query_engine(llm=one, similarity_top_k=3).query(QUESTION)
            assert in_memory(prompts[-1]) == {tenant}
            raw = one.complete(QUESTION, contexts=list(FACTS.values())).raw
            assert [source["document_id"] for source in raw["mac_sources"]] == [tenant]
            hits = [Hit(name, text, 1.0) for name, text in FACTS.items()]
            fitted = llm.engine.fit(
                hits, lambda texts: llm.engine.model.fit_to_window(QUESTION, texts), allowed={tenant}
            )
            assert fitted.read == (tenant,)

    @pytest.mark.parametrize("mode", ["refine", "compact", "tree_summarize", "accumulate"])
    def test_response_modes(self, mode: Any, llm: MACLLM, index: VectorStoreIndex, prompts: list[str]) -> None:
        index.as_query_engine(llm=llm, similarity_top_k=3, response_mode=mode).query(QUESTION)
        assert set.intersection(*map(in_memory, prompts)) >= set(REMEMBERED)
        assert any(FACTS["river"] in prompt for prompt in prompts)

    def test_documents_of_several_paragraphs_and_parts_of_them(self, llm: MACLLM, prompts: list[str]) -> None:
        long = f"{FACTS['bridge']}\n\nIt is 90 metres long.\n\nIt is red."
        llm.engine.adapt([MACDocument("long", f"{long}\n"), MACDocument("red", "It is red.")])
        context = f"A note.\n\n{long}\n\nIt is 90 metres long.\n\n{FACTS['bridge']} Twice.\n\nIt is red."
        [answer] = llm.engine.answer([QUESTION], contexts=[[context]])
        assert answer.contexts == ("A note.", f"It is 90 metres long.\n\n{FACTS['bridge']} Twice.")
        [answer] = llm.engine.answer(["Is it red?"], contexts=[["Is it red? It is red. It is not."]])
        assert answer.contexts == ("Is it red? It is red. It is not.",)
        llm.predict(
            PromptTemplate("{context_str}\nIt is red. {query_str}"), context_str="It is red.", query_str="Is it?"
        )
        assert prompts[-1].count("It is red.") == 1  # the wording; the context is in memory

    def test_citations_keep_their_numbers(self, llm: MACLLM, index: VectorStoreIndex, prompts: list[str]) -> None:
        CitationQueryEngine.from_args(index, llm=llm, similarity_top_k=2).query(QUESTION)
        assert f"Source 1:\n{FACTS['bridge']}" in prompts[-1]


class TestInstructions:
    @pytest.mark.parametrize("mode", ["condense_question", "condense_plus_context", "context", "simple"])
    def test_chat_engines(self, mode: Any, make_llm: Any, index: VectorStoreIndex) -> None:
        llm, script = make_llm({"tandalone": "Who leads the museum of Sola?", "": "Peter Holm"})
        system = {} if mode == "condense_question" else {"system_prompt": "Speak like a sailor."}
        chat = index.as_chat_engine(mode, llm=llm, similarity_top_k=1, **system)
        assert str(chat.chat(QUESTION)) == "Peter Holm"
        assert "".join(chat.stream_chat("And the museum?").response_gen).strip() == "Peter Holm"
        assert set(REMEMBERED) <= in_memory(script.prompts[-1])
        assert ("the context above" in script.prompts[-1]) == (mode != "simple")
        assert ("Speak like a sailor." in script.prompts[-1]) == bool(system)
        if mode.startswith("condense"):
            assert any("tandalone" in prompt and QUESTION in prompt for prompt in script.prompts)

    def test_evaluators(self, make_llm: Any) -> None:
        llm, script = make_llm({"information is supported": "YES", "in line with the context": "YES"})
        contexts = list(FACTS.values())
        assert FaithfulnessEvaluator(llm=llm).evaluate(response="Anna Berg", contexts=contexts).passing
        assert RelevancyEvaluator(llm=llm).evaluate(query=QUESTION, response="Anna Berg", contexts=contexts).passing
        assert all(in_memory(prompt) == set(REMEMBERED) for prompt in script.prompts)

    def test_an_agent_by_text(self, make_llm: Any) -> None:
        llm, script = make_llm(
            {
                "Observation: 42": "Thought: I can answer without using any more tools.\nAnswer: It is 42.",
                "": 'Thought: I need a tool.\nAction: count\nAction Input: {"what": "bridges"}',
            }
        )

        def count(what: str) -> int:
            """Counts things."""
            return 42

        agent = ReActAgent(tools=[FunctionTool.from_defaults(count)], llm=llm, streaming=False)

        async def ask() -> str:
            return str(await agent.run("How many bridges are there?"))

        assert asyncio.run(ask()) == "It is 42."
        assert "count" in script.prompts[0]


class TestComponents:
    def test_a_writer_fills_the_bank_and_answers_have_sources(self, chat_model: OwnKVModel) -> None:
        engine = MACEngine(chat_model, MemoryBank(chat_model.fingerprint, keep_texts=True))
        IngestionPipeline(transformations=[MemoryWriter(engine)]).run(
            documents=[Document(id_=name, text=FACTS[name]) for name in REMEMBERED]
        )
        assert set(engine.bank.document_ids) == set(REMEMBERED)
        response = MACSynthesizer(MACLLM(engine=engine)).synthesize(QUESTION, [])
        assert "bridge" in [source["document_id"] for source in response.metadata["mac_sources"]]
        assert FACTS["bridge"] in [scored.node.get_content() for scored in response.source_nodes]

    def test_nodes_are_ranked_by_the_memory(self, engine: MACEngine) -> None:
        memory = MACNodePostprocessor(engine, fusion_weight=0.9)
        nodes = memory.postprocess_nodes(scored(*reversed(FACTS)), query_bundle=QueryBundle(QUESTION))
        assert [one.node.node_id for one in nodes] == ["bridge", "museum", "river"]
        assert nodes[-1].node.metadata["mac_in_memory"] is False

    def test_a_memory_block_recalls_what_was_said(self, chat_model: OwnKVModel) -> None:
        block = MACMemoryBlock(
            MACEngine(chat_model, MemoryBank(chat_model.fingerprint, keep_texts=True)), token_limit=16
        )
        asyncio.run(block.aput([ChatMessage(text) for text in FACTS.values()], session_id="anna"))
        asyncio.run(block.aput([ChatMessage("Which bridge?")], session_id="ben"))
        assert asyncio.run(block.aget([ChatMessage(QUESTION)], session_id="anna")) == f"user: {FACTS['bridge']}"


class TestLangChain:
    @pytest.mark.parametrize("system", [True, False])
    def test_documents_in_the_bank_are_read_there(
        self, system: bool, chat_model: OwnKVModel, prompts: list[str]
    ) -> None:
        retriever = BM25Retriever()
        engine = informed(chat_model, retriever)
        retriever.add([MACDocument("river", FACTS["river"])])  # which the bank has forgotten
        chat = ChatMAC(engine=engine, sources=3, k=3)
        question = "What of bridge, museum and ferry?"
        said = [SystemMessage("Be brief."), HumanMessage("Hello."), AIMessage("Yes?")] if system else []
        message = chat.invoke([*said, HumanMessage(question)])
        assert in_memory(prompts[-1]) == set(REMEMBERED)
        assert ("Hello." in prompts[-1]) == system
        details = message.response_metadata
        assert set(details["mac_retrieved"]) == set(FACTS)
        assert {one["document_id"]: one["retrieved"] for one in details["mac_sources"]} == dict.fromkeys(FACTS, True)
        chunks = list(chat.stream([*said, HumanMessage(question)]))
        assert "".join(str(chunk.text) for chunk in chunks) == message.content
        assert prompts[-1] == prompts[-2]

    @pytest.mark.parametrize("kind", ["chat_model", "plain_model"])
    def test_a_documents_chain(self, kind: str, request: pytest.FixtureRequest, prompts: list[str]) -> None:
        engine = informed(request.getfixturevalue(kind))
        documents = [LangChainDocument(text) for text in FACTS.values()]
        create_documents_chain(ChatMAC(engine=engine)).invoke({"input": QUESTION, "context": documents})
        assert in_memory(prompts[-1]) == set(REMEMBERED)


def test_the_command_line(chat_model: OwnKVModel, prompts: list[str]) -> None:
    retriever = BM25Retriever()
    conversation = Conversation(informed(chat_model, retriever))
    retriever.add([MACDocument("river", FACTS["river"])])
    for question in ("What of bridge, museum and ferry?", "What of ferry, museum and bridge?"):
        conversation.ask(question)
        assert in_memory(prompts[-1]) == set(REMEMBERED)
        assert conversation.read.keys() == FACTS.keys()
    assert "What of bridge, museum and ferry?" in prompts[-1]


class TestServer:
    @pytest.mark.parametrize("before", [(), (Message("system", "Be brief."),)])
    def test_answers_and_streams(self, before: Any, chat_model: OwnKVModel, prompts: list[str]) -> None:
        retriever = BM25Retriever()
        engine = informed(chat_model, retriever)
        retriever.add([MACDocument("river", FACTS["river"])])
        bank: Any = type("Bank", (), {"engine": engine})()
        nothing: Any = type("NoBanks", (), {"served": lambda self: []})()
        asking = Asking(MACEngine(chat_model), Metrics(nothing))
        asked = ServedQuestion("What of bridge, museum and ferry?", bank, before=before, sources=3)
        [reply] = asking.answer([asked])
        assert in_memory(prompts[-1]) == set(REMEMBERED)
        assert ("Be brief." in prompts[-1]) == bool(before)
        assert set(reply.retrieved) == set(FACTS)
        assert {source.document_id for source in reply.sources if source.retrieved} == set(FACTS)
        *pieces, whole = asking.stream(asked)
        assert isinstance(whole, Reply)
        assert "".join(piece.text for piece in pieces) == whole.text == reply.text
        assert prompts[-1] == prompts[-2]
        assert [source.document_id for source in whole.sources] == [source.document_id for source in reply.sources]

    def test_completions_of_a_bank(self, chat_model: OwnKVModel, tmp_path: Path, prompts: list[str]) -> None:
        with serving(tmp_path, chat_model) as running, running.client() as client:
            client.post("/v1/banks", json={"name": "news"}).raise_for_status()
            documents = [{"id": name, "text": text} for name, text in FACTS.items()]
            client.post("/v1/banks/news/documents", json={"documents": documents}).raise_for_status()
            for said in ([], [{"role": "system", "content": "Be brief."}]):
                body: Any = {"model": "tiny:news", "messages": [*said, {"role": "user", "content": QUESTION}]}
                answer = client.post("/v1/chat/completions", json=body)
                answer.raise_for_status()
                assert "bridge" in answer.json()["retrieved"]
                assert "bridge" in [source["document_id"] for source in answer.json()["sources"]]
                assert in_memory(prompts[-1]) == set(FACTS)
            served: ServedBank = running.service.catalog.get("news")
            assert isinstance(served.engine.model, OwnKVModel)


def test_documents_of_a_conversation_are_cut_to_the_window(chat_model: OwnKVModel) -> None:
    long = FACTS["river"] + " It rained." * 4000
    prompt = conversation_prompt(chat_model, [Message("system", "Be brief.")], QUESTION, [long], None)
    assert prompt.truncated
    after = chat_model.base_lm.tokenizer.decode(prompt.after_memory)
    assert QUESTION in after
    assert f"{FACTS['river']} It rained." in after
    assert len(prompt.after_memory) <= chat_model.context_window - chat_model.config.max_new_tokens


def test_the_answer_rests_on_the_rows(chat_model: OwnKVModel, prompts: list[str]) -> None:
    """The same prompt with other documents in the bank has another answer."""
    before = (Message("user", "Hello."), Message("assistant", "Yes?"))
    answers = set()
    for text in (
        "Anna Berg opened the bridge of Norrland.",
        "The bridge of Norrland is closed, said Peter Holm.",
        "Norrland: 14 June 1931, 212 metres, 9 piers of granite; bridge and ferry are both free of charge.",
        "Nobody crosses the bridge of Norrland by night, because wolves have been seen there since October.",
    ):
        engine = MACEngine(chat_model)
        engine.adapt([MACDocument("one", text), MACDocument("other", "A ferry crosses the river Vest every hour.")])
        prompt = engine.fit(
            [Hit("", text, 0.0)], lambda texts: conversation_prompt(chat_model, before, QUESTION, texts, None)
        )
        assert prompt.read == ("one",)
        answers.add(engine.answer([prompt])[0].text)
        assert text not in prompts[-1]
    assert len(answers) > 1
