"""MemoryWriter fills a bank in ingestion pipelines or from what an application has indexed; a lost bank is noticed."""

from __future__ import annotations

import asyncio
import copy
import logging
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import chromadb
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from llama_index.core import Document, StorageContext, SummaryIndex, TreeIndex, VectorStoreIndex
from llama_index.core.ingestion import DocstoreStrategy, IngestionPipeline
from llama_index.core.ingestion.pipeline import get_transformation_hash
from llama_index.core.llms import MockLLM
from llama_index.core.node_parser import SentenceSplitter
from llama_index.core.schema import ImageNode, MetadataMode, TextNode, TransformComponent
from llama_index.core.storage.docstore import SimpleDocumentStore
from llama_index.core.vector_stores import SimpleVectorStore
from llama_index.vector_stores.chroma import ChromaVectorStore

from mac_rag.bank.bank import MemoryBank
from mac_rag.errors import BankError, ConfigError, MACError
from mac_rag.integrations.llama_index import MACVectorStore, MemoryWriter
from mac_rag.integrations.llama_index.writer import documents_in
from mac_rag.model import MACModel
from tests.integrations.helpers import FACTS, QUESTION, HashEmbedding, RecordingEngine, facts, forget_warnings


@pytest.fixture
def collection() -> Any:
    client = chromadb.EphemeralClient()
    if "existing" in [collection.name for collection in client.list_collections()]:
        client.delete_collection("existing")
    return client.create_collection("existing")


def indexed(collection: Any) -> ChromaVectorStore:
    """A vector store in Chroma that holds the facts."""
    store = ChromaVectorStore(chroma_collection=collection)
    storage = StorageContext.from_defaults(vector_store=store)
    VectorStoreIndex.from_documents(facts(), storage_context=storage, embed_model=HashEmbedding())
    return store


def plain(collection: Any) -> Any:
    """A collection that another program than LlamaIndex has filled."""
    collection.add(
        ids=list(FACTS),
        documents=list(FACTS.values()),
        metadatas=[{"name": name} for name in FACTS],
        embeddings=[[1.0, 0.0]] * len(FACTS),
    )
    return collection


def from_store(collection: Any) -> VectorStoreIndex:
    return VectorStoreIndex.from_vector_store(indexed(collection), embed_model=HashEmbedding())


SOURCES: dict[str, Callable[[Any], Any]] = {
    "vector index": lambda _: VectorStoreIndex.from_documents(facts(), embed_model=HashEmbedding()),
    "summary index": lambda _: SummaryIndex.from_documents(facts()),
    "tree index": lambda _: TreeIndex.from_documents(facts(), build_tree=False, llm=MockLLM()),
    "docstore": lambda _: VectorStoreIndex.from_documents(facts(), embed_model=HashEmbedding()).docstore,
    "index in Chroma": from_store,
    "Chroma vector store": indexed,
    "collection of LlamaIndex": lambda collection: indexed(collection).client,
    "collection of another program": plain,
}


@pytest.mark.parametrize("name", SOURCES)
def test_every_source_fills_a_bank(tiny_model: MACModel, engine: RecordingEngine, collection: Any, name: str) -> None:
    source = SOURCES[name](collection)
    expected = RecordingEngine(tiny_model)
    MemoryWriter(expected)(facts())
    writer = MemoryWriter.from_index(source, engine)
    assert writer.engine is engine
    filled, written = ({entry.document_id: entry for entry in each.bank} for each in (engine, expected))
    assert filled.keys() == written.keys()
    for document_id, entry in filled.items():
        now = entry.members[0].added  # a second may have passed
        assert entry.members == tuple(replace(member, added=now) for member in written[document_id].members)
        torch.testing.assert_close(entry.phi, written[document_id].phi)
    again = engine.adapt(documents_in(source))
    assert (again.rows, again.unchanged) == (0, len(FACTS))


def test_documents_of_the_bank_alone_stay(engine: RecordingEngine) -> None:
    MemoryWriter(engine)([Document(id_="other", text="Another fact.")])
    MemoryWriter.from_index(SummaryIndex.from_documents(facts()), engine)
    assert set(engine.bank.document_ids) == {"other", *FACTS}


def test_only_the_nodes_of_the_index_are_read_from_a_shared_docstore(engine: RecordingEngine) -> None:
    storage = StorageContext.from_defaults()
    SummaryIndex.from_documents(facts()[:1], storage_context=storage)
    second = SummaryIndex.from_documents(facts()[1:], storage_context=storage)
    MemoryWriter.from_index(second, engine)
    assert set(engine.bank.document_ids) == set(list(FACTS)[1:])


SENTENCES = st.lists(st.sampled_from([*FACTS.values(), "Rain fell.", "It was cold, and nobody came.\n\n"]), min_size=1)


