"""Retrievers across the border, in real LlamaIndex indexes and query engines."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Container, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llama_index.core import Document as IndexDocument
from llama_index.core import QueryBundle, VectorStoreIndex
from llama_index.core.llms import MockLLM
from llama_index.core.node_parser import SentenceSplitter
from llama_index.core.retrievers import BaseRetriever, QueryFusionRetriever
from llama_index.core.schema import BaseNode, MetadataMode, NodeRelationship, NodeWithScore, TextNode

from mac_rag.data.types import Document
from mac_rag.errors import BankError, ConfigError, DocumentError
from mac_rag.integrations.llama_index.retriever import MACRetriever
from mac_rag.retrieval import BM25Retriever, Hit, make_retriever
from mac_rag.retrieval.llama_index import LlamaIndexRetriever
from tests.integrations.helpers import FACTS, EventLog, HashEmbedding


@pytest.fixture
def bm25() -> BM25Retriever:
    retriever = BM25Retriever()
    retriever.add([Document(name, text, {"title": name}) for name, text in FACTS.items()])
    return retriever


class Fixed(BaseRetriever):
    """A user's own retriever: no number of nodes to be told by, no scores."""

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        return [NodeWithScore(node=TextNode(id_=name, text=text)) for name, text in FACTS.items()]


FIXED = Fixed()
WORDS = st.sampled_from(["storm", "river", "ferry", "bridge"])


