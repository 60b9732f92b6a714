"""MACNodePostprocessor tells, ranks and adds nodes by the memory bank's attention."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import chromadb
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from llama_index.core import Document, MockEmbedding, StorageContext, VectorStoreIndex
from llama_index.core.callbacks import CallbackManager, CBEventType, LlamaDebugHandler
from llama_index.core.node_parser import SentenceSplitter
from llama_index.core.schema import MetadataMode, NodeWithScore, TextNode
from llama_index.core.storage.docstore import SimpleDocumentStore
from llama_index.core.vector_stores import SimpleVectorStore
from llama_index.core.vector_stores.types import MetadataFilter, MetadataFilters
from llama_index.vector_stores.chroma import ChromaVectorStore

from mac_rag.data.types import Document as MACDocument
from mac_rag.errors import ConfigError, MACError
from mac_rag.integrations.llama_index import MACLLM, MACNodePostprocessor, MemoryWriter
from tests.integrations.helpers import FACTS, QUESTION, EventLog, HashEmbedding, RecordingEngine, scored


@pytest.fixture
def remembering(engine: RecordingEngine, documents: list[Document]) -> RecordingEngine:
    MemoryWriter(engine)(documents)
    return engine


def masses(engine: RecordingEngine, question: str = QUESTION) -> dict[str, float]:
    ids, mass = engine.document_attention([question])
    return dict(zip(ids, mass[0].tolist()))


def by_mass(engine: RecordingEngine) -> list[str]:
    known = masses(engine)
    return sorted(known, key=known.__getitem__, reverse=True)


class TestAnnotate:
    def test_order_and_scores_stay(self, remembering: RecordingEngine) -> None:
        nodes = scored("unknown", *FACTS, score=None)
        told = MACNodePostprocessor(remembering, mode="annotate").postprocess_nodes(nodes, query_str=QUESTION)
        assert [(node.node_id, node.score) for node in told] == [(node.node_id, None) for node in nodes]
        assert {node.node_id: node.metadata.get("mac_attention") for node in told} == {
            "unknown": None,
            **masses(remembering),
        }

    def test_marks_are_shown_to_neither_llm_nor_embedding(self, remembering: RecordingEngine) -> None:
        nodes = scored("unknown", "bridge")
        told = MACNodePostprocessor(remembering, mode="annotate").postprocess_nodes(nodes, query_str=QUESTION)
        assert told[0].metadata == {"mac_in_memory": False}
        assert set(told[1].metadata) == {"mac_attention"}
        for mode in (MetadataMode.LLM, MetadataMode.EMBED):
            assert [node.get_content(mode) for node in told] == [node.get_content(mode) for node in nodes]
        assert [node.metadata for node in nodes] == [{}, {}]

    def test_filters_take_attention_away(self, engine: RecordingEngine) -> None:
        MemoryWriter(engine)([Document(id_=n, text=t, metadata={"of": n}) for n, t in FACTS.items()])
        only = MetadataFilters(filters=[MetadataFilter(key="of", value="river")])
        none = MetadataFilters(filters=[MetadataFilter(key="of", value="sea")])
        told = MACNodePostprocessor(engine, mode="annotate", filters=only).postprocess_nodes(
            scored(*FACTS), query_str=QUESTION
        )
        assert [node.metadata.get("mac_attention") for node in told] == [None, None, pytest.approx(1.0)]
        told = MACNodePostprocessor(engine, filters=none).postprocess_nodes(scored(*FACTS), query_str=QUESTION)
        assert [node.node_id for node in told] == list(FACTS)


class TestRerank:
    @settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(
        found=st.lists(
            st.tuples(st.sampled_from([*FACTS, "unknown", "stranger"]), st.sampled_from([None, 0.1, 0.5, 0.9])),
            max_size=8,
        ),
        top_n=st.none() | st.integers(1, 10),
        weight=st.sampled_from([0.0, 0.3, 0.5, 1.0]),
    )
    def test_scores_are_fused_ranks(
        self, remembering: RecordingEngine, found: list[tuple[str, float | None]], top_n: int | None, weight: float
    ) -> None:
        nodes = [
            NodeWithScore(node=TextNode(id_=name, text=name, metadata={"place": place}), score=score)
            for place, (name, score) in enumerate(found)
        ]
        rank = MACNodePostprocessor(remembering, top_n=top_n, fusion_weight=weight)
        ranked = rank.postprocess_nodes(nodes, query_str=QUESTION)
        known, unscored = masses(remembering), any(score is None for _, score in found)
        expected = []
        for place, (name, score) in enumerate(found):
            fused = 0.0
            if name in known:
                fused += weight / (61 + sum(known.get(other, 0.0) > known[name] for other, _ in found))
            better = place if unscored else sum(other > score for _, other in found)  # type: ignore[operator]
            fused += (1 - weight) / (61 + better)
            expected.append((fused, place))
        expected.sort(key=lambda pair: (-round(pair[0], 12), pair[1]))
        assert [node.node.metadata["place"] for node in ranked] == [place for _, place in expected][:top_n]
        assert [node.score for node in ranked] == pytest.approx([score for score, _ in expected][:top_n])

    def test_parts_take_the_mass_of_their_document(self, remembering: RecordingEngine) -> None:
        splitter = SentenceSplitter(chunk_size=16, chunk_overlap=0)
        parts = splitter([Document(id_="bridge", text=" ".join([FACTS["bridge"]] * 4))])
        assert len(parts) > 1
        nodes = [NodeWithScore(node=part, score=0.1) for part in parts]
        ranked = MACNodePostprocessor(remembering).postprocess_nodes(nodes, query_str=QUESTION)
        assert [node.node_id for node in ranked] == [part.node_id for part in parts]
        assert {node.metadata["mac_attention"] for node in ranked} == {masses(remembering)["bridge"]}

    def test_it_ranks_what_an_index_retrieves(self, documents: list[Document], remembering: RecordingEngine) -> None:
        """An embedding that tells nothing leaves the order to memory."""
        index = VectorStoreIndex.from_documents(documents, embed_model=MockEmbedding(embed_dim=8))
        queries = index.as_query_engine(
            llm=MACLLM(engine=remembering), similarity_top_k=3, node_postprocessors=[MACNodePostprocessor(remembering)]
        )
        for response in (queries.query(QUESTION), asyncio.run(queries.aquery(QUESTION))):
            assert [node.node.ref_doc_id for node in response.source_nodes] == by_mass(remembering)


class TestExpand:
    @pytest.mark.parametrize("kind", ["index", "docstore", "documents", "chroma"])
    def test_missed_nodes_are_added(self, kind: str, documents: list[Document], remembering: RecordingEngine) -> None:
        store = SimpleVectorStore()
        if kind == "chroma":
            collection = chromadb.EphemeralClient().create_collection("expand", get_or_create=True)
            store = ChromaVectorStore(chroma_collection=collection)
        index = VectorStoreIndex.from_documents(
            documents, embed_model=HashEmbedding(), storage_context=StorageContext.from_defaults(vector_store=store)
        )
        whole = SimpleDocumentStore()  # as an ingestion pipeline keeps it
        whole.add_documents(documents)
        source = {"docstore": index.docstore, "documents": whole}.get(kind, index)
        expand = MACNodePostprocessor(remembering, mode="expand", expand_to=2, source=source)
        first, second, third = by_mass(remembering)
        nodes = expand.postprocess_nodes(scored(third, second), query_str=QUESTION)
        assert [node.node.ref_doc_id or node.node_id for node in nodes] == [third, second, first]
        assert [node.score for node in nodes] == [0.5, 0.5, masses(remembering)[first]]
        assert [node.metadata.get("mac_found_by") for node in nodes] == [None, None, "memory"]
        assert nodes[2].node.get_content(MetadataMode.LLM) == FACTS[first]
        nodes = expand.postprocess_nodes([], query_str=QUESTION)
        assert [node.node.ref_doc_id or node.node_id for node in nodes] == [first, second]

    def test_all_parts_of_a_document_come_in_order(self, remembering: RecordingEngine) -> None:
        text = " ".join(f"Part {i} of the news. " for i in range(20))
        remembering.adapt([MACDocument("long", text)])
        splitter = SentenceSplitter(chunk_size=16, chunk_overlap=0)
        index = VectorStoreIndex.from_documents(
            [Document(id_="long", text=text)], embed_model=HashEmbedding(), transformations=[splitter]
        )
        expand = MACNodePostprocessor(remembering, mode="expand", expand_to=4, source=index)
        nodes = expand.postprocess_nodes(scored(*FACTS), query_str=QUESTION)[3:]
        assert len(nodes) > 1
        assert " ".join(node.text for node in nodes).split() == text.split()

    def test_filtered_documents_are_not_brought_in(self, engine: RecordingEngine) -> None:
        owned = [Document(id_=n, text=t, metadata={"of": n}) for n, t in FACTS.items()]
        index = VectorStoreIndex.from_documents(
            owned, transformations=[MemoryWriter(engine)], embed_model=HashEmbedding()
        )
        for allowed, expected in (["river"], ["river"]), (["sea"], []):
            filters = MetadataFilters(filters=[MetadataFilter(key="of", value=allowed, operator="in")])
            expand = MACNodePostprocessor(engine, mode="expand", source=index, filters=filters)
            assert [n.metadata["of"] for n in expand.postprocess_nodes([], query_str=QUESTION)] == expected

    def test_a_missing_node_is_logged(self, remembering: RecordingEngine, caplog: pytest.LogCaptureFixture) -> None:
        expand = MACNodePostprocessor(remembering, mode="expand", expand_to=1, source=SimpleDocumentStore())
        with caplog.at_level(logging.WARNING):
            assert expand.postprocess_nodes([], query_str=QUESTION) == []
        assert "is in the memory bank, but SimpleDocumentStore has no nodes of it" in caplog.text

    def test_a_source_belongs_to_this_mode(self, index: VectorStoreIndex, remembering: RecordingEngine) -> None:
        with pytest.raises(ConfigError, match="'expand' needs a source"):
            MACNodePostprocessor(remembering, mode="expand")
        with pytest.raises(ConfigError, match="'rerank' takes no source"):
            MACNodePostprocessor(remembering, source=index)

    def test_a_vector_store_that_does_not_give_nodes_out_is_named(self, remembering: RecordingEngine) -> None:
        class Closed(SimpleVectorStore):
            stores_text: bool = True

        index = VectorStoreIndex.from_vector_store(Closed(), embed_model=HashEmbedding())
        expand = MACNodePostprocessor(remembering, mode="expand", source=index)
        with pytest.raises(ConfigError, match=r"Closed cannot return the nodes.*store_nodes_override=True"):
            expand.postprocess_nodes([], query_str=QUESTION)


def test_ranking_is_announced(remembering: RecordingEngine, event_log: EventLog) -> None:
    debug = LlamaDebugHandler(print_trace_on_end=False)
    rank = MACNodePostprocessor(remembering, callback_manager=CallbackManager([debug]))
    rank.postprocess_nodes(scored(*FACTS), query_str=QUESTION)
    assert event_log.names() == ["ReRankStartEvent", "ReRankEndEvent"]
    assert len(debug.get_event_pairs(CBEventType.RERANKING)) == 1


def test_copies_and_dictionaries(remembering: RecordingEngine, index: VectorStoreIndex) -> None:
    expand = MACNodePostprocessor(remembering, mode="expand", expand_to=1, source=index, fusion_weight=0.25)
    again = MACNodePostprocessor.from_dict(expand.to_dict(), engine=remembering, source=index)
    for same in (expand.model_copy(), again):
        assert same.fusion_weight == 0.25
        nodes = same.postprocess_nodes([], query_str=QUESTION)
        assert [node.node.ref_doc_id for node in nodes] == by_mass(remembering)[:1]


def test_what_ranking_cannot_do_is_an_error(remembering: RecordingEngine) -> None:
    rank = MACNodePostprocessor(remembering)
    assert rank.postprocess_nodes([], query_str=QUESTION) == []
    with pytest.raises(MACError, match="query_bundle or query_str"):
        rank.postprocess_nodes(scored("bridge"))
    with pytest.raises(ValueError, match="top_n"):
        MACNodePostprocessor(remembering, top_n=0)
    with pytest.raises(ValueError, match="fusion_weight"):
        MACNodePostprocessor(remembering, fusion_weight=1.5)


@pytest.mark.parametrize("mode", ["rerank", "annotate", "expand"])
def test_nodes_pass_unchanged_before_the_bank_is_filled(
    engine: RecordingEngine, index: VectorStoreIndex, caplog: pytest.LogCaptureFixture, mode: Any
) -> None:
    rank = MACNodePostprocessor(engine, mode=mode, source=index if mode == "expand" else None)
    nodes = scored("river", "bridge", "museum")
    before = [scored.model_dump() for scored in nodes]
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            passed = rank.postprocess_nodes(nodes, query_str=QUESTION)
        assert asyncio.run(rank.apostprocess_nodes(nodes, query_str=QUESTION)) == passed
    assert [scored.model_dump() for scored in passed] == before
    assert caplog.text.count("MemoryWriter.from_index") == 1
    first = MACNodePostprocessor(engine, top_n=1).postprocess_nodes(nodes, query_str=QUESTION)
    assert [scored.node.node_id for scored in first] == ["river"]


def test_nodes_the_bank_lacks_are_reported_once(remembering: RecordingEngine, caplog: pytest.LogCaptureFixture) -> None:
    rank = MACNodePostprocessor(remembering)
    with caplog.at_level(logging.WARNING):
        rank.postprocess_nodes(scored("bridge", "unknown"), query_str=QUESTION)
        assert not caplog.records
        for _ in range(2):
            rank.postprocess_nodes(scored("unknown", "unknown too"), query_str=QUESTION)
    assert caplog.text.count("holds none of the 2 nodes") == 1