@settings(max_examples=40, deadline=None)
@given(SENTENCES, st.integers(0, 20), st.booleans())
def test_parts_make_the_document_again(sentences: list[str], overlap: int, is_mixed: bool) -> None:
    text = " ".join(f"{number}. {sentence}" for number, sentence in enumerate(sentences))
    nodes = SentenceSplitter(chunk_size=40, chunk_overlap=overlap)([Document(id_="news", text=text)])
    [document] = documents_in(SummaryIndex(nodes[::-1] if is_mixed else nodes))
    assert document.id == "news"
    assert document.text.split() == text.split()


def test_parts_without_positions_are_joined_in_their_order() -> None:
    nodes = SentenceSplitter(chunk_size=24, chunk_overlap=0)([Document(id_="news", text=" ".join(FACTS.values()))])
    for node in nodes:
        assert isinstance(node, TextNode)
        node.start_char_idx = None
    [document] = documents_in(SummaryIndex(nodes))
    assert document.text.split() == " ".join(FACTS.values()).split()


def test_nodes_without_text_are_left_out(engine: RecordingEngine, caplog: pytest.LogCaptureFixture) -> None:
    index = SummaryIndex([TextNode(id_="fact", text="A fact."), ImageNode(id_="image"), TextNode(id_="page", text=" ")])
    with caplog.at_level(logging.WARNING):
        MemoryWriter.from_index(index, engine)
    assert engine.bank.document_ids == ["fact"]
    assert "2 documents without text were left out, such as 'image'" in caplog.text


def test_sources_that_give_nothing_out_are_named(engine: RecordingEngine) -> None:
    with pytest.raises(ConfigError, match="SimpleVectorStore"):
        MemoryWriter.from_index(SimpleVectorStore(), engine)
    with pytest.raises(ConfigError, match="list is not a source"):
        MemoryWriter.from_index(facts(), engine)


# -- a lost bank --


def pipeline(engine: RecordingEngine, docstore: SimpleDocumentStore, **options: Any) -> IngestionPipeline:
    return IngestionPipeline(
        transformations=[MemoryWriter(engine), HashEmbedding()],
        docstore=docstore,
        vector_store=SimpleVectorStore(),
        **options,
    )


@pytest.mark.parametrize("strategy", [DocstoreStrategy.UPSERTS, DocstoreStrategy.DUPLICATES_ONLY])
@pytest.mark.parametrize("use_async", [False, True])
def test_pipelines_notice_a_lost_bank(tiny_model: MACModel, strategy: DocstoreStrategy, use_async: bool) -> None:
    docstore = SimpleDocumentStore()

    def run(engine: RecordingEngine, documents: list[Document]) -> None:
        made = pipeline(engine, docstore, docstore_strategy=strategy)
        if use_async:
            asyncio.run(made.arun(documents=documents))
        else:
            made.run(documents=documents)

    run(RecordingEngine(tiny_model), facts())
    engine = RecordingEngine(tiny_model)  # the bank of before is lost
    more = [*facts(), Document(id_="new", text="Something new.")]
    for documents in (facts(), more):
        with pytest.raises(BankError, match=r"docstore knows . documents.*MemoryWriter.from_index"):
            run(engine, documents)
        assert not len(engine.bank)
    MemoryWriter.from_index(docstore, engine)
    run(engine, more)
    assert set(engine.bank.document_ids) >= set(FACTS)
    if strategy == DocstoreStrategy.UPSERTS:
        assert "new" in engine.bank


def test_an_empty_bank_beside_an_empty_docstore_is_nothing_to_notice(engine: RecordingEngine) -> None:
    docstore = SimpleDocumentStore()
    vector_store = MACVectorStore(SimpleVectorStore(), engine)
    made = IngestionPipeline(
        transformations=[MemoryWriter(engine), HashEmbedding()],
        docstore=docstore,
        vector_store=vector_store,
        docstore_strategy=DocstoreStrategy.UPSERTS_AND_DELETE,
    )
    made.run(documents=facts())
    made.run(documents=[])  # everything is deleted
    assert not len(engine.bank)
    made.run(documents=facts())
    assert set(engine.bank.document_ids) == set(FACTS)


def test_a_pipeline_that_failed_leaves_no_docstore_behind(engine: RecordingEngine, tiny_model: MACModel) -> None:
    docstore = SimpleDocumentStore()
    pipeline(RecordingEngine(tiny_model), docstore).run(documents=facts())
    with pytest.raises(BankError):
        pipeline(engine, docstore).run(documents=facts())
    MemoryWriter(engine)(facts())  # in no pipeline
    assert len(engine.bank) == len(FACTS)