def halves(nodes: Sequence[BaseNode], **_: Any) -> list[BaseNode]:
    """A transformation of LlamaIndex that makes two nodes of each document."""
    parts = ((node, node.get_content()) for node in nodes)
    return [
        TextNode(text=text, relationships={NodeRelationship.SOURCE: node.as_related_node_info()})
        for node, content in parts
        for text in (content[: len(content) // 2], content[len(content) // 2 :])
    ]


class TestOursForLlamaIndex:
    def test_nodes_are_documents(self, bm25: BM25Retriever, event_log: EventLog) -> None:
        [found] = MACRetriever(bm25, similarity_top_k=1).retrieve("Who leads the museum?")
        assert (found.node.node_id, found.node.ref_doc_id) == ("museum", "museum")
        assert found.node.get_content(metadata_mode=MetadataMode.NONE) == FACTS["museum"]
        assert found.node.metadata == {"title": "museum"}
        assert found.score == bm25.retrieve(["Who leads the museum?"], 1)[0][0].score
        assert {"RetrievalStartEvent", "RetrievalEndEvent"} <= set(event_log.names())

    def test_a_filter_is_asked_anew_for_every_question(self, bm25: BM25Retriever) -> None:
        allowed = {"bridge"}
        retriever = MACRetriever(bm25, allowed=allowed)
        assert [n.node.node_id for n in retriever.retrieve("the bridge, the museum")] == ["bridge"]
        allowed.add("museum")
        assert len(retriever.retrieve("the bridge, the museum")) == 2

    def test_asynchronously_the_loop_goes_on(self) -> None:
        gate = threading.Event()

        class Slow(BM25Retriever):
            def retrieve(
                self, questions: Sequence[str], k: int, *, allowed: Container[str] | None = None
            ) -> list[list[Hit]]:
                assert gate.wait(timeout=20), "the event loop was blocked"
                return super().retrieve(questions, k, allowed=allowed)

        slow = Slow()
        slow.add([Document("d", "storm")])

        async def ask() -> list[list[NodeWithScore]]:
            waiting = asyncio.gather(*(MACRetriever(slow).aretrieve("storm") for _ in range(4)))
            await asyncio.sleep(0.01)
            gate.set()
            return await waiting

        assert [[n.node.node_id for n in nodes] for nodes in asyncio.run(ask())] == [["d"]] * 4

    def test_bad_numbers_are_refused(self, bm25: BM25Retriever) -> None:
        with pytest.raises(ConfigError, match="at least 1, got 0"):
            MACRetriever(bm25, similarity_top_k=0)


class TestTheirsForUs:
    def test_an_index_is_searched_and_follows(self) -> None:
        index = VectorStoreIndex([], embed_model=HashEmbedding())
        retriever = LlamaIndexRetriever(index)
        retriever.add([Document(name, text, {"title": name}) for name, text in FACTS.items()])
        assert len(retriever) == 3
        [hits] = retriever.retrieve(["bridge of Norrland"], 3)
        assert (hits[0].document_id, hits[0].text, hits[0].metadata["title"]) == ("bridge", FACTS["bridge"], "bridge")
        assert len(hits) == 3
        user = index.as_retriever(similarity_top_k=1)
        assert len(LlamaIndexRetriever(user).retrieve(["bridge"], 3)[0]) == 3
        assert user.similarity_top_k == 1
        retriever.delete("bridge")
        assert "bridge" not in retriever
        assert "bridge" not in index.ref_doc_info
        assert {hit.document_id for hit in retriever.retrieve(["bridge of Norrland"], 3)[0]} == {"museum", "river"}

    def test_parts_of_a_document_are_one_hit_and_filtered_ones_make_room(self) -> None:
        splitter = SentenceSplitter(chunk_size=40, chunk_overlap=0)
        long = IndexDocument(id_="long", text="Anna Berg opened the bridge of Norrland in May. " * 30)
        others = [IndexDocument(id_=f"o{i}", text=f"The bridge is number {i}.") for i in range(9)]
        index = VectorStoreIndex.from_documents(
            [long, *others], embed_model=HashEmbedding(), transformations=[splitter]
        )
        retriever = LlamaIndexRetriever(index)
        [hits] = retriever.retrieve(["Anna Berg opened the bridge of Norrland"], 4)
        assert hits[0].document_id == "long"
        assert len({hit.document_id for hit in hits}) == len(hits) == 4
        [hits] = retriever.retrieve(["Anna Berg opened the bridge of Norrland"], 4, allowed={"o1", "o5", "o7"})
        assert {hit.document_id for hit in hits} == {"o1", "o5", "o7"}

    @settings(max_examples=25, deadline=None)
    @given(
        texts=st.lists(st.lists(WORDS, min_size=1, max_size=12).map(" ".join), min_size=1, max_size=12),
        data=st.data(),
        k=st.integers(1, 13),
    )
    def test_what_is_not_allowed_leaves_no_trace(self, texts: list[str], data: st.DataObject, k: int) -> None:
        """Equal scores and parts of documents included: few words make many of them."""
        everything = [Document(f"d{i}", text) for i, text in enumerate(texts)]
        allowed = data.draw(st.sets(st.sampled_from([document.id for document in everything])))
        retriever, fresh = (
            LlamaIndexRetriever(VectorStoreIndex([], embed_model=HashEmbedding(), transformations=[halves]))
            for _ in range(2)
        )
        retriever.add(everything)
        fresh.add([document for document in everything if document.id in allowed])
        for name in data.draw(st.sets(st.sampled_from([document.id for document in everything]))):
            retriever.delete(name)
            if name in allowed:
                fresh.delete(name)
        questions = ["storm", "storm river", "ferry bridge storm"]
        assert retriever.retrieve(questions, k, allowed=allowed) == fresh.retrieve(questions, k)

    def test_equal_scores_beyond_the_number_of_nodes_asked_for_rank_by_id(self) -> None:
        """LlamaIndex keeps any of them, by its random ids of nodes."""
        retriever = LlamaIndexRetriever(VectorStoreIndex([], embed_model=HashEmbedding()))
        retriever.add([Document(f"d{number:02}", "storm") for number in range(20)])
        for allowed, expected in ((None, ["d00", "d01", "d02"]), ({"d19", "d07", "d11", "d12"}, ["d07", "d11", "d12"])):
            [hits] = retriever.retrieve(["storm"], 3, allowed=allowed)
            assert [hit.document_id for hit in hits] == expected

    def test_ranks_that_depend_on_hidden_documents_are_refused(self, index: VectorStoreIndex) -> None:
        fused = QueryFusionRetriever([index.as_retriever()], num_queries=1, llm=MockLLM(), use_async=False)
        for source, options in ((fused, {}), (index, {"vector_store_query_mode": "mmr"})):
            retriever = LlamaIndexRetriever(source, **options)
            assert retriever.retrieve(["museum"], 1)[0]
            with pytest.raises(ConfigError, match=r"cannot be restricted .* build on a VectorStoreIndex"):
                retriever.retrieve(["museum"], 1, allowed={"museum"})

    def test_a_score_that_is_no_number_names_its_document(self) -> None:
        class Broken(HashEmbedding):
            def _get_text_embedding(self, text: str) -> list[float]:
                return [float("nan")] * 64 if "bad" in text else super()._get_text_embedding(text)

        retriever = LlamaIndexRetriever(VectorStoreIndex([], embed_model=Broken()))
        retriever.add([Document("good", "storm"), Document("ill", "bad storm")])
        with pytest.raises(DocumentError, match="a node of document 'ill' has NaN as its score"):
            retriever.retrieve(["storm"], 2)
        assert [hit.document_id for hit in retriever.retrieve(["storm"], 2, allowed={"good"})[0]] == ["good"]

    def test_duplicate_and_unknown_ids(self, index: VectorStoreIndex) -> None:
        retriever = LlamaIndexRetriever(index)
        with pytest.raises(BankError, match="'museum' is already in the index"):
            retriever.add([Document("new", "x"), Document("museum", "y")])
        with pytest.raises(BankError, match="'twin' is already in the index, or comes twice"):
            retriever.add([Document("twin", "x"), Document("twin", "y")])
        with pytest.raises(BankError, match="no document 'nobody' in this index of 3"):
            retriever.delete("nobody")
        assert len(retriever) == 3

    def test_one_that_fails_while_adding_adds_nothing(self) -> None:
        class Failing(HashEmbedding):
            def _get_text_embedding(self, text: str) -> list[float]:
                if "bad" in text:
                    raise OSError("the embedding server is gone")
                return super()._get_text_embedding(text)

        index = VectorStoreIndex([], embed_model=Failing())
        retriever = LlamaIndexRetriever(index)
        with pytest.raises(OSError, match="server is gone"):
            retriever.add([Document("good", "good"), Document("bad", "bad")])
        assert len(retriever) == 0
        assert retriever.retrieve(["good"], 2) == [[]]

    def test_one_that_is_only_read(self) -> None:
        retriever = make_retriever(f"{__name__}:FIXED")
        assert retriever is not None
        assert [(hit.document_id, hit.score) for hit in retriever.retrieve(["?"], 2)[0]] == [
            ("bridge", 0.0),
            ("museum", 0.0),
        ]
        with pytest.raises(ConfigError, match=r"Fixed cannot be restricted to allowed .* build on a VectorStoreIndex"):
            retriever.retrieve(["?"], 2, allowed={"river"})
        for act in (
            lambda: retriever.add([Document("d", "x")]),
            lambda: retriever.delete("bridge"),
            lambda: len(retriever),
        ):
            with pytest.raises(
                ConfigError, match=r"Fixed, which is only read; build on .* LlamaIndexRetriever\(index\)"
            ):
                act()

    def test_a_vector_store_that_does_not_tell_its_documents_is_named(self) -> None:
        class Mute(VectorStoreIndex):
            @property
            def ref_doc_info(self):  # type: ignore[no-untyped-def]
                raise NotImplementedError

        with pytest.raises(ConfigError, match="takes no options mode"):
            LlamaIndexRetriever(FIXED, mode="hybrid")
        index = Mute([], embed_model=HashEmbedding())
        with pytest.raises(ConfigError, match="store_nodes_override=True"):
            LlamaIndexRetriever(index).add([Document("d", "x")])


def test_without_llama_index_a_foreign_object_is_still_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llama_index.core.retrievers", None)
    with pytest.raises(ConfigError, match="neither a mac_rag Retriever nor a LlamaIndex retriever"):
        make_retriever("mac_rag.retrieval:RETRIEVERS")
