"""MACVectorStore: what is deleted through LlamaIndex has no influence through the bank any more."""

from __future__ import annotations

import asyncio
from pathlib import Path

import chromadb
import pytest
from llama_index.core import Document, StorageContext, VectorStoreIndex, load_index_from_storage
from llama_index.core.ingestion import DocstoreStrategy, IngestionPipeline
from llama_index.core.node_parser import SentenceSplitter
from llama_index.core.storage.docstore import SimpleDocumentStore
from llama_index.core.vector_stores import SimpleVectorStore
from llama_index.core.vector_stores.types import BasePydanticVectorStore
from llama_index.vector_stores.chroma import ChromaVectorStore

from mac_rag import MACEngine, MemoryBank
from mac_rag.integrations.llama_index import MACLLM, MACRetriever, MACVectorStore, MemoryWriter
from tests.integrations.helpers import FACTS, HashEmbedding, RecordingEngine, facts


def remembered(engine: RecordingEngine) -> set[str]:
    return set(engine.bank.document_ids)


@pytest.fixture(params=["simple", "chroma"])
def inner(request: pytest.FixtureRequest) -> BasePydanticVectorStore:
    if request.param == "simple":
        return SimpleVectorStore()
    client = chromadb.EphemeralClient()
    if "deletes" in [collection.name for collection in client.list_collections()]:
        client.delete_collection("deletes")
    return ChromaVectorStore(chroma_collection=client.create_collection("deletes"))


@pytest.fixture
def kept(inner: BasePydanticVectorStore, engine: RecordingEngine) -> VectorStoreIndex:
    return VectorStoreIndex.from_documents(
        facts(),
        storage_context=StorageContext.from_defaults(vector_store=MACVectorStore(inner, engine)),
        transformations=[MemoryWriter(engine), SentenceSplitter()],
        embed_model=HashEmbedding(),
    )


def found(index: VectorStoreIndex) -> set[str | None]:
    return {scored.node.ref_doc_id for scored in index.as_retriever(similarity_top_k=9).retrieve("Who?")}


@pytest.mark.parametrize("ask", ["sync", "async"])
def test_a_deleted_document_is_forgotten(kept: VectorStoreIndex, engine: RecordingEngine, ask: str) -> None:
    assert found(kept) == remembered(engine) == set(FACTS)
    for _ in range(2):  # again, as after an interruption
        if ask == "sync":
            kept.delete_ref_doc("bridge", delete_from_docstore=True)
        else:
            asyncio.run(kept.adelete_ref_doc("bridge", delete_from_docstore=True))
    assert found(kept) == remembered(engine) == {"museum", "river"}


def test_an_updated_document_is_remembered_anew(kept: VectorStoreIndex, engine: RecordingEngine) -> None:
    old = engine.bank["river"].content_hash
    kept.update_ref_doc(Document(id_="river", text="The ferry is gone."))
    assert found(kept) == remembered(engine) == set(FACTS)
    assert engine.bank["river"].content_hash != old


def test_what_fails_in_the_store_is_forgotten_already(engine: RecordingEngine) -> None:
    class Failing(SimpleVectorStore):
        def delete(self, ref_doc_id: str, **delete_kwargs: object) -> None:
            raise OSError("the server is gone")

    MemoryWriter(engine)(facts())
    with pytest.raises(OSError, match="server is gone"):
        MACVectorStore(Failing(), engine).delete("bridge")
    assert remembered(engine) == {"museum", "river"}


@pytest.mark.parametrize("ask", ["sync", "async"])
def test_a_pipeline_forgets_what_is_gone(inner: BasePydanticVectorStore, engine: RecordingEngine, ask: str) -> None:
    pipeline = IngestionPipeline(
        transformations=[MemoryWriter(engine), HashEmbedding()],
        docstore=SimpleDocumentStore(),
        docstore_strategy=DocstoreStrategy.UPSERTS_AND_DELETE,
        vector_store=MACVectorStore(inner, engine),
    )
    pipeline.run(documents=facts())
    hashes = {name: engine.bank[name].content_hash for name in FACTS}
    left = facts(river="The ferry is gone.")[1:]
    if ask == "sync":
        pipeline.run(documents=left)
    else:
        asyncio.run(pipeline.arun(documents=left))
    assert remembered(engine) == {"museum", "river"}
    assert engine.bank["museum"].content_hash == hashes["museum"]
    assert engine.bank["river"].content_hash != hashes["river"]


def test_clearing_empties_both(kept: VectorStoreIndex, engine: RecordingEngine) -> None:
    kept.vector_store.clear()
    assert remembered(engine) == set()


def test_persisting_writes_what_the_store_itself_would(engine: RecordingEngine, tmp_path: Path) -> None:
    store = MACVectorStore(SimpleVectorStore(), engine)
    index = VectorStoreIndex.from_documents(
        facts(),
        storage_context=StorageContext.from_defaults(vector_store=store),
        transformations=[MemoryWriter(engine), SentenceSplitter()],
        embed_model=HashEmbedding(),
    )
    index.storage_context.persist(str(tmp_path))
    inner = SimpleVectorStore.from_persist_dir(str(tmp_path))
    context = StorageContext.from_defaults(persist_dir=str(tmp_path), vector_store=MACVectorStore(inner, engine))
    again = load_index_from_storage(context, embed_model=HashEmbedding())
    again.delete_ref_doc("museum")
    assert found(again) == remembered(engine) == {"bridge", "river"}  # type: ignore[arg-type]


def test_a_reopened_index_beside_an_empty_bank_warns_of_the_bank(
    engine: RecordingEngine, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    index = VectorStoreIndex.from_documents(
        facts(), transformations=[MemoryWriter(engine), SentenceSplitter()], embed_model=HashEmbedding()
    )
    index.storage_context.persist(str(tmp_path / "index"))
    again = load_index_from_storage(
        StorageContext.from_defaults(persist_dir=str(tmp_path / "index")), embed_model=HashEmbedding()
    )
    model = engine.model
    with MemoryBank.create(tmp_path / "bank", model.fingerprint) as bank:
        llm = MACLLM(engine=MACEngine(model, bank))
        again.as_query_engine(llm=llm).query("Who opened the bridge?")
        again.as_query_engine(llm=llm).query("Who opened the bridge?")
        [warning] = [record.getMessage() for record in caplog.records if "memory bank" in record.getMessage()]
        assert str(tmp_path / "bank") in warning
        assert "MemoryWriter.from_index(index, engine)" in warning
        caplog.clear()
    again.as_query_engine(llm=MACLLM(engine=MACEngine(model), use_memory=False)).query("Who opened the bridge?")
    assert not caplog.records
    assert MACRetriever(MACEngine(model), source=again).retrieve("Who opened the bridge?") == []
    assert "the memory bank in this process's memory is empty" in caplog.text