@pytest.mark.parametrize("use_async", [False, True])
def test_a_vector_store_without_its_bank_is_noticed_once(
    engine: RecordingEngine, collection: Any, caplog: pytest.LogCaptureFixture, use_async: bool
) -> None:
    store = MACVectorStore(indexed(collection), engine)
    retriever = VectorStoreIndex.from_vector_store(store, embed_model=HashEmbedding()).as_retriever()
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            found = asyncio.run(retriever.aretrieve(QUESTION)) if use_async else retriever.retrieve(QUESTION)
            assert found
        assert caplog.text.count("MemoryWriter.from_index") == 1
        forget_warnings()
        MemoryWriter.from_index(store, engine)
        retriever.retrieve(QUESTION)
        assert caplog.text.count("MemoryWriter.from_index") == 1


# -- MemoryWriter --


class CountingEngine(RecordingEngine):
    """Notes how many rows of memory tokens each call of `adapt` writes."""

    def adapt(self, documents, **options):  # type: ignore[no-untyped-def]
        report = super().adapt(documents, **options)
        self.written = [*getattr(self, "written", []), report.rows]
        return report


@pytest.fixture
def counting(tiny_model: MACModel) -> CountingEngine:
    return CountingEngine(tiny_model)


def test_a_pipeline_fills_the_bank_and_hands_nodes_on(engine: RecordingEngine) -> None:
    documents = [Document(id_="bridge", text=FACTS["bridge"], metadata={"date": "3 May 2004"})]
    nodes = IngestionPipeline(transformations=[MemoryWriter(engine), HashEmbedding()]).run(documents=documents)
    assert [(node.node_id, node.get_content(MetadataMode.NONE)) for node in nodes] == [("bridge", FACTS["bridge"])]
    assert nodes[0].embedding is not None
    (entry,) = engine.bank
    assert (entry.document_id, entry.metadata) == ("bridge", {"date": "3 May 2004"})
    expected = engine.model.amortize([FACTS["bridge"]])
    torch.testing.assert_close(entry.phi, expected.cpu(), rtol=2**-7, atol=1e-5)  # it is kept in bf16


def test_only_changed_documents_are_adapted(counting: CountingEngine) -> None:
    pipeline = IngestionPipeline(transformations=[MemoryWriter(counting)])
    pipeline.run(documents=facts())
    before = {entry.document_id: entry.phi for entry in counting.bank}
    for _ in range(3):
        pipeline.run(documents=facts())
    assert counting.written == [3, 0]  # from then on, they come from the cache
    pipeline.run(documents=facts(museum="The museum of Sola is closed."))
    assert sum(counting.written) == 4
    after = {entry.document_id: entry.phi for entry in counting.bank}
    assert {name for name in FACTS if not torch.equal(before[name], after[name])} == {"museum"}


def test_the_cache_never_hides_that_the_bank_lacks_something(counting: CountingEngine, tmp_path: Path) -> None:
    pipeline = IngestionPipeline(transformations=[MemoryWriter(counting)])
    for _ in range(3):
        pipeline.run(documents=facts())
    counting.forget("museum")
    pipeline.run(documents=facts())
    assert sorted(counting.bank.document_ids) == sorted(FACTS)
    pipeline.persist(str(tmp_path))
    counting.bank = MemoryBank(counting.model.fingerprint)
    reloaded = IngestionPipeline(transformations=[MemoryWriter(counting)])
    reloaded.load(str(tmp_path))
    reloaded.run(documents=facts())
    assert sorted(counting.bank.document_ids) == sorted(FACTS)


@pytest.mark.parametrize("model", ["tiny_model", "other_model"])
def test_two_banks_can_share_a_cache(engine: RecordingEngine, model: str, request: pytest.FixtureRequest) -> None:
    other = RecordingEngine(request.getfixturevalue(model))
    first, second = MemoryWriter(engine), MemoryWriter(other)
    assert first.to_dict()["fingerprint"] == engine.model.fingerprint
    assert get_transformation_hash(facts(), first) != get_transformation_hash(facts(), second)
    IngestionPipeline(transformations=[first, second]).run(documents=facts())
    assert len(engine.bank) == len(other.bank) == len(FACTS)


def test_asynchronous_pipelines_leave_the_event_loop_free(tiny_model: MACModel) -> None:
    class SlowEngine(RecordingEngine):
        def adapt(self, documents, **options):  # type: ignore[no-untyped-def]
            self.asked.append(("adapt", None))
            assert self.gate.wait(timeout=20), "the event loop was blocked"
            return super().adapt(documents, **options)

    engine = SlowEngine(tiny_model)

    async def held_up() -> None:
        engine.gate.clear()
        run = IngestionPipeline(transformations=[MemoryWriter(engine)]).arun(documents=facts())
        task = asyncio.create_task(run)
        while not engine.asked:
            await asyncio.sleep(0.001)
        engine.gate.set()
        await task

    asyncio.run(held_up())
    assert len(engine.bank) == len(FACTS)


def test_parts_of_a_document_are_refused(engine: RecordingEngine) -> None:
    splitter = SentenceSplitter(chunk_size=24, chunk_overlap=0)
    parts = splitter([Document(id_="news", text=" ".join(FACTS.values()))])
    assert len(parts) > 1
    with pytest.raises(BankError, match=r"'news'.*before the splitter"):
        MemoryWriter(engine)(parts)
    assert len(engine.bank) == 0


def test_one_part_stands_for_its_document(engine: RecordingEngine) -> None:
    (part,) = SentenceSplitter()([Document(id_="bridge", text=FACTS["bridge"])])
    MemoryWriter(engine)([part])
    assert engine.bank.document_ids == ["bridge"]


BAD = [
    Document(id_="blank", text="  \n"),
    Document(id_="invisible", text="\u200b\u00ad"),
    Document(id_="half", text="A storm \ud83d."),
    Document(id_="nul", text="A storm\0."),
    Document(id_="two ways", text="A storm.", metadata={"date": "03/04/2004"}),
    Document(id_="bytes", text="A storm.", metadata={"raw": b"x"}),
]


@pytest.mark.parametrize("bad", BAD, ids=lambda document: document.id_)
def test_a_bad_document_is_left_out_and_loses_no_other(
    engine: RecordingEngine, caplog: pytest.LogCaptureFixture, bad: Document
) -> None:
    first, *others = facts()
    with caplog.at_level(logging.WARNING):
        nodes = MemoryWriter(engine)([first, bad, *others])
    assert engine.bank.document_ids == list(FACTS)
    assert f"'{bad.id_}'" in caplog.text
    assert len(nodes) == len(FACTS) + 1


def test_an_index_with_bad_documents_fills_a_bank(engine: RecordingEngine, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        MemoryWriter.from_index(SummaryIndex([*facts(), *BAD[4:5]]), engine)
    assert engine.bank.document_ids == list(FACTS)
    assert "'two ways'" in caplog.text


def test_a_run_of_blank_pages_alone_is_no_lost_bank(engine: RecordingEngine) -> None:
    docstore = SimpleDocumentStore()
    for documents in ([Document(id_="blank", text=" ")], facts()):
        pipeline(engine, docstore).run(documents=documents)
    assert engine.bank.document_ids == list(FACTS)


class Failing(TransformComponent):
    """Fails once for a document of a pipeline."""

    failures: list[str] = []

    def __call__(self, nodes: Any, **options: Any) -> Any:
        if not self.failures:
            self.failures.append("once")
            raise RuntimeError("the embedding service is away")
        return nodes


@pytest.mark.parametrize("strategy", list(DocstoreStrategy))
@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("use_async", [False, True])
def test_a_failed_run_does_the_rest_when_it_is_repeated(
    engine: RecordingEngine, strategy: DocstoreStrategy, is_first: bool, use_async: bool
) -> None:
    docstore = SimpleDocumentStore()
    pipeline(engine, docstore, docstore_strategy=strategy).run(documents=facts()[:1])
    steps = [Failing(failures=[]), MemoryWriter(engine)]
    made = IngestionPipeline(
        transformations=[*(steps if is_first else steps[::-1]), HashEmbedding()],
        docstore=docstore,
        vector_store=MACVectorStore(SimpleVectorStore(), engine),
        docstore_strategy=strategy,
    )

    def run() -> Any:
        return asyncio.run(made.arun(documents=facts())) if use_async else made.run(documents=facts())

    with pytest.raises(RuntimeError, match="away"):
        run()
    assert {node.node_id for node in run()} == set(list(FACTS)[1:])
    assert sorted(engine.bank.document_ids) == sorted(FACTS)
    assert {node.node_id for node in run()} == set()


def test_twins_of_equal_text_are_separate_documents(engine: RecordingEngine) -> None:
    def run(*names: str) -> None:
        made.run(documents=[Document(id_=name, text=FACTS["bridge"]) for name in names])

    made = IngestionPipeline(transformations=[MemoryWriter(engine)])
    run("a")
    run("a")
    run("b")  # the pipeline's cache knows this text, of another document
    run("c", "d")
    assert engine.bank.document_ids == ["a", "b", "c", "d"]
    store = MACVectorStore(SimpleVectorStore(), engine)
    store.delete("b")
    assert engine.bank.document_ids == ["a", "c", "d"]
    run("a", "b")
    assert sorted(engine.bank.document_ids) == ["a", "b", "c", "d"]


def test_workers_of_their_own_are_refused(engine: RecordingEngine) -> None:
    writer = MemoryWriter(engine)
    with pytest.raises(MACError, match="num_workers"):
        pickle.dumps(writer)
    assert copy.deepcopy(writer).engine is engine
    again = MemoryWriter.from_dict(writer.to_dict(), engine=engine)
    assert again.to_dict() == writer.to_dict()
